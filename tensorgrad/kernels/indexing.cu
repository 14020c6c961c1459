// total[rows[i]] += values[i], in an order that depends on the rows alone: the gradient of indexing
// with integers and of embeddings. No atomics on floating point: the rows are sorted first.
//
// sort_count, sort_scatter: one pass of a stable radix sort of row numbers, 8 bits at a time, that
//   carries along where each came from. A block takes `chunk` of them. A number outside of total
//   counts as row `height`, behind all others.
// add_rows_window: a block takes WINDOW sorted numbers and sums the values of equal ones in fp32
//   (fp64 for double). Runs that lie inside the window are added to the total; the sum of a run
//   that came in from the window before is written to heads, that of one that continues to tails.
//   Reads sizeof(T) bytes an element of values, and reads and writes 4 for each element of total
//   that is touched: with the first value of a run, not when its sum is complete.
// add_rows_join: adds, for each run over several windows, the parts in a fixed order.
// N is 16 / sizeof(T), and 1 where an array is not aligned or the width no multiple of it.
//
// The naive kernel, a thread for column j:
//
//   for (int i = 0; i < size; ++i)
//       if (0 <= rows[i] && rows[i] < height) total[rows[i]][j] += values[i][j];
//
// Phases: for each 8 bits of the row numbers sort_count and sort_scatter; add_rows_window;
// add_rows_join.
//
// where: VALUES = double, 1 | double, 2 | float, 1 | float, 4 | __half, 1 | __half, 8 |
//     __nv_bfloat16, 1 | __nv_bfloat16, 8
// instantiate: {sort_count | sort_scatter}<{int | long long | unsigned int}>
// instantiate: add_rows_window<{VALUES}>
// instantiate: add_rows_join<{double, 1 | double, 2 | float, 1 | float, 4}>
#include "types.cuh"

constexpr int DIGITS = 256, SORT_THREADS = 1024, WARPS = SORT_THREADS / 32, WINDOW = 32, GROUPS = 8;

// The number of a row to sort by, from the caller's integers or from the pass before.
template <typename I> __device__ inline unsigned int key_of(I row, unsigned int height) {
    return row < I(0) || row >= height ? height : (unsigned int)row;
}
template <> __device__ inline unsigned int key_of(unsigned int key, unsigned int) { return key; }

// counts[block][digit] = how many numbers of the block's chunk have the digit.
template <typename I>
__global__ void __launch_bounds__(SORT_THREADS)
sort_count(unsigned int* __restrict__ counts, const I* __restrict__ rows, unsigned int size,
           unsigned int chunk, unsigned int height, int shift) {
    __shared__ unsigned int found[DIGITS];
    if (threadIdx.x < DIGITS) found[threadIdx.x] = 0;
    __syncthreads();
    const unsigned int end = min(size, (blockIdx.x + 1) * chunk);
    for (unsigned int i = blockIdx.x * chunk + threadIdx.x; i < end; i += SORT_THREADS)
        atomicAdd(&found[key_of(rows[i], height) >> shift & (DIGITS - 1)], 1u);
    __syncthreads();
    if (threadIdx.x < DIGITS) counts[blockIdx.x * DIGITS + threadIdx.x] = found[threadIdx.x];
}

// Move each number of the chunk behind those with a smaller digit and those that came before it.
// `order` is null in the first pass, where every number comes from its own place.
template <typename I>
__global__ void __launch_bounds__(SORT_THREADS)
sort_scatter(unsigned int* __restrict__ keys_out, unsigned int* __restrict__ order_out,
             const I* __restrict__ rows, const unsigned int* __restrict__ order,
             const unsigned int* __restrict__ counts, unsigned int size, unsigned int chunk,
             unsigned int height, int shift) {
    __shared__ unsigned int next[DIGITS];          // where the next number with the digit goes
    __shared__ unsigned int places[WARPS][DIGITS];   // and those of each warp
    const int thread = threadIdx.x, warp = thread / 32;
    // Where the first number with each digit goes.
    unsigned int total = 0, mine = 0;
    if (thread < DIGITS) {
        for (unsigned int block = 0; block < gridDim.x; ++block) {
            const unsigned int count = counts[block * DIGITS + thread];
            total += count;
            if (block < blockIdx.x) mine += count;
        }
        next[thread] = total;
    }
    __syncthreads();
    for (int step = 1; step < DIGITS; step *= 2) {   // running sum of the totals
        const unsigned int left = thread < DIGITS && thread >= step ? next[thread - step] : 0;
        __syncthreads();
        if (thread < DIGITS) next[thread] += left;
        __syncthreads();
    }
    if (thread < DIGITS) next[thread] += mine - total;

    // Rank the numbers of a warp among those with the same digit.
    const unsigned int end = min(size, (blockIdx.x + 1) * chunk);
    for (unsigned int start = blockIdx.x * chunk; start < end; start += SORT_THREADS) {
        for (int i = thread; i < WARPS * DIGITS; i += SORT_THREADS) places[0][i] = 0;
        __syncthreads();
        const unsigned int i = start + thread;
        const bool given = i < end;
        const unsigned int key = given ? key_of(rows[i], height) : 0;
        const unsigned int digit = given ? key >> shift & (DIGITS - 1) : DIGITS;
        const unsigned int same = __match_any_sync(0xffffffffu, digit);
        const int rank = __popc(same & ((1u << thread % 32) - 1));
        if (given && rank == 0) places[warp][digit] = __popc(same);
        __syncthreads();
        // Where those of each warp go.
        if (thread < DIGITS) {
            unsigned int place = next[thread];
            for (int w = 0; w < WARPS; ++w) {
                const unsigned int count = places[w][thread];
                places[w][thread] = place;
                place += count;
            }
            next[thread] = place;
        }
        __syncthreads();
        // Scatter.
        if (given) {
            const unsigned int place = places[warp][digit] + rank;
            keys_out[place] = key;
            order_out[place] = order == nullptr ? i : order[i];
        }
        __syncthreads();
    }
}

template <typename T, int N>
__global__ void __launch_bounds__(256)
add_rows_window(Compute<T>* __restrict__ total, Compute<T>* __restrict__ heads,
                Compute<T>* __restrict__ tails, const unsigned int* __restrict__ keys,
                const unsigned int* __restrict__ order, const T* __restrict__ values,
                unsigned int size, unsigned int height, int width) {
    using C = Compute<T>;
    constexpr int BATCH = 4;   // rows under way at a time
    constexpr int PART = N < VECTOR<C> ? N : VECTOR<C>, PARTS = N / PART;   // vectors of one access
    __shared__ unsigned int row[WINDOW + 2], from[WINDOW];   // row[1] is the first of the window
    // Load the row numbers of the window.
    const unsigned int first = blockIdx.x * WINDOW;
    const int count = min(WINDOW, size - first);
    for (int i = threadIdx.x; i < WINDOW + 2; i += blockDim.x)
        row[i] = first + i >= 1 && first + i <= size ? keys[first + i - 1] : height;
    for (int i = threadIdx.x; i < count; i += blockDim.x) from[i] = order[first + i];
    __syncthreads();
    const bool from_before = blockIdx.x > 0 && row[0] == row[1];
    const bool continues = first + WINDOW < size && row[WINDOW] == row[WINDOW + 1];
    // Sum each run of equal numbers.
    const int column = (blockIdx.y * blockDim.x + threadIdx.x) * N;
    if (column >= width || row[1] == height) return;
    Vec<C, PART> sum[PARTS] = {}, base[PARTS];
    bool head = from_before;   // whether the sum belongs to a run that came in
    for (int start = 0; start < count; start += BATCH) {
        Vec<T, N> batch[BATCH];
        Vec<C, PART> before[BATCH][PARTS];
        // Load.
        #pragma unroll
        for (int k = 0; k < BATCH; ++k) {
            const int i = start + k;
            if (i >= count || row[i + 1] == height) break;
            batch[k] = load<N>(values + from[i] * (long long)width + column);
            if (i == 0 ? !from_before : row[i] != row[i + 1])
                #pragma unroll
                for (int p = 0; p < PARTS; ++p)
                    before[k][p] =
                        load<PART>(total + row[i + 1] * (long long)width + column + p * PART);
        }
        // Add; store where a run ends.
        #pragma unroll
        for (int k = 0; k < BATCH; ++k) {
            const int i = start + k;
            if (i >= count || row[i + 1] == height) break;
            const bool last = i + 1 == count, ends = last || row[i + 1] != row[i + 2];
            const bool whole = !head && !(last && continues);
            C* to = head ? heads + blockIdx.x * (long long)width
                : whole ? total + row[i + 1] * (long long)width
                : tails + blockIdx.x * (long long)width;
            #pragma unroll
            for (int p = 0; p < PARTS; ++p) {
                if (i == 0 ? !from_before : row[i] != row[i + 1]) base[p] = before[k][p];
                #pragma unroll
                for (int j = 0; j < PART; ++j) {
                    sum[p].values[j] += to_compute(batch[k].values[p * PART + j]);
                    if (ends && whole) sum[p].values[j] += base[p].values[j];
                }
                if (ends) {
                    store(to + column + p * PART, sum[p]);
                    sum[p] = {};
                }
            }
            if (ends) head = false;
        }
    }
}

// A block for each window; those whose last run starts there and continues have work. Threads: x
// along columns, y takes every GROUPS-th part.
template <typename C, int N>
__global__ void __launch_bounds__(32 * GROUPS, 1)
add_rows_join(C* __restrict__ total, const C* __restrict__ heads, const C* __restrict__ tails,
              const unsigned int* __restrict__ keys, unsigned int size, unsigned int height,
              int width) {
    constexpr int BATCH = 8;
    __shared__ Vec<C, N> sums[GROUPS][32];
    // Find the run that this window opens.
    const unsigned int window = blockIdx.x, windows = gridDim.x, end = (window + 1) * WINDOW;
    if (end >= size) return;
    const unsigned int row = keys[end], first_row = keys[window * WINDOW];
    const bool starts_here = window == 0 || first_row != row || keys[window * WINDOW - 1] != row;
    if (row == height || keys[end - 1] != row || !starts_here) return;
    // Add its parts, each group of threads some of them.
    const int column = (blockIdx.y * 32 + threadIdx.x) * N;
    const bool given = column < width;
    Vec<C, N> sum = {};
    if (given && threadIdx.y == 0) sum = load<N>(tails + window * (long long)width + column);
    bool open = given;
    for (unsigned int first = window + 1 + threadIdx.y; open; first += BATCH * GROUPS) {
        Vec<C, N> parts[BATCH];
        bool inside[BATCH];
        #pragma unroll
        for (int k = 0; k < BATCH; ++k) {
            const unsigned int other = first + k * GROUPS;
            inside[k] = other < windows && keys[other * WINDOW] == row;
            if (inside[k]) parts[k] = load<N>(heads + other * (long long)width + column);
        }
        #pragma unroll
        for (int k = 0; k < BATCH; ++k)
            #pragma unroll
            for (int j = 0; j < N; ++j)
                if (inside[k]) sum.values[j] += parts[k].values[j];
        open = inside[BATCH - 1];
    }
    // Add up the groups and store.
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (!given || threadIdx.y > 0) return;
    for (int group = 1; group < GROUPS; ++group)
        #pragma unroll
        for (int j = 0; j < N; ++j) sum.values[j] += sums[group][threadIdx.x].values[j];
    const Vec<C, N> before = load<N>(total + row * (long long)width + column);
    #pragma unroll
    for (int j = 0; j < N; ++j) sum.values[j] += before.values[j];
    store(total + row * (long long)width + column, sum);
}
