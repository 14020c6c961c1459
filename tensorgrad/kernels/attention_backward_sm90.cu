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
// Floor: 14 D operations and two exponentials for each query and key that meet, where the usual count
// of operations is 10 D: of the tensor cores' 795e12 operations a second 568e12 can count.
//
// arch: sm_90a
// where: T = __half | __nv_bfloat16
// instantiate: attention_backward_rows<{T}, {64 | 128}>
// instantiate: attention_backward<{T}, {64, 2, 96 | 128, 2, 64}, {true | false}, true>
// instantiate: attention_backward<{T}, {64, 3, 64 | 128, 2, 80}, {true | false}, false>
#include "attention_sm90.cuh"

// What backward needs of each query, (heads_total, 2, pitch): the logarithm of its sum to base 2,
// and delta = dy . y. Past the last query they are such that weights and gradients there become 0.
// y: (batch, queries, heads, D). dy: strides in elements. D / 8 lanes a row.
template <typename T, int D>
__global__ void __launch_bounds__(256)
attention_backward_rows(float* __restrict__ sums, const T* __restrict__ y, const T* __restrict__ dy,
                        const float* __restrict__ logsumexp, int batch, int heads, int queries,
                        int pitch, long long dy_batch, long long dy_head, long long dy_row) {
    constexpr int LANES = D / 8;
    const long long row = (blockIdx.x * 256ll + threadIdx.x) / LANES;
    const int lane = threadIdx.x % LANES;
    const int h = row % heads, t = row / heads % pitch, b = row / heads / pitch;
    float sum = 0;
    if (b < batch && t < queries) {
        const Vec<T> one = load<8>(y + (((long long)b * queries + t) * heads + h) * D + lane * 8);
        const Vec<T> two = load<8>(dy + b * dy_batch + h * dy_head + t * dy_row + lane * 8);
        #pragma unroll
        for (int i = 0; i < 8; ++i) sum += float(one.values[i]) * float(two.values[i]);
    }
    #pragma unroll
    for (int offset = LANES / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffff, sum, offset);
    if (b < batch && lane == 0) {
        const long long head = (long long)b * heads + h;
        sums[(2 * head + 1) * pitch + t] = sum;
        sums[2 * head * pitch + t] = t < queries ? logsumexp[head * queries + t] * LOG2E : infinity();
    }
}

// Shared memory: both tiles of rows of each warpgroup, then a ring of both tiles of columns.
template <int D, int W, int N> struct BackwardTiles {
    static constexpr int A_BYTES = 64 * D * 2, B_BYTES = N * D * 2;
    static constexpr int STAGE = 2 * B_BYTES + 1024;   // two tiles, two rows of N floats
    static constexpr int ROOM = TILE_ROOM - 2 * W * A_BYTES;
    static constexpr int STAGES = ROOM / STAGE < 4 ? ROOM / STAGE : 4;
};

template <int W, int STAGES> struct BackwardBarriers {
    Barrier a_full[W], a_empty[W], full[STAGES], empty[STAGES];
};

// How a gradient lies in memory, in elements.
struct Strides {
    long long batch, head, row;
};

// Each warpgroup has 64 rows, and meets N columns at a time. With KEYS rows are keys and columns
// queries: a1, a2, b1, b2 are k, v, q, dy, and d1, d2 become dk, dv. Else rows are queries: a1, a2,
// b1, b2 are q, dy, k, v, and d1 becomes dq. One warpgroup loads, W compute:
//   s = a1 b1^T, w = exp(scale s - logsumexp), g = w (a2 b2^T - delta), d1 = scale g b1, d2 = w b2
template <typename T, int D, int W, int N, bool CAUSAL, bool KEYS>
__global__ void __launch_bounds__(WARPGROUP * (W + 1), 1)
attention_backward(T* __restrict__ d1, T* __restrict__ d2, const float* __restrict__ sums,
                   const __grid_constant__ TensorMap a1_map,
                   const __grid_constant__ TensorMap a2_map, const __grid_constant__ TensorMap b1_map,
                   const __grid_constant__ TensorMap b2_map, const __grid_constant__ Problem p,
                   int pitch, const __grid_constant__ Strides strides) {
    using Tiles = BackwardTiles<D, W, N>;
    constexpr int M = 64 * W, STAGES = Tiles::STAGES, HALVES = D / 64, B_BYTES = Tiles::B_BYTES;
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
            barriers.empty[s].init(4 * W);
        }
        publish_barriers();
    }
    __syncthreads();

    const int rows = KEYS ? p.keys : p.queries, columns = KEYS ? p.queries : p.keys;
    const int blocks = (rows + M - 1) / M, tiles = blocks * p.heads_total;
    const int shift = p.keys - p.queries;   // query i sees the keys up to i + shift
    const int heads_each = KEYS ? p.heads / p.kv_heads : 1;   // query heads that a tile meets
    // The blocks of columns that meet the rows from `row` to `end`: first to last - 1.
    auto first_block = [&](int row) { return KEYS && CAUSAL ? max(0, row - shift) / N : 0; };
    auto last_block = [&](int end) {
        const int met = !KEYS && CAUSAL ? min(columns, end + shift) : columns;
        return met > 0 ? (met + N - 1) / N : 0;
    };

    if (threadIdx.x < WARPGROUP) {   // the producer
        give_registers<PRODUCER_REGISTERS<W>>();
        if (threadIdx.x == 0) {
            Place<STAGES> at;
            unsigned a_parity = 0;
            for (int round = 0, index; (index = tile_index(round)) < tiles; ++round) {
                const Tile tile = tile_of(p, KEYS ? p.kv_heads : p.heads, index, blocks, KEYS);
                const int first = first_block(tile.block * M), last = last_block(min(tile.block * M + M, rows));
                if (first >= last) continue;
                for (int g = 0; g < W; ++g) {
                    barriers.a_empty[g].wait(a_parity ^ 1);
                    barriers.a_full[g].arrive_and_expect(2 * Tiles::A_BYTES);
                    for (int h = 0; h < HALVES; ++h) {
                        unsigned char* to = a_tiles + 2 * g * Tiles::A_BYTES + h * 64 * SWIZZLE;
                        copy_box(to, a1_map, barriers.a_full[g], h * 64, tile.block * M + g * 64, tile.head,
                                 tile.batch);
                        copy_box(to + Tiles::A_BYTES, a2_map, barriers.a_full[g], h * 64,
                                 tile.block * M + g * 64, tile.head, tile.batch);
                    }
                }
                a_parity ^= 1;
                int head = KEYS ? tile.head * heads_each : tile.head / (p.heads / p.kv_heads);
                for (int n = first, left = heads_each * (last - first); left > 0; --left) {
                    unsigned char* to = stages + at.stage * Tiles::STAGE;
                    Barrier& full = barriers.full[at.stage];
                    barriers.empty[at.stage].wait(at.parity ^ 1);
                    full.arrive_and_expect(2 * B_BYTES + (KEYS ? 2 * N * 4 : 0));
                    for (int h = 0; h < HALVES; ++h) {
                        copy_box(to + h * N * SWIZZLE, b1_map, full, h * 64, n * N, head, tile.batch);
                        copy_box(to + B_BYTES + h * N * SWIZZLE, b2_map, full, h * 64, n * N, head, tile.batch);
                    }
                    if (KEYS) {
                        const float* from = sums + (tile.batch * p.heads + head) * 2ll * pitch + n * N;
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
        const float slope = p.scale * LOG2E;
        auto release = [&](Barrier& empty) { if (lane == 0) empty.arrive(); };

        const unsigned long long a1_at = describe(a_tiles + 2 * group * Tiles::A_BYTES);
        const unsigned long long a2_at = a1_at + Tiles::A_BYTES / 16;
        float s[N / 2], g[N / 2], sum1[D / 2], sum2[KEYS ? D / 2 : 1];
        unsigned w_packed[N / 4], g_packed[N / 4];
        Place<STAGES> at;
        int before = 0;
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
            const Tile tile = tile_of(p, KEYS ? p.kv_heads : p.heads, index, blocks, KEYS);
            const int row = tile.block * M + group * 64;   // the first of this warpgroup
            const int own_row = row + warp * 16 + lane / 4;   // the thread's: this one and 8 later
            const int first = first_block(tile.block * M), last = last_block(min(tile.block * M + M, rows));
            const bool none = row >= rows;
            const int own_first = none ? last : KEYS ? max(first, first_block(row)) : 0;
            const int own_last = KEYS || none ? last : min(last, last_block(min(row + 64, rows)));
            // Blocks in [whole_first, whole_last) are met by all rows.
            const int whole_first = KEYS && CAUSAL ? (max(0, row + 63 - shift) + N - 1) / N : 0;
            const int whole_last =
                KEYS ? last : max(0, CAUSAL ? min(columns, row + shift + 1) : columns) / N;
            float row_log2sum[2] = {infinity(), infinity()}, row_delta[2] = {0, 0};
            if (!KEYS) {
                #pragma unroll
                for (int r = 0; r < 2; ++r)
                    if (own_row + 8 * r < rows) {
                        const float* from =
                            sums + (tile.batch * p.heads + tile.head) * 2ll * pitch + own_row + 8 * r;
                        row_log2sum[r] = from[0];
                        row_delta[r] = from[pitch];
                    }
            }
            #pragma unroll
            for (float& x : sum1) x = 0;
            #pragma unroll
            for (float& x : sum2) x = 0;

            bool pending = false;   // the last products still run, on the tiles of stage `before`
            if (first < last) barriers.a_full[group].wait(a_parity);
            for (int each = 0; each < heads_each; ++each) {
                for (int n = first; n < last; ++n) {
                    const unsigned char* tile1 = stages + at.stage * Tiles::STAGE;
                    const unsigned char* tile2 = tile1 + B_BYTES;
                    barriers.full[at.stage].wait(at.parity);
                    if (n < own_first || n >= own_last) {   // only other warpgroups meet it
                        if (pending) {
                            wgmma_wait<0>();
                            release(barriers.empty[before]);
                            pending = false;
                        }
                        release(barriers.empty[at.stage]);
                        at.next();
                        continue;
                    }
                    multiply(s, a1_at, tile1);
                    wgmma_wait<1>();   // for the products before these
                    if (pending) release(barriers.empty[before]);
                    multiply(g, a2_at, tile2);
                    wgmma_wait<1>();
                    pin(s);
                    if (n < whole_first || n >= whole_last) {
                        #pragma unroll
                        for (int r = 0; r < 2; ++r) {
                            const int start = own_row + 8 * r - shift;   // KEYS: the first query that sees the row
                            const int end = CAUSAL ? min(columns, own_row + 8 * r + shift + 1) : columns;
                            const int place = n * N + lane % 4 * 2;
                            #pragma unroll
                            for (int j = 0; j < N / 8; ++j)
                                #pragma unroll
                                for (int e = 0; e < 2; ++e)
                                    if (KEYS ? place + 8 * j + e < start : place + 8 * j + e >= end)
                                        s[4 * j + 2 * r + e] = -infinity();
                        }
                    }
                    const float* column_sums = reinterpret_cast<const float*>(tile2 + B_BYTES) + lane % 4 * 2;
                    #pragma unroll
                    for (int j = 0; j < N / 8; ++j) {
                        float2 column = {0, 0};
                        if (KEYS) column = *reinterpret_cast<const float2*>(column_sums + 8 * j);
                        #pragma unroll
                        for (int i = 0; i < 4; ++i) {
                            const float sum = !KEYS ? row_log2sum[i / 2] : i % 2 ? column.y : column.x;
                            s[4 * j + i] = exp2_fast(s[4 * j + i] * slope - sum);
                        }
                    }
                    wgmma_wait<0>();
                    pin(g);
                    #pragma unroll
                    for (int j = 0; j < N / 8; ++j) {
                        float2 column = {0, 0};
                        if (KEYS) column = *reinterpret_cast<const float2*>(column_sums + N + 8 * j);
                        #pragma unroll
                        for (int i = 0; i < 4; ++i) {
                            const float own = !KEYS ? row_delta[i / 2] : i % 2 ? column.y : column.x;
                            g[4 * j + i] = s[4 * j + i] * (g[4 * j + i] - own);
                        }
                    }
                    if constexpr (KEYS) {
                        pack_all<T>(w_packed, s);
                        accumulate(sum2, w_packed, tile2);
                    }
                    pack_all<T>(g_packed, g);
                    accumulate(sum1, g_packed, tile1);
                    before = at.stage;
                    pending = true;
                    at.next();
                }
            }
            wgmma_wait<0>();
            pin(sum1);
            if constexpr (KEYS) pin(sum2);
            if (pending) release(barriers.empty[before]);
            if (first < last) {
                release(barriers.a_empty[group]);
                a_parity ^= 1;
            }
            #pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int t = own_row + 8 * r;
                const long long to = tile.batch * strides.batch + tile.head * strides.head + t * strides.row;
                store_row(d1 + to, sum1, r, p.scale, t < rows);
                if constexpr (KEYS) store_row(d2 + to, sum2, r, 1.0f, t < rows);
            }
        }
    }
}
