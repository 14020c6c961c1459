// FlashAttention on Hopper, backward (Dao 2023, arXiv:2307.08691, algorithm 2). With w the weights:
//
//   dv = w^T dy, g = w (dy v^T - delta), dq = scale g k, dk = scale g^T q, all written with =
//
// Two launches of one kernel, one for the keys' gradients, one for the queries'. Both compute the
// scores and dy v^T: seven matrix products instead of the least possible five. That is the price of
// sums that need no atomics and no order among blocks, of equal bits, and of a dq that is written
// once, in 16 bits. In return nothing but tiles of the inputs ever passes through shared memory:
// the block's own rows are such that weights and g leave one product in the registers where the
// next one wants them. Each warpgroup keeps 64 rows and their gradients while the other side
// streams by.
//
// Bands, EXTRAS and widths are as in forward_sm90.cu. With heads of 256, and with EXTRAS of
// 128, registers do not hold both dk and dv: two launches, eight products.
//
// Floor: 14 D operations and two exponentials for each query and key that meet, where the usual
// count of operations is 10 D: of the tensor cores' 795e12 operations a second 568e12 can count.
//
// The naive kernel: that of backward_sm80.cu. That of attention_backward_rows, a thread a
// query: delta[i] = 0; for (d) delta[i] += dy[i][d] * y[i][d];
//
// Phases. Producer: for each tile of rows, take its number, load them, then the tiles of columns
// and their statistics. Consumers, for each tile of columns: scores; gradients of the weights; bias
// and mask; weights; gradients of the scores; add to the sums. Then: store.
//
// arch: sm_90a
// where: T = __half | __nv_bfloat16
// instantiate: attention_backward_rows<{T}>
// where: KEY_TILES = 32, 2, 96 | 64, 2, 96 | 96, 2, 64 | 128, 2, 64
// instantiate: attention_backward<{T}, {KEY_TILES}, BOTH, false>
// instantiate: attention_backward<{T}, 256, 2, 32, {KEYS | VALUES}, {false | true}>
// where: QUERY_TILES = 32, 3, 64 | 64, 3, 64 | 96, 3, 64 | 128, 2, 80 | 256, 2, 32
// instantiate: attention_backward<{T}, {QUERY_TILES}, QUERIES, false>
// instantiate: attention_backward<{T}, 64, 2, 64, BOTH, true>
// instantiate: attention_backward<{T}, 128, 2, 64, {KEYS | VALUES}, true>
// instantiate: attention_backward<{T}, {64, 2, 64 | 128, 2, 64 | 256, 2, 32}, QUERIES, true>
#include "attention/sm90.cuh"

// Which gradients a launch computes. Registers hold both of the keys' side up to heads of 128.
constexpr int QUERIES = 0, KEYS = 1, VALUES = 2, BOTH = 3;

// Registers of a consumer's thread. Both sums of 128 columns need the most.
template <int D, int W, int PART>
constexpr int CONSUMER_REGISTERS = W == 3 ? 160 : D == 128 && PART == BOTH ? 240 : 232;

// Where the statistics of a sequence begin among those of a head: at a multiple of n, and with
// space for a length rounded up to one.
__device__ inline int sums_start(const Sequence& of, int batch, int n) {
    return (of.first_query / n + batch) * n;
}

// The statistics that backward needs of each query, (heads_total, 2, pitch): its log-sum-exp, times
// `unit`, and delta = dy . y. Past the last query of a sequence, up to the next multiple of
// `columns`, they are such that weights and gradients become 0. y: (batch, queries, heads, width).
// dy: strides in elements. LANES lanes a row, of HEADS heads: more loads under way.
template <typename T>
__global__ void __launch_bounds__(256)
attention_backward_rows(float* __restrict__ sums, const T* __restrict__ y, const T* __restrict__ dy,
                        const float* __restrict__ logsumexp,
                        const __grid_constant__ AttentionSm90Arguments p,
                        const __grid_constant__ AttentionSm90Extras extras, int batches,
                        int columns, int pitch, float unit,
                        const __grid_constant__ Strides dy_strides) {
    constexpr int LANES = 8, HEADS = 4;
    const int padded = (p.queries + columns - 1) / columns * columns;   // the longest sequence
    const int groups = (p.heads + HEADS - 1) / HEADS;   // groups of heads, which lie side by side
    // A block has 32 rows of a group, the next block those of the next group.
    const int start = blockIdx.x / groups * 32, lane = threadIdx.x % LANES;
    const int first_head = blockIdx.x % groups * HEADS, t = start % padded + threadIdx.x / LANES;
    const int b = start / padded;
    const Sequence of = b < batches ? sequence_of<true>(p, extras, b) : Sequence{0, 0, 0, 0, 0};
    const bool inside = t < of.queries;
    y += (((long long)of.batch * p.queries + of.first_query + t) * p.heads + first_head) * p.width;
    dy += place(dy_strides, of.batch, first_head, of.first_query + t);
    float deltas[HEADS] = {};
    for (int d = lane * 8; inside && d < p.width; d += LANES * 8) {
        Vec<T> one[HEADS], two[HEADS];
        #pragma unroll
        for (int h = 0; h < HEADS; ++h) {
            const bool there = first_head + h < p.heads;
            one[h] = there ? load<8>(y + h * p.width + d) : Vec<T>{};
            two[h] = there ? load<8>(dy + h * dy_strides.head + d) : Vec<T>{};
        }
        #pragma unroll
        for (int h = 0; h < HEADS; ++h)
            #pragma unroll
            for (int i = 0; i < 8; ++i)
                deltas[h] += float(one[h].values[i]) * float(two[h].values[i]);
    }
    float delta = 0;   // delta of head first_head + lane
    #pragma unroll
    for (int h = 0; h < HEADS; ++h) {
        #pragma unroll
        for (int offset = LANES / 2; offset > 0; offset /= 2)
            deltas[h] += __shfl_xor_sync(0xffffffff, deltas[h], offset);
        if (lane == h) delta = deltas[h];
    }
    const bool is_head = lane < HEADS && first_head + lane < p.heads;
    if (is_head && t < (of.queries + columns - 1) / columns * columns) {
        const long long head = (long long)of.batch * p.heads + first_head + lane;
        const int first = extras.query_starts == nullptr ? 0 : sums_start(of, b, columns);
        float* to = sums + 2 * head * pitch + first + t;
        to[0] = inside ? logsumexp[head * extras.length + of.first_query + t] * unit
                       : infinity<float>();
        to[pitch] = delta;
    }
}

// Each consumer warpgroup has 64 rows, and streams N columns at a time. QUERIES: rows are queries;
// a1, a2, b1, b2 are q, dy, k, v, and d1 becomes dq. Else rows are keys and columns queries; a1,
// a2, b1, b2 are k, v, q, dy, and d1, d2 become dk, dv, or one of them:
//   s = a1 b1^T, w = exp(scale s - logsumexp), g = w (a2 b2^T - delta), d1 = scale g b1, d2 = w b2
// With dropout w in d2 and a2 b2^T are multiplied by what forward multiplied w with.
// column_sums1, column_sums2: of d1 and d2, with heads of 64 and without EXTRAS alone. taken: see
// next_tile.
template <typename T, int D, int W, int N, int PART, bool EXTRAS>
__global__ void __launch_bounds__(WARPGROUP * (W + 1), 1)
attention_backward(T* __restrict__ d1, T* __restrict__ d2, const float* __restrict__ sums,
                   unsigned* __restrict__ taken,
                   const __grid_constant__ TensorMap a1_map,
                   const __grid_constant__ TensorMap a2_map,
                   const __grid_constant__ TensorMap b1_map,
                   const __grid_constant__ TensorMap b2_map,
                   const __grid_constant__ AttentionSm90Arguments p,
                   const __grid_constant__ AttentionSm90Extras extras, int pitch,
                   const __grid_constant__ Strides strides,
                   const __grid_constant__ ColumnSums column_sums1,
                   const __grid_constant__ ColumnSums column_sums2) {
    constexpr bool OF_KEYS = PART != QUERIES;
    constexpr bool HAS_1 = PART != VALUES, HAS_2 = PART == VALUES || PART == BOTH;
    using Tiles = StreamTiles<D, W, N, 2, 2, 1024>;   // statistics: two rows of N floats
    constexpr int M = 64 * W, STAGES = Tiles::STAGES, HALVES = Tiles::HALVES;
    constexpr int B_BYTES = Tiles::B_BYTES;
    extern __shared__ unsigned char raw[];
    unsigned char* a_tiles = kept_address(raw + (-shared_address(raw) & 1023));
    unsigned char* stages = a_tiles + 2 * W * Tiles::A_BYTES;
    __shared__ StreamBarriers<W, STAGES, OF_KEYS> own_barriers;
    auto& barriers = *kept_address(&own_barriers);
    if (threadIdx.x == 0) barriers.init();
    __syncthreads();

    const int row_blocks = ((OF_KEYS ? p.keys : p.queries) + M - 1) / M;
    const int tiles = row_blocks * p.heads_total;
    const int own_heads = OF_KEYS ? p.kv_heads : p.heads;
    const int heads_each = OF_KEYS ? p.heads / p.kv_heads : 1;   // query heads that a tile meets

    constexpr int REGISTERS = CONSUMER_REGISTERS<D, W, PART>;
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
                const Sequence of = sequence_of<EXTRAS>(p, extras, tile.batch);
                const Band<OF_KEYS, N> band(p, of);
                const int first = band.first(tile.block * M);
                const int last = band.last(min(tile.block * M + M, band.rows));
                if (tile.block * M >= band.rows || first >= last) continue;
                const int row = (OF_KEYS ? of.first_key : of.first_query) + tile.block * M;
                load_rows<Tiles, 2>(a_tiles, barriers, a_parity, {&a1_map, &a2_map}, row, tile.head,
                                    of.batch);
                a_parity ^= 1;
                int head = OF_KEYS ? tile.head * heads_each : tile.head / (p.heads / p.kv_heads);
                const int column = OF_KEYS ? of.first_query : of.first_key;
                for (int n = first, left = heads_each * (last - first); left > 0; --left) {
                    unsigned char* to = stages + at.stage * Tiles::STAGE;
                    Mbarrier& full = barriers.full[at.stage];
                    barriers.empty[at.stage].wait(at.parity ^ 1);
                    full.arrive_expect_tx(2 * B_BYTES + (OF_KEYS ? 2 * N * 4 : 0));
                    #pragma unroll 1
                    for (int h = 0; h < HALVES; ++h) {
                        unsigned char* half = to + h * N * SWIZZLE;
                        tma_load(half, b1_map, full, h * 64, column + n * N, head, of.batch);
                        tma_load(half + B_BYTES, b2_map, full, h * 64, column + n * N, head,
                                 of.batch);
                    }
                    if (OF_KEYS) {
                        const bool starts = EXTRAS && extras.query_starts;
                        const int start = starts ? sums_start(of, tile.batch, N) : 0;
                        const float* from =
                            sums + (of.batch * p.heads + head) * 2ll * pitch + start + n * N;
                        bulk_load(to + 2 * B_BYTES, from, N * 4, full);
                        bulk_load(to + 2 * B_BYTES + N * 4, from + pitch, N * 4, full);
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
        // with EXTRAS scores come scaled
        const float scale_log2 = (EXTRAS ? 1 : p.scale) * LOG2_E;
        const Word draw = EXTRAS ? draw_number(extras.draw, extras.offset) : 0;
        const unsigned long long a1_at = wgmma_descriptor(a_tiles + 2 * group * Tiles::A_BYTES);
        const unsigned long long a2_at = a1_at + Tiles::A_BYTES / 16;
        Fragment<1, N> s, g;
        Fragment<1, HAS_1 ? D : 8> sum1;
        Fragment<1, HAS_2 ? D : 8> sum2;
        unsigned w_packed[N / 4], g_packed[N / 4];
        PipelineState<STAGES> at;
        unsigned a_parity = 0;

        auto multiply = [&](Fragment<1, N>& to, unsigned long long a_at,
                            const unsigned char* tile) {
            fence_registers(to.values);
            wgmma_fence();
            multiply_rows<T, D>(to.values, a_at, wgmma_descriptor(tile), N * SWIZZLE, false);
            wgmma_commit();
        };
        auto add = [&](Fragment<1, D>& to, const unsigned (&a)[N / 4], const unsigned char* tile) {
            fence_registers(to.values);
            wgmma_fence();
            accumulate<T>(to, a, wgmma_descriptor(tile, N * SWIZZLE));
            wgmma_commit();
        };

        PipelineState<1> turn;
        for (int index; (index = barriers.queue.take(turn)) < tiles;) {
            const AttentionTile tile = tile_of(p, own_heads, index, row_blocks, OF_KEYS);
            const Sequence of = sequence_of<EXTRAS>(p, extras, tile.batch);
            const Band<OF_KEYS, N> band(p, of);
            const int row = tile.block * M + group * 64;   // the first of this warpgroup
            const int own_row = row + warp * 16 + s.row_of(0);   // the thread's: this and 8 later
            if (tile.block * M >= band.rows) continue;
            const int first = band.first(tile.block * M);
            const int last = band.last(min(tile.block * M + M, band.rows));
            float row_logsumexp[2] = {infinity<float>(), infinity<float>()}, row_delta[2] = {0, 0};
            if (!OF_KEYS) {
                const bool starts = EXTRAS && extras.query_starts;
                const int start = starts ? sums_start(of, tile.batch, extras.columns) : 0;
                const float* from =
                    sums + (of.batch * p.heads + tile.head) * 2ll * pitch + start + own_row;
                #pragma unroll
                for (int h = 0; h < 2; ++h)
                    if (own_row + 8 * h < band.rows) {
                        row_logsumexp[h] = from[8 * h];
                        row_delta[h] = from[8 * h + pitch];
                    }
            }
            sum1.clear();
            sum2.clear();

            auto mask = [&](int n) { band.mask(s, own_row, n); };
            auto keep_mask = [&](int n, int head) -> unsigned long long {   // a bit for each weight
                if (extras.threshold >> 16) return ~0ull;
                const Word first = (Word(tile.batch) * p.heads + head) * p.queries, pitch = p.keys;
                if (!OF_KEYS)
                    return keep_rows<N>(extras, draw, (first + own_row) * pitch + n * N, pitch);
                return keep_columns<N>(extras, draw, (first + n * N) * pitch + row + warp * 16,
                                       pitch);
            };

            int before = -1;   // the stage whose tiles the last products still use
            if (first < last) barriers.a_full[group].wait(a_parity);
            for (int each = 0; each < heads_each; ++each) {
                for (int n = first; n < last; ++n) {
                    const unsigned char* tile1 = stages + at.stage * Tiles::STAGE;
                    const unsigned char* tile2 = tile1 + B_BYTES;
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
                    // Scores.
                    multiply(s, a1_at, tile1);
                    wgmma_wait<1>();   // for the products before these
                    if (before >= 0) barriers.release(before);
                    // Gradients of the weights.
                    if constexpr (HAS_1) {
                        multiply(g, a2_at, tile2);
                        wgmma_wait<1>();
                    } else {
                        wgmma_wait<0>();
                    }
                    fence_registers(s.values);
                    // Bias and mask.
                    const int query_head = OF_KEYS ? tile.head * heads_each + each : tile.head;
                    if (EXTRAS)
                        scale_and_bias<OF_KEYS>(s, p.scale, extras, tile.batch, query_head, own_row,
                                                band.rows, s.column_of(n * N), band.columns);
                    if (apart < 63 + band.low || apart + N > 1 + band.high
                        || n * N + N > band.columns)
                        mask(n);
                    // Weights.
                    const float* statistics =
                        reinterpret_cast<const float*>(tile2 + B_BYTES) + lane % 4 * 2;
                    auto weigh = [&](int i, int, float logsumexp) {
                        float& x = s.values[i];
                        x = fast_exp2(EXTRAS ? (x - logsumexp) * scale_log2
                                             : x * scale_log2 - logsumexp);
                    };
                    for_statistics<OF_KEYS, N>(row_logsumexp, statistics, weigh);
                    const unsigned long long keep = EXTRAS ? keep_mask(n, query_head) : 0;
                    // Gradients of the scores.
                    if constexpr (HAS_1) {
                        wgmma_wait<0>();
                        fence_registers(g.values);
                        auto differentiate = [&](int i, int, float delta) {
                            float& x = g.values[i];
                            if (EXTRAS) x = keep >> i & 1 ? x * extras.inverse_keep : 0;
                            x = s.values[i] * (x - delta);
                        };
                        for_statistics<OF_KEYS, N>(row_delta, statistics + N, differentiate);
                    }
                    // Sums.
                    if constexpr (HAS_2) {
                        #pragma unroll
                        for (int i = 0; i < N / 2; ++i)
                            if (EXTRAS && !(keep >> i & 1)) s.values[i] = 0;
                        s.template round_to<T>(w_packed);
                        add(sum2, w_packed, tile2);
                    }
                    if constexpr (HAS_1) {
                        g.template round_to<T>(g_packed);
                        add(sum1, g_packed, tile1);
                    }
                    before = at.stage;
                    at.next();
                }
            }
            wgmma_wait<0>();
            fence_registers(sum1.values);
            fence_registers(sum2.values);
            if (before >= 0) barriers.release(before);
            if (first < last) {
                arrive_warp(barriers.a_empty[group]);
                a_parity ^= 1;
            }
            // Store.
            #pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int t = own_row + 8 * h;
                const int start = OF_KEYS ? of.first_key : of.first_query;
                const long long to = place(strides, of.batch, tile.head, start + t);
                const int width = t < band.rows ? p.width : 0;
                if constexpr (HAS_1) store_row(d1 + to, sum1, h, p.scale, width);
                if constexpr (HAS_2)
                    store_row(d2 + to, sum2, h, EXTRAS ? extras.inverse_keep : 1.0f, width);
            }
            if constexpr (!EXTRAS && D == 64) {
                const int first = row + warp * 16, column = tile.head * D;
                if constexpr (HAS_1)
                    column_sums1.store(sum1, p.scale, of.batch, band.rows, first, column);
                if constexpr (HAS_2)
                    column_sums2.store(sum2, 1, of.batch, band.rows, first, column);
            }
        }
    }
}
