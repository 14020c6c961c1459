// Parts of the forward and backward kernels of layer_norm and rms_norm: y = (x - mean) * rstd *
// weight + bias over the last axis. A null mean makes it rms_norm, a null weight is 1, a null bias
// 0. Statistics are in the compute type.
#pragma once
#include "async.cuh"
#include "rows.cuh"

// VECTOR<T> parameters from `column` on, of those stored in the compute type; without any,
// `absent`.
template <typename T>
__device__ inline void load_wide(Compute<T> (&out)[VECTOR<T>], const void* p, int column,
                                 int absent) {
    using C = Compute<T>;
    #pragma unroll
    for (int j = 0; j < VECTOR<T>; j += VECTOR<C>) {
        Vec<C> part;
        if (p != nullptr) part = load<VECTOR<C>>(static_cast<const C*>(p) + column + j);
        #pragma unroll
        for (int k = 0; k < VECTOR<C>; ++k) out[j + k] = p != nullptr ? part.values[k] : C(absent);
    }
}

template <typename T>
__device__ inline Compute<T> load_parameter(const void* p, bool wide, int column) {
    return wide ? static_cast<const Compute<T>*>(p)[column]
                : to_compute(static_cast<const T*>(p)[column]);
}

template <typename C>
struct Pair {
    C first, second;
};
template <typename C> __device__ inline Pair<C> operator+(Pair<C> a, Pair<C> b) {
    return {a.first + b.first, a.second + b.second};
}
