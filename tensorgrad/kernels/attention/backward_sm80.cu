// FlashAttention with mma.sync, backward, on sm_80 and later (Dao 2023, arXiv:2307.08691, algorithm
// 2), in 16 bits and in TF32. With w the weights:
//
//   dv = w^T dy, g = w (dy v^T - delta), dq = scale g k, dk = scale g^T q, all written with =
//
// Two launches, one with rows of keys and one of queries, so that weights and g leave one product
// in the registers where the next wants them. That takes seven products for the least possible
// five, but no atomics, no order among blocks, and no shared memory but for tiles of the inputs.
//
// Floor: 14 D operations and two exponentials for each query and key that meet.
//
// The naive kernel, a thread for query i of a head; with KEYS a thread for key j, over all i:
//
//   for (int j = 0; j < KEYS; ++j) {
//       float s = 0, dw = 0;
//       for (int d = 0; d < D; ++d) {
//           s += scale * q[i][d] * k[j][d];
//           dw += dy[i][d] * v[j][d];
//       }
//       const float w = exp(s - logsumexp[i]), g = w * (dw - delta[i]);   // delta: dy . y
//       for (int d = 0; d < D; ++d) dq[i][d] += scale * g * k[j][d];
//       // with KEYS: dk[j][d] += scale * g * q[i][d]; dv[j][d] += w * dy[i][d];
//   }
//
// Phases, for each tile of columns: load the next tile; scores; mask; gradients of the weights;
// weights and gradients of the scores; add to the sums. Then: store.
//
// where: T = __half | __nv_bfloat16
// where: KEYS = 32, 2, 32 | 64, 1, 64 | 96, 1, 64 | 128, 1, 32 | 256, 1, 16
// where: QUERIES = 32, 2, 32 | 64, 2, 32 | 96, 2, 32 | 128, 2, 16 | 256, 1, 16
// where: TF32_TILES = 64, 2, 16 | 128, 1, 16
// instantiate: attention_backward<{T}, {KEYS}, true>
// instantiate: attention_backward<{T}, {QUERIES}, false>
// instantiate: attention_backward<float, {TF32_TILES}, {true | false}>
#include "attention/sm80.cuh"

// With KEYS rows are keys and columns queries: a1, a2, b1, b2 are k, v, q, dy, and d1, d2 become
// dk, dv. Else rows are queries: a1, a2, b1, b2 are q, dy, k, v, and d1 becomes dq:
//   s = a1 b1^T, w = exp(scale s - logsumexp), g = w (a2 b2^T - delta), d1 = scale g b1, d2 = w b2
// Keys of more than 128 elements take two blocks, each of which sums half of the elements.
template <typename T, int D, int R, int N, bool KEYS>
__global__ void __launch_bounds__(THREADS, 2)
attention_backward(T* __restrict__ d1, T* __restrict__ d2,
                   const RowStatistics<float>* __restrict__ sums, const T* __restrict__ a1,
                   const T* __restrict__ a2, const T* __restrict__ b1, const T* __restrict__ b2,
                   const float* __restrict__ bias, const int* __restrict__ q_starts,
                   const int* __restrict__ k_starts, const __grid_constant__ AttentionArguments p,
                   const __grid_constant__ AttentionDropout dropout) {
    constexpr int M = 64 * R, HALF = N * PITCH<T, D>, W = KEYS && D > 128 ? 128 : D;
    extern __shared__ uint4 shared[];
    T *a1_tile = reinterpret_cast<T*>(shared), *a2_tile = a1_tile + M * PITCH<T, D>;
    T* stages = a2_tile + M * PITCH<T, D>;
    const RowBlock<KEYS> block(p, q_starts, k_starts, M);
    const Span& span = block.span;
    if (block.rows <= 0) return;
    // A block of keys has query heads that use its head; one of queries, the head that it uses.
    const int group = p.heads / p.kv_heads, heads = KEYS ? group : 1;
    const int b_head = KEYS ? block.head * group : block.head / group;
    const Strides &a1_at = KEYS ? p.k : p.q, &a2_at = KEYS ? p.v : p.y, &b1_at = KEYS ? p.q : p.k,
                  &b2_at = KEYS ? p.y : p.v, &d1_at = KEYS ? p.dk : p.dq;
    const int a_start = (KEYS ? span.k_start : span.q_start) + block.row;
    const int b_start = KEYS ? span.q_start : span.k_start;
    a1 += place(a1_at, block.sequence, block.head, a_start);
    a2 += place(a2_at, block.sequence, block.head, a_start);
    b1 += place(b1_at, block.sequence, b_head, b_start);
    b2 += place(b2_at, block.sequence, b_head, b_start);
    sums += place(p.sums, block.sequence, KEYS ? b_head : block.head, span.q_start);
    const ColumnRange seen = block.tiles_seen(p, N);
    const int row = block.row + threadIdx.x / 32 * 16 * R;   // the warp's first
    const int steps = max(seen.last - seen.first, 0) * heads;

    // Load the rows and the first tile of columns.
    auto load_stage = [&](int i, int head, int column) {   // head: counted from b_head
        T *stage = stages + i % 2 * (2 * HALF), *stage2 = stage + HALF;
        const T* from1 = b1 + head * b1_at.head + column * b1_at.row;
        const T* from2 = b2 + head * b2_at.head + column * b2_at.row;
        const int left = block.columns - column;
        load_tile<N, D>(stage, from1, b1_at.row, left, p.width, p.aligned);
        load_tile<N, D>(stage2, from2, b2_at.row, left, p.width, p.aligned);
        if (KEYS && threadIdx.x < N) {   // a query's statistics go into the padding of its dy
            const bool valid = column + threadIdx.x < block.columns;
            cp_async<8>(shared_address(stage2 + threadIdx.x * PITCH<T, D> + D),
                        sums + (valid ? head * p.sums.head + column + threadIdx.x : 0),
                        valid ? 8 : 0);
        }
        cp_async_commit();
    };
    load_tile<M, D>(a1_tile, a1, a1_at.row, block.rows, p.width, p.aligned);
    load_tile<M, D>(a2_tile, a2, a2_at.row, block.rows, p.width, p.aligned);
    cp_async_commit();
    if (steps > 0) load_stage(0, 0, seen.first * N);

    const bool drops = dropout.threshold >= 0;
    RowOperand<T, R, D, R * D <= (sizeof(T) == 4 && !KEYS ? 128 : 64)> rows1;
    RowOperand<T, R, D, R * D <= 64> rows2;
    RowStatistics<float> own[2 * R];
    Fragment<R, N> s, g;
    Fragment<R, W> sum1;
    Fragment<R, KEYS ? W : 8> sum2;
    #pragma unroll
    for (int h = 0; h < 2 * R; ++h) {
        const int at = row + s.row_of(h);
        own[h] = !KEYS && at < span.queries ? sums[at]
                                            : RowStatistics<float>{infinity<float>(), 0};
    }
    sum1.clear();
    sum2.clear();
    cp_async_wait<0>();
    __syncthreads();
    rows1.start(a1_tile);
    rows2.start(a2_tile);
    int next_head = 0, next = seen.first;   // the tile of step i + 1
    for (int i = 0; i < steps; ++i) {
        // Load the next tile.
        T *b1_tile = stages + i % 2 * (2 * HALF), *b2_tile = b1_tile + HALF;
        const int query_head = KEYS ? b_head + next_head : block.head, column = next * N;
        if (++next == seen.last) {
            next = seen.first;
            ++next_head;
        }
        cp_async_wait<0>();
        __syncthreads();
        if (i + 1 < steps) load_stage(i + 1, next_head, next * N);
        if (drops)
            draw_keep_mask<KEYS, D, R, N>(KEYS ? b1_tile : a1_tile, p, dropout, block.sequence,
                                          query_head, block.row, column);
        if (!overlaps_band<R, KEYS>(p, span, row, column, N)) continue;
        // Scores.
        start_scores<KEYS>(s, p, span, bias, block.sequence, query_head, row, column);
        multiply_rows(s, rows1, b1_tile);
        // Mask.
        if (!inside_band<R, KEYS>(p, span, row, column, N))
            mask_scores<KEYS>(s, p, span, row, column);
        // Gradients of the weights.
        g.clear();
        multiply_rows(g, rows2, b2_tile);
        if (drops) apply_dropout<KEYS, D>(g, KEYS ? b1_tile : a1_tile, p.inverse_keep);
        // Weights, and gradients of the scores.
        #pragma unroll
        for (int j = 0; j < N / 4; ++j) {
            const int c = j / 2 * 8 + j % 2;
            RowStatistics<float> other;
            if (KEYS)
                other = *reinterpret_cast<const RowStatistics<float>*>(
                    b2_tile + s.column_of(c) * PITCH<T, D> + D);
            #pragma unroll
            for (int h = 0; h < 2 * R; ++h) {
                const RowStatistics<float>& query = KEYS ? other : own[h];
                float &x = s.at(h, c), &dx = g.at(h, c);
                x = fast_exp2(x * p.scale_log2 - query.logsumexp);
                dx = x * (dx - query.delta);
            }
        }
        if (KEYS && drops) apply_dropout<KEYS, D>(s, b1_tile, p.inverse_keep);
        // Sums.
        const int half = KEYS && D > 128 ? blockIdx.y * W : 0;
        if constexpr (KEYS) accumulate<D>(sum2, s, b2_tile + half);
        accumulate<D>(sum1, g, b1_tile + half);
    }

    // Store. Where to is computed again, for it took registers.
    const int half = KEYS && D > 128 ? blockIdx.y * W : 0, warp = threadIdx.x / 32;
    const int first = rematerialize(row), sequence = rematerialize(block.sequence);
    const Span here = span_of(p, q_starts, k_starts, sequence);
    const int count = min((KEYS ? here.keys : here.queries) - first, 16 * R);
    const int start = (KEYS ? here.k_start : here.q_start) + first;
    T* own_tile = a1_tile + warp * 16 * R * PITCH<T, D>;
    float scale[2 * R], one[2 * R];
    #pragma unroll
    for (int h = 0; h < 2 * R; ++h) {
        scale[h] = p.scale_log2 / LOG2_E;
        one[h] = 1;
    }
    store_rows<D>(d1 + place(d1_at, sequence, block.head, start) + half, d1_at.row, count,
                  p.width - half, p.aligned, own_tile, sum1, scale);
    if constexpr (KEYS)
        store_rows<D>(d2 + place(p.dv, sequence, block.head, start) + half, p.dv.row, count,
                      p.width - half, p.aligned, own_tile, sum2, one);
}
