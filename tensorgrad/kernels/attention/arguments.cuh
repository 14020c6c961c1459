// Who sees whom in attention, and which weights dropout spares: for kernels that take every rule
// of kernels/attention/rule.py. Source: Dao 2023, arXiv:2307.08691.
#pragma once
#include "exp.cuh"
#include "philox.cuh"

struct Strides {   // in elements; an element of the last axis is beside the one before
    long long batch, head, row;
};

// Filled in by kernels/attention/arguments.py. Query i of a sequence stands at p = i + keys - queries, and
// sees the keys from p - before to p + after.
struct Problem {
    int heads, kv_heads, queries, keys;   // the lengths of the longest sequence
    int width, before, after, sequences;
    int aligned;   // rows start at multiples of 16 bytes, and so end
    int by_head;   // blocks of rows of one head follow each other; else of all heads, longest first
    float slope, inverse, spared;   // scale * log2(e), 1 / scale, 1 / kept
    double scale, kept;   // kept: the probability of being spared by dropout
    Strides q, k, v, y, dq, dk, dv, sums;   // y: of the result, in backward of its gradient
    long long bias[4];   // strides of batch, head, query, key
};

struct Dropout {
    Word seed, draw, stream;
    const Word* offset;
    long long threshold;   // of 2^16; negative: spare all
};

// One sequence: where it starts in q and in k, and how far the queries' places are from the keys'.
struct Span {
    int q_start, queries, k_start, keys, shift;
};

__device__ inline Span span_of(const Problem& p, const int* q_starts, const int* k_starts, int sequence) {
    if (q_starts == nullptr) return {0, p.queries, 0, p.keys, p.keys - p.queries};
    const int q = q_starts[sequence], k = k_starts[sequence];
    const int queries = q_starts[sequence + 1] - q, keys = k_starts[sequence + 1] - k;
    return {q, queries, k, keys, keys - queries};
}

// A block's rows: number `block` of those of a head of a sequence.
struct Tile {
    int block, head, sequence;
};

// `ascending`: the first rows have the most to do.
__device__ inline Tile tile_of(const Problem& p, int heads, int length, int size, bool ascending) {
    const int blocks = (length + size - 1) / size, all = heads * p.sequences, index = blockIdx.x;
    const int block = p.by_head ? index % blocks : index / all;
    const int head = p.by_head ? index / blocks : index % all;
    return {ascending ? block : blocks - 1 - block, head % heads, head / heads};
}

// The columns from first to last - 1 that a row meets: a query keys, or a key queries.
struct Range {
    int first, last;
};

template <bool KEYS>
__device__ inline Range range_of(const Problem& p, const Span& span, int row) {
    if (KEYS) return {row - span.shift - p.after, min(span.queries, row - span.shift + p.before + 1)};
    return {row + span.shift - p.before, min(span.keys, row + span.shift + p.after + 1)};
}

// The tiles of n columns that a block's rows meet: first to last - 1.
template <bool KEYS>
__device__ inline Range tiles_met(const Problem& p, const Span& span, int row, int rows, int columns, int n) {
    const int first = max(range_of<KEYS>(p, span, row).first, 0) / n;
    const int last = min(range_of<KEYS>(p, span, row + rows - 1).last, columns);
    return {first, last > 0 ? (last + n - 1) / n : 0};
}

// Of each query: the logarithm of its sum, and delta = dy . y.
template <typename C> struct alignas(2 * sizeof(C)) Sums {
    C logarithm, delta;
};

// Where a head of a sequence starts in an array. Batch strides are 0 where sequences have starts.
__device__ inline long long place(const Strides& strides, int sequence, int head, int start) {
    return sequence * strides.batch + head * strides.head + start * strides.row;
}

// Which of 16 neighbours dropout spares; number `block` of them in (sequences, H, queries, keys).
__device__ inline Word keep_16(const Dropout& d, Word block) {
    const Bits words = philox(d.seed, draw_number(d.draw, d.offset), d.stream, block);
    Word bits = 0;
    #pragma unroll
    for (int i = 0; i < 16; ++i) bits |= Word(lane<16>(words, i) < Word(d.threshold)) << i;
    return bits;
}

// Which of BITS neighbours, 16, 32 or 64 of them, dropout spares; `first` is the place of the first.
// BITS / 16 threads beside each other ask together, and all get the answer.
template <int BITS> __device__ inline Word keep_bits(const Dropout& d, Word first) {
    constexpr int SHARERS = BITS / 16;
    const int own = threadIdx.x % SHARERS, shift = first % 16;
    Word bits = keep_16(d, first / 16 + own) << 16 * own;
    #pragma unroll
    for (int offset = 1; offset < SHARERS; offset *= 2) bits |= __shfl_xor_sync(0xffffffff, bits, offset);
    if (shift) {   // it takes one more
        const Word next = keep_16(d, first / 16 + SHARERS);
        bits = bits >> shift | next << (BITS - shift);
    }
    return bits;
}
