// The tangent of attention with mma.sync, on sm_80 and later, in 16 bits and in TF32: the result's
// derivative along (tq, tk, tv).
//
//   w = exp(scale q k^T + bias - logsumexp), ts = scale (tq k^T + q tk^T), mean = sum of w ts
//   ty = (w ts) v + w tv - mean y, and the mean of each row, all written with =
//
// As forward_sm80.cu, but the weights need no running maximum, for the log-sum-exp is known: one
// pass over the keys, and one sum for both products with values. Dropout multiplies the weights of
// v and tv, not those of the mean.
//
// Floor: 10 D operations and one exponential for each query and key that meet.
//
// The naive kernel, a thread for query i of a head, which sees all keys:
//
//   float mean = 0;
//   for (int d = 0; d < D; ++d) ty[i][d] = 0;
//   for (int j = 0; j < KEYS; ++j) {
//       float s = 0, ts = 0;
//       for (int d = 0; d < D; ++d) {
//           s += scale * q[i][d] * k[j][d];
//           ts += scale * (tq[i][d] * k[j][d] + q[i][d] * tk[j][d]);
//       }
//       const float w = exp(s - logsumexp[i]);
//       mean += w * ts;
//       for (int d = 0; d < D; ++d) ty[i][d] += w * ts * v[j][d] + w * tv[j][d];
//   }
//   for (int d = 0; d < D; ++d) ty[i][d] -= mean * y[i][d];
//
// Phases, for each tile of keys: load the next tile; scores and their tangents; mask; weights;
// add to the sum. Then: load y; subtract; store.
//
// where: T = __half | __nv_bfloat16
// where: TILES = 32, 1, 64 | 64, 2, 32 | 96, 1, 32 | 128, 1, 16
// where: TF32_TILES = 64, 1, 16 | 128, 1, 16
// instantiate: attention_tangent<{T}, {TILES}>
// instantiate: attention_tangent<float, {TF32_TILES}>
#include "attention/sm80.cuh"
#include "attention/tangent.cuh"

// ty: (B, Tq, H, D). means, logsumexp: (B, H, Tq).
template <typename T, int D, int R, int N>
__global__ void __launch_bounds__(THREADS, 2)
attention_tangent(T* __restrict__ ty, float* __restrict__ means, const T* __restrict__ y,
                  const float* __restrict__ logsumexp, const T* __restrict__ q,
                  const T* __restrict__ k, const T* __restrict__ v, const T* __restrict__ tq,
                  const T* __restrict__ tk, const T* __restrict__ tv,
                  const float* __restrict__ bias, const int* __restrict__ q_starts,
                  const int* __restrict__ k_starts, const __grid_constant__ AttentionArguments p,
                  const __grid_constant__ AttentionDropout dropout,
                  const __grid_constant__ AttentionTangentArguments t) {
    constexpr int M = 64 * R, TILE = N * PITCH<T, D>;
    extern __shared__ uint4 shared[];
    T *q_tile = reinterpret_cast<T*>(shared), *tq_tile = q_tile + M * PITCH<T, D>;
    T* stages = tq_tile + M * PITCH<T, D>;   // tiles of k, tk, v, tv
    const RowBlock<false> block(p, q_starts, k_starts, M);
    const Span& span = block.span;
    if (block.rows <= 0) return;
    const int kv_head = block.head / (p.heads / p.kv_heads);
    const int block_start = span.q_start + block.row;
    q += place(p.q, block.sequence, block.head, block_start);
    tq += place(t.tq, block.sequence, block.head, block_start);
    k += place(p.k, block.sequence, kv_head, span.k_start);
    v += place(p.v, block.sequence, kv_head, span.k_start);
    tk += place(t.tk, block.sequence, kv_head, span.k_start);
    tv += place(t.tv, block.sequence, kv_head, span.k_start);
    const ColumnRange seen = block.tiles_seen(p, N);
    const int row = block.row + threadIdx.x / 32 * 16 * R;   // the warp's first

    // Load the queries and the first tile.
    auto load_stage = [&](int n) {
        T* stage = stages + n % 2 * (4 * TILE);
        const int keys = span.keys - n * N;
        auto load = [&](int i, const T* from, const Strides& at) {
            load_tile<N, D>(stage + i * TILE, from + n * N * at.row, at.row, keys, p.width,
                            p.aligned);
        };
        load(0, k, p.k);
        load(1, tk, t.tk);
        load(2, v, p.v);
        load(3, tv, t.tv);
        cp_async_commit();
    };
    load_tile<M, D>(q_tile, q, p.q.row, block.rows, p.width, p.aligned);
    load_tile<M, D>(tq_tile, tq, t.tq.row, block.rows, p.width, p.aligned);
    cp_async_commit();
    if (seen.first < seen.last) load_stage(seen.first);

    const bool drops = dropout.threshold >= 0;
    RowOperand<T, R, D, R * D * sizeof(T) <= 128> queries, tangents;
    Fragment<R, N> s, ts;
    Fragment<R, D> sum;
    float row_logsumexp[2 * R], mean[2 * R], one[2 * R];
    #pragma unroll
    for (int h = 0; h < 2 * R; ++h) {
        const int at = row + s.row_of(h);
        row_logsumexp[h] = at < span.queries
            ? logsumexp[place(p.sums, block.sequence, block.head, span.q_start + at)] * LOG2_E
            : infinity<float>();
        mean[h] = 0;
        one[h] = 1;
    }
    sum.clear();
    cp_async_wait<0>();
    __syncthreads();
    queries.start(q_tile);
    tangents.start(tq_tile);
    for (int n = seen.first; n < seen.last; ++n) {
        // Load the next tile.
        const T* k_tile = stages + n % 2 * (4 * TILE);
        cp_async_wait<0>();
        __syncthreads();
        if (n + 1 < seen.last) load_stage(n + 1);
        if (drops)
            draw_keep_mask<false, D, R, N>(q_tile, p, dropout, block.sequence, block.head,
                                           block.row, n * N);
        if (!overlaps_band<R, false>(p, span, row, n * N, N)) continue;
        // Scores and their tangents.
        start_scores<false>(s, p, span, bias, block.sequence, block.head, row, n * N);
        ts.clear();
        multiply_rows({&s, &ts}, {&queries, &tangents}, k_tile);
        multiply_rows(ts, queries, k_tile + TILE);
        // Mask.
        if (!inside_band<R, false>(p, span, row, n * N, N))
            mask_scores<false>(s, p, span, row, n * N);
        // Weights.
        #pragma unroll
        for (int h = 0; h < 2 * R; ++h)
            s.for_row(h, [&](float& x, int c) {
                float& tx = ts.at(h, c);
                x = fast_exp2(x * p.scale_log2 - row_logsumexp[h]);
                tx *= x;
                mean[h] += tx;
                tx *= p.scale_log2 / LOG2_E;
            });
        if (drops) {
            apply_dropout<false, D>(s, q_tile, p.inverse_keep);
            apply_dropout<false, D>(ts, q_tile, p.inverse_keep);
        }
        // Sum.
        accumulate<D>(sum, ts, k_tile + 2 * TILE);
        accumulate<D>(sum, s, k_tile + 3 * TILE);
    }

    // Load y. Where from is computed again, for it took registers.
    const int first = rematerialize(row), sequence = rematerialize(block.sequence);
    const Span own = span_of(p, q_starts, k_starts, sequence);
    const int count = min(own.queries - first, 16 * R), start = own.q_start + first;
    const int warp = threadIdx.x / 32, block_row = first - warp * 16 * R;
    __syncthreads();
    load_tile<M, D>(q_tile, y + place(t.y, sequence, block.head, own.q_start + block_row), t.y.row,
                    own.queries - block_row, p.width, p.aligned);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    // Subtract.
    T* tile = q_tile + warp * 16 * R * PITCH<T, D>;
    #pragma unroll
    for (int h = 0; h < 2 * R; ++h) {
        mean[h] = quad_sum(mean[h]) * (p.scale_log2 / LOG2_E);
        const int at = sum.row_of(h);
        if (threadIdx.x % 4 == 0 && at < count)
            means[place(p.sums, sequence, block.head, start + at)] = mean[h];
        sum.for_row(h, [&](float& x, int c) {
            x -= mean[h] * float(tile[at * PITCH<T, D> + sum.column_of(c)]);
        });
    }
    // Store.
    store_rows<D>(ty + place(p.y, sequence, block.head, start), p.y.row, count, p.width, p.aligned,
                  tile, sum, one);
}
