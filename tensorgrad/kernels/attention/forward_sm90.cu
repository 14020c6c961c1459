// FlashAttention on Hopper, forward (Dao 2023, arXiv:2307.08691; Shah et al. 2024,
// arXiv:2407.08608).
//
//   y = softmax(scale q k^T) v, written with =, and the log-sum-exp of each row for backward
//
// The matrix of scores exists 64 rows by N keys at a time, in registers. A persistent block of W +
// 1 warpgroups holds 64 W queries: the producer warpgroup has TMA load keys and values, a few tiles
// ahead; each consumer warpgroup multiplies its 64 queries with a tile of keys, turns the scores
// into weights, and multiplies these with the tile of values. Three things happen at once: the
// products with the next keys and with the last values on the tensor cores, the exponentials in
// between, and, half a step later, the same in the other warpgroups (ping-pong scheduling).
//
// Which keys a query sees is a band: those from window_left before to window_right after its own
// position (causal, a window, all). Tiles of keys outside are skipped, only tiles on its rim are
// masked. KEY_MASK hides keys of a sequence (padding): tiles of hidden keys are skipped, and only
// tiles that have some are masked. DROPOUT draws its bits while the scores are computed. A bias on
// the scores, sequences of unequal length and any scale cost the kernels with EXTRAS alone. D is
// 32, 64, 96, 128 or 256; heads of a width in between are padded with zeros. In full attention two
// blocks of a cluster load keys and values once for both (CLUSTER).
//
// Floor: 4 D operations and one exponential for each query and key that meet. The tensor cores do
// 795e12 operations a second here, the special units 16 exponentials a clock and SM,
// 4.2e12 a second: with D = 64 the exponentials take 0.74 of the products' time, with D = 128 0.37.
// Memory: q, k, v, y once, and from the L2 cache k and v once for each 64 W queries; both far less.
//
// The naive kernel: that of forward_sm80.cu.
//
// Phases. Producer: for each tile of queries, take its number, then load keys, queries and values.
// Consumers: scores of the first tile of keys; then for each tile `step`: start scores and output,
// mask, online softmax, rescale the output; at the end the last output, divide and store.
//
// arch: sm_90a
// where: T = __half | __nv_bfloat16
// where: TILES = 32, 3, 128 | 64, 3, 128 | 96, 3, 96 | 128, 2, 128 | 128, 2, 176 | 256, 2, 80
// instantiate: attention_forward<{T}, {TILES}, PLAIN>
// instantiate: attention_forward<{T}, {128, 2, 176 | 256, 2, 80}, PLAIN, 2>
// where: MASKED_TILES = 32, 3, 128 | 64, 3, 128 | 96, 3, 96 | 128, 2, 128 | 256, 2, 64
// instantiate: attention_forward<{T}, {MASKED_TILES}, KEY_MASK>
// where: DROPOUT_TILES = 32, 3, 128 | 64, 2, 128 | 96, 2, 128 | 128, 2, 128 | 256, 2, 64
// instantiate: attention_forward<{T}, {DROPOUT_TILES}, {DROPOUT | DROPOUT + KEY_MASK}>
// instantiate: attention_forward<{T}, {64, 3, 64 | 128, 2, 64 | 256, 2, 32}, EXTRAS>
#include "attention/sm90.cuh"
#include "overlap.cuh"

template <int W> constexpr int CONSUMER_REGISTERS = W == 3 ? 160 : 232;   // registers of a thread

// Shared memory: the queries of each warpgroup, then rings of tiles of keys and of values.
template <int D, int W, int N> struct ForwardTiles {
    static constexpr int HALVES = (D + 63) / 64;   // 64 columns each
    static constexpr int Q_BYTES = 64 * HALVES * SWIZZLE;   // bytes of a warpgroup
    static constexpr int K_BYTES = N * HALVES * SWIZZLE;
    static constexpr int FIT = (TILE_BYTES - W * Q_BYTES) / (2 * K_BYTES);
    static constexpr int STAGES = FIT < 4 ? FIT : 4;
    // Halves of the queries that also fit into registers, so that products read only keys there.
    static constexpr int KEPT = D == 128 && W == 2 && N == 128 ? HALVES : 0;
};

template <int D, int W, int N> struct ForwardBarriers {
    static constexpr int STAGES = ForwardTiles<D, W, N>::STAGES;
    TileQueue<2> queue;
    Mbarrier q_full[W], q_empty[W], k_full[STAGES], k_empty[STAGES], v_full[STAGES],
        v_empty[STAGES];
};

// y: (batch, queries, heads, width). logsumexp: (batch, heads, queries); infinite, and y zero,
// where a query sees no key. taken: 0, and 0 again after. W consumer warpgroups: 64 queries each, N
// keys at a time. overlaps: with the next kernel, see overlap.py.
template <typename T, int D, int W, int N, int OPTIONS, int CLUSTER = 1>
__global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(WARPGROUP * (W + 1), 1)
attention_forward(T* __restrict__ y, float* __restrict__ logsumexp, unsigned* __restrict__ taken,
                  const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
                  const __grid_constant__ TensorMap v_map,
                  const __grid_constant__ AttentionSm90Arguments p,
                  const __grid_constant__ AttentionSm90Extras extras, bool overlaps) {
    constexpr bool GENERAL = OPTIONS == EXTRAS, MASKED = OPTIONS & KEY_MASK,
                   DROPS = OPTIONS & DROPOUT;
    using Tiles = ForwardTiles<D, W, N>;
    constexpr int M = 64 * W, STAGES = Tiles::STAGES, HALVES = Tiles::HALVES;
    constexpr int KEPT = DROPS ? 0 : Tiles::KEPT;
    extern __shared__ unsigned char raw[];
    unsigned char* tiles_start = raw + (-shared_address(raw) & 1023);
    // with heads of 256 registers do not suffice
    unsigned char* q_tiles = D < 256 ? kept_address(tiles_start) : tiles_start;
    unsigned char* k_tiles = q_tiles + W * Tiles::Q_BYTES;
    unsigned char* v_tiles = k_tiles + STAGES * Tiles::K_BYTES;
    __shared__ ForwardBarriers<D, W, N> barriers;
    if (threadIdx.x == 0) {
        barriers.queue.init(4 * W);
        for (int g = 0; g < W; ++g) {
            barriers.q_full[g].init(1);
            barriers.q_empty[g].init(4);   // an arrival for each warp
        }
        for (int s = 0; s < STAGES; ++s) {
            barriers.k_full[s].init(1);
            barriers.v_full[s].init(1);
            barriers.k_empty[s].init(4 * W * CLUSTER);   // in all blocks
            barriers.v_empty[s].init(4 * W * CLUSTER);
        }
        fence_mbarrier_init();
    }
    if (CLUSTER == 1) __syncthreads(); else cluster_sync();
    wait_for_previous_kernel();
    if (overlaps) start_next_kernel();

    // The blocks of a cluster have tiles of queries side by side, which see the same keys.
    static_assert(CLUSTER == 1 || (OPTIONS == PLAIN && HALVES % CLUSTER == 0), "multicast");
    const int rank = CLUSTER == 1 ? 0 : cluster_rank();
    const int blocks = (p.queries + M * CLUSTER - 1) / (M * CLUSTER);
    const int tiles = blocks * p.heads_total;
    auto tile_at = [&](int index) {
        AttentionTile tile = tile_of(p, p.heads, index, blocks, false);
        tile.block = tile.block * CLUSTER + rank;
        return tile;
    };
    auto release = [&](Mbarrier& empty) {   // in all blocks of the cluster
        if (CLUSTER == 1) return arrive_warp(empty);
        __syncwarp();
        if (threadIdx.x % 32 < CLUSTER) empty.arrive_remote(threadIdx.x % 32);
    };
    // The blocks of keys that the rows from `row` to `end` see: from first_seen to last_seen - 1.
    auto first_seen = [&](const Sequence& of, int row) {
        return max(0, row + of.keys - of.queries - p.window_left) / N;
    };
    auto last_seen = [&](const Sequence& of, int end) {
        return (max(0, min(of.keys, end + of.keys - of.queries + p.window_right)) + N - 1) / N;
    };

    // The tile of keys n of a sequence or, with KEY_MASK, the last one before it with a key that is
    // seen: an entry of attention_key_mask.
    auto entry_of = [&](int batch, int n) {
        if (!MASKED || n < 0) return 2 * n + 1;
        return __ldg(extras.key_tiles + batch * ((p.keys + N - 1) / N) + n);
    };

    if (threadIdx.x < WARPGROUP) {   // producer
        setmaxnreg_decrease<PRODUCER_REGISTERS<W, CONSUMER_REGISTERS<W>>>();
        if (threadIdx.x == 0) {
            PipelineState<STAGES> at;
            PipelineState<2> turn;
            unsigned q_parity = 0;
            for (int index = blockIdx.x / CLUSTER;;
                 index = CLUSTER == 1 ? next_tile(taken, tiles) : index + gridDim.x / CLUSTER) {
                barriers.queue.put(turn, index);
                if (index >= tiles) break;
                const AttentionTile tile = tile_at(index);
                const Sequence of = sequence_of<GENERAL>(p, extras, tile.batch);
                if (GENERAL && tile.block * M >= of.queries) continue;
                const int kv_head = tile.head / (p.heads / p.kv_heads);
                const int query = of.first_query + tile.block * M;
                const int end = last_seen(of, min(tile.block * M + M, of.queries));
                const int last = (entry_of(tile.batch, end - 1) >> 1) + 1;
                auto load_tile = [&](unsigned char* to, const TensorMap& map, Mbarrier& full,
                                     int n) {
                    full.arrive_expect_tx(Tiles::K_BYTES);
                    #pragma unroll 1
                    for (int h = rank; h < HALVES; h += CLUSTER) {
                        unsigned char* half = to + h * N * SWIZZLE;
                        const int key = of.first_key + n * N;
                        if (CLUSTER == 1)
                            tma_load(half, map, full, h * 64, key, kv_head, of.batch);
                        else
                            tma_load_multicast((1 << CLUSTER) - 1, half, map, full, h * 64, key,
                                               kv_head, of.batch);
                    }
                };
                for (int n = last - 1, first = first_seen(of, tile.block * M); n >= first;
                     n = entry_of(tile.batch, n - 1) >> 1) {
                    const int offset = at.stage * Tiles::K_BYTES;
                    barriers.k_empty[at.stage].wait(at.parity ^ 1);
                    load_tile(k_tiles + offset, k_map, barriers.k_full[at.stage], n);
                    if (n == last - 1) {
                        #pragma unroll 1
                        for (int g = 0; g < W; ++g) {
                            Mbarrier& full = barriers.q_full[g];
                            barriers.q_empty[g].wait(q_parity ^ 1);
                            full.arrive_expect_tx(Tiles::Q_BYTES);
                            for (int h = 0; h < HALVES; ++h)
                                tma_load(q_tiles + g * Tiles::Q_BYTES + h * 64 * SWIZZLE, q_map,
                                         full, h * 64, query + g * 64, tile.head, of.batch);
                        }
                        q_parity ^= 1;
                    }
                    barriers.v_empty[at.stage].wait(at.parity ^ 1);
                    load_tile(v_tiles + offset, v_map, barriers.v_full[at.stage], n);
                    at.next();
                }
            }
        }
    } else {   // consumers
        setmaxnreg_increase<CONSUMER_REGISTERS<W>>();
        const int group = uniform(threadIdx.x / WARPGROUP) - 1;
        const int lane = threadIdx.x % 32, warp = uniform(threadIdx.x / 32 % 4);
        // with EXTRAS scores come scaled
        const float scale_log2 = (GENERAL ? 1 : p.scale) * LOG2_E;
        const Word draw = GENERAL || DROPS ? draw_number(extras.draw, extras.offset) : 0;
        const Word key = GENERAL || DROPS ? keep_key(extras.seed, draw, extras.stream) : 0;
        // Ping-pong: one warpgroup after the other issues its matrix products, so that the
        // exponentials of one run under the products of the next.
        auto wait_for_turn = [&] { named_barrier_sync(1 + group, 2 * WARPGROUP); };
        auto pass_turn = [&] { named_barrier_arrive(1 + (group + 1) % W, 2 * WARPGROUP); };
        if (group == W - 1) pass_turn();

        const unsigned char* q_tile = q_tiles + group * Tiles::Q_BYTES;
        const unsigned long long q_at = wgmma_descriptor(q_tile);
        // the first columns of q; the others are read from shared memory
        unsigned q[KEPT + 1][16];
        Fragment<1, N> s;
        Fragment<1, D> o;
        unsigned weights[N / 4];
        float row_max[2], row_sum[2];   // maximum and sum of the thread's two rows
        PipelineState<STAGES> at, before;
        PipelineState<2> turn;
        unsigned q_parity = 0;

        auto start_scores = [&] {   // s = q k^T
            const unsigned char* k_tile = k_tiles + at.stage * Tiles::K_BYTES;
            const unsigned long long k_at = wgmma_descriptor(k_tile);
            fence_registers(s.values);
            wgmma_fence();
            #pragma unroll
            for (int d = 0; d < D / 16; ++d) {   // 64 columns, then the next 64
                const int half = d / 4, step = d % 4;
                const unsigned long long k_here = k_at + half * (N * SWIZZLE / 16) + step * 2;
                const unsigned long long q_here = q_at + half * (64 * SWIZZLE / 16) + step * 2;
                if (half < KEPT)
                    Wgmma<T, N>::template run<>(s.values, q[half < KEPT ? half : 0] + step * 4,
                                                k_here, d > 0);
                else
                    Wgmma<T, N>::template run<>(s.values, q_here, k_here, d > 0);
            }
            wgmma_commit();
        };
        // o (+)= weights v
        auto start_output = [&](const PipelineState<STAGES>& state, bool add) {
            const unsigned char* v_tile = v_tiles + state.stage * Tiles::K_BYTES;
            const unsigned long long v_at = wgmma_descriptor(v_tile, N * SWIZZLE);
            fence_registers(o.values);
            wgmma_fence();
            #pragma unroll
            for (int n = 0; n < N / 16; ++n)
                Wgmma<T, D>::template run<true>(
                    o.values, weights + 4 * n, v_at + n * (16 * SWIZZLE / 16), add || n > 0);
            wgmma_commit();
        };
        auto finish_scores = [&] {
            wgmma_wait<0>();
            fence_registers(s.values);
            release(barriers.k_empty[at.stage]);
        };
        auto finish_output = [&] {
            wgmma_wait<0>();
            fence_registers(o.values);
            release(barriers.v_empty[before.stage]);
        };

        for (int index; (index = barriers.queue.take(turn)) < tiles;) {
            const AttentionTile tile = tile_at(index);
            const Sequence of = sequence_of<GENERAL>(p, extras, tile.batch);
            if (GENERAL && tile.block * M >= of.queries) continue;
            const int shift = of.keys - of.queries;
            const int row = tile.block * M + group * 64;   // the first of this warpgroup
            const int own_row = row + warp * 16 + s.row_of(0);   // the thread's: this and 8 later
            const int first = first_seen(of, tile.block * M);
            int entry = entry_of(
                tile.batch, last_seen(of, min(tile.block * M + M, of.queries)) - 1);
            const int last = (entry >> 1) + 1;
            const int own_first = row < of.queries ? min(last, first_seen(of, row)) : last;
            const int own_last = last_seen(of, min(row + 64, of.queries));
            // Blocks in [whole_first, whole_last) are seen by all rows.
            const int whole_first = (max(0, row + 63 + shift - p.window_left) + N - 1) / N;
            const int whole_last = max(0, min(of.keys, row + shift + p.window_right + 1)) / N;
            int n = last - 1;
            auto next = [&] {
                entry = entry_of(tile.batch, n - 1);
                n = entry >> 1;
            };
            auto skip = [&](int end) {   // blocks that only other rows of the tile see
                for (; n >= end; next()) {
                    if (n < last - 1) { wait_for_turn(); pass_turn(); }
                    barriers.k_full[at.stage].wait(at.parity);
                    release(barriers.k_empty[at.stage]);
                    barriers.v_full[at.stage].wait(at.parity);
                    release(barriers.v_empty[at.stage]);
                    at.next();
                }
            };
            skip(own_first < own_last ? max(first, own_last) : first);
            const bool some = own_first < own_last && n >= own_first;
            if (first < last) barriers.q_full[group].wait(q_parity);

            // Mask the scores of block n where it is not seen by all rows.
            auto mask = [&](int n) {
                #pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const int position = own_row + 8 * h + shift, column = s.column_of(n * N);
                    s.mask_row(h, position - p.window_left - column,
                               min(of.keys, position + p.window_right + 1) - column);
                }
                if (!MASKED || entry & 1) return;
                const unsigned char* bits =
                    extras.key_bits + (tile.batch * ((p.keys + N - 1) / N) + n) * (N / 8);
                #pragma unroll
                for (int j = 0; j < N / 8; ++j) {
                    const unsigned seen = bits[j] >> lane % 4 * 2;
                    #pragma unroll
                    for (int i = 0; i < 4; ++i)
                        if (!(seen >> i % 2 & 1)) s.values[4 * j + i] = -infinity<float>();
                }
            };
            KeepMask<N, false> keep;
            auto draw_keep_mask = [&](int n) {
                keep.draw(key, Word(tile.batch) * p.heads + tile.head, p.queries, p.keys,
                          row + warp * 16, n * N, extras.threshold);
            };
            auto apply_dropout = [&](int n) {   // with EXTRAS
                if (extras.threshold >> 16) return;
                draw_keep_mask(n);
                keep.apply(weights);
            };
            // s becomes weights relative to the row maximum so far; earlier weights must be
            // multiplied by `rescale`.
            auto online_softmax = [&](float (&rescale)[2], bool first) {
                #pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const float largest = s.row_max(h, first ? -infinity<float>() : row_max[h]);
                    // Scores that are large because of a bias do not stand being scaled.
                    const bool none = largest == -infinity<float>();
                    const float near = none || !GENERAL ? 0.0f : largest;
                    const float base = none || GENERAL ? 0.0f : largest * scale_log2;
                    rescale[h] = first ? 1.0f : fast_exp2((row_max[h] - near) * scale_log2 - base);
                    row_max[h] = largest;
                    float sum = 0;
                    s.for_row(h, [&](float& x, int) {
                        sum += x = fast_exp2((x - near) * scale_log2 - base);
                    });
                    row_sum[h] = first ? sum : row_sum[h] * rescale[h] + sum;
                }
            };
            auto bias = [&](int n) {
                scale_and_bias<false>(s, p.scale, extras, tile.batch, tile.head, own_row,
                                      of.queries, s.column_of(n * N), of.keys);
            };
            bool add = false;
            auto step = [&] {   // products with block n and with the values before
                float rescale[2];
                barriers.k_full[at.stage].wait(at.parity);
                wait_for_turn();
                start_scores();
                barriers.v_full[before.stage].wait(before.parity);
                start_output(before, add);
                pass_turn();
                if (DROPS) draw_keep_mask(n);
                wgmma_wait<1>();
                fence_registers(s.values);
                release(barriers.k_empty[at.stage]);
                if (GENERAL) bias(n);
                if (n < whole_first || n >= whole_last || (MASKED && !(entry & 1))) mask(n);
                online_softmax(rescale, false);
                finish_output();
                s.template round_to<T>(weights);
                if (GENERAL) apply_dropout(n);
                if (DROPS) keep.apply(weights);
                o.scale_rows(rescale);
                add = true;
                before = at;
                at.next();
            };

            if (some) {
                if (n < last - 1) { wait_for_turn(); pass_turn(); }
                // The first tile of keys.
                float rescale[2];
                if (KEPT) {
                    #pragma unroll
                    for (int h = 0; h < KEPT; ++h) load_operand_a(q[h], q_tile + h * 64 * SWIZZLE);
                    if (KEPT == HALVES) arrive_warp(barriers.q_empty[group]);
                }
                barriers.k_full[at.stage].wait(at.parity);
                start_scores();
                if (DROPS) draw_keep_mask(n);
                finish_scores();
                if (GENERAL) bias(n);
                mask(n);
                online_softmax(rescale, true);
                s.template round_to<T>(weights);
                if (GENERAL) apply_dropout(n);
                if (DROPS) keep.apply(weights);
                before = at;
                at.next();
                // The others.
                for (next(); n >= own_first; next()) step();
                if (KEPT < HALVES) arrive_warp(barriers.q_empty[group]);
                // The last tile of values.
                barriers.v_full[before.stage].wait(before.parity);
                start_output(before, add);
                finish_output();
                skip(first);
            } else {
                skip(first);
                if (first < last) arrive_warp(barriers.q_empty[group]);
                o.clear();
            }
            if (first < last) q_parity ^= 1;

            // Divide and store.
            #pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int t = own_row + 8 * h, length = GENERAL ? extras.length : p.queries;
                const long long place = (long long)of.batch * p.queries + of.first_query + t;
                const float sum = some ? quad_sum(row_sum[h]) : 0;
                const float inverse_keep = GENERAL || DROPS ? extras.inverse_keep : 1;
                store_row(y + (place * p.heads + tile.head) * p.width, o, h,
                          sum == 0 ? 0.0f : inverse_keep / sum, t < of.queries ? p.width : 0);
                if (lane % 4 == 0 && t < of.queries)
                    logsumexp[((long long)of.batch * p.heads + tile.head) * length +
                              of.first_query + t] =
                        sum == 0 ? infinity<float>()
                                 : row_max[h] * (GENERAL ? 1 : p.scale) + logf(sum);
            }
        }
    }
    if (CLUSTER > 1) cluster_sync();   // no block exits while another may still write to it
}
