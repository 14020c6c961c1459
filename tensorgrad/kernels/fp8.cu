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
// Phases: load; what comes before, such as GELU; sums over rows; round, store the rows; store the
// columns; report the largest.
//
// arch: sm_90a
// where: T = float | __half | __nv_bfloat16
// where: NARROW = __half | __nv_bfloat16
// instantiate: fp8_quantize<{T}, {E4M3 | E5M2}, Plain, {true, false | false, true | true, true},
//     false>
// instantiate: fp8_quantize<{T}, E5M2, Plain, {true, false | true, true}, true>
// instantiate: fp8_quantize<{NARROW}, E4M3, TakeGelu, true, {true | false}, false>
// instantiate: fp8_quantize<{NARROW}, E5M2, GeluBackward, true, {true | false}, {true | false}>
// instantiate: fp8_quantize_matrices<{T}>
// instantiate: fp8_largest<{T}>
// instantiate: fp8_update_scales
#include "exp.cuh"
#include "fp8_tile.cuh"

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

struct TakeGelu {
    static constexpr bool TWO = false;

    __device__ void begin(int) {}
    __device__ float operator()(float x, float, int, int) const { return Gelu(x).value; }
};
struct GeluBackward {
    static constexpr bool TWO = true;

    __device__ void begin(int) {}
    __device__ float operator()(float x, float beside, int, int) const {
        return x * Gelu(beside).derivative;
    }
};

// sums: (row tiles, width). pitch: from one column of the transpose to the next. reports: add the
// largest |x| and the count of clipped values.
template <typename T, Format FORMAT, typename Before, bool IN_ROWS, bool IN_COLUMNS, bool SUMS>
__global__ void __launch_bounds__(THREADS, Before::TWO ? 3 : 4)
fp8_quantize(unsigned char* __restrict__ q, unsigned char* __restrict__ transposed,
             float* __restrict__ sums, Fp8Scale* state, const T* __restrict__ x,
             const T* __restrict__ beside, int height, int width, int pitch, bool reports) {
    quantize_tile<T, FORMAT, IN_ROWS, IN_COLUMNS, SUMS>(
        Before(), q, transposed, sums, state, reports, x, beside, height, width, pitch, blockIdx.y,
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
    quantize_tile<T, E4M3, true, true, false>(
        Plain(), m.rows, m.columns, nullptr, m.scale, true, static_cast<const T*>(m.x), nullptr,
        m.height, m.width, m.height, tile / across, tile % across);
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
