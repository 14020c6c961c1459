// Attention of short sequences with mma.sync: all of a head, at most N queries and N keys, is one
// block, so scores are computed once, there is no rescaling, and backward is one kernel.
//
//   attention_short           y = softmax(scale q k^T + bias) v, and the log-sum-exp of each row
//   attention_short_backward  dq, dk, dv from q, k, v, the log-sum-exp and dy
//
// With ROTATES, queries and keys are rotated in shared memory by the angles of their steps (rotary
// positions), and dq and dk are rotated back there; both have the bits of rotary.cu.
//
// Floor: reading q, k, v and writing y once, 8 D bytes a step in 16 bits; backward 14 D. A block is
// small, and an SM has many of them, so that some load while others compute. All is
// written with =. bias may be null; p.bias has its strides. Dropout, causality and windows as in
// the other kernels. Launched by kernels/attention/short.py.
//
// The naive kernels: those of forward_sm80.cu and backward_sm80.cu, where one
// thread then adds dq, and one for each key dk and dv.
//
// Phases of forward: load and rotate; scores; mask; softmax; weighted values; store. Of backward:
// load and rotate; scores; mask; gradients of the weights; weights and gradients of the scores,
// into registers for dq and into shared memory for dk and dv; store dq; then, by key, dk and dv.
//
// where: T = __half | __nv_bfloat16
// where: ROTATES = true | false
// instantiate: {attention_short | attention_short_backward}<{T}, {32 | 64}, {32 | 64}, {ROTATES}>
#include "attention/sm80.cuh"
#include "rotary.cuh"

// A warp for each 16 rows.
template <int N> constexpr int LANES = 2 * N;

// The first rows of a tile of N, zeros after them.
template <int D, int N, typename T>
__device__ inline void load_rows(T* tile, const T* from, long long stride, int rows, int width) {
    constexpr int PIECES = D / 8;
    #pragma unroll
    for (int i = threadIdx.x; i < N * PIECES; i += LANES<N>) {
        const int row = i / PIECES, column = i % PIECES * 8;
        cp_async<16>(shared_address(tile + row * PITCH<T, D> + column),
                     from + row * stride + column, row < rows && column < width);
    }
}

// Cosines and sines of each step, (queries, width / 2); there are as many keys.
struct Angles {
    const float *cosines, *sines;
    bool interleaved;
};

// Rotate the first rows of tiles, of which row 0 is a step, by their angles or, with direction -1,
// back. COUNT threads, numbered from 0, share the rows as in load_rows: so a warp rotates what it
// has loaded.
template <int D, int ROWS, int COUNT, typename T, int TILES>
__device__ inline void rotate_rows(T* const (&tiles)[TILES], const Angles& angles, int step,
                                   const AttentionArguments& p, int thread, float direction) {
    constexpr int PAIRS = 4, PIECES = D / (2 * PAIRS);
    const int half = p.width / 2;
    #pragma unroll
    for (int i = thread; i < ROWS * PIECES; i += COUNT) {
        const int row = i / PIECES, pair = i % PIECES * PAIRS;
        if (step + row >= p.queries || pair >= half) continue;
        const Vec<float, PAIRS> cosine[] = {
            load<PAIRS>(angles.cosines + (step + row) * half + pair)};
        const Vec<float, PAIRS> sine[] = {load<PAIRS>(angles.sines + (step + row) * half + pair)};
        #pragma unroll
        for (T* tile : tiles) {
            T* first = tile + row * PITCH<T, D> + (angles.interleaved ? 2 * pair : pair);
            T* second = first + (angles.interleaved ? PAIRS : half);
            auto one = load<PAIRS>(first), two = load<PAIRS>(second);
            if (angles.interleaved) rotate<true>(one, two, cosine, sine, direction);
            else rotate<false>(one, two, cosine, sine, direction);
            store(first, one);
            store(second, two);
        }
    }
}

// The keep mask of each query, a bit a key.
template <int N>
__device__ inline void load_keep_mask(Word (&keep)[N], const AttentionArguments& p,
                                      const AttentionDropout& dropout, int head, int sequence) {
    draw_keep_bits<N, N>(p, dropout, Word(sequence) * p.heads + head, 0, 0, LANES<N>,
                         [&](int query, int key, unsigned bits) {
        reinterpret_cast<unsigned short*>(keep + query)[key / 16] = bits;
    });
}

// Load a head's queries, keys, values and keep mask, and wait for these and all loads before them.
template <bool ROTATES, int D, int N, typename T>
__device__ inline void load_head(T* q_tile, T* k_tile, T* v_tile, Word (&keep)[N], const T* q,
                                 const T* k, const T* v, const AttentionArguments& p,
                                 const AttentionDropout& dropout, const Angles& angles, int head,
                                 int sequence) {
    const int kv_head = head / (p.heads / p.kv_heads);
    load_rows<D, N>(q_tile, q + place(p.q, sequence, head, 0), p.q.row, p.queries, p.width);
    load_rows<D, N>(k_tile, k + place(p.k, sequence, kv_head, 0), p.k.row, p.keys, p.width);
    load_rows<D, N>(v_tile, v + place(p.v, sequence, kv_head, 0), p.v.row, p.keys, p.width);
    cp_async_commit();
    if (dropout.threshold >= 0) load_keep_mask(keep, p, dropout, head, sequence);
    cp_async_wait<0>();
    if constexpr (ROTATES) {
        __syncwarp();   // which has loaded the rows that it rotates
        rotate_rows<D, N, LANES<N>>({q_tile, k_tile}, angles, 0, p, threadIdx.x, 1.0f);
    }
    __syncthreads();
}

template <typename T, int D, int N, bool ROTATES>
__global__ void __launch_bounds__(LANES<N>)
attention_short(T* __restrict__ y, float* __restrict__ logsumexp, const T* __restrict__ q,
                const T* __restrict__ k, const T* __restrict__ v, const float* __restrict__ bias,
                const float* __restrict__ cosines, const float* __restrict__ sines,
                bool interleaved, const __grid_constant__ AttentionArguments p,
                const __grid_constant__ AttentionDropout dropout) {
    constexpr int TILE = N * PITCH<T, D>;
    __shared__ __align__(16) T q_tile[TILE], k_tile[TILE], v_tile[TILE];
    __shared__ Word keep[N];
    const bool drops = dropout.threshold >= 0;
    const int head = blockIdx.x % p.heads, sequence = blockIdx.x / p.heads;
    const Angles angles = {cosines, sines, interleaved};
    load_head<ROTATES, D, N>(q_tile, k_tile, v_tile, keep, q, k, v, p, dropout, angles, head,
                             sequence);

    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16;   // the warp's first
    if (row >= p.queries) return;
    const Span span = {0, p.queries, 0, p.keys, p.keys - p.queries};
    RowOperand<T, 1, D, true> queries;
    Fragment<1, N> s;
    Fragment<1, D> o;
    float scale[2];
    queries.start(q_tile);
    o.clear();
    // Scores.
    start_scores<false>(s, p, span, bias, sequence, head, row, 0);
    multiply_rows(s, queries, k_tile);
    // Mask.
    mask_scores<false>(s, p, span, row, 0);
    // Softmax.
    #pragma unroll
    for (int h = 0; h < 2; ++h) {
        const float largest = s.row_max(h, -infinity<float>());
        const float base = largest == -infinity<float>() ? 0.0f : largest * p.scale_log2;
        const int at = row + s.row_of(h);
        const Word bits = drops ? keep[at] >> lane % 4 * 2 : ~Word(0);
        float sum = 0;
        s.for_row(h, [&](float& x, int c) {
            sum += x = fast_exp2(x * p.scale_log2 - base);
            if (!(bits >> c & 1)) x = 0;
        });
        sum = quad_sum(sum);
        scale[h] = sum == 0 ? 0.0f : p.inverse_keep / sum;
        if (lane % 4 == 0 && at < p.queries)
            logsumexp[place(p.sums, sequence, head, at)] =
                sum == 0 ? infinity<float>() : base / LOG2_E + logf(sum);
    }
    // Weighted values.
    accumulate<D>(o, s, v_tile);
    store_rows<D>(y + place(p.y, sequence, head, row), p.y.row, min(p.queries - row, 16), p.width,
                  true, q_tile + row * PITCH<T, D>, o, scale);
}

// c += w^T b for the warp's 16 columns of w; both are tiles of N rows.
template <int D, int N, typename T>
__device__ inline void accumulate_columns(Fragment<1, D>& c, const T* w, const T* b) {
    const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * 16;
    const unsigned w_at = shared_address(
        w + (lane % 8 + lane / 16 * 8) * PITCH<T, N> + first + lane / 8 % 2 * 8);
    const unsigned b_at = shared_address(b + lane % 16 * PITCH<T, D> + lane / 16 * 8);
    #pragma unroll
    for (int n = 0; n < N / 16; ++n) {
        unsigned rows[1][4], columns[4];
        ldmatrix_transposed(rows[0], w_at + 16 * n * PITCH<T, N> * 2);
        #pragma unroll
        for (int d = 0; d < D / 16; ++d) {
            ldmatrix_transposed(columns, b_at + (16 * n * PITCH<T, D> + 16 * d) * 2);
            mma_columns<T>(c, 2 * d, rows, columns);
        }
    }
}

// Each warp first has 16 queries: weights w and g = w (dy v^T - dy . y), from which dq follows;
// both are left in shared memory, where it then finds what belongs to its 16 keys: dv = w^T dy,
// dk = g^T q. y is not read: all of a row is here. p.y is of dy; there are as many kv_heads as
// heads. Shared memory: 4 tiles of D, 2 of N.
template <typename T, int D, int N, bool ROTATES>
__global__ void __launch_bounds__(LANES<N>)
attention_short_backward(T* __restrict__ dq, T* __restrict__ dk, T* __restrict__ dv,
                         const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v,
                         const T* __restrict__ dy, const float* __restrict__ logsumexp,
                         const float* __restrict__ bias, const float* __restrict__ cosines,
                         const float* __restrict__ sines, bool interleaved,
                         const __grid_constant__ AttentionArguments p,
                         const __grid_constant__ AttentionDropout dropout) {
    extern __shared__ uint4 shared[];
    __shared__ Word keep[N];
    constexpr int TILE = N * PITCH<T, D>;
    T *q_tile = reinterpret_cast<T*>(shared), *k_tile = q_tile + TILE, *v_tile = k_tile + TILE;
    T *dy_tile = v_tile + TILE, *w_tile = dy_tile + TILE, *g_tile = w_tile + N * PITCH<T, N>;
    const bool drops = dropout.threshold >= 0;
    const int head = blockIdx.x % p.heads, sequence = blockIdx.x / p.heads;
    load_rows<D, N>(dy_tile, dy + place(p.y, sequence, head, 0), p.y.row, p.queries, p.width);
    const Angles angles = {cosines, sines, interleaved};
    load_head<ROTATES, D, N>(q_tile, k_tile, v_tile, keep, q, k, v, p, dropout, angles, head,
                             sequence);

    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16;   // the warp's first
    const Span span = {0, p.queries, 0, p.keys, p.keys - p.queries};
    Fragment<1, D> sum;
    sum.clear();
    {
        RowOperand<T, 1, D, true> queries, dys;
        Fragment<1, N> s, g;
        queries.start(q_tile);
        dys.start(dy_tile);
        // Scores.
        g.clear();
        start_scores<false>(s, p, span, bias, sequence, head, row, 0);
        multiply_rows(s, queries, k_tile);
        // Mask.
        mask_scores<false>(s, p, span, row, 0);
        // Gradients of the weights.
        multiply_rows(g, dys, v_tile);
        // Weights, and gradients of the scores.
        #pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int at = row + s.row_of(h);
            const float own = at < p.queries
                ? logsumexp[place(p.sums, sequence, head, at)] * LOG2_E : infinity<float>();
            const Word bits = drops ? keep[at] >> lane % 4 * 2 : ~Word(0);
            float delta = 0;   // dy . y, which is the mean of dy v^T with the weights
            s.for_row(h, [&](float& weight, int c) {
                float& dx = g.at(h, c);
                weight = fast_exp2(weight * p.scale_log2 - own);
                dx *= bits >> c & 1 ? p.inverse_keep : 0.0f;
                delta += weight * dx;
            });
            delta = quad_sum(delta);
            s.for_row(h, [&](float& weight, int c) {
                float& dx = g.at(h, c);
                dx = weight * (dx - delta);
                weight = bits >> c & 1 ? weight * p.inverse_keep : 0.0f;
            });
            const int first = at * PITCH<T, N> + s.column_of(0);
            #pragma unroll
            for (int c = 0; c < N; c += 8) {
                *reinterpret_cast<unsigned*>(w_tile + first + c) =
                    pack<T>(s.at(h, c), s.at(h, c + 1));
                *reinterpret_cast<unsigned*>(g_tile + first + c) =
                    pack<T>(g.at(h, c), g.at(h, c + 1));
            }
        }
        accumulate<D>(sum, g, k_tile);
    }
    __syncthreads();   // k and v have been read

    // Store dq; then, by key, dk and dv.
    const float scale[2] = {p.scale_log2 / LOG2_E, p.scale_log2 / LOG2_E}, one[2] = {1, 1};
    T* own = k_tile + row * PITCH<T, D>;
    const int queries = min(p.queries - row, 16), keys = min(p.keys - row, 16);
    const auto store_sum = [&](T* to, const Strides& at, int rows, const float (&factor)[2],
                               auto change) {
        store_rows<D>(to + place(at, sequence, head, row), at.row, rows, p.width, true, own, sum,
                      factor, change);
    };
    const auto rotate_back = [&] {   // the rows of the warp
        if constexpr (ROTATES) {
            rotate_rows<D, 16, 32>({own}, angles, row, p, lane, -1.0f);
            __syncwarp();
        }
    };
    store_sum(dq, p.dq, queries, scale, rotate_back);
    sum.clear();
    accumulate_columns<D, N>(sum, g_tile, q_tile);
    store_sum(dk, p.dk, keys, scale, rotate_back);
    sum.clear();
    accumulate_columns<D, N>(sum, w_tile, dy_tile);
    store_sum(dv, p.dv, keys, one, Unchanged{});
}
