// The keep mask of dropout, and access to the elements that a warp takes.
//
// A Philox block of 256 bits decides over 16 elements. A warp draws 32 blocks, one a thread, and
// moves their 512 elements in vectors of N, neighbours in neighbouring threads; the bits of a
// vector come from the thread that drew them by a shuffle.
#pragma once
#include "philox.cuh"
#include "types.cuh"

constexpr int LANES = 16;   // elements that a Philox block decides over

// Elements i to i + N; of the last elements as many as there are.
template <bool WHOLE, int N, typename T>
__device__ inline Vec<T, N> load_within(const T* p, long long i, long long size) {
    if (WHOLE || i + N <= size) return load<N>(p + i);
    Vec<T, N> v = {};
    #pragma unroll
    for (int j = 0; j < N; ++j)
        if (i + j < size) v.values[j] = p[i + j];
    return v;
}
template <bool WHOLE, int N, typename T>
__device__ inline void store_within(T* p, long long i, long long size, const Vec<T, N>& v) {
    if (WHOLE || i + N <= size) return store(p + i, v);
    #pragma unroll
    for (int j = 0; j < N; ++j)
        if (i + j < size) p[i + j] = v.values[j];
}

// The keep mask of the LANES elements of a Philox block, a bit each: an element is kept where its
// 16 random bits, in the upper half of a word, are <= limit.
__device__ inline unsigned int keep_bits(Word seed, Word draw, Word stream, Word block,
                                         unsigned int limit) {
    const Bits bits = philox(seed, draw, stream, block);
    unsigned int kept = 0;
    #pragma unroll
    for (int i = 0; i < LANES; ++i) {
        const unsigned int half = bits.values[i / 4] >> i % 4 / 2 * 32;
        if ((i % 2 == 0 ? half << 16 : half) <= limit) kept |= 1u << i;
    }
    return kept;
}

// The keep mask of a vector of the warp, in the low N bits; all threads of the warp take part.
template <int N>
__device__ inline unsigned int keep_of_vector(unsigned int kept, int vector) {
    constexpr int VECTORS = LANES / N;   // vectors of a thread
    return __shfl_sync(0xffffffffu, kept, vector / VECTORS) >> vector % VECTORS * N;
}
