// Arguments of the kernels of attention's tangent, beside those of arguments.cuh.
#pragma once
#include "attention/arguments.cuh"

// y is the result of attention; dtq, dtk and dtv are the gradients of tq, tk and tv.
struct AttentionTangentArguments {
    Strides tq, tk, tv, y, dtq, dtk, dtv;
};

// Statistics of a query for backward, g being the gradient of ty: the log-sum-exp of its scores, to
// the base 2; the mean of its scores' tangents; g . y; g . ty.
struct alignas(16) TangentStatistics {
    float logsumexp, mean, y_delta, ty_delta;
};
