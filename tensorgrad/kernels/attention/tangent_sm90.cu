// The tangent of attention on Hopper, and its backward. The formulas are those of
// tangent_forward_sm80.cu and tangent_backward_sm80.cu, without bias and dropout, for sequences of
// one length.
//
// One kernel for all launches, which is that of backward_sm90.cu with more operands: a warpgroup
// keeps 64 rows of two to four matrices in shared memory, and their results in registers, while
// three or four matrices of the other side stream by. The tangent is a launch with rows of queries;
// backward is one with rows of queries and one with rows of keys, two with heads of more than 64,
// as registers do not hold four sums then. Nothing but tiles of the inputs ever passes through
// shared memory.
//
// Where two matrices stream by that the same rows are multiplied with, their tiles lie side by
// side and are one operand, of twice as many columns: the rows are read once for both.
//
// Floor: 10 D operations and one exponential for each query and key that meet in the tangent, 36 D
// in backward and two exponentials, or 42 D and three with heads of more than 64.
//
// The naive kernels: those of tangent_forward_sm80.cu and tangent_backward_sm80.cu.
//
// Phases. Producer: for each tile of rows, take its number, load them, then the tiles of columns
// and their statistics. Consumers, for each tile of columns: scores and their tangents; gradients
// of the weights; mask; weights; add to the sums of v; gradients of the scores; add to the sums of
// q and k. Then: store.
//
// arch: sm_90a
// where: T = __half | __nv_bfloat16
// instantiate: attention_tangent_tiles<{T}, {64, 3, 64 | 128, 2, 64}, TANGENT>
// instantiate: attention_tangent_tiles<{T}, {64, 2, 64 | 128, 2, 32}, QUERIES>
// instantiate: attention_tangent_tiles<{T}, 64, 2, 32, BOTH>
// instantiate: attention_tangent_tiles<{T}, 128, 2, 32, {KEYS | VALUES}>
#include "attention/sm90.cuh"

// The results of a launch: the tangent; the gradients of q and tq, of k and tk, of v and tv, of the
// last four.
constexpr int TANGENT = 0, QUERIES = 1, KEYS = 2, VALUES = 3, BOTH = 4;

// Registers of a consumer's thread. Four sums need the most.
template <int W, int PART>
constexpr int CONSUMER_REGISTERS = W == 3 ? 160 : PART == BOTH ? 240 : 232;

// Rows of queries: a1, a2, a3, b1, b2, b3, x4 are q, tq, dy, k, tk, v, tv, and d1, d2 become dq,
// dtq, or d1 ty. Rows of keys: a1, a2, a3, x4, b1, b2, b3 are k, tk, v, tv, q, tq, dy, and d1, d2,
// d3, d4 become dk, dtk, dv, dtv:
//   s = a1 b1^T, ts = a2 b1^T + a1 b2^T, u = a3 b3^T, x = a3 x4^T or x4 b3^T
//   d1 = scale (d b1 + e b2), d2 = scale e b1, d3 = w (ts - mean) b3, d4 = w b3
// A gradient whose address is null is not written.
// sums: of attention_tangent_rows, (batch * heads, pitch / 32, 4, 32), in backward. logsumexp,
// means: (batch, heads, queries), y: (batch, queries, heads, width) with strides y_at, of the
// tangent alone. strides: of the results. taken: see next_tile.
template <typename T, int D, int W, int N, int PART>
__global__ void __launch_bounds__(WARPGROUP * (W + 1), 1)
attention_tangent_tiles(T* __restrict__ d1, T* __restrict__ d2, T* __restrict__ d3,
                        T* __restrict__ d4, float* __restrict__ means, const T* __restrict__ y,
                        const float* __restrict__ logsumexp, const float* __restrict__ sums,
                        unsigned* __restrict__ taken, const __grid_constant__ TensorMap a1_map,
                        const __grid_constant__ TensorMap a2_map,
                        const __grid_constant__ TensorMap a3_map,
                        const __grid_constant__ TensorMap b1_map,
                        const __grid_constant__ TensorMap b2_map,
                        const __grid_constant__ TensorMap b3_map,
                        const __grid_constant__ TensorMap x4_map,
                        const __grid_constant__ AttentionSm90Arguments p, int pitch,
                        const __grid_constant__ Strides y_at,
                        const __grid_constant__ Strides strides) {
    constexpr bool OF_KEYS = PART > QUERIES;
    constexpr bool HAS_G = PART != TANGENT && PART != VALUES;   // needs u and x
    constexpr bool HAS_1 = PART != VALUES, HAS_2 = HAS_G, HAS_3 = PART == VALUES || PART == BOTH;
    // Registers suffice for the sums with e to run while d is computed.
    constexpr bool EARLY = D == 128;
    constexpr int ROW_TILES = PART == QUERIES ? 3 : HAS_G ? 4 : 2, COLUMN_TILES = OF_KEYS ? 3 : 4;
    using Tiles = StreamTiles<D, W, N, ROW_TILES, COLUMN_TILES, OF_KEYS ? 1024 : 0>;
    constexpr int M = 64 * W, STAGES = Tiles::STAGES, HALVES = Tiles::HALVES;
    constexpr int A_BYTES = Tiles::A_BYTES, B_BYTES = Tiles::B_BYTES;
    constexpr int PAIR_HALF = 2 * N * SWIZZLE;   // 64 columns of two tiles side by side
    constexpr int B3_HALF = OF_KEYS ? N * SWIZZLE : PAIR_HALF;
    static_assert(!OF_KEYS || N == 32, "the tiles of the statistics");
    static_assert(STAGES >= 2, "one stage is loaded while another is read");
    extern __shared__ unsigned char raw[];
    unsigned char* a_tiles = kept_address(raw + (-shared_address(raw) & 1023));
    unsigned char* stages = a_tiles + ROW_TILES * W * A_BYTES;
    __shared__ StreamBarriers<W, STAGES, OF_KEYS> own_barriers;
    auto& barriers = *kept_address(&own_barriers);
    if (threadIdx.x == 0) barriers.init();
    __syncthreads();

    const Band<OF_KEYS, N> band(p, {0, 0, 0, p.queries, p.keys});
    const int row_blocks = (band.rows + M - 1) / M, tiles = row_blocks * p.heads_total;
    const int own_heads = OF_KEYS ? p.kv_heads : p.heads;
    const int heads_each = OF_KEYS ? p.heads / p.kv_heads : 1;   // query heads that a tile meets

    constexpr int REGISTERS = CONSUMER_REGISTERS<W, PART>;
    if (threadIdx.x < WARPGROUP) {   // producer
        setmaxnreg_decrease<PRODUCER_REGISTERS<W, REGISTERS>>();
        if (threadIdx.x == 0) {
            PipelineState<STAGES> at;
            PipelineState<1> turn;
            unsigned a_parity = 0;
            for (int index = blockIdx.x;; index = next_tile(taken, tiles)) {
                barriers.queue.put(turn, index);
                if (index >= tiles) break;
                const AttentionTile tile = tile_of(p, own_heads, index, row_blocks, OF_KEYS);
                const int first = band.first(tile.block * M);
                const int last = band.last(min(tile.block * M + M, band.rows));
                if (first >= last) continue;
                load_rows<Tiles, ROW_TILES>(a_tiles, barriers, a_parity,
                                            {&a1_map, &a2_map, &a3_map, &x4_map}, tile.block * M,
                                            tile.head, tile.batch);
                a_parity ^= 1;
                int head = OF_KEYS ? tile.head * heads_each : tile.head / (p.heads / p.kv_heads);
                #pragma unroll 1
                for (int n = first, left = heads_each * (last - first); left > 0; --left) {
                    unsigned char* to = stages + at.stage * Tiles::STAGE;
                    Mbarrier& full = barriers.full[at.stage];
                    barriers.empty[at.stage].wait(at.parity ^ 1);
                    full.arrive_expect_tx(COLUMN_TILES * B_BYTES + (OF_KEYS ? 4 * N * 4 : 0));
                    #pragma unroll 1
                    for (int h = 0; h < HALVES; ++h) {
                        auto load = [&](int offset, const TensorMap& map) {
                            tma_load(to + offset, map, full, h * 64, n * N, head, tile.batch);
                        };
                        load(h * PAIR_HALF, b1_map);
                        load(h * PAIR_HALF + N * SWIZZLE, b2_map);
                        load(2 * B_BYTES + h * B3_HALF, b3_map);
                        if (!OF_KEYS) load(2 * B_BYTES + h * B3_HALF + N * SWIZZLE, x4_map);
                    }
                    if (OF_KEYS) {
                        const int query = (tile.batch * p.heads + head) * pitch + n * N;
                        bulk_load(to + 3 * B_BYTES, sums + 4ll * query, 4 * N * 4, full);
                    }
                    at.next();
                    if (++n == last) { n = first; ++head; }
                }
            }
        }
    } else {   // consumers
        setmaxnreg_increase<REGISTERS>();
        const int group = uniform(threadIdx.x / WARPGROUP) - 1;
        const int lane = threadIdx.x % 32, warp = uniform(threadIdx.x / 32 % 4);
        const float scale_log2 = p.scale * LOG2_E;
        const unsigned long long a1_at = wgmma_descriptor(a_tiles + ROW_TILES * group * A_BYTES);
        const unsigned long long a2_at = a1_at + A_BYTES / 16, a3_at = a2_at + A_BYTES / 16;
        Fragment<1, N> s, ts;   // become w and w (ts - mean); ty: w ts
        Fragment<1, HAS_G ? 2 * N : 16> g;   // u and x, become e and d
        Fragment<1, HAS_1 ? D : 8> sum1;
        Fragment<1, HAS_2 ? D : 8> sum2;
        Fragment<1, HAS_3 ? D : 8> sum3, sum4;
        unsigned s_packed[N / 4], ts_packed[N / 4], e_packed[N / 4], d_packed[N / 4];
        PipelineState<STAGES> at;
        unsigned a_parity = 0;

        PipelineState<1> turn;
        for (int index; (index = barriers.queue.take(turn)) < tiles;) {
            const AttentionTile tile = tile_of(p, own_heads, index, row_blocks, OF_KEYS);
            const int row = tile.block * M + group * 64;   // the first of this warpgroup
            const int own_row = row + warp * 16 + s.row_of(0);   // the thread's: this and 8 later
            const int first = band.first(tile.block * M);
            const int last = band.last(min(tile.block * M + M, band.rows));
            // Statistics of the thread's rows: as in `sums`; of the tangent the mean so far.
            float own[4][2] = {{infinity<float>(), infinity<float>()}, {}, {}, {}};
            if (!OF_KEYS) {
                const long long head = tile.batch * p.heads + tile.head;
                #pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const int t = own_row + 8 * h;
                    if (t >= band.rows) continue;
                    if (PART == TANGENT) own[0][h] = logsumexp[head * band.rows + t] * LOG2_E;
                    #pragma unroll
                    for (int i = 0; PART != TANGENT && i < 4; ++i)
                        own[i][h] = sums[4 * (head * pitch + t / 32 * 32) + 32 * i + t % 32];
                }
            }
            sum1.clear();
            sum2.clear();
            sum3.clear();
            sum4.clear();

            auto mask = [&](int n) { band.mask(s, own_row, n); };
            int before = -1;   // the stage whose tiles the last products still use
            if (first < last) barriers.a_full[group].wait(a_parity);
            for (int each = 0; each < heads_each; ++each) {
                for (int n = first; n < last; ++n) {
                    const unsigned char* stage = stages + at.stage * Tiles::STAGE;
                    barriers.full[at.stage].wait(at.parity);
                    const int apart = n * N - row;   // from the first row to the first column
                    if (apart + N <= band.low || apart > 63 + band.high || row >= band.rows) {
                        if (before >= 0) {   // only other warpgroups see this block
                            wgmma_wait<0>();
                            barriers.release(before);
                            before = -1;
                        }
                        barriers.release(at.stage);
                        at.next();
                        continue;
                    }
                    // Scores and their tangents.
                    const unsigned long long b1_at = wgmma_descriptor(stage, PAIR_HALF);
                    const unsigned long long b2_at = b1_at + N * SWIZZLE / 16;
                    const unsigned long long b3_at = wgmma_descriptor(stage + 2 * B_BYTES, B3_HALF);
                    fence_registers(s.values);
                    fence_registers(ts.values);
                    wgmma_fence();
                    multiply_rows<T, D>(s.values, a1_at, b1_at, PAIR_HALF, false);
                    multiply_rows<T, D>(ts.values, a1_at, b2_at, PAIR_HALF, false);
                    multiply_rows<T, D>(ts.values, a2_at, b1_at, PAIR_HALF, true);
                    wgmma_commit();
                    wgmma_wait<1>();   // for the products before these
                    if (before >= 0) barriers.release(before);
                    // Gradients of the weights.
                    if constexpr (HAS_G) {
                        fence_registers(g.values);
                        wgmma_fence();
                        if constexpr (!OF_KEYS) {
                            multiply_rows<T, D>(g.values, a3_at, b3_at, B3_HALF, false);
                        } else {
                            auto &u = reinterpret_cast<float(&)[N / 2]>(g.values[0]),
                                 &x = reinterpret_cast<float(&)[N / 2]>(g.values[N / 2]);
                            multiply_rows<T, D>(u, a3_at, b3_at, B3_HALF, false);
                            multiply_rows<T, D>(x, a3_at + A_BYTES / 16, b3_at, B3_HALF, false);
                        }
                        wgmma_commit();
                        wgmma_wait<1>();
                    } else {
                        wgmma_wait<0>();
                    }
                    fence_registers(s.values);
                    fence_registers(ts.values);
                    // Mask.
                    if (apart < 63 + band.low || apart + N > 1 + band.high
                        || n * N + N > band.columns)
                        mask(n);
                    // Weights.
                    const float* statistics =
                        reinterpret_cast<const float*>(stage + 3 * B_BYTES) + lane % 4 * 2;
                    auto for_queries = [&](int which, auto f) {   // with statistic number `which`
                        for_statistics<OF_KEYS, N>(own[which], statistics + which * N, f);
                    };
                    for_queries(0, [&](int i, int, float logsumexp) {
                        s.values[i] = fast_exp2(s.values[i] * scale_log2 - logsumexp);
                    });
                    for_queries(1, [&](int i, int h, float mean) {
                        float& x = ts.values[i];
                        if (PART == TANGENT)
                            own[1][h] += x *= p.scale * s.values[i];
                        else
                            x = x * p.scale - mean;
                    });
                    // Sums whose weights are known, while the others are computed.
                    if constexpr (PART == TANGENT || HAS_3) {
                        #pragma unroll
                        for (int i = 0; i < N / 4; ++i) {
                            float low = ts.values[2 * i], high = ts.values[2 * i + 1];
                            if (PART != TANGENT) {
                                low *= s.values[2 * i];
                                high *= s.values[2 * i + 1];
                            }
                            s_packed[i] = s.template word<T>(i);
                            ts_packed[i] = pack<T>(low, high);
                        }
                        if (PART == TANGENT) fence_registers(sum1.values);
                        fence_registers(sum3.values);
                        fence_registers(sum4.values);
                        wgmma_fence();
                        if constexpr (PART == TANGENT) {
                            accumulate<T>(sum1, ts_packed, b3_at);
                            accumulate<T>(sum1, s_packed, b3_at + N * SWIZZLE / 16);
                        } else {
                            accumulate<T>(sum3, ts_packed, b3_at);
                            accumulate<T>(sum4, s_packed, b3_at);
                        }
                        wgmma_commit();
                    }
                    // Gradients of the scores.
                    if constexpr (HAS_G) {
                        wgmma_wait<HAS_3 ? 1 : 0>();
                        fence_registers(g.values);
                        for_queries(2, [&](int i, int, float y_delta) {
                            g.values[i] = s.values[i] * (g.values[i] - y_delta);
                        });
                        auto finish = [&] {   // d
                            for_queries(3, [&](int i, int, float ty_delta) {
                                float& x = g.values[N / 2 + i];
                                x = s.values[i] * (x - ty_delta) + ts.values[i] * g.values[i];
                            });
                            #pragma unroll
                            for (int i = 0; i < N / 4; ++i)
                                d_packed[i] = g.template word<T>(N / 4 + i);
                        };
                        if (!EARLY) finish();
                        #pragma unroll
                        for (int i = 0; i < N / 4; ++i) e_packed[i] = g.template word<T>(i);
                        fence_registers(sum1.values);
                        fence_registers(sum2.values);
                        wgmma_fence();
                        accumulate<T>(sum1, e_packed, b2_at);
                        accumulate<T>(sum2, e_packed, b1_at);
                        if (EARLY) {
                            wgmma_commit();
                            finish();
                            wgmma_fence();
                        }
                        accumulate<T>(sum1, d_packed, b1_at);
                        wgmma_commit();
                    }
                    before = at.stage;
                    at.next();
                }
            }
            wgmma_wait<0>();
            fence_registers(sum1.values);
            fence_registers(sum2.values);
            fence_registers(sum3.values);
            fence_registers(sum4.values);
            if (before >= 0) barriers.release(before);
            if (first < last) {
                arrive_warp(barriers.a_empty[group]);
                a_parity ^= 1;
            }
            // Store.
            #pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int t = own_row + 8 * h;
                const long long to = place(strides, tile.batch, tile.head, t);
                const int width = t < band.rows ? p.width : 0;
                if constexpr (PART == TANGENT) {
                    const float mean = quad_sum(own[1][h]);
                    if (lane % 4 == 0 && t < band.rows)
                        means[((long long)tile.batch * p.heads + tile.head) * band.rows + t] = mean;
                    const T* from = y + place(y_at, tile.batch, tile.head, t);
                    #pragma unroll
                    for (int j = 0; j < D; j += 8) {
                        const int column = sum1.column_of(j);
                        if (column >= width) continue;
                        const float2 pair =
                            unpack<T>(*reinterpret_cast<const unsigned*>(from + column));
                        sum1.at(h, j) -= mean * pair.x;
                        sum1.at(h, j + 1) -= mean * pair.y;
                    }
                    store_row(d1 + to, sum1, h, 1, width);
                } else if constexpr (HAS_1) {
                    if (d1 != nullptr) store_row(d1 + to, sum1, h, p.scale, width);
                    if (d2 != nullptr) store_row(d2 + to, sum2, h, p.scale, width);
                }
                if constexpr (HAS_3) {
                    if (d3 != nullptr) store_row(d3 + to, sum3, h, 1, width);
                    if (d4 != nullptr) store_row(d4 + to, sum4, h, 1, width);
                }
            }
        }
    }
}
