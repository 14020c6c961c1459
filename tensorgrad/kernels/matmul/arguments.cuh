// Parts of the tiled matrix products: their arguments, the order of the tiles, and the epilogue.
#pragma once
constexpr bool ROUGH = false;   // constant of elementwise.cuh: results may have 32 bits
#include "elementwise.cuh"
#include "types.cuh"

// Filled in by kernels/matmul/tiled.py. Distances are in elements.
struct MatmulOperand {
    const void* data;
    long long batch, row, column;
};
struct MatmulArguments {
    MatmulOperand a, b;               // (rows, width) and (width, columns)
    void* y;                    // (batch, rows, columns) in C order, as are all but the bias
    const void* bias;           // (columns,), or null
    void* before_gelu;          // or null: the input of GELU is not stored
    const void* residual;       // or null
    const void* gelu_of;        // or null: else y is multiplied with the derivative of GELU there
    int rows, width, columns;
    int a_vectors, b_vectors;   // whether the contiguous axis is aligned pieces of 16 bytes
    int y_vectors;              // and those of 8 elements of y, of arrays like y, and of the bias
    int wide;                   // y and arrays like y are of the compute type; else of type T
    int bias_wide;              // the bias too
    int add;                    // y += instead of y =
    int gelu;
};

struct OutputTile {
    int batch, row, column;   // place of its first element
};

// The tile of this block (threadblock swizzle): blocks that run at the same time take GROUP rows of
// tiles, so that what they read stays in the L2 cache.
template <int ROWS, int COLUMNS>
__device__ inline OutputTile tile_of_block(const MatmulArguments& p) {
    constexpr int GROUP = 8;
    const int tall = (p.rows + ROWS - 1) / ROWS, broad = (p.columns + COLUMNS - 1) / COLUMNS;
    const int batch = blockIdx.x / (tall * broad), index = blockIdx.x - batch * tall * broad;
    const int first = index / (GROUP * broad) * GROUP, within = index - first * broad;
    const int group = min(GROUP, tall - first);
    return {batch, (first + within % group) * ROWS, within / group * COLUMNS};
}

// x += N elements in a row of type S.
template <typename S, int N, typename C>
__device__ inline void add_elements(C (&x)[N], const void* p, size_t place) {
    const Vec<S, N> v = load<N>(static_cast<const S*>(p) + place);
    #pragma unroll
    for (int i = 0; i < N; ++i) x[i] += to_compute(v.values[i]);
}
template <typename S, int N, typename C>
__device__ inline void store_elements(void* p, size_t place, const C (&x)[N]) {
    Vec<S, N> v;
    #pragma unroll
    for (int i = 0; i < N; ++i) v.values[i] = from_compute<S>(x[i]);
    store<N>(static_cast<S*>(p) + place, v);
}

// The epilogue of N elements of a row, in the compute type: rounded once, to the type S of y, at
// the end.
template <typename S, typename T, int N, typename C>
__device__ inline void epilogue_elements(const MatmulArguments& p, size_t place, int column,
                                         C (&x)[N]) {
    if (p.add) add_elements<S>(x, p.y, place);
    if (p.bias && p.bias_wide) add_elements<C>(x, p.bias, column);
    else if (p.bias) add_elements<T>(x, p.bias, column);
    if (p.before_gelu) store_elements<S>(p.before_gelu, place, x);
    if (p.gelu) {
        #pragma unroll
        for (int i = 0; i < N; ++i) x[i] = gelu_tanh(x[i]);
    }
    if (p.gelu_of) {
        const Vec<S, N> v = load<N>(static_cast<const S*>(p.gelu_of) + place);
        #pragma unroll
        for (int i = 0; i < N; ++i) x[i] *= gelu_tanh_derivative(to_compute(v.values[i]));
    }
    if (p.residual) add_elements<S>(x, p.residual, place);
    store_elements<S>(p.y, place, x);
}

// The same for N elements at `x`, of which those exist that lie in y.
template <typename T, int N>
__device__ inline void epilogue_piece(const MatmulArguments& p, int batch, int row, int column,
                                      const Compute<T>* x) {
    using C = Compute<T>;
    if (row >= p.rows) return;
    const bool narrow = sizeof(T) == 2 && !p.wide;
    const size_t place = (size_t(batch) * p.rows + row) * p.columns + column;
    if (p.y_vectors) {
        if (column >= p.columns) return;
        C all[N];
        load_all<N>(all, x);
        if (narrow) epilogue_elements<T, T>(p, place, column, all);
        else epilogue_elements<C, T>(p, place, column, all);
    } else {
        const int count = min(N, p.columns - column);
        #pragma unroll 1
        for (int i = 0; i < count; ++i) {
            C one[1] = {x[i]};
            if (narrow) epilogue_elements<T, T>(p, place + i, column + i, one);
            else epilogue_elements<C, T>(p, place + i, column + i, one);
        }
    }
}

// The epilogue of ROWS x COLUMNS results of a warp in shared memory: each thread 8 columns of a row
// at a time, so that whole 32-byte sectors are written. Not unrolled: it would not fit the
// instruction cache.
template <typename T, int ROWS, int COLUMNS, int PITCH>
__device__ inline void epilogue_rows(const MatmulArguments& p, int batch, int row, int column,
                                     const Compute<T>* from) {
    constexpr int PIECE = 8, ACROSS = COLUMNS / PIECE;
    const int lane = threadIdx.x % 32, own = lane % ACROSS * PIECE;
    #pragma unroll 1
    for (int r = lane / ACROSS; r < ROWS; r += 32 / ACROSS)
        epilogue_piece<T, PIECE>(p, batch, row + r, column + own, from + r * PITCH + own);
}
