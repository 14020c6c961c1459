// The targets of cross entropy, and the gradient of a logit.
#pragma once
#include "exp.cuh"

// Which targets count, which part of the wanted distribution is theirs and which each class's, and
// the weight of z^2.
struct Targets {
    const long long* ids;
    long long ignored;
    long long ignores;
    double target;
    double each;
    double z_loss;

    __device__ bool counts(long long id) const { return !(ignores && id == ignored); }

    // below: the sum of logit - maximum where `each` is not 0, else 0. What the
    // logits have in common counts in z alone, so it costs no digits.
    template <typename C>
    __device__ C loss(C row_max, C total, C at_target, C below) const {
        const C part = log(total), lse = row_max + part;
        return part - C(target) * (at_target - row_max) - C(each) * below + C(z_loss) * lse * lse;
    }
};

// The factor of a row's gradient: dy, one for all rows (stride 0) or one a row, by
// the number of rows that count. Null stands for 1.
template <typename C>
struct GradientScale {
    const C* dy;
    const long long* count;
    long long stride;

    __device__ C operator()(long long row) const {
        const C weight = dy != nullptr ? dy[row * stride] : C(1);
        return count != nullptr ? weight / C(*count > 0 ? *count : 1) : weight;
    }
    __device__ bool is_one() const { return dy != nullptr && stride == 0 && *dy == C(1); }
};

// The gradient of a row is exp(x - row_max) * rise - floor, and drop less at the target.
template <typename T, typename C = Compute<T>>
struct LogitGradient {
    C row_max, rise, floor, drop;

    __device__ LogitGradient(C row_max, C total, const Targets& targets, C scale)
        : row_max(row_max),
          rise(scale * (1 + 2 * C(targets.z_loss) * (row_max + log(total))) / total),
          floor(C(targets.each) * scale), drop(C(targets.target) * scale) {}

    __device__ C operator()(C x) const { return exp_less<T>(x, row_max) * rise - floor; }
};
