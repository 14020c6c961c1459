// Which keys a query sees, and which weights dropout keeps: for the attention kernels that take all
// options (causality, windows, bias, dropout, sequences of unequal length) at run time.
// Source: Dao 2023, arXiv:2307.08691.
#pragma once
#include "attention/keep.cuh"
#include "exp.cuh"

struct Strides {   // in elements; the last axis is contiguous
    long long batch, head, row;
};

// The host packs it so. Query i of a sequence stands at position i + keys - queries, and sees the
// keys from position - window_left to position + window_right.
struct AttentionArguments {
    int heads, kv_heads, queries, keys;   // the lengths of the longest sequence
    int width, window_left, window_right, sequences;
    int aligned;   // rows start at multiples of 16 bytes, and so end
    int by_head;   // blocks of rows of one head follow each other; else of all heads, longest first
    // scale * log2(e), 1 / scale, 1 / keep probability
    float scale_log2, inverse_scale, inverse_keep;
    double scale, keep_probability;
    Strides q, k, v, y, dq, dk, dv, sums;   // y: of the result, in backward of its gradient
    long long bias[4];   // strides of batch, head, query, key
};

struct AttentionDropout {
    Word seed, draw, stream;
    const Word* offset;
    long long threshold;   // parts of 2^16; negative: no dropout
};

// A sequence: where it starts in q and in k, and how far the queries' places are from the keys'.
struct Span {
    int q_start, queries, k_start, keys, shift;
};

__device__ inline Span span_of(const AttentionArguments& p, const int* q_starts,
                               const int* k_starts, int sequence) {
    if (q_starts == nullptr) return {0, p.queries, 0, p.keys, p.keys - p.queries};
    const int q = q_starts[sequence], k = k_starts[sequence];
    const int queries = q_starts[sequence + 1] - q, keys = k_starts[sequence + 1] - k;
    return {q, queries, k, keys, keys - queries};
}

// The columns from first to last - 1 that a row sees: keys of a query or, with KEYS, queries of a
// key.
struct ColumnRange {
    int first, last;
};

template <bool KEYS>
__device__ inline ColumnRange range_of(const AttentionArguments& p, const Span& span, int row) {
    const int position = KEYS ? row - span.shift : row + span.shift;
    if (KEYS) return {position - p.window_right, min(span.queries, position + p.window_left + 1)};
    return {position - p.window_left, min(span.keys, position + p.window_right + 1)};
}

// The rows of a block: `rows` from `row` on, of the queries of a head or, with KEYS, of its keys.
// The others are its columns.
template <bool KEYS> struct RowBlock {
    int head, sequence, row, rows, columns;
    Span span;

    __device__ RowBlock(const AttentionArguments& p, const int* q_starts, const int* k_starts,
                        int size) {
        const int heads = KEYS ? p.kv_heads : p.heads, length = KEYS ? p.keys : p.queries;
        const int blocks = (length + size - 1) / size, all = heads * p.sequences;
        const int block = p.by_head ? blockIdx.x % blocks : blockIdx.x / all;
        const int place = p.by_head ? blockIdx.x / blocks : blockIdx.x % all;
        head = place % heads;
        sequence = place / heads;
        span = span_of(p, q_starts, k_starts, sequence);
        // Causal: the last queries and the first keys have the most to do.
        row = (KEYS ? block : blocks - 1 - block) * size;
        rows = min((KEYS ? span.keys : span.queries) - row, size);
        columns = KEYS ? span.queries : span.keys;
    }
    // The tiles of n columns that the rows see: first to last - 1.
    __device__ ColumnRange tiles_seen(const AttentionArguments& p, int n) const {
        const int first = max(range_of<KEYS>(p, span, row).first, 0) / n;
        const int last = min(range_of<KEYS>(p, span, row + rows - 1).last, columns);
        return {first, last > 0 ? (last + n - 1) / n : 0};
    }
};

// Statistics of a query for backward: the log-sum-exp of its scores, and delta = dy . y.
template <typename C> struct alignas(2 * sizeof(C)) RowStatistics {
    C logsumexp, delta;
};

// Where a head of a sequence starts in an array. Batch strides are 0 where sequences have starts.
__device__ inline long long place(const Strides& strides, int sequence, int head, int start) {
    return sequence * strides.batch + head * strides.head + start * strides.row;
}

// The keep mask of QUERIES by KEYS weights from a query and a key on, multiples of 16: the threads
// call store(query, key, bits) for 16 keys of a query, counted from there, until all are drawn.
template <int QUERIES, int KEYS, typename F>
__device__ inline void draw_keep_bits(const AttentionArguments& p, const AttentionDropout& d,
                                      Word head, int query, int key, int threads, F store) {
    constexpr int BLOCKS = KEYS / 16;
    const Word key_of_draw = keep_key(d.seed, draw_number(d.draw, d.offset), d.stream);
    #pragma unroll 1
    for (int i = threadIdx.x; i < QUERIES / 2 * BLOCKS; i += threads) {
        const int row = i / BLOCKS / 8 * 16 + i / BLOCKS % 8, column = i % BLOCKS * 16;
        const Word block[] = {keep_block(head, p.queries, p.keys, query + row, key + column)};
        unsigned bits[1];
        keep_bits<1>(bits, key_of_draw, block, d.threshold);
        store(row, column, bits[0] & 0xffff);
        store(row + 8, column, bits[0] >> 16);
    }
}
