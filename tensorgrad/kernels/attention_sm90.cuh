// What the forward and the backward kernels of flash attention on Hopper share.
#pragma once
#include "hopper.cuh"

// What the launch gives each block (ops/attention_cuda.py) less what it takes to align the tiles.
constexpr int TILE_ROOM = 226 * 1024 - 1024;
// Of a thread, where one warpgroup loads and W compute: 65,536 registers are there for all.
template <int W> constexpr int PRODUCER_REGISTERS = W == 3 ? 32 : 24;
template <int W> constexpr int CONSUMER_REGISTERS = W == 3 ? 160 : 240;

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
// each has 8 columns side by side: 16-byte stores.
template <typename T, int R>
__device__ inline void store_row(T* row, const float (&x)[R], int which, float scale, bool inside) {
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
        if (inside) *reinterpret_cast<uint4*>(row + j * 8 + lane * 8) = make_uint4(w[0], w[1], w[2], w[3]);
    }
}

// The sizes of a problem. A persistent grid takes the tiles of `together` heads at a time, of all
// under a causal mask, those first that have the most to do; else of one, so that what it streams
// stays in the L2 cache. heads_total counts the heads that have tiles, of all sequences.
struct Problem {
    int heads, kv_heads, queries, keys, together, heads_total;
    float scale;
};

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

// In round r block b of the grid takes the b-th tile, of the next one the b-th from the end: long
// tiles are paired with short ones.
__device__ inline int tile_index(int round) {
    return round * gridDim.x + (round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
}
