// Products of up to 8 rows of x on Hopper: y = x W^T, with W staged in shared memory.
//
// A block copies all its rows of W by TMA as soon as it runs, while the kernels before still
// compute x. What is left after the wait is x, from L2, and the product itself. It is worth it for
// weights of megabytes; of smaller ones the registers of skinny.cu hold as much. Operands, their
// order and the epilogue are as there. Launched by kernels/matmul/skinny.py.
//
// Phases: start to copy the weights; wait for the kernel before; load and multiply, each warp its
// part of the terms; add up the warps; epilogue.
//
// arch: sm_90a
// instantiate: matmul_skinny_staged<{__half | __nv_bfloat16}, {8 | 16}>
constexpr bool ROUGH = false;   // constant of elementwise.cuh: results may have 32 bits
#include "fragment.cuh"
#include "hopper.cuh"
#include "matmul/skinny.cuh"
#include "overlap.cuh"
#include "reduce.cuh"

constexpr int ROWS = 8, BANDS = 2, COLUMNS = 8 * BANDS;   // a block's part of y
// Pieces of x that a warp has under way: all of 1,792 or 6,656 terms, for one latency of L2.
template <int WARPS> constexpr int AHEAD_OF = WARPS == 8 ? 7 : 13;

// A block: 16 rows of weight, which are columns of y, by all rows of x, at most 8. Its warps take
// 32 terms in turn (split-K), and their sums are added in order. width is a multiple of 8. Shared
// memory: the rows of weight, each at `pitch` bytes from the one before: 64 beyond a multiple of
// 128, so that a quarter of a warp, which loads 64 bytes of two rows, meets all banks once. The
// sums of the warps take it over, 512 bytes a warp.
//
// at_once: lets the next kernel start before it waits. Only weight and bias are constant, and
// weights are copied before the wait: see overlap.py.
template <typename T, int WARPS>
__global__ void __launch_bounds__(32 * WARPS, WARPS == 8 ? 4 : 1)
matmul_skinny_staged(T* y, float* wide, const T* x, const T* __restrict__ weight,
                       const T* __restrict__ bias, const T* gate, const T* residual, int rows,
                       int width, int columns, int gelu, int pitch, bool at_once) {
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ Mbarrier full;   // the weights have arrived
    constexpr int STEP = 32 * WARPS, AHEAD = AHEAD_OF<WARPS>;   // STEP: terms
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = blockIdx.x * COLUMNS;

    // Start to copy the weights.
    if (at_once) start_next_kernel();
    if (warp == 0) {
        const int existing = min(COLUMNS, columns - first), bytes = width * int(sizeof(T));
        if (lane == 0) {
            full.init(1);
            fence_mbarrier_init();
            full.arrive_expect_tx(existing * bytes);
        }
        __syncwarp();
        if (lane < existing)
            bulk_load(memory + lane * pitch, weight + (first + lane) * (long long)width, bytes,
                      full);
    }
    __syncthreads();

    // Wait for the kernel before.
    wait_for_previous_kernel();
    start_next_kernel();
    // The thread's element of y, of those that have one.
    const int row = threadIdx.x / COLUMNS, column = first + threadIdx.x % COLUMNS;
    const bool stores = row < rows && column < columns;
    const SkinnyEpilogue<T> epilogue = {y, wide, bias, gate, residual, gelu, columns};
    typename SkinnyEpilogue<T>::Operands operands;
    if (stores) operands = epilogue.load(row, column);

    // Load and multiply, each warp its part of the terms.
    Fragment<1, COLUMNS> sums;   // rows of x, rows of weight
    sums.clear();
    const bool exists = lane / 4 < rows;
    x += lane / 4 * (long long)width;
    const unsigned weights = shared_address(memory) + lane / 4 * pitch;
    #pragma unroll 1
    for (int start = warp * 32; start < width; start += AHEAD * STEP) {
        const int place = start + lane % 4 * 8;   // place of this thread's terms
        Words own[AHEAD];
        #pragma unroll
        for (int i = 0; i < AHEAD; ++i)
            load_words_cached_if(exists && place + i * STEP < width, own[i], x + place + i * STEP);
        full.wait(0);
        #pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            if (start + i * STEP >= width) break;   // alike for all threads of a warp
            Words w[BANDS] = {};   // not what lies between two rows
            if (place + i * STEP < width) {
                #pragma unroll
                for (int j = 0; j < BANDS; ++j)
                    w[j] = load_words_shared(weights + 8 * j * pitch + (place + i * STEP) * 2);
            }
            #pragma unroll
            for (int half = 0; half < 4; half += 2) {
                const unsigned block[4] = {own[i].words[half], 0, own[i].words[half + 1], 0};
                #pragma unroll
                for (int j = 0; j < BANDS; ++j)
                    mma<T>(sums.block(0, j), block, w[j].words[half], w[j].words[half + 1]);
            }
        }
    }

    // Add up the warps; epilogue.
    full.wait(0);   // also where a warp has no terms
    __syncthreads();   // the weights have been read
    using Sums = float[ROWS][COLUMNS];
    Sums* shared = reinterpret_cast<Sums*>(memory);
    sums.for_row(0, [&](float value, int c) {
        shared[warp][sums.row_of(0)][sums.column_of(c)] = value;
    });
    __syncthreads();
    if (!stores) return;
    float sum = 0;
    #pragma unroll
    for (int w = 0; w < WARPS; ++w) sum += shared[w][row][column - first];
    epilogue.store(sum, row, column, operands);
}
