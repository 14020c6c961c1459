// Parts of the kernels of attention's tangent with mma.sync; see sm80.cuh for the tiles.
#pragma once
#include "attention/sm80.cuh"
#include "attention/tangent.cuh"

// c1 += a1 b^T and c2 += a2 b^T: what ldmatrix brings of b serves both products.
template <typename T, int R, int N, int D, bool IN_REGISTERS_1, bool IN_REGISTERS_2>
__device__ inline void multiply_rows_pair(Fragment<R, N>& c1,
                                          const RowOperand<T, R, D, IN_REGISTERS_1>& a1,
                                          Fragment<R, N>& c2,
                                          const RowOperand<T, R, D, IN_REGISTERS_2>& a2,
                                          const T* b) {
    const int lane = threadIdx.x % 32;
    const unsigned address = shared_address(b + (lane % 8 + lane / 16 * 8) * PITCH<T, D> +
                                            lane / 8 % 2 * VECTOR<T>);
    #pragma unroll
    for (int d = 0; d < D / TERMS<T>; ++d) {
        unsigned rows1[R][4], rows2[R][4], columns[4];
        a1.step(rows1, d);
        a2.step(rows2, d);
        #pragma unroll
        for (int n = 0; n < N / 16; ++n) {
            ldmatrix(columns, address + 16 * n * PITCH<T, D> * sizeof(T) + 32 * d);
            round_operand<T>(columns);
            mma_columns<T>(c1, 2 * n, rows1, columns);
            mma_columns<T>(c2, 2 * n, rows2, columns);
        }
    }
}

// c1 += w1 b and c2 += w2 b, as `accumulate` does.
template <int D, int R, int N, int W, typename T>
__device__ inline void accumulate_pair(Fragment<R, W>& c1, const Fragment<R, N>& w1,
                                       Fragment<R, W>& c2, const Fragment<R, N>& w2, const T* b) {
    const int lane = threadIdx.x % 32;
    const unsigned address = shared_address(b + lane % 16 * PITCH<T, D> + lane / 16 * 8);
    #pragma unroll
    for (int n = 0; n < N / 16; ++n) {
        unsigned rows1[R][4], rows2[R][4], columns[4];
        #pragma unroll
        for (int i = 0; i < 4 * R; ++i) {
            const int from = i / 4 * (N / 4) + 4 * n + i % 4;
            rows1[i / 4][i % 4] = w1.template word<T>(from);
            rows2[i / 4][i % 4] = w2.template word<T>(from);
        }
        #pragma unroll
        for (int d = 0; d < W / 16; ++d) {
            ldmatrix_transposed(columns, address + (16 * n * PITCH<T, D> + 16 * d) * 2);
            mma_columns<T>(c1, 2 * d, rows1, columns);
            mma_columns<T>(c2, 2 * d, rows2, columns);
        }
    }
}
template <int D, int R, int N, int W>   // in TF32
__device__ inline void accumulate_pair(Fragment<R, W>& c1, const Fragment<R, N>& w1,
                                       Fragment<R, W>& c2, const Fragment<R, N>& w2,
                                       const float* b) {
    const int lane = rematerialize(threadIdx.x % 32);
    const unsigned address = shared_address(b + lane % 4 * 2 * PITCH<float, D> + lane / 4);
    #pragma unroll
    for (int n = 0; n < N / 8; ++n) {
        unsigned rows1[R][4], rows2[R][4];
        #pragma unroll
        for (int i = 0; i < 4 * R; ++i) {   // word 2 t + h: half t of the terms, half h of the rows
            const int from = (i / 4 * (N / 8) + n) * 4 + i % 2 * 2 + i % 4 / 2;
            rows1[i / 4][i % 4] = __float_as_uint(w1.values[from]);
            rows2[i / 4][i % 4] = __float_as_uint(w2.values[from]);
        }
        #pragma unroll
        for (int r = 0; r < R; ++r) {
            round_operand<float>(rows1[r]);
            round_operand<float>(rows2[r]);
        }
        #pragma unroll
        for (int d = 0; d < W / 8; ++d) {
            const unsigned from = address + (8 * n * PITCH<float, D> + 8 * d) * 4;
            unsigned columns[2] = {load_word(from), load_word(from + PITCH<float, D> * 4)};
            round_operand<float>(columns);
            #pragma unroll
            for (int r = 0; r < R; ++r) {
                mma<float>(c1.block(r, d), rows1[r], columns[0], columns[1]);
                mma<float>(c2.block(r, d), rows2[r], columns[0], columns[1]);
            }
        }
    }
}
