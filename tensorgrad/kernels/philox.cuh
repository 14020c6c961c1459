// Random bits from a counter: Philox4x64-10, the same bits as numpy.random.Philox.
// Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", table 2.
#pragma once

typedef unsigned long long Word;

// Four words of block number `block`. Key (seed, 0), counter (block + 1, draw, stream, 0): NumPy
// counts up before it generates.
struct Bits {
    Word values[4];
};

__device__ inline Bits philox(Word seed, Word draw, Word stream, Word block) {
    const Word multiplier0 = 0xd2e7470ee14c6c93ull, multiplier1 = 0xca5a826395121157ull;
    Word c0 = block + 1, c1 = draw, c2 = stream, c3 = 0, key0 = seed, key1 = 0;
    #pragma unroll
    for (int round = 0; round < 10; ++round) {
        const Word high0 = __umul64hi(multiplier0, c0), low0 = multiplier0 * c0;
        const Word high1 = __umul64hi(multiplier1, c2), low1 = multiplier1 * c2;
        c0 = high1 ^ c1 ^ key0;
        c1 = low1;
        c2 = high0 ^ c3 ^ key1;
        c3 = low0;
        key0 += 0x9e3779b97f4a7c15ull;
        key1 += 0xbb67ae8584caa73bull;
    }
    return {{c0, c1, c2, c3}};
}

// Part i of the words cut into LANES equal parts, the low bits of a word first.
template <int LANES> __device__ inline Word lane(const Bits& bits, int i) {
    constexpr int PARTS = LANES / 4, BITS = 64 / PARTS;
    return bits.values[i / PARTS] << (64 - BITS * (i % PARTS + 1)) >> (64 - BITS);
}

// A draw number that may have a part which lives on the device, so that a captured launch draws
// new numbers at each replay. `offset` may be null.
__device__ inline Word draw_number(Word draw, const Word* offset) {
    return offset == nullptr ? draw : draw + *offset;
}
