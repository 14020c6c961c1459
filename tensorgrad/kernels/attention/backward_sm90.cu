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
// instantiate: attention_backward<{T}, 256, 2, 64, {KEYS | VALUES}, false>
// instantiate: attention_backward<{T}, 256, 2, 32, {KEYS | VALUES}, true>
// where: QUERY_TILES = 32, 3, 64 | 64, 3, 64 | 96, 3, 64 | 128, 2, 80 | 256, 2, 64
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
    const int place = blockIdx.x / groups * 32, lane = threadIdx.x % LANES;
    const int first_head = blockIdx.x % groups * HEADS, t = place % padded + threadIdx.x / LANES;
    const int b = place / padded;
    const Sequence of = b < batches ? sequence_of<true>(p, extras, b) : Sequence{0, 0, 0, 0, 0};
    const bool inside = t < of.queries;
    y += (((long long)of.batch * p.queries + of.first_query + t) * p.heads + first_head) * p.width;
    dy += of.batch * dy_strides.batch + first_head * dy_strides.head
        + (of.first_query + t) * dy_strides.row;
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

// Shared memory: both tiles of rows of each warpgroup, then a ring of each of the two tiles of
// columns, then one of statistics, with b1. A tile that the sums do not read is free before them:
// of an odd number of tiles that fit the other ring has one more.
template <int D, int W, int N, int PART> struct BackwardTiles {
    static constexpr int HALVES = (D + 63) / 64;   // 64 columns each
    static constexpr int A_BYTES = 64 * HALVES * SWIZZLE, B_BYTES = N * HALVES * SWIZZLE;
    static constexpr int STATISTICS = 2 * N * 4;   // two rows of floats
    static constexpr int FIT = (TILE_BYTES - 2 * W * A_BYTES) / (B_BYTES + STATISTICS / 2);
    static constexpr int TILES = FIT < 8 ? FIT : 8;
    static constexpr int STAGES_1 = PART == QUERIES || PART == KEYS ? (TILES + 1) / 2 : TILES / 2;
    static constexpr int STAGES_2 = PART == VALUES ? (TILES + 1) / 2 : TILES / 2;
    static_assert(2 * W * A_BYTES + (STAGES_1 + STAGES_2) * B_BYTES + STAGES_1 * STATISTICS
                      <= TILE_BYTES, "shared memory");
};

template <int W, int STAGES_1, int STAGES_2> struct BackwardBarriers {
    TileQueue<1> queue;
    Mbarrier a_full[W], a_empty[W], full1[STAGES_1], empty1[STAGES_1], full2[STAGES_2],
        empty2[STAGES_2];
};

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
    constexpr bool OF_QUERIES = PART == QUERIES;
    constexpr bool HAS_1 = PART != VALUES, HAS_2 = PART == VALUES || PART == BOTH;
    // A warp reads tiles as one, in the products alone, but each lane reads statistics: each
    // arrives.
    constexpr int ARRIVALS = OF_QUERIES ? 4 : WARPGROUP;   // arrivals of a warpgroup, for a stage
    using Tiles = BackwardTiles<D, W, N, PART>;
    constexpr int M = 64 * W, HALVES = Tiles::HALVES, B_BYTES = Tiles::B_BYTES;
    constexpr int STAGES_1 = Tiles::STAGES_1, STAGES_2 = Tiles::STAGES_2;
    extern __shared__ unsigned char raw[];
    unsigned char* a_tiles = kept_address(raw + (-shared_address(raw) & 1023));
    unsigned char* b1_tiles = a_tiles + 2 * W * Tiles::A_BYTES;
    unsigned char* b2_tiles = b1_tiles + STAGES_1 * B_BYTES;
    unsigned char* all_statistics = b2_tiles + STAGES_2 * B_BYTES;
    __shared__ BackwardBarriers<W, STAGES_1, STAGES_2> own_barriers;
    BackwardBarriers<W, STAGES_1, STAGES_2>& barriers = *kept_address(&own_barriers);
    if (threadIdx.x == 0) {
        barriers.queue.init(4 * W);
        for (int g = 0; g < W; ++g) {
            barriers.a_full[g].init(1);
            barriers.a_empty[g].init(4);
        }
        for (int s = 0; s < STAGES_1; ++s) {
            barriers.full1[s].init(1);
            barriers.empty1[s].init(ARRIVALS * W);
        }
        for (int s = 0; s < STAGES_2; ++s) {
            barriers.full2[s].init(1);
            barriers.empty2[s].init(4 * W);
        }
        fence_mbarrier_init();
    }
    __syncthreads();

    const int row_blocks = ((OF_QUERIES ? p.queries : p.keys) + M - 1) / M;
    const int tiles = row_blocks * p.heads_total;
    const int own_heads = OF_QUERIES ? p.heads : p.kv_heads;
    const int heads_each = OF_QUERIES ? 1 : p.heads / p.kv_heads;   // query heads that a tile meets
    // rows and columns of a sequence; row r sees the columns from r + low to r + high
    struct Band {
        int rows, columns, low, high;

        __device__ int first(int row) const { return max(0, row + low) / N; }   // block of columns
        __device__ int last(int end) const {
            return (max(0, min(columns, end + high)) + N - 1) / N;
        }
    };
    auto band_of = [&](const Sequence& of) {
        const int shift = of.keys - of.queries;
        if (OF_QUERIES)
            return Band{of.queries, of.keys, shift - p.window_left, shift + p.window_right};
        return Band{of.keys, of.queries, -shift - p.window_right, p.window_left - shift};
    };

    constexpr int REGISTERS = CONSUMER_REGISTERS<D, W, PART>;
    if (threadIdx.x < WARPGROUP) {   // producer
        setmaxnreg_decrease<PRODUCER_REGISTERS<W, REGISTERS>>();
        if (threadIdx.x == 0) {
            PipelineState<STAGES_1> at1;
            PipelineState<STAGES_2> at2;
            PipelineState<1> turn;
            unsigned a_parity = 0;
            for (int index = blockIdx.x;; index = next_tile(taken, tiles)) {
                barriers.queue.put(turn, index);
                if (index >= tiles) break;
                const AttentionTile tile = tile_of(p, own_heads, index, row_blocks, !OF_QUERIES);
                const Sequence of = sequence_of<EXTRAS>(p, extras, tile.batch);
                const Band band = band_of(of);
                const int first = band.first(tile.block * M);
                const int last = band.last(min(tile.block * M + M, band.rows));
                if (tile.block * M >= band.rows || first >= last) continue;
                const int row = (OF_QUERIES ? of.first_query : of.first_key) + tile.block * M;
                #pragma unroll 1
                for (int g = 0; g < W; ++g) {
                    barriers.a_empty[g].wait(a_parity ^ 1);
                    barriers.a_full[g].arrive_expect_tx(2 * Tiles::A_BYTES);
                    #pragma unroll 1
                    for (int h = 0; h < HALVES; ++h) {
                        unsigned char* to = a_tiles + 2 * g * Tiles::A_BYTES + h * 64 * SWIZZLE;
                        Mbarrier& full = barriers.a_full[g];
                        tma_load(to, a1_map, full, h * 64, row + g * 64, tile.head, of.batch);
                        tma_load(to + Tiles::A_BYTES, a2_map, full, h * 64, row + g * 64, tile.head,
                                 of.batch);
                    }
                }
                a_parity ^= 1;
                int head = OF_QUERIES ? tile.head / (p.heads / p.kv_heads)
                                      : tile.head * heads_each;
                const int column = OF_QUERIES ? of.first_key : of.first_query;
                for (int n = first, left = heads_each * (last - first); left > 0; --left) {
                    Mbarrier& full1 = barriers.full1[at1.stage];
                    barriers.empty1[at1.stage].wait(at1.parity ^ 1);
                    full1.arrive_expect_tx(B_BYTES + (OF_QUERIES ? 0 : Tiles::STATISTICS));
                    #pragma unroll 1
                    for (int h = 0; h < HALVES; ++h)
                        tma_load(b1_tiles + at1.stage * B_BYTES + h * N * SWIZZLE, b1_map, full1,
                                 h * 64, column + n * N, head, of.batch);
                    if (!OF_QUERIES) {
                        const bool starts = EXTRAS && extras.query_starts;
                        const int start = starts ? sums_start(of, tile.batch, N) : 0;
                        const float* from =
                            sums + (of.batch * p.heads + head) * 2ll * pitch + start + n * N;
                        unsigned char* to = all_statistics + at1.stage * Tiles::STATISTICS;
                        bulk_load(to, from, N * 4, full1);
                        bulk_load(to + N * 4, from + pitch, N * 4, full1);
                    }
                    at1.next();
                    Mbarrier& full2 = barriers.full2[at2.stage];
                    barriers.empty2[at2.stage].wait(at2.parity ^ 1);
                    full2.arrive_expect_tx(B_BYTES);
                    #pragma unroll 1
                    for (int h = 0; h < HALVES; ++h)
                        tma_load(b2_tiles + at2.stage * B_BYTES + h * N * SWIZZLE, b2_map, full2,
                                 h * 64, column + n * N, head, of.batch);
                    at2.next();
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
        const Word key = EXTRAS ? keep_key(extras.seed, draw_number(extras.draw, extras.offset),
                                           extras.stream) : 0;

        auto release_1 = [&](int stage) {
            if (OF_QUERIES)
                arrive_warp(barriers.empty1[stage]);
            else
                barriers.empty1[stage].arrive();
        };
        auto release_2 = [&](int stage) { arrive_warp(barriers.empty2[stage]); };

        const unsigned long long a1_at = wgmma_descriptor(a_tiles + 2 * group * Tiles::A_BYTES);
        const unsigned long long a2_at = a1_at + Tiles::A_BYTES / 16;
        Fragment<1, N> s, g;
        Fragment<1, HAS_1 ? D : 8> sum1;
        Fragment<1, HAS_2 ? D : 8> sum2;
        unsigned w_packed[N / 4], g_packed[N / 4];
        PipelineState<STAGES_1> at1;
        PipelineState<STAGES_2> at2;
        unsigned a_parity = 0;

        auto multiply = [&](Fragment<1, N>& to, unsigned long long a_at,
                            const unsigned char* tile) {
            const unsigned long long b_at = wgmma_descriptor(tile);
            fence_registers(to.values);
            wgmma_fence();
            #pragma unroll
            for (int d = 0; d < D / 16; ++d)
                Wgmma<T, N>::template run<>(
                    to.values, a_at + d / 4 * (64 * SWIZZLE / 16) + d % 4 * 2,
                    b_at + d / 4 * (N * SWIZZLE / 16) + d % 4 * 2, d > 0);
            wgmma_commit();
        };
        auto accumulate = [&](Fragment<1, D>& to, const unsigned (&a)[N / 4],
                              const unsigned char* tile) {
            const unsigned long long b_at = wgmma_descriptor(tile, N * SWIZZLE);
            fence_registers(to.values);
            wgmma_fence();
            #pragma unroll
            for (int n = 0; n < N / 16; ++n)
                Wgmma<T, D>::template run<true>(to.values, a + 4 * n,
                                                b_at + n * (16 * SWIZZLE / 16), true);
            wgmma_commit();
        };

        PipelineState<1> turn;
        for (int index; (index = barriers.queue.take(turn)) < tiles;) {
            const AttentionTile tile = tile_of(p, own_heads, index, row_blocks, !OF_QUERIES);
            const Sequence of = sequence_of<EXTRAS>(p, extras, tile.batch);
            const Band band = band_of(of);
            const int row = tile.block * M + group * 64;   // the first of this warpgroup
            const int own_row = row + warp * 16 + s.row_of(0);   // the thread's: this and 8 later
            if (tile.block * M >= band.rows) continue;
            const int first = band.first(tile.block * M);
            const int last = band.last(min(tile.block * M + M, band.rows));
            float row_logsumexp[2] = {infinity<float>(), infinity<float>()}, row_delta[2] = {0, 0};
            if (OF_QUERIES) {
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

            auto mask = [&](int n) {
                #pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const int diagonal = own_row + 8 * h, column = s.column_of(n * N);
                    s.mask_row(h, diagonal + band.low - column,
                               min(band.columns, diagonal + band.high + 1) - column);
                }
            };
            KeepMask<N, !OF_QUERIES> keep;
            const bool drops = EXTRAS && !(extras.threshold >> 16);
            // Call f(i, x) for each of a thread's accumulators; x is the statistic of its query:
            // that of the row, or of the column in `columns`.
            auto for_statistics = [&](const float (&rows)[2], const float* columns, auto f) {
                #pragma unroll
                for (int j = 0; j < N / 8; ++j) {
                    float2 column = {0, 0};
                    if (!OF_QUERIES) column = *reinterpret_cast<const float2*>(columns + 8 * j);
                    #pragma unroll
                    for (int i = 0; i < 4; ++i)
                        f(4 * j + i, OF_QUERIES ? rows[i / 2] : i % 2 ? column.y : column.x);
                }
            };

            bool pending = false;   // the last sums are under way
            auto release_sums = [&] {   // the tiles of these
                if (HAS_1) release_1(at1.stage == 0 ? STAGES_1 - 1 : at1.stage - 1);
                if (HAS_2) release_2(at2.stage == 0 ? STAGES_2 - 1 : at2.stage - 1);
            };
            if (first < last) barriers.a_full[group].wait(a_parity);
            for (int each = 0; each < heads_each; ++each) {
                for (int n = first; n < last; ++n) {
                    const unsigned char* tile1 = b1_tiles + at1.stage * B_BYTES;
                    const unsigned char* tile2 = b2_tiles + at2.stage * B_BYTES;
                    barriers.full1[at1.stage].wait(at1.parity);
                    const int apart = n * N - row;   // from the first row to the first column
                    if (apart + N <= band.low || apart > 63 + band.high || row >= band.rows) {
                        if (pending) {   // only other warpgroups see this block
                            wgmma_wait<0>();
                            release_sums();
                            pending = false;
                        }
                        release_1(at1.stage);
                        at1.next();
                        barriers.full2[at2.stage].wait(at2.parity);
                        release_2(at2.stage);
                        at2.next();
                        continue;
                    }
                    // Scores.
                    multiply(s, a1_at, tile1);
                    wgmma_wait<1>();   // for the products before these
                    if (pending) release_sums();
                    barriers.full2[at2.stage].wait(at2.parity);
                    // Gradients of the weights.
                    if constexpr (HAS_1) {
                        multiply(g, a2_at, tile2);
                        wgmma_wait<1>();
                    } else {
                        wgmma_wait<0>();
                    }
                    fence_registers(s.values);
                    // Bias and mask.
                    const int query_head = OF_QUERIES ? tile.head : tile.head * heads_each + each;
                    if (EXTRAS)
                        scale_and_bias<!OF_QUERIES>(s, p.scale, extras, tile.batch, query_head,
                                                    own_row, band.rows, s.column_of(n * N),
                                                    band.columns);
                    if (apart < 63 + band.low || apart + N > 1 + band.high
                        || n * N + N > band.columns)
                        mask(n);
                    // Weights.
                    const float* statistics =
                        reinterpret_cast<const float*>(
                            all_statistics + at1.stage * Tiles::STATISTICS) + lane % 4 * 2;
                    for_statistics(row_logsumexp, statistics, [&](int i, float logsumexp) {
                        float& x = s.values[i];
                        x = fast_exp2(EXTRAS ? (x - logsumexp) * scale_log2
                                             : x * scale_log2 - logsumexp);
                    });
                    if constexpr (!HAS_1) release_1(at1.stage);
                    if (EXTRAS && drops)
                        keep.draw(key, Word(tile.batch) * p.heads + query_head, p.queries, p.keys,
                                  row + warp * 16, n * N, extras.threshold);
                    // Gradients of the scores.
                    if constexpr (HAS_1) {
                        wgmma_wait<0>();
                        fence_registers(g.values);
                        if constexpr (!HAS_2) release_2(at2.stage);
                        if (EXTRAS && drops) keep.for_each([&](int i, unsigned mask) {
                            g.values[i] = __uint_as_float(__float_as_uint(g.values[i]) & mask)
                                        * extras.inverse_keep;
                        });
                        for_statistics(row_delta, statistics + N, [&](int i, float delta) {
                            g.values[i] = s.values[i] * (g.values[i] - delta);
                        });
                    }
                    // Sums.
                    if constexpr (HAS_2) {
                        if (EXTRAS && drops) keep.for_each([&](int i, unsigned mask) {
                            s.values[i] = __uint_as_float(__float_as_uint(s.values[i]) & mask);
                        });
                        s.template round_to<T>(w_packed);
                        accumulate(sum2, w_packed, tile2);
                    }
                    if constexpr (HAS_1) {
                        g.template round_to<T>(g_packed);
                        accumulate(sum1, g_packed, tile1);
                    }
                    pending = true;
                    at1.next();
                    at2.next();
                }
            }
            wgmma_wait<0>();
            fence_registers(sum1.values);
            fence_registers(sum2.values);
            if (pending) release_sums();
            if (first < last) {
                arrive_warp(barriers.a_empty[group]);
                a_parity ^= 1;
            }
            // Store.
            #pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int t = own_row + 8 * h;
                const int start = OF_QUERIES ? of.first_query : of.first_key;
                const long long to = of.batch * strides.batch + tile.head * strides.head
                                   + (start + t) * strides.row;
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
