// Matrix products of 16 bits on Hopper, with an epilogue. y is written with =, or with += where it
// is float.
//
//   y = a b + bias + residual, or y = gelu(a b + bias), or y = (a b) scale
//
// GELU stores its derivative too: with that as the scale, its backward is a product. SCALED also
// adds up the rows of y, which is the gradient of the bias before GELU.
//
// A persistent block computes tiles of 128 x N sums in the registers of two consumer warpgroups, 64
// rows each. A producer warp has TMA load 64 columns of a and 64 rows of b at a time into a
// pipeline of stages in shared memory, from where wgmma reads them; two blocks of a cluster, one
// below the other, load the columns of b by multicast. Meanwhile the epilogue of the last tile
// runs: its sums are rounded into shared memory, and epilogue warps take GELU of them, store them
// by TMA, and load the residual or scale of the next tile. GELU of a value and its derivative
// take those three warps longer than its products of 768 terms take: for so few, each consumer
// warp takes GELU of a box. The tile scheduler goes through the tiles in bands of rows, so that
// what the blocks of the GPU read at one time is in the L2 cache.
//
// Floor: 2 M N K operations at the 795e12 a second that this chip reaches on random numbers. With
// N = 256 a step of 64 terms moves 48 kB into shared memory, a third less from the L2 cache, and
// occupies the tensor cores for 1,024 clocks. N = 128 is for few tiles; where there are fewer still
// than SMs and K is long, the work is split along K (stream-K): each cluster does the
// same number of steps, and matmul_sum adds up the parts. Which cluster computes a tile depends on
// time, the result does not.
//
// The naive kernel, a thread for y[i][j]:
//
//   float sum = 0;
//   for (int k = 0; k < terms; ++k) sum += a[i][k] * b[k][j];
//   y[i][j] = gelu(sum + bias[j]);
//
// Phases. Producer: for each work tile, load its stages. Epilogue warps: open the boxes for the
// next tile (load residual or scale), wait for sums, GELU, sums over rows, store. Consumers:
// mainloop (wait for a stage, wgmma, release the stage before); epilogue (bias, residual or scale,
// round into boxes, GELU of the first).
//
// arch: sm_90a
// where: T = __half | __nv_bfloat16
// where: LAYOUT = false, false | false, true | true, true
// instantiate: matmul<{T}, {NARROW | WIDE}, {256, 2 | 128, 1}, {LAYOUT}>
// instantiate: matmul<{T}, {GELU | SHARED_GELU}, {256, 2 | 128, 1}, false, false>
// instantiate: matmul<{T}, SCALED, {256, 2 | 128, 1}, false, true>
// instantiate: matmul_sum<{float | __half | __nv_bfloat16}>
#include "matmul/sm90.cuh"
#include "overlap.cuh"

constexpr int PRODUCER_REGISTERS = 88, CONSUMER_REGISTERS = 208;   // a thread's
constexpr int EPILOGUE_WARPS = 3, CONSUMER_WARPS = 8;
constexpr int UNDER_WAY = 4;   // stores of an epilogue warp, before it opens the first of the boxes

// Shared memory of a block: the stages, boxes for the 16 rows of each consumer warp, its bias.
template <int N> struct SharedStorage {
    static constexpr int STAGES = N == 256 ? 3 : 5, BOXES = N / 64;
    static constexpr int A_BYTES = M * K * 2, B_BYTES = N * K * 2;
    unsigned char a[STAGES][A_BYTES], b[STAGES][B_BYTES], boxes[CONSUMER_WARPS][BOXES][BOX_BYTES];
    float bias[CONSUMER_WARPS][N];
};

// The CLUSTER blocks of a cluster are one below the other. *_COLUMNS: the contiguous axis is that
// of the rows of a, the columns of b, not that of the terms. beside: residual or scale, of the
// shape of y.
template <typename T, Epilogue EPILOGUE, int N, int CLUSTER, bool A_COLUMNS, bool B_COLUMNS>
__global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(WARPGROUP * 3, 1)
matmul(const __grid_constant__ TensorMap y_map, const __grid_constant__ TensorMap beside_map,
       const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
       const __grid_constant__ MatmulSm90Arguments p, unsigned* taken) {
    using Storage = SharedStorage<N>;
    constexpr int STAGES = Storage::STAGES, BOXES = Storage::BOXES;
    // columns of a box
    constexpr int WIDTH = EPILOGUE == WIDE ? 32 : 64, PASSES = N / WIDTH / BOXES;
    constexpr bool TAKES_GELU = EPILOGUE == GELU || EPILOGUE == SHARED_GELU;
    // The boxes of which a consumer warp takes GELU itself, and stores them.
    constexpr int OWN = EPILOGUE == SHARED_GELU ? 1 : 0;
    // The other boxes of a consumer warp, and of all: epilogue warps take them in turn.
    constexpr int OTHERS = BOXES - OWN, ALL_OTHERS = CONSUMER_WARPS * OTHERS;
    extern __shared__ unsigned char raw[];
    Storage& storage = *reinterpret_cast<Storage*>(raw + (-shared_address(raw) & 1023));
    // Barriers of the stages, and of the boxes of a consumer warp: may be filled, were filled.
    __shared__ Mbarrier full[STAGES], empty[STAGES], open[CONSUMER_WARPS], filled[CONSUMER_WARPS];
    __shared__ ClusterTileQueue queue;
    const int rank = CLUSTER == 1 ? 0 : cluster_rank();
    // Set up the barriers.
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            full[s].init(1);
            empty[s].init(2 * CLUSTER);   // the consumer warpgroups of all blocks of the cluster
        }
        for (int w = 0; w < CONSUMER_WARPS; ++w) {
            open[w].init(OTHERS);
            filled[w].init(1);
        }
        queue.init(CLUSTER * (EPILOGUE_WARPS + CONSUMER_WARPS) + CLUSTER - 1);
        fence_mbarrier_init();
    }
    if (CLUSTER == 1) __syncthreads(); else cluster_sync();
    wait_for_previous_kernel();
    if (p.overlaps) start_next_kernel();

    const int tile_rows = (p.rows + M * CLUSTER - 1) / (M * CLUSTER),
              tile_columns = (p.columns + N - 1) / N;
    TileScheduler<CLUSTER> scheduler(p, queue, taken, tile_rows * tile_columns * p.matrices,
                                     blockIdx.x / CLUSTER, gridDim.x / CLUSTER);
    auto origin_at = [&](int tile) {
        return tile_origin<N, CLUSTER>(p, tile, tile_rows, tile_columns, rank);
    };
    // Where the derivatives are that go with box c of consumer warp w, or null.
    auto derivatives_at = [&](const TileOrigin& origin, int w, int c) -> unsigned char* {
        const int row = origin.row + w * 16, column = origin.column + c * 64;
        if (!p.derivative || row >= p.rows || column >= p.columns) return nullptr;
        const long long box = row / 16 * (long long)((p.columns + 63) / 64) + column / 64;
        return reinterpret_cast<unsigned char*>(p.derivative) + box * DERIVATIVE_BOX;
    };
    WorkTile work;
    const int group = uniform(threadIdx.x / WARPGROUP) - 1, thread = threadIdx.x % WARPGROUP;
    const int warp = uniform(thread / 32), lane = thread % 32;

    if (group < 0) {
        setmaxnreg_decrease<PRODUCER_REGISTERS>();
        if (warp == EPILOGUE_WARPS) {   // producer
            PipelineState<STAGES> at;
            while (lane == 0 &&
                   (rank == 0 ? scheduler.take(work) : scheduler.next_of_thread(work))) {
                // Load the stages of a work tile.
                const TileOrigin origin = origin_at(work.tile);
                const int a_matrix = origin.matrix * p.a_step, b_matrix = origin.matrix * p.b_step;
                for (int k = work.begin * K; k < work.end * K; k += K) {
                    Mbarrier& arrived = full[at.stage];
                    empty[at.stage].wait(at.parity ^ 1);
                    arrived.arrive_expect_tx(Storage::A_BYTES + Storage::B_BYTES);
                    if (A_COLUMNS) {
                        for (int i = 0; i < M; i += 64)
                            tma_load(storage.a[at.stage] + i * SWIZZLE, a_map, arrived,
                                     origin.row + i, k, a_matrix, 0);
                    } else {
                        tma_load(storage.a[at.stage], a_map, arrived, k, origin.row, a_matrix, 0);
                    }
                    constexpr int COLUMNS = B_COLUMNS ? 64 : 128;   // at a time
                    #pragma unroll
                    for (int i = 0; i < N / CLUSTER; i += COLUMNS) {
                        const int first = rank * (N / CLUSTER) + i, n = origin.column + first;
                        void* to = storage.b[at.stage] + first * SWIZZLE;
                        const int x = B_COLUMNS ? n : k, y = B_COLUMNS ? k : n;
                        if (CLUSTER == 1) tma_load(to, b_map, arrived, x, y, b_matrix, 0);
                        else
                            tma_load_multicast((1 << CLUSTER) - 1, to, b_map, arrived, x, y,
                                               b_matrix, 0);
                    }
                    at.next();
                }
            }
        } else {   // epilogue warps
            const bool beside = EPILOGUE == SCALED || (EPILOGUE == NARROW && p.residual);
            unsigned parity = 0;
            struct WarpBox { int w, c; };   // consumer warp, and box of it
            auto box_of = [](int i) -> WarpBox { return {i / OTHERS, OWN + i % OTHERS}; };
            // Open a box for the next tile, with its residual or derivatives.
            auto prepare = [&](int i, const TileOrigin& origin) {   // lane 0
                const auto [w, c] = box_of(i);
                unsigned char* box = storage.boxes[w][c];
                if (!beside) {
                    open[w].arrive();
                } else if (EPILOGUE == SCALED) {
                    const unsigned char* from = derivatives_at(origin, w, c);
                    open[w].arrive_expect_tx(from ? DERIVATIVE_BOX : 0);
                    if (from) bulk_load(box, from, DERIVATIVE_BOX, open[w]);
                } else {
                    open[w].arrive_expect_tx(BOX_BYTES);
                    tma_load(box, beside_map, open[w], origin.column + c * 64, origin.row + w * 16,
                             origin.matrix, 0);
                }
            };
            bool more = scheduler.next(work);
            if (more && lane == 0)
                for (int i = warp; i < ALL_OTHERS; i += EPILOGUE_WARPS)
                    prepare(i, origin_at(work.tile));
            while (more) {
                const TileOrigin origin = origin_at(work.tile);
                // Split along K, the parts of sums go to as many results as there are slabs, and
                // one more.
                const int part = p.split_steps ? (work.begin + p.split_steps - 1) / p.split_steps
                                               : 0;
                more = scheduler.next(work);
                const TileOrigin next = origin_at(work.tile);
                #pragma unroll 1
                for (int turn = 0; turn < PASSES; ++turn) {
                    const bool opens = more || turn + 1 < PASSES;
                    auto send = [&](int i) {   // lane 0
                        const auto [w, c] = box_of(i);
                        const int column = origin.column + (turn * BOXES + c) * WIDTH,
                                  row = origin.row + w * 16;
                        if (EPILOGUE == WIDE && p.add)
                            tma_reduce_add(y_map, storage.boxes[w][c], column, row, origin.matrix,
                                           part);
                        else
                            tma_store(y_map, storage.boxes[w][c], column, row, origin.matrix,
                                      part);
                        tma_store_commit();
                    };
                    // Wait for sums, take GELU of them or add up their rows, and store them; open
                    // their boxes for the next tile. Every OTHERS-th turn has the same columns.
                    constexpr int TOGETHER = EPILOGUE == SCALED ? OTHERS : 1;
                    float column_sums[TOGETHER][2] = {};
                    #pragma unroll 1
                    for (int first = warp; first < ALL_OTHERS; first += EPILOGUE_WARPS * TOGETHER)
                        #pragma unroll
                        for (int k = 0; k < TOGETHER; ++k) {
                            const int i = first + EPILOGUE_WARPS * k;
                            if (i >= ALL_OTHERS) break;
                            const auto [w, c] = box_of(i);
                            filled[w].wait(parity);
                            if (TAKES_GELU) {
                                gelu_in_box<T>(storage.boxes[w][c], derivatives_at(origin, w, c));
                                fence_proxy_async();
                            }
                            if (EPILOGUE == SCALED && p.column_sums)
                                add_rows_of_box<T>(column_sums[k], storage.boxes[w][c]);
                            __syncwarp();
                            if (lane > 0) continue;
                            send(i);
                            const int stored = i - UNDER_WAY * EPILOGUE_WARPS;
                            if (stored >= 0 && opens) {
                                tma_store_wait_read<UNDER_WAY>();
                                prepare(stored, next);
                            }
                        }
                    if (EPILOGUE == SCALED && p.column_sums)
                        #pragma unroll
                        for (int k = 0; k < TOGETHER; ++k) {
                            const int c = box_of(warp + EPILOGUE_WARPS * k).c,
                                      column = origin.column + c * 64 + lane * 2;
                            float* to = reinterpret_cast<float*>(p.column_sums) + column
                                      + (long long)(origin.row / M * EPILOGUE_WARPS + warp)
                                            * p.columns;
                            if (column < p.columns && origin.row < p.rows)
                                store(to, Vec<float, 2>{column_sums[k][0], column_sums[k][1]});
                        }
                    if (lane == 0 && opens) {
                        tma_store_wait_read<0>();
                        const int each = (ALL_OTHERS - warp + EPILOGUE_WARPS - 1) / EPILOGUE_WARPS;
                        for (int k = max(0, each - UNDER_WAY); k < each; ++k)
                            prepare(warp + k * EPILOGUE_WARPS, next);
                    }
                    parity ^= 1;
                }
            }
            if (lane == 0) tma_store_wait<0>();
        }
    } else {   // consumers
        setmaxnreg_increase<CONSUMER_REGISTERS>();
        auto release = [&](int stage) {
            if (CLUSTER == 1) { if (thread == 0) empty[stage].arrive(); }
            else if (thread < CLUSTER) empty[stage].arrive_remote(thread);
        };
        const int w = group * 4 + warp;
        PipelineState<STAGES> at;
        unsigned parity = 0;
        while (scheduler.next(work)) {
            Fragment<1, N> sums;
            // Mainloop: wait for a stage, multiply, release the stage before.
            int before = 0;
            for (int k = work.begin; k < work.end; ++k) {
                const unsigned long long a =
                    wgmma_descriptor(storage.a[at.stage] + group * 64 * SWIZZLE);
                const unsigned long long b = wgmma_descriptor(storage.b[at.stage], K * SWIZZLE);
                full[at.stage].wait(at.parity);
                fence_registers(sums.values);
                wgmma_fence();
                #pragma unroll
                // 16 terms further: along the rows, or 16 rows on
                for (int i = 0; i < K / 16; ++i)
                    Wgmma<T, N>::template run<B_COLUMNS, A_COLUMNS>(
                        sums.values, a + i * (A_COLUMNS ? SWIZZLE : 2),
                        b + i * (B_COLUMNS ? SWIZZLE : 2), k > work.begin || i > 0);
                wgmma_commit();
                // while the tensor cores work
                if (EPILOGUE != SCALED && p.bias && k == work.begin)
                    copy_bias<T, N>(storage.bias[w], p, origin_at(work.tile).column);
                wgmma_wait<1>();
                if (k > work.begin) release(before);
                before = at.stage;
                at.next();
            }
            wgmma_wait<0>();
            fence_registers(sums.values);
            release(before);

            // Epilogue: bias, residual or scale, round into boxes.
            #pragma unroll
            for (int turn = 0; turn < PASSES; ++turn) {
                open[w].wait(parity);
                if (OWN > 0) {
                    if (lane == 0) tma_store_wait_read<0>();
                    __syncwarp();
                }
                if (turn == 0 && EPILOGUE != SCALED && p.bias) {
                    __syncwarp();
                    add_bias(sums, storage.bias[w]);
                }
                #pragma unroll
                for (int c = 0; c < BOXES; ++c) {
                    float* own = sums.values + (turn * BOXES + c) * WIDTH / 2;
                    unsigned char* box = storage.boxes[w][c];
                    if (EPILOGUE == WIDE) {
                        fill_box_wide(box, own);
                    } else {
                        if (EPILOGUE == SCALED) multiply_by_derivatives(own, box);
                        else if (EPILOGUE == NARROW && p.residual) add_box<T>(own, box);
                        fill_box<T>(box, own);
                    }
                }
                fence_proxy_async();
                __syncwarp();
                if (lane == 0) filled[w].arrive();
                parity ^= 1;
                if constexpr (OWN > 0) {
                    const TileOrigin origin = origin_at(work.tile);
                    for (int c = 0; c < OWN; ++c)
                        gelu_in_box<T>(storage.boxes[w][c], derivatives_at(origin, w, c));
                    fence_proxy_async();
                    __syncwarp();
                    if (lane > 0) continue;
                    for (int c = 0; c < OWN; ++c)
                        tma_store(y_map, storage.boxes[w][c], origin.column + c * 64,
                                  origin.row + w * 16, origin.matrix, 0);
                    tma_store_commit();
                }
            }
        }
        if (OWN > 0 && lane == 0) tma_store_wait<0>();
    }
    if (CLUSTER > 1) cluster_sync();   // no block exits while another may still write to it
}

// y = or += the sum of the parts that matmul<T, WIDE> wrote of one product, in the order of K.
template <typename Y>
__global__ void __launch_bounds__(256)
matmul_sum(Y* __restrict__ y, const float* __restrict__ parts, int tile_height, int tile_width,
           const __grid_constant__ MatmulSm90Arguments p) {
    const long long size = (long long)p.rows * p.columns,
                    index = (blockIdx.x * 256ll + threadIdx.x) * 4;
    if (index >= size) return;
    // How many parts there are.
    const int row = index / p.columns, column = index - (long long)row * p.columns;
    const int tile_rows = (p.rows + tile_height - 1) / tile_height;
    const int tile = column / tile_width * tile_rows + row / tile_height;
    const int steps = (p.terms + K - 1) / K, slabs = steps / p.split_steps,
              rest = steps - slabs * p.split_steps;
    int count = slabs;
    // cut in two
    if (rest)
        count += 1 + (tile * rest / p.split_steps != (tile * rest + rest - 1) / p.split_steps);
    // Add them up.
    float sum[4] = {};
    for (int i = 0; i < count; ++i) {
        const Vec<float, 4> part = load<4>(parts + i * size + index);
        #pragma unroll
        for (int e = 0; e < 4; ++e) sum[e] += part.values[e];
    }
    // Store.
    Vec<Y, 4> result = {};
    if (p.add) result = load<4>(y + index);
    #pragma unroll
    for (int e = 0; e < 4; ++e)
        result.values[e] = Y(p.add ? float(result.values[e]) + sum[e] : sum[e]);
    store(y + index, result);
}
