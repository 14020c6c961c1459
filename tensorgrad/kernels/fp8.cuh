// Numbers of 8 bits and their scales: e4m3 (3 bits of mantissa, up to 448) for activations and
// weights, e5m2 (2 bits, up to 57,344) for gradients.
#pragma once
#include "reduce.cuh"
#include "types.cuh"

enum Format { E4M3, E5M2 };

template <Format FORMAT> constexpr float LARGEST = FORMAT == E4M3 ? 448.f : 57344.f;

// The scale of one tensor. Its numbers of 8 bits are the values times `scale`, a power of two, and
// what lies beyond the format becomes its largest number.
struct Fp8Scale {
    float inverse, scale;   // inverse = 1 / scale, a factor of products
    unsigned largest;       // bits of the largest |value| since the last update, or of NaN
    unsigned clipped;       // how many values lay beyond the format
};

// Round four values to the nearest numbers, ties to even; NaN stays NaN. The first is the lowest
// byte.
template <Format FORMAT> __device__ inline unsigned round_to_fp8(const float (&x)[4]) {
    unsigned short low, high;
    if constexpr (FORMAT == E4M3) {
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(x[1]), "f"(x[0]));
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(x[3]), "f"(x[2]));
    } else {
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(low) : "f"(x[1]), "f"(x[0]));
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(high) : "f"(x[3]), "f"(x[2]));
    }
    return low | unsigned(high) << 16;
}

// The transpose of four rows of four bytes.
__device__ inline void transpose_bytes(unsigned (&columns)[4], unsigned a, unsigned b, unsigned c,
                                       unsigned d) {
    const unsigned ab = __byte_perm(a, b, 0x5140), cd = __byte_perm(c, d, 0x5140),
                   ab_high = __byte_perm(a, b, 0x7362), cd_high = __byte_perm(c, d, 0x7362);
    columns[0] = __byte_perm(ab, cd, 0x5410);
    columns[1] = __byte_perm(ab, cd, 0x7632);
    columns[2] = __byte_perm(ab_high, cd_high, 0x5410);
    columns[3] = __byte_perm(ab_high, cd_high, 0x7632);
}

// The larger of a and |b|; NaN where one is NaN.
__device__ inline float larger(float a, float b) {
    float y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(fabsf(b)));
    return y;
}

// The magnitudes that a thread has seen of a tensor. Floats that are not negative compare as their
// bits do, and those of NaN are above infinity's, so an integer maximum is exact in any order.
struct Fp8Meter {
    float largest = 0;
    unsigned clipped = 0;

    // Values, and the scale that they are multiplied with.
    template <Format FORMAT, int SIZE> __device__ void see(const float (&x)[SIZE], float scale) {
        float top = 0;
        #pragma unroll
        for (float value : x) top = larger(top, value);
        largest = larger(largest, top);
        if (top * scale <= LARGEST<FORMAT>) return;   // mostly
        #pragma unroll
        for (float value : x) clipped += fabsf(value) * scale > LARGEST<FORMAT>;
    }

    // Add to the tensor's state, by all lanes of a warp.
    __device__ void report_warp(Fp8Scale* state) const {
        add(state, __reduce_max_sync(0xffffffff, __float_as_uint(largest)),
            __reduce_add_sync(0xffffffff, clipped));
    }
    // The same by all threads of a block.
    __device__ void report(Fp8Scale* state) const {
        __shared__ unsigned partials[2][32];
        const unsigned top = __reduce_max_sync(0xffffffff, __float_as_uint(largest)),
                       count = __reduce_add_sync(0xffffffff, clipped);
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
        if (lane == 0) {
            partials[0][warp] = top;
            partials[1][warp] = count;
        }
        __syncthreads();
        if (warp > 0) return;
        add(state, __reduce_max_sync(0xffffffff, lane < warps ? partials[0][lane] : 0),
            __reduce_add_sync(0xffffffff, lane < warps ? partials[1][lane] : 0));
    }

private:
    __device__ static void add(Fp8Scale* state, unsigned top, unsigned count) {
        if (threadIdx.x % 32 > 0) return;
        if (top > *const_cast<volatile unsigned*>(&state->largest)) atomicMax(&state->largest, top);
        if (count) atomicAdd(&state->clipped, count);
    }
};
