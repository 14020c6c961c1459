// Reductions of a contiguous array seen as (outer, length, inner) over its middle axis.
//
// Each input is read once (sizeof(In) bytes an element), each result written once, with =, but for
// sums that reduce_columns adds to what is there.
//   reduce_rows_tile      inner == 1, very short rows, not aligned: one thread a row
//   reduce_rows_warp      inner == 1, short rows: 1 to 32 lanes a row
//   reduce_rows_block     inner == 1, long rows: one block a row, or a chunk of a row
//   reduce_columns        inner > 1: threads side by side along inner, and down the axis
//   scan_rows             running sums of rows
//   sum_parts             sums over rows that other kernels have added up in parts
// Where there are too few results to fill the GPU, the axis is cut into `splits` chunks: a first
// launch with First<Op> writes one accumulator a chunk, a second with Last<Op> combines these. The
// order of all additions follows from the shape alone; no atomics.
//
// 16-bit types accumulate in float, sums of integers in 64 bits. Launched by kernels/reduce.py.
//
// The naive kernel, a thread for a result (o, i); a sum here, any operation of reduce_ops.cuh:
//
//   Acc acc = Op::identity();
//   for (int j = 0; j < length; ++j) acc = Op::combine(acc, Op::lift(x[o][j][i], j));
//   y[o][i] = Op::finish(acc, parameter);
//
// Phases: each thread absorbs its values; across the lanes of a warp; across the warps of a block;
// a second launch across the chunks.
//
// where: FLOAT = double | float | __half | __nv_bfloat16
// where: SUM = Sum<{{FLOAT} | __half, float | __nv_bfloat16, float | long long | int, long long |
//     bool, long long}>
// where: OP = {SUM} | {Any | All}<bool> | Prod<{{FLOAT} | long long}> |
//     {Max | Min | ArgMax | ArgMin}<{{FLOAT} | long long | unsigned long long | int}> |
//     {Mean | Var | LogSumExp | NormOne | NormTwo | NormMax}<{FLOAT}>
// instantiate: {reduce_rows_tile | reduce_rows_warp | reduce_rows_block}<{OP}>
// instantiate: reduce_rows_block<{First | Last}<{OP}>>
// instantiate: reduce_columns<{{OP} | First<{OP}>}, {true | false}>
// instantiate: reduce_columns<Last<{OP}>, false>
// instantiate: {reduce_rows_tile | reduce_rows_warp | reduce_rows_block}<SumOfSquares<{FLOAT}>>
// instantiate: reduce_rows_block<{First | Last}<SumOfSquares<{FLOAT}>>>
// instantiate: scan_rows<{{SUM} | First<Last<{SUM}>>}>
// instantiate: sum_parts<{float, float | float, __half | float, __nv_bfloat16 | double, double}>
#include "async.cuh"
#include "overlap.cuh"
#include "reduce_ops.cuh"

constexpr int UNROLL = 4;   // independent loads in flight for each thread

// Blocks that an SM holds at once. Left to itself, ptxas spills to fit more.
template <typename T> constexpr int PAIR_BLOCKS = 4;
template <> constexpr int PAIR_BLOCKS<__half> = 3;
template <typename Op>
constexpr int BLOCKS = PAIRS_COLUMNS<Op>               ? PAIR_BLOCKS<typename Op::In>
                       : sizeof(typename Op::Acc) < 16 ? 3
                                                       : 2;

// Absorb count values at p, shared among `threads`, by 16-byte loads wherever p is aligned.
template <typename Op>
__device__ inline void absorb_row(typename Op::Acc& acc, const typename Op::In* p, int count,
                                  int thread, int threads, long long first) {
    using In = typename Op::In;
    constexpr int WIDTH = VECTOR<In>;
    const int past = int(reinterpret_cast<size_t>(p) / sizeof(In) % WIDTH);
    const int head = min(count, (WIDTH - past) % WIDTH);
    const int vectors = (count - head) / WIDTH;
    // UNROLL vectors at a time, then one at a time.
    int v = thread;
    for (; v + (UNROLL - 1) * threads < vectors; v += UNROLL * threads) {
        In x[UNROLL * WIDTH];
        #pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const Vec<In> vector = load<WIDTH>(p + head + (v + u * threads) * WIDTH);
            #pragma unroll
            for (int i = 0; i < WIDTH; ++i) x[u * WIDTH + i] = vector.values[i];
        }
        Op::template absorb<WIDTH>(acc, x, first + head + v * WIDTH, threads * WIDTH);
    }
    for (; v < vectors; v += threads) {
        const Vec<In> x = load<WIDTH>(p + head + v * WIDTH);
        Op::template absorb<WIDTH>(acc, x.values, first + head + v * WIDTH, 0);
    }
    // before and after the vectors
    for (int i = thread; i < count - vectors * WIDTH; i += threads) {
        const int place = i < head ? i : i + vectors * WIDTH;
        const In x[1] = {p[place]};
        Op::template absorb<1>(acc, x, first + place, 0);
    }
}

// y: (rows,). x: (rows, length), aligned. Shared memory: the rows of a block, one for each thread.
template <typename Op>
__global__ void __launch_bounds__(128)
reduce_rows_tile(typename Op::Out* __restrict__ y, const typename Op::In* __restrict__ x,
                 long long rows, int length, double parameter) {
    using In = typename Op::In;
    extern __shared__ __align__(16) unsigned char memory[];
    In* tile = reinterpret_cast<In*>(memory);
    // Load the rows of the block.
    const long long first = blockIdx.x * 128ll, row = first + threadIdx.x;
    const int count = int(min(128ll, rows - first)) * length, vectors = count / VECTOR<In>;
    x += first * length;
    for (int v = threadIdx.x; v < vectors; v += 128)
        cp_async(reinterpret_cast<Words*>(memory) + v, x + v * VECTOR<In>, true);
    cp_async_commit();
    for (int i = vectors * VECTOR<In> + threadIdx.x; i < count; i += 128) tile[i] = x[i];
    cp_async_wait<0>();
    __syncthreads();
    if (row >= rows) return;
    // Absorb a row.
    typename Op::Acc acc = Op::identity();
    const In* own = tile + threadIdx.x * length;
    int i = 0;
    for (; i + UNROLL <= length; i += UNROLL) {
        In some[UNROLL];
        #pragma unroll
        for (int u = 0; u < UNROLL; ++u) some[u] = own[i + u];
        Op::template absorb<UNROLL>(acc, some, i, 0);
    }
    for (; i < length; ++i) {
        const In one[1] = {own[i]};
        Op::template absorb<1>(acc, one, i, 0);
    }
    y[row] = Op::finish(acc, parameter);
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
    acc = Op::across(acc, lanes);
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

// Several sums: totals[i], (columns,), gets the sum of the rows of parts[i], (rows, columns) with
// `pitch` elements from row to row; it is written with +=, where `add` says so, or with =. Blocks
// from first_block[i] on compute it.
struct PartialSums {
    static constexpr int MOST = 48;
    unsigned long long totals[MOST], parts[MOST];   // addresses
    int columns[MOST], rows[MOST], pitch[MOST], add[MOST], first_block[MOST];
    int count;
    int overlaps;   // with the next kernel, see overlap.py
};

// A block has 32 x 32 threads and 32 columns.
template <typename C, typename T>
__global__ void __launch_bounds__(1024)
sum_parts(const __grid_constant__ PartialSums p) {
    __shared__ C sums[32][33];
    wait_for_previous_kernel();
    if (p.overlaps) start_next_kernel();
    int i = 0;   // the last sum that begins at this block or before
    for (int step = 32; step > 0; step /= 2)
        if (i + step < p.count && p.first_block[i + step] <= int(blockIdx.x)) i += step;
    const int columns = p.columns[i], rows = p.rows[i], block = blockIdx.x - p.first_block[i];
    const long long pitch = p.pitch[i];
    // Sums of a thread.
    const int column = block * 32 + threadIdx.x;
    const C* parts = reinterpret_cast<const C*>(p.parts[i]) + column;
    C sum = 0;
    if (column < columns) {
        #pragma unroll 8
        for (int row = threadIdx.y; row < rows; row += 32) sum += parts[row * pitch];
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    // Sums of columns: warp y has column y.
    sum = warp_sum(sums[threadIdx.x][threadIdx.y]);
    const int own = block * 32 + threadIdx.y;
    if (threadIdx.x > 0 || own >= columns) return;
    T& total = reinterpret_cast<T*>(p.totals[i])[own];
    total = from_compute<T>(p.add[i] ? to_compute(total) + sum : sum);
}

// y: (outer, splits, inner). x: (outer, length, inner), its axis cut into splits chunks.
// A block is (bx, by, bz), at most 256 threads: bx along inner, each with one column or, where
// WIDE, WIDTH columns of which inner is a multiple; by, a power of two, down the axis; bz along
// outer.
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

    // Each thread absorbs its values.
    Acc acc[WIDTH];
    #pragma unroll
    for (int j = 0; j < WIDTH; ++j) acc[j] = Op::identity();
    if (inside) {
        const In* p = x + (slab * length + begin) * inner + column;
        int r = threadIdx.y;
        constexpr bool PAIRS = WIDE && PAIRS_COLUMNS<Op>;
        if constexpr (PAIRS) r = Op::begin_columns(acc, p, inner, r, count, step, begin);
        for (; !PAIRS && r + (UNROLL - 1) * step < count; r += UNROLL * step) {
            Vec<In, WIDTH> rows[UNROLL];
            #pragma unroll
            for (int u = 0; u < UNROLL; ++u) rows[u] = load<WIDTH>(p + (r + u * step) * inner);
            #pragma unroll
            for (int j = 0; j < WIDTH; ++j) {
                In values[UNROLL];
                #pragma unroll
                for (int u = 0; u < UNROLL; ++u) values[u] = rows[u].values[j];
                Op::template absorb<1>(acc[j], values, begin + r, step);
            }
        }
        for (; r < count; r += step) {
            const Vec<In, WIDTH> row = load<WIDTH>(p + r * inner);
            #pragma unroll
            for (int j = 0; j < WIDTH; ++j) {
                const In values[1] = {row.values[j]};
                Op::template absorb<1>(acc[j], values, begin + r, step);
            }
        }
    }

    // Across the threads of a column.
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
    // Store.
    if (inside && threadIdx.y == 0) {
        #pragma unroll
        for (int j = 0; j < WIDTH; ++j) {
            typename Op::Out& out = y[(slab * splits + split) * inner + column + j];
            const typename Op::Out result = Op::finish(acc[j], parameter);
            if constexpr (MAY_ADD<Op>)
                out = parameter != 0 ? typename Op::Out(out + result) : result;
            else out = result;
        }
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
        // Load, then sum within a warp.
        const int i = base + threadIdx.x;
        Acc acc = Op::identity();
        if (i < count) {
            const typename Op::In value[1] = {x[i]};
            Op::template absorb<1>(acc, value, 0, 0);
        }
        #pragma unroll
        for (int offset = 1; offset < 32; offset *= 2) {
            const Acc left = __shfl_up_sync(0xffffffff, acc, offset);
            if (lane >= offset) acc = Op::combine(left, acc);
        }
        // Across the warps.
        if (lane == 31) sums[warp] = acc;
        __syncthreads();
        Acc own = before;
        #pragma unroll
        // every thread adds up the warps on its left, and all of them
        for (int w = 0; w < 8; ++w) {
            if (w == warp) own = before;
            before = Op::combine(before, sums[w]);
        }
        // Store.
        if (i < count) y[i] = Op::finish(Op::combine(own, acc), 0);
        __syncthreads();
    }
}
