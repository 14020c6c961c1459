// Operations of reduce.cu on values, accumulators and results.
#pragma once
#include "exp.cuh"
#include "reduce.cuh"
#include "types.cuh"

// Accumulators of sums: 64 bits for integers, as NumPy.
template <typename T> struct SumType { using type = Compute<T>; };
template <> struct SumType<bool> { using type = long long; };
template <> struct SumType<int> { using type = long long; };

template <> __device__ inline int infinity<int>() { return 0x7fffffff; }
template <> __device__ inline long long infinity<long long>() { return 0x7fffffffffffffffll; }
template <> __device__ inline unsigned long long infinity<unsigned long long>() { return ~0ull; }
// The largest and smallest value of an accumulator: what max and min start from.
template <typename A> __device__ inline A highest() { return infinity<A>(); }
// ~x is -x - 1 for integers, 0 for the unsigned
template <typename A> __device__ inline A lowest() {
    if constexpr (A(0.5) == A(0)) return ~infinity<A>();
    else return -infinity<A>();
}

// An operation names its types (In, Acc, Out), the accumulator to start from (identity), how values
// and accumulators become one (absorb, combine), how those of neighbouring lanes become one
// (across) and how it becomes a result (finish). The values that absorb takes stand at
// place<RUN>(i, first, jump) of the axis: RUN of them side by side at first, the next at
// first + jump, and so on; several come in ascending order, call after call. Fold is the usual
// case: each value becomes an accumulator by itself (lift).
template <int RUN> __device__ inline long long place(int i, long long first, long long jump) {
    return first + i / RUN * jump + i % RUN;
}

template <typename Op, typename T, typename A, typename Y>
struct Fold {
    using In = T;
    using Acc = A;
    using Out = Y;
    __device__ static Acc lift(T x, long long) { return Acc(x); }
    template <int RUN, int N>
    __device__ static void absorb(Acc& acc, const In (&x)[N], long long first, long long jump) {
        #pragma unroll
        for (int i = 0; i < N; ++i)
            acc = Op::combine(acc, Op::lift(x[i], place<RUN>(i, first, jump)));
    }
    __device__ static Acc across(Acc acc, int lanes) {
        return warp_reduce(acc, [](Acc a, Acc b) { return Op::combine(a, b); }, lanes);
    }
    __device__ static Out finish(Acc acc, double) { return Out(acc); }
};

// The operations that add.
template <typename Op, typename T, typename A, typename Y>
struct Additive : Fold<Op, T, A, Y> {
    __device__ static A identity() { return 0; }
    __device__ static A combine(A a, A b) { return a + b; }
};

template <typename T, typename Y = T, typename A = typename SumType<T>::type>
struct Sum : Additive<Sum<T, Y, A>, T, A, Y> {};

template <typename T>
struct Mean : Sum<T> {
    __device__ static T finish(Compute<T> acc, double count) { return T(acc / Compute<T>(count)); }
};

template <typename T>
struct Prod : Fold<Prod<T>, T, Compute<T>, T> {
    using A = Compute<T>;
    __device__ static A identity() { return 1; }
    __device__ static A combine(A a, A b) { return a * b; }
};

// NaN wins, as in NumPy: no comparison with it is true, so x != x asks for it.
template <typename T, bool LEAST>
struct Extreme : Fold<Extreme<T, LEAST>, T, Compute<T>, T> {
    using A = Compute<T>;
    __device__ static A identity() { return LEAST ? highest<A>() : lowest<A>(); }
    __device__ static A combine(A a, A b) { return (LEAST ? b < a : b > a) || b != b ? b : a; }
};
template <typename T> struct Max : Extreme<T, false> {};
template <typename T> struct Min : Extreme<T, true> {};

template <typename A>
struct ValueIndex {
    A value;
    long long index;
};

// The best of two rows of values at once, in one register, the numbers of the best beside each
// other in another: 3 instructions for two values. NaN stays in `best`.
template <bool LEAST, typename T>
struct BestPair {
    typename PairType<T>::type best;
    unsigned int numbers;
    __device__ void take(T x, T y, unsigned int these) {
        const typename PairType<T>::type pair = {x, y};
        const unsigned int mask = LEAST ? __hlt2_mask(pair, best) : __hgt2_mask(pair, best);
        best = LEAST ? __hmin2_nan(best, pair) : __hmax2_nan(best, pair);
        numbers = (mask & these) | (~mask & numbers);
    }
};

// Numbers in the order of values, in which the best is the highest and NaN beats all; -0 is 0.
template <bool LEAST> __device__ inline int ordered_bits(float x) {
    if (x != x) return 0x7fffffff;
    const int bits = __float_as_int(x + 0.0f), ascending = bits < 0 ? bits ^ 0x7fffffff : bits;
    return LEAST ? ~ascending : ascending;
}
template <bool LEAST> __device__ inline int ordered_bits(int x) { return LEAST ? ~x : x; }

// The first place of the largest (or least) value, or of the first NaN. The worst of all values is
// at no place: where nothing is better, the first place is 0.
template <typename T, bool LEAST>
struct FirstBest : Fold<FirstBest<T, LEAST>, T, ValueIndex<Compute<T>>, long long> {
    using A = Compute<T>;
    static constexpr long long NOWHERE = 0x7fffffffffffffffll;
    __device__ static bool beats(A b, A a) { return LEAST ? b < a : b > a; }
    __device__ static ValueIndex<A> identity() {
        return {LEAST ? highest<A>() : lowest<A>(), NOWHERE};
    }
    __device__ static ValueIndex<A> lift(T x, long long index) {
        const A value = A(x);
        return {value, value == identity().value ? NOWHERE : index};
    }
    __device__ static ValueIndex<A> combine(ValueIndex<A> a, ValueIndex<A> b) {
        const bool a_nan = a.value != a.value, b_nan = b.value != b.value;
        const bool better = beats(b.value, a.value) || (b_nan && !a_nan);
        const bool equal = b.value == a.value || (b_nan && a_nan);
        return better || (equal && b.index < a.index) ? b : a;
    }
    // The best of the few is found first, by their numbers: places are wide, and NaN is rare.
    template <int RUN, int N>
    __device__ static void absorb(ValueIndex<A>& acc, const T (&x)[N], long long first,
                                  long long jump) {
        if constexpr (N > 1) {
            int number;
            const A best = best_of(x, number);
            if (best == best) {
                if (beats(best, acc.value)) acc = {best, place<RUN>(number, first, jump)};
                return;
            }
        }
        #pragma unroll
        for (int i = 0; i < N; ++i) acc = combine(acc, lift(x[i], place<RUN>(i, first, jump)));
    }
    __device__ static ValueIndex<A> across(ValueIndex<A> acc, int lanes) {
        if constexpr (sizeof(A) == 4) {
            if (lanes == 32) {   // two instructions; a warp's rows are short: places fit 32 bits
                const int own = ordered_bits<LEAST>(acc.value),
                          best = __reduce_max_sync(0xffffffff, own);
                const unsigned int place = own == best ? acc.index : 0xffffffffu;
                const unsigned int first = __reduce_min_sync(0xffffffff, place);
                const unsigned int winners =
                    __ballot_sync(0xffffffff, own == best && place == first);
                const A value = __shfl_sync(0xffffffff, acc.value, __ffs(winners) - 1);
                return {value, first == 0xffffffffu ? NOWHERE : first};
            }
        }
        return warp_reduce(
            acc, [](ValueIndex<A> a, ValueIndex<A> b) { return combine(a, b); }, lanes);
    }
    // The first of the best and its number; NaN where there is one.
    template <int N> __device__ static A best_of(const T (&x)[N], int& number) {
        if constexpr (sizeof(T) == 2 && N % 2 == 0) {
            BestPair<LEAST, T> pairs = {{x[0], x[1]}, 0x00010000u};
            #pragma unroll
            for (int i = 2; i < N; i += 2) pairs.take(x[i], x[i + 1], i | (i + 1) << 16);
            const A even = A(pairs.best.x), odd = A(pairs.best.y);
            const int low = pairs.numbers & 0xffff, high = pairs.numbers >> 16;
            const bool odd_wins = beats(odd, even) || (odd == even && high < low);
            number = odd_wins ? high : low;
            return odd_wins || odd != odd ? odd : even;
        } else {
            A best = A(x[0]), nan = best;
            number = 0;
            #pragma unroll
            for (int i = 1; i < N; ++i) {
                const A value = A(x[i]);
                nan = value == value ? nan : value;
                if (beats(value, best)) {
                    best = value;
                    number = i;
                }
            }
            return nan == nan ? best : nan;
        }
    }
    // The best of columns side by side, two at a time: of every step-th row of p from r on, which
    // stand at begin + r and so on. Returns the row that comes next; where there is NaN, r as it
    // was.
    template <int WIDTH>
    __device__ static int begin_columns(ValueIndex<A> (&acc)[WIDTH], const T* p, long long inner,
                                        int r, int count, int step, long long begin) {
        constexpr int MOST = 65536, TOGETHER = 4;   // rows: numbered in 16 bits; loads in flight
        const int rows = min((count - r + step - 1) / step, MOST) / TOGETHER * TOGETHER;
        const T worst = from_compute<T>(identity().value);
        BestPair<LEAST, T> pairs[WIDTH / 2];
        #pragma unroll
        for (auto& pair : pairs) pair = {{worst, worst}, 0};
        for (int i = 0; i < rows; i += TOGETHER) {
            Vec<T, WIDTH> some[TOGETHER];
            #pragma unroll
            for (int k = 0; k < TOGETHER; ++k)
                some[k] = load<WIDTH>(p + (r + (i + k) * step) * inner);
            #pragma unroll
            for (int k = 0; k < TOGETHER; ++k)
                #pragma unroll
                for (int j = 0; j < WIDTH; j += 2)
                    pairs[j / 2].take(some[k].values[j], some[k].values[j + 1], (i + k) * 0x10001u);
        }
        bool no_nan = true;
        #pragma unroll
        for (int j = 0; j < WIDTH; ++j) {
            const A best = A(j % 2 ? pairs[j / 2].best.y : pairs[j / 2].best.x);
            const int row = r + (pairs[j / 2].numbers >> j % 2 * 16 & 0xffff) * step;
            no_nan = no_nan && best == best;
            acc[j] = {best, best == identity().value ? NOWHERE : begin + row};
        }
        if (no_nan) return r + rows * step;
        #pragma unroll
        for (auto& each : acc) each = identity();
        return r;
    }
    __device__ static long long finish(ValueIndex<A> best, double) {
        return best.index == NOWHERE ? 0 : best.index;
    }
};
template <typename T> struct ArgMax : FirstBest<T, false> {};
template <typename T> struct ArgMin : FirstBest<T, true> {};

// Whether an operation takes the columns of wide rows two at a time.
template <typename Op> constexpr bool PAIRS_COLUMNS = false;
template <> constexpr bool PAIRS_COLUMNS<ArgMax<__half>> = true;
template <> constexpr bool PAIRS_COLUMNS<ArgMin<__half>> = true;
template <> constexpr bool PAIRS_COLUMNS<ArgMax<__nv_bfloat16>> = true;
template <> constexpr bool PAIRS_COLUMNS<ArgMin<__nv_bfloat16>> = true;

template <typename T>
struct Any : Fold<Any<T>, T, int, bool> {
    __device__ static int identity() { return 0; }
    __device__ static int combine(int a, int b) { return a | b; }
};

template <typename T>
struct All : Fold<All<T>, T, int, bool> {
    __device__ static int identity() { return 1; }
    __device__ static int combine(int a, int b) { return a & b; }
};

// The three norms, unrounded: the square root of a sum of squares, a sum and a maximum of |x|.
template <typename T>
struct NormTwo : Additive<NormTwo<T>, T, Compute<T>, Compute<T>> {
    using A = Compute<T>;
    __device__ static A lift(T x, long long) { return A(x) * A(x); }
    __device__ static A finish(A acc, double) { return sqrt(acc); }
};

// For the norm of all gradients: in double, so that neither their number nor their size matters.
template <typename T>
struct SumOfSquares : Additive<SumOfSquares<T>, T, double, double> {
    __device__ static double lift(T x, long long) {
        return double(Compute<T>(x)) * double(Compute<T>(x));
    }
};

template <typename T>
struct NormOne : Additive<NormOne<T>, T, Compute<T>, Compute<T>> {
    __device__ static Compute<T> lift(T x, long long) { return abs(Compute<T>(x)); }
};

template <typename T>
struct NormMax : Fold<NormMax<T>, T, Compute<T>, Compute<T>> {
    using A = Compute<T>;
    __device__ static A identity() { return 0; }
    __device__ static A lift(T x, long long) { return abs(A(x)); }
    __device__ static A combine(A a, A b) { return b > a || b != b ? b : a; }
};

__device__ inline double quotient(double a, double b) { return a / b; }
// 2 ulp, a tenth of the time
__device__ inline float quotient(float a, float b) { return __fdividef(a, b); }

// The variance, unrounded, from one read of x: Moments of a few values at a time, merged.
template <typename T>
struct Var {
    using In = T;
    using A = Compute<T>;
    using Acc = Moments<A>;
    using Out = A;
    __device__ static Acc identity() { return {0, 0, 0}; }
    template <int RUN, int N>
    __device__ static void absorb(Acc& acc, const In (&x)[N], long long, long long) {
        Acc own = {A(N), 0, 0};
        #pragma unroll
        for (int i = 0; i < N; ++i) own.mean += A(x[i]);
        own.mean /= A(N);
        #pragma unroll
        for (int i = 0; i < N; ++i) own.squares += (A(x[i]) - own.mean) * (A(x[i]) - own.mean);
        acc = combine(acc, own);
    }
    __device__ static Acc combine(Acc a, Acc b) {
        const A count = a.count + b.count, delta = b.mean - a.mean;
        const A fraction = count > 0 ? quotient(b.count, count) : A(0);
        return {count, a.mean + delta * fraction,
                a.squares + b.squares + delta * delta * a.count * fraction};
    }
    // Combine all at once: the mean of all, then what the means of the lanes are off by.
    __device__ static Acc across(Acc acc, int lanes) {
        const A count = warp_sum(acc.count, lanes);
        const A mean = warp_sum(acc.count * acc.mean, lanes) / count, delta = acc.mean - mean;
        return {count, mean, warp_sum(acc.squares + acc.count * delta * delta, lanes)};
    }
    __device__ static Out finish(Acc acc, double divisor) { return acc.squares / A(divisor); }
};

// log(sum(exp(x))), unrounded, from one read of x with a running maximum.
template <typename T>
struct LogSumExp {
    using In = T;
    using A = Compute<T>;
    using Acc = OnlineSoftmax<A>;
    using Out = A;
    // An infinite maximum is not subtracted: inf - inf is NaN.
    __device__ static A shift(A maximum) { return abs(maximum) < highest<A>() ? maximum : A(0); }
    __device__ static Acc identity() { return {lowest<A>(), 0}; }
    template <int RUN, int N>
    __device__ static void absorb(Acc& acc, const In (&x)[N], long long, long long) {
        A maximum = acc.maximum, total = 0;
        #pragma unroll
        for (int i = 0; i < N; ++i) maximum = A(x[i]) > maximum ? A(x[i]) : maximum;
        const A finite = shift(maximum);
        #pragma unroll
        for (int i = 0; i < N; ++i) total += exp_less<T>(A(x[i]), finite);
        acc = {maximum, acc.total * exp_less<T>(acc.maximum, finite) + total};
    }
    __device__ static Acc combine(Acc a, Acc b) {
        const A maximum = b.maximum > a.maximum ? b.maximum : a.maximum, finite = shift(maximum);
        return {maximum, a.total * exp_less<T>(a.maximum, finite) +
                             b.total * exp_less<T>(b.maximum, finite)};
    }
    __device__ static Acc across(Acc acc, int lanes) {
        const A maximum = warp_reduce(acc.maximum, [](A a, A b) { return b > a ? b : a; }, lanes);
        return {maximum, warp_sum(acc.total * exp_less<T>(acc.maximum, shift(maximum)), lanes)};
    }
    __device__ static Out finish(Acc acc, double) { return shift(acc.maximum) + log(acc.total); }
};

// The first of two launches: leaves accumulators.
template <typename Op>
struct First : Op {
    using Out = typename Op::Acc;
    __device__ static Out finish(Out acc, double) { return acc; }
};

template <typename Op> constexpr bool PAIRS_COLUMNS<First<Op>> = PAIRS_COLUMNS<Op>;

// The second of two launches: takes accumulators.
template <typename Op>
struct Last : Op {
    using In = typename Op::Acc;
    template <int RUN, int N>
    __device__ static void absorb(In& acc, const In (&x)[N], long long, long long) {
        #pragma unroll
        for (int i = 0; i < N; ++i) acc = Op::combine(acc, x[i]);
    }
};

// Whether an operation, where its parameter says so, adds its result to what is there.
template <typename Op> constexpr bool MAY_ADD = false;
template <typename T, typename Y, typename A> constexpr bool MAY_ADD<Sum<T, Y, A>> = true;
template <typename Op> constexpr bool MAY_ADD<Last<Op>> = MAY_ADD<Op>;
