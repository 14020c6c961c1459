// Values of 16 or 32 bits to numbers of 8 (see fp8.cuh), as operands of matrix products. Hopper's
// take the terms of a sum side by side, so the operands of gradients are transposed copies: both
// are written in one pass.
//
//   fp8_quantize           q = round(x scale) in rows, its transpose, or both; the largest |x|; and
//                          sums over the rows of x, in parts, which are the gradient of a bias.
//                          Before all that, x = gelu(x), or x = x gelu'(beside): what a product
//                          has left is rounded to 8 bits without a pass in 16 between
//   fp8_quantize_matrices  the same of many matrices at once, such as all weights of a model
//   fp8_largest            the largest |x| alone
//   fp8_update_scales      scales for the next step, from the largest values of the last steps
//
// fp8_quantize reads sizeof(T) bytes an element (twice that with GELU's derivative) and writes 1 or
// 2; fp8_largest reads sizeof(T). All is written with =, but for the largest values and the counts.
// Lengths are multiples of 16.
//
// The naive kernel, a thread for x[i][j]:
//
//   q[i][j] = transposed[j][i] = fp8(min(max(x[i][j] * scale, -448), 448));
//   atomicMax(largest, abs(x[i][j]));
//
// A block takes 128 rows of 64 columns, a warp 32 of 32, a lane 4 of 8: the four rows of a column
// are a word of the transpose. Words go through shared memory, so that 128 rows of a column are
// written side by side.
//
// Phases: load; GELU or its derivative; sums over rows; round, store the rows; store the columns;
// report the largest.
//
// arch: sm_90a
// where: T = float | __half | __nv_bfloat16
// where: NARROW = __half | __nv_bfloat16
// instantiate: fp8_quantize<{T}, {E4M3 | E5M2}, PLAIN, {true, false | false, true | true, true},
//     false>
// instantiate: fp8_quantize<{T}, E5M2, PLAIN, {true, false | true, true}, true>
// instantiate: fp8_quantize<{NARROW}, E4M3, GELU, true, {true | false}, false>
// instantiate: fp8_quantize<{NARROW}, E5M2, GELU_BACKWARD, true, {true | false}, {true | false}>
// instantiate: fp8_quantize_matrices<{T}>
// instantiate: fp8_largest<{T}>
// instantiate: fp8_update_scales
#include "exp.cuh"
#include "fp8.cuh"

enum Before { PLAIN, GELU, GELU_BACKWARD };   // x = gelu(x); x = x gelu'(beside)

constexpr int ROWS = 128, COLUMNS = 64, THREADS = 256;   // a block has
constexpr int WORDS = ROWS / 4 + 1;   // a column has in shared memory: lanes write to other banks

struct Fp8Matrix {
    const void* x;
    unsigned char *rows, *columns;
    Fp8Scale* scale;
    int height, width, first_tile, padding;
};

// gelu(x) = x s and its derivative, s = 1 / (1 + exp(-2 u)), u = sqrt(2 / pi) (x + 0.044715 x^3).
struct Gelu {
    static constexpr float A = 2 * 0.7978845608028654f, B = A * 0.044715f;
    float value, derivative;

    __device__ explicit Gelu(float x) {
        const float square = x * x,
                    s = fast_reciprocal(1 + fast_exp2(-x * (A * LOG2_E + B * LOG2_E * square)));
        value = x * s;
        // Where s is 0 or 1, 0 is multiplied with the derivative of 2 u, which must be finite.
        derivative = (value - value * s) * (3 * B * fminf(square, 1e30f) + A) + s;
    }
};

template <typename T, Format FORMAT, Before BEFORE, bool IN_ROWS, bool IN_COLUMNS, bool SUMS>
__device__ inline void quantize_tile(unsigned char* __restrict__ q,
                                     unsigned char* __restrict__ transposed,
                                     float* __restrict__ sums, Fp8Scale* state, bool reports,
                                     const T* __restrict__ x, const T* __restrict__ beside,
                                     int height, int width, int pitch, int tile_row,
                                     int tile_column) {
    __shared__ unsigned words[IN_COLUMNS ? COLUMNS * WORDS : 1];
    __shared__ float warp_sums[SUMS ? 4 : 1][SUMS ? COLUMNS : 1];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int column_here = warp % 2 * 32 + lane % 4 * 8, row_here = warp / 2 * 32 + lane / 4 * 4;
    const int column = tile_column * COLUMNS + column_here, row = tile_row * ROWS + row_here;
    const bool inside = row < height && column < width;   // with all 4 rows and 8 columns
    // Load.
    constexpr bool TWO = BEFORE == GELU_BACKWARD;
    T stored[4][8] = {}, others[TWO ? 4 : 1][8] = {};
    if (inside)
        #pragma unroll
        for (int r = 0; r < 4; ++r) {
            const long long place = (row + r) * (long long)width + column;
            load_all<8>(stored[r], x + place);
            if constexpr (TWO) load_all<8>(others[r], beside + place);
        }
    // GELU or its derivative.
    float values[4][8];
    Fp8Meter meter;
    #pragma unroll
    for (int r = 0; r < 4; ++r)
        #pragma unroll
        for (int c = 0; c < 8; ++c) {
            float value = to_compute(stored[r][c]);
            if constexpr (BEFORE == GELU) value = Gelu(value).value;
            if constexpr (TWO) value *= Gelu(to_compute(others[r][c])).derivative;
            values[r][c] = value;
        }
    // Sums over rows.
    if constexpr (SUMS) {
        #pragma unroll
        for (int c = 0; c < 8; ++c) {
            float sum = (values[0][c] + values[1][c]) + (values[2][c] + values[3][c]);
            #pragma unroll
            for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(0xffffffff, sum, step);
            if (lane < 4) warp_sums[warp / 2][column_here + c] = sum;
        }
    }
    // Round, store the rows.
    const float scale = state->scale;
    #pragma unroll
    for (int r = 0; r < 4; ++r) meter.see<FORMAT>(values[r], scale);
    unsigned rounded[4][2];
    #pragma unroll
    for (int r = 0; r < 4; ++r)
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            float four[4];
            #pragma unroll
            for (int c = 0; c < 4; ++c) four[c] = values[r][half * 4 + c] * scale;
            rounded[r][half] = round_to_fp8<FORMAT>(four);
        }
    if (IN_ROWS && inside)
        #pragma unroll
        for (int r = 0; r < 4; ++r)
            *reinterpret_cast<uint2*>(q + (row + r) * (long long)width + column) =
                make_uint2(rounded[r][0], rounded[r][1]);
    // Store the columns.
    if constexpr (IN_COLUMNS) {
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            unsigned across[4];
            transpose_bytes(across, rounded[0][half], rounded[1][half], rounded[2][half],
                            rounded[3][half]);
            #pragma unroll
            for (int c = 0; c < 4; ++c)
                words[(column_here + half * 4 + c) * WORDS + row_here / 4] = across[c];
        }
    }
    if (IN_COLUMNS || SUMS) __syncthreads();
    if constexpr (IN_COLUMNS) {
        const int first = tile_row * ROWS + lane * 4;
        #pragma unroll
        for (int i = 0; i < COLUMNS / 8; ++i) {
            const int c = warp * (COLUMNS / 8) + i, to = tile_column * COLUMNS + c;
            if (first < height && to < width)
                *reinterpret_cast<unsigned*>(transposed + to * (long long)pitch + first) =
                    words[c * WORDS + lane];
        }
    }
    if constexpr (SUMS) {
        const int c = threadIdx.x, to = tile_column * COLUMNS + c;
        if (c < COLUMNS && to < width)
            sums[tile_row * (long long)width + to] = (warp_sums[0][c] + warp_sums[1][c])
                                                   + (warp_sums[2][c] + warp_sums[3][c]);
    }
    // Report the largest.
    if (reports) meter.report(state);
}

// sums: (row tiles, width). pitch: from one column of the transpose to the next. reports: add the
// largest |x| and the count of clipped values.
template <typename T, Format FORMAT, Before BEFORE, bool IN_ROWS, bool IN_COLUMNS, bool SUMS>
__global__ void __launch_bounds__(THREADS, BEFORE == GELU_BACKWARD ? 3 : 4)
fp8_quantize(unsigned char* __restrict__ q, unsigned char* __restrict__ transposed,
             float* __restrict__ sums, Fp8Scale* state, const T* __restrict__ x,
             const T* __restrict__ beside, int height, int width, int pitch, bool reports) {
    quantize_tile<T, FORMAT, BEFORE, IN_ROWS, IN_COLUMNS, SUMS>(
        q, transposed, sums, state, reports, x, beside, height, width, pitch, blockIdx.y,
        blockIdx.x);
}

// matrices: in the order of their tiles, which lie in rows.
template <typename T>
__global__ void __launch_bounds__(THREADS)
fp8_quantize_matrices(const Fp8Matrix* __restrict__ matrices, int count) {
    int low = 0, high = count;   // the last matrix that begins at this tile or before
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (matrices[middle].first_tile <= blockIdx.x) low = middle; else high = middle;
    }
    const Fp8Matrix m = matrices[low];
    const int across = (m.width + COLUMNS - 1) / COLUMNS, tile = blockIdx.x - m.first_tile;
    quantize_tile<T, E4M3, PLAIN, true, true, false>(
        m.rows, m.columns, nullptr, m.scale, true, static_cast<const T*>(m.x), nullptr, m.height,
        m.width, m.height, tile / across, tile % across);
}

template <typename T>
__global__ void __launch_bounds__(THREADS)
fp8_largest(Fp8Scale* state, const T* __restrict__ x, long long size) {
    Fp8Meter meter;
    const long long step = gridDim.x * (long long)THREADS * 8;
    for (long long i = (blockIdx.x * (long long)THREADS + threadIdx.x) * 8; i < size; i += step) {
        T stored[8];
        load_all<8>(stored, x + i);
        #pragma unroll
        for (T value : stored) meter.largest = larger(meter.largest, to_compute(value));
    }
    meter.report(state);
}

// history: (steps, count), the largest values of former steps; turn: how many updates there were.
// A step with a value that is not finite counts for nothing. exponents: of the first power of two
// beyond the format.
__global__ void __launch_bounds__(THREADS)
fp8_update_scales(Fp8Scale* __restrict__ states, float* __restrict__ history,
                  int* __restrict__ turn, const float* __restrict__ limits, int count, int steps) {
    const int now = *turn % steps;
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += THREADS) {
        Fp8Scale state = states[i];
        const float seen = __uint_as_float(state.largest);
        if (isfinite(seen)) history[now * count + i] = seen;
        float largest = 0;
        for (int s = 0; s < steps; ++s) largest = fmaxf(largest, history[s * count + i]);
        if (largest > 0) {   // the largest power of two that keeps `largest` within the format
            const float ratio = __fdiv_rn(limits[i], largest);
            const int exponent = min(int(__float_as_uint(ratio) >> 23), 253);
            state.scale = __uint_as_float(max(exponent, 1) << 23);
            state.inverse = __uint_as_float((254 - max(exponent, 1)) << 23);
        }
        state.largest = 0;
        states[i] = state;
    }
    if (threadIdx.x == 0) ++*turn;
}
