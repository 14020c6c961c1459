// Functions that the expressions of the elementwise table may call, beside CUDA's own
// (exp, log, sqrt, tanh, erf, ...). Every operand arrives in the compute type C: float for
// float and the 16-bit types, double, or an integer.
#pragma once

template <typename C> __device__ inline bool is_nan(C x) { return x != x; }
template <typename C> __device__ inline bool is_inf(C x) { return !is_nan(x) && is_nan(x - x); }
template <typename C> __device__ inline bool is_finite(C x) { return !is_nan(x - x); }
template <typename C> __device__ inline C absolute(C x) { return x < C(0) ? -x : x == C(0) ? C(0) : x; }
template <typename C> __device__ inline C sign(C x) { return is_nan(x) ? x : C((x > C(0)) - (x < C(0))); }

// NaN wins, as in NumPy.
template <typename C> __device__ inline C maximum(C a, C b) { return is_nan(a) || a > b ? a : b; }
template <typename C> __device__ inline C minimum(C a, C b) { return is_nan(a) || a < b ? a : b; }

template <typename A, typename B> __device__ inline auto where(bool c, A a, B b) -> decltype(a + b) {
    return c ? a : b;
}
template <typename A, typename B> __device__ inline bool both(A a, B b) { return bool(a) && bool(b); }
template <typename A, typename B> __device__ inline bool either(A a, B b) { return bool(a) || bool(b); }
template <typename A, typename B> __device__ inline bool differ(A a, B b) { return bool(a) != bool(b); }
template <typename A> __device__ inline bool inverted(A a) { return !bool(a); }

__device__ inline float power(float a, float b) { return b == 2.f ? a * a : pow(a, b); }
__device__ inline double power(double a, double b) { return b == 2. ? a * a : pow(a, b); }
template <typename C> __device__ inline C power(C a, C b) {   // integers, b >= 0
    C result = 1;
    for (; b > 0; b >>= 1, a *= a)
        if (b & 1) result *= a;
    return result;
}

template <typename C> __device__ inline C sigmoid(C x) {
    const C small = exp(-absolute(x));
    return (x >= C(0) ? C(1) : small) / (C(1) + small);
}
template <typename C> __device__ inline C softplus(C x) { return maximum(x, C(0)) + log1p(exp(-absolute(x))); }

template <typename C> __device__ inline C gelu_inner_tanh(C x) {
    const C scale = C(0.7978845608028654), cube = C(0.044715);
    return tanh(x * (scale + scale * cube * x * x));
}
template <typename C> __device__ inline C gelu_tanh(C x) { return C(0.5) * x * (C(1) + gelu_inner_tanh(x)); }
template <typename C> __device__ inline C gelu_tanh_slope(C x) {
    const C scale = C(0.7978845608028654), cube = C(0.044715), t = gelu_inner_tanh(x);
    return C(0.5) * (C(1) + t + x * (C(1) - t * t) * (scale + C(3) * cube * scale * x * x));
}
