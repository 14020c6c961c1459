// The epilogue of skinny GEMMs.
#pragma once
#include "elementwise.cuh"

// The epilogue of a sum: bias (columns), GELU (tanh), gate and residual (rows, columns); a null
// pointer does nothing. With `wide` the result goes there, not rounded to T.
template <typename T>
struct SkinnyEpilogue {
    T* y;
    float* wide;
    const T* bias;
    const T* gate;
    const T* residual;
    int gelu, columns;

    struct Operands {   // the operands of one element of y
        float shift, open, residual;
    };

    __device__ Operands load(int row, int column) const {
        const long long place = row * (long long)columns + column;
        return {bias == nullptr ? 0 : to_compute(bias[column]),
                gate == nullptr ? 0 : to_compute(gate[place]),
                residual == nullptr ? 0 : to_compute(residual[place])};
    }
    __device__ void store(float sum, int row, int column, const Operands& of) const {
        const long long place = row * (long long)columns + column;
        sum += of.shift;
        if (gelu) sum = gelu_tanh(sum);
        if (gate != nullptr) sum *= of.open * sigmoid(of.open);
        sum += of.residual;
        if (wide != nullptr) wide[place] = sum;
        else y[place] = from_compute<T>(sum);
    }
};
