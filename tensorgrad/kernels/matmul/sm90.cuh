// The parts of the matrix product on Hopper: its tile scheduler and its epilogue.
#pragma once
#include "fragment.cuh"
#include "hopper.cuh"

constexpr int M = 128, K = 64;   // a block's tile: rows, and terms of each sum in a stage
constexpr int BOX_BYTES = 16 * SWIZZLE;   // 16 rows of 128 bytes: of one warp

// The epilogue: work on the sums before they are stored.
enum Epilogue {
    NARROW,          // y = sums + bias + residual, 16 bits
    GELU,            // pre = sums + bias, y = gelu(pre), derivative = gelu'(pre), 8 bits
    SHARED_GELU,     // the same, of a part of a tile by the warps that multiply
    SCALED,          // y = sums * scale, such a derivative; and sums over the rows of y
    WIDE   // y = or += sums + bias, float; or parts of the sums, to be added by matmul_sum
};

struct MatmulSm90Arguments {
    // `derivative`, also as the scale: (rows / 16, columns / 64, DERIVATIVE_BOX), rounded up
    unsigned long long bias, residual, derivative, column_sums;  // addresses; 0: none
    int rows, columns, terms;
    // in the batch; 0 where one matrix is the operand of all, else 1
    int matrices, a_step, b_step;
    int band;    // how many rows of tiles, in clusters, are worked on before the next
    int split_steps;   // stream-K: the steps over K of each cluster; 0 for whole tiles
    int wide_bias, add;
    int overlaps;   // with the next kernel, see overlap.py
};

// A work tile: the steps begin to end - 1 over K of a tile.
struct WorkTile {
    int tile, begin, end;
};

// Numbers of tiles, from the thread that takes them to all others of the cluster.
struct ClusterTileQueue {
    static constexpr int SLOTS = 4;   // loads are at most two tiles ahead of stores
    int tiles[SLOTS];
    Mbarrier full[SLOTS], empty[SLOTS];

    __device__ void init(int readers) {
        for (int i = 0; i < SLOTS; ++i) {
            full[i].init(1);
            empty[i].init(readers);
        }
    }
};

// The tile scheduler of a cluster. Whole tiles are scheduled dynamically: where other kernels, such
// as NCCL's, keep some SMs, the clusters that run take more. With stream-K each cluster
// has the same number of steps: K is cut into slabs of as many, so that clusters that read the same
// rows do so at one time, and the tiles of the last, shorter slab are laid end to end and cut every
// split_steps.
template <int CLUSTER> struct TileScheduler {
    ClusterTileQueue& queue;
    unsigned* taken;
    int tiles, steps, split_steps, clusters, at, last, turn = 0;

    // `taken` counts whole tiles as they are worked on, and ends as it began, at 0.
    __device__ TileScheduler(const MatmulSm90Arguments& p, ClusterTileQueue& queue, unsigned* taken,
                             int tiles, int cluster, int clusters)
        : queue(queue), taken(taken), tiles(tiles), steps((p.terms + K - 1) / K),
          split_steps(p.split_steps), clusters(clusters),
          at(split_steps ? cluster * split_steps : cluster),
          last(min(at + split_steps, tiles * steps)) {}

    // By one thread of the cluster's first block, which takes its tiles. It asks for the number of
    // the next one while this one is worked on.
    __device__ bool take(WorkTile& work) {
        if (split_steps) return next_split(work);
        const int slot = turn % ClusterTileQueue::SLOTS;
        queue.empty[slot].wait(turn++ / ClusterTileQueue::SLOTS % 2 ^ 1);
        work = {at, 0, steps};
        if (CLUSTER == 1) {
            queue.tiles[slot] = at;
            queue.full[slot].arrive();
        } else {
            queue.full[slot].arrive_expect_tx(sizeof(int));
            for (int block = 0; block < CLUSTER; ++block)
                store_async(block, queue.tiles[slot], at, queue.full[slot]);
        }
        if (work.tile >= tiles) return false;
        at = clusters + atomicInc(taken, tiles - 1);
        return true;
    }
    // By one thread of another block, and by the other warps, all of their lanes.
    __device__ bool next_of_thread(WorkTile& work) {
        if (split_steps) return next_split(work);
        const int slot = turn % ClusterTileQueue::SLOTS;
        queue.full[slot].arrive_expect_tx(sizeof(int));
        receive(work, slot);
        release(slot);
        return work.tile < tiles;
    }
    __device__ bool next(WorkTile& work) {
        if (split_steps) return next_split(work);
        const int slot = turn % ClusterTileQueue::SLOTS;
        receive(work, slot);
        __syncwarp();
        if (threadIdx.x % 32 == 0) release(slot);
        return work.tile < tiles;
    }

private:
    __device__ void receive(WorkTile& work, int slot) {
        queue.full[slot].wait(turn++ / ClusterTileQueue::SLOTS % 2);
        work = {queue.tiles[slot], 0, steps};
    }
    __device__ void release(int slot) {
        if (CLUSTER == 1) queue.empty[slot].arrive(); else queue.empty[slot].arrive_remote(0);
    }
    __device__ bool next_split(WorkTile& work) {
        if (at >= last) return false;
        const int slabs = steps / split_steps, rest = steps - slabs * split_steps;
        if (at < slabs * tiles * split_steps) {
            const int slab = at / (tiles * split_steps);
            work = {at / split_steps - slab * tiles, slab * split_steps,
                    slab * split_steps + split_steps};
        } else {
            const int place = at - slabs * tiles * split_steps, begin = place % rest;
            work = {place / rest, slabs * split_steps + begin,
                    slabs * split_steps + min(rest, begin + last - at)};
        }
        at += work.end - work.begin;
        return true;
    }
};

// The first row and column of a block's tile, and its matrix.
struct TileOrigin {
    int row, column, matrix;
};

// rows, columns: how many tiles of a cluster there are.
template <int N, int CLUSTER>
__device__ inline TileOrigin tile_origin(const MatmulSm90Arguments& p, int tile, int rows,
                                         int columns, int rank) {
    const int matrix = tile / (rows * columns), within = tile - matrix * rows * columns;
    const int band = within / (p.band * columns), left = within - band * p.band * columns;
    const int height = min(p.band, rows - band * p.band);
    return {((band * p.band + left % height) * CLUSTER + rank) * M, left / height * N, matrix};
}

// The 16 bytes number `piece` of a row of a swizzled box.
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
        for (int e = 0; e < 4; ++e)
            words[e] = pack<T>(sums[8 * i + 2 * e], sums[8 * i + 2 * e + 1]);
        stmatrix(piece_at(box, lane % 16, 2 * i + lane / 16), words);
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
// Add a box to 16 rows and 64 columns of an accumulator.
template <typename T> __device__ inline void add_box(float* sums, unsigned char* box) {
    const int lane = threadIdx.x % 32;
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
        unsigned words[4];
        ldmatrix(words, shared_address(piece_at(box, lane % 16, 2 * i + lane / 16)));
        #pragma unroll
        for (int e = 0; e < 4; ++e) {
            const float2 other = unpack<T>(words[e]);
            sums[8 * i + 2 * e] += other.x;
            sums[8 * i + 2 * e + 1] += other.y;
        }
    }
}

// Derivatives of GELU, in [-0.13, 1.13], are kept as 200 times them and 27, in 8 bits: 0 and 1 are
// exact, others are off by 0.0025 at most, about as much as bfloat16 rounds those near 1 (few-bit
// backward, Novikov et al. 2022, arXiv:2202.00441). They lie in boxes of 16 rows and 64 columns, a
// row of 8 units of 8 columns, in an order that has the lanes of a warp read from different banks.
constexpr int DERIVATIVE_BOX = 16 * 64;   // bytes
constexpr float DERIVATIVE_STEPS = 200, DERIVATIVE_ZERO = 27;

__device__ inline int derivative_unit(int row, int unit) {   // where it begins in its box
    return row * 64 + (unit ^ row / 2 % 4) * 8;
}
// In the lowest byte, as that of a float whose last bit counts 1.
__device__ inline unsigned derivative_byte(float x) {
    return __float_as_uint(x * DERIVATIVE_STEPS + (0x1p23f + DERIVATIVE_ZERO));
}
__device__ inline unsigned joined(const unsigned* bytes) {
    return __byte_perm(__byte_perm(bytes[0], bytes[1], 0x40),
                       __byte_perm(bytes[2], bytes[3], 0x40), 0x5410);
}
// Multiply 16 rows and 64 columns of an accumulator with the derivatives in a box.
__device__ inline void multiply_by_derivatives(float* sums, const unsigned char* box) {
    const int lane = threadIdx.x % 32, row = lane / 4;
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
        #pragma unroll
        for (int h = 0; h < 2; ++h) {
            const unsigned two = *reinterpret_cast<const unsigned short*>(
                box + derivative_unit(row, j) + h * 8 * 64 + lane % 4 * 2);
            #pragma unroll
            for (int e = 0; e < 2; ++e) {
                const float shifted = __uint_as_float(
                    __byte_perm(two, 0x4b000000, e ? 0x7541 : 0x7540));   // 2^23 + the byte
                sums[4 * j + 2 * h + e] *=
                    (shifted - (0x1p23f + DERIVATIVE_ZERO)) * (1 / DERIVATIVE_STEPS);
            }
        }
    }
    __syncwarp();   // the box is written next
}

// N columns of the bias from `column` on, as float, by a warp.
template <typename T, int N>
__device__ inline void copy_bias(float* to, const MatmulSm90Arguments& p, int column) {
    #pragma unroll
    for (int i = threadIdx.x % 32 * 2; i < N; i += 64) {
        float2 pair = make_float2(0, 0);
        if (column + i < p.columns)
            pair = p.wide_bias
                       ? reinterpret_cast<const float2*>(p.bias)[(column + i) / 2]
                       : unpack<T>(reinterpret_cast<const unsigned*>(p.bias)[(column + i) / 2]);
        *reinterpret_cast<float2*>(to + i) = pair;
    }
}
template <int N> __device__ inline void add_bias(Fragment<1, N>& sums, const float* bias) {
    #pragma unroll
    for (int j = 0; j < N; j += 8) {
        const float2 pair = *reinterpret_cast<const float2*>(bias + sums.column_of(j));
        #pragma unroll
        for (int h = 0; h < 2; ++h) {
            sums.at(h, j) += pair.x;
            sums.at(h, j + 1) += pair.y;
        }
    }
}

// GELU of 8 values: y = x s, s = 1 / (1 + exp(-2 u)), u = sqrt(2 / pi) (x + 0.044715 x^3).
template <typename T> struct GeluOf8 {
    static constexpr float A = 2 * 0.7978845608028654f, B = A * 0.044715f;
    float square[8], s[8], y[8];

    __device__ void load(const uint4* from) {
        const uint4 words = *from;
        #pragma unroll
        for (int e = 0; e < 8; e += 2) {
            const float2 pair = unpack<T>(reinterpret_cast<const unsigned*>(&words)[e / 2]);
            y[e] = pair.x;
            y[e + 1] = pair.y;
        }
        #pragma unroll
        for (int e = 0; e < 8; ++e) {
            const float x = y[e];
            square[e] = x * x;
            s[e] = fast_reciprocal(1 + fast_exp2(-x * (A * LOG2_E + B * LOG2_E * square[e])));
            y[e] = x * s[e];
        }
    }
    __device__ void store(uint4* to) const {
        unsigned words[4];
        #pragma unroll
        for (int e = 0; e < 8; e += 2) words[e / 2] = pack<T>(y[e], y[e + 1]);
        *to = reinterpret_cast<uint4&>(words);
    }
    // x s (1 - s) 2 du/dx + s, as bytes. Where s is 0 or 1, 0 is multiplied with du/dx, which must
    // be finite there.
    __device__ uint2 derivatives() const {
        unsigned bytes[8];
        #pragma unroll
        for (int e = 0; e < 8; ++e) {
            const float du = 3 * B * fminf(square[e], 1e30f) + A;
            bytes[e] = derivative_byte((y[e] - y[e] * s[e]) * du + s[e]);
        }
        return make_uint2(joined(bytes), joined(bytes + 4));
    }
};

// A store without a branch, into which the compiler would move what comes before.
__device__ inline void store_if(bool stored, void* to, uint2 words) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %0, 0; @p st.global.v2.b32 [%1], {%2, %3}; }"
                 :: "r"(int(stored)), "l"(to), "r"(words.x), "r"(words.y));
}

// GELU of all values in a box, by a warp, and its derivatives, or null. While the special functions
// of 8 values are computed, so is the derivative of the 8 before: a warp has a scheduler almost for
// itself, and nothing else fills its waits.
template <typename T>
__device__ inline void gelu_in_box(unsigned char* box, unsigned char* derivatives) {
    constexpr int STEPS = BOX_BYTES / 512;
    const int lane = threadIdx.x % 32;
    uint4* at = reinterpret_cast<uint4*>(box) + lane;
    GeluOf8<T> values[2];
    values[0].load(at);
    #pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        const int row = step * 4 + lane / 8;
        if (step + 1 < STEPS) values[1 - step % 2].load(at + 32 * (step + 1));
        values[step % 2].store(at + 32 * step);
        store_if(derivatives, derivatives + derivative_unit(row, lane % 8 ^ row % 8),
                 values[step % 2].derivatives());
    }
}

// Add the 16 rows of a box, rounded values, to the sums of a lane's two columns, by a warp.
template <typename T>
__device__ inline void add_rows_of_box(float (&sums)[2], unsigned char* box) {
    const int lane = threadIdx.x % 32;
    #pragma unroll 8
    for (int row = 0; row < 16; ++row) {
        const float2 pair = unpack<T>(*reinterpret_cast<const unsigned*>(
            piece_at(box, row, lane / 4) + lane % 4 * 4));
        sums[0] += pair.x;
        sums[1] += pair.y;
    }
}
