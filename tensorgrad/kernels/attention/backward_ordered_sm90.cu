// FlashAttention on Hopper, backward in one kernel (Dao 2023, arXiv:2307.08691, algorithm 2), for
// causal and full attention without extras. With w the weights:
//
//   dv = w^T dy, g = w (dy v^T - delta), dq = scale g k, dk = scale g^T q
//
// A block of threads has 128 keys and their gradients in registers, and streams N queries at a
// time. Five matrix products, the least possible. The price is that dq is a sum over the blocks of
// keys: each adds its part, in float32, in a fixed order, so that equal inputs give equal bits. The
// last one reads the sum of the others and writes dq, in 16 bits. Where it is also the first, no
// sum is ever in memory.
//
// The order. A team of blocks shares a head, and takes its keys in groups of `size` blocks, the
// last keys first. Causal: the keys of block n are first seen by the queries of tile first(n), and
// the block goes up from there. If all blocks of a group start together, block n + 1 reaches a tile
// of queries just before block n does, so that in this order no block waits. Full attention: member
// j of a team starts at tile j and wraps around.
//
// Balance. Causal: of each group the member with the first keys meets the most queries. From the
// third group on every other group is dealt in reverse, and its order is reversed too.
//
// Blocks of a team wait for each other: all blocks of the grid must run at once, which they do with
// one for each SM.
//
// The gradients of the scores pass through shared memory, as dq wants them transposed. The product
// for dq is one tile behind, so that the two warpgroups need not keep step.
//
// Floor: 10 D operations and one exponential for each query and key that meet. Memory: inputs,
// gradients, and the sum before its last part, 4 D bytes a query written and read.
//
// Phases. Producer: for each block of keys load it, then the tiles of queries and their statistics.
// Consumers, for each tile: scores; gradients of the weights; mask; weights; gradients of the
// scores; add to the sums; dq of the tile before, in the last turn with its store. Writers, one a
// warpgroup: wait for the turn, add to the sums; in the last turn load them. Then: store.
//
// arch: sm_90a
// where: T = __half | __nv_bfloat16
// instantiate: attention_backward_ordered<{T}, {64, 128 | 128, 64}>
#include "attention/sm90.cuh"

constexpr int KEYS = 128, GROUPS = 2;   // keys of a block; its consumer warpgroups
constexpr int CONSUMER_REGISTERS = 240;   // registers of a thread

// Part of dq that a warpgroup computes for a tile of queries, as its threads have it: 64 rows and
// 64 columns, four values of each of 128 threads for 8 columns at a time. With heads of 64 part g
// has the rows from 64 g on of 128, with heads of 128 the columns from 64 g on.
constexpr int PART = 64 * 64;

// How blocks of threads share the work. `rotate`: full attention.
struct BackwardTeams {
    int size, rotate;
};

// The order of the blocks that add to dq of a tile.
struct Turn {
    int rank, adders;

    __device__ bool first() const { return rank == 0; }
    __device__ bool last() const { return rank == adders - 1; }
};

// A block of keys of a head, and the tiles of queries that meet it: `count`, from `start` on, and
// after the `last` the first.
struct KeyBlock {
    int pair, block, start, count, last;   // pair: batch * kv_heads + head
    int from, offset;   // for `turn`

    __device__ int tile(int i) const { return start + i < last ? start + i : start + i - last; }
    // How many blocks add to dq of a tile, and how many of them before this one.
    template <int N>
    __device__ Turn turn(int tile, const AttentionSm90Arguments& p, bool rotate) const {
        const int blocks = (p.keys + KEYS - 1) / KEYS;
        if (rotate) return {offset + (tile < start ? tile + from : min(tile, from - 1)), blocks};
        const int highest = (tile * N + N - 1 + p.keys - p.queries) / KEYS;   // that meets it
        const int adders = min(highest + 1, blocks);
        return {offset + max(0, adders - 1 - from), adders};
    }
};

// Hides a value from the compiler, which would else compute before the loops what is the same in
// all steps, and has no registers for it.
__device__ inline unsigned long long opaque(unsigned long long x) {
    asm volatile("" : "+l"(x));
    return x;
}
__device__ inline int opaque(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

// Call f for each block of keys of this block of threads.
template <int N, typename F>
__device__ inline void for_key_blocks(const AttentionSm90Arguments& p, const BackwardTeams& teams,
                                      F f) {
    const int index = opaque(int(blockIdx.x)), member = index % teams.size;
    KeyBlock of;
    for (of.pair = index / teams.size; of.pair < p.heads_total;
         of.pair += gridDim.x / teams.size) {
        const int blocks = (p.keys + KEYS - 1) / KEYS;
        // `low` is the first block of a group. Causal: groups from the last to the first.
        int low = teams.rotate ? 0 : (blocks - 1) / teams.size * teams.size;
        for (int group = 0; 0 <= low && low < blocks; ++group) {
            of.last = (p.queries + N - 1) / N;
            if (teams.rotate) {
                of.block = low + member;
                of.start = member;
                of.count = of.last;
                of.from = min(teams.size, blocks - low);
                of.offset = low - member;
            } else {
                const bool reversed = group >= 2 && group % 2 == 0;
                const int high = low + teams.size - 1;
                of.block = reversed ? low + member : high - member;
                of.start = max(0, of.block * KEYS - p.keys + p.queries) / N;
                of.count = max(0, of.last - of.start);
                of.from = reversed ? high : of.block;
                of.offset = reversed ? member : 0;
            }
            if (of.block < blocks) f(of);
            low += teams.rotate ? teams.size : -teams.size;
        }
    }
}

// A tile of queries: of which head of all, and whose turn it is. The producer announces them to
// the writers and the consumers; one without adders says that there are no more.
struct QueryTile {
    int head, tile;
    Turn turn;
};

struct OrderedBarriers {
    Mbarrier keys_full[2], keys_empty[2], full[2], empty[2];   // blocks of keys; tiles of queries
    Mbarrier g_full[2], g_empty[2], announced[4];
    Mbarrier dq_full[GROUPS], dq_empty[GROUPS], sums_full[GROUPS];
    QueryTile tiles[4];   // the latest ones; a writer is at most three behind
};

// `bytes` contiguous bytes from shared to global memory, written or added (float).
__device__ inline void bulk_store(void* to, const void* from, int bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                 :: "l"(__cvta_generic_to_global(to)), "r"(shared_address(from)), "r"(bytes)
                 : "memory");
}
__device__ inline void bulk_reduce_add(void* to, const void* from, int bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
                 :: "l"(__cvta_generic_to_global(to)), "r"(shared_address(from)), "r"(bytes)
                 : "memory");
}
// Between what was read or written otherwise, and by bulk operations, in global memory too.
__device__ inline void fence_proxy_async_all() {
    asm volatile("fence.proxy.async;" ::: "memory");
}
__device__ inline int load_acquire(const int* from) {
    int x;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
    return x;
}
__device__ inline void store_release(int* to, int x) {
    asm volatile("st.release.gpu.global.s32 [%0], %1;" :: "l"(to), "r"(x) : "memory");
}

// A writer: adds the parts of dq that its warpgroup computes, each in its turn. In the last turn it
// goes the other way: the warpgroup gets the sums of the others, where it else leaves its part.
__device__ inline void write_parts(OrderedBarriers& barriers, int group, unsigned char* part,
                                   float* dq_sums, int* turns, int tiles) {
    for (unsigned count = 0;; ++count) {
        barriers.announced[count % 4].wait(count / 4 % 2);
        const QueryTile of = barriers.tiles[count % 4];
        if (of.turn.adders == 0) break;
        const int place = (of.head * tiles + of.tile) * GROUPS + group;
        float* sums = dq_sums + (long long)place * PART;
        const bool last = of.turn.last();
        if (!last) barriers.dq_full[group].wait(count % 2);
        while (!of.turn.first() && load_acquire(turns + place) != of.turn.rank) {}
        fence_proxy_async_all();
        const bool loads = last && !of.turn.first();
        barriers.sums_full[group].arrive_expect_tx(loads ? PART * 4 : 0);
        if (loads) bulk_load(part, sums, PART * 4, barriers.sums_full[group]);
        if (last) {
            barriers.dq_full[group].wait(count % 2);
            barriers.dq_empty[group].arrive();
            continue;
        }
        if (of.turn.first())
            bulk_store(sums, part, PART * 4);
        else
            bulk_reduce_add(sums, part, PART * 4);
        tma_store_commit();
        tma_store_wait_read<0>();
        barriers.dq_empty[group].arrive();
        tma_store_wait<0>();
        fence_proxy_async_all();
        store_release(turns + place, of.turn.rank + 1);
    }
}

// dq_sums: (batch * heads, tiles, GROUPS, PART). turns: (batch * heads, tiles, GROUPS), how many
// blocks have added; 0 before. sums: see attention_backward_rows. strides: of dk and dv. Tiles of
// dq that see no key are not written.
template <typename T, int D, int N>
__global__ void __launch_bounds__(WARPGROUP * (GROUPS + 1), 1)
attention_backward_ordered(T* __restrict__ dq, T* __restrict__ dk, T* __restrict__ dv,
                           float* __restrict__ dq_sums, int* turns, const float* __restrict__ sums,
                           const __grid_constant__ TensorMap k_map,
                           const __grid_constant__ TensorMap v_map,
                           const __grid_constant__ TensorMap q_map,
                           const __grid_constant__ TensorMap dy_map,
                           const __grid_constant__ AttentionSm90Arguments p,
                           const __grid_constant__ BackwardTeams teams, int pitch,
                           const __grid_constant__ Strides dq_strides,
                           const __grid_constant__ Strides strides) {
    static_assert(D * N == 64 * 128, "parts of dq");
    constexpr int HALVES = D / 64;   // 64 columns each
    constexpr int A_BYTES = 64 * HALVES * SWIZZLE, B_BYTES = N * HALVES * SWIZZLE;
    constexpr int STAGE = 2 * B_BYTES + 1024;   // two tiles, two rows of N floats
    constexpr int G_BYTES = KEYS * N * 2;
    constexpr int KEYS_BYTES = 2 * GROUPS * A_BYTES, KEYS_STAGES = D == 64 ? 2 : 1;
    extern __shared__ __align__(1024) unsigned char keys[];   // k, then v, of each warpgroup
    unsigned char* const g_tiles = keys + KEYS_STAGES * KEYS_BYTES;   // two
    unsigned char* const dq_parts = g_tiles + 2 * G_BYTES;
    unsigned char* const stages = dq_parts + GROUPS * PART * 4;
    __shared__ OrderedBarriers barriers;
    if (threadIdx.x == 0) {
        for (int s = 0; s < 2; ++s) {
            barriers.keys_full[s].init(1);
            barriers.keys_empty[s].init(4 * GROUPS);
            barriers.full[s].init(1);
            barriers.empty[s].init(WARPGROUP * GROUPS);
            barriers.g_full[s].init(GROUPS);
            barriers.g_empty[s].init(4 * GROUPS);
        }
        for (Mbarrier& announced : barriers.announced) announced.init(1);
        for (int g = 0; g < GROUPS; ++g) {
            barriers.dq_full[g].init(4);
            barriers.dq_empty[g].init(1);
            barriers.sums_full[g].init(1);
        }
        fence_mbarrier_init();
    }
    __syncthreads();
    const int heads_each = p.heads / p.kv_heads;

    if (threadIdx.x < WARPGROUP) {   // producers, a warp each
        setmaxnreg_decrease<PRODUCER_REGISTERS<GROUPS, CONSUMER_REGISTERS>>();
        const int warp = uniform(threadIdx.x / 32);
        if (warp > 0) {   // whole warps part first: else the producer's registers do not suffice
            if (threadIdx.x % 32 == 0 && warp <= GROUPS)
                write_parts(barriers, warp - 1, dq_parts + (warp - 1) * PART * 4, dq_sums, turns,
                            (p.queries + N - 1) / N);
            return;
        }
        if (threadIdx.x == 0) {
            unsigned count = 0;
            PipelineState<KEYS_STAGES> keys_at;
            for_key_blocks<N>(p, teams, [&](const KeyBlock& of) {
                if (of.count == 0) return;
                const int kv_head = of.pair % p.kv_heads, batch = of.pair / p.kv_heads;
                Mbarrier& keys_full = barriers.keys_full[keys_at.stage];
                barriers.keys_empty[keys_at.stage].wait(keys_at.parity ^ 1);
                keys_full.arrive_expect_tx(KEYS_BYTES);
                #pragma unroll 1
                for (int i = 0; i < GROUPS * HALVES; ++i) {
                    const int g = i / HALVES, h = i % HALVES, row = of.block * KEYS + g * 64;
                    unsigned char* to = keys + keys_at.stage * KEYS_BYTES + 2 * g * A_BYTES
                                        + h * 64 * SWIZZLE;
                    tma_load(to, k_map, keys_full, h * 64, row, kv_head, batch);
                    tma_load(to + A_BYTES, v_map, keys_full, h * 64, row, kv_head, batch);
                }
                keys_at.next();
                #pragma unroll 1
                for (int i = 0, head = kv_head * heads_each;
                     head < (kv_head + 1) * heads_each; i + 1 < of.count ? ++i : (i = 0, ++head)) {
                    const int tile = of.tile(i), stage = count % 2;
                    unsigned char* to = stages + stage * STAGE;
                    Mbarrier& full = barriers.full[stage];
                    barriers.empty[stage].wait(count / 2 % 2 ^ 1);
                    const int pair = batch * p.heads + head;
                    barriers.tiles[count % 4] = {pair, tile, of.turn<N>(tile, p, teams.rotate)};
                    barriers.announced[count++ % 4].arrive();
                    full.arrive_expect_tx(STAGE - 1024 + 2 * N * 4);
                    const float* from = sums + pair * 2ll * pitch + tile * N;
                    bulk_load(to + 2 * B_BYTES, from, N * 4, full);
                    bulk_load(to + 2 * B_BYTES + N * 4, from + pitch, N * 4, full);
                    #pragma unroll 1
                    for (int h = 0; h < HALVES; ++h) {
                        unsigned char* half = to + h * N * SWIZZLE;
                        tma_load(half, q_map, full, h * 64, tile * N, head, batch);
                        tma_load(half + B_BYTES, dy_map, full, h * 64, tile * N, head, batch);
                    }
                }
            });
            barriers.empty[count % 2].wait(count / 2 % 2 ^ 1);
            barriers.tiles[count % 4] = {};
            barriers.announced[count % 4].arrive();
        }
    } else {   // consumers
        setmaxnreg_increase<CONSUMER_REGISTERS>();
        const int group = uniform(threadIdx.x / WARPGROUP) - 1;
        const int lane = threadIdx.x % 32, warp = uniform(threadIdx.x / 32 % 4);
        const float scale_log2 = p.scale * LOG2_E;
        // For dq: of g 64 queries, of k 64 columns.
        const unsigned long long g_at =
            wgmma_descriptor(g_tiles + (D == 64 ? group * KEYS * SWIZZLE : 0));
        const unsigned long long k_columns_at =
            wgmma_descriptor(keys + (D == 128 ? group * 64 * SWIZZLE : 0));
        Fragment<1, N> s, g;
        Fragment<1, D> sum_k, sum_v;
        Fragment<1, 64> part;   // a part of dq
        unsigned w_packed[N / 4], g_packed[N / 4];
        // The number of tiles so far: of both pipelines with two stages it gives stage and parity.
        unsigned count = 0;
        PipelineState<KEYS_STAGES> keys_at;

        auto multiply = [&](Fragment<1, N>& to, unsigned long long a, const unsigned char* tile) {
            const unsigned long long a_at = opaque(a), b_at = opaque(wgmma_descriptor(tile));
            fence_registers(to.values);
            wgmma_fence();
            multiply_rows<T, D>(to.values, a_at, b_at, N * SWIZZLE, false);
            wgmma_commit();
        };
        auto add_v = [&](const unsigned char* tile) {
            const unsigned long long b_at = opaque(wgmma_descriptor(tile, N * SWIZZLE));
            fence_registers(sum_v.values);
            wgmma_fence();
            accumulate<T>(sum_v, w_packed, b_at);
            wgmma_commit();
        };
        auto add_k = [&](const unsigned char* tile) {   // with g from shared memory
            const unsigned long long a_at = opaque(
                wgmma_descriptor(g_tiles + count % 2 * G_BYTES + group * 64 * SWIZZLE));
            const unsigned long long b_at = opaque(wgmma_descriptor(tile, N * SWIZZLE));
            fence_registers(sum_k.values);
            wgmma_fence();
            #pragma unroll
            for (int n = 0; n < N / 16; ++n)
                Wgmma<T, D>::template run<true>(
                    sum_k.values, a_at + n / 4 * (KEYS * SWIZZLE / 16) + n % 4 * 2,
                    b_at + n * (16 * SWIZZLE / 16), true);
            wgmma_commit();
        };
        // dq of the tile before.
        auto multiply_dq = [&]() {
            const unsigned before = count - 1;
            barriers.g_full[before % 2].wait(before / 2 % 2);
            const unsigned long long a_at = opaque(g_at + before % 2 * (G_BYTES / 16));
            const unsigned long long b_at =
                opaque(k_columns_at + keys_at.stage * (KEYS_BYTES / 16));
            fence_registers(part.values);
            wgmma_fence();
            #pragma unroll
            for (int n = 0; n < KEYS / 16; ++n)
                Wgmma<T, 64>::template run<true, true>(
                    part.values, a_at + n * (16 * SWIZZLE / 16),
                    b_at + n / 4 * (2 * A_BYTES / 16) + n % 4 * (16 * SWIZZLE / 16), n > 0);
            wgmma_commit();
        };
        // To the writer or, in the last turn, to dq.
        auto pass_dq = [&]() {
            fence_registers(part.values);
            const unsigned before = count - 1;
            arrive_warp(barriers.g_empty[before % 2]);
            barriers.dq_empty[group].wait(before % 2 ^ 1);
            const QueryTile& tile = barriers.tiles[before % 4];
            const int rank = uniform(tile.turn.rank), adders = uniform(tile.turn.adders);
            float4* shared = reinterpret_cast<float4*>(dq_parts + group * PART * 4)
                             + threadIdx.x % WARPGROUP;
            if (rank < adders - 1) {
                #pragma unroll
                for (int j = 0; j < 8; ++j) {
                    const float* x = part.values + 4 * j;
                    shared[j * WARPGROUP] = make_float4(x[0], x[1], x[2], x[3]);
                }
                fence_proxy_async();
                arrive_warp(barriers.dq_full[group]);
                return;
            }
            if (rank > 0) {
                barriers.sums_full[group].wait(before % 2);
                #pragma unroll
                for (int j = 0; j < 8; ++j) {
                    const float4 sum = shared[j * WARPGROUP];
                    float* x = part.values + 4 * j;
                    x[0] += sum.x, x[1] += sum.y, x[2] += sum.z, x[3] += sum.w;
                }
            }
            const int thread = opaque(int(threadIdx.x)) - WARPGROUP;
            const int warp_row = thread / 32 % (N / 16) * 16;
            const int row = tile.tile * N + warp_row + part.row_of(0, thread % 32);
            const int column = thread / WARPGROUP * 64 % D;
            T* to = dq + tile.head / p.heads * dq_strides.batch
                    + tile.head % p.heads * dq_strides.head + row * dq_strides.row + column;
            arrive_warp(barriers.dq_full[group]);
            #pragma unroll
            for (int h = 0; h < 2; ++h)
                store_row(to + 8 * h * dq_strides.row, part, h, p.scale,
                          row + 8 * h < p.queries ? p.width - column : 0);
        };

        for_key_blocks<N>(p, teams, [&](const KeyBlock& of) {
            const int row = of.block * KEYS + group * 64;   // the first of this warpgroup
            const int own_row = row + warp * 16 + s.row_of(0);   // the thread's: this and 8 later
            // Key r is seen by the queries from r + low to r + high.
            const int low = teams.rotate ? -p.keys - p.queries : p.queries - p.keys;
            sum_k.clear();
            sum_v.clear();
            auto mask = [&](int n) {
                #pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const int key = own_row + 8 * h, column = s.column_of(n * N);
                    s.mask_row(h, key + low - column, key < p.keys ? p.queries - column : 0);
                }
            };

            if (of.count > 0) barriers.keys_full[keys_at.stage].wait(keys_at.parity);
            const unsigned long long k_now = wgmma_descriptor(
                keys + keys_at.stage * KEYS_BYTES + 2 * opaque(group) * A_BYTES);
            // Where the thread's row of stmatrix is in a tile of g.
            const int g_row = group * 64 + warp * 16 + opaque(lane) % 16;
            bool pending = false;   // the last products of a tile are under way
            #pragma unroll 1
            for (int each = 0; each < heads_each; ++each) {
                #pragma unroll 1
                for (int i = 0; i < of.count; ++i) {
                    const int n = of.tile(i);
                    const unsigned char* tile1 = stages + count % 2 * STAGE;
                    const unsigned char* tile2 = tile1 + B_BYTES;
                    barriers.full[count % 2].wait(count / 2 % 2);
                    // Scores.
                    multiply(s, k_now, tile1);
                    wgmma_wait<1>();   // for the products before these
                    if (pending) barriers.empty[(count - 1) % 2].arrive();
                    // Gradients of the weights.
                    multiply(g, k_now + A_BYTES / 16, tile2);
                    wgmma_wait<1>();
                    fence_registers(s.values);
                    // Mask.
                    if (n * N - row < 63 + low || n * N + N > p.queries || row + 64 > p.keys)
                        mask(n);
                    // Weights.
                    const float* statistics =
                        reinterpret_cast<const float*>(tile2 + B_BYTES) + lane % 4 * 2;
                    for_statistics<true, N>({}, statistics, [&](int i, int, float logsumexp) {
                        s.values[i] = fast_exp2(s.values[i] * scale_log2 - logsumexp);
                    });
                    // Gradients of the scores.
                    wgmma_wait<0>();
                    fence_registers(g.values);
                    for_statistics<true, N>({}, statistics + N, [&](int i, int, float delta) {
                        g.values[i] = s.values[i] * (g.values[i] - delta);
                    });
                    s.template round_to<T>(w_packed);
                    g.template round_to<T>(g_packed);
                    barriers.g_empty[count % 2].wait(count / 2 % 2 ^ 1);
                    unsigned char* to = g_tiles + count % 2 * G_BYTES + g_row * SWIZZLE;
                    #pragma unroll
                    for (int j = 0; j < N / 16; ++j) {
                        const int piece = 2 * j % 8 + lane / 16;
                        stmatrix(to + j / 4 * (KEYS * SWIZZLE) + (piece ^ g_row % 8) * 16,
                                 reinterpret_cast<unsigned(&)[4]>(g_packed[4 * j]));
                    }
                    fence_proxy_async();
                    named_barrier_sync(1 + group, WARPGROUP);
                    if (threadIdx.x % WARPGROUP == 0) barriers.g_full[count % 2].arrive();
                    // Sums; dq of the tile before.
                    if (pending) {
                        multiply_dq();
                        add_v(tile2);
                        add_k(tile1);
                        wgmma_wait<2>();
                        pass_dq();
                    } else {
                        add_v(tile2);
                        add_k(tile1);
                    }
                    pending = true;
                    ++count;
                }
            }
            wgmma_wait<0>();
            fence_registers(sum_k.values);
            fence_registers(sum_v.values);
            if (pending) {
                barriers.empty[(count - 1) % 2].arrive();
                multiply_dq();
                wgmma_wait<0>();
                arrive_warp(barriers.keys_empty[keys_at.stage]);
                pass_dq();
                keys_at.next();
            }
            // Store.
            const int pair = opaque(of.pair), batch = pair / p.kv_heads;
            #pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int t = own_row + 8 * h;
                const long long to = batch * strides.batch
                                   + (pair - batch * p.kv_heads) * strides.head + t * strides.row;
                const int width = t < p.keys ? p.width : 0;
                store_row(dk + to, sum_k, h, p.scale, width);
                store_row(dv + to, sum_v, h, 1.0f, width);
            }
        });
    }
}
