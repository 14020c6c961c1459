// Parts of FlashAttention's forward and backward kernels with mma.sync: a block of 4
// warps holds 64 R rows, each warp 16 R of them, and streams N columns at a time.
//
// Rows in shared memory have 16 bytes more than their D elements, so that 8 rows lie in different
// banks; the padding holds what else belongs to a row: its keep mask of dropout, its statistics.
// Where D is more than the heads are wide the rest is zeros.
//
// Elements have 16 bits, or are floats, which are rounded to TF32 as they become operands: ldmatrix
// moves 16 bytes of a row, whatever they hold, and one mma.sync takes 32 bytes of terms.
#pragma once
#include "ampere.cuh"
#include "attention/arguments.cuh"
#include "fragment.cuh"

constexpr int THREADS = 128;
template <typename T, int D> constexpr int PITCH = D + VECTOR<T>;   // elements to the next row
template <typename T> constexpr int TERMS = 2 * VECTOR<T>;           // terms of an mma.sync

// The same number, which the compiler does not know: it computes what follows from it again for
// each tile that needs it, instead of keeping that in registers.
__device__ inline int rematerialize(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

// Words of an operand as tensor cores take them.
template <typename T, int WORDS> __device__ inline void round_operand(unsigned (&words)[WORDS]) {
    if constexpr (sizeof(T) == 4) {
        #pragma unroll
        for (unsigned& word : words) word = round_to_tf32(word);
    }
}

// Load rows of `width` elements into a tile, zeros where there are none. A kernel without registers
// to spare passes its thread's number through `rematerialize`.
template <int ROWS, int D, typename T>
__device__ inline void load_tile(T* tile, const T* from, long long stride, int rows, int width,
                                 bool aligned, unsigned thread = threadIdx.x) {
    constexpr int PIECE = VECTOR<T>, PIECES = D / PIECE;
    constexpr int STEP = THREADS / PIECES;   // rows that all threads load at a time
    const int column = thread % PIECES * PIECE, row = thread / PIECES;
    if (THREADS % PIECES && row >= STEP) return;
    if (aligned) {
        const int used = column < width ? 16 : 0;
        const unsigned to = shared_address(tile + row * PITCH<T, D> + column);
        const T* at = from + row * stride + column;
        #pragma unroll
        for (int r = 0; r < ROWS; r += STEP, at += STEP * stride)
            if (ROWS % STEP == 0 || row + r < ROWS)
                cp_async<16>(to + r * PITCH<T, D> * sizeof(T), at, row + r < rows ? used : 0);
    } else {
        #pragma unroll 1
        for (int r = row; r < ROWS; r += STEP) {
            Vec<T> piece;
            #pragma unroll
            for (int e = 0; e < PIECE; ++e) {
                const bool exists = r < rows && column + e < width;
                piece.values[e] = exists ? from[r * stride + column + e] : T(0.0f);
            }
            store(tile + r * PITCH<T, D> + column, piece);
        }
    }
}

// A warp's 16 R rows as the first operand of products, a step for each TERMS elements: in registers
// where these suffice (IN_REGISTERS), else read again from shared memory for each step.
template <typename T, int R, int D, bool IN_REGISTERS> struct RowOperand {
    static constexpr int STEPS = D / TERMS<T>;
    unsigned address, words[IN_REGISTERS ? STEPS : 1][R][4];

    __device__ void start(T* tile) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        T* own = tile + warp * 16 * R * PITCH<T, D>;
        if constexpr (sizeof(T) == 4) {   // round once, in place
            #pragma unroll 1
            for (int i = lane; i < 16 * R * D; i += 32) {
                unsigned& word = reinterpret_cast<unsigned*>(own)[i / D * PITCH<T, D> + i % D];
                word = round_to_tf32(word);
            }
            __syncwarp();
        }
        address = shared_address(own + lane % 16 * PITCH<T, D> + lane / 16 * VECTOR<T>);
        if constexpr (IN_REGISTERS) {
            #pragma unroll
            for (int d = 0; d < STEPS; ++d) read(words[d], d);
        }
    }
    __device__ void read(unsigned (&to)[R][4], int d) const {
        #pragma unroll
        for (int r = 0; r < R; ++r)
            ldmatrix(to[r], address + 16 * r * PITCH<T, D> * sizeof(T) + 32 * d);
    }
    __device__ void step(unsigned (&to)[R][4], int d) const {
        if constexpr (IN_REGISTERS) {
            #pragma unroll
            for (int i = 0; i < 4 * R; ++i) to[i / 4][i % 4] = words[d][i / 4][i % 4];
        } else {
            read(to, d);
        }
    }
};

// Two blocks of 8 columns for each of R blocks of rows.
template <typename T, int R, int N>
__device__ inline void mma_columns(Fragment<R, N>& c, int j, const unsigned (&rows)[R][4],
                                   const unsigned (&columns)[4]) {
    #pragma unroll
    for (int r = 0; r < R; ++r) {
        mma<T>(c.block(r, j), rows[r], columns[0], columns[1]);
        mma<T>(c.block(r, j + 1), rows[r], columns[2], columns[3]);
    }
}

// c += a b^T: a the warp's rows, b a tile of N rows.
template <typename T, int R, int N, int D, bool IN_REGISTERS>
__device__ inline void multiply_rows(Fragment<R, N>& c,
                                     const RowOperand<T, R, D, IN_REGISTERS>& a, const T* b) {
    const int lane = threadIdx.x % 32;
    const unsigned address = shared_address(b + (lane % 8 + lane / 16 * 8) * PITCH<T, D> +
                                            lane / 8 % 2 * VECTOR<T>);
    #pragma unroll
    for (int d = 0; d < D / TERMS<T>; ++d) {
        unsigned rows[R][4], columns[4];
        a.step(rows, d);
        #pragma unroll
        for (int n = 0; n < N / 16; ++n) {
            ldmatrix(columns, address + 16 * n * PITCH<T, D> * sizeof(T) + 32 * d);
            round_operand<T>(columns);
            mma_columns<T>(c, 2 * n, rows, columns);
        }
    }
}

// c += w b: w as a product left it, rounded; b a tile of N rows, of which W elements count.
template <int D, int R, int N, int W, typename T>
__device__ inline void accumulate(Fragment<R, W>& c, const Fragment<R, N>& w, const T* b) {
    const int lane = threadIdx.x % 32;
    const unsigned address = shared_address(b + lane % 16 * PITCH<T, D> + lane / 16 * 8);
    #pragma unroll
    for (int n = 0; n < N / 16; ++n) {
        unsigned rows[R][4], columns[4];
        #pragma unroll
        for (int i = 0; i < 4 * R; ++i)
            rows[i / 4][i % 4] = w.template word<T>(i / 4 * (N / 4) + 4 * n + i % 4);
        #pragma unroll
        for (int d = 0; d < W / 16; ++d) {
            ldmatrix_transposed(columns, address + (16 * n * PITCH<T, D> + 16 * d) * 2);
            mma_columns<T>(c, 2 * d, rows, columns);
        }
    }
}

// The same in TF32. Of each 8 terms thread t of a quad has numbers 2 t and 2 t + 1 of w, where
// mma.sync takes t and t + 4. A sum may take its terms in any order, so the rows of b come in the
// order of w's columns. ldmatrix transposes 16 bits alone: b is read word by word, 2 (D + 4) words
// apart within a quad, which is 8 banks.
template <int D, int R, int N, int W>
__device__ inline void accumulate(Fragment<R, W>& c, const Fragment<R, N>& w, const float* b) {
    const int lane = threadIdx.x % 32;
    const unsigned address = shared_address(b + lane % 4 * 2 * PITCH<float, D> + lane / 4);
    #pragma unroll
    for (int n = 0; n < N / 8; ++n) {
        unsigned rows[R][4];
        #pragma unroll
        for (int i = 0; i < 4 * R; ++i)   // word 2 t + h: half t of the terms, half h of the rows
            rows[i / 4][i % 4] = __float_as_uint(
                w.values[(i / 4 * (N / 8) + n) * 4 + i % 2 * 2 + i % 4 / 2]);
        #pragma unroll
        for (int r = 0; r < R; ++r) round_operand<float>(rows[r]);
        #pragma unroll
        for (int d = 0; d < W / 8; ++d) {
            const unsigned from = address + (8 * n * PITCH<float, D> + 8 * d) * 4;
            unsigned columns[2] = {load_word(from), load_word(from + PITCH<float, D> * 4)};
            round_operand<float>(columns);
            #pragma unroll
            for (int r = 0; r < R; ++r) mma<float>(c.block(r, d), rows[r], columns[0], columns[1]);
        }
    }
}

// Two neighbouring elements.
template <typename T> __device__ inline void store_pair(T* to, float first, float second) {
    if constexpr (sizeof(T) == 4) *reinterpret_cast<float2*>(to) = make_float2(first, second);
    else *reinterpret_cast<unsigned*>(to) = pack<T>(first, second);
}

struct Unchanged {
    __device__ void operator()() const {}
};

// A warp writes the first `rows` of its 16 R rows, scaled, by way of its part of a tile, 16 bytes
// at a time. `change` may change the part before it is written.
template <int D, int R, int W, typename T, typename F = Unchanged>
__device__ inline void store_rows(T* to, long long stride, int rows, int width, bool aligned,
                                  T* tile, const Fragment<R, W>& c, const float (&scale)[2 * R],
                                  F change = {}) {
    constexpr int PIECE = VECTOR<T>, PIECES = W / PIECE;
    const int lane = threadIdx.x % 32;
    __syncwarp();
    #pragma unroll
    for (int h = 0; h < 2 * R; ++h)
        #pragma unroll
        for (int j = 0; j < W; j += 8)
            store_pair(tile + c.row_of(h) * PITCH<T, D> + c.column_of(j), c.at(h, j) * scale[h],
                       c.at(h, j + 1) * scale[h]);
    __syncwarp();
    change();
    #pragma unroll
    for (int i = lane; i < 16 * R * PIECES; i += 32) {
        const int row = i / PIECES, column = i % PIECES * PIECE;
        if (row >= rows || column >= width) continue;
        const Vec<T> piece = load<PIECE>(tile + row * PITCH<T, D> + column);
        T* at = to + row * stride + column;
        if (aligned) {
            store(at, piece);
        } else {
            for (int e = 0; e < PIECE && column + e < width; ++e) at[e] = piece.values[e];
        }
    }
}

// Whether a tile of n columns from `column` on meets the band of a warp's rows, `row` being the
// first of them, and whether it lies inside the band of all of them. Computed for each tile from
// little, so as to take few registers.
template <int R, bool KEYS>
__device__ inline bool overlaps_band(const AttentionArguments& p, const Span& span, int row,
                                     int column, int n) {
    const int last = min(row + 16 * R, KEYS ? span.keys : span.queries) - 1;
    return row <= last && column < range_of<KEYS>(p, span, last).last &&
           column + n > range_of<KEYS>(p, span, row).first;
}
template <int R, bool KEYS>
__device__ inline bool inside_band(const AttentionArguments& p, const Span& span, int row,
                                   int column, int n) {
    return column >= range_of<KEYS>(p, span, row + 16 * R - 1).first &&
           column + n <= range_of<KEYS>(p, span, row).last;
}

// Scores of a tile start from the bias over the scale, by which they are multiplied
// later; 0 without a bias. `head` is the query head, row and column are the warp's first.
template <bool KEYS, int R, int N>
__device__ inline void start_scores(Fragment<R, N>& s, const AttentionArguments& p,
                                    const Span& span, const float* bias, int sequence, int head,
                                    int row, int column) {
    if (bias == nullptr) return s.clear();
    bias += sequence * p.bias[0] + head * p.bias[1];
    #pragma unroll
    for (int j = 0; j < N / 8; ++j) {
        const int lane = rematerialize(threadIdx.x % 32);
        __syncwarp();   // or the compiler would load all at once, and run out of registers
        #pragma unroll
        for (int i = 0; i < 4; ++i)
            #pragma unroll
            for (int r = 0; r < R; ++r) {
                const int h = 2 * r + i / 2, c = 8 * j + i % 2;
                const int own = row + s.row_of(h, lane), other = column + s.column_of(c, lane);
                const int query = KEYS ? other : own, key = KEYS ? own : other;
                float x = 0;
                if (query < span.queries && key < span.keys)
                    x = bias[query * p.bias[2] + key * p.bias[3]];
                // Where all of a row is the least float its log-sum-exp would lose all precision.
                s.at(h, c) = x == -infinity<float>() ? x : fmaxf(x, -3e4f) * p.inverse_scale;
            }
    }
}

// -inf where a row does not see a column.
template <bool KEYS, int R, int N>
__device__ inline void mask_scores(Fragment<R, N>& s, const AttentionArguments& p, const Span& span,
                                   int row, int column) {
    const int lane = rematerialize(threadIdx.x % 32), own = s.column_of(column, lane);
    #pragma unroll
    for (int h = 0; h < 2 * R; ++h) {
        const ColumnRange range = range_of<KEYS>(p, span, row + s.row_of(h, lane));
        s.mask_row(h, range.first - own, range.last - own);
    }
}

// Elements times `factor` where dropout keeps their weights, else 0. The keep mask of a query lies
// in the padding of its row of `tile`: of the block's own rows, or with KEYS of the columns.
template <bool KEYS, int D, int R, int N, typename T>
__device__ inline void apply_dropout(Fragment<R, N>& x, const T* tile, float factor) {
    const int warp = threadIdx.x / 32, lane = rematerialize(threadIdx.x % 32);
    #pragma unroll
    for (int j = 0; j < N / 8; ++j)
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int column = x.column_of(8 * j + i % 2, lane);
            if (i % 2 == 0) __syncwarp();
            #pragma unroll
            for (int r = 0; r < R; ++r) {
                const int h = 2 * r + i / 2, row = warp * 16 * R + x.row_of(h, lane);
                const int query = KEYS ? column : row, bit = KEYS ? row : column;
                const Word* words = reinterpret_cast<const Word*>(tile + query * PITCH<T, D> + D);
                x.at(h, 8 * j + i % 2) *= words[bit / 64] >> bit % 64 & 1 ? factor : 0.0f;
            }
        }
}

// Draw the keep mask of a tile, and leave it where apply_dropout wants it. `block_row` is the
// block's first row, `head` the query head.
template <bool KEYS, int D, int R, int N, typename T>
__device__ inline void draw_keep_mask(T* tile, const AttentionArguments& p,
                                      const AttentionDropout& dropout, int sequence, int head,
                                      int block_row, int column) {
    constexpr int QUERIES = KEYS ? N : 64 * R, BITS = KEYS ? 64 * R : N;
    draw_keep_bits<QUERIES, BITS>(
        p, dropout, Word(sequence) * p.heads + head, KEYS ? column : block_row,
        KEYS ? block_row : column, THREADS, [&](int query, int key, unsigned bits) {
            reinterpret_cast<unsigned short*>(tile + query * PITCH<T, D> + D)[key / 16] = bits;
        });
    __syncthreads();
}
