// layer_norm and rms_norm over the last axis: y = (x - mean) * rstd * weight + bias. A null mean
// makes it rms_norm, a null weight is 1, a null bias 0. Statistics are in the compute type. With a
// residual, x + residual is what is normalised, and written too; backward then takes a gradient of
// that sum as well, and its dx is the gradient of both summands.
//
//   norm_forward_rows         x is read once, y written once: the next row is on its way to shared
//                             memory while one is worked on in registers, where weight and bias stay
//   norm_forward_loop         any width and alignment: x is read three times, from caches where it fits
//   norm_backward_rows        x and dy are read once, dx is written once; sums for dweight and dbias
//                             stay in registers over the rows of a block, which writes one partial row
//   norm_backward_loop        any width and alignment: dx alone, x and dy are read twice
//   norm_backward_columns     any width and alignment: the partial rows, x and dy are read again
//   norm_backward_parameters  adds up the partial rows, in order
//
// The two *_rows kernels move 2 and 3 * sizeof(T) bytes an element (4 and 4 with a residual) and want
// rows of whole, aligned 16-byte vectors. All results are written with =. Launched by ops/norm_cuda.py.
//
// where: TYPE = double | float | __half | __nv_bfloat16
// where: SHAPE = 1, 0 | 3, 32 | 3, 0 | 4, 64 | 4, 128 | 4, 0
// instantiate: norm_forward_rows<{TYPE}, {SHAPE}, {true | false}, false>
// instantiate: norm_forward_rows<{__half | __nv_bfloat16}, {SHAPE}, {true | false}, true>
// instantiate: norm_backward_rows<{TYPE}, {1 | 2}>
// instantiate: {norm_forward_loop | norm_backward_loop | norm_backward_columns}<{TYPE}>
// instantiate: norm_backward_parameters<{double | float}>
#include "async.cuh"
#include "rows.cuh"

constexpr int STAGES = 2;   // rows that backward has under way for each group

// VECTOR<T> parameters from `column` on, of those stored in the compute type; without any, `absent`.
template <typename T>
__device__ inline void load_wide(Compute<T> (&out)[VECTOR<T>], const void* p, int column, int absent) {
    using C = Compute<T>;
    #pragma unroll
    for (int j = 0; j < VECTOR<T>; j += VECTOR<C>) {
        Vec<C> part;
        if (p != nullptr) part = load<VECTOR<C>>(static_cast<const C*>(p) + column + j);
        #pragma unroll
        for (int k = 0; k < VECTOR<C>; ++k) out[j + k] = p != nullptr ? part.values[k] : C(absent);
    }
}

template <typename T>
__device__ inline void store_wide(Compute<T>* p, const Compute<T> (&values)[VECTOR<T>]) {
    using C = Compute<T>;
    #pragma unroll
    for (int j = 0; j < VECTOR<T>; j += VECTOR<C>) {
        Vec<C> part;
        #pragma unroll
        for (int k = 0; k < VECTOR<C>; ++k) part.values[k] = values[j + k];
        store(p + j, part);
    }
}

template <typename T>
__device__ inline Compute<T> load_parameter(const void* p, bool wide, int column) {
    return wide ? static_cast<const Compute<T>*>(p)[column]
                : to_compute(static_cast<const T*>(p)[column]);
}

// What a warp, and then a row, has seen so far. Without a mean that is 0.
template <typename C>
struct Moments {
    C count, mean, squares;   // squares: the sum of (value - mean)^2

    // Chan et al. 1979 (Stanford STAN-CS-79-773), eq. 2.1.
    __device__ void join(const Moments& other) {
        const C apart = other.mean - mean, part = other.count / (count + other.count);
        squares += other.squares + apart * apart * count * part;
        mean += apart * part;
        count += other.count;
    }
};

template <typename C>
struct Pair {
    C first, second;
};
template <typename C> __device__ inline Pair<C> operator+(Pair<C> a, Pair<C> b) {
    return {a.first + b.first, a.second + b.second};
}

// Blocks of a multiprocessor: as many as leave each thread the registers it needs.
template <typename T, int VECTORS, int LANES>
constexpr int FORWARD_BLOCKS = sizeof(T) == 8 || LANES == 0 ? 1 : VECTORS > 3 ? 5 : 7;

// RESIDUAL: x + residual, rounded, is written to sum_out and normalised. WIDE: weight and bias are
// stored in the compute type. Shared memory: VECTORS * 16 bytes a thread, twice that with RESIDUAL.
// LANES: threads a row, in blocks of 128; 0 where only blockDim says.
template <typename T, int VECTORS, int LANES, bool RESIDUAL, bool WIDE>
__global__ void __launch_bounds__(LANES > 0 ? 128 : 512, FORWARD_BLOCKS<T, VECTORS, LANES>)
norm_forward_rows(T* __restrict__ y, T* __restrict__ sum_out, Compute<T>* __restrict__ mean_out,
                  Compute<T>* __restrict__ rstd_out, const T* __restrict__ x,
                  const T* __restrict__ residual, const void* __restrict__ weight,
                  const void* __restrict__ bias, long long rows, int width, double eps) {
    using C = Compute<T>;
    constexpr int WIDTH = VECTOR<T>;
    __shared__ Moments<C> shared[2][32];
    extern __shared__ __align__(16) unsigned char memory[];
    const int row_threads = LANES > 0 ? LANES : blockDim.x, threads = LANES > 0 ? 128 : blockDim.x * blockDim.y;
    const int vectors = width / WIDTH, groups = threads / row_threads, step = gridDim.x * groups;

    // Each thread copies its share of the next row to memory of its own: no barrier.
    Words* next = reinterpret_cast<Words*>(memory) + threadIdx.y * row_threads + threadIdx.x;
    long long row = blockIdx.x * (long long)groups + threadIdx.y, place = row * width + threadIdx.x * WIDTH;
    const auto fetch = [&] {
        #pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            const int offset = i * row_threads;
            const bool inside = row < rows && threadIdx.x + offset < vectors;
            copy_async(next + i * threads, x + place + offset * WIDTH, inside);
            if (RESIDUAL) copy_async(next + (VECTORS + i) * threads, residual + place + offset * WIDTH, inside);
        }
        end_batch();
    };
    fetch();

    C count = 0;   // of the values that this warp has of a row
    const int lanes = min(row_threads, 32), first = row_threads > 32 ? threadIdx.x / 32 * 32 : 0;
    Words weights[WIDE ? 1 : VECTORS], biases[WIDE ? 1 : VECTORS];
    #pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        count += max(0, min(lanes, vectors - first - i * row_threads)) * WIDTH;
        if constexpr (!WIDE) {
            C ones[WIDTH];
            #pragma unroll
            for (C& value : ones) value = 1;
            const int v = threadIdx.x + i * row_threads;
            weights[i] = pack(ones, T());
            biases[i] = Words{};
            if (v < vectors && weight != nullptr) weights[i] = load_words(static_cast<const T*>(weight) + v * WIDTH);
            if (v < vectors && bias != nullptr) biases[i] = load_words(static_cast<const T*>(bias) + v * WIDTH);
        }
    }
    const C share = C(1) / C(width), own_share = C(1) / max(count, C(1));

    int turn = 0;
    while (row - threadIdx.y < rows) {
        const long long mine = row, here = place;
        row += step;
        place += step * (long long)width;
        wait_for_batches<0>();
        C values[VECTORS][WIDTH];
        #pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            unpack<T>(next[i * threads], values[i]);
            if constexpr (RESIDUAL) {
                C others[WIDTH];
                unpack<T>(next[(VECTORS + i) * threads], others);
                #pragma unroll
                for (int j = 0; j < WIDTH; ++j) values[i][j] += others[j];
                const Words rounded = pack(values[i], T());
                if (mine < rows && threadIdx.x + i * row_threads < vectors)
                    store_words(sum_out + here + i * row_threads * WIDTH, rounded);
                unpack<T>(rounded, values[i]);
            }
        }
        fetch();
        const bool centre = mean_out != nullptr;
        Moments<C> own = {count, 0, 0};
        if constexpr (sizeof(T) == 2) {
            // Both sums at once, of the differences to the first value. Where that lies far off the
            // others, the variance loses log2(width) of its 24 bits: more than T has are left.
            const C first = centre ? __shfl_sync(0xffffffff, values[0][0], 0, lanes) : C(0);
            Pair<C> sums = {0, 0};
            #pragma unroll
            for (int i = 0; i < VECTORS; ++i) {
                if (threadIdx.x + i * row_threads >= vectors) continue;
                #pragma unroll
                for (C value : values[i]) {
                    const C apart = value - first;
                    sums.first += apart;
                    sums.second += apart * apart;
                }
            }
            sums = warp_sum(sums, lanes);
            const C mean = centre ? sums.first * own_share : C(0);
            own.mean = first + mean;
            own.squares = max(C(0), sums.second - mean * sums.first);
        } else {
            C sum = 0;
            #pragma unroll
            for (int i = 0; i < VECTORS; ++i)
                #pragma unroll
                for (C value : values[i]) sum += value;
            if (centre) own.mean = warp_sum(sum, lanes) * own_share;
            #pragma unroll
            for (int i = 0; i < VECTORS; ++i) {
                if (threadIdx.x + i * row_threads >= vectors) continue;
                #pragma unroll
                for (C value : values[i]) own.squares += (value - own.mean) * (value - own.mean);
            }
            own.squares = warp_sum(own.squares, lanes);
        }
        if (const int warps = row_threads / 32; warps > 1) {
            Moments<C>* of = shared[turn] + threadIdx.y * warps;   // in turn: one barrier is enough
            turn ^= 1;
            if (threadIdx.x % 32 == 0) of[threadIdx.x / 32] = own;
            __syncthreads();
            own = of[0];
            for (int i = 1; i < warps; ++i) own.join(of[i]);
        }
        const C rstd = rsqrt(own.squares * share + C(eps)), shift = -own.mean * rstd;
        if (mine >= rows) continue;
        if (threadIdx.x == 0) {
            rstd_out[mine] = rstd;
            if (mean_out != nullptr) mean_out[mine] = own.mean;
        }
        #pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            const int v = threadIdx.x + i * row_threads;
            if (v >= vectors) continue;
            C w[WIDTH], b[WIDTH];
            if constexpr (WIDE) {
                load_wide<T>(w, weight, v * WIDTH, 1);
                load_wide<T>(b, bias, v * WIDTH, 0);
            } else {
                unpack<T>(weights[i], w);
                unpack<T>(biases[i], b);
                keep_packed<T>(weights[i]);
                keep_packed<T>(biases[i]);
            }
            #pragma unroll
            for (int j = 0; j < WIDTH; ++j) values[i][j] = (values[i][j] * rstd + shift) * w[j] + b[j];
            store_values(y + here + i * row_threads * WIDTH, values[i]);
        }
    }
}

template <typename T>
__global__ void __launch_bounds__(512, 1)
norm_forward_loop(T* __restrict__ y, T* __restrict__ sum_out, Compute<T>* __restrict__ mean_out,
                  Compute<T>* __restrict__ rstd_out, const T* __restrict__ x,
                  const T* __restrict__ residual, const void* __restrict__ weight, bool weight_wide,
                  const void* __restrict__ bias, bool bias_wide, long long rows, int width, double eps) {
    using C = Compute<T>;
    __shared__ C partials[64];
    GroupReducer<C> group(partials);
    const long long row = group_row();
    const int count = row < rows ? width : 0;
    x += row * width;
    y += row * width;
    if (residual != nullptr) {   // from here on x is the sum
        residual += row * width;
        T* sum = sum_out + row * width;
        const bool alike = aligned_alike(x, residual) && aligned_alike(x, sum);
        for_places(x, count, alike, [&](int place, auto n) {
            auto values = load<n>(x + place);
            const auto others = load<n>(residual + place);
            #pragma unroll
            for (int j = 0; j < n; ++j)
                values.values[j] = from_compute<T>(to_compute(values.values[j]) + to_compute(others.values[j]));
            store(sum + place, values);
        });
        __syncthreads();
        x = sum;
    }

    C mean = 0;
    if (mean_out != nullptr) {
        C sum = 0;
        for_places(x, count, true, [&](int place, auto n) {
            const auto values = load<n>(x + place);
            #pragma unroll
            for (int j = 0; j < n; ++j) sum += to_compute(values.values[j]);
        });
        mean = group.sum(sum) / C(width);
    }
    C squares = 0;   // of what the mean leaves, so that nothing cancels
    for_places(x, count, true, [&](int place, auto n) {
        const auto values = load<n>(x + place);
        #pragma unroll
        for (int j = 0; j < n; ++j) {
            const C value = to_compute(values.values[j]) - mean;
            squares += value * value;
        }
    });
    const C rstd = rsqrt(group.sum(squares) / C(width) + C(eps));
    if (threadIdx.x == 0 && row < rows) {
        rstd_out[row] = rstd;
        if (mean_out != nullptr) mean_out[row] = mean;
    }
    for_places(x, count, aligned_alike(x, y), [&](int place, auto n) {
        auto values = load<n>(x + place);
        #pragma unroll
        for (int j = 0; j < n; ++j) {
            C value = (to_compute(values.values[j]) - mean) * rstd;
            if (weight != nullptr) value *= load_parameter<T>(weight, weight_wide, place + j);
            if (bias != nullptr) value += load_parameter<T>(bias, bias_wide, place + j);
            values.values[j] = from_compute<T>(value);
        }
        store(y + place, values);
    });
}

// With dx_hat = dy * weight and x_hat = (x - mean) * rstd:
// dx = rstd * (dx_hat - mean(dx_hat) - x_hat * mean(dx_hat * x_hat)); rms_norm lacks the second term.
// partials: (gridDim.x, 2, width), dweight and then dbias of the block's rows; null: not wanted.
// Shared memory: STAGES * VECTORS * 32 bytes a thread.
template <typename T, int VECTORS>
__global__ void __launch_bounds__(512, VECTORS == 1 && sizeof(T) < 8 ? 2 : 1)
norm_backward_rows(T* __restrict__ dx, Compute<T>* __restrict__ partials, const T* __restrict__ dy,
                   const T* __restrict__ dsum, const T* __restrict__ x, const void* __restrict__ weight, bool weight_wide,
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
        if (weight == nullptr || v >= vectors) continue;
        if (weight_wide) load_wide<T>(weights[i], weight, v * WIDTH, 1);
        else unpack<T>(load_words(static_cast<const T*>(weight) + v * WIDTH), weights[i]);
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
            unpack<T>(others[i], slopes);
            #pragma unroll
            for (int j = 0; j < WIDTH; ++j) values[j] += slopes[j];
            store_values(dx + row * width + v * WIDTH, values);
        }
    }
    if (partials == nullptr) return;

    wait_for_batches<0>();   // the ring's memory is used again
    __syncthreads();
    partials += blockIdx.x * 2ll * width;
    C* sums_of_groups = reinterpret_cast<C*>(memory);
    #pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const int v = threadIdx.x + i * blockDim.x;
        if (v >= vectors) continue;
        store_wide<T>(sums_of_groups + threadIdx.y * 2 * width + v * WIDTH, dweight[i]);
        store_wide<T>(sums_of_groups + threadIdx.y * 2 * width + width + v * WIDTH, dbias[i]);
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
    sum = group(sum, Pair<C>{0, 0}, [](Pair<C> a, Pair<C> b) { return a + b; });
    const C shift = mean_in != nullptr ? sum.first / C(width) : C(0), slope = sum.second / C(width);
    const bool alike = aligned_alike(x, dy) && aligned_alike(x, dx) && (dsum == nullptr || aligned_alike(x, dsum));
    for_places(x, count, alike, [&](int place, auto n) {
        auto values = load<n>(x + place);
        const auto dys = load<n>(dy + place), others = load<n>((dsum != nullptr ? dsum : dy) + place);
        #pragma unroll
        for (int j = 0; j < n; ++j) {
            C dx_hat = to_compute(dys.values[j]);
            if (weight != nullptr) dx_hat *= load_parameter<T>(weight, weight_wide, place + j);
            const C x_hat = (to_compute(values.values[j]) - mean) * rstd;
            const C own = rstd * (dx_hat - shift - x_hat * slope);
            values.values[j] = from_compute<T>(dsum != nullptr ? own + to_compute(others.values[j]) : own);
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
