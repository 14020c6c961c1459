// Parts of FlashAttention's forward and backward kernels on Hopper.
#pragma once
#include "attention/keep.cuh"
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

// The strides of an array (batch, head, row, D), in elements.
struct Strides {
    long long batch, head, row;
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

// Options for which forward is compiled, beside a band: none; a mask that hides the same keys from
// all heads and queries of a sequence; dropout; both; or all of them, tested at run time.
constexpr int PLAIN = 0, KEY_MASK = 1, DROPOUT = 2, EXTRAS = 4;

// Arguments that PLAIN kernels do not read. A null pointer: the launch has none.
struct AttentionSm90Extras {
    const int* key_tiles;   // with KEY_MASK: see key_mask.cu
    const unsigned char* key_bits;
    const float* bias;   // added to the scores: (batch, heads, queries, keys) with these strides
    long long bias_batch, bias_head, bias_query, bias_key;
    // Starts of the sequences, which then lie in one row of `length` queries; or null.
    const int *query_starts, *key_starts;
    Word seed, draw, stream;   // dropout, see keep.cuh
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

// Four bytes, each filled with the sign of a byte of x (0 to 3) or y (4 to 7), which a hexadecimal
// digit of SELECTED names.
template <int SELECTED> __device__ inline unsigned sign_bytes(unsigned x, unsigned y) {
    unsigned mask;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(mask) : "r"(x), "r"(y), "n"(SELECTED | 0x8888));
    return mask;
}

// The keep mask of a warpgroup's 64 x N weights. KEYS: rows are keys and columns queries, else the
// reverse.
template <int N, bool KEYS> struct KeepMask {
    // The blocks (see keep.cuh) of a warp's 16 rows: four lanes share those of two queries, or with
    // KEYS all lanes those of 16 keys.
    static constexpr int BLOCKS = KEYS ? N / 2 : N / 16, LANES = KEYS ? 32 : 4;
    static constexpr int OWN = (BLOCKS + LANES - 1) / LANES;
    unsigned bits[OWN];

    // row, column: of the warp's first weight.
    __device__ void draw(Word key, Word head, int queries, int keys, int row, int column,
                         unsigned threshold) {
        const int lane = threadIdx.x % 32;
        const int query = KEYS ? column + lane / 8 * 16 + lane % 8 : row + lane / 4;
        const Word first = keep_block(head, queries, keys, query, KEYS ? row : column)
                         + (KEYS ? 0 : lane % 4);
        const Word step = KEYS ? 32 * ((keys + 15) / 16) : 4;   // to the next block of a lane
        Word blocks[OWN];
        #pragma unroll
        for (int i = 0; i < OWN; ++i) blocks[i] = first + i * step;
        keep_bits<OWN>(bits, key, blocks, threshold);
    }
    // f(i, mask) for each of a thread's accumulators: all ones where it is kept, else 0.
    template <typename F> __device__ void for_each(F f) const {
        const int lane = threadIdx.x % 32;
        #pragma unroll
        for (int c = 0; c < N / 16; ++c)
            #pragma unroll
            for (int e = 0; e < 2; ++e) {
                const unsigned word = KEYS
                    ? __shfl_sync(0xffffffff, bits[c / 4], c % 4 * 8 + lane % 4 * 2 + e)
                    : __shfl_sync(0xffffffff, bits[c / 4], c % 4, 4);
                const unsigned signs = word << (7 - (KEYS ? lane / 4 : lane % 4 * 2 + e));
                f(8 * c + e, sign_bytes<0x0000>(signs, 0));
                f(8 * c + 2 + e, sign_bytes<KEYS ? 0x1111 : 0x2222>(signs, 0));
                f(8 * c + 4 + e, sign_bytes<KEYS ? 0x2222 : 0x1111>(signs, 0));
                f(8 * c + 6 + e, sign_bytes<0x3333>(signs, 0));
            }
    }
    // Clear the rounded weights, two a word, that are not kept.
    __device__ void apply(unsigned (&weights)[N / 4]) const {
        static_assert(!KEYS, "rows are queries");
        const int lane = threadIdx.x % 4;
        #pragma unroll
        for (int c = 0; c < N / 16; ++c) {
            const unsigned word = __shfl_sync(0xffffffff, bits[c / 4], c % 4, 4);
            const unsigned even = word << (7 - 2 * lane), odd = word << (6 - 2 * lane);
            weights[4 * c] &= sign_bytes<0x4400>(even, odd);
            weights[4 * c + 1] &= sign_bytes<0x6622>(even, odd);
            weights[4 * c + 2] &= sign_bytes<0x5511>(even, odd);
            weights[4 * c + 3] &= sign_bytes<0x7733>(even, odd);
        }
    }
};

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

// The tile that a block takes next, of `tiles`: the first are those of the blocks' own numbers.
// taken: 0 before, and 0 again when each block has found that there are no more.
__device__ inline int next_tile(unsigned* taken, int tiles) {
    return gridDim.x + atomicInc(taken, tiles - 1);
}
