// FlashAttention with mma.sync, forward, on sm_80 and later (Dao 2023, arXiv:2307.08691), in 16
// bits and in TF32.
//
//   y = softmax(scale q k^T + bias) v, and the log-sum-exp of each row, all written with =
//
// A block holds 64 R queries and streams N keys at a time, which cp.async loads while those before
// are worked on. Scores and weights exist in registers alone: the layout in which a product leaves
// the weights is the one in which the next product wants them. Bias, dropout, causality, windows
// and sequences of unequal length are run-time options: one that a launch does not use costs one
// test a tile.
//
// Floor: 4 D operations and one exponential for each query and key that meet. mma.sync does 0.62 of
// what wgmma does on a Hopper chip. A fragment that ldmatrix brings serves R products.
//
// The naive kernel, a thread for query i of a head, which sees all keys:
//
//   float s[KEYS], row_max = -INFINITY, row_sum = 0;
//   for (int j = 0; j < KEYS; ++j) {
//       s[j] = 0;
//       for (int d = 0; d < D; ++d) s[j] += scale * q[i][d] * k[j][d];
//       row_max = max(row_max, s[j]);
//   }
//   for (int j = 0; j < KEYS; ++j) row_sum += s[j] = exp(s[j] - row_max);
//   for (int d = 0; d < D; ++d) {
//       y[i][d] = 0;
//       for (int j = 0; j < KEYS; ++j) y[i][d] += s[j] / row_sum * v[j][d];
//   }
//   logsumexp[i] = row_max + log(row_sum);
//
// Phases, for each tile of keys: load the next tile; scores; mask; online softmax; rescale the
// output; add the weighted values. Then: divide by the row sums and store.
//
// where: T = __half | __nv_bfloat16
// where: TILES = 32, 2, 64 | 64, 2, 64 | 96, 2, 32 | 128, 2, 32 | 256, 1, 32
// where: TF32_TILES = 64, 2, 32 | 128, 2, 16
// instantiate: attention_forward<{T}, {TILES}>
// instantiate: attention_forward<float, {TF32_TILES}>
#include "attention/sm80.cuh"

// Scores become weights 2^(scale_log2 s - base), relative to the row's maximum so far, and are
// added to the row sums. Returns whether earlier results must be multiplied, by `rescale`.
template <int R, int N>
__device__ inline bool online_softmax(Fragment<R, N>& s, float (&row_max)[2 * R],
                                      float (&row_sum)[2 * R], float (&rescale)[2 * R],
                                      float scale_log2) {
    bool rescales = false;
    #pragma unroll
    for (int h = 0; h < 2 * R; ++h) {
        const float largest = s.row_max(h, row_max[h]);
        const float base = largest == -infinity<float>() ? 0.0f : largest * scale_log2;
        rescale[h] = fast_exp2(row_max[h] * scale_log2 - base);
        rescales |= rescale[h] != 1;
        row_max[h] = largest;
        float sum = 0;
        s.for_row(h, [&](float& x, int) { sum += x = fast_exp2(x * scale_log2 - base); });
        row_sum[h] = row_sum[h] * rescale[h] + sum;
    }
    return __any_sync(0xffffffff, rescales);
}

// y: (B, Tq, H, D). logsumexp: (B, H, Tq); infinite, and y zero, where a query sees no key.
template <typename T, int D, int R, int N>
__global__ void __launch_bounds__(THREADS, 2)
attention_forward(T* __restrict__ y, float* __restrict__ logsumexp, const T* __restrict__ q,
                  const T* __restrict__ k, const T* __restrict__ v, const float* __restrict__ bias,
                  const int* __restrict__ q_starts, const int* __restrict__ k_starts,
                  const __grid_constant__ AttentionArguments p,
                  const __grid_constant__ AttentionDropout dropout) {
    constexpr int M = 64 * R, STAGE = 2 * N * PITCH<T, D>;
    extern __shared__ uint4 shared[];
    T *q_tile = reinterpret_cast<T*>(shared), *stages = q_tile + M * PITCH<T, D>;
    const RowBlock<false> block(p, q_starts, k_starts, M);
    const Span& span = block.span;
    if (block.rows <= 0) return;
    const int kv_head = block.head / (p.heads / p.kv_heads);
    q += place(p.q, block.sequence, block.head, span.q_start + block.row);
    k += place(p.k, block.sequence, kv_head, span.k_start);
    v += place(p.v, block.sequence, kv_head, span.k_start);
    const ColumnRange seen = block.tiles_seen(p, N);
    const int row = block.row + threadIdx.x / 32 * 16 * R;   // the warp's first

    // Load the queries and the first tile.
    auto load_stage = [&](int n) {
        T *stage = stages + n % 2 * STAGE, *v_stage = stage + STAGE / 2;
        const int keys = span.keys - n * N;
        load_tile<N, D>(stage, k + n * N * p.k.row, p.k.row, keys, p.width, p.aligned);
        load_tile<N, D>(v_stage, v + n * N * p.v.row, p.v.row, keys, p.width, p.aligned);
        cp_async_commit();
    };
    load_tile<M, D>(q_tile, q, p.q.row, block.rows, p.width, p.aligned);
    cp_async_commit();
    if (seen.first < seen.last) load_stage(seen.first);

    const bool drops = dropout.threshold >= 0;
    RowOperand<T, R, D, R * D <= 128> queries;
    Fragment<R, N> s;
    Fragment<R, D> o;
    float row_max[2 * R], row_sum[2 * R], rescale[2 * R];
    #pragma unroll
    for (int h = 0; h < 2 * R; ++h) {
        row_max[h] = -infinity<float>();
        row_sum[h] = 0;
    }
    o.clear();
    cp_async_wait<0>();
    __syncthreads();
    queries.start(q_tile);
    for (int n = seen.first; n < seen.last; ++n) {
        // Load the next tile.
        const T* k_tile = stages + n % 2 * STAGE;
        cp_async_wait<0>();
        __syncthreads();
        if (n + 1 < seen.last) load_stage(n + 1);
        if (drops)
            draw_keep_mask<false, D, R, N>(q_tile, p, dropout, block.sequence, block.head,
                                           block.row, n * N);
        if (!overlaps_band<R, false>(p, span, row, n * N, N)) continue;
        // Scores.
        start_scores<false>(s, p, span, bias, block.sequence, block.head, row, n * N);
        multiply_rows(s, queries, k_tile);
        // Mask.
        if (!inside_band<R, false>(p, span, row, n * N, N))
            mask_scores<false>(s, p, span, row, n * N);
        // Online softmax.
        if (online_softmax(s, row_max, row_sum, rescale, p.scale_log2)) o.scale_rows(rescale);
        if (drops) apply_dropout<false, D>(s, q_tile, 1);
        // Weighted values.
        accumulate<D>(o, s, k_tile + STAGE / 2);
    }

    // Divide by the row sums and store. Where to is computed again, for it took registers.
    const int first = rematerialize(row), sequence = rematerialize(block.sequence);
    const Span own = span_of(p, q_starts, k_starts, sequence);
    const int count = min(own.queries - first, 16 * R), start = own.q_start + first;
    const int warp = threadIdx.x / 32;
    #pragma unroll
    for (int h = 0; h < 2 * R; ++h) {
        const float sum = quad_sum(row_sum[h]);
        rescale[h] = sum == 0 ? 0.0f : p.inverse_keep / sum;
        const int at = o.row_of(h);
        if (threadIdx.x % 4 == 0 && at < count)
            logsumexp[place(p.sums, sequence, block.head, start + at)] =
                sum == 0 ? infinity<float>() : row_max[h] * p.scale_log2 / LOG2_E + logf(sum);
    }
    store_rows<D>(y + place(p.y, sequence, block.head, start), p.y.row, count, p.width, p.aligned,
                  q_tile + warp * 16 * R * PITCH<T, D>, o, rescale);
}
