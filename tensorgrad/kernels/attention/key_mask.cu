// Which keys, and which tiles of keys, the queries of a sequence see: what the kernels for Hopper
// read instead of a mask that is the same for all heads and queries (padding).
//
//   bits[b]: bit k says whether key k is seen
//   tiles[b][n]: of the last tile up to n with a key that is seen, its number times 2, plus 1 where
//   all its keys are; -1 where there is no such tile. Both written with =
//
// Floor: 4 bytes a key read, at most, and next to nothing written; one launch.
//
// The naive kernel, a thread a tile:
//   int found = 0, exist = min(columns, keys - n * columns);
//   for (k = n * columns; k < n * columns + exist; ++k) found += mask[k] == 0;
//   tiles[n] = found ? 2 * n + (found == exist) : n ? tiles[n - 1] : -1;
//
// Phases, of a block a sequence: bits; then, for as many tiles as there are threads at a time, the
// entry of each tile by itself, and the largest of those up to it.
//
// instantiate: attention_key_mask
#include "types.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32;

// The largest x of this thread and of all before it in the block.
__device__ inline int block_max_scan(int x, int (&warp_max)[WARPS]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    #pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
        const int other = __shfl_up_sync(0xffffffff, x, offset);
        if (lane >= offset) x = max(x, other);
    }
    if (lane == 31) warp_max[warp] = x;
    __syncthreads();
    #pragma unroll
    for (int w = 0; w < WARPS; ++w)
        if (w < warp) x = max(x, warp_max[w]);
    return x;
}

// tiles: (batch, tile_count). bits: (batch, tile_count, columns / 8), zeros after the last key.
// mask: 0 or -inf, with strides in elements. columns: keys of a tile, a multiple of 8.
__global__ void __launch_bounds__(THREADS)
attention_key_mask(int* __restrict__ tiles, unsigned char* bits, const float* __restrict__ mask,
                   long long batch_stride, long long key_stride, int keys, int columns,
                   int tile_count) {
    __shared__ int warp_max[WARPS], last;
    const int bytes = tile_count * columns / 8;
    tiles += blockIdx.x * tile_count;
    bits += blockIdx.x * bytes;
    mask += blockIdx.x * batch_stride;
    for (int i = threadIdx.x; i < bytes; i += THREADS) {
        unsigned byte = 0;
        #pragma unroll
        for (int k = 0; k < 8; ++k)
            byte |= unsigned(8 * i + k < keys && mask[(8 * i + k) * key_stride] == 0) << k;
        bits[i] = byte;
    }
    if (threadIdx.x == 0) last = -1;
    __syncthreads();
    for (int start = 0; start < tile_count; start += THREADS) {
        const int n = start + threadIdx.x;
        int entry = last;
        if (n < tile_count) {
            int found = 0;
            for (int i = n * columns / 8; i < (n + 1) * columns / 8; ++i)
                found += __popc(bits[i]);
            if (found > 0) entry = 2 * n + (found == min(columns, keys - n * columns));
        }
        entry = block_max_scan(entry, warp_max);
        if (n < tile_count) tiles[n] = entry;
        __syncthreads();
        if (threadIdx.x == THREADS - 1) last = entry;
        __syncthreads();
    }
}
