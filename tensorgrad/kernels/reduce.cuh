// Reductions over a warp and over a block, in an order that depends on nothing but the thread.
// Every thread gets the result. `combine` is any associative function of two values.
#pragma once

template <typename A> __device__ inline A shuffle_xor(A x, int mask) {
    static_assert(sizeof(A) % 4 == 0, "shuffles move words of 4 bytes");
    int words[sizeof(A) / 4];
    memcpy(words, &x, sizeof(A));
    #pragma unroll
    for (int& word : words) word = __shfl_xor_sync(0xffffffff, word, mask);
    memcpy(&x, words, sizeof(A));
    return x;
}

// Over groups of `lanes` neighbouring lanes, a power of two. All 32 lanes must call it.
template <typename A, typename F>
__device__ inline A warp_reduce(A x, F combine, int lanes = 32) {
    #pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
        if (offset >= lanes) continue;
        const A other = shuffle_xor(x, offset);
        // The lower lane's value comes first on both sides, so that both get the same bits.
        x = threadIdx.x & offset ? combine(other, x) : combine(x, other);
    }
    return x;
}

// Over a block of one dimension, whole warps.
template <typename A, typename F>
__device__ inline A block_reduce(A x, A identity, F combine) {
    __shared__ A partials[32];
    const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
    x = warp_reduce(x, combine);
    __syncthreads();   // the call before this one may still be reading
    if (lane == 0) partials[threadIdx.x / 32] = x;
    __syncthreads();
    return warp_reduce(lane < warps ? partials[lane] : identity, combine);
}

template <typename A> __device__ inline A warp_sum(A x, int lanes = 32) {
    return warp_reduce(x, [](A a, A b) { return a + b; }, lanes);
}
template <typename A> __device__ inline A block_sum(A x) {
    return block_reduce(x, A{}, [](A a, A b) { return a + b; });
}

// The count and mean of some values, and the sum of (value - mean)^2, as Chan et al. 1979 (Stanford
// STAN-CS-79-773), eq. 2.1, merge them: nothing cancels where the mean is large.
template <typename A>
struct Moments {
    A count, mean, squares;
};
