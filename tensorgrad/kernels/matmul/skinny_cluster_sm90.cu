// Products of 9 to 32 rows of x on Hopper: y = x W^T, of megabytes of W.
//
// What a block reads from L2 is W and x. Of 32 rows x is twice as much as W in the 16 columns of a
// block of skinny.cu. Here a tile is 64 columns of y:
//
//   matmul_skinny_cluster  the blocks of a cluster divide the terms of a tile (split-K), and add
//                            up their sums in shared memory, in order
//   matmul_skinny_tile     a block a tile, where there are tiles enough
//
// Weights are the operand of wgmma that has 64 rows, x is the one that has 16 or 32. Arguments and
// epilogue are as in skinny.cu. Launched by kernels/matmul/skinny.py.
//
// Phases: start to copy the weights; wait for the kernel before; multiply, and copy what is left as
// stages get free; give each block of the cluster its rows of the sums; add up; epilogue.
//
// arch: sm_90a
// instantiate: matmul_skinny_tile<{__half | __nv_bfloat16}, {16 | 32}>
// instantiate: matmul_skinny_cluster<{__half | __nv_bfloat16}, {16 | 32}, {2 | 4 | 8}>
constexpr bool ROUGH = false;   // constant of elementwise.cuh: results may have 32 bits
#include "elementwise.cuh"
#include "hopper.cuh"
#include "matmul/skinny.cuh"
#include "overlap.cuh"

constexpr int TILE = 64, TERMS = 64, MOST_STAGES = 16;   // columns of y; terms of a stage

// SPLIT blocks a tile. Each computes the sums of its terms, in stages of 64, and stores
// ROWS / SPLIT rows of y. What is outside of x or weight is loaded as 0. Shared memory: `stages` of
// weights and x, then 272 ROWS bytes of sums; 1,024 more, to align them.
//
// at_once: lets the next kernel start before it waits. Only weight is read before the wait: see
// overlap.py.
template <typename T, int ROWS, int SPLIT>
__device__ inline void multiply_tile(const SkinnyEpilogue<T>& epilogue, const TensorMap& x,
                                     const TensorMap& weight, int rows, int width, int stages,
                                     bool at_once) {
    constexpr int W_BYTES = TILE * SWIZZLE, STAGE = W_BYTES + ROWS * SWIZZLE;
    constexpr int OWN_ROWS = ROWS / SPLIT, ITEMS = OWN_ROWS * TILE;   // the block's part of y
    constexpr int OWN = (ITEMS + WARPGROUP - 1) / WARPGROUP;          // that a thread stores
    extern __shared__ unsigned char raw[];
    unsigned char* memory = raw + (-shared_address(raw) & 1023);
    // The sums of each block of the cluster, of this block's rows; no two threads meet in a bank.
    using Partials = float[OWN_ROWS][TILE + 4];
    Partials* partials = reinterpret_cast<Partials*>(memory + stages * STAGE);
    __shared__ Mbarrier full[MOST_STAGES];
    const int rank = SPLIT == 1 ? 0 : cluster_rank(), first = blockIdx.x / SPLIT * TILE;
    const int steps = (width + TERMS - 1) / TERMS, begin = steps * rank / SPLIT,
              count = steps * (rank + 1) / SPLIT - begin;

    // Start to copy the weights.
    if (at_once) start_next_kernel();
    const auto copy_weights = [&](int step, int stage) {   // by a thread
        full[stage].arrive_expect_tx(STAGE);
        tma_load(memory + stage * STAGE, weight, full[stage], (begin + step) * TERMS, first, 0, 0);
    };
    const auto copy_x = [&](int step, int stage) {
        tma_load(memory + stage * STAGE + W_BYTES, x, full[stage], (begin + step) * TERMS, 0, 0, 0);
    };
    if (threadIdx.x == 0) {
        for (int s = 0; s < stages; ++s) full[s].init(1);
        fence_mbarrier_init();
        for (int s = 0; s < min(stages, count); ++s) copy_weights(s, s);
        prefetch_map(x);
    }
    __syncthreads();
    if (SPLIT > 1) cluster_arrive();   // its blocks run

    // Wait for the kernel before.
    wait_for_previous_kernel();
    start_next_kernel();
    if (threadIdx.x == 0)
        for (int s = 0; s < min(stages, count); ++s) copy_x(s, s);
    typename SkinnyEpilogue<T>::Operands operands[OWN];
    const auto for_own = [&](auto f) {   // f(n, row, column) of this thread's elements of y
        #pragma unroll
        for (int n = 0; n < OWN; ++n) {
            const int item = threadIdx.x + n * WARPGROUP, row = item / TILE, column = item % TILE;
            if (item < ITEMS && rank * OWN_ROWS + row < rows && first + column < epilogue.columns)
                f(n, row, column);
        }
    };
    for_own([&](int n, int row, int column) {
        operands[n] = epilogue.load(rank * OWN_ROWS + row, first + column);
    });

    // Multiply, and copy what is left as stages get free.
    float sums[ROWS / 2];
    #pragma unroll
    for (float& sum : sums) sum = 0;
    int stage = 0, before = 0;
    unsigned parity = 0;
    #pragma unroll 1
    for (int step = 0; step < count; ++step) {
        full[stage].wait(parity);
        const unsigned char* at = memory + stage * STAGE;
        const unsigned long long w = wgmma_descriptor(at), own = wgmma_descriptor(at + W_BYTES);
        fence_registers(sums);
        wgmma_fence();
        #pragma unroll
        for (int k = 0; k < TERMS; k += 16) {
            const int along = k * int(sizeof(T)) / 16;
            Wgmma<T, ROWS>::run(sums, w + along, own + along, true);
        }
        wgmma_commit();
        if (const int next = step - 1 + stages; step > 0 && next < count) {
            wgmma_wait<1>();
            __syncthreads();   // all warps have read the stage of the step before
            if (threadIdx.x == 0) {
                copy_weights(next, before);
                copy_x(next, before);
            }
        }
        before = stage;
        if (++stage == stages) stage = 0, parity ^= 1;
    }
    wgmma_wait<0>();
    fence_registers(sums);

    // Give each block its rows of the sums.
    if (SPLIT > 1) cluster_wait();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    #pragma unroll
    for (int i = 0; i < ROWS / 2; ++i) {
        const int row = i / 4 * 8 + lane % 4 * 2 + i % 2,
                  column = warp * 16 + i / 2 % 2 * 8 + lane / 4;
        float& place = partials[rank][row % OWN_ROWS][column];
        if (SPLIT == 1) place = sums[i]; else store_remote(row / OWN_ROWS, place, sums[i]);
    }
    if (SPLIT == 1) __syncthreads(); else cluster_sync();
    // Add up; epilogue.
    for_own([&](int n, int row, int column) {
        float sum = 0;
        #pragma unroll
        for (int r = 0; r < SPLIT; ++r) sum += partials[r][row][column];
        epilogue.store(sum, rank * OWN_ROWS + row, first + column, operands[n]);
    });
}

template <typename T, int ROWS>
__global__ void __launch_bounds__(WARPGROUP, 4)
matmul_skinny_tile(T* y, float* wide, const __grid_constant__ TensorMap x,
                     const __grid_constant__ TensorMap weight, const T* bias, const T* gate,
                     const T* residual, int rows, int width, int columns, int gelu, int stages,
                     bool at_once) {
    multiply_tile<T, ROWS, 1>({y, wide, bias, gate, residual, gelu, columns}, x, weight, rows,
                              width, stages, at_once);
}

template <typename T, int ROWS, int SPLIT>
__global__ void __cluster_dims__(SPLIT, 1, 1) __launch_bounds__(WARPGROUP, 4)
matmul_skinny_cluster(T* y, float* wide, const __grid_constant__ TensorMap x,
                        const __grid_constant__ TensorMap weight, const T* bias, const T* gate,
                        const T* residual, int rows, int width, int columns, int gelu, int stages,
                        bool at_once) {
    multiply_tile<T, ROWS, SPLIT>({y, wide, bias, gate, residual, gelu, columns}, x, weight, rows,
                                  width, stages, at_once);
}
