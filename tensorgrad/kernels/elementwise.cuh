// Functions that the expressions of the elementwise table may call, in addition to CUDA's own
// (exp, log, sqrt, tanh, erf, ...). Every operand arrives in the compute type C: float for
// float and the 16-bit types, double, or an integer. Whoever includes this defines ROUGH first:
// whether all results have 16 bits, for which the approximations of the hardware do.
#pragma once
#include "exp.cuh"

template <typename A> __device__ inline float float32(A a) { return float(a); }
template <typename A> __device__ inline double float64(A a) { return double(a); }
template <typename C> __device__ inline C positive(C x) { return x; }
template <typename C> __device__ inline bool is_nan(C x) { return x != x; }
template <typename C> __device__ inline bool is_inf(C x) { return !is_nan(x) && is_nan(x - x); }
template <typename C> __device__ inline bool is_finite(C x) { return !is_nan(x - x); }
template <typename C>
__device__ inline C absolute(C x) { return x < C(0) ? -x : x == C(0) ? C(0) : x; }
template <typename C>
__device__ inline C sign(C x) { return is_nan(x) ? x : C((x > C(0)) - (x < C(0))); }

// NaN wins, as in NumPy.
template <typename C> __device__ inline C maximum(C a, C b) { return is_nan(a) || a > b ? a : b; }
template <typename C> __device__ inline C minimum(C a, C b) { return is_nan(a) || a < b ? a : b; }

template <typename A, typename B>
__device__ inline auto where(bool c, A a, B b) -> decltype(a + b) { return c ? a : b; }
template <typename A, typename B>
__device__ inline bool logical_and(A a, B b) { return bool(a) && bool(b); }
template <typename A, typename B>
__device__ inline bool logical_or(A a, B b) { return bool(a) || bool(b); }
template <typename A, typename B>
__device__ inline bool logical_xor(A a, B b) { return bool(a) != bool(b); }
template <typename A> __device__ inline bool logical_not(A a) { return !bool(a); }

// Integers themselves, all of whose digits double may not hold.
template <typename C> constexpr bool IS_WHOLE = C(0.5) == C(0);
template <typename C>
__device__ inline C round_down(C x) {
    if constexpr (IS_WHOLE<C>) return x; else return floor(x);
}
template <typename C>
__device__ inline C round_up(C x) {
    if constexpr (IS_WHOLE<C>) return x; else return ceil(x);
}
template <typename C>
__device__ inline C round_nearest(C x) {
    if constexpr (IS_WHOLE<C>) return x; else return rint(x);
}

template <typename C>
__device__ inline bool sign_bit(C x) {
    if constexpr (IS_WHOLE<C>) return x < C(0); else return signbit(x);
}
template <typename C>
__device__ inline C round_toward_zero(C x) {
    if constexpr (IS_WHOLE<C>) return x; else return trunc(x);
}

// a - b * trunc(a / b), with the sign of a. Integers over 0 give 0, as in NumPy.
template <typename C>
__device__ inline C modulo(C a, C b) {
    if constexpr (!IS_WHOLE<C>) return fmod(a, b);
    else return b == C(0) || b + C(1) == C(0) && C(-1) < C(0) ? C(0) : C(a % b);
}
// a - b * floor(a / b), with the sign of b.
template <typename C>
__device__ inline C floor_modulo(C a, C b) {
    const C rest = modulo(a, b);
    if (rest != C(0)) return (rest < C(0)) != (b < C(0)) ? C(rest + b) : rest;
    if constexpr (IS_WHOLE<C>) return C(0); else return copysign(rest, b);
}
// floor(a / b): of floats from the remainder, as in CPython and NumPy.
template <typename C>
__device__ inline C floor_quotient(C a, C b) {
    if constexpr (IS_WHOLE<C>) {
        if (b == C(0)) return C(0);
        if (b + C(1) == C(0) && C(-1) < C(0)) return C(C(0) - a);   // the smallest one wraps
        return C(a / b - C(a % b != C(0) && (a < C(0)) != (b < C(0))));
    } else {
        if (b == C(0)) return a / b;
        const C rest = fmod(a, b);
        const C quotient = (a - rest) / b - C(rest != C(0) && (rest < C(0)) != (b < C(0)));
        if (quotient == C(0)) return copysign(C(0), a / b);
        const C whole = floor(quotient);
        return quotient - whole > C(0.5) ? whole + C(1) : whole;
    }
}
template <typename C>
__device__ inline C logaddexp(C a, C b) {
    if (a == b) return a + C(0.6931471805599453);   // also of two infinities
    return maximum(a, b) + log1p(exp(-absolute(a - b)));
}

template <typename A> __device__ inline long long int64(A a) { return (long long)a; }
template <typename C> __device__ inline C bitwise_and(C a, C b) { return a & b; }
template <typename C> __device__ inline C bitwise_or(C a, C b) { return a | b; }
template <typename C> __device__ inline C bitwise_xor(C a, C b) { return a ^ b; }
template <typename C> __device__ inline C invert(C a) { return ~a; }
template <> __device__ inline bool invert(bool a) { return !a; }
// By as many bits as there are or more, or by less than none, all are shifted out, as in NumPy.
template <typename C>
__device__ inline bool within(C b) { return b >= C(0) && b < C(8 * sizeof(C)); }
template <typename C>
__device__ inline C left_shift(C a, C b) { return within(b) ? C(a << b) : C(0); }
template <typename C> __device__ inline C right_shift(C a, C b) {
    return within(b) ? C(a >> b) : a < C(0) ? C(-1) : C(0);
}

template <typename C> __device__ inline C square(C x) { return x * x; }
__device__ inline float power(float a, float b) { return b == 2.f ? a * a : pow(a, b); }
__device__ inline double power(double a, double b) { return b == 2. ? a * a : pow(a, b); }
template <typename C> __device__ inline C power(C a, C b) {   // integers
    if (b < C(0)) return a == C(1) ? C(1) : a + C(1) != C(0) ? C(0) : b & 1 ? C(-1) : C(1);
    C result = 1;
    for (; b > 0; b >>= 1, a *= a)
        if (b & 1) result *= a;
    return result;
}

template <bool FAST = ROUGH, typename C>
__device__ inline C sigmoid(C x) {   // exp may be inf: 1 / inf is right
    if constexpr (FAST) return fast_reciprocal(1.f + fast_exp2(-LOG2_E * x));
    else return C(1) / (C(1) + exp(-x));
}
template <typename C>
__device__ inline C softplus(C x) { return maximum(x, C(0)) + log1p(exp(-absolute(x))); }

// sigmoid(x) and sigmoid(-x); 1 - sigmoid(x) would lose its last digits, which 16 bits do not have.
template <typename C, bool FAST = ROUGH> struct Sigmoids {
    C at, rest;
    __device__ explicit Sigmoids(C x) {
        if constexpr (FAST) {
            at = sigmoid<FAST>(x);
            rest = C(1) - at;
        } else {
            const C small = exp(-absolute(x)), large = C(1) / (C(1) + small);   // smaller, larger
            at = x < C(0) ? small * large : large;
            rest = x < C(0) ? large : small * large;
        }
    }
};
// x * sigmoid(x) and its derivative, which beyond +-800 is 0 and 1 in double too: inf * 0 would be
// NaN. One fast sigmoid does for both: the bound changes no bits of it.
template <typename C, bool FAST = ROUGH> struct Silu {
    C value, derivative;
    __device__ explicit Silu(C x) {
        const C bound = minimum(maximum(x, C(-800)), C(800));
        const Sigmoids<C, FAST> s(bound);
        value = x * (FAST ? s.at : sigmoid<FAST>(x));
        derivative = s.at * (C(1) + bound * s.rest);
    }
};
template <typename C>
__device__ inline C silu_derivative(C x) { return Silu<C>(x).derivative; }

// (1 + tanh(u)) / 2 is sigmoid(2 u), which loses no digits where tanh is close to -1.
template <typename C> __device__ inline C gelu_tanh_cdf(C x) {
    const C scale = C(1.5957691216057308), cube = C(0.044715);   // 2 sqrt(2 / pi)
    return sigmoid(x * (scale + scale * cube * x * x));
}
template <typename C> __device__ inline C gelu_tanh(C x) { return x * gelu_tanh_cdf(x); }
// Beyond +-30 it is 0 and 1 in double too, and inf * 0 would be NaN.
template <typename C> __device__ inline C gelu_tanh_derivative(C x) {
    const C scale = C(1.5957691216057308), cube = C(0.044715);
    const C bound = minimum(maximum(x, C(-30)), C(30)), square = bound * bound;
    const Sigmoids<C> s(bound * (scale + scale * cube * square));
    return s.at * (C(1) + bound * s.rest * (scale + C(3) * cube * scale * square));
}

template <typename C> __device__ inline C normal_pdf(C x) {
    if constexpr (ROUGH) return 0.3989422804f * fast_exp2(-0.5f * LOG2_E * x * x);
    else return C(0.3989422804014327) * exp(C(-0.5) * x * x);
}
// The normal CDF. Source of the approximation, good to 1.5e-7:
// Abramowitz & Stegun 1964, "Handbook of mathematical functions", 7.1.26.
template <typename C> __device__ inline C normal_cdf(C x) {
    if constexpr (ROUGH) {
        const float t = fast_reciprocal(1.f + 0.3275911f * 0.70710678f * absolute(x));
        const float sum = t * (0.254829592f + t * (-0.284496736f + t * (1.421413741f
            + t * (-1.453152027f + t * 1.061405429f))));
        const float tail = 1.2533141373f * sum * normal_pdf(x);   // beyond |x|
        return x < 0.f ? tail : 1.f - tail;
    } else {
        return C(0.5) * erfc(C(-0.7071067811865476) * x);
    }
}

// Round N results and write them in one access.
template <typename T, int N>
__device__ inline void store_rounded(T* p, const Compute<T> (&values)[N]) {
    if constexpr (sizeof(T) == 2 && sizeof(Compute<T>) == 4 && N == VECTOR<T>) {
        store_values(p, values);
    } else {
        Vec<T, N> v;
        #pragma unroll
        for (int j = 0; j < N; ++j) v.values[j] = from_compute<T>(values[j]);
        store(p, v);
    }
}
