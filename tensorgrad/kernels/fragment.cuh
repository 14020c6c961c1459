// The accumulator of a product on tensor cores, in the layout that mma.sync and wgmma share: of
// each 16 rows and 8 columns, thread t of a warp has two neighbouring values of row t / 4 and two
// of the row 8 below, in columns t % 4 * 2 and the next. The four threads of a quad share a row. A
// word of two such values, rounded to 16 bits, is an operand of the next product.
#pragma once
#include "exp.cuh"

// Over the four threads that share a row.
template <typename F> __device__ inline float quad_reduce(float x, F combine) {
    x = combine(x, __shfl_xor_sync(0xffffffff, x, 1));
    return combine(x, __shfl_xor_sync(0xffffffff, x, 2));
}
__device__ inline float quad_max(float x) {
    return quad_reduce(x, [](float a, float b) { return fmaxf(a, b); });
}
__device__ inline float quad_sum(float x) {
    return quad_reduce(x, [](float a, float b) { return a + b; });
}

// A thread's part of 16 R rows and N columns of a warp. It has values of 2 R rows: number h is row
// row_of(h). In such a row its values are in columns column_of(0) + c with c = 0, 1, 8, 9, 16, ...
template <int R, int N> struct Fragment {
    static constexpr int ROWS = 2 * R, SIZE = R * N / 2;
    float values[SIZE];   // [R][N / 8][2 rows][2 columns]

    // `lane` is unsigned: a division of an int of unknown sign costs registers.
    __device__ static int row_of(int h, unsigned lane = threadIdx.x % 32) {
        return 8 * h + lane / 4;
    }
    __device__ static int column_of(int c, unsigned lane = threadIdx.x % 32) {
        return c + lane % 4 * 2;
    }

    // The 16 x 8 accumulator of one mma.sync.
    __device__ float (&block(int r, int j))[4] {
        return reinterpret_cast<float(&)[4]>(values[(r * (N / 8) + j) * 4]);
    }
    __device__ float& at(int h, int c) {
        return values[(h / 2 * (N / 8) + c / 8) * 4 + h % 2 * 2 + c % 2];
    }
    __device__ float at(int h, int c) const {
        return values[(h / 2 * (N / 8) + c / 8) * 4 + h % 2 * 2 + c % 2];
    }
    __device__ void clear() {
        #pragma unroll
        for (float& x : values) x = 0;
    }
    // f(value, c) of each value of row h.
    template <typename F> __device__ void for_row(int h, F f) {
        #pragma unroll
        for (int j = 0; j < N; j += 8) {
            f(at(h, j), j);
            f(at(h, j + 1), j + 1);
        }
    }
    // f(value, h, c) of all values.
    template <typename F> __device__ void for_each(F f) {
        #pragma unroll
        for (int h = 0; h < ROWS; ++h) for_row(h, [&](float& x, int c) { f(x, h, c); });
    }
    // Values of row h in columns outside of [first, last) become -inf; both counted from
    // column_of(0).
    __device__ void mask_row(int h, int first, int last) {
        for_row(h, [&](float& x, int c) {
            if (c < first || c >= last) x = -infinity<float>();
        });
    }
    // The largest of `least` and of row h, which all four threads of the row get.
    __device__ float row_max(int h, float least) const {
        #pragma unroll
        for (int j = 0; j < N; j += 8) least = fmaxf(least, fmaxf(at(h, j), at(h, j + 1)));
        return quad_max(least);
    }
    __device__ void scale_rows(const float (&factor)[ROWS]) {
        for_each([&](float& x, int h, int) { x *= factor[h]; });
    }
    // Word i as an operand: values 2 i and 2 i + 1, rounded to T.
    template <typename T> __device__ unsigned word(int i) const {
        return pack<T>(values[2 * i], values[2 * i + 1]);
    }
    template <typename T> __device__ void round_to(unsigned (&words)[SIZE / 2]) const {
        #pragma unroll
        for (int i = 0; i < SIZE / 2; ++i) words[i] = word<T>(i);
    }
};
