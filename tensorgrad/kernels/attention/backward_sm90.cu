// Flash attention on Hopper, backward (Dao 2023, arXiv:2307.08691, algorithm 2). With w the weights:
//
//   dv = w^T dy, g = w (dy v^T - delta), dq = scale g k, dk = scale g^T q, all written with =
//
// Two launches of one kernel, one for the keys' gradients, one for the queries'. Both compute the
// scores and dy v^T: seven matrix products instead of the least possible five. That is the price of
// sums that need no atomics and no order among blocks, of equal bits, and of a dq that is written
// once, in 16 bits. In return nothing but tiles of the inputs ever passes through shared memory: the
// block's own rows are such that weights and g leave one product in the registers where the next one
// wants them. Each warpgroup keeps 64 rows and their gradients while the other side streams by.
//
// Bands, EXTRAS and widths are as in attention/forward_sm90.cu. With heads of 256, and with EXTRAS of
// 128, registers do not hold both dk and dv: two launches, eight products.
//
// Floor: 14 D operations and two exponentials for each query and key that meet, where the usual count
// of operations is 10 D: of the tensor cores' 795e12 operations a second 568e12 can count.
//
// arch: sm_90a
// where: T = __half | __nv_bfloat16
// instantiate: attention_backward_rows<{T}>
// instantiate: attention_backward<{T}, {32, 2, 96 | 64, 2, 96 | 96, 2, 64 | 128, 2, 64}, BOTH, false>
// instantiate: attention_backward<{T}, 256, 2, 32, {KEYS | VALUES}, {false | true}>
// instantiate: attention_backward<{T}, {32, 3, 64 | 64, 3, 64 | 96, 3, 64 | 128, 2, 80 | 256, 2, 32}, QUERIES, false>
// instantiate: attention_backward<{T}, 64, 2, 64, BOTH, true>
// instantiate: attention_backward<{T}, 128, 2, 64, {KEYS | VALUES}, true>
// instantiate: attention_backward<{T}, {64, 2, 64 | 128, 2, 64 | 256, 2, 32}, QUERIES, true>
#include "attention/sm90.cuh"

// Of a thread, where one warpgroup loads and W compute. A block starts with 168 a thread where W is
// 2, else 128: if these came to more, the warpgroups would wait for registers for ever.
template <int W> constexpr int PRODUCER_REGISTERS = W == 3 ? 32 : 24;
template <int W> constexpr int CONSUMER_REGISTERS = W == 3 ? 160 : 240;

// Which gradients a launch computes. Registers hold both of the keys' side up to heads of 128.
constexpr int QUERIES = 0, KEYS = 1, VALUES = 2, BOTH = 3;

// Where the sums of a sequence begin among those of a head: at a multiple of n, and with room for a
// length rounded up to one.
__device__ inline int sums_start(const Sequence& of, int batch, int n) {
    return (of.first_query / n + batch) * n;
}

// How an array (batch, head, row, D) lies in memory, in elements.
struct Strides {
    long long batch, head, row;
};

// What backward needs of each query, (heads_total, 2, pitch): the logarithm of its sum, times
// `unit`, and delta = dy . y. Past the last query of a sequence, up to the next multiple of `columns`,
// they are such that weights and gradients become 0. y: (batch, queries, heads, width). dy: strides
// in elements. LANES lanes a row.
template <typename T>
__global__ void __launch_bounds__(256)
attention_backward_rows(float* __restrict__ sums, const T* __restrict__ y, const T* __restrict__ dy,
                        const float* __restrict__ logsumexp, const __grid_constant__ Problem p,
                        const __grid_constant__ Extras extras, int batches, int columns, int pitch,
                        float unit, const __grid_constant__ Strides dy_strides) {
    constexpr int LANES = 8;
    const int padded = (p.queries + columns - 1) / columns * columns;   // of the longest sequence
    const long long row = (blockIdx.x * 256ll + threadIdx.x) / LANES;
    const int lane = threadIdx.x % LANES;
    const int h = row % p.heads, t = row / p.heads % padded, b = row / p.heads / padded;
    const Sequence of = b < batches ? sequence_of<true>(p, extras, b) : Sequence{0, 0, 0, 0, 0};
    const bool inside = t < of.queries;
    float sum = 0;
    for (int d = lane * 8; inside && d < p.width; d += LANES * 8) {
        const long long place = (long long)of.batch * p.queries + of.first_query + t;
        const Vec<T> one = load<8>(y + (place * p.heads + h) * p.width + d);
        const Vec<T> two = load<8>(dy + of.batch * dy_strides.batch + h * dy_strides.head
                                   + (of.first_query + t) * dy_strides.row + d);
        #pragma unroll
        for (int i = 0; i < 8; ++i) sum += float(one.values[i]) * float(two.values[i]);
    }
    #pragma unroll
    for (int offset = LANES / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffff, sum, offset);
    if (lane == 0 && t < (of.queries + columns - 1) / columns * columns) {
        const long long head = (long long)of.batch * p.heads + h;
        const int first = extras.query_starts == nullptr ? 0 : sums_start(of, b, columns);
        float* to = sums + 2 * head * pitch + first + t;
        to[0] = inside ? logsumexp[head * extras.length + of.first_query + t] * unit : infinity();
        to[pitch] = sum;
    }
}

// Shared memory: both tiles of rows of each warpgroup, then a ring of both tiles of columns.
template <int D, int W, int N> struct BackwardTiles {
    static constexpr int HALVES = (D + 63) / 64;   // 64 columns each
    static constexpr int A_BYTES = 64 * HALVES * SWIZZLE, B_BYTES = N * HALVES * SWIZZLE;
    static constexpr int STAGE = 2 * B_BYTES + 1024;   // two tiles, two rows of N floats
    static constexpr int ROOM = TILE_ROOM - 2 * W * A_BYTES;
    static constexpr int STAGES = ROOM / STAGE < 4 ? ROOM / STAGE : 4;
};

template <int W, int STAGES> struct BackwardBarriers {
    Barrier a_full[W], a_empty[W], full[STAGES], empty[STAGES];
};

// Each warpgroup has 64 rows, and meets N columns at a time. QUERIES: rows are queries; a1, a2, b1, b2
// are q, dy, k, v, and d1 becomes dq. Else rows are keys and columns queries; a1, a2, b1, b2 are k, v,
// q, dy, and d1, d2 become dk, dv, or one of them. One warpgroup loads, W compute:
//   s = a1 b1^T, w = exp(scale s - logsumexp), g = w (a2 b2^T - delta), d1 = scale g b1, d2 = w b2
// With dropout w in d2 and a2 b2^T are multiplied by what forward multiplied w with.
template <typename T, int D, int W, int N, int PART, bool EXTRAS>
__global__ void __launch_bounds__(WARPGROUP * (W + 1), 1)
attention_backward(T* __restrict__ d1, T* __restrict__ d2, const float* __restrict__ sums,
                   const __grid_constant__ TensorMap a1_map, const __grid_constant__ TensorMap a2_map,
                   const __grid_constant__ TensorMap b1_map, const __grid_constant__ TensorMap b2_map,
                   const __grid_constant__ Problem p,
                   const __grid_constant__ Extras extras, int pitch, const __grid_constant__ Strides strides) {
    constexpr bool OF_QUERIES = PART == QUERIES, HAS_1 = PART != VALUES, HAS_2 = PART == VALUES || PART == BOTH;
    // A warp reads tiles in the products alone, as one, but each lane reads sums: it says so itself.
    constexpr int ARRIVALS = OF_QUERIES ? 4 : WARPGROUP;   // of a warpgroup, for a stage
    using Tiles = BackwardTiles<D, W, N>;
    constexpr int M = 64 * W, STAGES = Tiles::STAGES, HALVES = Tiles::HALVES, B_BYTES = Tiles::B_BYTES;
    extern __shared__ unsigned char raw[];
    unsigned char* a_tiles = raw + (-shared_address(raw) & 1023);
    unsigned char* stages = a_tiles + 2 * W * Tiles::A_BYTES;
    __shared__ BackwardBarriers<W, STAGES> barriers;
    if (threadIdx.x == 0) {
        for (int g = 0; g < W; ++g) {
            barriers.a_full[g].init(1);
            barriers.a_empty[g].init(4);
        }
        for (int s = 0; s < STAGES; ++s) {
            barriers.full[s].init(1);
            barriers.empty[s].init(ARRIVALS * W);
        }
        publish_barriers();
    }
    __syncthreads();

    const int row_blocks = ((OF_QUERIES ? p.queries : p.keys) + M - 1) / M, tiles = row_blocks * p.heads_total;
    const int heads_each = OF_QUERIES ? 1 : p.heads / p.kv_heads;   // query heads that a tile meets
    struct Met {   // rows and columns of a sequence; row r meets the columns from r + low to r + high
        int rows, columns, low, high;

        __device__ int first(int row) const { return max(0, row + low) / N; }   // block of columns
        __device__ int last(int end) const { return (max(0, min(columns, end + high)) + N - 1) / N; }
    };
    auto met = [&](const Sequence& of) {
        const int shift = of.keys - of.queries;
        if (OF_QUERIES) return Met{of.queries, of.keys, shift - p.before, shift + p.after};
        return Met{of.keys, of.queries, -shift - p.after, p.before - shift};
    };

    if (threadIdx.x < WARPGROUP) {   // the producer
        give_registers<PRODUCER_REGISTERS<W>>();
        if (threadIdx.x == 0) {
            Place<STAGES> at;
            unsigned a_parity = 0;
            for (int round = 0, index; (index = tile_index(round)) < tiles; ++round) {
                const Tile tile = tile_of(p, OF_QUERIES ? p.heads : p.kv_heads, index, row_blocks, !OF_QUERIES);
                const Sequence of = sequence_of<EXTRAS>(p, extras, tile.batch);
                const Met with = met(of);
                const int first = with.first(tile.block * M), last = with.last(min(tile.block * M + M, with.rows));
                if (tile.block * M >= with.rows || first >= last) continue;
                const int row = (OF_QUERIES ? of.first_query : of.first_key) + tile.block * M;
                #pragma unroll 1
                for (int g = 0; g < W; ++g) {
                    barriers.a_empty[g].wait(a_parity ^ 1);
                    barriers.a_full[g].arrive_and_expect(2 * Tiles::A_BYTES);
                    #pragma unroll 1
                    for (int h = 0; h < HALVES; ++h) {
                        unsigned char* to = a_tiles + 2 * g * Tiles::A_BYTES + h * 64 * SWIZZLE;
                        copy_box(to, a1_map, barriers.a_full[g], h * 64, row + g * 64, tile.head, of.batch);
                        copy_box(to + Tiles::A_BYTES, a2_map, barriers.a_full[g], h * 64, row + g * 64,
                                 tile.head, of.batch);
                    }
                }
                a_parity ^= 1;
                int head = OF_QUERIES ? tile.head / (p.heads / p.kv_heads) : tile.head * heads_each;
                const int column = OF_QUERIES ? of.first_key : of.first_query;
                for (int n = first, left = heads_each * (last - first); left > 0; --left) {
                    unsigned char* to = stages + at.stage * Tiles::STAGE;
                    Barrier& full = barriers.full[at.stage];
                    barriers.empty[at.stage].wait(at.parity ^ 1);
                    full.arrive_and_expect(2 * B_BYTES + (OF_QUERIES ? 0 : 2 * N * 4));
                    #pragma unroll 1
                    for (int h = 0; h < HALVES; ++h) {
                        unsigned char* half = to + h * N * SWIZZLE;
                        copy_box(half, b1_map, full, h * 64, column + n * N, head, of.batch);
                        copy_box(half + B_BYTES, b2_map, full, h * 64, column + n * N, head, of.batch);
                    }
                    if (!OF_QUERIES) {
                        const int start = EXTRAS && extras.query_starts ? sums_start(of, tile.batch, N) : 0;
                        const float* from = sums + (of.batch * p.heads + head) * 2ll * pitch + start + n * N;
                        copy_row(to + 2 * B_BYTES, from, N * 4, full);
                        copy_row(to + 2 * B_BYTES + N * 4, from + pitch, N * 4, full);
                    }
                    at.next();
                    if (++n == last) { n = first; ++head; }
                }
            }
        }
    } else {   // the consumers
        take_registers<CONSUMER_REGISTERS<W>>();
        const int group = uniform(threadIdx.x / WARPGROUP) - 1;
        const int lane = threadIdx.x % 32, warp = uniform(threadIdx.x / 32 % 4);
        const float slope = EXTRAS ? LOG2E : p.scale * LOG2E;   // with EXTRAS scores come scaled
        const Word draw = EXTRAS ? draw_number(extras.draw, extras.offset) : 0;

        auto release = [&](Barrier& empty) {
            if (OF_QUERIES)
                arrive_together(empty);
            else
                empty.arrive();
        };

        const unsigned long long a1_at = describe(a_tiles + 2 * group * Tiles::A_BYTES);
        const unsigned long long a2_at = a1_at + Tiles::A_BYTES / 16;
        float s[N / 2], g[N / 2], sum1[HAS_1 ? D / 2 : 1], sum2[HAS_2 ? D / 2 : 1];
        unsigned w_packed[N / 4], g_packed[N / 4];
        Place<STAGES> at;
        unsigned a_parity = 0;

        auto multiply = [&](float (&to)[N / 2], unsigned long long a_at, const unsigned char* tile) {
            const unsigned long long b_at = describe(tile);
            pin(to);
            wgmma_begin();
            #pragma unroll
            for (int d = 0; d < D / 16; ++d)
                Wgmma<T, N>::template run<>(to, a_at + d / 4 * (64 * SWIZZLE / 16) + d % 4 * 2,
                                            b_at + d / 4 * (N * SWIZZLE / 16) + d % 4 * 2, d > 0);
            wgmma_commit();
        };
        auto accumulate = [&](float (&to)[D / 2], const unsigned (&a)[N / 4], const unsigned char* tile) {
            const unsigned long long b_at = describe(tile, N * SWIZZLE);
            pin(to);
            wgmma_begin();
            #pragma unroll
            for (int n = 0; n < N / 16; ++n)
                Wgmma<T, D>::template run<true>(to, a + 4 * n, b_at + n * (16 * SWIZZLE / 16), true);
            wgmma_commit();
        };

        for (int round = 0, index; (index = tile_index(round)) < tiles; ++round) {
            const Tile tile = tile_of(p, OF_QUERIES ? p.heads : p.kv_heads, index, row_blocks, !OF_QUERIES);
            const Sequence of = sequence_of<EXTRAS>(p, extras, tile.batch);
            const Met with = met(of);
            const int row = tile.block * M + group * 64;   // the first of this warpgroup
            const int own_row = row + warp * 16 + lane / 4;   // the thread's: this one and 8 later
            if (tile.block * M >= with.rows) continue;
            const int first = with.first(tile.block * M), last = with.last(min(tile.block * M + M, with.rows));
            float row_log_sum[2] = {infinity(), infinity()}, row_delta[2] = {0, 0};
            if (OF_QUERIES) {
                const int start = EXTRAS && extras.query_starts ? sums_start(of, tile.batch, extras.columns) : 0;
                const float* from = sums + (of.batch * p.heads + tile.head) * 2ll * pitch + start + own_row;
                #pragma unroll
                for (int r = 0; r < 2; ++r)
                    if (own_row + 8 * r < with.rows) {
                        row_log_sum[r] = from[8 * r];
                        row_delta[r] = from[8 * r + pitch];
                    }
            }
            #pragma unroll
            for (float& x : sum1) x = 0;
            #pragma unroll
            for (float& x : sum2) x = 0;

            auto scale_and_add = [&](int n, int head) {   // with EXTRAS
                #pragma unroll
                for (float& x : s) x *= p.scale;
                if (extras.bias == nullptr) return;
                const float* bias = extras.bias + tile.batch * extras.bias_batch + head * extras.bias_head;
                const long long row_step = OF_QUERIES ? extras.bias_query : extras.bias_key;
                const long long column_step = OF_QUERIES ? extras.bias_key : extras.bias_query;
                #pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const float* from = bias + min(own_row + 8 * r, with.rows - 1) * row_step;
                    #pragma unroll
                    for (int j = 0; j < N / 8; ++j)
                        #pragma unroll
                        for (int e = 0; e < 2; ++e)
                            s[4 * j + 2 * r + e] +=
                                from[min(n * N + lane % 4 * 2 + 8 * j + e, with.columns - 1) * column_step];
                }
            };
            auto kept = [&](int n, int head) -> unsigned long long {   // with EXTRAS: a bit for each weight
                if (extras.threshold >> 16) return ~0ull;
                const Word first = (Word(tile.batch) * p.heads + head) * p.queries, pitch = p.keys;
                if (OF_QUERIES) return keep_rows<N>(extras, draw, (first + own_row) * pitch + n * N, pitch);
                return keep_columns<N>(extras, draw, (first + n * N) * pitch + row + warp * 16, pitch);
            };

            int before = -1;   // the stage whose tiles the last products still use
            if (first < last) barriers.a_full[group].wait(a_parity);
            for (int each = 0; each < heads_each; ++each) {
                for (int n = first; n < last; ++n) {
                    const unsigned char* tile1 = stages + at.stage * Tiles::STAGE;
                    const unsigned char* tile2 = tile1 + B_BYTES;
                    barriers.full[at.stage].wait(at.parity);
                    const int apart = n * N - row;   // of the first column and the first row
                    if (apart + N <= with.low || apart > 63 + with.high || row >= with.rows) {
                        if (before >= 0) {   // only other warpgroups meet this block
                            wgmma_wait<0>();
                            release(barriers.empty[before]);
                            before = -1;
                        }
                        release(barriers.empty[at.stage]);
                        at.next();
                        continue;
                    }
                    multiply(s, a1_at, tile1);
                    wgmma_wait<1>();   // for the products before these
                    if (before >= 0) release(barriers.empty[before]);
                    if constexpr (HAS_1) {
                        multiply(g, a2_at, tile2);
                        wgmma_wait<1>();
                    } else {
                        wgmma_wait<0>();
                    }
                    pin(s);
                    const int query_head = OF_QUERIES ? tile.head : tile.head * heads_each + each;
                    if (EXTRAS) scale_and_add(n, query_head);
                    if (apart < 63 + with.low || apart + N > 1 + with.high || n * N + N > with.columns) {
                        #pragma unroll
                        for (int r = 0; r < 2; ++r) {
                            const int diagonal = own_row + 8 * r, column = n * N + lane % 4 * 2;
                            const int start = diagonal + with.low - column;
                            const int end = min(with.columns, diagonal + with.high + 1) - column;
                            #pragma unroll
                            for (int j = 0; j < N / 8; ++j)
                                #pragma unroll
                                for (int e = 0; e < 2; ++e)
                                    if (8 * j + e < start || 8 * j + e >= end) s[4 * j + 2 * r + e] = -infinity();
                        }
                    }
                    const float* column_sums = reinterpret_cast<const float*>(tile2 + B_BYTES) + lane % 4 * 2;
                    #pragma unroll
                    for (int j = 0; j < N / 8; ++j) {
                        float2 column = {0, 0};
                        if (!OF_QUERIES) column = *reinterpret_cast<const float2*>(column_sums + 8 * j);
                        #pragma unroll
                        for (int i = 0; i < 4; ++i) {
                            const float sum = OF_QUERIES ? row_log_sum[i / 2] : i % 2 ? column.y : column.x;
                            float& x = s[4 * j + i];
                            x = exp2_fast(EXTRAS ? (x - sum) * slope : x * slope - sum);
                        }
                    }
                    const unsigned long long keep = EXTRAS ? kept(n, query_head) : 0;
                    if constexpr (HAS_1) {
                        wgmma_wait<0>();
                        pin(g);
                        #pragma unroll
                        for (int j = 0; j < N / 8; ++j) {
                            float2 column = {0, 0};
                            if (!OF_QUERIES) column = *reinterpret_cast<const float2*>(column_sums + N + 8 * j);
                            #pragma unroll
                            for (int i = 0; i < 4; ++i) {
                                const float own = OF_QUERIES ? row_delta[i / 2] : i % 2 ? column.y : column.x;
                                float& x = g[4 * j + i];
                                if (EXTRAS) x = keep >> (4 * j + i) & 1 ? x * extras.kept_scale : 0;
                                x = s[4 * j + i] * (x - own);
                            }
                        }
                    }
                    if constexpr (HAS_2) {
                        #pragma unroll
                        for (int i = 0; i < N / 2; ++i)
                            if (EXTRAS && !(keep >> i & 1)) s[i] = 0;
                        pack_all<T>(w_packed, s);
                        accumulate(sum2, w_packed, tile2);
                    }
                    if constexpr (HAS_1) {
                        pack_all<T>(g_packed, g);
                        accumulate(sum1, g_packed, tile1);
                    }
                    before = at.stage;
                    at.next();
                }
            }
            wgmma_wait<0>();
            pin(sum1);
            pin(sum2);
            if (before >= 0) release(barriers.empty[before]);
            if (first < last) {
                arrive_together(barriers.a_empty[group]);
                a_parity ^= 1;
            }
            #pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int t = own_row + 8 * r;
                const int start = OF_QUERIES ? of.first_query : of.first_key;
                const long long to = of.batch * strides.batch + tile.head * strides.head + (start + t) * strides.row;
                const int width = t < with.rows ? p.width : 0;
                if constexpr (HAS_1) store_row(d1 + to, sum1, r, p.scale, width);
                if constexpr (HAS_2) store_row(d2 + to, sum2, r, EXTRAS ? extras.kept_scale : 1.0f, width);
            }
        }
    }
}
