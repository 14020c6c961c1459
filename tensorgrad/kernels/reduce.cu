// Reductions of a contiguous array seen as (outer, length, inner) over its middle axis.
//
// Each input is read once (sizeof(In) bytes an element), each result written once, with =.
//   reduce_rows_warp      inner == 1, short rows: 1 to 32 lanes a row
//   reduce_rows_block     inner == 1, long rows: one block a row, or a chunk of a row
//   reduce_columns        inner > 1: threads side by side along inner, and down the axis
//   scan_rows             running sums of rows
// Where there are too few results to fill the GPU, the axis is cut into `splits` chunks: a first
// launch with First<Op> writes one accumulator a chunk, a second with Last<Op> combines these. The
// order of all additions follows from the shape alone; no atomics.
//
// 16-bit types accumulate in float, sums of integers in 64 bits. Launched by ops/reduce_cuda.py.
//
// where: FLOAT = double | float | __half | __nv_bfloat16
// where: SUM = Sum<{{FLOAT} | __half, float | __nv_bfloat16, float | long long | int, long long |
//     bool, long long}>
// where: OP = {SUM} | {Any | All}<bool> | Prod<{{FLOAT} | long long}> |
//     {Max | Min | ArgMax | ArgMin}<{{FLOAT} | long long | unsigned long long | int}> |
//     {Mean | Var | LogSumExp | NormOne | NormTwo | NormMax}<{FLOAT}>
// instantiate: {reduce_rows_warp | reduce_rows_block}<{OP}>
// instantiate: reduce_rows_block<{First | Last}<{OP}>>
// instantiate: reduce_columns<{{OP} | First<{OP}>}, {true | false}>
// instantiate: reduce_columns<Last<{OP}>, false>
// instantiate: {reduce_rows_warp | reduce_rows_block}<SumOfSquares<{float | double}>>
// instantiate: reduce_rows_block<{First | Last}<SumOfSquares<{float | double}>>>
// instantiate: scan_rows<{{SUM} | First<Last<{SUM}>>}>
#include "reduce.cuh"
#include "types.cuh"

constexpr int UNROLL = 4;   // independent loads in flight for each thread

// Accumulators of sums: 64 bits for integers, as NumPy.
template <typename T> struct SumType { using type = Compute<T>; };
template <> struct SumType<bool> { using type = long long; };
template <> struct SumType<int> { using type = long long; };

__device__ inline float infinity(float) { return __int_as_float(0x7f800000); }
__device__ inline double infinity(double) { return __longlong_as_double(0x7ff0000000000000ll); }
__device__ inline int infinity(int) { return 0x7fffffff; }
__device__ inline long long infinity(long long) { return 0x7fffffffffffffffll; }
__device__ inline unsigned long long infinity(unsigned long long) { return ~0ull; }
// The largest and smallest value of an accumulator: what max and min start from.
template <typename A> __device__ inline A highest() { return infinity(A()); }
template <typename A> __device__ inline A lowest() {   // ~x is -x - 1 for integers, 0 for the unsigned
    if constexpr (A(0.5) == A(0)) return ~infinity(A());
    else return -infinity(A());
}

// An operation names its types (In, Acc, Out), the accumulator to start from (identity), how values
// and accumulators join one (absorb, combine) and how it becomes a result (finish). The values that
// absorb takes stand at the places first, first + step, ... of the axis. Fold is the usual case:
// each value becomes an accumulator by itself (lift).
template <typename Op, typename T, typename A, typename Y>
struct Fold {
    using In = T;
    using Acc = A;
    using Out = Y;
    template <int N>
    __device__ static void absorb(Acc& acc, const In (&x)[N], long long first, long long step) {
        #pragma unroll
        for (int i = 0; i < N; ++i) acc = Op::combine(acc, Op::lift(x[i], first + i * step));
    }
    __device__ static Out finish(Acc acc, double) { return Out(acc); }
};

template <typename T, typename Y = T, typename A = typename SumType<T>::type>
struct Sum : Fold<Sum<T, Y, A>, T, A, Y> {
    __device__ static A identity() { return 0; }
    __device__ static A lift(T x, long long) { return A(x); }
    __device__ static A combine(A a, A b) { return a + b; }
};

template <typename T>
struct Mean : Sum<T> {
    __device__ static T finish(Compute<T> acc, double count) { return T(acc / Compute<T>(count)); }
};

template <typename T>
struct Prod : Fold<Prod<T>, T, Compute<T>, T> {
    using A = Compute<T>;
    __device__ static A identity() { return 1; }
    __device__ static A lift(T x, long long) { return A(x); }
    __device__ static A combine(A a, A b) { return a * b; }
};

// NaN wins, as in NumPy: no comparison with it is true, so x != x asks for it.
template <typename T>
struct Max : Fold<Max<T>, T, Compute<T>, T> {
    using A = Compute<T>;
    __device__ static A identity() { return lowest<A>(); }
    __device__ static A lift(T x, long long) { return A(x); }
    __device__ static A combine(A a, A b) { return b > a || b != b ? b : a; }
};

template <typename T>
struct Min : Fold<Min<T>, T, Compute<T>, T> {
    using A = Compute<T>;
    __device__ static A identity() { return highest<A>(); }
    __device__ static A lift(T x, long long) { return A(x); }
    __device__ static A combine(A a, A b) { return b < a || b != b ? b : a; }
};

template <typename A>
struct Place {
    A value;
    long long index;
};

// The first place of the largest (or least) value, or of the first NaN.
template <typename T, bool LEAST>
struct FirstBest : Fold<FirstBest<T, LEAST>, T, Place<Compute<T>>, long long> {
    using A = Compute<T>;
    __device__ static bool beats(A b, A a) { return LEAST ? b < a : b > a; }
    __device__ static Place<A> identity() {
        return {LEAST ? highest<A>() : lowest<A>(), 0x7fffffffffffffffll};
    }
    __device__ static Place<A> lift(T x, long long index) { return {A(x), index}; }
    __device__ static Place<A> combine(Place<A> a, Place<A> b) {
        const bool a_nan = a.value != a.value, b_nan = b.value != b.value;
        const bool better = beats(b.value, a.value) || (b_nan && !a_nan);
        const bool equal = b.value == a.value || (b_nan && a_nan);
        return better || (equal && b.index < a.index) ? b : a;
    }
    // The best of the few is found first, by their numbers: places are wide, and NaN is rare.
    template <int N>
    __device__ static void absorb(Place<A>& acc, const T (&x)[N], long long first, long long step) {
        A best = A(x[0]);
        int place = 0;
        bool nan = best != best;
        #pragma unroll
        for (int i = 1; i < N; ++i) {
            const A value = A(x[i]);
            nan |= value != value;
            if (beats(value, best)) {
                best = value;
                place = i;
            }
        }
        if (!nan) {
            acc = combine(acc, {best, first + place * step});
            return;
        }
        #pragma unroll
        for (int i = 0; i < N; ++i) acc = combine(acc, lift(x[i], first + i * step));
    }
    __device__ static long long finish(Place<A> place, double) { return place.index; }
};
template <typename T> struct ArgMax : FirstBest<T, false> {};
template <typename T> struct ArgMin : FirstBest<T, true> {};

template <typename T>
struct Any : Fold<Any<T>, T, int, bool> {
    __device__ static int identity() { return 0; }
    __device__ static int lift(T x, long long) { return x; }
    __device__ static int combine(int a, int b) { return a | b; }
};

template <typename T>
struct All : Fold<All<T>, T, int, bool> {
    __device__ static int identity() { return 1; }
    __device__ static int lift(T x, long long) { return x; }
    __device__ static int combine(int a, int b) { return a & b; }
};

// The three norms, unrounded: the square root of a sum of squares, a sum and a maximum of |x|.
template <typename T>
struct NormTwo : Fold<NormTwo<T>, T, Compute<T>, Compute<T>> {
    using A = Compute<T>;
    __device__ static A identity() { return 0; }
    __device__ static A lift(T x, long long) { return A(x) * A(x); }
    __device__ static A combine(A a, A b) { return a + b; }
    __device__ static A finish(A acc, double) { return sqrt(acc); }
};

// For the norm of all gradients: in double, so that neither their number nor their size matters.
template <typename T>
struct SumOfSquares : Fold<SumOfSquares<T>, T, double, double> {
    __device__ static double identity() { return 0; }
    __device__ static double lift(T x, long long) { return double(x) * double(x); }
    __device__ static double combine(double a, double b) { return a + b; }
};

template <typename T>
struct NormOne : Fold<NormOne<T>, T, Compute<T>, Compute<T>> {
    using A = Compute<T>;
    __device__ static A identity() { return 0; }
    __device__ static A lift(T x, long long) { return abs(A(x)); }
    __device__ static A combine(A a, A b) { return a + b; }
};

template <typename T>
struct NormMax : Fold<NormMax<T>, T, Compute<T>, Compute<T>> {
    using A = Compute<T>;
    __device__ static A identity() { return 0; }
    __device__ static A lift(T x, long long) { return abs(A(x)); }
    __device__ static A combine(A a, A b) { return b > a || b != b ? b : a; }
};

__device__ inline double quotient(double a, double b) { return a / b; }
__device__ inline float quotient(float a, float b) { return __fdividef(a, b); }   // 2 ulp, a tenth of the time

template <typename A>
struct Moments {
    A count, mean, squares;   // squares: the sum of (x - mean)^2
};

// The variance, unrounded, from one read of x: moments of a few values at a time, joined by
// Chan et al. 1979 (Stanford STAN-CS-79-773), eq. 2.1. Nothing cancels where mean >> deviation.
template <typename T>
struct Var {
    using In = T;
    using A = Compute<T>;
    using Acc = Moments<A>;
    using Out = A;
    __device__ static Acc identity() { return {0, 0, 0}; }
    template <int N>
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
        const A share = count > 0 ? quotient(b.count, count) : A(0);
        return {count, a.mean + delta * share, a.squares + b.squares + delta * delta * a.count * share};
    }
    __device__ static Out finish(Acc acc, double divisor) { return acc.squares / A(divisor); }
};

template <typename A>
struct Peak {
    A peak, total;   // total: the sum of exp(x - shift(peak))
};

// log(sum(exp(x))), unrounded, from one read of x with a running maximum.
template <typename T>
struct LogSumExp {
    using In = T;
    using A = Compute<T>;
    using Acc = Peak<A>;
    using Out = A;
    // An infinite maximum is not subtracted: inf - inf is NaN.
    __device__ static A shift(A peak) { return abs(peak) < highest<A>() ? peak : A(0); }
    __device__ static A power(A x) {   // to the accuracy of T
        if constexpr (sizeof(T) == 2) return __expf(x);
        else return exp(x);
    }
    __device__ static Acc identity() { return {lowest<A>(), 0}; }
    template <int N>
    __device__ static void absorb(Acc& acc, const In (&x)[N], long long, long long) {
        A peak = acc.peak, total = 0;
        #pragma unroll
        for (int i = 0; i < N; ++i) peak = A(x[i]) > peak ? A(x[i]) : peak;
        #pragma unroll
        for (int i = 0; i < N; ++i) total += power(A(x[i]) - shift(peak));
        acc = {peak, acc.total * power(acc.peak - shift(peak)) + total};
    }
    __device__ static Acc combine(Acc a, Acc b) {
        const A peak = b.peak > a.peak ? b.peak : a.peak;
        return {peak, a.total * power(a.peak - shift(peak)) + b.total * power(b.peak - shift(peak))};
    }
    __device__ static Out finish(Acc acc, double) { return shift(acc.peak) + log(acc.total); }
};

// The first of two launches: leaves accumulators.
template <typename Op>
struct First : Op {
    using Out = typename Op::Acc;
    __device__ static Out finish(Out acc, double) { return acc; }
};

// The second of two launches: takes accumulators.
template <typename Op>
struct Last : Op {
    using In = typename Op::Acc;
    template <int N>
    __device__ static void absorb(In& acc, const In (&x)[N], long long, long long) {
        #pragma unroll
        for (int i = 0; i < N; ++i) acc = Op::combine(acc, x[i]);
    }
};

// Blocks that a multiprocessor shall hold at once. Left to itself, ptxas spills to fit more.
template <typename Op> constexpr int BLOCKS = sizeof(typename Op::Acc) < 16 ? 3 : 2;

// Absorb count values at p, shared among `threads`, by 16-byte loads wherever p is aligned.
template <typename Op>
__device__ inline void absorb_row(typename Op::Acc& acc, const typename Op::In* p, int count,
                                  int thread, int threads, long long first) {
    using In = typename Op::In;
    constexpr int WIDTH = VECTOR<In>;
    const int past = int(reinterpret_cast<size_t>(p) / sizeof(In) % WIDTH);
    const int head = min(count, (WIDTH - past) % WIDTH);
    const int vectors = (count - head) / WIDTH;
    int v = thread;
    for (; v + (UNROLL - 1) * threads < vectors; v += UNROLL * threads) {
        Vec<In> x[UNROLL];
        #pragma unroll
        for (int u = 0; u < UNROLL; ++u) x[u] = load<WIDTH>(p + head + (v + u * threads) * WIDTH);
        #pragma unroll
        for (int u = 0; u < UNROLL; ++u)
            Op::absorb(acc, x[u].values, first + head + (v + u * threads) * WIDTH, 1);
    }
    for (; v < vectors; v += threads) {
        const Vec<In> x = load<WIDTH>(p + head + v * WIDTH);
        Op::absorb(acc, x.values, first + head + v * WIDTH, 1);
    }
    for (int i = thread; i < count - vectors * WIDTH; i += threads) {   // before and after the vectors
        const int place = i < head ? i : i + vectors * WIDTH;
        const In x[1] = {p[place]};
        Op::absorb(acc, x, first + place, 1);
    }
}

// y: (rows,). x: (rows, length). 1 << log_lanes lanes of a warp a row.
template <typename Op>
__global__ void __launch_bounds__(256, BLOCKS<Op>)
reduce_rows_warp(typename Op::Out* __restrict__ y, const typename Op::In* __restrict__ x,
                 long long rows, int length, int log_lanes, double parameter) {
    using Acc = typename Op::Acc;
    const int lanes = 1 << log_lanes;
    const long long row = (blockIdx.x * 256ll + threadIdx.x) >> log_lanes;
    const int lane = threadIdx.x & (lanes - 1);
    Acc acc = Op::identity();
    if (row < rows) absorb_row<Op>(acc, x + row * length, length, lane, lanes, 0);
    acc = warp_reduce(acc, [](Acc a, Acc b) { return Op::combine(a, b); }, lanes);
    if (row < rows && lane == 0) y[row] = Op::finish(acc, parameter);
}

// y: (rows, splits). x: (rows, length), cut into splits chunks. One block of 256 a chunk.
template <typename Op>
__global__ void __launch_bounds__(256, BLOCKS<Op>)
reduce_rows_block(typename Op::Out* __restrict__ y, const typename Op::In* __restrict__ x,
                  long long length, int chunk, int splits, double parameter) {
    using Acc = typename Op::Acc;
    const long long row = blockIdx.x / splits;
    const long long begin = blockIdx.x % splits * (long long)chunk;
    const int count = int(min((long long)chunk, length - begin));
    Acc acc = Op::identity();
    absorb_row<Op>(acc, x + row * length + begin, count, threadIdx.x, 256, begin);
    acc = block_reduce(acc, Op::identity(), [](Acc a, Acc b) { return Op::combine(a, b); });
    if (threadIdx.x == 0) y[blockIdx.x] = Op::finish(acc, parameter);
}

// y: (outer, splits, inner). x: (outer, length, inner), its axis cut into splits chunks.
// A block is (bx, by, bz), at most 256 threads: bx along inner, each with one column or, where WIDE,
// WIDTH columns of which inner is a multiple; by, a power of two, down the axis; bz along outer.
template <typename Op, bool WIDE>
__global__ void __launch_bounds__(256, BLOCKS<Op>)
reduce_columns(typename Op::Out* __restrict__ y, const typename Op::In* __restrict__ x,
               long long outer, long long length, long long inner, int chunk, int splits, int tiles,
               double parameter) {
    using In = typename Op::In;
    using Acc = typename Op::Acc;
    constexpr int WIDTH = !WIDE ? 1 : VECTOR<In> < 8 ? VECTOR<In> : 8;
    __shared__ Acc shared[WIDTH][256];
    const long long column = ((long long)(blockIdx.x % tiles) * blockDim.x + threadIdx.x) * WIDTH;
    const int split = blockIdx.x / tiles % splits;
    const long long slab = (long long)(blockIdx.x / tiles / splits) * blockDim.z + threadIdx.z;
    const long long begin = split * (long long)chunk;
    const int count = int(min((long long)chunk, length - begin));
    const bool inside = column < inner && slab < outer;
    const int step = blockDim.y;

    Acc acc[WIDTH];
    #pragma unroll
    for (int j = 0; j < WIDTH; ++j) acc[j] = Op::identity();
    if (inside) {
        const In* p = x + (slab * length + begin) * inner + column;
        int r = threadIdx.y;
        for (; r + (UNROLL - 1) * step < count; r += UNROLL * step) {
            Vec<In, WIDTH> rows[UNROLL];
            #pragma unroll
            for (int u = 0; u < UNROLL; ++u) rows[u] = load<WIDTH>(p + (r + u * step) * inner);
            #pragma unroll
            for (int j = 0; j < WIDTH; ++j) {
                In values[UNROLL];
                #pragma unroll
                for (int u = 0; u < UNROLL; ++u) values[u] = rows[u].values[j];
                Op::absorb(acc[j], values, begin + r, step);
            }
        }
        for (; r < count; r += step) {
            const Vec<In, WIDTH> row = load<WIDTH>(p + r * inner);
            #pragma unroll
            for (int j = 0; j < WIDTH; ++j) {
                const In values[1] = {row.values[j]};
                Op::absorb(acc[j], values, begin + r, step);
            }
        }
    }

    const int thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    for (int half = step / 2; half > 0; half /= 2) {   // the upper half hands over to the lower
        if (threadIdx.y >= half && threadIdx.y < 2 * half)
            #pragma unroll
            for (int j = 0; j < WIDTH; ++j) shared[j][thread] = acc[j];
        __syncthreads();
        if (threadIdx.y < half)
            #pragma unroll
            for (int j = 0; j < WIDTH; ++j)
                acc[j] = Op::combine(acc[j], shared[j][thread + half * blockDim.x]);
    }
    if (inside && threadIdx.y == 0) {
        #pragma unroll
        for (int j = 0; j < WIDTH; ++j)
            y[(slab * splits + split) * inner + column + j] = Op::finish(acc[j], parameter);
    }
}

// y, x: (rows, length), cut into splits chunks of which one block each does the running sum.
// totals: (rows, splits), running sums over whole chunks; null where splits == 1.
template <typename Op>
__global__ void __launch_bounds__(256)
scan_rows(typename Op::Out* __restrict__ y, const typename Op::In* __restrict__ x,
          const typename Op::Acc* __restrict__ totals, long long length, int chunk, int splits) {
    using Acc = typename Op::Acc;
    __shared__ Acc sums[8];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const long long row = blockIdx.x / splits;
    const int split = blockIdx.x % splits;
    const long long begin = split * (long long)chunk;
    const int count = int(min((long long)chunk, length - begin));
    x += row * length + begin;
    y += row * length + begin;
    Acc before = split > 0 ? totals[blockIdx.x - 1] : Op::identity();
    for (int base = 0; base < count; base += 256) {
        const int i = base + threadIdx.x;
        Acc acc = Op::identity();
        if (i < count) {
            const typename Op::In value[1] = {x[i]};
            Op::absorb(acc, value, 0, 0);
        }
        #pragma unroll
        for (int offset = 1; offset < 32; offset *= 2) {
            const Acc left = __shfl_up_sync(0xffffffff, acc, offset);
            if (lane >= offset) acc = Op::combine(left, acc);
        }
        if (lane == 31) sums[warp] = acc;
        __syncthreads();
        Acc own = before;
        #pragma unroll
        for (int w = 0; w < 8; ++w) {   // every thread adds up the warps on its left, and all of them
            if (w == warp) own = before;
            before = Op::combine(before, sums[w]);
        }
        if (i < count) y[i] = Op::finish(Op::combine(own, acc), 0);
        __syncthreads();
    }
}
