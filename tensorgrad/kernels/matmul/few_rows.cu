// Products of few rows of x, as a step of generation has one for each sequence: y = x W^T.
//
//   matmul_few_rows        tensor cores take 16 rows of W by 8 of x at a time. W is read once, 2
//                          bytes a weight, which is what counts; x is read by each block, from L2
//   matmul_few_rows_plain  any type and alignment, a warp a row of W
//
// All results are written with =. Launched by kernels/matmul/few_rows.py.
//
// The naive kernel, a thread for y[i][j]:
//
//   float sum = bias[j];
//   for (int k = 0; k < width; ++k) sum += x[i][k] * weight[j][k];
//   y[i][j] = gelu(sum) + residual[i][j];
//
// Phases: load and multiply, each warp its part of the terms; add up the warps; epilogue.
//
// where: FLOAT = float | __half | __nv_bfloat16
// instantiate: matmul_few_rows_plain<{FLOAT}>
// instantiate: matmul_few_rows<{__half | __nv_bfloat16}, {1 | 2 | 4}, 1>
// instantiate: matmul_few_rows<{__half | __nv_bfloat16}, 4, 2>
constexpr bool ROUGH = false;   // of elementwise.cuh: results may have 32 bits
#include "ampere.cuh"
#include "elementwise.cuh"
#include "fragment.cuh"
#include "reduce.cuh"

// The epilogue of a sum: bias (columns), GELU (tanh), gate and residual (rows, columns); a null
// pointer does nothing. With `wide` the result goes there, not rounded to T.
template <typename T>
struct FewRowsEpilogue {
    T* y;
    float* wide;
    const T* bias;
    const T* gate;
    const T* residual;
    int gelu;

    __device__ void operator()(float sum, int row, int column, int columns) const {
        const long long place = row * (long long)columns + column;
        if (bias != nullptr) sum += to_compute(bias[column]);
        if (gelu) sum = gelu_tanh(sum);
        if (gate != nullptr) {
            const float open = to_compute(gate[place]);
            sum *= open * sigmoid(open);
        }
        if (residual != nullptr) sum += to_compute(residual[place]);
        if (wide != nullptr) wide[place] = sum;
        else y[place] = from_compute<T>(sum);
    }
};

// A block: 16 * BANDS rows of weight, which are columns of y, by all rows of x, at most 8 * TILES.
// Its warps take 32 terms in turn (split-K), and their sums are added in order. Both operands are
// loaded in the same order of terms: thread t of four has 8 neighbours, the first 4 for one mma and
// the others for the next. width is a multiple of 8. Shared memory: 512 * TILES * BANDS bytes a
// warp.
template <typename T, int TILES, int BANDS>
__global__ void __launch_bounds__(512, 1)
matmul_few_rows(T* __restrict__ y, float* __restrict__ wide, const T* __restrict__ x,
                const T* __restrict__ weight, const T* __restrict__ bias,
                const T* __restrict__ gate, const T* __restrict__ residual, int rows, int width,
                int columns, int gelu) {
    extern __shared__ __align__(16) unsigned char memory[];
    constexpr int AHEAD = TILES == 1 ? 4 : 2;   // pieces that a warp has under way
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const int first = blockIdx.x * 16 * BANDS;
    const T* rows_here[2 * BANDS];   // of weight
    #pragma unroll
    for (int j = 0; j < 2 * BANDS; ++j)
        rows_here[j] = weight + min(first + lane / 4 + 8 * j, columns - 1) * (long long)width;

    // Load and multiply, each warp its part of the terms.
    Fragment<BANDS, 8 * TILES> sums;   // rows of weight, columns of x
    sums.clear();
    for (int start = warp * 32; start < width; start += AHEAD * warps * 32) {
        Words a[AHEAD][2 * BANDS], b[AHEAD][TILES];
        #pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const int k = start + i * warps * 32 + lane % 4 * 8;
            const bool inside = k < width;
            #pragma unroll
            for (int j = 0; j < 2 * BANDS; ++j)
                a[i][j] = inside ? load_words(rows_here[j] + k) : Words{};
            #pragma unroll
            for (int j = 0; j < TILES; ++j) {
                const int row = 8 * j + lane / 4;
                b[i][j] = inside && row < rows ? load_words_cached(x + row * (long long)width + k)
                                               : Words{};
            }
        }
        #pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            #pragma unroll
            for (int half = 0; half < 4; half += 2)
                #pragma unroll
                for (int band = 0; band < BANDS; ++band) {
                    const unsigned (&p)[4] = a[i][2 * band].words,
                                   (&q)[4] = a[i][2 * band + 1].words;
                    const unsigned block[4] = {p[half], q[half], p[half + 1], q[half + 1]};
                    #pragma unroll
                    for (int j = 0; j < TILES; ++j)
                        mma<T>(sums.block(band, j), block, b[i][j].words[half],
                               b[i][j].words[half + 1]);
                }
        }
    }

    // Add up the warps; epilogue.
    using Sums = float[TILES * 8][BANDS * 16];   // [row][column] of y
    Sums* shared = reinterpret_cast<Sums*>(memory);
    sums.for_each([&](float x, int h, int c) {
        shared[warp][sums.column_of(c)][sums.row_of(h)] = x;
    });
    __syncthreads();
    const FewRowsEpilogue<T> epilogue = {y, wide, bias, gate, residual, gelu};
    for (int i = threadIdx.x; i < TILES * 8 * BANDS * 16; i += blockDim.x) {
        const int row = i / (BANDS * 16), column = i % (BANDS * 16);
        float sum = 0;
        for (int w = 0; w < warps; ++w) sum += shared[w][row][column];
        if (row < rows && first + column < columns) epilogue(sum, row, first + column, columns);
    }
}

// A warp: one row of weight by 8 rows of x from 8 * blockIdx.y on.
template <typename T>
__global__ void __launch_bounds__(256)
matmul_few_rows_plain(T* __restrict__ y, float* __restrict__ wide, const T* __restrict__ x,
                      const T* __restrict__ weight, const T* __restrict__ bias,
                      const T* __restrict__ gate, const T* __restrict__ residual, int rows,
                      int width, int columns, int gelu) {
    constexpr int ROWS = 8;
    const int lane = threadIdx.x % 32, column = blockIdx.x * 8 + threadIdx.x / 32,
              top = blockIdx.y * ROWS;
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
    // Add up the lanes; epilogue.
    const FewRowsEpilogue<T> epilogue = {y, wide, bias, gate, residual, gelu};
    #pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const float sum = warp_sum(sums[r]);
        if (lane == 0 && r < count) epilogue(sum, top + r, column, columns);
    }
}
