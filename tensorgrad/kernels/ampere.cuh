// Ampere's (sm_80) instructions for tiled kernels, one function each: cp.async, asynchronous
// copies from global to shared memory; ldmatrix, from shared memory to the registers of a warp; and
// mma.sync, matrix products of a warp. The PTX manual, chapters cp.async, ldmatrix and mma, has the
// rules.
#pragma once
#include "async.cuh"
#include "types.cuh"

// Start a copy of BYTES (4, 8 or 16); where they do not exist, zeros are written and nothing is
// read.
template <int BYTES> __device__ inline void cp_async(unsigned to, const void* from, bool exist) {
    if constexpr (BYTES == 16)   // past the L1 cache
        asm volatile("{\n.reg .pred none;\nsetp.eq.b32 none, %2, 0;\n"
                     "cp.async.cg.shared.global [%0], [%1], 16, none;\n}"
                     :: "r"(to), "l"(__cvta_generic_to_global(from)), "r"(int(exist)) : "memory");
    else
        asm volatile("{\n.reg .pred none;\nsetp.eq.b32 none, %3, 0;\n"
                     "cp.async.ca.shared.global [%0], [%1], %2, none;\n}"
                     :: "r"(to), "l"(__cvta_generic_to_global(from)), "n"(BYTES), "r"(int(exist))
                     : "memory");
}
// Four matrices of 8 rows of 16 bytes; lane i names row i % 8 of matrix i / 8. Of matrix j lane i
// gets word i % 4 of row i / 4: two 16-bit values side by side or, transposed, below each other.
__device__ inline void ldmatrix(unsigned (&x)[4], unsigned row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(row) : "memory");
}
__device__ inline void ldmatrix_transposed(unsigned (&x)[4], unsigned row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(row) : "memory");
}
__device__ inline unsigned load_word(unsigned from) {
    unsigned x;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(from) : "memory");
    return x;
}

__device__ inline Words load_words_shared(unsigned from) {
    Words x;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.words[0]), "=r"(x.words[1]), "=r"(x.words[2]), "=r"(x.words[3])
                 : "r"(from) : "memory");
    return x;
}
// 16 bytes of global memory, zeros where they do not exist; streaming, or to be read again. The
// compiler does not move these, so that the loads in flight are those that the program says.
#define DEFINE_LOAD_WORDS_IF(NAME, LOAD)                                                          \
    __device__ inline void NAME(bool exist, Words& x, const void* from) {                         \
        asm volatile("{\n.reg .pred exist;\nsetp.ne.b32 exist, %5, 0;\n"                          \
                     "mov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"           \
                     "@exist " LOAD " {%0, %1, %2, %3}, [%4];\n}"                                 \
                     : "=&r"(x.words[0]), "=&r"(x.words[1]), "=&r"(x.words[2]),                   \
                       "=&r"(x.words[3])                                                          \
                     : "l"(__cvta_generic_to_global(from)), "r"(int(exist)) : "memory");          \
    }
DEFINE_LOAD_WORDS_IF(load_words_if, "ld.global.cs.v4.b32")
DEFINE_LOAD_WORDS_IF(load_words_cached_if, "ld.global.v4.b32")

// Half away from zero, as the tensor cores take it: they would cut the last 13 bits off. This is
// faster than cvt.rna.tf32.f32; infinity and NaN stay what they are.
__device__ inline unsigned round_to_tf32(unsigned x) {
    return fabsf(__uint_as_float(x)) < __int_as_float(0x7f800000) ? x + 0x1000 : x;
}

// d += a b: 16 rows, 8 columns, and 32 bytes of terms: 16 of 16 bits or 8 floats, which count as
// TF32. Lane i has in d[2 h + e] row i / 4 + 8 h, column i % 4 * 2 + e.
template <typename T>
__device__ inline void mma(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1);

#define DEFINE_MMA(T, SHAPE)                                                                      \
    template <>                                                                                   \
    __device__ inline void mma<T>(float (&d)[4], const unsigned (&a)[4], unsigned b0,             \
                                  unsigned b1) {                                                  \
        asm volatile("mma.sync.aligned." SHAPE ".f32 "                                            \
                     "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"            \
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                             \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));             \
    }
DEFINE_MMA(__half, "m16n8k16.row.col.f32.f16.f16")
DEFINE_MMA(__nv_bfloat16, "m16n8k16.row.col.f32.bf16.bf16")
DEFINE_MMA(float, "m16n8k8.row.col.f32.tf32.tf32")
