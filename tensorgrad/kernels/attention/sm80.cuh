// What the forward and the backward kernels of flash attention with mma.sync share: a block of 4 warps
// holds 64 R rows, each warp 16 R of them, and meets N columns at a time.
//
// Rows in shared memory have 16 bytes more than their D elements, so that 8 rows lie in different
// banks; there lives what else belongs to a row: its bits of dropout, its sums. Where D is more than
// the heads are wide the rest is zeros.
#pragma once
#include "ampere.cuh"
#include "attention/arguments.cuh"

constexpr int THREADS = 128;
template <int D> constexpr int PITCH = D + 8;   // elements from one row to the next

__device__ inline unsigned pack(float low, float high, __half) {
    const __half2 both = __floats2half2_rn(low, high);
    return reinterpret_cast<const unsigned&>(both);
}
__device__ inline unsigned pack(float low, float high, __nv_bfloat16) {
    const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const unsigned&>(both);
}

// Over the four lanes that share a row of a product.
template <typename F> __device__ inline float quad_reduce(float x, F combine) {
    x = combine(x, __shfl_xor_sync(0xffffffff, x, 1));
    return combine(x, __shfl_xor_sync(0xffffffff, x, 2));
}

// The same number, of which the compiler does not know that: what follows from it is computed again
// for each tile that needs it, and takes no registers in between.
__device__ inline int anew(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

// Rows of `width` elements into a tile, zeros where there are none.
template <int ROWS, int D, typename T>
__device__ inline void load_tile(T* tile, const T* from, long long stride, int rows, int width, bool aligned) {
    constexpr int PIECES = D / 8, STEP = THREADS / PIECES;   // rows that all threads load at a time
    const int column = threadIdx.x % PIECES * 8, row = threadIdx.x / PIECES;
    if (THREADS % PIECES && row >= STEP) return;
    if (aligned) {
        const int used = column < width ? 16 : 0;
        const unsigned to = to_shared(tile + row * PITCH<D> + column);
        const T* at = from + row * stride + column;
        #pragma unroll
        for (int r = 0; r < ROWS; r += STEP, at += STEP * stride)
            if (ROWS % STEP == 0 || row + r < ROWS)
                copy_async<16>(to + r * PITCH<D> * 2, at, row + r < rows ? used : 0);
    } else {
        #pragma unroll 1
        for (int r = row; r < ROWS; r += STEP) {
            Vec<T> piece;
            #pragma unroll
            for (int e = 0; e < 8; ++e)
                piece.values[e] = r < rows && column + e < width ? from[r * stride + column + e] : T(0.0f);
            store(tile + r * PITCH<D> + column, piece);
        }
    }
}

// A warp's rows, 16 R of them, as fragments: of D / 16 steps, kept where registers suffice, or read
// again for each.
template <int R, int D, bool KEEPS> struct Rows {
    unsigned address, kept[KEEPS ? D / 16 : 1][R][4];

    template <typename T> __device__ void start(const T* tile) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        address = to_shared(tile + (warp * 16 * R + lane % 16) * PITCH<D> + lane / 16 * 8);
        if constexpr (KEEPS) {
            #pragma unroll
            for (int d = 0; d < D / 16; ++d) read(kept[d], d);
        }
    }
    __device__ void read(unsigned (&to)[R][4], int d) const {
        #pragma unroll
        for (int r = 0; r < R; ++r) load_matrices(to[r], address + (16 * r * PITCH<D> + 16 * d) * 2);
    }
    __device__ void step(unsigned (&to)[R][4], int d) const {
        if constexpr (KEEPS) {
            #pragma unroll
            for (int r = 0; r < R; ++r)
                #pragma unroll
                for (int i = 0; i < 4; ++i) to[r][i] = kept[d][r][i];
        } else {
            read(to, d);
        }
    }
};

// c += a b^T: a the warp's rows, b a tile of N rows.
template <int N, typename T, int R, int D, bool KEEPS>
__device__ inline void multiply_rows(float (&c)[R][N / 8][4], const Rows<R, D, KEEPS>& a, const T* b) {
    const int lane = threadIdx.x % 32;
    const unsigned address = to_shared(b + (lane % 8 + lane / 16 * 8) * PITCH<D> + lane / 8 % 2 * 8);
    #pragma unroll
    for (int d = 0; d < D / 16; ++d) {
        unsigned rows[R][4], columns[4];
        a.step(rows, d);
        #pragma unroll
        for (int n = 0; n < N / 16; ++n) {
            load_matrices(columns, address + (16 * n * PITCH<D> + 16 * d) * 2);
            #pragma unroll
            for (int r = 0; r < R; ++r) {
                multiply<T>(c[r][2 * n], rows[r], columns[0], columns[1]);
                multiply<T>(c[r][2 * n + 1], rows[r], columns[2], columns[3]);
            }
        }
    }
}

// c += w b: w as a product left it, rounded; b a tile of N rows, of which W elements count.
template <int D, int R, int N, int W, typename T>
__device__ inline void accumulate(float (&c)[R][W / 8][4], const float (&w)[R][N / 8][4], const T* b) {
    const int lane = threadIdx.x % 32;
    const unsigned address = to_shared(b + lane % 16 * PITCH<D> + lane / 16 * 8);
    #pragma unroll
    for (int n = 0; n < N / 16; ++n) {
        unsigned rows[R][4], columns[4];
        #pragma unroll
        for (int r = 0; r < R; ++r)
            #pragma unroll
            for (int i = 0; i < 4; ++i)
                rows[r][i] = pack(w[r][2 * n + i / 2][i % 2 * 2], w[r][2 * n + i / 2][i % 2 * 2 + 1], T());
        #pragma unroll
        for (int d = 0; d < W / 16; ++d) {
            load_matrices_transposed(columns, address + (16 * n * PITCH<D> + 16 * d) * 2);
            #pragma unroll
            for (int r = 0; r < R; ++r) {
                multiply<T>(c[r][2 * d], rows[r], columns[0], columns[1]);
                multiply<T>(c[r][2 * d + 1], rows[r], columns[2], columns[3]);
            }
        }
    }
}

// A warp writes the first `rows` of its 16 R rows by way of its part of a tile, 16 bytes at a time.
template <int D, int R, int W, typename T>
__device__ inline void store_rows(T* to, long long stride, int rows, int width, bool aligned, T* tile,
                                  const float (&c)[R][W / 8][4], const float (&scale)[R][2]) {
    const int lane = threadIdx.x % 32;
    __syncwarp();
    #pragma unroll
    for (int r = 0; r < R; ++r)
        #pragma unroll
        for (int j = 0; j < W / 8; ++j)
            #pragma unroll
            for (int h = 0; h < 2; ++h)
                *reinterpret_cast<unsigned*>(
                    tile + (16 * r + 8 * h + lane / 4) * PITCH<D> + 8 * j + lane % 4 * 2) =
                    pack(c[r][j][2 * h] * scale[r][h], c[r][j][2 * h + 1] * scale[r][h], T());
    __syncwarp();
    #pragma unroll
    for (int i = lane; i < 16 * R * (W / 8); i += 32) {
        const int row = i / (W / 8), column = i % (W / 8) * 8;
        if (row >= rows || column >= width) continue;
        const Vec<T> piece = load<8>(tile + row * PITCH<D> + column);
        T* at = to + row * stride + column;
        if (aligned) {
            store(at, piece);
        } else {
            for (int e = 0; e < 8 && column + e < width; ++e) at[e] = piece.values[e];
        }
    }
}

// Which tiles of n columns from `column` on a warp's rows meet, `row` being the first of them: some of
// them, and all of them. Computed for each tile from little, so as to take few registers.
template <int R, bool KEYS>
__device__ inline bool meets(const Problem& p, const Span& span, int row, int column, int n) {
    const int last = min(row + 16 * R, KEYS ? span.keys : span.queries) - 1;
    return row <= last && column < range_of<KEYS>(p, span, last).last &&
           column + n > range_of<KEYS>(p, span, row).first;
}
template <int R, bool KEYS>
__device__ inline bool meets_all(const Problem& p, const Span& span, int row, int column, int n) {
    return column >= range_of<KEYS>(p, span, row + 16 * R - 1).first &&
           column + n <= range_of<KEYS>(p, span, row).last;
}

template <int R, int J> __device__ inline void clear(float (&c)[R][J][4]) {
    #pragma unroll
    for (int r = 0; r < R; ++r)
        #pragma unroll
        for (int j = 0; j < J; ++j)
            #pragma unroll
            for (int i = 0; i < 4; ++i) c[r][j][i] = 0;
}

// What the scores of a tile start from: the bias over the scale, by which they are multiplied later.
template <bool KEYS, int R, int N>
__device__ inline void start_scores(float (&s)[R][N / 8][4], const Problem& p, const Span& span,
                                    const float* bias, int row, int column) {
    #pragma unroll
    for (int j = 0; j < N / 8; ++j) {
        const int lane = anew(threadIdx.x % 32);
        __syncwarp();   // or the compiler would ask for all at once, and run out of registers
        #pragma unroll
        for (int i = 0; i < 4; ++i)
            #pragma unroll
            for (int r = 0; r < R; ++r) {
                const int own = row + 16 * r + i / 2 * 8 + lane / 4;
                const int other = column + 8 * j + lane % 4 * 2 + i % 2;
                const int query = KEYS ? other : own, key = KEYS ? own : other;
                float x = 0;
                if (query < span.queries && key < span.keys) x = bias[query * p.bias[2] + key * p.bias[3]];
                // Where all of a row is the least float its sum's logarithm would lose all precision.
                s[r][j][i] = x == -infinity<float>() ? x : fmaxf(x, -3e4f) * p.inverse;
            }
    }
}

// -inf where row and column do not meet.
template <bool KEYS, int R, int N>
__device__ inline void hide(float (&s)[R][N / 8][4], const Problem& p, const Span& span, int row, int column) {
    const int lane = anew(threadIdx.x % 32);
    #pragma unroll
    for (int r = 0; r < R; ++r)
        #pragma unroll
        for (int h = 0; h < 2; ++h) {
            const Range range = range_of<KEYS>(p, span, row + 16 * r + 8 * h + lane / 4);
            const int first = range.first - column - lane % 4 * 2, last = range.last - column - lane % 4 * 2;
            #pragma unroll
            for (int j = 0; j < N / 8; ++j)
                #pragma unroll
                for (int e = 0; e < 2; ++e)
                    if (8 * j + e < first || 8 * j + e >= last) s[r][j][2 * h + e] = -infinity<float>();
        }
}

// Elements times `factor` where dropout spares their weights, else 0. The bits of the queries lie in
// the padding of the rows of `tile`: of the block's own rows, or with KEYS of the columns.
template <bool KEYS, int D, int R, int N, typename T>
__device__ inline void drop(float (&x)[R][N / 8][4], const T* tile, float factor) {
    const int warp = threadIdx.x / 32, lane = anew(threadIdx.x % 32), own = warp * 16 * R + lane / 4;
    #pragma unroll
    for (int j = 0; j < N / 8; ++j)
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int column = 8 * j + lane % 4 * 2 + i % 2;
            if (i % 2 == 0) __syncwarp();
            #pragma unroll
            for (int r = 0; r < R; ++r) {
                const int row = own + 16 * r + i / 2 * 8;
                const int query = KEYS ? column : row, bit = KEYS ? row : column;
                const Word* words = reinterpret_cast<const Word*>(tile + query * PITCH<D> + D);
                x[r][j][i] *= words[bit / 64] >> bit % 64 & 1 ? factor : 0.0f;
            }
        }
}
