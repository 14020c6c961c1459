// What the kernel for matrix products on Hopper is made of: the order of its tiles, and the way of
// results from an accumulator to memory.
#pragma once
#include "hopper.cuh"

constexpr int M = 128, K = 64;   // of a block's tile: rows, and terms of each sum brought at a time
constexpr int BOX_BYTES = 16 * SWIZZLE;   // 16 rows of 128 bytes: what a warp writes at a time

// What is done with the sums before they are written.
enum Ending {
    NARROW,          // y = sums + bias + residual, 16 bits
    GELU,            // pre = sums + bias, y = gelu(pre)
    GELU_BACKWARD,   // y = sums * gelu'(pre), pre an input
    WIDE             // y = or += sums + bias, float; or parts of the sums, to be added by matmul_sum
};

struct Product {
    unsigned long long bias, residual, pre;   // addresses; 0 where there is none
    int rows, columns, terms;
    int matrices, a_step, b_step;   // in the batch; 0 where one matrix is the operand of all, else 1
    int band;    // the rows of tiles, in clusters, that are worked on before the next ones
    int share;   // steps over K of each cluster that computes parts of sums; 0 for whole tiles
    int wide_bias, add;
};

// The part of a tile's sums that is computed at a time: steps begin ... end of K.
struct Piece {
    int tile, begin, end;
};

// Numbers of tiles on their way from the thread that takes them to all others of the cluster.
struct Tickets {
    static constexpr int ROOM = 4;   // the copies are at most two tiles ahead of what is written
    int tiles[ROOM];
    Barrier told[ROOM], heard[ROOM];

    __device__ void init(int readers) {
        for (int i = 0; i < ROOM; ++i) {
            told[i].init(1);
            heard[i].init(readers);
        }
    }
};

// Which pieces a cluster computes. Whole tiles are taken as a cluster goes: where kernels of others,
// such as NCCL's, keep some multiprocessors, the clusters that run take more. Else each cluster has
// the same number of steps: K is cut into slabs of as many, so that clusters that read the same
// rows do so at one time, and the tiles of the last, shorter slab are laid end to end and cut where a
// share ends.
template <int CLUSTER> struct Schedule {
    Tickets& tickets;
    unsigned* taken;
    int tiles, steps, share, clusters, at, last, turn = 0;

    // `taken` counts whole tiles as they are worked on, and ends as it began, at 0.
    __device__ Schedule(const Product& p, Tickets& tickets, unsigned* taken, int tiles, int cluster, int clusters)
        : tickets(tickets), taken(taken), tiles(tiles), steps((p.terms + K - 1) / K), share(p.share),
          clusters(clusters), at(share ? cluster * share : cluster), last(min(at + share, tiles * steps)) {}

    // By one thread of the cluster's first block, which takes its tiles. The number of the next one
    // comes while this one is worked on.
    __device__ bool take(Piece& piece) {
        if (share) return next_share(piece);
        const int slot = turn % Tickets::ROOM;
        tickets.heard[slot].wait(turn++ / Tickets::ROOM % 2 ^ 1);
        piece = {at, 0, steps};
        if (CLUSTER == 1) {
            tickets.tiles[slot] = at;
            tickets.told[slot].arrive();
        } else {
            tickets.told[slot].arrive_and_expect(sizeof(int));
            for (int block = 0; block < CLUSTER; ++block)
                write_at(block, tickets.tiles[slot], at, tickets.told[slot]);
        }
        if (piece.tile >= tiles) return false;
        at = clusters + atomicInc(taken, tiles - 1);
        return true;
    }
    // By one thread of another block, and by the other warps, all of their lanes.
    __device__ bool next_of_thread(Piece& piece) {
        if (share) return next_share(piece);
        const int slot = turn % Tickets::ROOM;
        tickets.told[slot].arrive_and_expect(sizeof(int));
        hear(piece, slot);
        answer(slot);
        return piece.tile < tiles;
    }
    __device__ bool next(Piece& piece) {
        if (share) return next_share(piece);
        const int slot = turn % Tickets::ROOM;
        hear(piece, slot);
        __syncwarp();
        if (threadIdx.x % 32 == 0) answer(slot);
        return piece.tile < tiles;
    }

private:
    __device__ void hear(Piece& piece, int slot) {
        tickets.told[slot].wait_for_cluster(turn++ / Tickets::ROOM % 2);
        piece = {tickets.tiles[slot], 0, steps};
    }
    __device__ void answer(int slot) {
        if (CLUSTER == 1) tickets.heard[slot].arrive(); else tickets.heard[slot].arrive_at(0);
    }
    __device__ bool next_share(Piece& piece) {
        if (at >= last) return false;
        const int slabs = steps / share, rest = steps - slabs * share;
        if (at < slabs * tiles * share) {
            const int slab = at / (tiles * share);
            piece = {at / share - slab * tiles, slab * share, slab * share + share};
        } else {
            const int place = at - slabs * tiles * share, begin = place % rest;
            piece = {place / rest, slabs * share + begin, slabs * share + min(rest, begin + last - at)};
        }
        at += piece.end - piece.begin;
        return true;
    }
};

// Where a block's tile begins, and in which matrix.
struct Spot {
    int row, column, matrix;
};

// rows, columns: how many tiles of a cluster there are.
template <int N, int CLUSTER>
__device__ inline Spot spot_of(const Product& p, int tile, int rows, int columns, int rank) {
    const int matrix = tile / (rows * columns), within = tile - matrix * rows * columns;
    const int band = within / (p.band * columns), left = within - band * p.band * columns;
    const int height = min(p.band, rows - band * p.band);
    return {((band * p.band + left % height) * CLUSTER + rank) * M, left / height * N, matrix};
}

// Two floats rounded to one word of two T, and back.
template <typename T> __device__ inline unsigned pack(float low, float high);
template <> __device__ inline unsigned pack<__half>(float low, float high) {
    const __half2 both = __floats2half2_rn(low, high);
    return reinterpret_cast<const unsigned&>(both);
}
template <> __device__ inline unsigned pack<__nv_bfloat16>(float low, float high) {
    const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const unsigned&>(both);
}
template <typename T> __device__ inline float2 unpack(unsigned word);
template <> __device__ inline float2 unpack<__half>(unsigned word) {
    return __half22float2(reinterpret_cast<const __half2&>(word));
}
template <> __device__ inline float2 unpack<__nv_bfloat16>(unsigned word) {
    return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000));
}

// The piece of 16 bytes that lies at `piece` of a row of a swizzled box.
__device__ inline unsigned char* piece_at(unsigned char* box, int row, int piece) {
    return box + row * SWIZZLE + (piece ^ row % 8) * 16;
}

// 16 rows and 64 columns of an accumulator, rounded into a box.
template <typename T> __device__ inline void fill_box(unsigned char* box, const float* sums) {
    const int lane = threadIdx.x % 32;
    #pragma unroll
    for (int i = 0; i < 4; ++i) {   // 16 columns
        unsigned words[4];
        #pragma unroll
        for (int e = 0; e < 4; ++e) words[e] = pack<T>(sums[8 * i + 2 * e], sums[8 * i + 2 * e + 1]);
        store_matrices(piece_at(box, lane % 16, 2 * i + lane / 16), words);
    }
}
// 16 rows and 32 columns in full.
__device__ inline void fill_box_wide(unsigned char* box, const float* sums) {
    const int lane = threadIdx.x % 32;
    #pragma unroll
    for (int i = 0; i < 8; ++i) {   // 8 columns of the upper and the lower rows
        const int row = lane / 4 + i % 2 * 8, byte = i / 2 * 32 + lane % 4 * 8;
        *reinterpret_cast<float2*>(piece_at(box, row, byte / 16) + byte % 16) =
            make_float2(sums[2 * i], sums[2 * i + 1]);
    }
}
// Adds to 16 rows and 64 columns of an accumulator what the box has, or multiplies with it.
template <typename T, bool MULTIPLY> __device__ inline void take_box(float* sums, unsigned char* box) {
    const int lane = threadIdx.x % 32;
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
        unsigned words[4];
        load_matrices(words, piece_at(box, lane % 16, 2 * i + lane / 16));
        #pragma unroll
        for (int e = 0; e < 4; ++e) {
            const float2 other = unpack<T>(words[e]);
            float &x = sums[8 * i + 2 * e], &y = sums[8 * i + 2 * e + 1];
            x = MULTIPLY ? x * other.x : x + other.x;
            y = MULTIPLY ? y * other.y : y + other.y;
        }
    }
}

// N columns of the bias from `column` on, as float, by a warp.
template <typename T, int N> __device__ inline void copy_bias(float* to, const Product& p, int column) {
    #pragma unroll
    for (int i = threadIdx.x % 32 * 2; i < N; i += 64) {
        float2 pair = make_float2(0, 0);
        if (column + i < p.columns)
            pair = p.wide_bias ? reinterpret_cast<const float2*>(p.bias)[(column + i) / 2]
                               : unpack<T>(reinterpret_cast<const unsigned*>(p.bias)[(column + i) / 2]);
        *reinterpret_cast<float2*>(to + i) = pair;
    }
}
template <int R> __device__ inline void add_bias(float (&sums)[R], const float* bias) {
    #pragma unroll
    for (int j = 0; j < R / 4; ++j) {
        const float2 pair = *reinterpret_cast<const float2*>(bias + 8 * j + threadIdx.x % 4 * 2);
        sums[4 * j] += pair.x;
        sums[4 * j + 1] += pair.y;
        sums[4 * j + 2] += pair.x;
        sums[4 * j + 3] += pair.y;
    }
}

__device__ inline float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ inline float reciprocal_fast(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// x limited to [-10, 10]; NaN stays.
__device__ inline float limit_to_ten(float x) {
    asm("min.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(10.0f));
    asm("max.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(-10.0f));
    return x;
}

// gelu(x) = x s, s = 1 / (1 + exp(-2 u)), u = sqrt(2 / pi) (x + 0.044715 x^3), of all values in
// boxes, or its slope, by a warp. One division does for two; beyond 2^60 s counts as 2^-60. The slope
// beyond 10 is that at 10: farther out x^3 would enlarge the error in the last digit of s. A function
// of its own, because inside a kernel that is short of registers the compiler, to save some, computes
// one value after the other: three times slower.
template <typename T, bool SLOPE, int N>
__device__ __noinline__ void gelu_in_boxes(unsigned char (&boxes)[N][BOX_BYTES]) {
    constexpr float A = 2 * 0.7978845608028654f, B = A * 0.044715f, LOG2E = 1.44269504088896341f;
    constexpr int VECTORS = 2, VALUES = 8 * VECTORS;   // at a time
    #pragma unroll 1
    for (int i = threadIdx.x % 32; i < N * BOX_BYTES / 16; i += 32 * VECTORS) {
        uint4* at = reinterpret_cast<uint4*>(boxes[0]) + i;
        unsigned words[VALUES / 2];
        #pragma unroll
        for (int v = 0; v < VECTORS; ++v) reinterpret_cast<uint4&>(words[4 * v]) = at[32 * v];
        float x[VALUES], s[VALUES];
        #pragma unroll
        for (int e = 0; e < VALUES; e += 2) {
            const float2 pair = unpack<T>(words[e / 2]);
            x[e] = pair.x;
            x[e + 1] = pair.y;
        }
        if constexpr (SLOPE)
            #pragma unroll
            for (float& value : x) value = limit_to_ten(value);
        #pragma unroll
        for (int e = 0; e < VALUES; ++e)
            s[e] = 1 + exp2_fast(fminf(-x[e] * (A * LOG2E + B * LOG2E * x[e] * x[e]), 60.0f));
        #pragma unroll
        for (int e = 0; e < VALUES; e += 2) {
            const float both = reciprocal_fast(s[e] * s[e + 1]), first = both * s[e + 1];
            s[e + 1] = both * s[e];
            s[e] = first;
        }
        #pragma unroll
        for (int e = 0; e < VALUES; ++e)
            s[e] = SLOPE ? s[e] + x[e] * (s[e] - s[e] * s[e]) * (A + 3 * B * x[e] * x[e]) : x[e] * s[e];
        #pragma unroll
        for (int e = 0; e < VALUES; e += 2) words[e / 2] = pack<T>(s[e], s[e + 1]);
        #pragma unroll
        for (int v = 0; v < VECTORS; ++v) at[32 * v] = reinterpret_cast<uint4&>(words[4 * v]);
    }
}
