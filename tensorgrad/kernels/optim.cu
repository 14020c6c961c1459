// Optimizer steps over flat buffers. Each element is read and written once: 28 bytes a parameter
// for Adam in float32 (p, m, v both ways, the gradient in). With 16-bit parameters p is the float32
// master weight. A bfloat16 parameter is its high half, and the state has the low half: 28 too.
// Beside a float16 parameter the state has the whole p: 32.
//
//   prepare_adam, prepare_sgd, prepare_lion   one thread: the scalars of this step
//   adam_step<T, G, DECOUPLED>  Adam; DECOUPLED: AdamW
//   sgd_step<T, G, KIND>        KIND 0: plain, 1: momentum, 2: Nesterov's momentum
//   lion_step<T, G>             Lion; 20 bytes a parameter in float32
//
// T is the dtype of the parameters, G that of the gradients: the compute type, or bfloat16, which
// makes 2 bytes a parameter less.
//
// `hyper` holds what changes from step to step, in device memory, so that neither a new launch
// argument nor the host is needed: what the user sets, then what prepare_* derives from it. A
// FACTOR of 0 skips the step. Buffers are aligned to 16 bytes, `size` and `decayed` (weight decay
// applies to the elements before it) are multiples of 16 bytes. Launched by optim/optimizer.py.
//
// The naive kernels, a thread for parameter i:
//
//   m[i] = beta1 * m[i] + (1 - beta1) * grad[i];
//   v[i] = beta2 * v[i] + (1 - beta2) * grad[i] * grad[i];
//   p[i] -= lr * weight_decay * p[i];                                             // AdamW
//   p[i] -= lr * (m[i] / (1 - pow(beta1, t))) / (sqrt(v[i] / (1 - pow(beta2, t))) + eps);
//
//   m[i] = momentum * m[i] + grad[i];                                             // SGD
//   p[i] -= lr * m[i];
//
//   p[i] -= lr * weight_decay * p[i];                                             // Lion
//   p[i] -= lr * sign(grad[i] + beta1 * (m[i] - grad[i]));
//   m[i] = grad[i] + beta2 * (m[i] - grad[i]);
//
// where: TYPES = double, double | float, float | __half, float | __nv_bfloat16, float |
//     __nv_bfloat16, __nv_bfloat16
// instantiate: {prepare_adam | prepare_sgd | prepare_lion}
// instantiate: adam_step<{TYPES}, {true | false}>
// instantiate: sgd_step<{TYPES}, {0 | 1 | 2}>
// instantiate: lion_step<{TYPES}>
#include "types.cuh"

enum Hyper { LR, STEPS, FACTOR, SIZE, EPS, DECAY, GAIN };   // the order of optim/optimizer.py

// p -= lr * sqrt(c2) / c1 * m / (sqrt(v) + eps * sqrt(c2)), c1 = 1 - beta1^t, c2 = 1 - beta2^t,
// is Adam's update with the corrections of bias moved out of the vectors.
__global__ void prepare_adam(double* hyper, double beta1, double beta2, double eps,
                             double weight_decay) {
    if (hyper[FACTOR] == 0) return;
    const double steps = ++hyper[STEPS];
    const double root = sqrt(1 - pow(beta2, steps));
    hyper[SIZE] = hyper[LR] * root / (1 - pow(beta1, steps));
    hyper[EPS] = eps * root;
    hyper[DECAY] = 1 - hyper[LR] * weight_decay;
}

__global__ void prepare_sgd(double* hyper, double dampening) {
    if (hyper[FACTOR] == 0) return;
    hyper[SIZE] = hyper[LR];
    hyper[GAIN] = ++hyper[STEPS] == 1 ? 1 : 1 - dampening;
}

__global__ void prepare_lion(double* hyper, double weight_decay) {
    if (hyper[FACTOR] == 0) return;
    ++hyper[STEPS];
    hyper[SIZE] = hyper[LR];
    hyper[DECAY] = 1 - hyper[LR] * weight_decay;
}

// The state's part of the float32 master weight of a 16-bit parameter: beside __half the float32,
// beside __nv_bfloat16 its low 16 bits. See optim/master.py.
template <typename T> struct MasterType { using type = Compute<T>; };
template <> struct MasterType<__nv_bfloat16> { using type = unsigned short; };
template <typename T> using Master = typename MasterType<T>::type;

// The master weight. A parameter that is not `master` rounded was assigned to.
__device__ inline float join(__half parameter, float master) {
    return float(__half(master)) == float(parameter) ? master : float(parameter);
}
__device__ inline void split(float p, __half& parameter, float& master) {
    parameter = __half(p);
    master = p;
}

// parameter = p rounded to nearest, ties away from zero: p = (parameter << 16) + low, low signed.
// After an assignment low is of another parameter: p may be half a unit in the last place off, and
// where it is NaN (0 and -0x8000) the parameter alone counts.
__device__ inline float join(__nv_bfloat16 parameter, unsigned short low) {
    const unsigned high = unsigned(__bfloat16_as_ushort(parameter)) << 16;
    const float p = __uint_as_float(high + short(low));
    return isnan(p) ? __uint_as_float(high) : p;
}
__device__ inline void split(float p, __nv_bfloat16& parameter, unsigned short& low) {
    const unsigned bits = isnan(p) ? 0x7fc00000u : __float_as_uint(p);
    parameter = __ushort_as_bfloat16((unsigned short)((bits + 0x8000u) >> 16));
    low = (unsigned short)bits;
}

// Read the parameters in the compute type, hand them to `update`, and write them back.
template <typename T, typename F>
__device__ inline void update_parameters(T* data, Master<T>* master_all, long long i, F update) {
    using C = Compute<T>;
    constexpr int N = VECTOR<C>;
    Vec<T, N> parameters = load<N>(data + i);
    if constexpr (sizeof(T) == sizeof(C)) {
        update(parameters);
    } else {
        Vec<Master<T>, N> master = load<N>(master_all + i);
        Vec<C> p;
        #pragma unroll
        for (int j = 0; j < N; ++j) p.values[j] = join(parameters.values[j], master.values[j]);
        update(p);
        #pragma unroll
        for (int j = 0; j < N; ++j) split(p.values[j], parameters.values[j], master.values[j]);
        store(master_all + i, master);
    }
    store(data + i, parameters);
}

template <typename T, typename G, bool DECOUPLED>
__global__ void __launch_bounds__(256)
adam_step(T* __restrict__ data, Master<T>* __restrict__ master, Compute<T>* __restrict__ m_all,
          Compute<T>* __restrict__ v_all, const G* __restrict__ grad,
          const double* __restrict__ hyper, long long size, long long decayed, double beta1,
          double beta2, double weight_decay) {
    using C = Compute<T>;
    constexpr int N = VECTOR<C>;
    const long long i = (blockIdx.x * 256ll + threadIdx.x) * N;
    const double factor = hyper[FACTOR];
    if (i >= size || factor == 0) return;
    // Load.
    const Vec<G, N> gradient = load<N>(grad + i);
    Vec<C> m = load<N>(m_all + i), v = load<N>(v_all + i);
    const C shrink = DECOUPLED && i < decayed ? C(hyper[DECAY]) : C(1);
    const C decay = !DECOUPLED && i < decayed ? C(weight_decay) : C(0);
    const C step = C(hyper[SIZE]), eps = C(hyper[EPS]);
    const C keep1 = C(beta1), keep2 = C(beta2);
    // Update the moments and the parameters.
    update_parameters(data, master, i, [&](Vec<C>& p) {
        #pragma unroll
        for (int j = 0; j < N; ++j) {
            const C g = C(gradient.values[j]) * C(factor) + decay * p.values[j];
            m.values[j] = keep1 * m.values[j] + (1 - keep1) * g;
            v.values[j] = keep2 * v.values[j] + (1 - keep2) * g * g;
            p.values[j] = p.values[j] * shrink - step * m.values[j] / (sqrt(v.values[j]) + eps);
        }
    });
    // Store.
    store(m_all + i, m);
    store(v_all + i, v);
}

template <typename T, typename G, int KIND>
__global__ void __launch_bounds__(256)
sgd_step(T* __restrict__ data, Master<T>* __restrict__ master,
         Compute<T>* __restrict__ momentum_all, const G* __restrict__ grad,
         const double* __restrict__ hyper, long long size, long long decayed, double momentum,
         double weight_decay) {
    using C = Compute<T>;
    constexpr int N = VECTOR<C>;
    const long long i = (blockIdx.x * 256ll + threadIdx.x) * N;
    const double factor = hyper[FACTOR];
    if (i >= size || factor == 0) return;
    // Load.
    const Vec<G, N> gradient = load<N>(grad + i);
    Vec<C> m = {};
    if constexpr (KIND > 0) m = load<N>(momentum_all + i);
    const C decay = i < decayed ? C(weight_decay) : C(0), step = C(hyper[SIZE]),
            gain = C(hyper[GAIN]);
    // Update the momentum and the parameters.
    update_parameters(data, master, i, [&](Vec<C>& p) {
        #pragma unroll
        for (int j = 0; j < N; ++j) {
            const C g = C(gradient.values[j]) * C(factor) + decay * p.values[j];
            if constexpr (KIND > 0) m.values[j] = C(momentum) * m.values[j] + gain * g;
            const C direction = KIND == 0   ? g
                                : KIND == 1 ? m.values[j]
                                            : g + C(momentum) * m.values[j];
            p.values[j] -= step * direction;
        }
    });
    // Store.
    if constexpr (KIND > 0) store(momentum_all + i, m);
}

template <typename T, typename G>
__global__ void __launch_bounds__(256)
lion_step(T* __restrict__ data, Master<T>* __restrict__ master, Compute<T>* __restrict__ m_all,
          const G* __restrict__ grad, const double* __restrict__ hyper, long long size,
          long long decayed, double beta1, double beta2) {
    using C = Compute<T>;
    constexpr int N = VECTOR<C>;
    const long long i = (blockIdx.x * 256ll + threadIdx.x) * N;
    const double factor = hyper[FACTOR];
    if (i >= size || factor == 0) return;
    // Load.
    const Vec<G, N> gradient = load<N>(grad + i);
    Vec<C> m = load<N>(m_all + i);
    const C shrink = i < decayed ? C(hyper[DECAY]) : C(1), step = C(hyper[SIZE]);
    // Update the momentum and the parameters; a NaN stays one.
    update_parameters(data, master, i, [&](Vec<C>& p) {
        #pragma unroll
        for (int j = 0; j < N; ++j) {
            const C g = C(gradient.values[j]) * C(factor), apart = m.values[j] - g;
            const C u = g + C(beta1) * apart;
            const C sign = u > 0 ? C(1) : u < 0 ? C(-1) : u;
            m.values[j] = g + C(beta2) * apart;
            p.values[j] = p.values[j] * shrink - step * sign;
        }
    });
    // Store.
    store(m_all + i, m);
}
