// The keep mask of dropout, the same in all attention kernels and in ops/philox.py. A block of 32
// bits decides over 16 neighbouring keys of two queries, 8 apart in 16: in the accumulator of a
// product on tensor cores the two rows of a thread, or its 16 rows where these are keys. Rows and
// columns are padded to multiples of 16, so that no block is cut.
#pragma once
#include "philox.cuh"

// The key of Philox4x32-7 for one mask.
__device__ inline Word keep_key(Word seed, Word draw, Word stream) {
    return philox(seed, draw, stream, 0).values[0];
}

// The number of the block with this query and this key; `head` counts those of all sequences.
__device__ inline Word keep_block(Word head, int queries, int keys, int query, int key) {
    const Word pair = head * ((queries + 15) / 16) * 8 + query / 16 * 8 + query % 8;
    return pair * ((keys + 15) / 16) + key / 16;
}

// COUNT blocks: bit i of one, in the low half for the first query, is 1 with a probability of
// threshold / 2^16. Random word b of 16 has bit b of the 32 numbers of a block. They are compared
// with the threshold all at once, from the lowest bit on, where the result is a majority of three;
// words are not drawn for the bits below the threshold's lowest 1.
template <int COUNT>
__device__ inline void keep_bits(unsigned (&keep)[COUNT], Word key, const Word (&blocks)[COUNT],
                                 unsigned threshold) {
    #pragma unroll
    for (unsigned& bits : keep) bits = threshold >> 16 ? ~0u : 0;
    #pragma unroll 1
    for (int draw = (__ffs(threshold) - 1) / 4; draw < 4; ++draw) {
        #pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const Bits32 words = philox32(key, blocks[i], draw);
            #pragma unroll
            for (int b = 0; b < 4; ++b) {
                const unsigned bit = -(threshold >> (4 * draw + b) & 1), word = words.values[b];
                keep[i] = word & bit | word & keep[i] | bit & keep[i];
            }
        }
    }
}
