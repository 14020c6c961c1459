// Exponentials and their running sums, as softmax and cross entropy take them.
#pragma once
#include "types.cuh"

template <typename C> __device__ inline C infinity();
template <> __device__ inline float infinity<float>() { return __int_as_float(0x7f800000); }
template <> __device__ inline double infinity<double>() {
    return __longlong_as_double(0x7ff0000000000000ll);
}

__device__ inline float fast_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ inline float fast_reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
constexpr float LOG2_E = 1.44269504f;

// exp(z) to the accuracy of T: results of 16 bits can do with the fast approximation.
template <typename T> __device__ inline Compute<T> exp_for(Compute<T> z) {
    if constexpr (sizeof(T) == 2) return fast_exp2(z * LOG2_E);
    else return exp(z);
}

// exp(x - shift), in one operation less for 16 bits. Its error grows with |shift|, but is the same
// factor for every x, which cancels where these are divided by their sum.
template <typename T> __device__ inline Compute<T> exp_less(Compute<T> x, Compute<T> shift) {
    if constexpr (sizeof(T) == 2) return fast_exp2(fmaf(x, LOG2_E, -shift * LOG2_E));
    else return exp(x - shift);
}

// The online softmax: the largest of the values so far, and the sum of exp(value - maximum).
template <typename C>
struct OnlineSoftmax {
    C maximum, total;

    // The largest value, or 0 while that is -inf: -inf - -inf would be NaN.
    __device__ C shift() const { return maximum == -infinity<C>() ? C(0) : maximum; }

    template <typename T, int N>
    __device__ void absorb(const C (&x)[N]) {
        C largest = maximum;
        #pragma unroll
        for (C value : x) largest = max(value, largest);   // skips NaN, which ends in total
        if (largest > maximum) {
            total *= exp_for<T>(maximum - largest);
            maximum = largest;
        }
        const C base = shift();
        #pragma unroll
        for (C value : x) total += exp_less<T>(value, base);
    }
};

template <typename T, typename C>
__device__ inline OnlineSoftmax<C> merge(OnlineSoftmax<C> a, OnlineSoftmax<C> b) {
    const OnlineSoftmax<C> all = {b.maximum > a.maximum ? b.maximum : a.maximum, 0};
    return {all.maximum, a.total * exp_for<T>(a.maximum - all.shift())
                       + b.total * exp_for<T>(b.maximum - all.shift())};
}
