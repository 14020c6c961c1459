// Kernels beside the copy engines of an all-reduce. The GPUs of one host reach each
// other's memory, and copy engines move the parts; parallel/comm/peer_memory.py has the order.
//
//   meet_ranks           one thread a rank: wait until all ranks have come here
//   add_copies<T>        sum = (own + copies in the order of the ranks) * scale: n reads and one
//                        write of an n-th of the array
//
// instantiate: meet_ranks
// instantiate: add_copies<{float | double | __half | __nv_bfloat16}>
#include "types.cuh"

constexpr int MOST_RANKS = 8;

// How often each rank has met the others, as it has told each of them: met[r][s] is in the memory
// of rank r and written by rank s. `meetings`: how often this rank has. None is ever set back.
struct Peers {
    unsigned* met[MOST_RANKS];
    unsigned* meetings;
    int rank, ranks;
};

// Writes of kernels and copies of this stream before are visible to all ranks afterwards.
__global__ void meet_ranks(const Peers peers) {
    const int other = threadIdx.x;
    const unsigned meeting = *peers.meetings + 1;
    __syncthreads();
    if (other < peers.ranks) {
        asm volatile("fence.acq_rel.sys;" ::: "memory");
        asm volatile("st.release.sys.global.u32 [%0], %1;"
                     :: "l"(peers.met[other] + peers.rank), "r"(meeting) : "memory");
        unsigned there;
        do {
            asm volatile("ld.acquire.sys.global.u32 %0, [%1];"
                         : "=r"(there) : "l"(peers.met[peers.rank] + other) : "memory");
        } while (int(there - meeting) < 0);   // the numbers may wrap around
    }
    if (other == 0) *peers.meetings = meeting;
}

// own: of rank `rank`; copies: of the other ranks, `pitch` elements apart. Multiples of 16 bytes.
template <typename T>
__global__ void __launch_bounds__(256)
add_copies(T* __restrict__ own, const T* __restrict__ copies, int rank, int ranks, long long size,
           long long pitch, double scale) {
    using C = Compute<T>;
    constexpr int N = VECTOR<T>;
    const long long i = (blockIdx.x * 256ll + threadIdx.x) * N;
    if (i >= size) return;
    C sum[N] = {};
    for (int r = 0; r < ranks; ++r) {
        const T* from = r == rank ? own : copies + (r - (r > rank)) * pitch;
        const Vec<T> x = load<N>(from + i);
        #pragma unroll
        for (int k = 0; k < N; ++k) sum[k] += C(x.values[k]);
    }
    Vec<T> result;
    #pragma unroll
    for (int k = 0; k < N; ++k) result.values[k] = T(sum[k] * C(scale));
    store(own + i, result);
}
