// Skinny GEMM, y = x W^T with few rows of x: a step of generation has one for each sequence.
//
//   matmul_skinny        tensor cores take 16 rows of x by 8 of W at a time. W is read once, 2
//                        bytes a weight, which is what counts; x is read by each block, from L2
//   matmul_skinny_plain  any type and alignment, a warp a row of W
//
// All results are written with =. Launched by kernels/matmul/skinny.py.
//
// The naive kernel, a thread for y[i][j]:
//
//   float sum = bias[j];
//   for (int k = 0; k < width; ++k) sum += x[i][k] * weight[j][k];
//   y[i][j] = gelu(sum) + residual[i][j];
//
// Phases: load the first weights; wait for the kernel before; load and multiply, each warp its part
// of the terms; add up the warps; epilogue.
//
// where: FLOAT = float | __half | __nv_bfloat16
// instantiate: matmul_skinny_plain<{FLOAT}>
// instantiate: matmul_skinny<{__half | __nv_bfloat16}, {8 | 16}, {1 | 2}, {8 | 16}>
// instantiate: matmul_skinny<{__half | __nv_bfloat16}, 32, {2 | 4}, {8 | 16}>
constexpr bool ROUGH = false;   // constant of elementwise.cuh: results may have 32 bits
#include "ampere.cuh"
#include "fragment.cuh"
#include "matmul/skinny.cuh"
#include "overlap.cuh"
#include "reduce.cuh"

// A block: 8 * BANDS rows of weight, which are columns of y, by all rows of x, at most ROWS: 8, 16
// or 32. Its warps take 32 terms in turn (split-K), and their sums are added in order. Operands are
// loaded in the same order of terms: thread t of four has 8 neighbours, the first 4 for one mma and
// the others for the next. So what is loaded of weight is an operand as it is. width is a multiple
// of 8. at_once: lets the next kernel start before it waits. Shared memory: 4 * ROWS * 8 * BANDS
// bytes a warp.
//
// Only weight and bias are constant, and weights are loaded before the wait: see overlap.py.
template <typename T, int ROWS, int BANDS, int WARPS>
__global__ void __launch_bounds__(32 * WARPS, 16 / WARPS)
matmul_skinny(T* y, float* wide, const T* x, const T* __restrict__ weight,
                const T* __restrict__ bias, const T* gate, const T* residual, int rows, int width,
                int columns, int gelu, bool at_once) {
    extern __shared__ __align__(16) unsigned char memory[];
    // Pieces of weights that a warp has under way.
    constexpr int AHEAD = ROWS < 32 ? 4 : BANDS == 2 ? 3 : 2;
    constexpr int THREADS = 32 * WARPS, STEP = 32 * WARPS, COLUMNS = 8 * BANDS;   // STEP: terms
    constexpr int TILES = (ROWS + 15) / 16, ITEMS = ROWS * COLUMNS;   // ITEMS: of y
    constexpr int OWN = (ITEMS + THREADS - 1) / THREADS;              // that a thread stores
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = blockIdx.x * COLUMNS;
    int place = warp * 32 + lane % 4 * 8;   // place of this thread's terms
    const T* weight_rows[BANDS];
    #pragma unroll
    for (int j = 0; j < BANDS; ++j)
        weight_rows[j] =
            weight + min(first + lane / 4 + 8 * j, columns - 1) * (long long)width + place;
    Words w[AHEAD][BANDS];
    const auto load_weights = [&](int i) {
        #pragma unroll
        for (int j = 0; j < BANDS; ++j)
            load_words_if(place + i * STEP < width, w[i][j], weight_rows[j] + i * STEP);
    };

    // Load the first weights; wait for the kernel before.
    if (at_once) start_next_kernel();
    #pragma unroll
    for (int i = 0; i < AHEAD; ++i) load_weights(i);
    wait_for_previous_kernel();
    start_next_kernel();
    const SkinnyEpilogue<T> epilogue = {y, wide, bias, gate, residual, gelu, columns};
    typename SkinnyEpilogue<T>::Operands operands[OWN];
    const auto load_operands = [&] {
        #pragma unroll
        for (int n = 0; n < OWN; ++n) {
            const int i = threadIdx.x + n * THREADS, row = i / COLUMNS,
                      column = first + i % COLUMNS;
            if (i < ITEMS && row < rows && column < columns)
                operands[n] = epilogue.load(row, column);
        }
    };
    if (OWN == 1) load_operands();   // more would take too many registers

    // Load and multiply, each warp its part of the terms.
    Fragment<TILES, COLUMNS> sums;   // rows of x, rows of weight
    sums.clear();
    x += lane / 4 * (long long)width;
    #pragma unroll 1
    for (int start = warp * 32; start < width; start += AHEAD * STEP) {
        Words own[AHEAD][2 * TILES] = {};   // words of x: rows lane / 4, 8 below, and so on
        #pragma unroll
        for (int i = 0; i < AHEAD; ++i)
            #pragma unroll
            for (int j = 0; j < ROWS / 8; ++j)
                load_words_cached_if(place + i * STEP < width && 8 * j + lane / 4 < rows, own[i][j],
                                     x + (8 * j * width + place + i * STEP));
        #pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            #pragma unroll
            for (int half = 0; half < 4; half += 2)
                #pragma unroll
                for (int tile = 0; tile < TILES; ++tile) {
                    const unsigned (&p)[4] = own[i][2 * tile].words,
                                   (&q)[4] = own[i][2 * tile + 1].words;
                    const unsigned block[4] = {p[half], q[half], p[half + 1], q[half + 1]};
                    #pragma unroll
                    for (int j = 0; j < BANDS; ++j)
                        mma<T>(sums.block(tile, j), block, w[i][j].words[half],
                               w[i][j].words[half + 1]);
                }
        }
        place += AHEAD * STEP;
        #pragma unroll
        for (int j = 0; j < BANDS; ++j) weight_rows[j] += AHEAD * STEP;
        #pragma unroll
        for (int i = 0; i < AHEAD; ++i) load_weights(i);
    }

    // Add up the warps; epilogue.
    if (OWN > 1) load_operands();
    using Sums = float[ROWS][COLUMNS];
    Sums* shared = reinterpret_cast<Sums*>(memory);
    sums.for_each([&](float value, int h, int c) {
        if (8 * h < ROWS) shared[warp][sums.row_of(h)][sums.column_of(c)] = value;
    });
    __syncthreads();
    #pragma unroll
    for (int n = 0; n < OWN; ++n) {
        const int i = threadIdx.x + n * THREADS, row = i / COLUMNS, column = i % COLUMNS;
        if (i >= ITEMS) break;
        float sum = 0;
        #pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) sum += shared[warp][row][column];
        if (row < rows && first + column < columns)
            epilogue.store(sum, row, first + column, operands[n]);
    }
}

// A warp: one row of weight by 8 rows of x from 8 * blockIdx.y on.
template <typename T>
__global__ void __launch_bounds__(256, 4)
matmul_skinny_plain(T* y, float* wide, const T* x, const T* __restrict__ weight,
                      const T* __restrict__ bias, const T* gate, const T* residual, int rows,
                      int width, int columns, int gelu) {
    constexpr int ROWS = 8;
    const int lane = threadIdx.x % 32, column = blockIdx.x * 8 + threadIdx.x / 32,
              top = blockIdx.y * ROWS;
    wait_for_previous_kernel();
    start_next_kernel();
    if (column >= columns) return;
    weight += column * (long long)width;
    x += top * (long long)width;
    const int count = min(ROWS, rows - top);
    // Load and multiply.
    float sums[ROWS] = {};
    #pragma unroll 4
    for (int k = lane; k < width; k += 32) {
        const float w = to_compute(weight[k]);
        #pragma unroll
        for (int r = 0; r < ROWS; ++r)
            if (r < count) sums[r] += w * to_compute(x[r * (long long)width + k]);
    }
    // Add up the lanes, one row for each of the first; epilogue.
    float own = 0;
    #pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const float sum = warp_sum(sums[r]);
        if (lane == r) own = sum;
    }
    if (lane >= count) return;
    const SkinnyEpilogue<T> epilogue = {y, wide, bias, gate, residual, gelu, columns};
    epilogue.store(own, top + lane, column, epilogue.load(top + lane, column));
}
