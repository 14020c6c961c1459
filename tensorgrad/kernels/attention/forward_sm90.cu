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
// Who sees whom is a band: keys from `before` to `after` a query's own place (causal, a window, all).
// Blocks of keys outside are skipped, only blocks on its rim are masked. What else there is, a bias on
// the scores, dropout, sequences of unequal length, any scale, costs the kernels with EXTRAS alone.
// D is 32, 64, 96, 128 or 256; heads of a width in between have zeros where it is more.
//
// Floor: 4 D operations and one exponential for each query and key that meet. The tensor cores do
// 795e12 operations a second here, the special units 16 exponentials a clock and multiprocessor,
// 4.2e12 a second: with D = 64 the exponentials take 0.74 of the products' time, with D = 128 0.37.
// Memory: q, k, v, y once, and from the L2 cache k and v once for each 64 W queries; both far less.
//
// arch: sm_90a
// where: T = __half | __nv_bfloat16
// where: TILES = 32, 3, 128 | 64, 3, 128 | 96, 3, 96 | 128, 2, 128 | 128, 2, 176 | 256, 2, 80
// instantiate: attention_forward<{T}, {TILES}, false>
// instantiate: attention_forward<{T}, {64, 3, 64 | 128, 2, 64 | 256, 2, 32}, true>
#include "attention/sm90.cuh"

// Of a thread, where one warpgroup loads and W compute. A block starts with 168 a thread where W is
// 2, else 128: if these came to more, the warpgroups would wait for registers for ever.
template <int W> constexpr int PRODUCER_REGISTERS = W == 3 ? 32 : 40;
template <int W> constexpr int CONSUMER_REGISTERS = W == 3 ? 160 : 232;

// Shared memory: the queries of each warpgroup, then rings of tiles of keys and of values.
template <int D, int W, int N> struct ForwardTiles {
    static constexpr int HALVES = (D + 63) / 64;   // 64 columns each
    static constexpr int Q_BYTES = 64 * HALVES * SWIZZLE, K_BYTES = N * HALVES * SWIZZLE;   // Q: of one warpgroup
    static constexpr int ROOM = TILE_ROOM - W * Q_BYTES;
    static constexpr int STAGES = ROOM / (2 * K_BYTES) < 4 ? ROOM / (2 * K_BYTES) : 4;
    // Halves of the queries that also fit into registers, so that products read only keys there.
    static constexpr int KEPT = D == 128 && W == 2 && N == 128 ? HALVES : 0;
};

template <int D, int W, int N> struct ForwardBarriers {
    static constexpr int STAGES = ForwardTiles<D, W, N>::STAGES;
    Queue queue;
    Barrier q_full[W], q_empty[W], k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
};

// y: (batch, queries, heads, width). logsumexp: (batch, heads, queries); infinite, and y zero, where a
// query sees no key. taken: 0, and 0 again after. One warpgroup loads, W compute: 64 queries each, N keys at a time.
template <typename T, int D, int W, int N, bool EXTRAS>
__global__ void __launch_bounds__(WARPGROUP * (W + 1), 1)
attention_forward(T* __restrict__ y, float* __restrict__ logsumexp, unsigned* __restrict__ taken,
                  const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
                  const __grid_constant__ TensorMap v_map, const __grid_constant__ Problem p,
                  const __grid_constant__ Extras extras) {
    using Tiles = ForwardTiles<D, W, N>;
    constexpr int M = 64 * W, STAGES = Tiles::STAGES, HALVES = Tiles::HALVES, KEPT = Tiles::KEPT;
    extern __shared__ unsigned char raw[];
    unsigned char* q_tiles = raw + (-shared_address(raw) & 1023);
    unsigned char* k_tiles = q_tiles + W * Tiles::Q_BYTES;
    unsigned char* v_tiles = k_tiles + STAGES * Tiles::K_BYTES;
    __shared__ ForwardBarriers<D, W, N> barriers;
    if (threadIdx.x == 0) {
        barriers.queue.init(4 * W);
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
    // The blocks of keys that the rows from `row` to `end` see: from first_seen to last_seen - 1.
    auto first_seen = [&](const Sequence& of, int row) {
        return max(0, row + of.keys - of.queries - p.before) / N;
    };
    auto last_seen = [&](const Sequence& of, int end) {
        return (max(0, min(of.keys, end + of.keys - of.queries + p.after)) + N - 1) / N;
    };

    if (threadIdx.x < WARPGROUP) {   // the producer
        give_registers<PRODUCER_REGISTERS<W>>();
        if (threadIdx.x == 0) {
            Place<STAGES> at;
            Place<2> turn;
            unsigned q_parity = 0;
            for (int index = blockIdx.x;; index = gridDim.x + atomicInc(taken, tiles - 1)) {
                barriers.queue.put(turn, index);
                if (index >= tiles) break;
                const Tile tile = tile_of(p, p.heads, index, blocks, false);
                const Sequence of = sequence_of<EXTRAS>(p, extras, tile.batch);
                if (EXTRAS && tile.block * M >= of.queries) continue;
                const int kv_head = tile.head / (p.heads / p.kv_heads), query = of.first_query + tile.block * M;
                const int last = last_seen(of, min(tile.block * M + M, of.queries));
                for (int n = last - 1, first = first_seen(of, tile.block * M); n >= first; --n) {
                    barriers.k_empty[at.stage].wait(at.parity ^ 1);
                    barriers.k_full[at.stage].arrive_and_expect(Tiles::K_BYTES);
                    #pragma unroll 1
                    for (int h = 0; h < HALVES; ++h)
                        copy_box(k_tiles + at.stage * Tiles::K_BYTES + h * N * SWIZZLE, k_map,
                                 barriers.k_full[at.stage], h * 64, of.first_key + n * N, kv_head, of.batch);
                    if (n == last - 1) {
                        #pragma unroll 1
                        for (int g = 0; g < W; ++g) {
                            barriers.q_empty[g].wait(q_parity ^ 1);
                            barriers.q_full[g].arrive_and_expect(Tiles::Q_BYTES);
                            for (int h = 0; h < HALVES; ++h)
                                copy_box(q_tiles + g * Tiles::Q_BYTES + h * 64 * SWIZZLE, q_map,
                                         barriers.q_full[g], h * 64, query + g * 64, tile.head,
                                         of.batch);
                        }
                        q_parity ^= 1;
                    }
                    barriers.v_empty[at.stage].wait(at.parity ^ 1);
                    barriers.v_full[at.stage].arrive_and_expect(Tiles::K_BYTES);
                    #pragma unroll 1
                    for (int h = 0; h < HALVES; ++h)
                        copy_box(v_tiles + at.stage * Tiles::K_BYTES + h * N * SWIZZLE, v_map,
                                 barriers.v_full[at.stage], h * 64, of.first_key + n * N, kv_head, of.batch);
                    at.next();
                }
            }
        }
    } else {   // the consumers
        take_registers<CONSUMER_REGISTERS<W>>();
        const int group = uniform(threadIdx.x / WARPGROUP) - 1;
        const int lane = threadIdx.x % 32, warp = uniform(threadIdx.x / 32 % 4);
        const float slope = EXTRAS ? LOG2E : p.scale * LOG2E;   // with EXTRAS scores come scaled
        const Word draw = EXTRAS ? draw_number(extras.draw, extras.offset) : 0;
        // The turns: one warpgroup after the other issues its matrix products, so that the
        // exponentials of one run under the products of the next.
        auto await_turn = [&] { named_wait(1 + group, 2 * WARPGROUP); };
        auto pass_turn = [&] { named_arrive(1 + (group + 1) % W, 2 * WARPGROUP); };
        if (group == W - 1) pass_turn();

        const unsigned char* q_tile = q_tiles + group * Tiles::Q_BYTES;
        const unsigned long long q_at = describe(q_tile);
        unsigned q[KEPT + 1][16];   // the first columns of q; the others are read from shared memory
        float s[N / 2], o[D / 2];
        unsigned weights[N / 4];
        float peak[2], total[2];   // of the thread's two rows: largest score, sum of weights
        Place<STAGES> at, before;
        Place<2> turn;
        unsigned q_parity = 0;

        auto multiply_keys = [&] {   // s = q k^T
            const unsigned long long k_at = describe(k_tiles + at.stage * Tiles::K_BYTES);
            pin(s);
            wgmma_begin();
            #pragma unroll
            for (int d = 0; d < D / 16; ++d) {   // 64 columns, then the next 64
                const unsigned long long k_here = k_at + d / 4 * (N * SWIZZLE / 16) + d % 4 * 2;
                if (d / 4 < KEPT)
                    Wgmma<T, N>::template run<>(s, q[d / 4 < KEPT ? d / 4 : 0] + d % 4 * 4, k_here, d > 0);
                else
                    Wgmma<T, N>::template run<>(s, q_at + d / 4 * (64 * SWIZZLE / 16) + d % 4 * 2, k_here,
                                                d > 0);
            }
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

        for (int index; (index = barriers.queue.take(turn)) < tiles;) {
            const Tile tile = tile_of(p, p.heads, index, blocks, false);
            const Sequence of = sequence_of<EXTRAS>(p, extras, tile.batch);
            if (EXTRAS && tile.block * M >= of.queries) continue;
            const int shift = of.keys - of.queries;
            const int row = tile.block * M + group * 64;   // the first of this warpgroup
            const int own_row = row + warp * 16 + lane / 4;   // the thread's: this one and 8 later
            const int first = first_seen(of, tile.block * M);
            const int last = last_seen(of, min(tile.block * M + M, of.queries));
            const int own_first = row < of.queries ? min(last, first_seen(of, row)) : last;
            const int own_last = last_seen(of, min(row + 64, of.queries));
            // Blocks in [whole_first, whole_last) are seen by all rows.
            const int whole_first = (max(0, row + 63 + shift - p.before) + N - 1) / N;
            const int whole_last = max(0, min(of.keys, row + shift + p.after + 1)) / N;
            int n = last - 1;
            auto pass = [&](int end) {   // blocks that only other rows of the tile see
                for (; n >= end; --n) {
                    if (n < last - 1) { await_turn(); pass_turn(); }
                    barriers.k_full[at.stage].wait(at.parity);
                    arrive_together(barriers.k_empty[at.stage]);
                    barriers.v_full[at.stage].wait(at.parity);
                    arrive_together(barriers.v_empty[at.stage]);
                    at.next();
                }
            };
            const bool some = own_first < own_last;
            pass(max(first, some ? own_last : 0));
            if (first < last) barriers.q_full[group].wait(q_parity);

            // Mask the scores of block n where it is not seen by all rows.
            auto mask = [&](int n) {
                #pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const int diagonal = own_row + 8 * r + shift, column = n * N + lane % 4 * 2;
                    const int start = diagonal - p.before - column;
                    const int end = min(of.keys, diagonal + p.after + 1) - column;
                    #pragma unroll
                    for (int j = 0; j < N / 8; ++j)
                        #pragma unroll
                        for (int e = 0; e < 2; ++e)
                            if (8 * j + e < start || 8 * j + e >= end) s[4 * j + 2 * r + e] = -infinity();
                }
            };
            auto scale_and_add = [&](int n) {   // with EXTRAS
                #pragma unroll
                for (float& x : s) x *= p.scale;
                if (extras.bias == nullptr) return;
                #pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const int t = min(own_row + 8 * r, of.queries - 1), column = n * N + lane % 4 * 2;
                    const float* from = extras.bias + tile.batch * extras.bias_batch
                        + tile.head * extras.bias_head + t * extras.bias_query;
                    #pragma unroll
                    for (int j = 0; j < N / 8; ++j)
                        #pragma unroll
                        for (int e = 0; e < 2; ++e)
                            s[4 * j + 2 * r + e] += from[min(column + 8 * j + e, of.keys - 1) * extras.bias_key];
                }
            };
            auto drop = [&](int n) {   // with EXTRAS
                if (extras.threshold >> 16) return;
                const Word head = tile.batch * p.heads + tile.head, pitch = p.keys;
                const Word weight = (head * p.queries + own_row) * pitch + n * N;
                const unsigned long long keep = keep_rows<N>(extras, draw, weight, pitch);
                #pragma unroll
                for (int i = 0; i < N / 2; ++i)
                    if (!(keep >> i & 1)) s[i] = 0;
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
                    // Scores that are large because of a bias do not stand being scaled.
                    const float near = largest == -infinity() || !EXTRAS ? 0.0f : largest;
                    const float base = largest == -infinity() || EXTRAS ? 0.0f : largest * slope;
                    shrink[r] = first ? 1.0f : exp2_fast((peak[r] - near) * slope - base);
                    peak[r] = largest;
                    float sum = 0;
                    #pragma unroll
                    for (int j = 0; j < N / 8; ++j)
                        #pragma unroll
                        for (int e = 0; e < 2; ++e) {
                            float& x = s[4 * j + 2 * r + e];
                            x = exp2_fast((x - near) * slope - base);
                            sum += x;
                        }
                    total[r] = first ? sum : total[r] * shrink[r] + sum;
                }
            };
            bool add = false;
            auto step = [&] {   // products with block n and with the values before
                float shrink[2];
                barriers.k_full[at.stage].wait(at.parity);
                await_turn();
                multiply_keys();
                barriers.v_full[before.stage].wait(before.parity);
                multiply_values(before, add);
                pass_turn();
                wgmma_wait<1>();
                pin(s);
                arrive_together(barriers.k_empty[at.stage]);
                if (EXTRAS) scale_and_add(n);
                if (n < whole_first || n >= whole_last) mask(n);
                exponentiate(shrink, false);
                wgmma_wait<0>();
                pin(o);
                arrive_together(barriers.v_empty[before.stage]);
                if (EXTRAS) drop(n);
                pack_all<T>(weights, s);
                #pragma unroll
                for (int i = 0; i < D / 2; ++i) o[i] *= shrink[i / 2 % 2];
                add = true;
                before = at;
                at.next();
            };

            if (some) {
                if (own_last < last) { await_turn(); pass_turn(); }
                float shrink[2];
                if (KEPT) {
                    #pragma unroll
                    for (int h = 0; h < KEPT; ++h) load_rows(q[h], q_tile + h * 64 * SWIZZLE);
                    if (KEPT == HALVES) arrive_together(barriers.q_empty[group]);
                }
                barriers.k_full[at.stage].wait(at.parity);
                multiply_keys();
                wgmma_wait<0>();
                pin(s);
                arrive_together(barriers.k_empty[at.stage]);
                if (EXTRAS) scale_and_add(n);
                mask(n);
                exponentiate(shrink, true);
                if (EXTRAS) drop(n);
                pack_all<T>(weights, s);
                before = at;
                at.next();
                for (--n; n >= own_first; --n) step();
                if (KEPT < HALVES) arrive_together(barriers.q_empty[group]);
                barriers.v_full[before.stage].wait(before.parity);
                multiply_values(before, add);
                wgmma_wait<0>();
                pin(o);
                arrive_together(barriers.v_empty[before.stage]);
                pass(first);
            } else {
                if (first < last) arrive_together(barriers.q_empty[group]);
                #pragma unroll
                for (float& x : o) x = 0;
            }
            if (first < last) q_parity ^= 1;

            #pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int t = own_row + 8 * r;
                const long long place = (long long)of.batch * p.queries + of.first_query + t;
                float sum = 0;
                if (some) sum = quad_reduce(total[r], [](float a, float b) { return a + b; });
                const float grow = EXTRAS ? extras.kept_scale : 1;
                store_row(y + (place * p.heads + tile.head) * p.width, o, r, sum == 0 ? 0.0f : grow / sum,
                          t < of.queries ? p.width : 0);
                const int length = EXTRAS ? extras.length : p.queries;
                if (lane % 4 == 0 && t < of.queries)
                    logsumexp[((long long)of.batch * p.heads + tile.head) * length + of.first_query + t] =
                        sum == 0 ? infinity() : peak[r] * (EXTRAS ? 1 : p.scale) + logf(sum);
            }
        }
    }
}
