// Which keys a query sees, and which weights dropout keeps: for the attention kernels that take all
// options (causality, windows, bias, dropout, sequences of unequal length) at run time.
// Source: Dao 2023, arXiv:2307.08691.
#pragma once
#include "exp.cuh"
#include "philox.cuh"

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

// The keep mask of 16 neighbouring weights, number `block` of (sequences, H, queries, keys).
__device__ inline Word keep_16(const AttentionDropout& d, Word block) {
    const Bits words = philox(d.seed, draw_number(d.draw, d.offset), d.stream, block);
    Word bits = 0;
    #pragma unroll
    for (int i = 0; i < 16; ++i) bits |= Word(lane<16>(words, i) < Word(d.threshold)) << i;
    return bits;
}

// The keep mask of BITS neighbouring weights, 16, 32 or 64, from number `first` on. BITS / 16
// neighbouring threads draw it together, and all get it.
template <int BITS> __device__ inline Word keep_bits(const AttentionDropout& d, Word first) {
    constexpr int LANES_EACH = BITS / 16;
    const int own = threadIdx.x % LANES_EACH, shift = first % 16;
    Word bits = keep_16(d, first / 16 + own) << 16 * own;
    #pragma unroll
    for (int offset = 1; offset < LANES_EACH; offset *= 2)
        bits |= __shfl_xor_sync(0xffffffff, bits, offset);
    if (shift) {   // the weights begin within a block of 16: draw one more
        const Word next = keep_16(d, first / 16 + LANES_EACH);
        bits = bits >> shift | next << (BITS - shift);
    }
    return bits;
}
