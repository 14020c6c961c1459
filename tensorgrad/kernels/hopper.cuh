// Hopper's (sm_90a) instructions for tiled kernels, one function each: mbarriers in shared
// memory that count arrivals and bytes, TMA (the tensor memory accelerator), which copies a box of
// a tensor by itself, wgmma, matrix products of a warpgroup (128 threads) straight from shared
// memory, and setmaxnreg, which moves registers from one warpgroup to another. The PTX manual,
// chapters mbarrier, cp.async.bulk.tensor, wgmma and setmaxnreg, has the rules; what is easy to get
// wrong is said here.
#pragma once
#include "ampere.cuh"

constexpr int WARPGROUP = 128;
constexpr int SWIZZLE = 128;   // bytes a row of every tile: 64 elements of 16 bits

// A value that is the same in all lanes of a warp, and that the compiler then knows to be so.
__device__ inline int uniform(int x) { return __shfl_sync(0xffffffff, x, 0); }

// An mbarrier. A phase ends when `arrivals` have come and all expected bytes have
// been written; waiting for parity p returns once the phase of that parity (0, 1, 0, ...) is over.
struct Mbarrier {
    unsigned long long state;

    __device__ void init(int arrivals) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;"
                     :: "r"(shared_address(this)), "r"(arrivals));
    }
    __device__ void arrive() {
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];"
                     :: "r"(shared_address(this)) : "memory");
    }
    // At the same mbarrier of a block of the cluster. Says that this thread has read, not that it
    // wrote.
    __device__ void arrive_remote(int block) {
        asm volatile("{\n"
                     ".reg .b32 there;\n"
                     "mapa.shared::cluster.u32 there, %0, %1;\n"
                     "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
                     "}" :: "r"(shared_address(this)), "r"(block) : "memory");
    }
    __device__ void arrive_expect_tx(int bytes) {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                     :: "r"(shared_address(this)), "r"(bytes) : "memory");
    }
    // Stores of other blocks of the cluster into this one's shared memory are there as well:
    // no cache can be out of date. (.acquire.cluster would invalidate L1, and wait for all global
    // loads and stores of the warp.)
    __device__ void wait(unsigned parity) {
        asm volatile("{\n.reg .pred over;\n"
                     "again: mbarrier.try_wait.parity.shared::cta.b64 over, [%0], %1;\n"
                     "@over bra done;\nbra again;\ndone:\n}"
                     :: "r"(shared_address(this)), "r"(parity) : "memory");
    }
};

// After init and before the first use of barriers, by the thread that called init.
__device__ inline void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Named barrier `id` (1 to 15) among `threads` threads of the block: some wait, some only arrive.
__device__ inline void named_barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(threads) : "memory");
}
__device__ inline void named_barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" :: "r"(id), "r"(threads) : "memory");
}

// Blocks of a cluster (__cluster_dims__) run at once and reach each other's shared memory. All
// threads of all its blocks meet here; no block may end while another may still write to it.
__device__ inline int cluster_rank() {
    int rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
__device__ inline void cluster_arrive() {
    asm volatile("barrier.cluster.arrive;" ::: "memory");
}
__device__ inline void cluster_wait() { asm volatile("barrier.cluster.wait;" ::: "memory"); }
__device__ inline void cluster_sync() {
    cluster_arrive();
    cluster_wait();
}

// Write to this address in a block of the cluster; a cluster_sync makes it visible there.
__device__ inline void store_remote(int block, float& place, float value) {
    asm volatile("{\n"
                 ".reg .b32 there;\n"
                 "mapa.shared::cluster.u32 there, %0, %1;\n"
                 "st.shared::cluster.f32 [there], %2;\n"
                 "}" :: "r"(shared_address(&place)), "r"(block), "f"(value) : "memory");
}

// st.async: write an int to this address in a block of the cluster; its 4 bytes arrive at the
// mbarrier there.
__device__ inline void store_async(int block, int& place, int value, Mbarrier& full) {
    asm volatile("{\n"
                 ".reg .b32 there, full;\n"
                 "mapa.shared::cluster.u32 there, %0, %2;\n"
                 "mapa.shared::cluster.u32 full, %1, %2;\n"
                 "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.s32 "
                 "[there], %3, [full];\n"
                 "}" :: "r"(shared_address(&place)), "r"(shared_address(&full)), "r"(block),
                        "r"(value) : "memory");
}

// setmaxnreg, by all warps of a warpgroup. Takes effect only in a kernel with __launch_bounds__(n,
// 1).
template <int N> __device__ inline void setmaxnreg_increase() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(N));
}
template <int N> __device__ inline void setmaxnreg_decrease() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(N));
}

// The tensor map of TMA, encoded by kernels/tensor_map.py. Passed to a kernel as
// `const __grid_constant__ TensorMap`.
struct alignas(64) TensorMap {
    unsigned char bytes[128];
};

// Bring the map into the cache of TMA, without waiting for it.
__device__ inline void prefetch_map(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" :: "l"(&map) : "memory");
}

// A thread starts the load of a box at (x, y, z, w), x the contiguous axis; its bytes arrive at
// the mbarrier. What is outside of the tensor is written as 0 and counted too.
__device__ inline void tma_load(void* to, const TensorMap& map, Mbarrier& full, int x, int y, int z,
                                int w) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5, %6}], [%2];"
                 :: "r"(shared_address(to)), "l"(&map), "r"(shared_address(&full)),
                    "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}

// Multicast: into all blocks of the cluster whose bits are set in `blocks`, at the same address of
// each one's shared memory; the bytes arrive at the same mbarrier of each.
__device__ inline void tma_load_multicast(unsigned short blocks, void* to, const TensorMap& map,
                                          Mbarrier& full, int x, int y, int z, int w) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                 ".multicast::cluster [%0], [%1, {%3, %4, %5, %6}], [%2], %7;"
                 :: "r"(shared_address(to)), "l"(&map), "r"(shared_address(&full)),
                    "r"(x), "r"(y), "r"(z), "r"(w), "h"(blocks) : "memory");
}

// Without a tensor map: `bytes` contiguous bytes, a multiple of 16 as are both addresses.
__device__ inline void bulk_load(void* to, const void* from, int bytes, Mbarrier& full) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1], %2, [%3];"
                 :: "r"(shared_address(to)), "l"(__cvta_generic_to_global(from)), "r"(bytes),
                    "r"(shared_address(&full)) : "memory");
}

// TMA stores: a box from shared memory, written or added to (float) the tensor; what is outside of
// it is dropped. Before, each thread that wrote to the box calls fence_proxy_async, and
// the threads synchronize. The thread that stores commits, and waits until at most N commits have
// not been read from shared memory, or have not been written.
__device__ inline void fence_proxy_async() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ inline void tma_store(const TensorMap& map, const void* from, int x, int y, int z,
                                 int w) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group "
                 "[%0, {%2, %3, %4, %5}], [%1];"
                 :: "l"(&map), "r"(shared_address(from)), "r"(x), "r"(y), "r"(z), "r"(w)
                 : "memory");
}
__device__ inline void tma_reduce_add(const TensorMap& map, const void* from, int x, int y, int z,
                                      int w) {
    asm volatile("cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.tile.bulk_group "
                 "[%0, {%2, %3, %4, %5}], [%1];"
                 :: "l"(&map), "r"(shared_address(from)), "r"(x), "r"(y), "r"(z), "r"(w)
                 : "memory");
}
__device__ inline void tma_store_commit() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
template <int N> __device__ inline void tma_store_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" :: "n"(N) : "memory");
}
template <int N> __device__ inline void tma_store_wait() {
    asm volatile("cp.async.bulk.wait_group %0;" :: "n"(N) : "memory");
}

// Four matrices of 8 x 8 values of 16 bits between shared memory and words of an accumulator's
// layout: lane l has the address of row l % 8 of matrix l / 8, and of each matrix in row l / 4 the
// columns l % 4 * 2 and the next.
__device__ inline void stmatrix(void* row, const unsigned (&w)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 :: "r"(shared_address(row)), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3])
                 : "memory");
}

// The matrix descriptor of a tile in shared memory: rows of 128 bytes, eight rows an atom of 1,024
// bytes to which the tile is aligned, the 16-byte pieces of a row permuted as TMA's 128-byte
// swizzle does. `columns` is the distance in bytes from 64 columns to the next 64 where the matrix
// product needs more of them at once (the operand's columns are its M or N); else it does not
// matter. The descriptor is a number in units of 16 bytes: to move by whole rows or columns, add to
// it.
__device__ inline unsigned long long wgmma_descriptor(const void* tile, int columns = 16) {
    constexpr unsigned long long ATOM = 1024 / 16, SWIZZLE_128 = 1ull << 62;
    return SWIZZLE_128 | ATOM << 32 | (unsigned long long)(columns / 16) << 16
        | (shared_address(tile) & 0x3ffff) / 16;
}

// The operand a of a product, 64 rows and 64 columns of a tile, as words in registers.
__device__ inline void load_operand_a(unsigned (&a)[16], const unsigned char* tile) {
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane % 16;
    #pragma unroll
    for (int k = 0; k < 4; ++k) {   // 16 columns, two pieces of 16 bytes
        const unsigned from = shared_address(tile) + row * SWIZZLE +
                              ((2 * k + lane / 16) ^ row % 8) * 16;
        ldmatrix(reinterpret_cast<unsigned(&)[4]>(a[4 * k]), from);
    }
}

// wgmma is asynchronous, in groups: fence, issue, commit, wait until at most N groups are pending.
// Until then neither the results nor operands in registers may be touched.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int N> __device__ inline void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(N) : "memory");
}
// Keeps the compiler from moving uses of the registers across this point.
template <int N> __device__ inline void fence_registers(float (&x)[N]) {
    #pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(x[i]) :: "memory");
}

#define LIST_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define LIST_16 LIST_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define LIST_24 LIST_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define LIST_32 LIST_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define LIST_40 LIST_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define LIST_48 LIST_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define LIST_56 LIST_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define LIST_64 LIST_56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define LIST_72 LIST_64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define LIST_80 LIST_72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define LIST_88 LIST_80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define LIST_96 LIST_88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define LIST_104 LIST_96 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define LIST_112 LIST_104 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define LIST_120 LIST_112 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define LIST_128 LIST_120 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define IN_OUT_8_AT(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]),             \
    "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define IN_OUT_8(d) IN_OUT_8_AT(d, 0)
#define IN_OUT_16_AT(d, i) IN_OUT_8_AT(d, i), IN_OUT_8_AT(d, i + 8)
#define IN_OUT_16(d) IN_OUT_16_AT(d, 0)
#define IN_OUT_32(d) IN_OUT_16_AT(d, 0), IN_OUT_16_AT(d, 16)
#define IN_OUT_40(d) IN_OUT_32(d), IN_OUT_8_AT(d, 32)
#define IN_OUT_48(d) IN_OUT_40(d), IN_OUT_8_AT(d, 40)
#define IN_OUT_64(d) IN_OUT_48(d), IN_OUT_16_AT(d, 48)
#define IN_OUT_80(d) IN_OUT_64(d), IN_OUT_16_AT(d, 64)
#define IN_OUT_88(d) IN_OUT_80(d), IN_OUT_8_AT(d, 80)
#define IN_OUT_96(d) IN_OUT_88(d), IN_OUT_8_AT(d, 88)
#define IN_OUT_128(d) IN_OUT_96(d), IN_OUT_16_AT(d, 96), IN_OUT_16_AT(d, 112)

// d (+)= a b for 64 rows and N columns, 16 terms of each sum, T in, float out. Of the 64 rows warp
// w of the warpgroup has 16 w ...; there thread t has in d[4 j + 2 i + e] row t / 4 + 8 i, column
// 8 j + t % 4 * 2 + e. a is a descriptor, or the four words of a thread: rows and columns as in d,
// two values a word, a[2 j + i] for the columns 8 j ... . The descriptors are of tiles whose 16
// terms lie along a row, unless A_COLUMNS, B_COLUMNS: there the rows of the tile are the terms.
// Without `add` d is overwritten.
template <typename T, int N> struct Wgmma;

// R = N / 2 registers; the other numbers count the operands on from there.
#define DEFINE_WGMMA(T, NAME, N, R, P0, P1, P2, P3, P4, P5, P6)                                   \
    template <> struct Wgmma<T, N> {                                                              \
        template <bool B_COLUMNS = false, bool A_COLUMNS = false>                                 \
        __device__ static void run(float (&d)[R], unsigned long long a, unsigned long long b,     \
                                   bool add) {                                                    \
            asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #P2 ", 0;\n"                    \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME " {"     \
                         LIST_##R "}, %" #P0 ", %" #P1 ", add, 1, 1, %" #P3 ", %" #P4 ";\n}"      \
                         : IN_OUT_##R(d)                                                          \
                         : "l"(a), "l"(b), "r"(int(add)), "n"(int(A_COLUMNS)),                    \
                           "n"(int(B_COLUMNS)));                                                  \
        }                                                                                         \
        template <bool B_COLUMNS = false>                                                         \
        __device__ static void run(float (&d)[R], const unsigned* a, unsigned long long b,        \
                                   bool add) {                                                    \
            asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #P5 ", 0;\n"                    \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME " {"     \
                         LIST_##R "}, {%" #P0 ", %" #P1 ", %" #P2 ", %" #P3 "}, %" #P4            \
                         ", add, 1, 1, %" #P6 ";\n}"                                              \
                         : IN_OUT_##R(d)                                                          \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(add)),     \
                           "n"(int(B_COLUMNS)));                                                  \
        }                                                                                         \
    };
#define DEFINE_WGMMA_16_BITS(...)                                                                 \
    DEFINE_WGMMA(__half, "f16", __VA_ARGS__)                                                      \
    DEFINE_WGMMA(__nv_bfloat16, "bf16", __VA_ARGS__)
DEFINE_WGMMA_16_BITS(16, 8, 8, 9, 10, 11, 12, 13, 14)
DEFINE_WGMMA_16_BITS(32, 16, 16, 17, 18, 19, 20, 21, 22)
DEFINE_WGMMA_16_BITS(64, 32, 32, 33, 34, 35, 36, 37, 38)
DEFINE_WGMMA_16_BITS(80, 40, 40, 41, 42, 43, 44, 45, 46)
DEFINE_WGMMA_16_BITS(96, 48, 48, 49, 50, 51, 52, 53, 54)
DEFINE_WGMMA_16_BITS(128, 64, 64, 65, 66, 67, 68, 69, 70)
DEFINE_WGMMA_16_BITS(160, 80, 80, 81, 82, 83, 84, 85, 86)
DEFINE_WGMMA_16_BITS(176, 88, 88, 89, 90, 91, 92, 93, 94)
DEFINE_WGMMA_16_BITS(192, 96, 96, 97, 98, 99, 100, 101, 102)
DEFINE_WGMMA_16_BITS(256, 128, 128, 129, 130, 131, 132, 133, 134)

// The same for operands of 8 bits, 32 terms at a time, which lie along rows: their bytes are those
// of 16 terms of 16 bits.
template <int LEFT, int RIGHT, int N> struct WgmmaFp8;

#define DEFINE_WGMMA_FP8(LEFT, RIGHT, A, B, N, R, P0, P1, P2)                                     \
    template <> struct WgmmaFp8<LEFT, RIGHT, N> {                                                 \
        __device__ static void run(float (&d)[R], unsigned long long a, unsigned long long b,     \
                                   bool add) {                                                    \
            asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #P2 ", 0;\n"                    \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32." A "." B " {" LIST_##R  \
                         "}, %" #P0 ", %" #P1 ", add, 1, 1;\n}"                                   \
                         : IN_OUT_##R(d)                                                          \
                         : "l"(a), "l"(b), "r"(int(add)));                                        \
        }                                                                                         \
    };

// The stage of a pipeline, and the parity of its mbarriers' phase.
template <int STAGES> struct PipelineState {
    int stage = 0;
    unsigned parity = 0;
    __device__ void next() {
        if (++stage == STAGES) { stage = 0; parity ^= 1; }
    }
};
