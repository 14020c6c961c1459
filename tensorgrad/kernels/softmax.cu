// softmax of x * scale + mask along rows, log_softmax of x, and their gradients; `logarithm` says
// which of the two. What the mask means, and how it is read: scores.cuh.
//
//   softmax_*_rows    the row in registers: for rows of whole, aligned 16-byte vectors
//   softmax_*_short   rows of any width, up to 2048: a block copies what it does to shared memory
//   softmax_*_staged  long rows of any width, in shared memory as far as they fit. A block takes
//                     many rows: while it writes one, it loads the next; what does not fit is
//                     read twice, the second time from the L2 cache
//
// All read and write each element once, forward 2 and backward 3 * sizeof(T) bytes; under a causal
// mask forward does not read what is not allowed. All results are written with =. There are no
// *_rows kernels for double, whose exp fills the registers. Launched by kernels/softmax.py.
//
// The naive kernels, a thread for row r:
//
//   float row_max = -INFINITY, sum = 0, dot = 0;
//   for (int j = 0; j < width; ++j) row_max = max(row_max, x[r][j] * scale + mask[r][j]);
//   for (int j = 0; j < width; ++j) sum += exp(x[r][j] * scale + mask[r][j] - row_max);
//   for (int j = 0; j < width; ++j) y[r][j] = exp(x[r][j] * scale + mask[r][j] - row_max) / sum;
//
//   for (int j = 0; j < width; ++j) dot += dy[r][j] * y[r][j];
//   for (int j = 0; j < width; ++j) dx[r][j] = scale * y[r][j] * (dy[r][j] - dot);
//
// Phases of a row, forward: load and mask; maximum; sum; normalize and store. Backward: load; dot
// product; gradient and store.
//
// where: TYPE = double | float | __half | __nv_bfloat16
// instantiate: softmax_forward_rows<{float | __half | __nv_bfloat16}, {1 | 2 | 4}, {true | false}>
// instantiate: softmax_backward_rows<{float | __half | __nv_bfloat16}, {1 | 2 | 4}>
// instantiate: {softmax_forward_short | softmax_forward_staged}<{TYPE}, {true | false}>
// instantiate: {softmax_backward_short | softmax_backward_staged}<{TYPE}>
#include "async.cuh"
#include "rows.cuh"
#include "scores.cuh"

// y = value(score), once the largest score of a row and the sum of exp(score - maximum) are known.
template <typename T, bool MASKED>
struct Normalized {
    using C = Compute<T>;
    C shift, scale;   // the logarithm's: what else is subtracted
    bool logarithm;

    __device__ Normalized(C row_max, C total,
                          bool logarithm) : shift(row_max), logarithm(logarithm) {
        const bool nothing = MASKED && total == 0;   // allowed in this row: zeros, where else NaN
        if (nothing) shift = 0;
        scale = nothing ? C(0) : logarithm ? log(total) : C(1) / total;
    }
    // The maximum is subtracted alone, which is exact near it: it may be much larger than the
    // logarithm.
    __device__ C operator()(C score) const {
        return logarithm ? score - shift - scale : exp_for<T>(score - shift) * scale;
    }
};

// Blocks of an SM. Before Hopper the compiler needs more than 64 registers for a mask.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
template <typename T, int VECTORS, bool MASKED>
constexpr int FORWARD_BLOCKS = MASKED && sizeof(T) == 2 && VECTORS == 4 ? 1 : 2;
#else
template <typename T, int VECTORS, bool MASKED> constexpr int FORWARD_BLOCKS = 2;
#endif

template <typename T, int VECTORS, bool MASKED>
__global__ void __launch_bounds__(512, FORWARD_BLOCKS<T, VECTORS, MASKED>)
softmax_forward_rows(T* __restrict__ y, const T* __restrict__ x, long long rows, int width,
                     const ScoreArguments scores, bool logarithm) {
    using C = Compute<T>;
    constexpr int WIDTH = VECTOR<T>;
    __shared__ C partials[64];
    GroupReducer<C> group(partials);
    const long long row = group_row();
    // Load and mask.
    const RowScores<T, MASKED> own(scores, row, row < rows ? width : 0, 0);
    Words xs[VECTORS];
    load_row(xs, x + row * width, (own.limit + WIDTH - 1) / WIDTH);

    C values[VECTORS][WIDTH], row_max = -infinity<C>();
    own.make(values, threadIdx.x * WIDTH, blockDim.x * WIDTH, [&](C (&values)[VECTORS][WIDTH]) {
        #pragma unroll
        for (int i = 0; i < VECTORS; ++i) unpack<T>(xs[i], values[i]);
    });
    // Maximum.
    #pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        #pragma unroll
        for (C value : values[i]) row_max = max(value, row_max);   // skips NaN, which ends in total
    }
    row_max = group.max(row_max);
    if (MASKED && row_max == -infinity<C>()) row_max = 0;
    // Sum.
    C total = 0;
    #pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        if ((threadIdx.x + i * blockDim.x) * WIDTH >= own.limit) continue;
        #pragma unroll
        for (C value : values[i]) total += exp_for<T>(value - row_max);
    }
    const Normalized<T, MASKED> result(row_max, group.sum(total), logarithm);
    // Normalize and store.
    #pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const int column = (threadIdx.x + i * blockDim.x) * WIDTH;
        if (row >= rows || column >= width) continue;
        #pragma unroll
        for (C& value : values[i]) value = result(value);
        store_values(y + row * width + column, values[i]);
    }
}

// Rows side by side, in to and out of shared memory; by vectors where the pointer is aligned.
template <typename T>
__device__ inline void load_tile(T* tile, const T* x, int count) {
    const int thread = threadIdx.y * blockDim.x + threadIdx.x, threads = blockDim.x * blockDim.y;
    const int vectors = aligned_alike(x, nullptr) ? count / VECTOR<T> : 0;
    for (int v = thread; v < vectors; v += threads)
        cp_async(tile + v * VECTOR<T>, x + v * VECTOR<T>, true);
    for (int i = vectors * VECTOR<T> + thread; i < count; i += threads) tile[i] = x[i];
}
template <typename T>
__device__ inline void store_tile(T* y, const T* tile, int count) {
    const int thread = threadIdx.y * blockDim.x + threadIdx.x, threads = blockDim.x * blockDim.y;
    const int vectors = aligned_alike(y, nullptr) ? count / VECTOR<T> : 0;
    for (int v = thread; v < vectors; v += threads)
        store(y + v * VECTOR<T>, load<VECTOR<T>>(tile + v * VECTOR<T>));
    for (int i = vectors * VECTOR<T> + thread; i < count; i += threads) y[i] = tile[i];
}

constexpr int COUNT = 8;   // values a thread

// A block takes `deep` rows. blockDim: (lanes of a row, rows at a time), lanes * COUNT >= width.
// Dynamic shared memory: that many rows.
template <typename T, bool MASKED>
__global__ void __launch_bounds__(256)
softmax_forward_short(T* __restrict__ y, const T* __restrict__ x, long long rows, int width,
                      int deep, const ScoreArguments scores, bool logarithm) {
    using C = Compute<T>;
    __shared__ C partials[64];
    GroupReducer<C> group(partials);
    extern __shared__ __align__(16) unsigned char memory[];
    T* tile = reinterpret_cast<T*>(memory);
    // Load the rows of the block.
    const long long first = blockIdx.x * (long long)deep;
    const int here = int(min((long long)deep, rows - first));
    load_tile(tile, x + first * width, here * width);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();

    for (int base = 0; base < here; base += blockDim.y) {
        const int r = base + threadIdx.y;
        // Mask.
        const RowScores<T, MASKED> own(scores, first + r, r < here ? width : 0, 0);
        T* mine = tile + r * width;
        C values[COUNT][1], row_max = -infinity<C>(), total = 0;
        own.make(values, threadIdx.x, blockDim.x, [&](C (&values)[COUNT][1]) {
            #pragma unroll
            for (int i = 0; i < COUNT; ++i) {
                const int column = threadIdx.x + i * blockDim.x;
                values[i][0] = column < own.limit ? to_compute(mine[column]) : C(0);
            }
        });
        // Maximum.
        #pragma unroll
        for (int i = 0; i < COUNT; ++i) row_max = max(values[i][0], row_max);
        row_max = group.max(row_max);
        if (MASKED && row_max == -infinity<C>()) row_max = 0;
        // Sum.
        #pragma unroll
        for (int i = 0; i < COUNT; ++i)
            if (threadIdx.x + i * blockDim.x < own.limit)
                total += exp_for<T>(values[i][0] - row_max);
        const Normalized<T, MASKED> result(row_max, group.sum(total), logarithm);
        // Normalize.
        #pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const int column = threadIdx.x + i * blockDim.x;
            if (r < here && column < width) mine[column] = from_compute<T>(result(values[i][0]));
        }
    }
    __syncthreads();
    // Store.
    store_tile(y + first * width, tile, here * width);
}

// OnlineSoftmax::absorb with a sum of its own, so that the exponentials wait for nothing but
// the row_max.
template <typename T, typename C, int N>
__device__ inline void absorb(OnlineSoftmax<C>& all, const C (&x)[N]) {
    const C before = all.maximum;
    #pragma unroll
    for (C value : x) all.maximum = max(value, all.maximum);
    const C base = all.shift();
    C sum = 0;
    #pragma unroll
    for (C value : x) sum += exp_less<T>(value, base);
    all.total = all.total * exp_for<T>(before - base) + sum;
}

// The vectors of a row, cut into pieces that are copied to shared memory one after the other, so
// that work begins when the first has come. Each thread reads what it has copied: no barriers.
constexpr int PIECES = 4;

// Call f(v) for this thread's vectors of a piece, of those in shared memory.
template <typename T, typename F>
__device__ inline void for_piece(int piece, int vectors, int capacity, F f) {
    constexpr int UNROLL = sizeof(T) == 8 ? 1 : 2;
    const int chunk = (capacity + PIECES * blockDim.x - 1) / (PIECES * blockDim.x) * blockDim.x;
    const int end = min(min(vectors, capacity), (piece + 1) * chunk);
    #pragma unroll UNROLL
    for (int v = piece * chunk + threadIdx.x; v < end; v += blockDim.x) f(v);
}

// Call f(piece) for each piece when it has come. All are under way before that.
template <typename F>
__device__ inline void as_they_come(F f) {
    static_assert(PIECES == 4, "one line for each");
    cp_async_wait<3>(); f(0);
    cp_async_wait<2>(); f(1);
    cp_async_wait<1>(); f(2);
    cp_async_wait<0>(); f(3);
}

// Dynamic shared memory: `capacity` vectors. x and y begin at 16-byte boundaries.
template <typename T, bool MASKED>
__global__ void __launch_bounds__(sizeof(T) == 8 ? 384 : 768, 1)
softmax_forward_staged(T* __restrict__ y, const T* __restrict__ x, long long rows, int width,
                       int capacity, const ScoreArguments scores, bool logarithm) {
    using C = Compute<T>;
    constexpr int WIDTH = VECTOR<T>;
    extern __shared__ __align__(16) unsigned char memory[];
    Words* shared = reinterpret_cast<Words*>(memory);
    const auto fetch = [&](long long r, int piece) {
        if (r < rows) {
            const UnalignedRow<T> row(x + r * width, width);
            for_piece<T>(piece, row.vectors, capacity,
                         [&](int v) { cp_async(shared + v, row.vector(v), true); });
        }
        cp_async_commit();
    };
    // Load the first row.
    for (int piece = 0; piece < PIECES; ++piece) fetch(blockIdx.x, piece);
    for (long long r = blockIdx.x; r < rows; r += gridDim.x) {
        const UnalignedRow<T> row(x + r * width, width);
        const RowScores<T, MASKED> own(scores, r, width, row.head);
        const auto vector = [&](const Words& bits, int v, C(&values)[1][WIDTH]) {
            own.make(values, row.head + v * WIDTH, 0,
                     [&](C(&values)[1][WIDTH]) { unpack<T>(bits, values[0]); });
        };
        const auto other = [&](int place) {
            C value[1][1];
            own.make(value, place, 0,
                     [&](C(&value)[1][1]) { value[0][0] = to_compute(row.x[place]); });
            return value[0][0];
        };
        // Mask; maximum and sum in one pass.
        OnlineSoftmax<C> whole = {-infinity<C>(), 0};
        as_they_come([&](int piece) {
            for_piece<T>(piece, row.vectors, capacity, [&](int v) {
                C values[1][WIDTH];
                vector(shared[v], v, values);
                absorb<T>(whole, values[0]);
            });
        });
        #pragma unroll 2
        for (int v = capacity + threadIdx.x; v < row.vectors; v += blockDim.x) {
            C values[1][WIDTH];
            vector(load_words_cached(row.vector(v)), v, values);
            absorb<T>(whole, values[0]);
        }
        for (int i = threadIdx.x; i < row.others(); i += blockDim.x) {
            const C value[1] = {other(row.other(i))};
            absorb<T>(whole, value);
        }
        whole = block_reduce(whole, OnlineSoftmax<C>{-infinity<C>(), 0},
                             [](OnlineSoftmax<C> a, OnlineSoftmax<C> b) { return merge<T>(a, b); });

        // Normalize and store; load the next row.
        const Normalized<T, MASKED> result(whole.maximum, whole.total, logarithm);
        T* out = y + r * width;
        const auto write = [&](const Words& bits, int v) {
            C values[1][WIDTH];
            vector(bits, v, values);
            #pragma unroll
            for (C& value : values[0]) value = result(value);
            store_values(out + row.head + v * WIDTH, values[0]);
        };
        for (int piece = 0; piece < PIECES; ++piece) {
            for_piece<T>(piece, row.vectors, capacity, [&](int v) { write(shared[v], v); });
            fetch(r + gridDim.x, piece);
        }
        #pragma unroll 2
        for (int v = capacity + threadIdx.x; v < row.vectors; v += blockDim.x)
            write(load_words_cached(row.vector(v)), v);
        for (int i = threadIdx.x; i < row.others(); i += blockDim.x)
            out[row.other(i)] = from_compute<T>(result(other(row.other(i))));
    }
}

// softmax: dx = scale * y * (dy - sum(dy * y)). log_softmax: dx = dy - exp(y) * sum(dy).
template <typename C> __device__ inline C softmax_term(C dy, C y, bool logarithm) {
    return logarithm ? dy : dy * y;
}
template <typename T>
__device__ inline Compute<T> softmax_gradient(Compute<T> dy, Compute<T> y, Compute<T> sum,
                                              Compute<T> scale, bool logarithm) {
    return logarithm ? dy - exp_for<T>(y) * sum : scale * y * (dy - sum);
}

template <typename T, int VECTORS>
__global__ void __launch_bounds__(256)
softmax_backward_rows(T* __restrict__ dx, const T* __restrict__ dy, const T* __restrict__ y,
                      long long rows, int width, double scale, bool logarithm) {
    using C = Compute<T>;
    constexpr int WIDTH = VECTOR<T>;
    __shared__ C partials[64];
    GroupReducer<C> group(partials);
    const long long row = group_row();
    const int vectors = row < rows ? width / WIDTH : 0;
    // Load.
    Words ys[VECTORS], dys[VECTORS];
    load_row(dys, dy + row * width, vectors);
    load_row(ys, y + row * width, vectors);
    C values[WIDTH], dys_wide[WIDTH];
    // Dot product.
    C sum = 0;
    #pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        unpack<T>(ys[i], values);
        unpack<T>(dys[i], dys_wide);
        #pragma unroll
        for (int j = 0; j < WIDTH; ++j) sum += softmax_term(dys_wide[j], values[j], logarithm);
        keep_packed<T>(ys[i]);
        keep_packed<T>(dys[i]);
    }
    sum = group.sum(sum);
    // Gradient and store.
    #pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const int v = threadIdx.x + i * blockDim.x;
        if (v >= vectors) continue;
        unpack<T>(ys[i], values);
        unpack<T>(dys[i], dys_wide);
        #pragma unroll
        for (int j = 0; j < WIDTH; ++j)
            values[j] = softmax_gradient<T>(dys_wide[j], values[j], sum, C(scale), logarithm);
        store_values(dx + row * width + v * WIDTH, values);
    }
}

// Forward with shared memory for two tiles, each a multiple of 16 bytes.
template <typename T>
__global__ void __launch_bounds__(256)
softmax_backward_short(T* __restrict__ dx, const T* __restrict__ dy, const T* __restrict__ y,
                       long long rows, int width, int deep, double scale, bool logarithm) {
    using C = Compute<T>;
    __shared__ C partials[64];
    GroupReducer<C> group(partials);
    extern __shared__ __align__(16) unsigned char memory[];
    T* dys = reinterpret_cast<T*>(memory);
    T* ys = dys + (deep * width + VECTOR<T> - 1) / VECTOR<T> * VECTOR<T>;
    // Load the rows of the block.
    const long long first = blockIdx.x * (long long)deep;
    const int here = int(min((long long)deep, rows - first));
    load_tile(dys, dy + first * width, here * width);
    load_tile(ys, y + first * width, here * width);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();

    for (int base = 0; base < here; base += blockDim.y) {
        const int r = base + threadIdx.y, mine = r * width, own = r < here ? width : 0;
        // Dot product.
        C values[COUNT], dys_wide[COUNT], sum = 0;
        #pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const int column = threadIdx.x + i * blockDim.x;
            values[i] = column < own ? to_compute(ys[mine + column]) : C(0);
            dys_wide[i] = column < own ? to_compute(dys[mine + column]) : C(0);
            sum += softmax_term(dys_wide[i], values[i], logarithm);
        }
        sum = group.sum(sum);
        // Gradient.
        #pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const int column = threadIdx.x + i * blockDim.x;
            if (column < own)
                dys[mine + column] = from_compute<T>(
                    softmax_gradient<T>(dys_wide[i], values[i], sum, C(scale), logarithm));
        }
    }
    __syncthreads();
    // Store.
    store_tile(dx + first * width, dys, here * width);
}

// Backward with shared memory for `capacity` vectors of dy and of y.
template <typename T>
__global__ void __launch_bounds__(sizeof(T) == 8 ? 384 : 768, 1)
softmax_backward_staged(T* __restrict__ dx, const T* __restrict__ dy, const T* __restrict__ y,
                        long long rows, int width, int capacity, double scale, bool logarithm) {
    using C = Compute<T>;
    constexpr int WIDTH = VECTOR<T>;
    extern __shared__ __align__(16) unsigned char memory[];
    Words* shared_y = reinterpret_cast<Words*>(memory);
    Words* shared_dy = shared_y + capacity;
    const auto fetch = [&](long long r, int piece) {
        if (r < rows) {
            const UnalignedRow<T> row(y + r * width, width), dy_row(dy + r * width, width);
            for_piece<T>(piece, row.vectors, capacity, [&](int v) {
                cp_async(shared_y + v, row.vector(v), true);
                cp_async(shared_dy + v, dy_row.vector(v), true);
            });
        }
        cp_async_commit();
    };
    // Load the first row.
    for (int piece = 0; piece < PIECES; ++piece) fetch(blockIdx.x, piece);
    for (long long r = blockIdx.x; r < rows; r += gridDim.x) {
        const UnalignedRow<T> row(y + r * width, width), dy_row(dy + r * width, width);
        // Dot product.
        C sum = 0;
        const auto absorb = [&](const Words& y_bits, const Words& dy_bits) {
            C values[WIDTH], dys_wide[WIDTH];
            unpack<T>(y_bits, values);
            unpack<T>(dy_bits, dys_wide);
            #pragma unroll
            for (int j = 0; j < WIDTH; ++j) sum += softmax_term(dys_wide[j], values[j], logarithm);
        };
        as_they_come([&](int piece) {
            for_piece<T>(piece, row.vectors, capacity,
                         [&](int v) { absorb(shared_y[v], shared_dy[v]); });
        });
        #pragma unroll 2
        for (int v = capacity + threadIdx.x; v < row.vectors; v += blockDim.x)
            absorb(load_words_cached(row.vector(v)), load_words_cached(dy_row.vector(v)));
        for (int i = threadIdx.x; i < row.others(); i += blockDim.x)
            sum += softmax_term(to_compute(dy_row.x[row.other(i)]), to_compute(row.x[row.other(i)]),
                                logarithm);
        sum = block_sum(sum);

        // Gradient and store; load the next row.
        T* out = dx + r * width;
        const auto write = [&](const Words& y_bits, const Words& dy_bits, int v) {
            C values[WIDTH], dys_wide[WIDTH];
            unpack<T>(y_bits, values);
            unpack<T>(dy_bits, dys_wide);
            #pragma unroll
            for (int j = 0; j < WIDTH; ++j)
                values[j] = softmax_gradient<T>(dys_wide[j], values[j], sum, C(scale), logarithm);
            store_values(out + row.head + v * WIDTH, values);
        };
        for (int piece = 0; piece < PIECES; ++piece) {
            for_piece<T>(piece, row.vectors, capacity,
                         [&](int v) { write(shared_y[v], shared_dy[v], v); });
            fetch(r + gridDim.x, piece);
        }
        #pragma unroll 2
        for (int v = capacity + threadIdx.x; v < row.vectors; v += blockDim.x)
            write(load_words_cached(row.vector(v)), load_words_cached(dy_row.vector(v)), v);
        for (int i = threadIdx.x; i < row.others(); i += blockDim.x) {
            const int place = row.other(i);
            out[place] = from_compute<T>(softmax_gradient<T>(
                to_compute(dy_row.x[place]), to_compute(row.x[place]), sum, C(scale), logarithm));
        }
    }
}
