// layer_norm and rms_norm backward (see norm.cuh). Where x + residual was normalised and its sum is
// used too, the gradient of the sum is added, and dx is the gradient of both summands.
//
//   norm_backward_rows     x and dy are read once, dx is written once; sums for dweight and dbias,
//                          and over rows of dx, stay in registers for all rows of a block: one
//                          partial row
//   norm_backward_long     the same of longer rows, without the sums of dx
//   norm_backward_loop     any width and alignment: dx alone, x and dy are read twice
//   norm_backward_columns  any width and alignment: the partial rows, x and dy are read again
//
// sum_parts in reduce.cu adds up the partial rows. The sum over rows of dx is the gradient of a
// bias that was added to x, or to what was added to it.
//
// These two move 3 * sizeof(T) bytes an element (4 with the gradient of a sum) and want rows of
// whole, aligned 16-byte vectors. All results are written with =. Launched by
// kernels/norm.py.
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
// Phases of norm_backward_rows: start loading rows, load the weights. For each row: wait for it;
// sums of the row; dx; start loading another. At the end: the partial rows.
//
// where: TYPE = double | float | __half | __nv_bfloat16
// where: SHAPE = 1, 0 | {2 | 3 | 4 | 5}, 32 | 2, {96 | 128}
// instantiate: norm_backward_rows<{TYPE}, {SHAPE}>
// instantiate: norm_backward_long<{TYPE}, {1 | 2}>
// instantiate: {norm_backward_loop | norm_backward_columns}<{TYPE}>
#include "norm.cuh"
#include "overlap.cuh"

// Rows of a group in shared memory: one that it works on, others in flight.
constexpr int STAGES = 3;

// Rows of several warps leave registers for what both passes use of each vector. They have two rows
// a block: half as many partial rows.
template <int LANES> constexpr bool KEEPS = LANES > 32;
template <int LANES> constexpr int THREADS = KEEPS<LANES> ? 2 * LANES : 128;

// Blocks of an SM: as many as leave each thread the registers it needs.
template <typename T, int VECTORS, int LANES>
constexpr int BACKWARD_BLOCKS =
    sizeof(T) == 8 ? 1 : KEEPS<LANES> || VECTORS > 3 ? 2 : VECTORS == 3 ? 3 : 4;

// The sum of x over the `lanes` threads of a row, in each of them; up to 32, or whole warps. sums:
// of all warps of the block, used in turn: so one barrier a call is enough.
template <typename A>
__device__ inline A row_sum(A x, A (*sums)[16], int lanes, int& turn) {
    x = warp_sum(x, min(lanes, 32));
    if (lanes <= 32) return x;
    const int warps = lanes / 32;
    A* own = sums[turn] + threadIdx.y * warps;
    turn ^= 1;
    if (threadIdx.x % 32 == 0) own[threadIdx.x / 32] = x;
    asm volatile("bar.sync %0, %1;" :: "r"(1 + threadIdx.y), "r"(lanes) : "memory");   // a row
    x = own[0];
    for (int i = 1; i < warps; ++i) x = x + own[i];
    return x;
}

// With dx_hat = dy * weight and x_hat = (x - mean) * rstd:
// dx = rstd * (dx_hat - mean(dx_hat) - x_hat * mean(dx_hat * x_hat)); rms_norm lacks the second
// term. partials: (gridDim.x, 3, width), dweight, dbias and the sums over rows of dx, each of the
// block's rows. LANES: threads a row; 0 where only blockDim says. Shared memory: STAGES * 3 *
// VECTORS * 16 bytes a thread. overlaps: with the next kernel (overlap.py).
template <typename T, int VECTORS, int LANES>
__global__ void __launch_bounds__(THREADS<LANES>, BACKWARD_BLOCKS<T, VECTORS, LANES>)
norm_backward_rows(T* dx, Compute<T>* partials, const T* dy, const T* dsum, const T* x,
                   const void* weight, bool weight_wide, const Compute<T>* mean_in,
                   const Compute<T>* rstd_in, long long rows, int width, bool overlaps) {
    using C = Compute<T>;
    constexpr int WIDTH = VECTOR<T>, KEPT = KEEPS<LANES> ? VECTORS : 1;   // vectors; one always
    __shared__ Pair<C> sums[2][16];
    extern __shared__ __align__(16) unsigned char memory[];
    const int lanes = LANES > 0 ? LANES : blockDim.x,
              threads = LANES > 0 ? THREADS<LANES> : blockDim.x * blockDim.y;
    const int vectors = width / WIDTH, groups = threads / lanes, step = gridDim.x * groups;
    wait_for_previous_kernel();
    if (overlaps) start_next_kernel();

    // Each thread loads its part of the next rows into stages of its own: no barrier.
    Words* own = reinterpret_cast<Words*>(memory) + threadIdx.y * lanes + threadIdx.x;
    const auto part = [&](int slot, int i, int array) -> Words& {   // a part of x, dy and dsum
        return own[((slot * VECTORS + i) * 3 + array) * threads];
    };
    long long row = blockIdx.x * (long long)groups + threadIdx.y, next = row;
    long long here = row * width + threadIdx.x * WIDTH, ahead = here;
    C means[STAGES], rstds[STAGES];
    const auto fetch = [&](int slot) {   // beyond the last row, zeros, which add nothing
        #pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            const bool inside = next < rows && threadIdx.x + i * lanes < vectors;
            const long long place = ahead + i * lanes * WIDTH;
            cp_async(&part(slot, i, 0), x + place, inside);
            cp_async(&part(slot, i, 1), dy + place, inside);
            if (dsum != nullptr) cp_async(&part(slot, i, 2), dsum + place, inside);
        }
        cp_async_commit();
        #pragma unroll
        for (int j = 1; j < STAGES; ++j) {
            means[j - 1] = means[j];
            rstds[j - 1] = rstds[j];
        }
        means[STAGES - 1] = next < rows && mean_in != nullptr ? mean_in[next] : C(0);
        rstds[STAGES - 1] = next < rows ? rstd_in[next] : C(0);
        next += step;
        ahead += step * (long long)width;
    };
    #pragma unroll
    for (int i = 0; i < STAGES; ++i) fetch(i);
    // Load the weights.
    const bool is_packed = !weight_wide || sizeof(T) == sizeof(C);
    Words packed[VECTORS];
    #pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const int v = threadIdx.x + i * lanes;
        C ones[WIDTH];
        #pragma unroll
        for (C& value : ones) value = 1;
        packed[i] = pack<T>(ones);
        if (is_packed && weight != nullptr && v < vectors)
            packed[i] = load_words(static_cast<const T*>(weight) + v * WIDTH);
    }
    const auto weights_of = [&](int i, C (&to)[WIDTH]) {
        if (is_packed) {
            unpack<T>(packed[i], to);
            keep_packed<T>(packed[i]);
        } else {
            load_wide<T>(to, weight, min(threadIdx.x + i * lanes, vectors - 1) * WIDTH, 1);
        }
    };

    C dweight[VECTORS][WIDTH] = {}, dbias[VECTORS][WIDTH] = {}, dx_sums[VECTORS][WIDTH] = {};
    const C inverse_width = C(1) / C(width);
    int slot = 0, turn = 0;
    while (row - threadIdx.y < rows) {
        // Wait for a row.
        cp_async_wait<STAGES - 1>();
        const C mean = means[0], rstd = rstds[0];

        // Sums of the row: of dx_hat, and of dx_hat * (x - mean).
        Pair<C> sum = {0, 0};
        C centred[KEPT][WIDTH], dx_hat[KEPT][WIDTH];
        #pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            C values[WIDTH], gradients[WIDTH], weights[WIDTH];
            unpack<T>(part(slot, i, 0), values);
            unpack<T>(part(slot, i, 1), gradients);
            weights_of(i, weights);
            #pragma unroll
            for (int j = 0; j < WIDTH; ++j) {
                const C product = gradients[j] * (values[j] - mean);
                sum.first += gradients[j] * weights[j];
                sum.second += product * weights[j];
                dweight[i][j] += product * rstd;
                dbias[i][j] += gradients[j];
                centred[i % KEPT][j] = values[j] - mean;
                dx_hat[i % KEPT][j] = gradients[j] * weights[j];
            }
        }
        sum = row_sum(sum, sums, lanes, turn);
        // dx.
        const C shift = mean_in != nullptr ? -rstd * sum.first * inverse_width : C(0),
                projection = -rstd * rstd * rstd * sum.second * inverse_width;
        #pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            if (row >= rows || threadIdx.x + i * lanes >= vectors) continue;
            C values[WIDTH], gradients[WIDTH], weights[WIDTH];
            if (KEPT < VECTORS) {   // again
                unpack<T>(part(slot, i, 0), values);
                unpack<T>(part(slot, i, 1), gradients);
                weights_of(i, weights);
                #pragma unroll
                for (int j = 0; j < WIDTH; ++j) {
                    centred[0][j] = values[j] - mean;
                    dx_hat[0][j] = gradients[j] * weights[j];
                }
            }
            #pragma unroll
            for (int j = 0; j < WIDTH; ++j)
                values[j] = rstd * dx_hat[i % KEPT][j]
                          + (centred[i % KEPT][j] * projection + shift);
            if (dsum != nullptr) {
                unpack<T>(part(slot, i, 2), gradients);
                #pragma unroll
                for (int j = 0; j < WIDTH; ++j) values[j] += gradients[j];
            }
            store_values(dx + here + i * lanes * WIDTH, values);
            #pragma unroll
            for (int j = 0; j < WIDTH; ++j) dx_sums[i][j] += values[j];
        }
        // Start loading another row.
        fetch(slot);
        slot = slot + 1 < STAGES ? slot + 1 : 0;
        row += step;
        here += step * (long long)width;
    }

    // The partial rows.
    cp_async_wait<0>();   // the stages are used again
    __syncthreads();
    partials += blockIdx.x * 3ll * width;
    C* sums_of_groups = reinterpret_cast<C*>(memory);
    #pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const int v = threadIdx.x + i * lanes;
        if (v >= vectors) continue;
        C* to = sums_of_groups + threadIdx.y * 3 * width + v * WIDTH;
        store_all<WIDTH>(to, dweight[i]);
        store_all<WIDTH>(to + width, dbias[i]);
        store_all<WIDTH>(to + 2 * width, dx_sums[i]);
    }
    __syncthreads();
    for (int i = threadIdx.y * lanes + threadIdx.x; i < 3 * width; i += threads) {
        C total = 0;
        for (int g = 0; g < groups; ++g) total += sums_of_groups[g * 3 * width + i];
        partials[i] = total;
    }
}

// Long rows, which leave no registers for the sums of dx, in up to 512 threads of VECTORS vectors.
// partials: (gridDim.x, 2, width). Shared memory: LONG_STAGES * VECTORS * 32 bytes a thread.
constexpr int LONG_STAGES = 2;

template <typename T, int VECTORS>
__global__ void __launch_bounds__(512, VECTORS == 1 && sizeof(T) < 8 ? 2 : 1)
norm_backward_long(T* __restrict__ dx, Compute<T>* __restrict__ partials, const T* __restrict__ dy,
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
    C means[LONG_STAGES], rstds[LONG_STAGES];
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
        #pragma unroll
        for (int j = 1; j < LONG_STAGES; ++j) {
            means[j - 1] = means[j];
            rstds[j - 1] = rstds[j];
        }
        means[LONG_STAGES - 1] = inside && mean_in != nullptr ? mean_in[row] : C(0);
        rstds[LONG_STAGES - 1] = inside ? rstd_in[row] : C(0);
    };
    #pragma unroll
    for (int i = 0; i < LONG_STAGES; ++i) fetch(group_row() + i * step, i);
    const C inverse_width = C(1) / C(width);
    int slot = 0;
    for (long long base = blockIdx.x * (long long)blockDim.y; base < rows; base += step) {
        // Wait for a row and start loading another.
        const long long row = base + threadIdx.y;
        cp_async_wait<LONG_STAGES - 1>();
        Words xs[VECTORS], dys[VECTORS];
        #pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            xs[i] = stages[((slot * VECTORS + i) * 2 + 0) * threads];
            dys[i] = stages[((slot * VECTORS + i) * 2 + 1) * threads];
        }
        Words others[VECTORS] = {};
        if (dsum != nullptr) load_row(others, dsum + row * width, row < rows ? vectors : 0);
        const C mean = means[0], rstd = rstds[0];
        fetch(row + LONG_STAGES * step, slot);
        slot = slot + 1 < LONG_STAGES ? slot + 1 : 0;

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
