// Flash attention on Hopper, forward (Dao 2023, arXiv:2307.08691; Shah et al. 2024, arXiv:2407.08608).
//
//   y = softmax(scale q k^T) v, written with =, and the logarithm of each row's sum for backward
//
// The matrix of scores exists 64 rows by N keys at a time, in registers. A persistent block of W + 1
// warpgroups holds 64 W queries: one warpgroup has the copy engine bring keys and values, a few tiles
// ahead; each of the others multiplies its 64 queries with a tile of keys, turns the scores into
// weights, and multiplies these with the tile of values. Three things go on at once: the products
// with the next keys and with the last values on the tensor cores, the exponentials in between, and,
// in turns, the same half a step later in the other warpgroups.
//
// Floor: 4 D operations and one exponential for each query and key that meet. The tensor cores do
// 795e12 operations a second here, the special units 16 exponentials a clock and multiprocessor,
// 4.2e12 a second: with D = 64 the exponentials take 0.74 of the products' time, with D = 128 0.37.
// Memory: q, k, v, y once, and from the L2 cache k and v once for each 64 W queries; both far less.
//
// arch: sm_90a
// where: T = __half | __nv_bfloat16
// where: TILES = 64, 3, 128 | 128, 2, 128 | 128, 2, 176
// instantiate: attention_forward<{T}, {TILES}, {true | false}>
#include "attention_sm90.cuh"

// Shared memory: the queries of each warpgroup, then rings of tiles of keys and of values.
template <int D, int W, int N> struct ForwardTiles {
    static constexpr int Q_BYTES = 64 * D * 2, K_BYTES = N * D * 2;   // Q: of one warpgroup
    static constexpr int ROOM = TILE_ROOM - W * Q_BYTES;
    static constexpr int STAGES = ROOM / (2 * K_BYTES) < 4 ? ROOM / (2 * K_BYTES) : 4;
};

template <int D, int W, int N> struct ForwardBarriers {
    static constexpr int STAGES = ForwardTiles<D, W, N>::STAGES;
    Barrier q_full[W], q_empty[W], k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
};

// y: (batch, queries, heads, D). logsumexp: (batch, heads, queries); infinite, and y zero, where a
// query sees no key. One warpgroup loads, W compute: 64 queries each, N keys at a time.
template <typename T, int D, int W, int N, bool CAUSAL>
__global__ void __launch_bounds__(WARPGROUP * (W + 1), 1)
attention_forward(T* __restrict__ y, float* __restrict__ logsumexp,
                  const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
                  const __grid_constant__ TensorMap v_map, const __grid_constant__ Problem p) {
    using Tiles = ForwardTiles<D, W, N>;
    constexpr int M = 64 * W, STAGES = Tiles::STAGES, HALVES = D / 64;
    extern __shared__ unsigned char raw[];
    unsigned char* q_tiles = raw + (-shared_address(raw) & 1023);
    unsigned char* k_tiles = q_tiles + W * Tiles::Q_BYTES;
    unsigned char* v_tiles = k_tiles + STAGES * Tiles::K_BYTES;
    __shared__ ForwardBarriers<D, W, N> barriers;
    if (threadIdx.x == 0) {
        for (int g = 0; g < W; ++g) {
            barriers.q_full[g].init(1);
            barriers.q_empty[g].init(4);   // one arrival a warp
        }
        for (int s = 0; s < STAGES; ++s) {
            barriers.k_full[s].init(1);
            barriers.v_full[s].init(1);
            barriers.k_empty[s].init(4 * W);
            barriers.v_empty[s].init(4 * W);
        }
        publish_barriers();
    }
    __syncthreads();

    const int blocks = (p.queries + M - 1) / M, tiles = blocks * p.heads_total;
    const int shift = p.keys - p.queries;   // query i sees the keys up to i + shift
    // How many blocks of keys the rows before `end` see.
    auto blocks_seen = [&](int end) {
        const int keys = CAUSAL ? min(p.keys, end + shift) : p.keys;
        return keys > 0 ? (keys + N - 1) / N : 0;
    };

    if (threadIdx.x < WARPGROUP) {   // the producer
        give_registers<PRODUCER_REGISTERS<W>>();
        if (threadIdx.x == 0) {
            Place<STAGES> at;
            unsigned q_parity = 0;
            for (int round = 0, index; (index = tile_index(round)) < tiles; ++round) {
                const Tile tile = tile_of(p, p.heads, index, blocks, false);
                const int kv_head = tile.head / (p.heads / p.kv_heads);
                for (int n = blocks_seen(min(tile.block * M + M, p.queries)) - 1, first = n; n >= 0; --n) {
                    barriers.k_empty[at.stage].wait(at.parity ^ 1);
                    barriers.k_full[at.stage].arrive_and_expect(Tiles::K_BYTES);
                    for (int h = 0; h < HALVES; ++h)
                        copy_box(k_tiles + at.stage * Tiles::K_BYTES + h * N * SWIZZLE, k_map,
                                 barriers.k_full[at.stage], h * 64, n * N, kv_head, tile.batch);
                    if (n == first) {
                        for (int g = 0; g < W; ++g) {
                            barriers.q_empty[g].wait(q_parity ^ 1);
                            barriers.q_full[g].arrive_and_expect(Tiles::Q_BYTES);
                            for (int h = 0; h < HALVES; ++h)
                                copy_box(q_tiles + g * Tiles::Q_BYTES + h * 64 * SWIZZLE, q_map,
                                         barriers.q_full[g], h * 64, tile.block * M + g * 64, tile.head,
                                         tile.batch);
                        }
                        q_parity ^= 1;
                    }
                    barriers.v_empty[at.stage].wait(at.parity ^ 1);
                    barriers.v_full[at.stage].arrive_and_expect(Tiles::K_BYTES);
                    for (int h = 0; h < HALVES; ++h)
                        copy_box(v_tiles + at.stage * Tiles::K_BYTES + h * N * SWIZZLE, v_map,
                                 barriers.v_full[at.stage], h * 64, n * N, kv_head, tile.batch);
                    at.next();
                }
            }
        }
    } else {   // the consumers
        take_registers<CONSUMER_REGISTERS<W>>();
        const int group = uniform(threadIdx.x / WARPGROUP) - 1;
        const int lane = threadIdx.x % 32, warp = uniform(threadIdx.x / 32 % 4);
        const float slope = p.scale * LOG2E;
        // The turns: one warpgroup after the other issues its matrix products, so that the
        // exponentials of one run under the products of the next.
        auto await_turn = [&] { named_wait(1 + group, 2 * WARPGROUP); };
        auto pass_turn = [&] { named_arrive(1 + (group + 1) % W, 2 * WARPGROUP); };
        auto release = [&](Barrier& empty) { if (lane == 0) empty.arrive(); };
        if (group == W - 1) pass_turn();

        const unsigned long long q_at = describe(q_tiles + group * Tiles::Q_BYTES);
        float s[N / 2], o[D / 2];
        unsigned weights[N / 4];
        float peak[2], total[2];   // of the thread's two rows: largest score, sum of weights
        Place<STAGES> at, before;
        unsigned q_parity = 0;

        auto multiply_keys = [&] {   // s = q k^T
            const unsigned long long k_at = describe(k_tiles + at.stage * Tiles::K_BYTES);
            pin(s);
            wgmma_begin();
            #pragma unroll
            for (int d = 0; d < D / 16; ++d)   // 64 columns, then the next 64
                Wgmma<T, N>::template run<>(s, q_at + d / 4 * (64 * SWIZZLE / 16) + d % 4 * 2,
                                            k_at + d / 4 * (N * SWIZZLE / 16) + d % 4 * 2, d > 0);
            wgmma_commit();
        };
        auto multiply_values = [&](const Place<STAGES>& place, bool add) {   // o (+)= weights v
            const unsigned long long v_at = describe(v_tiles + place.stage * Tiles::K_BYTES, N * SWIZZLE);
            pin(o);
            wgmma_begin();
            #pragma unroll
            for (int n = 0; n < N / 16; ++n)
                Wgmma<T, D>::template run<true>(o, weights + 4 * n, v_at + n * (16 * SWIZZLE / 16),
                                                add || n > 0);
            wgmma_commit();
        };

        for (int round = 0, index; (index = tile_index(round)) < tiles; ++round) {
            const Tile tile = tile_of(p, p.heads, index, blocks, false);
            const int row = tile.block * M + group * 64;   // the first of this warpgroup
            const int own_row = row + warp * 16 + lane / 4;   // the thread's: this one and 8 later
            const int count = blocks_seen(min(tile.block * M + M, p.queries));
            const int seen = row < p.queries ? blocks_seen(min(row + 64, p.queries)) : 0;
            int n = count - 1;
            for (; n >= seen; --n) {   // blocks that only later rows of the tile see
                if (n < count - 1) { await_turn(); pass_turn(); }
                barriers.k_full[at.stage].wait(at.parity);
                release(barriers.k_empty[at.stage]);
                barriers.v_full[at.stage].wait(at.parity);
                release(barriers.v_empty[at.stage]);
                at.next();
            }
            if (count) barriers.q_full[group].wait(q_parity);

            // Mask the scores of block n where it is not seen by all rows.
            auto mask = [&](int n) {
                #pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const int end = CAUSAL ? min(p.keys, own_row + 8 * r + shift + 1) : p.keys;
                    const int left = end - n * N - lane % 4 * 2;
                    #pragma unroll
                    for (int j = 0; j < N / 8; ++j)
                        #pragma unroll
                        for (int e = 0; e < 2; ++e)
                            if (8 * j + e >= left) s[4 * j + 2 * r + e] = -infinity();
                }
            };
            // s becomes weights relative to the peak; returns by what earlier weights must shrink.
            auto exponentiate = [&](float (&shrink)[2], bool first) {
                #pragma unroll
                for (int r = 0; r < 2; ++r) {
                    float largest = s[2 * r];
                    #pragma unroll
                    for (int j = 0; j < N / 8; ++j)
                        #pragma unroll
                        for (int e = 0; e < 2; ++e) largest = fmaxf(largest, s[4 * j + 2 * r + e]);
                    largest = quad_reduce(largest, [](float a, float b) { return fmaxf(a, b); });
                    if (!first) largest = fmaxf(largest, peak[r]);
                    const float base = largest == -infinity() ? 0.0f : largest * slope;
                    shrink[r] = first ? 1.0f : exp2_fast(peak[r] * slope - base);
                    peak[r] = largest;
                    float sum = 0;
                    #pragma unroll
                    for (int j = 0; j < N / 8; ++j)
                        #pragma unroll
                        for (int e = 0; e < 2; ++e) {
                            float& x = s[4 * j + 2 * r + e];
                            x = exp2_fast(x * slope - base);
                            sum += x;
                        }
                    total[r] = first ? sum : total[r] * shrink[r] + sum;
                }
            };
            bool add = false;
            auto step = [&](int n, bool masked) {   // products with block n and with the values before
                float shrink[2];
                barriers.k_full[at.stage].wait(at.parity);
                await_turn();
                multiply_keys();
                barriers.v_full[before.stage].wait(before.parity);
                multiply_values(before, add);
                pass_turn();
                wgmma_wait<1>();
                pin(s);
                release(barriers.k_empty[at.stage]);
                if (masked) mask(n);
                exponentiate(shrink, false);
                wgmma_wait<0>();
                pin(o);
                release(barriers.v_empty[before.stage]);
                pack_all<T>(weights, s);
                if (__any_sync(0xffffffff, shrink[0] != 1.0f || shrink[1] != 1.0f)) {
                    #pragma unroll
                    for (int i = 0; i < D / 2; ++i) o[i] *= shrink[i / 2 % 2];
                }
                add = true;
                before = at;
                at.next();
            };

            if (seen) {
                if (seen < count) { await_turn(); pass_turn(); }
                float shrink[2];
                barriers.k_full[at.stage].wait(at.parity);
                multiply_keys();
                wgmma_wait<0>();
                pin(s);
                release(barriers.k_empty[at.stage]);
                mask(n);
                exponentiate(shrink, true);
                pack_all<T>(weights, s);
                before = at;
                at.next();
                --n;
                if (CAUSAL) {   // else the first was the only one to mask
                    // The blocks before this one are seen by all rows.
                    const int whole = max(0, min(p.keys, row + shift + 1)) / N;
                    for (; n >= whole; --n) step(n, true);
                }
                for (; n >= 0; --n) step(n, false);
                release(barriers.q_empty[group]);
                barriers.v_full[before.stage].wait(before.parity);
                multiply_values(before, add);
                wgmma_wait<0>();
                pin(o);
                release(barriers.v_empty[before.stage]);
            } else {
                if (count) release(barriers.q_empty[group]);
                #pragma unroll
                for (float& x : o) x = 0;
            }
            if (count) q_parity ^= 1;

            #pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int t = own_row + 8 * r;
                const long long place = ((long long)tile.batch * p.queries + t) * p.heads + tile.head;
                float sum = 0;
                if (seen) sum = quad_reduce(total[r], [](float a, float b) { return a + b; });
                store_row(y + place * D, o, r, sum == 0 ? 0.0f : 1 / sum, t < p.queries);
                if (lane % 4 == 0 && t < p.queries)
                    logsumexp[((long long)tile.batch * p.heads + tile.head) * p.queries + t] =
                        sum == 0 ? infinity() : peak[r] * p.scale + logf(sum);
            }
        }
    }
}
