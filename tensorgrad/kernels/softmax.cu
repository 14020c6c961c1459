// softmax and log_softmax of rows, and their gradients. `logarithm` says which of the two.
//
//   softmax_forward_rows   the row in registers: x is read once, y written once
//   softmax_forward_loop   any width and alignment, a block a row: x is read twice
//   softmax_backward_rows  y and dy are read once, dx is written once
//   softmax_backward_loop  any width and alignment, a block a row: y and dy are read twice
//
// The *_rows kernels move 2 and 3 * sizeof(T) bytes an element and want rows of whole, aligned
// 16-byte vectors; there are none for double, whose exp fills the registers. All results
// are written with =. Launched by ops/softmax_cuda.py.
//
// instantiate: {softmax_forward_rows | softmax_backward_rows}<{float | __half | __nv_bfloat16},
//     {1 | 2 | 4}>
// instantiate: {softmax_forward_loop | softmax_backward_loop}<{double | float | __half | __nv_bfloat16}>
#include "exp.cuh"
#include "rows.cuh"

template <typename T, int VECTORS>
__global__ void __launch_bounds__(256)
softmax_forward_rows(T* __restrict__ y, const T* __restrict__ x, long long rows, int width,
                     bool logarithm) {
    using C = Compute<T>;
    constexpr int WIDTH = VECTOR<T>;
    __shared__ C partials[64];
    GroupReducer<C> group(partials);
    const long long row = group_row();
    const int vectors = row < rows ? width / WIDTH : 0;
    Words xs[VECTORS];
    load_row(xs, x + row * width, vectors);
    C values[WIDTH];

    C peak = -infinity<C>();
    #pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        if (threadIdx.x + i * blockDim.x >= vectors) continue;
        unpack<T>(xs[i], values);
        #pragma unroll
        for (C value : values) peak = max(value, peak);
        keep_packed<T>(xs[i]);
    }
    peak = group.max(peak);
    C total = 0;
    #pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        if (threadIdx.x + i * blockDim.x >= vectors) continue;
        unpack<T>(xs[i], values);
        #pragma unroll
        for (C value : values) total += exp_for<T>(value - peak);
        keep_packed<T>(xs[i]);
    }
    total = group.sum(total);
    const C scale = C(1) / total, shift = logarithm ? log(total) : C(0);
    #pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const int v = threadIdx.x + i * blockDim.x;
        if (v >= vectors) continue;
        unpack<T>(xs[i], values);
        #pragma unroll
        for (C& value : values)
            value = logarithm ? value - peak - shift : exp_for<T>(value - peak) * scale;
        store_values(y + row * width + v * WIDTH, values);
    }
}

template <typename T>
__global__ void __launch_bounds__(512)
softmax_forward_loop(T* __restrict__ y, const T* __restrict__ x, int width, bool logarithm) {
    using C = Compute<T>;
    x += blockIdx.x * (long long)width;
    y += blockIdx.x * (long long)width;
    Peak<C> own = {-infinity<C>(), 0};
    for_places(x, width, true, [&](int place, auto n) {
        const auto part = load<n>(x + place);
        C values[n];
        #pragma unroll
        for (int j = 0; j < n; ++j) values[j] = to_compute(part.values[j]);
        own.template absorb<T>(values);
    });
    own = block_reduce(own, Peak<C>{-infinity<C>(), 0}, [](Peak<C> a, Peak<C> b) { return join<T>(a, b); });
    const C scale = C(1) / own.total, shift = logarithm ? log(own.total) : C(0);
    for_places(x, width, aligned_alike(x, y), [&](int place, auto n) {
        auto values = load<n>(x + place);
        #pragma unroll
        for (T& value : values.values) {
            const C z = to_compute(value) - own.peak;
            value = from_compute<T>(logarithm ? z - shift : exp_for<T>(z) * scale);
        }
        store(y + place, values);
    });
}

// softmax: dx = y * (dy - sum(dy * y)). log_softmax: dx = dy - exp(y) * sum(dy).
template <typename T>
__device__ inline Compute<T> softmax_gradient(Compute<T> dy, Compute<T> y, Compute<T> sum, bool logarithm) {
    return logarithm ? dy - exp_for<T>(y) * sum : y * (dy - sum);
}

template <typename T, int VECTORS>
__global__ void __launch_bounds__(256)
softmax_backward_rows(T* __restrict__ dx, const T* __restrict__ dy, const T* __restrict__ y,
                      long long rows, int width, bool logarithm) {
    using C = Compute<T>;
    constexpr int WIDTH = VECTOR<T>;
    __shared__ C partials[64];
    GroupReducer<C> group(partials);
    const long long row = group_row();
    const int vectors = row < rows ? width / WIDTH : 0;
    Words ys[VECTORS], dys[VECTORS];
    load_row(dys, dy + row * width, vectors);
    load_row(ys, y + row * width, vectors);
    C values[WIDTH], slopes[WIDTH];
    C sum = 0;
    #pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        unpack<T>(ys[i], values);
        unpack<T>(dys[i], slopes);
        #pragma unroll
        for (int j = 0; j < WIDTH; ++j) sum += logarithm ? slopes[j] : slopes[j] * values[j];
        keep_packed<T>(ys[i]);
        keep_packed<T>(dys[i]);
    }
    sum = group.sum(sum);
    #pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const int v = threadIdx.x + i * blockDim.x;
        if (v >= vectors) continue;
        unpack<T>(ys[i], values);
        unpack<T>(dys[i], slopes);
        #pragma unroll
        for (int j = 0; j < WIDTH; ++j) values[j] = softmax_gradient<T>(slopes[j], values[j], sum, logarithm);
        store_values(dx + row * width + v * WIDTH, values);
    }
}

template <typename T>
__global__ void __launch_bounds__(512)
softmax_backward_loop(T* __restrict__ dx, const T* __restrict__ dy, const T* __restrict__ y,
                      int width, bool logarithm) {
    using C = Compute<T>;
    const long long start = blockIdx.x * (long long)width;
    dx += start;
    dy += start;
    y += start;
    C sum = 0;
    for_places(dy, width, aligned_alike(dy, y), [&](int place, auto n) {
        const auto dys = load<n>(dy + place), ys = load<n>(y + place);
        #pragma unroll
        for (int j = 0; j < n; ++j)
            sum += logarithm ? to_compute(dys.values[j]) : to_compute(dys.values[j]) * to_compute(ys.values[j]);
    });
    sum = block_sum(sum);
    for_places(dy, width, aligned_alike(dy, y) && aligned_alike(dy, dx), [&](int place, auto n) {
        const auto ys = load<n>(y + place);
        auto out = load<n>(dy + place);
        #pragma unroll
        for (int j = 0; j < n; ++j)
            out.values[j] = from_compute<T>(softmax_gradient<T>(
                to_compute(out.values[j]), to_compute(ys.values[j]), sum, logarithm));
        store(dx + place, out);
    });
}
