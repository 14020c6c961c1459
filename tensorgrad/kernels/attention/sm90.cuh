// What the forward and the backward kernels of flash attention on Hopper share.
#pragma once
#include "hopper.cuh"
#include "philox.cuh"

// What the launch gives each block (kernels/attention/sm90.py) less what it takes to align the tiles.
constexpr int TILE_ROOM = 226 * 1024 - 1024;
constexpr float LOG2E = 1.44269504088896341f;

__device__ inline float infinity() { return __int_as_float(0x7f800000); }

__device__ inline float exp2_fast(float x) {   // the chip's own, 2 ulp; 0 for -inf
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Two floats rounded to one word of two T.
template <typename T> __device__ inline unsigned pack(float low, float high);
template <> __device__ inline unsigned pack<__half>(float low, float high) {
    const __half2 both = __floats2half2_rn(low, high);
    return reinterpret_cast<const unsigned&>(both);
}
template <> __device__ inline unsigned pack<__nv_bfloat16>(float low, float high) {
    const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const unsigned&>(both);
}

// An accumulator's layout is that of an operand in registers: words of the same places.
template <typename T, int R> __device__ inline void pack_all(unsigned (&to)[R / 2], const float (&from)[R]) {
    #pragma unroll
    for (int i = 0; i < R / 2; ++i) to[i] = pack<T>(from[2 * i], from[2 * i + 1]);
}

// Over the four lanes that share a row of an accumulator.
template <typename F> __device__ inline float quad_reduce(float x, F combine) {
    x = combine(x, __shfl_xor_sync(0xffffffff, x, 1));
    return combine(x, __shfl_xor_sync(0xffffffff, x, 2));
}

// Write one of a thread's two rows of an accumulator, scaled. The lanes of a quad trade words until
// each has 8 columns side by side: 16-byte stores, of the first `width` columns.
template <typename T, int R>
__device__ inline void store_row(T* row, const float (&x)[R], int which, float scale, int width) {
    const int lane = threadIdx.x % 4;
    #pragma unroll
    for (int j = 0; j < R / 4; j += 4) {   // 4 pieces of 8 columns
        unsigned w[4];
        #pragma unroll
        for (int i = 0; i < 4; ++i)
            w[i] = pack<T>(x[4 * (j + i) + 2 * which] * scale, x[4 * (j + i) + 2 * which + 1] * scale);
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

// The sizes of a problem. Query i of a sequence sees its keys from i + keys - queries - before to
// i + keys - queries + after. Of the `width` columns a tile has more, which the copy engine fills
// with 0. A persistent grid takes the tiles of `together` heads at a time: of all where some tiles
// have more to do than others, those first that have the most; else of one, so that what it streams
// stays in the L2 cache. heads_total counts the heads that have tiles, of all sequences.
struct Problem {
    int heads, kv_heads, queries, keys, width, before, after, together, heads_total;
    float scale;
};

// What only the kernels compiled with EXTRAS know of. Null pointers stand for what is not there.
struct Extras {
    const float* bias;   // added to the scores: (batch, heads, queries, keys) with these strides
    long long bias_batch, bias_head, bias_query, bias_key;
    const int *query_starts, *key_starts;   // of sequences in one row of `length` queries; longest: p
    Word seed, draw, stream;   // dropout, see keep_16
    const Word* offset;
    int length, columns;   // sums: of backward, padded for each sequence to a multiple of `columns`
    unsigned threshold;   // out of 2^16 weights so many are kept; 2^16: no dropout
    float kept_scale;     // by so much the kept ones grow
};

// Where a sequence lies in the arrays, and its lengths.
struct Sequence {
    int batch, first_query, first_key, queries, keys;
};

template <bool EXTRAS>
__device__ inline Sequence sequence_of(const Problem& p, const Extras& extras, int batch) {
    if (!EXTRAS || extras.query_starts == nullptr) return {batch, 0, 0, p.queries, p.keys};
    const int query = extras.query_starts[batch], key = extras.key_starts[batch];
    return {0, query, key, extras.query_starts[batch + 1] - query, extras.key_starts[batch + 1] - key};
}

// Bit i says whether dropout keeps weight number `first` + i of all (batch, heads, queries, keys): the
// bits of random_keep in random.cu, sixteen of which come from one block of random words.
__device__ inline unsigned keep_16(const Extras& extras, Word draw, Word first) {
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

// One bit for each of a thread's accumulators of 64 x N weights, of which rows are queries. `first`
// is the number of the weight in column 0 of the thread's first row, `pitch` that from row to row.
template <int N>
__device__ inline unsigned long long keep_rows(const Extras& extras, Word draw, Word first, Word pitch) {
    constexpr int PIECES = N / 16;   // of a row; a quad shares the work for its two
    const int lane = threadIdx.x % 4;
    unsigned long long keep = 0;
    #pragma unroll 1
    for (int start = 0; start < 2 * PIECES; start += 4) {
        const int own = start + lane;
        const unsigned piece = keep_16(extras, draw, first + own / PIECES * 8 * pitch + own % PIECES * 16);
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int which = start + i;
            const unsigned long long bits = __shfl_sync(0xffffffff, piece, i, 4) >> 2 * lane;
            if (which < 2 * PIECES)
                keep |= (bits & 3 | (bits >> 8 & 3) << 4) << (which % PIECES * 8 + which / PIECES * 2);
        }
    }
    return keep;
}

// The same where rows are keys. `first` is the number of the weight in column 0 of the warp's first row.
template <int N>
__device__ inline unsigned long long keep_columns(const Extras& extras, Word draw, Word first, Word pitch) {
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

struct Tile {
    int block, head, batch;
};

__device__ inline Tile tile_of(const Problem& p, int heads, int index, int blocks, bool ascending) {
    const int group = index / (blocks * p.together), within = index - group * blocks * p.together;
    const int count = min(p.together, p.heads_total - group * p.together);
    const int head = group * p.together + within % count;
    const int block = within / count;
    return {ascending ? block : blocks - 1 - block, head % heads, head / heads};
}

// The tiles of a block where it does not ask for them: in round r block b of the grid takes the b-th,
// of the next ones the b-th from the end, so that long tiles are paired with short ones.
__device__ inline int tile_index(int round) {
    return round * gridDim.x + (round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
}

// One arrival for a warp, when all its lanes have come.
__device__ inline void arrive_together(Barrier& barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier.arrive();
}

// How the tiles are handed out else: a block takes the next one of all when it has loaded its last, so
// that blocks with short tiles take more of them. The thread that loads asks for a tile a whole tile
// ahead, and passes it on to the warps that compute.
struct Queue {
    Barrier full[2], empty[2];
    int index[2];

    __device__ void init(int warps) {
        for (int i = 0; i < 2; ++i) {
            full[i].init(1);
            empty[i].init(warps);
        }
    }
    __device__ void put(Place<2>& at, int tile) {
        empty[at.stage].wait(at.parity ^ 1);
        index[at.stage] = tile;
        full[at.stage].arrive();
        at.next();
    }
    __device__ int take(Place<2>& at) {
        full[at.stage].wait(at.parity);
        const int tile = uniform(*static_cast<volatile int*>(&index[at.stage]));
        arrive_together(empty[at.stage]);
        at.next();
        return tile;
    }
};
