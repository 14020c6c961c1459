// Storage types, the types that arithmetic on them is done in, and vector access to memory.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

// The type that one element is computed in: float for 16 bits, int for what C++ promotes to it.
template <typename T> struct ComputeType { using type = T; };
template <> struct ComputeType<__half> { using type = float; };
template <> struct ComputeType<__nv_bfloat16> { using type = float; };
template <> struct ComputeType<bool> { using type = int; };
template <typename T> using Compute = typename ComputeType<T>::type;

template <typename T> __device__ inline Compute<T> to_compute(T x) { return Compute<T>(x); }
template <typename T> __device__ inline T from_compute(Compute<T> x) { return T(x); }

// How many elements of T one 16-byte access moves; 1 for a type that does not divide 16 bytes.
template <typename T> constexpr int VECTOR = 16 % sizeof(T) == 0 ? 16 / int(sizeof(T)) : 1;

template <typename T, int N = VECTOR<T>>
struct alignas(N == 1 ? alignof(T) : sizeof(T) * N) Vec {
    T values[N];
};

// One access of N elements; p is aligned to all of them.
template <int N, typename T> __device__ inline Vec<T, N> load(const T* p) {
    return *reinterpret_cast<const Vec<T, N>*>(p);
}
template <int N, typename T> __device__ inline void store(T* p, const Vec<T, N>& v) {
    *reinterpret_cast<Vec<T, N>*>(p) = v;
}
// For 16 bytes that the whole GPU reads exactly once: they need no place in the caches.
template <typename T> __device__ inline Vec<T> load_streaming(const T* p) {
    const int4 bits = __ldcs(reinterpret_cast<const int4*>(p));
    return reinterpret_cast<const Vec<T>&>(bits);
}
