// Token embedding: rows of `weight` selected by ids; and position embedding: rows added to them.
//
// embedding_forward: one thread a vector of N elements of y: 2 * sizeof(T) bytes an element and the
//   id, with positions as much again, which stay in L2. Written with =. An id outside the
//   vocabulary, or a position outside theirs, gives a row of NaN.
// N is 16 / sizeof(T), and 1 where an array is not aligned or the width no multiple of it.
// Backward: indexing.cu.
//
// The naive kernel, a thread for row i of y:
//
//   for (int j = 0; j < width; ++j)
//       y[i][j] = weight[ids[i]][j] + positions[starts[i / steps] + i % steps][j];
//
// instantiate: embedding_forward<double, {1 | 2}>
// instantiate: embedding_forward<float, {1 | 4}>
// instantiate: embedding_forward<{__half | __nv_bfloat16}, {1 | 8}>
#include "exp.cuh"
#include "types.cuh"

// positions, of which there are `reach`, may be null; row i of y gets their row i % steps, counted
// from starts[i / steps] unless that is null. wide says that ids have 64 bits. Threads: x along a
// row, y along rows.
template <typename T, int N>
__global__ void __launch_bounds__(256)
embedding_forward(T* __restrict__ y, const T* __restrict__ weight, const void* __restrict__ ids,
                  const T* __restrict__ positions, const int* __restrict__ starts, long long rows,
                  long long vocabulary, int width, int steps, int reach, int wide) {
    const long long row = blockIdx.x * (long long)blockDim.y + threadIdx.y;
    if (row >= rows) return;
    const long long id = wide ? static_cast<const long long*>(ids)[row]
                              : static_cast<const int*>(ids)[row];
    int step = rows < 1ll << 31 ? int(row) % steps : int(row % steps);
    if (starts != nullptr) step += starts[row / steps];
    const bool placed = positions != nullptr && 0 <= step && step < reach,
               inside = 0 <= id && id < vocabulary && (positions == nullptr || placed);
    for (int column = threadIdx.x * N; column < width; column += blockDim.x * N) {
        Vec<T, N> values, shift;
        if (placed) shift = load<N>(positions + step * (long long)width + column);
        if (inside) values = load<N>(weight + id * width + column);
        #pragma unroll
        for (int j = 0; j < N; ++j) {
            if (!inside)
                values.values[j] = from_compute<T>(infinity<float>() - infinity<float>());
            else if (positions != nullptr)
                values.values[j] =
                    from_compute<T>(to_compute(values.values[j]) + to_compute(shift.values[j]));
        }
        store(y + row * width + column, values);
    }
}
