// layer_norm and rms_norm over the last axis: y = (x - mean) * rstd * weight + bias. A null mean
// makes it rms_norm, a null weight is 1, a null bias 0. Statistics are in the compute type.
//
//   norm_forward_rows         the row in registers: x is read once, y written once
//   norm_forward_loop         any width and alignment: x is read three times, from caches where it fits
//   norm_backward_rows        x and dy are read once, dx is written once; sums for dweight and dbias
//                             stay in registers over the rows of a block, which writes one partial row
//   norm_backward_loop        any width and alignment: dx alone, x and dy are read twice
//   norm_backward_columns     any width and alignment: the partial rows, x and dy are read again
//   norm_backward_parameters  adds up the partial rows, in order
//
// The two *_rows kernels move 2 and 3 * sizeof(T) bytes an element and want rows of whole, aligned
// 16-byte vectors. All results are written with =. Launched by ops/norm_cuda.py.
//
// where: TYPE = double | float | __half | __nv_bfloat16
// instantiate: norm_forward_rows<{TYPE}, {1 | 2 | 3 | 4 | 8}>
// instantiate: norm_backward_rows<{TYPE}, {1 | 2}>
// instantiate: {norm_forward_loop | norm_backward_loop | norm_backward_columns}<{TYPE}>
// instantiate: norm_backward_parameters<{double | float}>
#include "async.cuh"
#include "rows.cuh"

constexpr int STAGES = 2;   // rows that backward has under way for each group

// VECTOR<T> parameters from `column` on; `wide` says that they are stored in the compute type.
template <typename T>
__device__ inline void load_parameters(Compute<T> (&out)[VECTOR<T>], const void* p, bool wide,
                                       int column) {
    using C = Compute<T>;
    if (wide) {
        #pragma unroll
        for (int j = 0; j < VECTOR<T>; j += VECTOR<C>) {
            const Vec<C> part = load<VECTOR<C>>(static_cast<const C*>(p) + column + j);
            #pragma unroll
            for (int k = 0; k < VECTOR<C>; ++k) out[j + k] = part.values[k];
        }
    } else {
        const uint4 bits = *reinterpret_cast<const uint4*>(static_cast<const T*>(p) + column);
        unpack<T>({{bits.x, bits.y, bits.z, bits.w}}, out);
    }
}

template <typename T>
__device__ inline Compute<T> load_parameter(const void* p, bool wide, int column) {
    return wide ? static_cast<const Compute<T>*>(p)[column]
                : to_compute(static_cast<const T*>(p)[column]);
}

template <typename T, int VECTORS>
__global__ void __launch_bounds__(256, VECTORS > 4 ? 4 : 5)
norm_forward_rows(T* __restrict__ y, Compute<T>* __restrict__ mean_out, Compute<T>* __restrict__ rstd_out,
                  const T* __restrict__ x, const void* __restrict__ weight, bool weight_wide,
                  const void* __restrict__ bias, bool bias_wide, long long rows, int width, double eps) {
    using C = Compute<T>;
    constexpr int WIDTH = VECTOR<T>;
    __shared__ C partials[64];
    GroupReducer<C> group(partials);
    const long long row = group_row();
    const int vectors = row < rows ? width / WIDTH : 0;
    Words xs[VECTORS];
    load_row(xs, x + row * width, vectors);
    C values[WIDTH], parameters[WIDTH];

    C mean = 0;
    if (mean_out != nullptr) {
        C sum = 0;
        #pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            unpack<T>(xs[i], values);
            #pragma unroll
            for (C value : values) sum += value;
            keep_packed<T>(xs[i]);
        }
        mean = group.sum(sum) / C(width);
    }
    C squares = 0;   // of what the mean leaves, so that nothing cancels
    #pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        if (threadIdx.x + i * blockDim.x >= vectors) continue;
        unpack<T>(xs[i], values);
        #pragma unroll
        for (C value : values) squares += (value - mean) * (value - mean);
        keep_packed<T>(xs[i]);
    }
    const C rstd = C(1) / sqrt(group.sum(squares) / C(width) + C(eps));
    if (threadIdx.x == 0 && row < rows) {
        rstd_out[row] = rstd;
        if (mean_out != nullptr) mean_out[row] = mean;
    }
    #pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const int v = threadIdx.x + i * blockDim.x;
        if (v >= vectors) continue;
        unpack<T>(xs[i], values);
        #pragma unroll
        for (C& value : values) value = (value - mean) * rstd;
        if (weight != nullptr) {
            load_parameters<T>(parameters, weight, weight_wide, v * WIDTH);
            #pragma unroll
            for (int j = 0; j < WIDTH; ++j) values[j] *= parameters[j];
        }
        if (bias != nullptr) {
            load_parameters<T>(parameters, bias, bias_wide, v * WIDTH);
            #pragma unroll
            for (int j = 0; j < WIDTH; ++j) values[j] += parameters[j];
        }
        store_values(y + row * width + v * WIDTH, values);
    }
}

template <typename T>
__global__ void __launch_bounds__(512)
norm_forward_loop(T* __restrict__ y, Compute<T>* __restrict__ mean_out, Compute<T>* __restrict__ rstd_out,
                  const T* __restrict__ x, const void* __restrict__ weight, bool weight_wide,
                  const void* __restrict__ bias, bool bias_wide, long long rows, int width, double eps) {
    using C = Compute<T>;
    __shared__ C partials[64];
    GroupReducer<C> group(partials);
    const long long row = group_row();
    const int count = row < rows ? width : 0;
    x += row * width;
    y += row * width;

    C mean = 0;
    if (mean_out != nullptr) {
        C sum = 0;
        #pragma unroll 4
        for (int i = threadIdx.x; i < count; i += blockDim.x) sum += to_compute(x[i]);
        mean = group.sum(sum) / C(width);
    }
    C squares = 0;
    #pragma unroll 4
    for (int i = threadIdx.x; i < count; i += blockDim.x)
        squares += (to_compute(x[i]) - mean) * (to_compute(x[i]) - mean);
    const C rstd = C(1) / sqrt(group.sum(squares) / C(width) + C(eps));
    if (threadIdx.x == 0 && row < rows) {
        rstd_out[row] = rstd;
        if (mean_out != nullptr) mean_out[row] = mean;
    }
    #pragma unroll 4
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
        C value = (to_compute(x[i]) - mean) * rstd;
        if (weight != nullptr) value *= load_parameter<T>(weight, weight_wide, i);
        if (bias != nullptr) value += load_parameter<T>(bias, bias_wide, i);
        y[i] = from_compute<T>(value);
    }
}

template <typename C>
struct Pair {
    C first, second;
};
template <typename C> __device__ inline Pair<C> operator+(Pair<C> a, Pair<C> b) {
    return {a.first + b.first, a.second + b.second};
}

// With dx_hat = dy * weight and x_hat = (x - mean) * rstd:
// dx = rstd * (dx_hat - mean(dx_hat) - x_hat * mean(dx_hat * x_hat)); rms_norm lacks the second term.
// partials: (gridDim.x, 2, width), dweight and then dbias of the block's rows; null: not wanted.
// Shared memory: STAGES * VECTORS * 32 bytes a thread, and room for 2 * width of the compute type.
template <typename T, int VECTORS>
__global__ void __launch_bounds__(512)
norm_backward_rows(T* __restrict__ dx, Compute<T>* __restrict__ partials, const T* __restrict__ dy,
                   const T* __restrict__ x, const void* __restrict__ weight, bool weight_wide,
                   const Compute<T>* __restrict__ mean_in, const Compute<T>* __restrict__ rstd_in,
                   long long rows, int width) {
    using C = Compute<T>;
    constexpr int WIDTH = VECTOR<T>;
    __shared__ Pair<C> sums[64];
    extern __shared__ __align__(16) unsigned char memory[];
    GroupReducer<Pair<C>> group(sums);
    const long long step = gridDim.x * (long long)blockDim.y;
    const int vectors = width / WIDTH;
    C weights[VECTORS][WIDTH], dweight[VECTORS][WIDTH] = {}, dbias[VECTORS][WIDTH] = {};
    #pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const int v = threadIdx.x + i * blockDim.x;
        #pragma unroll
        for (C& value : weights[i]) value = 1;
        if (weight != nullptr && v < vectors) load_parameters<T>(weights[i], weight, weight_wide, v * WIDTH);
    }

    // Each thread copies its share of the rows to come into a ring of its own: no barrier.
    Words* ring = reinterpret_cast<Words*>(memory) + threadIdx.y * blockDim.x + threadIdx.x;
    const int threads = blockDim.x * blockDim.y;
    C means[STAGES], rstds[STAGES];
    const auto fetch = [&](long long row, int slot) {   // beyond the last row, zeros, which add nothing
        const bool inside = row < rows;
        #pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            const int v = threadIdx.x + i * blockDim.x;
            const long long place = row * width + v * WIDTH;
            copy_async(ring + ((slot * VECTORS + i) * 2 + 0) * threads, x + place, inside && v < vectors);
            copy_async(ring + ((slot * VECTORS + i) * 2 + 1) * threads, dy + place, inside && v < vectors);
        }
        end_batch();
        means[STAGES - 1] = inside && mean_in != nullptr ? mean_in[row] : C(0);
        rstds[STAGES - 1] = inside ? rstd_in[row] : C(0);
    };
    #pragma unroll
    for (int i = 0; i < STAGES; ++i) {
        if (i > 0) {
            #pragma unroll
            for (int j = 1; j < STAGES; ++j) {
                means[j - 1] = means[j];
                rstds[j - 1] = rstds[j];
            }
        }
        fetch(group_row() + i * step, i);
    }
    const C share = C(1) / C(width);
    int slot = 0;
    for (long long base = blockIdx.x * (long long)blockDim.y; base < rows; base += step) {
        const long long row = base + threadIdx.y;
        wait_for_batches<STAGES - 1>();
        Words xs[VECTORS], dys[VECTORS];
        #pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            xs[i] = ring[((slot * VECTORS + i) * 2 + 0) * threads];
            dys[i] = ring[((slot * VECTORS + i) * 2 + 1) * threads];
        }
        const C mean = means[0], rstd = rstds[0];
        #pragma unroll
        for (int j = 1; j < STAGES; ++j) {
            means[j - 1] = means[j];
            rstds[j - 1] = rstds[j];
        }
        fetch(row + STAGES * step, slot);
        slot = slot + 1 < STAGES ? slot + 1 : 0;

        C values[WIDTH], slopes[WIDTH];
        Pair<C> sum = {0, 0};
        #pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            unpack<T>(xs[i], values);
            unpack<T>(dys[i], slopes);
            #pragma unroll
            for (int j = 0; j < WIDTH; ++j) {
                const C x_hat = (values[j] - mean) * rstd, dx_hat = slopes[j] * weights[i][j];
                sum.first += dx_hat;
                sum.second += dx_hat * x_hat;
                dweight[i][j] += slopes[j] * x_hat;
                dbias[i][j] += slopes[j];
            }
            keep_packed<T>(xs[i]);
            keep_packed<T>(dys[i]);
        }
        sum = group(sum, Pair<C>{0, 0}, [](Pair<C> a, Pair<C> b) { return a + b; });
        const C shift = mean_in != nullptr ? sum.first * share : C(0), slope = sum.second * share;
        #pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            const int v = threadIdx.x + i * blockDim.x;
            if (v >= vectors || row >= rows) continue;
            unpack<T>(xs[i], values);
            unpack<T>(dys[i], slopes);
            #pragma unroll
            for (int j = 0; j < WIDTH; ++j) {
                const C x_hat = (values[j] - mean) * rstd;
                values[j] = rstd * (slopes[j] * weights[i][j] - shift - x_hat * slope);
            }
            store_values(dx + row * width + v * WIDTH, values);
        }
    }
    if (partials == nullptr) return;

    wait_for_batches<0>();   // the ring's memory is used again
    __syncthreads();
    partials += blockIdx.x * 2ll * width;
    C* total = blockDim.y == 1 ? partials : reinterpret_cast<C*>(memory);
    for (int g = 0; g < blockDim.y; ++g) {   // the groups of the block, one after the other
        if (threadIdx.y == g) {
            #pragma unroll
            for (int i = 0; i < VECTORS; ++i) {
                const int v = threadIdx.x + i * blockDim.x;
                if (v >= vectors) continue;
                #pragma unroll
                for (int j = 0; j < WIDTH; ++j) {
                    const int column = v * WIDTH + j;
                    total[column] = (g > 0 ? total[column] : C(0)) + dweight[i][j];
                    total[width + column] = (g > 0 ? total[width + column] : C(0)) + dbias[i][j];
                }
            }
        }
        __syncthreads();
    }
    if (blockDim.y == 1) return;
    for (int i = threadIdx.y * blockDim.x + threadIdx.x; i < 2 * width; i += blockDim.x * blockDim.y)
        partials[i] = total[i];
}

template <typename T>
__global__ void __launch_bounds__(512)
norm_backward_loop(T* __restrict__ dx, const T* __restrict__ dy, const T* __restrict__ x,
                   const void* __restrict__ weight, bool weight_wide,
                   const Compute<T>* __restrict__ mean_in, const Compute<T>* __restrict__ rstd_in,
                   long long rows, int width) {
    using C = Compute<T>;
    __shared__ Pair<C> sums[64];
    GroupReducer<Pair<C>> group(sums);
    const long long row = group_row();
    const int count = row < rows ? width : 0;
    const C mean = count > 0 && mean_in != nullptr ? mean_in[row] : C(0);
    const C rstd = count > 0 ? rstd_in[row] : C(0);
    x += row * width;
    dy += row * width;
    dx += row * width;

    Pair<C> sum = {0, 0};
    #pragma unroll 4
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
        C dx_hat = to_compute(dy[i]);
        if (weight != nullptr) dx_hat *= load_parameter<T>(weight, weight_wide, i);
        sum.first += dx_hat;
        sum.second += dx_hat * ((to_compute(x[i]) - mean) * rstd);
    }
    sum = group(sum, Pair<C>{0, 0}, [](Pair<C> a, Pair<C> b) { return a + b; });
    const C shift = mean_in != nullptr ? sum.first / C(width) : C(0), slope = sum.second / C(width);
    #pragma unroll 4
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
        C dx_hat = to_compute(dy[i]);
        if (weight != nullptr) dx_hat *= load_parameter<T>(weight, weight_wide, i);
        const C x_hat = (to_compute(x[i]) - mean) * rstd;
        dx[i] = from_compute<T>(rstd * (dx_hat - shift - x_hat * slope));
    }
}

// A block of 32 x 8 threads: 32 columns of a chunk of the rows. Grid: tiles of columns, chunks.
// partials: (chunks, 2, width).
template <typename T>
__global__ void __launch_bounds__(256)
norm_backward_columns(Compute<T>* __restrict__ partials, const T* __restrict__ dy,
                      const T* __restrict__ x, const Compute<T>* __restrict__ mean_in,
                      const Compute<T>* __restrict__ rstd_in, long long rows, int width,
                      long long chunk) {
    using C = Compute<T>;
    __shared__ Pair<C> sums[8][32];
    const int column = blockIdx.x * 32 + threadIdx.x;
    const long long begin = blockIdx.y * chunk, end = min(begin + chunk, rows);
    Pair<C> sum = {0, 0};
    if (column < width) {
        #pragma unroll 4
        for (long long row = begin + threadIdx.y; row < end; row += 8) {
            const C d = to_compute(dy[row * width + column]);
            const C mean = mean_in != nullptr ? mean_in[row] : C(0);
            sum.first += d * ((to_compute(x[row * width + column]) - mean) * rstd_in[row]);
            sum.second += d;
        }
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y > 0 || column >= width) return;
    for (int i = 1; i < 8; ++i) sum = sum + sums[i][threadIdx.x];
    partials[blockIdx.y * 2ll * width + column] = sum.first;
    partials[(blockIdx.y * 2ll + 1) * width + column] = sum.second;
}

// dweight, dbias: (width,), null where not wanted. partials: (count, 2, width). 32 x 32 threads.
template <typename C>
__global__ void __launch_bounds__(1024)
norm_backward_parameters(C* __restrict__ dweight, C* __restrict__ dbias,
                         const C* __restrict__ partials, int count, int width) {
    __shared__ C sums[32][33];
    const int column = blockIdx.x * 32 + threadIdx.x;
    C sum = 0;
    if (column < 2 * width) {
        #pragma unroll 8
        for (int i = threadIdx.y; i < count; i += 32) sum += partials[i * 2ll * width + column];
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    sum = warp_sum(sums[threadIdx.x][threadIdx.y]);   // warp y now holds the sums of one column
    const int own = blockIdx.x * 32 + threadIdx.y;
    if (threadIdx.x > 0 || own >= 2 * width) return;
    C* out = own < width ? dweight : dbias;
    if (out != nullptr) out[own < width ? own : own - width] = sum;
}
