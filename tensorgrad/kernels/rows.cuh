// Rows of a contiguous matrix, one for each group of threads: blockDim.x of them, a power of
// two up to 32 or whole warps; blockDim.y groups a block. Launched by kernels/rows.py.
#pragma once
#include "reduce.cuh"
#include "types.cuh"

// Reductions over a group. All threads of the block must call them together; every thread of a
// group gets its result.
template <typename A>
struct GroupReducer {
    A* partials;   // 2 x 32 of them in shared memory, used in turn: so one barrier a call is enough
    int turn = 0;

    __device__ explicit GroupReducer(A* partials) : partials(partials) {}

    template <typename F>
    __device__ A operator()(A x, A identity, F combine) {
        x = warp_reduce(x, combine, min(blockDim.x, 32));
        if (blockDim.x <= 32) return x;
        const int warps = blockDim.x / 32, lane = threadIdx.x % 32;
        A* own = partials + turn * 32 + threadIdx.y * warps;
        turn ^= 1;
        if (lane == 0) own[threadIdx.x / 32] = x;
        __syncthreads();
        const int lanes = 2 << (31 - __clz(warps - 1));   // the power of two that holds the warps
        const int place = lane & (lanes - 1);
        return warp_reduce(place < warps ? own[place] : identity, combine, lanes);
    }

    __device__ A sum(A x) { return (*this)(x, A{}, [](A a, A b) { return a + b; }); }
    __device__ A max(A x) { return (*this)(x, x, [](A a, A b) { return b > a ? b : a; }); }
};

__device__ inline long long group_row() { return blockIdx.x * (long long)blockDim.y + threadIdx.y; }

// This thread's part of a row of `vectors` 16-byte vectors; zeros outside.
template <typename T, int VECTORS>
__device__ inline void load_row(Words (&own)[VECTORS], const T* row, int vectors) {
    #pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const int v = threadIdx.x + i * blockDim.x;
        own[i] = v < vectors ? load_words(row + v * VECTOR<T>) : Words{};
    }
}

template <int N> struct IntConstant {
    __device__ constexpr operator int() const { return N; }
};

// Call f(place, IntConstant<N>()) so that each thread of a block of one dimension gets its part of
// the places of a row, N side by side: as many as fit 16 bytes where p + place is aligned to that,
// otherwise 1. `alike` says that what else f accesses is aligned as p is.
template <typename T, typename F>
__device__ inline void for_places(const T* p, int width, bool alike, F f) {
    constexpr int WIDTH = VECTOR<T>;
    const int past = int(reinterpret_cast<size_t>(p) / sizeof(T) % WIDTH);
    const int head = min(width, (WIDTH - past) % WIDTH);
    const int vectors = alike ? (width - head) / WIDTH : 0;
    #pragma unroll 4
    for (int v = threadIdx.x; v < vectors; v += blockDim.x)
        f(head + v * WIDTH, IntConstant<WIDTH>());
    for (int i = threadIdx.x; i < width - vectors * WIDTH; i += blockDim.x)
        f(i < head ? i : i + vectors * WIDTH, IntConstant<1>());
}

// The sum of f(value) over a thread's part of a row.
template <typename T, typename F>
__device__ inline Compute<T> sum_values(const T* x, int count, F f) {
    Compute<T> sum = 0;
    for_places(x, count, true, [&](int place, auto n) {
        const auto values = load<n>(x + place);
        #pragma unroll
        for (int j = 0; j < n; ++j) sum += f(to_compute(values.values[j]));
    });
    return sum;
}

// Whether p and q lie equally far from a 16-byte boundary.
__device__ inline bool aligned_alike(const void* p, const void* q) {
    return (reinterpret_cast<size_t>(p) - reinterpret_cast<size_t>(q)) % 16 == 0;
}
