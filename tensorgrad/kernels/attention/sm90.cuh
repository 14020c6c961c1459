// Parts of FlashAttention's forward and backward kernels on Hopper.
#pragma once
#include "attention/arguments.cuh"
#include "fragment.cuh"
#include "hopper.cuh"

// Shared memory of each block, less what it takes to align the tiles.
constexpr int TILE_BYTES = 226 * 1024 - 1024;

// Registers of a producer's thread, beside W warpgroups of consumers: what these leave of what a
// block starts with, 168 a thread where W is 2, else 128. With more setmaxnreg would deadlock.
template <int W, int CONSUMER_REGISTERS>
constexpr int PRODUCER_REGISTERS = (W + 1) * (W == 2 ? 168 : 128) - W * CONSUMER_REGISTERS;

// An address in shared memory that the compiler keeps in a register. It would otherwise compute it
// anew in each step of a loop whose length it does not know to be equal in all lanes.
template <typename X> __device__ inline X* kept_address(X* x) {
    unsigned address = shared_address(x);
    asm volatile("" : "+r"(address));
    return static_cast<X*>(__cvta_shared_to_generic(address));
}

// Store row h of a thread, scaled. The lanes of a quad exchange words until each has 8 neighbouring
// columns: 16-byte stores, of the first `width` columns.
template <typename T, int N>
__device__ inline void store_row(T* row, const Fragment<1, N>& x, int h, float scale, int width) {
    const int lane = threadIdx.x % 4;
    #pragma unroll
    for (int j = 0; j < N / 8; j += 4) {   // 4 pieces of 8 columns
        unsigned w[4];
        #pragma unroll
        for (int i = 0; i < 4; ++i)
            w[i] = pack<T>(x.at(h, 8 * (j + i)) * scale, x.at(h, 8 * (j + i) + 1) * scale);
        const bool high = lane & 2, odd = lane & 1;
        const unsigned a = __shfl_xor_sync(0xffffffff, high ? w[0] : w[2], 2);
        const unsigned b = __shfl_xor_sync(0xffffffff, high ? w[1] : w[3], 2);
        (high ? w[0] : w[2]) = a;
        (high ? w[1] : w[3]) = b;
        const unsigned c = __shfl_xor_sync(0xffffffff, odd ? w[0] : w[1], 1);
        const unsigned d = __shfl_xor_sync(0xffffffff, odd ? w[2] : w[3], 1);
        (odd ? w[0] : w[1]) = c;
        (odd ? w[2] : w[3]) = d;
        if (8 * (j + lane) < width)
            *reinterpret_cast<uint4*>(row + j * 8 + lane * 8) = make_uint4(w[0], w[1], w[2], w[3]);
    }
}

// A sum over the lanes with the same lane % 4: half for lanes without the bit `offset`, half for
// those with it: each sends the half that it does not keep.
template <int COUNT> __device__ inline void fold_lanes(float* x, int lane, int offset) {
    const bool upper = lane & offset;
    #pragma unroll
    for (int i = 0; i < COUNT / 2; ++i) {
        const float sent = upper ? x[i] : x[i + COUNT / 2], kept = upper ? x[i + COUNT / 2] : x[i];
        x[i] = kept + __shfl_xor_sync(0xffffffff, sent, offset);
    }
}

// Where sums over rows of gradients go, 16 rows of a sequence each: (batch * parts, pitch). A null
// address: they are not wanted.
struct ColumnSums {
    float* first;
    int pitch;

    // Sums of a warp's 16 rows from `row` on, scaled; `column`: of the first of its N columns.
    template <int N>
    __device__ void store(const Fragment<1, N>& x, float scale, int batch, int length, int row,
                          int column) const {
        if (first == nullptr || row >= length) return;
        const int part = batch * ((length + 15) / 16) + row / 16;
        const int lane = threadIdx.x % 32;
        const bool above = row + x.row_of(0, lane) < length,
                   below = row + x.row_of(1, lane) < length;
        float* to = first + (long long)part * pitch + column + (lane / 16 * 2 + lane / 8 % 2) * 8
                  + lane % 4 * 2;
        #pragma unroll
        for (int c = 0; c < N; c += 32) {
            float sums[8];
            #pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int own = c + i / 2 * 8 + i % 2;
                sums[i] = (above ? x.at(0, own) : 0) + (below ? x.at(1, own) : 0);
            }
            fold_lanes<8>(sums, lane, 16);
            fold_lanes<4>(sums, lane, 8);
            fold_lanes<2>(sums, lane, 4);
            to[c + lane / 4 % 2] = sums[0] * scale;
        }
    }
};

// Query i of a sequence is at position i + keys - queries, and sees the keys from position -
// window_left to position + window_right. Of the `width` columns a tile has more, which TMA fills
// with 0. A persistent grid takes the tiles of `together` heads at a time: of all where some tiles
// have more to do than others, those first that have the most; else of one, so that what it streams
// stays in the L2 cache. heads_total counts the heads that have tiles, of all sequences.
struct AttentionSm90Arguments {
    int heads, kv_heads, queries, keys, width, window_left, window_right, together, heads_total;
    float scale;
};

// Arguments that only kernels compiled with EXTRAS read. A null pointer: the launch has none.
struct AttentionSm90Extras {
    const float* bias;   // added to the scores: (batch, heads, queries, keys) with these strides
    long long bias_batch, bias_head, bias_query, bias_key;
    // Starts of the sequences, which then lie in one row of `length` queries; or null.
    const int *query_starts, *key_starts;
    Word seed, draw, stream;   // dropout, see keep_16
    const Word* offset;
    int length, columns;   // sums: of backward, padded for each sequence to a multiple of `columns`
    unsigned threshold;   // the keep probability times 2^16; 2^16: no dropout
    float inverse_keep;   // 1 / keep probability
};

// Where a sequence starts in the arrays, and its lengths.
struct Sequence {
    int batch, first_query, first_key, queries, keys;
};

template <bool EXTRAS>
__device__ inline Sequence sequence_of(const AttentionSm90Arguments& p,
                                       const AttentionSm90Extras& extras, int batch) {
    if (!EXTRAS || extras.query_starts == nullptr) return {batch, 0, 0, p.queries, p.keys};
    const int query = extras.query_starts[batch], key = extras.key_starts[batch];
    return {0, query, key, extras.query_starts[batch + 1] - query,
            extras.key_starts[batch + 1] - key};
}

// Bit i says whether dropout keeps weight number `first` + i of all (batch, heads, queries, keys):
// the bits of random_keep in random.cu, sixteen of which come from one block of random words.
__device__ inline unsigned keep_16(const AttentionSm90Extras& extras, Word draw, Word first) {
    const unsigned skip = first % 16;
    unsigned bits = 0;
    // From two blocks, where they meet in between. The whole warp decides: lanes that went ways of
    // their own here would not be together again in the matrix products that follow.
    #pragma unroll 1
    for (int i = __any_sync(0xffffffff, skip); i >= 0; --i) {
        const Bits words = philox(extras.seed, draw, extras.stream, first / 16 + i);
        unsigned block = 0;
        #pragma unroll
        for (int k = 0; k < 16; ++k) block |= unsigned(lane<16>(words, k) < extras.threshold) << k;
        bits = bits << 16 | block;
    }
    return bits >> skip & 0xffff;
}

// The keep mask: one bit for each of a thread's accumulators of 64 x N weights, of which rows are
// queries. `first` is the number of the weight in column 0 of the thread's first row, `pitch` that
// from row to row.
template <int N>
__device__ inline unsigned long long keep_rows(const AttentionSm90Extras& extras, Word draw,
                                               Word first, Word pitch) {
    constexpr int PIECES = N / 16;   // pieces of a row; a quad shares the work for its two
    const int lane = threadIdx.x % 4;
    unsigned long long keep = 0;
    #pragma unroll 1
    for (int start = 0; start < 2 * PIECES; start += 4) {
        const int own = start + lane;
        const unsigned piece =
            keep_16(extras, draw, first + own / PIECES * 8 * pitch + own % PIECES * 16);
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int which = start + i;
            const unsigned long long bits = __shfl_sync(0xffffffff, piece, i, 4) >> 2 * lane;
            if (which < 2 * PIECES)
                keep |= (bits & 3 | (bits >> 8 & 3) << 4)
                        << (which % PIECES * 8 + which / PIECES * 2);
        }
    }
    return keep;
}

// The same where rows are keys. `first` is the number of the weight in column 0 of the warp's first
// row.
template <int N>
__device__ inline unsigned long long keep_columns(const AttentionSm90Extras& extras, Word draw,
                                                  Word first, Word pitch) {
    const int lane = threadIdx.x % 32;
    unsigned long long keep = 0;
    #pragma unroll 1
    for (int start = 0; start < N; start += 32) {
        const unsigned piece = keep_16(extras, draw, first + (start + lane) * pitch);   // 16 keys
        #pragma unroll
        for (int i = 0; i < 8; ++i) {   // the columns of the thread among these 32
            const int column = i / 2 * 8 + lane % 4 * 2 + i % 2;
            const unsigned long long bits = __shfl_sync(0xffffffff, piece, column) >> lane / 4;
            if (start + i / 2 * 8 < N)
                keep |= (bits & 1 | (bits >> 8 & 1) << 2) << (start / 2 + i / 2 * 4 + i % 2);
        }
    }
    return keep;
}

// Scale the scores and add the bias, with EXTRAS. KEYS: rows are keys and columns queries, else the
// reverse. row, column: the thread's first, of `rows` and `columns`; beyond those the last is
// added.
template <bool KEYS, int N>
__device__ inline void scale_and_bias(Fragment<1, N>& s, float scale,
                                      const AttentionSm90Extras& extras, int batch, int head,
                                      int row, int rows, int column, int columns) {
    #pragma unroll
    for (float& x : s.values) x *= scale;
    if (extras.bias == nullptr) return;
    const float* bias = extras.bias + batch * extras.bias_batch + head * extras.bias_head;
    const long long row_step = KEYS ? extras.bias_key : extras.bias_query;
    const long long column_step = KEYS ? extras.bias_query : extras.bias_key;
    #pragma unroll
    for (int h = 0; h < 2; ++h) {
        const float* from = bias + min(row + 8 * h, rows - 1) * row_step;
        s.for_row(h, [&](float& x, int c) {
            x += from[min(column + c, columns - 1) * column_step];
        });
    }
}

// The tile scheduler: a block's tile number `index`.
struct AttentionTile {
    int block, head, batch;
};

__device__ inline AttentionTile tile_of(const AttentionSm90Arguments& p, int heads, int index,
                                        int blocks, bool ascending) {
    const int group = index / (blocks * p.together), within = index - group * blocks * p.together;
    const int count = min(p.together, p.heads_total - group * p.together);
    const int head = group * p.together + within % count, block = within / count;
    return {ascending ? block : blocks - 1 - block, head % heads, head / heads};
}

// Row r of a sequence sees the columns from r + low to r + high. KEYS: rows are keys and columns
// queries, else the reverse.
template <bool KEYS, int N> struct Band {
    int rows, columns, low, high;

    __device__ Band(const AttentionSm90Arguments& p, const Sequence& of)
        : rows(KEYS ? of.keys : of.queries), columns(KEYS ? of.queries : of.keys) {
        const int shift = of.keys - of.queries;
        low = KEYS ? -shift - p.window_right : shift - p.window_left;
        high = KEYS ? p.window_left - shift : shift + p.window_right;
    }
    // The blocks of N columns that rows see: the first of those from `row` on, and what follows the
    // last of those before `end`.
    __device__ int first(int row) const { return max(0, row + low) / N; }
    __device__ int last(int end) const { return (max(0, min(columns, end + high)) + N - 1) / N; }
    // -inf where a thread's row, its first being `row`, does not see a column of block n.
    __device__ void mask(Fragment<1, N>& s, int row, int n) const {
        #pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int diagonal = row + 8 * h, column = s.column_of(n * N);
            s.mask_row(h, diagonal + low - column, min(columns, diagonal + high + 1) - column);
        }
    }
};

// Call f(i, h, x) for each of a thread's accumulators of 64 rows and N columns; x is a statistic of
// its query: of row h or, with KEYS, of the column in shared memory.
template <bool KEYS, int N, typename F>
__device__ inline void for_statistics(const float (&rows)[2], const float* columns, F f) {
    #pragma unroll
    for (int j = 0; j < N / 8; ++j) {
        float2 column = {0, 0};
        if (KEYS) column = *reinterpret_cast<const float2*>(columns + 8 * j);
        #pragma unroll
        for (int i = 0; i < 4; ++i)
            f(4 * j + i, i / 2, KEYS ? i % 2 ? column.y : column.x : rows[i / 2]);
    }
}

// c (+)= a b^T; `half` is the distance in bytes of 64 columns of b from the next 64.
template <typename T, int D, int SIZE>
__device__ inline void multiply_rows(float (&c)[SIZE], unsigned long long a, unsigned long long b,
                                     int half, bool add) {
    #pragma unroll
    for (int d = 0; d < D / 16; ++d)
        Wgmma<T, 2 * SIZE>::template run<>(c, a + d / 4 * (64 * SWIZZLE / 16) + d % 4 * 2,
                                           b + d / 4 * (half / 16) + d % 4 * 2, add || d > 0);
}
// c (+)= w b.
template <typename T, int D, int WORDS>
__device__ inline void accumulate(Fragment<1, D>& c, const unsigned (&w)[WORDS],
                                  unsigned long long b, bool add = true) {
    #pragma unroll
    for (int n = 0; n < WORDS / 4; ++n)
        Wgmma<T, D>::template run<true>(c.values, w + 4 * n, b + n * (16 * SWIZZLE / 16),
                                        add || n > 0);
}

// An arrival for a warp, when all its lanes have come.
__device__ inline void arrive_warp(Mbarrier& barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier.arrive();
}

// The dynamic schedule: a block takes the next tile of all when it has loaded its last, so that
// blocks with short tiles take more of them. The producer thread takes it, and passes it on to the
// consumer warps.
template <int STAGES> struct TileQueue {
    Mbarrier full[STAGES], empty[STAGES];
    int index[STAGES];

    __device__ void init(int warps) {
        for (int i = 0; i < STAGES; ++i) {
            full[i].init(1);
            empty[i].init(warps);
        }
    }
    __device__ void put(PipelineState<STAGES>& at, int tile) {
        empty[at.stage].wait(at.parity ^ 1);
        index[at.stage] = tile;
        full[at.stage].arrive();
        at.next();
    }
    __device__ int take(PipelineState<STAGES>& at) {
        full[at.stage].wait(at.parity);
        const int tile = uniform(*static_cast<volatile int*>(&index[at.stage]));
        arrive_warp(empty[at.stage]);
        at.next();
        return tile;
    }
};

// Shared memory of a kernel that keeps 64 rows of ROW_TILES matrices for each of W warpgroups, and
// streams N rows of COLUMN_TILES matrices at a time: the tiles of rows, then a ring of stages, each
// with the tiles of columns and STATISTICS bytes that belong to them.
template <int D, int W, int N, int ROW_TILES, int COLUMN_TILES, int STATISTICS> struct StreamTiles {
    static constexpr int HALVES = (D + 63) / 64;   // 64 columns each
    static constexpr int A_BYTES = 64 * HALVES * SWIZZLE, B_BYTES = N * HALVES * SWIZZLE;
    static constexpr int STAGE = COLUMN_TILES * B_BYTES + STATISTICS;
    static constexpr int FIT = (TILE_BYTES - ROW_TILES * W * A_BYTES) / STAGE;
    static constexpr int STAGES = FIT < 4 ? FIT : 4;
};

// A warp reads tiles as one, in the products alone, but each lane reads statistics, where there are
// some (BY_LANE): each arrives.
template <int W, int STAGES, bool BY_LANE> struct StreamBarriers {
    TileQueue<1> queue;
    Mbarrier a_full[W], a_empty[W], full[STAGES], empty[STAGES];

    __device__ void init() {
        queue.init(4 * W);
        for (int g = 0; g < W; ++g) {
            a_full[g].init(1);
            a_empty[g].init(4);
        }
        for (int s = 0; s < STAGES; ++s) {
            full[s].init(1);
            empty[s].init((BY_LANE ? WARPGROUP : 4) * W);
        }
        fence_mbarrier_init();
    }
    __device__ void release(int stage) {
        if (BY_LANE)
            empty[stage].arrive();
        else
            arrive_warp(empty[stage]);
    }
};

// The producer loads the tiles of rows from `row` on, of the first ROW_TILES maps.
template <typename Tiles, int ROW_TILES, int W, int STAGES, bool BY_LANE, int MAPS>
__device__ inline void load_rows(unsigned char* tiles,
                                 StreamBarriers<W, STAGES, BY_LANE>& barriers, unsigned parity,
                                 const TensorMap* const (&maps)[MAPS], int row, int head,
                                 int batch) {
    #pragma unroll 1
    for (int g = 0; g < W; ++g) {
        Mbarrier& full = barriers.a_full[g];
        barriers.a_empty[g].wait(parity ^ 1);
        full.arrive_expect_tx(ROW_TILES * Tiles::A_BYTES);
        const int first = row + g * 64;
        #pragma unroll 1
        for (int h = 0; h < Tiles::HALVES; ++h) {
            unsigned char* to = tiles + ROW_TILES * g * Tiles::A_BYTES + h * 64 * SWIZZLE;
            #pragma unroll
            for (int i = 0; i < ROW_TILES; ++i)
                tma_load(to + i * Tiles::A_BYTES, *maps[i], full, h * 64, first, head, batch);
        }
    }
}

// The tile that a block takes next, of `tiles`: the first are those of the blocks' own numbers.
// taken: 0 before, and 0 again when each block has found that there are no more.
__device__ inline int next_tile(unsigned* taken, int tiles) {
    return gridDim.x + atomicInc(taken, tiles - 1);
}
