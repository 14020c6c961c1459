// layer_norm and rms_norm backward (see norm.cuh). Where x + residual was normalised and its sum is
// used too, the gradient of the sum is added, and dx is the gradient of both summands.
//
//   norm_backward_rows        x and dy are read once, dx is written once; sums for dweight and
//                             dbias stay in registers for all rows of a block: one partial row
//   norm_backward_loop        any width and alignment: dx alone, x and dy are read twice
//   norm_backward_columns     any width and alignment: the partial rows, x and dy are read again
//   norm_backward_parameters  adds up the partial rows, in order
//
// norm_backward_rows moves 3 * sizeof(T) bytes an element (4 with the gradient of a sum) and wants
// rows of whole, aligned 16-byte vectors. All results but dweight and dbias, which may be added to
// a gradient that is there, are written with =. Launched by kernels/norm.py.
//
// The naive kernel, a thread for row r (dweight and dbias: a thread for column j, over all r):
//
//   float sum = 0, dot = 0;                                          // rms_norm: sum stays 0
//   for (int j = 0; j < width; ++j) {
//       const float x_hat = (x[r][j] - mean[r]) * rstd[r], dx_hat = dy[r][j] * weight[j];
//       sum += dx_hat;
//       dot += dx_hat * x_hat;
//       // dweight[j] += dy[r][j] * x_hat; dbias[j] += dy[r][j];
//   }
//   for (int j = 0; j < width; ++j)
//       dx[r][j] = rstd[r] * (dy[r][j] * weight[j] - sum / width
//                             - (x[r][j] - mean[r]) * rstd[r] * dot / width) + dsum[r][j];
//
// Phases of norm_backward_rows, for each row: wait for it and start loading another; sums of the
// row; dx. At the end: the partial row of dweight and dbias.
//
// where: TYPE = double | float | __half | __nv_bfloat16
// instantiate: norm_backward_rows<{TYPE}, {1 | 2}>
// instantiate: {norm_backward_loop | norm_backward_columns}<{TYPE}>
// instantiate: norm_backward_parameters<{double | float}>
#include "norm.cuh"

constexpr int STAGES = 2;   // of the pipeline: rows in flight for each group

// With dx_hat = dy * weight and x_hat = (x - mean) * rstd:
// dx = rstd * (dx_hat - mean(dx_hat) - x_hat * mean(dx_hat * x_hat)); rms_norm lacks the second
// term. partials: (gridDim.x, 2, width), dweight and then dbias of the block's rows; null: not
// wanted. Shared memory: STAGES * VECTORS * 32 bytes a thread.
template <typename T, int VECTORS>
__global__ void __launch_bounds__(512, VECTORS == 1 && sizeof(T) < 8 ? 2 : 1)
norm_backward_rows(T* __restrict__ dx, Compute<T>* __restrict__ partials, const T* __restrict__ dy,
                   const T* __restrict__ dsum, const T* __restrict__ x,
                   const void* __restrict__ weight, bool weight_wide,
                   const Compute<T>* __restrict__ mean_in, const Compute<T>* __restrict__ rstd_in,
                   long long rows, int width) {
    using C = Compute<T>;
    constexpr int WIDTH = VECTOR<T>;
    __shared__ Pair<C> sums[64];
    extern __shared__ __align__(16) unsigned char memory[];
    GroupReducer<Pair<C>> group(sums);
    const long long step = gridDim.x * (long long)blockDim.y;
    const int vectors = width / WIDTH;
    // Load the weights.
    C weights[VECTORS][WIDTH], dweight[VECTORS][WIDTH] = {}, dbias[VECTORS][WIDTH] = {};
    #pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const int v = threadIdx.x + i * blockDim.x;
        #pragma unroll
        for (C& value : weights[i]) value = 1;
        if (weight == nullptr || v >= vectors) continue;
        if (weight_wide) load_wide<T>(weights[i], weight, v * WIDTH, 1);
        else unpack<T>(load_words(static_cast<const T*>(weight) + v * WIDTH), weights[i]);
    }

    // Each thread loads its part of the next rows into stages of its own: no barrier.
    Words* stages = reinterpret_cast<Words*>(memory) + threadIdx.y * blockDim.x + threadIdx.x;
    const int threads = blockDim.x * blockDim.y;
    C means[STAGES], rstds[STAGES];
    // beyond the last row, zeros, which add nothing
    const auto fetch = [&](long long row, int slot) {
        const bool inside = row < rows;
        #pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            const int v = threadIdx.x + i * blockDim.x;
            const long long place = row * width + v * WIDTH;
            cp_async(stages + ((slot * VECTORS + i) * 2 + 0) * threads, x + place,
                     inside && v < vectors);
            cp_async(stages + ((slot * VECTORS + i) * 2 + 1) * threads, dy + place,
                     inside && v < vectors);
        }
        cp_async_commit();
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
    const C inverse_width = C(1) / C(width);
    int slot = 0;
    for (long long base = blockIdx.x * (long long)blockDim.y; base < rows; base += step) {
        // Wait for a row and start loading another.
        const long long row = base + threadIdx.y;
        cp_async_wait<STAGES - 1>();
        Words xs[VECTORS], dys[VECTORS];
        #pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            xs[i] = stages[((slot * VECTORS + i) * 2 + 0) * threads];
            dys[i] = stages[((slot * VECTORS + i) * 2 + 1) * threads];
        }
        Words others[VECTORS] = {};
        if (dsum != nullptr) load_row(others, dsum + row * width, row < rows ? vectors : 0);
        const C mean = means[0], rstd = rstds[0];
        #pragma unroll
        for (int j = 1; j < STAGES; ++j) {
            means[j - 1] = means[j];
            rstds[j - 1] = rstds[j];
        }
        fetch(row + STAGES * step, slot);
        slot = slot + 1 < STAGES ? slot + 1 : 0;

        // Sums of the row.
        C values[WIDTH], gradients[WIDTH];
        Pair<C> sum = {0, 0};
        #pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            unpack<T>(xs[i], values);
            unpack<T>(dys[i], gradients);
            #pragma unroll
            for (int j = 0; j < WIDTH; ++j) {
                const C x_hat = (values[j] - mean) * rstd, dx_hat = gradients[j] * weights[i][j];
                sum.first += dx_hat;
                sum.second += dx_hat * x_hat;
                dweight[i][j] += gradients[j] * x_hat;
                dbias[i][j] += gradients[j];
            }
            keep_packed<T>(xs[i]);
            keep_packed<T>(dys[i]);
        }
        sum = group.sum(sum);
        // dx.
        const C shift = mean_in != nullptr ? sum.first * inverse_width : C(0),
                projection = sum.second * inverse_width;
        #pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            const int v = threadIdx.x + i * blockDim.x;
            if (v >= vectors || row >= rows) continue;
            unpack<T>(xs[i], values);
            unpack<T>(dys[i], gradients);
            #pragma unroll
            for (int j = 0; j < WIDTH; ++j) {
                const C x_hat = (values[j] - mean) * rstd;
                values[j] = rstd * (gradients[j] * weights[i][j] - shift - x_hat * projection);
            }
            unpack<T>(others[i], gradients);
            #pragma unroll
            for (int j = 0; j < WIDTH; ++j) values[j] += gradients[j];
            store_values(dx + row * width + v * WIDTH, values);
        }
    }
    if (partials == nullptr) return;

    // The partial row of dweight and dbias.
    cp_async_wait<0>();   // the stages are used again
    __syncthreads();
    partials += blockIdx.x * 2ll * width;
    C* sums_of_groups = reinterpret_cast<C*>(memory);
    #pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const int v = threadIdx.x + i * blockDim.x;
        if (v >= vectors) continue;
        store_all<WIDTH>(sums_of_groups + threadIdx.y * 2 * width + v * WIDTH, dweight[i]);
        store_all<WIDTH>(sums_of_groups + threadIdx.y * 2 * width + width + v * WIDTH, dbias[i]);
    }
    __syncthreads();
    for (int i = threadIdx.y * blockDim.x + threadIdx.x; i < 2 * width; i += threads) {
        C total = 0;
        for (int g = 0; g < blockDim.y; ++g) total += sums_of_groups[g * 2 * width + i];
        partials[i] = total;
    }
}

template <typename T>
__global__ void __launch_bounds__(512)
norm_backward_loop(T* __restrict__ dx, const T* __restrict__ dy, const T* __restrict__ dsum,
                   const T* __restrict__ x, const void* __restrict__ weight, bool weight_wide,
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
    if (dsum != nullptr) dsum += row * width;

    // Sums of the row.
    Pair<C> sum = {0, 0};
    for_places(x, count, aligned_alike(x, dy), [&](int place, auto n) {
        const auto xs = load<n>(x + place), dys = load<n>(dy + place);
        #pragma unroll
        for (int j = 0; j < n; ++j) {
            C dx_hat = to_compute(dys.values[j]);
            if (weight != nullptr) dx_hat *= load_parameter<T>(weight, weight_wide, place + j);
            sum.first += dx_hat;
            sum.second += dx_hat * ((to_compute(xs.values[j]) - mean) * rstd);
        }
    });
    sum = group.sum(sum);
    // dx.
    const C shift = mean_in != nullptr ? sum.first / C(width) : C(0),
            projection = sum.second / C(width);
    const bool alike = aligned_alike(x, dy) && aligned_alike(x, dx) &&
                       (dsum == nullptr || aligned_alike(x, dsum));
    for_places(x, count, alike, [&](int place, auto n) {
        auto values = load<n>(x + place);
        const auto dys = load<n>(dy + place),
                   others = load<n>((dsum != nullptr ? dsum : dy) + place);
        #pragma unroll
        for (int j = 0; j < n; ++j) {
            C dx_hat = to_compute(dys.values[j]);
            if (weight != nullptr) dx_hat *= load_parameter<T>(weight, weight_wide, place + j);
            const C x_hat = (to_compute(values.values[j]) - mean) * rstd;
            const C own = rstd * (dx_hat - shift - x_hat * projection);
            values.values[j] =
                from_compute<T>(dsum != nullptr ? own + to_compute(others.values[j]) : own);
        }
        store(dx + place, values);
    });
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
    // Sums of a thread.
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
    // Sums of the block.
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y > 0 || column >= width) return;
    for (int i = 1; i < 8; ++i) sum = sum + sums[i][threadIdx.x];
    partials[blockIdx.y * 2ll * width + column] = sum.first;
    partials[(blockIdx.y * 2ll + 1) * width + column] = sum.second;
}

// out: (columns,), dweight, dbias or one behind the other; begin: where they are in a partial row
// of `width`. partials: (count, width). Written with +=, or with = unless `adds`. 32 x 32 threads.
template <typename C>
__global__ void __launch_bounds__(1024)
norm_backward_parameters(C* __restrict__ out, const C* __restrict__ partials, int begin,
                         int columns, int count, int width, bool adds) {
    __shared__ C sums[32][33];
    const int column = blockIdx.x * 32 + threadIdx.x;
    C sum = 0;
    if (column < columns) {
        #pragma unroll 8
        for (int i = threadIdx.y; i < count; i += 32)
            sum += partials[i * (long long)width + begin + column];
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    sum = warp_sum(sums[threadIdx.x][threadIdx.y]);   // warp y now holds the sums of one column
    const int own = blockIdx.x * 32 + threadIdx.y;
    if (threadIdx.x == 0 && own < columns) out[own] = adds ? out[own] + sum : sum;
}
