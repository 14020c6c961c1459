// One element of an optimizer step, and the scalars of a step. optim/*.py wraps them in
// elementwise kernels over the flat buffers. C is float or double.
//
// `hyper` holds what changes from step to step, in device memory, so that neither a new launch
// argument nor the host is needed: what the user sets, then what prepare_* derives from it.
#pragma once

enum Hyper { LR, STEPS, FACTOR, SIZE, EPS, DECAY, GAIN };

// A 16-bit parameter that no longer is its rounded master copy was assigned to: take it over.
template <typename T, typename C> __device__ inline void take_over(T parameter, C& master) {
    if (C(T(master)) != C(parameter)) master = C(parameter);
}

// p -= lr * sqrt(c2) / c1 * m / (sqrt(v) + eps * sqrt(c2)), c1 = 1 - beta1^t, c2 = 1 - beta2^t,
// is Adam's update with the corrections of bias moved out of the vectors.
__device__ inline void prepare_adam(double* hyper, double beta1, double beta2, double eps,
                                    double weight_decay) {
    if (hyper[FACTOR] == 0) return;
    const double steps = ++hyper[STEPS];
    const double root = sqrt(1 - pow(beta2, steps));
    hyper[SIZE] = hyper[LR] * root / (1 - pow(beta1, steps));
    hyper[EPS] = eps * root;
    hyper[DECAY] = 1 - hyper[LR] * weight_decay;
}

template <typename C>
__device__ inline void adam(C& p, C& m, C& v, C gradient, const double* hyper, C beta1, C beta2,
                            C shrink, C decay) {
    const C g = gradient * C(hyper[FACTOR]) + decay * p;
    m = beta1 * m + (1 - beta1) * g;
    v = beta2 * v + (1 - beta2) * g * g;
    p = p * shrink - C(hyper[SIZE]) * m / (sqrt(v) + C(hyper[EPS]));
}

__device__ inline void prepare_sgd(double* hyper, double dampening) {
    if (hyper[FACTOR] == 0) return;
    hyper[SIZE] = hyper[LR];
    hyper[GAIN] = ++hyper[STEPS] == 1 ? 1 : 1 - dampening;
}

template <typename C>
__device__ inline void sgd(C& p, C gradient, const double* hyper, C decay) {
    p -= C(hyper[SIZE]) * (gradient * C(hyper[FACTOR]) + decay * p);
}

template <typename C>
__device__ inline void sgd_momentum(C& p, C& m, C gradient, const double* hyper, C momentum, C decay) {
    const C g = gradient * C(hyper[FACTOR]) + decay * p;
    m = momentum * m + C(hyper[GAIN]) * g;
    p -= C(hyper[SIZE]) * m;
}

template <typename C>
__device__ inline void sgd_nesterov(C& p, C& m, C gradient, const double* hyper, C momentum, C decay) {
    const C g = gradient * C(hyper[FACTOR]) + decay * p;
    m = momentum * m + C(hyper[GAIN]) * g;
    p -= C(hyper[SIZE]) * (g + momentum * m);
}
