// Arrays of random numbers. One thread turns one Philox block of four words into 4, 8 or 16
// elements and writes them with =, 16 bytes at a time.
//
// philox.py has the same formulas in NumPy, and both give the same bits: everything is integer
// arithmetic or + - * / sqrt of double, in the same order, and nothing is contracted to fma.
//
// The naive kernel of random_uniform in [0, 1), a thread for element i of those that one block of
// random bits makes several of:
//
//   const Bits bits = philox(seed, draw, stream, i / LANES);
//   y[i] = lane<LANES>(bits, i % LANES) / pow(2, 256 / LANES);
//
// options: -fmad=false
// where: FLOAT = double | float | __half | __nv_bfloat16
// where: INTEGER = long long | int | short | signed char |
//     unsigned long long | unsigned int | unsigned short | unsigned char
// instantiate: {random_normal | random_uniform | add_gumbel}<{FLOAT}>
// instantiate: random_integers<{INTEGER}>
// instantiate: {random_words | random_bernoulli | random_keep | attention_keep | advance_draw}
#include "attention/keep.cuh"
#include "types.cuh"

// Write value(lane i) to y[i] for the block of LANES elements that is this thread's.
template <int LANES, typename T, typename F>
__device__ inline void fill(T* y, long long size, Word seed, Word draw, Word stream,
                            const Word* offset, F value) {
    const long long block = blockIdx.x * 256ll + threadIdx.x, first = block * LANES;
    if (first >= size) return;
    const Bits bits = philox(seed, draw_number(draw, offset), stream, block);
    constexpr int WIDTH = VECTOR<T> < LANES ? VECTOR<T> : LANES;
    #pragma unroll
    for (int i = 0; i < LANES; i += WIDTH) {
        Vec<T, WIDTH> out;
        #pragma unroll
        for (int j = 0; j < WIDTH; ++j)
            out.values[j] = value(lane<LANES>(bits, i + j), first + i + j);
        if (first + i + WIDTH <= size) {
            store(y + first + i, out);
        } else {
            for (int j = 0; j < WIDTH; ++j)
                if (first + i + j < size) y[first + i + j] = out.values[j];
        }
    }
}

// 16-bit types round twice, through float, as NumPy's conversions do.
template <typename T> __device__ inline T round_to(double x) { return T(float(x)); }
template <> __device__ inline double round_to<double>(double x) { return x; }

// (k + 0.5) / 2^52 - 0.5 for the high 52 bits k of a word: exact, and never at -0.5 or 0.5.
__device__ inline double centered(Word word) {
    const double one_to_two = __longlong_as_double(word >> 12 | 0x3ff0000000000000ull);
    return one_to_two - 1.5 + 1.1102230246251565e-16;
}

// The natural logarithm of a positive normal number, to about one unit in the last place.
__device__ inline double log_same(double x) {
    const long long bits = __double_as_longlong(x);
    const long long exponent = (bits - 0x3fe6a09e667f3bcdll) >> 52;   // exponent of x / sqrt(1/2)
    const double m = __longlong_as_double(bits - exponent * 0x10000000000000ll),
                 e = double(exponent);
    const double s = (m - 1.0) / (m + 1.0), z = s * s;
    double sum = 2.0 / 21.0;
    #pragma unroll
    for (int k = 19; k >= 3; k -= 2) sum = sum * z + 2.0 / k;
    return e * 6.93147180369123816490e-01 +
           (2.0 * s + (s * (z * sum) + e * 1.90821492927058770002e-10));
}

__device__ inline double polynomial(double x, const double (&c)[8]) {
    double sum = c[0];
    #pragma unroll
    for (int i = 1; i < 8; ++i) sum = sum * x + c[i];
    return sum;
}

// The quantile of the standard normal distribution at q + 0.5.
// Source: Wichura 1988, "Algorithm AS 241", Applied Statistics 37(3), PPND16.
__device__ inline double normal_quantile(double q) {
    const double inside = 0.180625 - q * q;   // 0.425^2 - q^2
    if (inside >= 0.0) {
        constexpr double A[8] = {2.5090809287301226727e3, 3.3430575583588128105e4,
                                 6.7265770927008700853e4, 4.5921953931549871457e4,
                                 1.3731693765509461125e4, 1.9715909503065514427e3,
                                 1.3314166789178437745e2, 3.3871328727963666080e0};
        constexpr double B[8] = {5.2264952788528545610e3, 2.8729085735721942674e4,
                                 3.9307895800092710610e4, 2.1213794301586595867e4,
                                 5.3941960214247511077e3, 6.8718700749205790830e2,
                                 4.2313330701600911252e1, 1.0};
        return q * (polynomial(inside, A) / polynomial(inside, B));
    }
    const double r = sqrt(-log_same(0.5 - abs(q)));
    double y;
    if (r <= 5.0) {
        constexpr double C[8] = {7.74545014278341407640e-4, 2.27238449892691845833e-2,
                                 2.41780725177450611770e-1, 1.27045825245236838258e0,
                                 3.64784832476320460504e0, 5.76949722146069140550e0,
                                 4.63033784615654529590e0, 1.42343711074968357734e0};
        constexpr double D[8] = {1.05075007164441684324e-9, 5.47593808499534494600e-4,
                                 1.51986665636164571966e-2, 1.48103976427480074590e-1,
                                 6.89767334985100004550e-1, 1.67638483018380384940e0,
                                 2.05319162663775882187e0, 1.0};
        y = polynomial(r - 1.6, C) / polynomial(r - 1.6, D);
    } else {
        constexpr double E[8] = {2.01033439929228813265e-7, 2.71155556874348757815e-5,
                                 1.24266094738807843860e-3, 2.65321895265761230930e-2,
                                 2.96560571828504891230e-1, 1.78482653991729133580e0,
                                 5.46378491116411436990e0, 6.65790464350110377720e0};
        constexpr double F[8] = {2.04426310338993978564e-15, 1.42151175831644588870e-7,
                                 1.84631831751005468180e-5, 7.86869131145613259100e-4,
                                 1.48753612908506148525e-2, 1.36929880922735805310e-1,
                                 5.99832206555887937690e-1, 1.0};
        y = polynomial(r - 5.0, E) / polynomial(r - 5.0, F);
    }
    return q < 0.0 ? -y : y;
}

template <typename T>
__global__ void __launch_bounds__(256)
random_normal(T* __restrict__ y, long long size, Word seed, Word draw, Word stream,
              const Word* offset, double mean, double std) {
    fill<4>(y, size, seed, draw, stream, offset, [=](Word word, long long) {
        return round_to<T>(mean + std * normal_quantile(centered(word)));
    });
}

// Uses as many bits as T has: 53, 24, 11 or 8. `limit` is the largest value below the upper bound.
template <typename T>
__global__ void __launch_bounds__(256)
random_uniform(T* __restrict__ y, long long size, Word seed, Word draw, Word stream,
               const Word* offset, double low, double width, double limit, int bits) {
    constexpr int LANES = sizeof(T) == 8 ? 4 : 8;
    const double scale = __longlong_as_double((1023ll - bits) << 52);   // 2^-bits
    fill<LANES>(y, size, seed, draw, stream, offset, [=](Word word, long long) {
        const double fraction = double(word >> (256 / LANES - bits)) * scale;
        const T value = round_to<T>(fraction * width + low);
        return double(Compute<T>(value)) > limit ? round_to<T>(limit) : value;
    });
}

// low + (word * range >> 64), modulo 2^64; a range of 2^64 comes as 0.
template <typename T>
__global__ void __launch_bounds__(256)
random_integers(T* __restrict__ y, long long size, Word seed, Word draw, Word stream,
                const Word* offset, Word low, Word range) {
    fill<4>(y, size, seed, draw, stream, offset, [=](Word word, long long) {
        return T(low + (range == 0 ? word : __umul64hi(word, range)));
    });
}

__global__ void __launch_bounds__(256)
random_words(Word* __restrict__ y, long long size, Word seed, Word draw, Word stream,
             const Word* offset) {
    fill<4>(y, size, seed, draw, stream, offset, [](Word word, long long) { return word; });
}

// True with probability threshold / 2^32.
__global__ void __launch_bounds__(256)
random_bernoulli(bool* __restrict__ y, long long size, Word seed, Word draw, Word stream,
                 const Word* offset, Word threshold) {
    fill<8>(y, size, seed, draw, stream, offset,
            [=](Word word, long long) { return word < threshold; });
}

// True with probability threshold / 2^16: the mask of dropout.
__global__ void __launch_bounds__(256)
random_keep(bool* __restrict__ y, long long size, Word seed, Word draw, Word stream,
            const Word* offset, Word threshold) {
    fill<16>(y, size, seed, draw, stream, offset,
             [=](Word word, long long) { return word < threshold; });
}

// The keep mask of dropout in attention, (heads, queries, keys): a thread for each of its blocks.
__global__ void __launch_bounds__(256)
attention_keep(bool* __restrict__ y, long long blocks, int queries, int keys, Word seed, Word draw,
               Word stream, const Word* offset, unsigned threshold) {
    const Word block[] = {blockIdx.x * Word(256) + threadIdx.x};
    if (block[0] >= blocks) return;
    unsigned bits[1];
    keep_bits<1>(bits, keep_key(seed, draw_number(draw, offset), stream), block, threshold);
    const int columns = (keys + 15) / 16, rows = (queries + 15) / 16;
    const Word pair = block[0] / columns;
    const int key = block[0] % columns * 16, query = pair / 8 % rows * 16 + pair % 8;
    for (int i = 0; i < 32; ++i) {
        const int row = query + i / 16 * 8, column = key + i % 16;
        if (row < queries && column < keys)
            y[(pair / 8 / rows * queries + row) * keys + column] = bits[0] >> i & 1;
    }
}

// x plus Gumbel noise -log(-log(u)): where that is largest is a sample of softmax(x).
template <typename T>
__global__ void __launch_bounds__(256)
add_gumbel(double* __restrict__ y, const T* __restrict__ x, long long size, Word seed, Word draw,
           Word stream, const Word* offset) {
    fill<4>(y, size, seed, draw, stream, offset, [=](Word word, long long i) {
        const double noise = -log_same(-log_same(centered(word) + 0.5));
        return i < size ? double(Compute<T>(x[i])) + noise : 0.0;
    });
}

// A single thread: the draws of a captured step are taken.
__global__ void advance_draw(Word* offset, Word draws) { *offset += draws; }
