// layer_norm and rms_norm forward (see norm.cuh). With a residual, x + residual is what is
// normalised, and is written too.
//
//   norm_forward_rows   x is read once, y written once: cp.async loads the next row while one is
//                       worked on in registers, where weight and bias stay
//   norm_forward_loop   any width and alignment: x is read three times, from caches where it fits
//
// norm_forward_rows moves 2 * sizeof(T) bytes an element (4 with a residual) and wants rows of
// whole, aligned 16-byte vectors. All results are written with =. Launched by kernels/norm.py.
//
// The naive kernel, a thread for row r:
//
//   float mean = 0, variance = 0;
//   for (int j = 0; j < width; ++j) mean += x[r][j] / width;        // rms_norm: 0
//   for (int j = 0; j < width; ++j) variance += (x[r][j] - mean) * (x[r][j] - mean) / width;
//   const float rstd = 1 / sqrt(variance + eps);
//   for (int j = 0; j < width; ++j) y[r][j] = (x[r][j] - mean) * rstd * weight[j] + bias[j];
//   mean_out[r] = mean;
//   rstd_out[r] = rstd;
//
// Phases: load the weights; wait for the kernel before, where few rows are launched so that the two
// overlap (overlap.py). Of a row: load and add the residual; start loading the next row; moments of
// a warp; moments of the row; normalize and store.
//
// where: TYPE = double | float | __half | __nv_bfloat16
// where: SHAPE = 1, 0 | 3, 32 | 3, 0 | 4, 64 | 4, 128 | 4, 0
// instantiate: norm_forward_rows<{TYPE}, {SHAPE}, {true | false}, false>
// instantiate: norm_forward_rows<{__half | __nv_bfloat16}, {SHAPE}, {true | false}, true>
// instantiate: norm_forward_loop<{TYPE}>
#include "norm.cuh"
#include "overlap.cuh"

// Values that a warp, and then a row, has seen so far. rms_norm leaves the mean 0.
template <typename C> __device__ inline void merge(Moments<C>& own, const Moments<C>& other) {
    const C apart = other.mean - own.mean, part = other.count / (own.count + other.count);
    own.squares += other.squares + apart * apart * own.count * part;
    own.mean += apart * part;
    own.count += other.count;
}

// Blocks of an SM: as many as leave each thread the registers it needs.
template <typename T, int VECTORS, int LANES, bool RESIDUAL>
constexpr int FORWARD_BLOCKS = sizeof(T) == 8 || LANES == 0 ? 1
                               : VECTORS > 3                ? 5
                               : RESIDUAL                   ? 6
                                                            : 7;

// RESIDUAL: x + residual, rounded, is written to sum_out and normalised. WIDE: weight and bias are
// stored in the compute type. Shared memory: VECTORS * 16 bytes a thread, twice that with RESIDUAL.
// LANES: threads a row, in blocks of 128; 0 where only blockDim says.
template <typename T, int VECTORS, int LANES, bool RESIDUAL, bool WIDE>
__global__ void __launch_bounds__(LANES > 0 ? 128 : 512,
                                  FORWARD_BLOCKS<T, VECTORS, LANES, RESIDUAL>)
    norm_forward_rows(T* __restrict__ y, T* __restrict__ sum_out, Compute<T>* __restrict__ mean_out,
                      Compute<T>* __restrict__ rstd_out, const T* __restrict__ x,
                      const T* __restrict__ residual, const void* __restrict__ weight,
                      const void* __restrict__ bias, long long rows, int width, double eps,
                      bool overlaps) {
    using C = Compute<T>;
    constexpr int WIDTH = VECTOR<T>;
    __shared__ Moments<C> shared[2][32];
    extern __shared__ __align__(16) unsigned char memory[];
    const int row_threads = LANES > 0 ? LANES : blockDim.x,
              threads = LANES > 0 ? 128 : blockDim.x * blockDim.y;
    const int vectors = width / WIDTH, groups = threads / row_threads, step = gridDim.x * groups;

    // Each thread loads its part of the next row into memory of its own: no barrier.
    Words* next = reinterpret_cast<Words*>(memory) + threadIdx.y * row_threads + threadIdx.x;
    long long row = blockIdx.x * (long long)groups + threadIdx.y,
              place = row * width + threadIdx.x * WIDTH;
    const auto fetch = [&] {
        #pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            const int offset = i * row_threads;
            const bool inside = row < rows && threadIdx.x + offset < vectors;
            cp_async(next + i * threads, x + place + offset * WIDTH, inside);
            if (RESIDUAL)
                cp_async(next + (VECTORS + i) * threads, residual + place + offset * WIDTH, inside);
        }
        cp_async_commit();
    };

    // Load the weights.
    C count = 0;   // number of the values that this warp has of a row
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
            weights[i] = pack<T>(ones);
            biases[i] = Words{};
            if (v < vectors && weight != nullptr)
                weights[i] = load_words(static_cast<const T*>(weight) + v * WIDTH);
            if (v < vectors && bias != nullptr)
                biases[i] = load_words(static_cast<const T*>(bias) + v * WIDTH);
        }
    }
    const C inverse_width = C(1) / C(width), inverse_count = C(1) / max(count, C(1));
    // Wait for the kernel before.
    if (overlaps) {
        start_next_kernel();
        wait_for_previous_kernel();
    }
    fetch();

    int turn = 0;
    while (row - threadIdx.y < rows) {
        // Load and add the residual.
        const long long mine = row, here = place;
        row += step;
        place += step * (long long)width;
        cp_async_wait<0>();
        C values[VECTORS][WIDTH];
        #pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            unpack<T>(next[i * threads], values[i]);
            if constexpr (RESIDUAL) {
                C others[WIDTH];
                unpack<T>(next[(VECTORS + i) * threads], others);
                #pragma unroll
                for (int j = 0; j < WIDTH; ++j) values[i][j] += others[j];
                const Words rounded = pack<T>(values[i]);
                if (mine < rows && threadIdx.x + i * row_threads < vectors)
                    store_words(sum_out + here + i * row_threads * WIDTH, rounded);
                unpack<T>(rounded, values[i]);
            }
        }
        // Start loading the next row.
        fetch();
        const bool centre = mean_out != nullptr;
        // Moments of a warp.
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
            if (!centre) sums.first = 0;   // infinity times 0 would be NaN
            const C mean = sums.first * inverse_count, squares = sums.second - mean * sums.first;
            own.mean = first + mean;
            own.squares = squares < 0 ? C(0) : squares;   // NaN stays
        } else {
            C sum = 0;
            #pragma unroll
            for (int i = 0; i < VECTORS; ++i)
                #pragma unroll
                for (C value : values[i]) sum += value;
            if (centre) own.mean = warp_sum(sum, lanes) * inverse_count;
            #pragma unroll
            for (int i = 0; i < VECTORS; ++i) {
                if (threadIdx.x + i * row_threads >= vectors) continue;
                #pragma unroll
                for (C value : values[i]) own.squares += (value - own.mean) * (value - own.mean);
            }
            own.squares = warp_sum(own.squares, lanes);
        }
        // Moments of the row.
        if (const int warps = row_threads / 32; warps > 1) {
            Moments<C>* of = shared[turn] + threadIdx.y * warps;   // in turn: one barrier is enough
            turn ^= 1;
            if (threadIdx.x % 32 == 0) of[threadIdx.x / 32] = own;
            __syncthreads();
            own = of[0];
            for (int i = 1; i < warps; ++i) merge(own, of[i]);
        }
        // Normalize and store.
        const C rstd = rsqrt(own.squares * inverse_width + C(eps)), shift = -own.mean * rstd;
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
            for (int j = 0; j < WIDTH; ++j)
                values[i][j] = (values[i][j] * rstd + shift) * w[j] + b[j];
            store_values(y + here + i * row_threads * WIDTH, values[i]);
        }
    }
}

template <typename T>
__global__ void __launch_bounds__(512, 1)
norm_forward_loop(T* __restrict__ y, T* __restrict__ sum_out, Compute<T>* __restrict__ mean_out,
                  Compute<T>* __restrict__ rstd_out, const T* __restrict__ x,
                  const T* __restrict__ residual, const void* __restrict__ weight, bool weight_wide,
                  const void* __restrict__ bias, bool bias_wide, long long rows, int width,
                  double eps) {
    using C = Compute<T>;
    __shared__ C partials[64];
    GroupReducer<C> group(partials);
    const long long row = group_row();
    const int count = row < rows ? width : 0;
    x += row * width;
    y += row * width;
    // Add the residual.
    if (residual != nullptr) {   // from here on x is the sum
        residual += row * width;
        T* sum = sum_out + row * width;
        const bool alike = aligned_alike(x, residual) && aligned_alike(x, sum);
        for_places(x, count, alike, [&](int place, auto n) {
            auto values = load<n>(x + place);
            const auto others = load<n>(residual + place);
            #pragma unroll
            for (int j = 0; j < n; ++j)
                values.values[j] =
                    from_compute<T>(to_compute(values.values[j]) + to_compute(others.values[j]));
            store(sum + place, values);
        });
        __syncthreads();
        x = sum;
    }

    // Moments of the row.
    C mean = 0;
    if (mean_out != nullptr)
        mean = group.sum(sum_values(x, count, [](C value) { return value; })) / C(width);
    // Squares of the differences from the mean, so that nothing cancels.
    const C squares =
        sum_values(x, count, [&](C value) { return (value - mean) * (value - mean); });
    const C rstd = rsqrt(group.sum(squares) / C(width) + C(eps));
    if (threadIdx.x == 0 && row < rows) {
        rstd_out[row] = rstd;
        if (mean_out != nullptr) mean_out[row] = mean;
    }
    // Normalize and store.
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
