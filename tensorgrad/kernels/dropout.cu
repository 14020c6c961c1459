// Dropout, with the residual add behind it or without: y = residual + keep * scale * (x + bias).
//
// dropout: x and bias are of type X, y and the residual of Y. sizeof(X) + sizeof(Y) bytes an
//   element, sizeof(Y) more with a residual; written with =. The keep mask is not stored: backward
//   draws the same bits again, with x = dy, X and Y exchanged, and neither bias nor residual.
//   A warp takes 512 elements; see dropout.cuh.
// N makes 16 bytes of the smaller type, and is 1 where an array is not aligned to N elements or the
// width no multiple of it.
//
// ops/dropout.py has the same formula in NumPy; nothing is contracted to fma, so bits are equal.
//
// The naive kernel, a thread for element i, `random16` being 16 random bits of that number:
//
//   const bool keep = random16(seed, draw, stream, i) < keep_probability * 65536;
//   y[i] = residual[i] + (keep ? scale * (x[i] + bias[i % width]) : 0);
//
// Phases: load; draw the keep mask of 16 elements; exchange masks; bias, mask, residual and store.
//
// options: -fmad=false
// where: NARROW = __half | __nv_bfloat16
// instantiate: dropout<double, double, {1 | 2}>
// instantiate: dropout<float, float, {1 | 4}>
// instantiate: dropout<{__half, __half | __nv_bfloat16, __nv_bfloat16}, {1 | 8}>
// instantiate: dropout<float, {NARROW}, {1 | 8}>
// instantiate: dropout<{NARROW}, float, {1 | 8}>
#include "dropout.cuh"

// The 32 * LANES elements of a warp; WHOLE where all of them exist.
template <bool WHOLE, typename X, typename Y, int N>
__device__ inline void drop(Y* y, const X* x, const X* bias, const Y* residual, long long start,
                            long long size, unsigned int width, Word seed, Word draw, Word stream,
                            unsigned int limit, Compute<X> scale) {
    using C = Compute<X>;
    constexpr int VECTORS = LANES / N;   // vectors of a thread
    const int thread = threadIdx.x % 32;
    // Load.
    Vec<X, N> xs[VECTORS];
    Vec<Y, N> rest[VECTORS];
    #pragma unroll
    for (int k = 0; k < VECTORS; ++k)
        xs[k] = load_within<WHOLE, N>(x, start + (k * 32 + thread) * N, size);
    if (residual != nullptr)
        #pragma unroll
        for (int k = 0; k < VECTORS; ++k)
            rest[k] = load_within<WHOLE, N>(residual, start + (k * 32 + thread) * N, size);

    // Draw the keep mask of 16 elements.
    const unsigned int kept = keep_bits(seed, draw, stream, start / LANES + thread, limit);
    // Exchange masks; bias, mask, residual and store.
    #pragma unroll
    for (int k = 0; k < VECTORS; ++k) {
        const int vector = k * 32 + thread;
        const unsigned int keep = keep_of_vector<N>(kept, vector);
        const long long i = start + vector * N;
        C values[N];
        #pragma unroll
        for (int j = 0; j < N; ++j) values[j] = to_compute(xs[k].values[j]);
        if (bias != nullptr && (WHOLE || i < size)) {
            const unsigned int column = size < 1ll << 32 ? unsigned(i) % width : i % width;
            const auto shift = load<N>(bias + column);
            #pragma unroll
            for (int j = 0; j < N; ++j) values[j] += to_compute(shift.values[j]);
        }
        #pragma unroll
        for (int j = 0; j < N; ++j) values[j] *= keep & 1u << j ? scale : C(0);
        if (residual != nullptr)
            #pragma unroll
            for (int j = 0; j < N; ++j) values[j] = to_compute(rest[k].values[j]) + values[j];
        if constexpr (WHOLE && N == VECTOR<Y>) {
            store_values(y + i, values);
        } else {
            #pragma unroll
            for (int j = 0; j < N; ++j) rest[k].values[j] = from_compute<Y>(values[j]);
            store_within<WHOLE, N>(y, i, size, rest[k]);
        }
    }
}

// Blocks that an SM holds at once: left to itself, ptxas spills where the types differ.
template <typename X, typename Y, int N>
constexpr int BLOCKS = sizeof(X) == 8 ? 2 : sizeof(X) == sizeof(Y) && N > 1 ? 4 : 3;

template <typename X, typename Y, int N>
__global__ void __launch_bounds__(256, BLOCKS<X, Y, N>)
dropout(Y* __restrict__ y, const X* __restrict__ x, const X* __restrict__ bias,
        const Y* __restrict__ residual, long long size, unsigned int width, Word seed, Word draw,
        Word stream, const Word* offset, unsigned int limit, double scale) {
    const long long start = (blockIdx.x * 256ll + threadIdx.x) / 32 * (32 * LANES);
    draw = draw_number(draw, offset);
    if (start + 32 * LANES <= size)
        drop<true, X, Y, N>(y, x, bias, residual, start, size, width, seed, draw, stream, limit,
                            scale);
    else if (start < size)
        drop<false, X, Y, N>(y, x, bias, residual, start, size, width, seed, draw, stream, limit,
                             scale);
}
