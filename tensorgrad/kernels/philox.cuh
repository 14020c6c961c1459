// Random bits from a counter: Philox4x64-10, the same bits as numpy.random.Philox, and
// Philox4x32-7.
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

// Philox4x32-7: 128 bits from products of 32 bits, the fewest rounds that pass all tests of
// randomness (table 2), for kernels where drawing would take longer than what it is for.
struct Bits32 {
    unsigned values[4];
};

__device__ inline Bits32 philox32(Word key, Word block, unsigned draw) {
    unsigned c0 = block, c1 = block >> 32, c2 = draw, c3 = 0, key0 = key, key1 = key >> 32;
    #pragma unroll
    for (int round = 0; round < 7; ++round) {
        const Word product0 = Word(0xd2511f53u) * c0, product1 = Word(0xcd9e8d57u) * c2;
        c0 = unsigned(product1 >> 32) ^ c1 ^ key0;
        c1 = unsigned(product1);
        c2 = unsigned(product0 >> 32) ^ c3 ^ key1;
        c3 = unsigned(product0);
        key0 += 0x9e3779b9u;
        key1 += 0xbb67ae85u;
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
