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
constexpr int PAIRS = CONSUMER_WARPS * BOXES / 2;   // boxes are below each other
constexpr int A_BYTES = M * SWIZZLE, B_BYTES = N * SWIZZLE;

// Shared memory of a block: the stages, boxes for the 16 rows of each consumer warp, its bias.
struct Fp8Storage {
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

// GELU of 8 values and its derivatives, as GeluOf8, by the approximation of tanh: its error of
// 2^-11 is far below that of 8 bits.
template <typename T> struct RoundedGeluOf8 {
    static constexpr float A = 2 * 0.7978845608028654f, B = A * 0.044715f;
    float y[8];
    unsigned bytes[8];

    __device__ explicit RoundedGeluOf8(const float (&x)[8]) {
        #pragma unroll
        for (int e = 0; e < 8; ++e) {
            const float square = x[e] * x[e];
            float t;
            asm("tanh.approx.f32 %0, %1;" : "=f"(t) : "f"(x[e] * (A / 2 + B / 2 * square)));
            const float s = 0.5f * t + 0.5f;
            y[e] = x[e] * s;
            // Where s is 0 or 1, 0 is multiplied with du, which must be finite.
            const float du = 3 * B * fminf(square, 1e30f) + A;
            bytes[e] = derivative_byte((y[e] - y[e] * s) * du + s);
        }
    }
};

// Round 32 rows and 32 columns, by a warp; of GELU8 take GELU first, of SCALED8 add up the rows. A
// lane has 4 rows of 8 columns: of the transpose a word of each column. Four lanes write 32 bytes
// of a row, eight of a column.
//
// box, derivatives: of this lane's rows; the rows of the lane begin at `first` there. unit: of 8
// columns in the box. row, column: of the lane in the result.
template <typename T, Rounded ROUNDED>
__device__ inline void round_block(unsigned char* box, unsigned char* derivatives, int first,
                                   int unit, const RoundedResult& result, int row, int column,
                                   int columns, bool inside, float scale, float (&sums)[8],
                                   Fp8Meter& meter) {
    constexpr Format FORMAT = ROUNDED == GELU8 ? E4M3 : E5M2;
    unsigned rounded[4][2];
    #pragma unroll
    for (int r = 0; r < 4; ++r) {
        const uint4 words = *reinterpret_cast<uint4*>(piece_at(box, first + r, unit));
        float y[8];
        #pragma unroll
        for (int e = 0; e < 8; e += 2) {
            const float2 pair = unpack<T>(reinterpret_cast<const unsigned*>(&words)[e / 2]);
            y[e] = pair.x;
            y[e + 1] = pair.y;
        }
        if constexpr (ROUNDED == GELU8) {
            const RoundedGeluOf8<T> gelu(y);
            store_if(inside, derivatives + derivative_unit(first + r, unit),
                     make_uint2(joined(gelu.bytes), joined(gelu.bytes + 4)));
            #pragma unroll
            for (int e = 0; e < 8; ++e) y[e] = gelu.y[e];
        } else {
            #pragma unroll
            for (int e = 0; e < 8; ++e) sums[e] = r == 0 ? y[e] : sums[e] + y[e];
        }
        meter.see<FORMAT>(y, scale);
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            float four[4];
            #pragma unroll
            for (int e = 0; e < 4; ++e) four[e] = y[half * 4 + e] * scale;
            rounded[r][half] = round_to_fp8<FORMAT>(four);
        }
        store_if(inside, result.rows + (row + r) * (long long)columns + column,
                 make_uint2(rounded[r][0], rounded[r][1]));
    }
    if (!inside) return;
    unsigned char* to = result.columns + column * (long long)result.pitch + row;
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

// The sums of 8 values each over the lanes of equal lane % 4; lane 4 i + j gets number i of them.
__device__ inline float sum_over_quads(float (&x)[8]) {
    const int lane = threadIdx.x % 32;
    #pragma unroll
    for (int count = 4; count > 0; count /= 2) {
        const bool upper = lane & count * 4;
        #pragma unroll
        for (int i = 0; i < count; ++i) {
            const float sent = upper ? x[i] : x[i + count], kept = upper ? x[i + count] : x[i];
            x[i] = kept + __shfl_xor_sync(0xffffffff, sent, count * 4);
        }
    }
    return x[0];
}

// The CLUSTER blocks of a cluster are one below the other.
template <typename T, Rounded ROUNDED>
__global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
matmul_fp8(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
           const __grid_constant__ MatmulSm90Arguments p,
           const __grid_constant__ RoundedResult result, unsigned* taken) {
    constexpr Format LEFT = ROUNDED == GELU8 ? E4M3 : E5M2;
    extern __shared__ unsigned char raw[];
    Fp8Storage& storage = *reinterpret_cast<Fp8Storage*>(raw + (-shared_address(raw) & 1023));
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
            // Open two boxes for the next tile, with their derivatives.
            auto prepare = [&](int i, const TileOrigin& origin) {   // lane 0
                #pragma unroll
                for (int below = 0; below < 2; ++below) {
                    const int w = i / BOXES * 2 + below, c = i % BOXES;
                    if (ROUNDED == GELU8) {
                        open[w].arrive();
                    } else {
                        const unsigned char* from = derivatives_at(origin, w, c);
                        open[w].arrive_expect_tx(from ? DERIVATIVE_BOX : 0);
                        if (from) bulk_load(storage.boxes[w][c], from, DERIVATIVE_BOX, open[w]);
                    }
                }
            };
            // A lane's rows are in one of two boxes, of consumer warps that are below each other.
            const int unit = lane % 4, quad = lane / 4, first = quad % 4 * 4;
            bool more = scheduler.next(work);
            if (more && lane == 0)
                for (int i = warp; i < PAIRS; i += EPILOGUE_WARPS)
                    prepare(i, origin_at(work.tile));
            while (more) {
                const TileOrigin origin = origin_at(work.tile);
                more = scheduler.next(work);
                const TileOrigin next = origin_at(work.tile);
                // Wait for sums, take GELU of them or add up their rows, round and store them; open
                // their boxes for the next tile.
                #pragma unroll 1
                for (int i = warp; i < PAIRS; i += EPILOGUE_WARPS) {
                    const int pair = i / BOXES * 2, c = i % BOXES, w = pair + quad / 4;
                    filled[pair].wait(parity);
                    filled[pair + 1].wait(parity);
                    const int row = origin.row + pair * 16 + quad * 4;
                    unsigned char* derivatives =
                        ROUNDED == GELU8 ? derivatives_at(origin, w, c) : nullptr;
                    #pragma unroll 1
                    for (int half = 0; half < 2; ++half) {
                        const int column = origin.column + c * 64 + half * 32 + unit * 8;
                        const bool inside = row < p.rows && column < p.columns;
                        float sums[8];
                        round_block<T, ROUNDED>(storage.boxes[w][c], derivatives, first,
                                                half * 4 + unit, result, row, column, p.columns,
                                                inside, scale, sums, meter);
                        if (ROUNDED == SCALED8) {
                            const float sum = sum_over_quads(sums);
                            const int part = (origin.row + pair * 16) / 32;
                            if (part * 32 < p.rows && column < p.columns)
                                reinterpret_cast<float*>(p.column_sums)[
                                    part * (long long)p.columns + column + quad] = sum;
                        }
                    }
                    __syncwarp();
                    if (more && lane == 0) {
                        fence_proxy_async();
                        prepare(i, next);
                    }
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
