// Matrix products of 8 bits on Hopper, whose results are rounded to 8 bits (see fp8.cuh) in the
// epilogue: the two products inside a feed-forward layer.
//
//   GELU8     y = gelu(a b^T + bias), rounded to e4m3; and the derivative of GELU, 8 bits
//   SCALED8   y = (a b^T) scale, such a derivative, rounded to e5m2; and sums over the rows of y
//
// y is written in rows and transposed, as operands of the products that follow, with =; the largest
// |y| is added to the state of its scale.
//
// It is the kernel of sm90.cu (tiles of 128 x 192 sums, a cluster of two blocks, TMA, consumers and
// epilogue warps) for operands whose terms lie along rows. Two terms of 8 bits move as one of 16:
// `terms` counts pairs, and a step of 64 of them has 128 terms. Such a step takes as long as one of
// 64 terms in 16 bits, so a tile of 768 terms takes half as long, and seven warps in place of three
// take GELU meanwhile. Sums stay in the tensor cores, with 14 bits.
//
// Floor: 2 M N K operations at twice the rate of 16 bits. An element of y is 2 bytes, and 1 of the
// derivative, where a product in 16 bits and a pass to round its result move 6 and 8.
//
// The naive kernel, a thread for y[i][j]:
//
//   float sum = 0;
//   for (int k = 0; k < terms; ++k) sum += a[i][k] * b[j][k];
//   y[i][j] = transposed[j][i] = fp8(gelu(sum * factor + bias[j]) * scale);
//
// Phases. Producer: for each tile, load its stages. Epilogue warps: open the boxes for the next
// tile (load derivatives), wait for sums, GELU, sums over rows, round, store. Consumers: mainloop
// (wait for a stage, wgmma, release the stage before); epilogue (factor, bias or derivative, into
// boxes).
//
// arch: sm_90a
// instantiate: matmul_fp8<__nv_bfloat16, {GELU8 | SCALED8}>
#include "fp8.cuh"
#include "matmul/sm90.cuh"
#include "overlap.cuh"

DEFINE_WGMMA_FP8(E4M3, E4M3, "e4m3", "e4m3", 192, 96, 96, 97, 98)
DEFINE_WGMMA_FP8(E5M2, E4M3, "e5m2", "e4m3", 192, 96, 96, 97, 98)

enum Rounded { GELU8, SCALED8 };

constexpr int N = 192, CLUSTER = 2, STAGES = 4, BOXES = N / 64;
constexpr int PRODUCER_REGISTERS = 104, CONSUMER_REGISTERS = 152;   // a thread's
constexpr int CONSUMER_WARPS = 8, EPILOGUE_WARPS = 7, THREADS = 512;
constexpr int ALL_BOXES = CONSUMER_WARPS * BOXES;
constexpr int A_BYTES = M * SWIZZLE, B_BYTES = N * SWIZZLE;

// Shared memory of a block: the stages, boxes for the 16 rows of each consumer warp, its bias.
struct SharedStorage {
    unsigned char a[STAGES][A_BYTES], b[STAGES][B_BYTES], boxes[CONSUMER_WARPS][BOXES][BOX_BYTES];
    float bias[CONSUMER_WARPS][N];
};

struct RoundedResult {
    unsigned char *rows, *columns;   // y, and its transpose
    Fp8Scale* scale;
    const float *left, *right;   // factors of a and b
    int pitch;   // from one column of the transpose to the next
    int reports;
};

// Round 16 rows and 64 columns of a box, by a warp; of GELU8 take GELU first. A lane has 4 rows of
// 8 columns: of the transpose a word of each column.
template <typename T, Rounded ROUNDED>
__device__ inline void round_box(unsigned char* box, unsigned char* derivatives,
                                 const RoundedResult& result, int row, int column, int columns,
                                 float scale, Fp8Meter& meter) {
    constexpr Format FORMAT = ROUNDED == GELU8 ? E4M3 : E5M2;
    const int lane = threadIdx.x % 32, unit = lane % 8, first = lane / 8 * 4;
    const bool inside = column + unit * 8 < columns;
    unsigned rounded[4][2];
    #pragma unroll
    for (int r = 0; r < 4; ++r) {
        const uint4* from = reinterpret_cast<uint4*>(piece_at(box, first + r, unit));
        float y[8];
        if constexpr (ROUNDED == GELU8) {
            GeluOf8<T> values;
            values.load(from);
            store_if(derivatives, derivatives + derivative_unit(first + r, unit),
                     values.derivatives());
            #pragma unroll
            for (int e = 0; e < 8; ++e) y[e] = values.y[e];
        } else {
            const uint4 words = *from;
            #pragma unroll
            for (int e = 0; e < 8; e += 2) {
                const float2 pair = unpack<T>(reinterpret_cast<const unsigned*>(&words)[e / 2]);
                y[e] = pair.x;
                y[e + 1] = pair.y;
            }
        }
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            float four[4];
            #pragma unroll
            for (int e = 0; e < 4; ++e) {
                meter.see(y[half * 4 + e]);
                four[e] = y[half * 4 + e] * scale;
                meter.clipped += fabsf(four[e]) > LARGEST<FORMAT>;
            }
            rounded[r][half] = round_to_fp8<FORMAT>(four);
        }
        store_if(inside, result.rows + (row + first + r) * (long long)columns + column + unit * 8,
                 make_uint2(rounded[r][0], rounded[r][1]));
    }
    if (!inside) return;
    unsigned char* to =
        result.columns + (column + unit * 8) * (long long)result.pitch + row + first;
    #pragma unroll
    for (int half = 0; half < 2; ++half) {
        unsigned words[4];
        transpose_bytes(words, rounded[0][half], rounded[1][half], rounded[2][half],
                        rounded[3][half]);
        #pragma unroll
        for (int e = 0; e < 4; ++e)
            *reinterpret_cast<unsigned*>(to + (half * 4 + e) * (long long)result.pitch) = words[e];
    }
}

// The CLUSTER blocks of a cluster are one below the other.
template <typename T, Rounded ROUNDED>
__global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
matmul_fp8(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
           const __grid_constant__ MatmulSm90Arguments p,
           const __grid_constant__ RoundedResult result, unsigned* taken) {
    constexpr Format LEFT = ROUNDED == GELU8 ? E4M3 : E5M2;
    extern __shared__ unsigned char raw[];
    SharedStorage& storage = *reinterpret_cast<SharedStorage*>(raw + (-shared_address(raw) & 1023));
    // Barriers of the stages, and of the boxes of a consumer warp: may be filled, were filled.
    __shared__ Mbarrier full[STAGES], empty[STAGES], open[CONSUMER_WARPS], filled[CONSUMER_WARPS];
    __shared__ ClusterTileQueue queue;
    const int rank = cluster_rank();
    // Set up the barriers.
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            full[s].init(1);
            empty[s].init(2 * CLUSTER);   // the consumer warpgroups of all blocks of the cluster
        }
        for (int w = 0; w < CONSUMER_WARPS; ++w) {
            open[w].init(BOXES);
            filled[w].init(1);
        }
        queue.init(CLUSTER * (EPILOGUE_WARPS + CONSUMER_WARPS) + CLUSTER - 1);
        fence_mbarrier_init();
    }
    cluster_sync();
    wait_for_previous_kernel();

    const int tile_rows = (p.rows + M * CLUSTER - 1) / (M * CLUSTER),
              tile_columns = (p.columns + N - 1) / N;
    TileScheduler<CLUSTER> scheduler(p, queue, taken, tile_rows * tile_columns,
                                     blockIdx.x / CLUSTER, gridDim.x / CLUSTER);
    auto origin_at = [&](int tile) {
        return tile_origin<N, CLUSTER>(p, tile, tile_rows, tile_columns, rank);
    };
    // Where the derivatives are that go with box c of consumer warp w, or null.
    auto derivatives_at = [&](const TileOrigin& origin, int w, int c) -> unsigned char* {
        const int row = origin.row + w * 16, column = origin.column + c * 64;
        if (row >= p.rows || column >= p.columns) return nullptr;
        const long long box = row / 16 * (long long)((p.columns + 63) / 64) + column / 64;
        return reinterpret_cast<unsigned char*>(p.derivative) + box * DERIVATIVE_BOX;
    };
    WorkTile work;
    const int group = uniform(threadIdx.x / WARPGROUP) - 2, thread = threadIdx.x % WARPGROUP;
    const int warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32;

    if (group < 0) {
        setmaxnreg_decrease<PRODUCER_REGISTERS>();
        if (warp == EPILOGUE_WARPS) {   // producer
            PipelineState<STAGES> at;
            while (lane == 0 &&
                   (rank == 0 ? scheduler.take(work) : scheduler.next_of_thread(work))) {
                // Load the stages of a tile.
                const TileOrigin origin = origin_at(work.tile);
                for (int k = 0; k < work.end * K; k += K) {
                    Mbarrier& arrived = full[at.stage];
                    empty[at.stage].wait(at.parity ^ 1);
                    arrived.arrive_expect_tx(A_BYTES + B_BYTES);
                    tma_load(storage.a[at.stage], a_map, arrived, k, origin.row, 0, 0);
                    const int first = rank * (N / CLUSTER);
                    tma_load_multicast((1 << CLUSTER) - 1, storage.b[at.stage] + first * SWIZZLE,
                                       b_map, arrived, k, origin.column + first, 0, 0);
                    at.next();
                }
            }
        } else {   // epilogue warps
            unsigned parity = 0;
            Fp8Meter meter;
            const float scale = result.scale->scale;
            // Open a box for the next tile, with its derivatives.
            auto prepare = [&](int i, const TileOrigin& origin) {   // lane 0
                const int w = i / BOXES, c = i % BOXES;
                if (ROUNDED == GELU8) {
                    open[w].arrive();
                } else {
                    const unsigned char* from = derivatives_at(origin, w, c);
                    open[w].arrive_expect_tx(from ? DERIVATIVE_BOX : 0);
                    if (from) bulk_load(storage.boxes[w][c], from, DERIVATIVE_BOX, open[w]);
                }
            };
            bool more = scheduler.next(work);
            if (more && lane == 0)
                for (int i = warp; i < ALL_BOXES; i += EPILOGUE_WARPS)
                    prepare(i, origin_at(work.tile));
            while (more) {
                const TileOrigin origin = origin_at(work.tile);
                more = scheduler.next(work);
                const TileOrigin next = origin_at(work.tile);
                // Wait for sums, take GELU of them or add up their rows, round and store them; open
                // their boxes for the next tile. Every BOXES-th turn has the same columns.
                float column_sums[BOXES][2] = {};
                #pragma unroll 1
                for (int first = warp; first < ALL_BOXES; first += EPILOGUE_WARPS * BOXES)
                    #pragma unroll
                    for (int k = 0; k < BOXES; ++k) {
                        const int i = first + EPILOGUE_WARPS * k, w = i / BOXES, c = i % BOXES;
                        if (i >= ALL_BOXES) break;
                        filled[w].wait(parity);
                        const int row = origin.row + w * 16, column = origin.column + c * 64;
                        if (ROUNDED == SCALED8)
                            add_rows_of_box<T>(column_sums[k], storage.boxes[w][c]);
                        if (row < p.rows && column < p.columns)
                            round_box<T, ROUNDED>(storage.boxes[w][c],
                                                  derivatives_at(origin, w, c), result, row, column,
                                                  p.columns, scale, meter);
                        __syncwarp();
                        if (more && lane == 0) {
                            fence_proxy_async();
                            prepare(i, next);
                        }
                    }
                if (ROUNDED == SCALED8)
                    #pragma unroll
                    for (int k = 0; k < BOXES; ++k) {
                        const int c = (warp + EPILOGUE_WARPS * k) % BOXES,
                                  column = origin.column + c * 64 + lane * 2;
                        float* to = reinterpret_cast<float*>(p.column_sums) + column
                                  + (long long)(origin.row / M * EPILOGUE_WARPS + warp) * p.columns;
                        if (column < p.columns && origin.row < p.rows)
                            store(to, Vec<float, 2>{column_sums[k][0], column_sums[k][1]});
                    }
                parity ^= 1;
            }
            if (result.reports) meter.report_warp(result.scale);
        }
    } else {   // consumers
        setmaxnreg_increase<CONSUMER_REGISTERS>();
        auto release = [&](int stage) {
            if (thread < CLUSTER) empty[stage].arrive_remote(thread);
        };
        const int w = warp - 8;
        const float factor = *result.left * *result.right;
        PipelineState<STAGES> at;
        unsigned parity = 0;
        while (scheduler.next(work)) {
            Fragment<1, N> sums;
            // Mainloop: wait for a stage, multiply, release the stage before.
            int before = 0;
            for (int k = 0; k < work.end; ++k) {
                const unsigned long long a =
                    wgmma_descriptor(storage.a[at.stage] + group * 64 * SWIZZLE);
                const unsigned long long b = wgmma_descriptor(storage.b[at.stage], K * SWIZZLE);
                full[at.stage].wait(at.parity);
                fence_registers(sums.values);
                wgmma_fence();
                #pragma unroll
                for (int i = 0; i < 4; ++i)   // 32 terms further along the rows
                    WgmmaFp8<LEFT, E4M3, N>::run(sums.values, a + i * 2, b + i * 2,
                                                 k > 0 || i > 0);
                wgmma_commit();
                // while the tensor cores work
                if (ROUNDED == GELU8 && p.bias && k == 0)
                    copy_bias<T, N>(storage.bias[w], p, origin_at(work.tile).column);
                wgmma_wait<1>();
                if (k > 0) release(before);
                before = at.stage;
                at.next();
            }
            wgmma_wait<0>();
            fence_registers(sums.values);
            release(before);

            // Epilogue: factor, bias or derivative, into boxes.
            open[w].wait(parity);
            #pragma unroll
            for (float& sum : sums.values) sum *= factor;
            if (ROUNDED == GELU8 && p.bias) {
                __syncwarp();
                add_bias(sums, storage.bias[w]);
            }
            #pragma unroll
            for (int c = 0; c < BOXES; ++c) {
                float* own = sums.values + c * 32;
                if (ROUNDED == SCALED8) multiply_by_derivatives(own, storage.boxes[w][c]);
                fill_box<T>(storage.boxes[w][c], own);
            }
            __syncwarp();
            if (lane == 0) filled[w].arrive();
            parity ^= 1;
        }
    }
    cluster_sync();   // no block exits while another may still write to it
}
