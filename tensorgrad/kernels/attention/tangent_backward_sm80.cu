// Backward of the tangent of attention with mma.sync, on sm_80 and later, in 16 bits and in TF32.
// With w, ts and mean as in tangent_forward_sm80.cu, and dy the gradient of ty:
//
//   u = dy v^T - dy . y, e = w u, d = w ((ts - mean) u + dy tv^T - dy . ty)
//   dtq = scale e k, dtk = scale e^T q, dtv = w^T dy
//   dq = scale (d k + e tk), dk = scale (d^T q + e^T tq), dv = (w (ts - mean))^T dy
//
// All are written with =. With dropout dy v^T, dy tv^T, and w in dv and dtv, are multiplied by what
// forward multiplied w with.
//
// As backward_sm80.cu: a launch with rows of keys and one with rows of queries, so that what one
// product leaves in registers is what the next one wants there. That takes 18 products for the
// least possible 13, but no atomics and no order among blocks. What ldmatrix brings of a tile of
// columns serves two products where two of them read it. Registers do not hold four sums of more
// than 64 columns: there dv and dtv have a launch of their own, 21 products.
//
// Floor: 36 D operations for each query and key that meet, 42 D for D > 64, and two exponentials
// or three.
//
// The naive kernel, a thread for query i of a head; with KEYS a thread for key j, over all i:
//
//   for (int j = 0; j < KEYS; ++j) {
//       float s = 0, ts = 0, u = 0, x = 0;
//       for (int d = 0; d < D; ++d) {
//           s += scale * q[i][d] * k[j][d];
//           ts += scale * (tq[i][d] * k[j][d] + q[i][d] * tk[j][d]);
//           u += dy[i][d] * v[j][d];
//           x += dy[i][d] * tv[j][d];
//       }
//       const float w = exp(s - logsumexp[i]), e = w * (u - y_delta[i]);
//       const float g = w * ((ts - mean[i]) * (u - y_delta[i]) + x - ty_delta[i]);
//       for (int d = 0; d < D; ++d) dq[i][d] += scale * (g * k[j][d] + e * tk[j][d]);
//       for (int d = 0; d < D; ++d) dtq[i][d] += scale * e * k[j][d];
//       // with KEYS: dk[j][d] += scale * (g * q[i][d] + e * tq[i][d]);
//       //            dtk[j][d] += scale * e * q[i][d]; dtv[j][d] += w * dy[i][d];
//       //            dv[j][d] += w * (ts - mean[i]) * dy[i][d];
//   }
//
// Phases, for each tile of columns: load the next tile; scores and their tangents; mask; gradients
// of the weights; weights and gradients of the scores; add to the sums. Then: store.
//
// where: T = __half | __nv_bfloat16
// instantiate: attention_tangent_rows<{T}, {0 | 32}>
// instantiate: attention_tangent_rows<float, 0>
// where: BOTH_TILES = 32, 1, 32 | 64, 1, 16
// where: PART_TILES = 96, 1, 32, {KEYS | VALUES} | 128, 1, 16, KEYS | 128, 1, 32, VALUES
// where: QUERIES_TILES = 32, 1, 32 | 64, 1, 32 | 96, 1, 32 | 128, 1, 16
// instantiate: attention_tangent_backward<{T}, {BOTH_TILES}, BOTH>
// instantiate: attention_tangent_backward<{T}, {PART_TILES}>
// instantiate: attention_tangent_backward<{T}, {QUERIES_TILES}, QUERIES>
// instantiate: attention_tangent_backward<float, 64, 1, 16, {BOTH | QUERIES}>
// instantiate: attention_tangent_backward<float, 128, 1, 16, {KEYS | VALUES | QUERIES}>
#include "attention/sm80.cuh"
#include "attention/tangent.cuh"

// Which gradients a launch computes: of q and tq, of k and tk, of v and tv, of the last four.
constexpr int QUERIES = 0, KEYS = 1, VALUES = 2, BOTH = 3;

// The statistics of each query. sums: (B, H, Tq, 4) where TILE is 0 and pitch is Tq; else
// (B, H, pitch / TILE, 4, TILE), where those past the last query are such that weights and
// gradients become 0. Arrays (batch, heads, queries, width); 8 lanes a row.
template <typename T, int TILE>
__global__ void __launch_bounds__(256, 2)
attention_tangent_rows(float* __restrict__ sums, const T* __restrict__ y,
                       const T* __restrict__ ty, const T* __restrict__ dy,
                       const float* __restrict__ logsumexp, const float* __restrict__ means,
                       const __grid_constant__ Strides y_at, const __grid_constant__ Strides ty_at,
                       const __grid_constant__ Strides dy_at, int batch, int heads, int queries,
                       int width, int aligned, int pitch) {
    // neighbouring rows are heads of one query
    const long long row = (blockIdx.x * 256ll + threadIdx.x) / 8;
    const int lane = threadIdx.x % 8, head = row % heads, query = row / heads % pitch;
    const long long sequence = row / heads / pitch;
    const bool valid = sequence < batch && query < queries;
    float y_delta = 0, ty_delta = 0;
    if (valid) {
        y += sequence * y_at.batch + head * y_at.head + query * y_at.row;
        ty += sequence * ty_at.batch + head * ty_at.head + query * ty_at.row;
        dy += sequence * dy_at.batch + head * dy_at.head + query * dy_at.row;
        if (aligned) {
            for (int i = lane * VECTOR<T>; i < width; i += 8 * VECTOR<T>) {
                const Vec<T> one = load<VECTOR<T>>(y + i), two = load<VECTOR<T>>(ty + i),
                             own = load<VECTOR<T>>(dy + i);
                #pragma unroll
                for (int e = 0; e < VECTOR<T>; ++e) {
                    y_delta += float(own.values[e]) * float(one.values[e]);
                    ty_delta += float(own.values[e]) * float(two.values[e]);
                }
            }
        } else {
            for (int i = lane; i < width; i += 8) {
                y_delta += float(dy[i]) * float(y[i]);
                ty_delta += float(dy[i]) * float(ty[i]);
            }
        }
    }
    #pragma unroll
    for (int offset = 4; offset > 0; offset /= 2) {
        y_delta += __shfl_xor_sync(0xffffffff, y_delta, offset);
        ty_delta += __shfl_xor_sync(0xffffffff, ty_delta, offset);
    }
    if (sequence >= batch || lane != 0) return;
    const long long pair = sequence * heads + head, place = pair * queries + query;
    const TangentStatistics found = {valid ? logsumexp[place] * LOG2_E : infinity<float>(),
                                     valid ? means[place] : 0, y_delta, ty_delta};
    if constexpr (TILE > 0) {
        float* to = sums + 4 * (pair * pitch + query / TILE * TILE) + query % TILE;
        to[0] = found.logsumexp;
        to[TILE] = found.mean;
        to[2 * TILE] = found.y_delta;
        to[3 * TILE] = found.ty_delta;
    } else {
        reinterpret_cast<TangentStatistics*>(sums)[place] = found;
    }
}

// With QUERIES rows are queries and columns keys: a1, a2, a3, b1, b2, b3, x4 are q, tq, dy, k, tk,
// v, tv, and d1, d2 become dq, dtq. Else rows are keys: a1, a2, a3, x4, b1, b2, b3 are k, tk, v,
// tv, q, tq, dy, and d1, d2, d3, d4 become dk, dtk, dv, dtv, or the first or last two:
//   s = a1 b1^T, ts = a2 b1^T + a1 b2^T, dw = a3 b3^T, dtw = a3 x4^T or x4 b3^T
//   d1 = scale (d b1 + e b2), d2 = scale e b1, d3 = w (ts - mean) b3, d4 = w b3
// A gradient whose address is null is not written.
template <typename T, int D, int R, int N, int PART>
__global__ void __launch_bounds__(THREADS, 2)
attention_tangent_backward(T* __restrict__ d1, T* __restrict__ d2, T* __restrict__ d3,
                           T* __restrict__ d4, const TangentStatistics* __restrict__ sums,
                           const T* __restrict__ a1, const T* __restrict__ a2,
                           const T* __restrict__ a3, const T* __restrict__ b1,
                           const T* __restrict__ b2, const T* __restrict__ b3,
                           const T* __restrict__ x4, const float* __restrict__ bias,
                           const int* __restrict__ q_starts, const int* __restrict__ k_starts,
                           const __grid_constant__ AttentionArguments p,
                           const __grid_constant__ AttentionDropout dropout,
                           const __grid_constant__ AttentionTangentArguments t) {
    constexpr bool OF_KEYS = PART != QUERIES, HAS_1 = PART != VALUES, HAS_3 = PART >= VALUES;
    constexpr int M = 64 * R, ROW_TILE = M * PITCH<T, D>, TILE = N * PITCH<T, D>;
    constexpr int ROW_TILES = OF_KEYS ? HAS_1 ? 4 : 2 : 3, TILES = OF_KEYS ? 3 : 4;
    extern __shared__ uint4 shared[];
    T *a_tiles = reinterpret_cast<T*>(shared), *stages = a_tiles + ROW_TILES * ROW_TILE;
    const RowBlock<OF_KEYS> block(p, q_starts, k_starts, M);
    const Span& span = block.span;
    if (block.rows <= 0) return;
    // A block of keys has query heads that use its head; one of queries, the head that it uses.
    const int group = p.heads / p.kv_heads, heads = OF_KEYS ? group : 1;
    const int b_head = OF_KEYS ? block.head * group : block.head / group;
    const Strides &a1_at = OF_KEYS ? p.k : p.q, &a2_at = OF_KEYS ? t.tk : t.tq,
                  &a3_at = OF_KEYS ? p.v : p.y, &b1_at = OF_KEYS ? p.q : p.k,
                  &b2_at = OF_KEYS ? t.tq : t.tk, &b3_at = OF_KEYS ? p.y : p.v, &x4_at = t.tv;
    const int a_start = (OF_KEYS ? span.k_start : span.q_start) + block.row;
    const int b_start = OF_KEYS ? span.q_start : span.k_start;
    a1 += place(a1_at, block.sequence, block.head, a_start);
    a2 += place(a2_at, block.sequence, block.head, a_start);
    a3 += place(a3_at, block.sequence, block.head, a_start);
    if (OF_KEYS) x4 += place(x4_at, block.sequence, block.head, a_start);
    sums += place(p.sums, block.sequence, OF_KEYS ? b_head : block.head, span.q_start);
    const ColumnRange seen = block.tiles_seen(p, N);
    const int row = block.row + threadIdx.x / 32 * 16 * R;   // the warp's first
    const int steps = max(seen.last - seen.first, 0) * heads;

    // Load the rows and the first tile of columns. The statistics of a query go into the padding of
    // its dy.
    auto load_statistics = [&](T* tile, const TangentStatistics* from, int i, bool valid) {
        cp_async<16>(shared_address(tile + i * PITCH<T, D> + D), from + (valid ? i : 0), valid);
    };
    auto load_stage = [&](int i, int head, int column) {   // head: counted from b_head
        T* stage = stages + i % 2 * (TILES * TILE);
        const int left = block.columns - column;
        auto load = [&](int tile, const T* from, const Strides& at) {
            // from where is computed for each tile: pointers would take registers
            from += place(at, rematerialize(block.sequence), b_head + head, b_start + column);
            load_tile<N, D>(stage + tile * TILE, from, at.row, left, p.width, p.aligned,
                            rematerialize(threadIdx.x));
        };
        load(0, b1, b1_at);
        load(1, b2, b2_at);
        load(2, b3, b3_at);
        if (!OF_KEYS) load(3, x4, x4_at);
        if (OF_KEYS && threadIdx.x < N)
            load_statistics(stage + 2 * TILE, sums + head * p.sums.head + column, threadIdx.x,
                            threadIdx.x < left);
        cp_async_commit();
    };
    auto load_rows = [&](int tile, const T* from, const Strides& at) {
        load_tile<M, D>(a_tiles + tile * ROW_TILE, from, at.row, block.rows, p.width, p.aligned);
    };
    load_rows(0, a1, a1_at);
    load_rows(1, a2, a2_at);
    if (HAS_1) load_rows(2, a3, a3_at);
    if (OF_KEYS && HAS_1) load_rows(3, x4, x4_at);
    if (!OF_KEYS && threadIdx.x < M)
        load_statistics(a_tiles + 2 * ROW_TILE, sums + block.row, threadIdx.x,
                        threadIdx.x < block.rows);
    cp_async_commit();
    if (steps > 0) load_stage(0, 0, seen.first * N);

    const bool drops = dropout.threshold >= 0;
    RowOperand<T, R, D, false> rows1, rows2, rows3, rows4;
    Fragment<R, N> s, ts;   // become w and w (ts - mean)
    Fragment<R, HAS_1 ? N : 16> dw, dtw;   // become e and d
    Fragment<R, HAS_1 ? D : 8> sum1, sum2;
    Fragment<R, HAS_3 ? D : 8> sum3, sum4;
    sum1.clear();
    sum2.clear();
    sum3.clear();
    sum4.clear();
    cp_async_wait<0>();
    __syncthreads();
    rows1.start(a_tiles);
    rows2.start(a_tiles + ROW_TILE);
    if (HAS_1) rows3.start(a_tiles + 2 * ROW_TILE);
    if (HAS_1 && OF_KEYS) rows4.start(a_tiles + 3 * ROW_TILE);
    int next_head = 0, next = seen.first;   // the tile of step i + 1
    for (int i = 0; i < steps; ++i) {
        // Load the next tile.
        T* b1_tile = stages + i % 2 * (TILES * TILE);
        const T *b2_tile = b1_tile + TILE, *b3_tile = b2_tile + TILE;
        const int query_head = OF_KEYS ? b_head + next_head : block.head, column = next * N;
        if (++next == seen.last) {
            next = seen.first;
            ++next_head;
        }
        cp_async_wait<0>();
        __syncthreads();
        if (i + 1 < steps) load_stage(i + 1, next_head, next * N);
        T* keep = OF_KEYS ? b1_tile : a_tiles;
        if (drops)
            draw_keep_mask<OF_KEYS, D, R, N>(keep, p, dropout, block.sequence, query_head,
                                             block.row, column);
        if (!overlaps_band<R, OF_KEYS>(p, span, rematerialize(row), column, N)) continue;
        // Scores and their tangents.
        start_scores<OF_KEYS>(s, p, span, bias, block.sequence, query_head, row, column);
        ts.clear();
        multiply_rows({&s, &ts}, {&rows1, &rows2}, b1_tile);
        multiply_rows(ts, rows1, b2_tile);
        // Mask.
        if (!inside_band<R, OF_KEYS>(p, span, row, column, N))
            mask_scores<OF_KEYS>(s, p, span, row, column);
        // Gradients of the weights.
        if constexpr (HAS_1) {
            dw.clear();
            dtw.clear();
            if constexpr (OF_KEYS) {
                multiply_rows({&dw, &dtw}, {&rows3, &rows4}, b3_tile);
            } else {
                multiply_rows(dw, rows3, b3_tile);
                multiply_rows(dtw, rows3, b3_tile + TILE);
            }
            if (drops) {
                apply_dropout<OF_KEYS, D>(dw, keep, p.inverse_keep);
                apply_dropout<OF_KEYS, D>(dtw, keep, p.inverse_keep);
            }
        }
        // Weights, and gradients of the scores.
        const T* statistics = OF_KEYS ? b3_tile : a_tiles + 2 * ROW_TILE +
                                                  threadIdx.x / 32 * 16 * R * PITCH<T, D>;
        auto statistics_of = [&](int query) {
            return *reinterpret_cast<const TangentStatistics*>(statistics + query * PITCH<T, D> +
                                                               D);
        };
        auto finish = [&](const TangentStatistics& query, int h, int c) {
            float &x = s.at(h, c), &tx = ts.at(h, c);
            const float centered = tx * (p.scale_log2 / LOG2_E) - query.mean;
            x = fast_exp2(x * p.scale_log2 - query.logsumexp);
            tx = x * centered;
            if constexpr (HAS_1) {
                float &dx = dw.at(h, c), &dtx = dtw.at(h, c);
                dx = x * (dx - query.y_delta);
                dtx = x * (dtx - query.ty_delta) + centered * dx;
            }
        };
        if constexpr (OF_KEYS) {
            #pragma unroll
            for (int j = 0; j < N / 4; ++j) {
                const int c = j / 2 * 8 + j % 2;
                const TangentStatistics query = statistics_of(s.column_of(c));
                #pragma unroll
                for (int h = 0; h < 2 * R; ++h) finish(query, h, c);
            }
        } else {
            #pragma unroll
            for (int h = 0; h < 2 * R; ++h) {
                const TangentStatistics query = statistics_of(s.row_of(h));
                #pragma unroll
                for (int j = 0; j < N / 4; ++j) finish(query, h, j / 2 * 8 + j % 2);
            }
        }
        if (HAS_3 && drops) {
            apply_dropout<OF_KEYS, D>(s, keep, p.inverse_keep);
            apply_dropout<OF_KEYS, D>(ts, keep, p.inverse_keep);
        }
        // Sums.
        if constexpr (HAS_3) accumulate<D>({&sum3, &sum4}, {&ts, &s}, b3_tile);
        if constexpr (HAS_1) {
            accumulate<D>({&sum1, &sum2}, {&dtw, &dw}, b1_tile);
            accumulate<D>(sum1, dw, b2_tile);
        }
    }

    // Store. Where to is computed again, for it took registers.
    const int warp = threadIdx.x / 32;
    const int first = rematerialize(row), sequence = rematerialize(block.sequence);
    const Span here = span_of(p, q_starts, k_starts, sequence);
    const int count = min((OF_KEYS ? here.keys : here.queries) - first, 16 * R);
    const int start = (OF_KEYS ? here.k_start : here.q_start) + first;
    T* own_tile = a_tiles + warp * 16 * R * PITCH<T, D>;
    auto store = [&](T* to, const Strides& at, const auto& sum, float factor) {
        if (to == nullptr) return;
        float scale[2 * R];
        #pragma unroll
        for (float& x : scale) x = factor;
        store_rows<D>(to + place(at, sequence, block.head, start), at.row, count, p.width,
                      p.aligned, own_tile, sum, scale);
    };
    if constexpr (HAS_1) {
        store(d1, OF_KEYS ? p.dk : p.dq, sum1, p.scale_log2 / LOG2_E);
        store(d2, OF_KEYS ? t.dtk : t.dtq, sum2, p.scale_log2 / LOG2_E);
    }
    if constexpr (HAS_3) {
        store(d3, p.dv, sum3, 1);
        store(d4, t.dtv, sum4, 1);
    }
}
