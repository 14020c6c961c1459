// The rotation of pairs of elements by angles, for the kernels that rotate queries and keys.
#pragma once
#include "types.cuh"

// Rotate the pairs (one[i], two[i]) or, interleaved, the neighbours in one and then two. Products
// that are added without rounding are named, so that all kernels give the same bits.
template <bool INTERLEAVED, typename T, int P, typename C, int PART>
__device__ inline void rotate(Vec<T, P>& one, Vec<T, P>& two,
                              const Vec<C, PART> (&cosine)[P / PART],
                              const Vec<C, PART> (&sine)[P / PART], C direction) {
    T values[2 * P];
    #pragma unroll
    for (int i = 0; i < P; ++i) {
        values[i] = one.values[i];
        values[P + i] = two.values[i];
    }
    #pragma unroll
    for (int i = 0; i < P; ++i) {
        T& first = values[INTERLEAVED ? 2 * i : i];
        T& second = values[INTERLEAVED ? 2 * i + 1 : P + i];
        const C a = to_compute(first), b = to_compute(second);
        const C c = cosine[i / PART].values[i % PART],
                s = direction * sine[i / PART].values[i % PART];
        first = from_compute<T>(fma(a, c, -(b * s)));
        second = from_compute<T>(fma(b, c, a * s));
    }
    #pragma unroll
    for (int i = 0; i < P; ++i) {
        one.values[i] = values[i];
        two.values[i] = values[P + i];
    }
}
