// Attention of short sequences with mma.sync: all of a head, at most N queries and N keys, is one block,
// so scores are computed once, there is no rescaling, and backward is one kernel.
//
//   attention_short           y = softmax(scale q k^T + bias) v, and the logarithm of each row's sum
//   attention_short_backward  dq, dk, dv from q, k, v, the logarithm and dy
//
// Floor: reading q, k, v and writing y once, 8 D bytes a step in 16 bits; backward 14 D. A block is small,
// and a multiprocessor has many of them, so that some load while others compute. All is written with =.
// bias may be null; p.bias has its strides.
// Dropout, causality and windows as everywhere; launched by kernels/attention/short.py.
//
// where: T = __half | __nv_bfloat16
// instantiate: {attention_short | attention_short_backward}<{T}, {32 | 64}, {32 | 64}>
#include "attention/sm80.cuh"

// A warp for each 16 rows.
template <int N> constexpr int LANES = 2 * N;

// The first rows of a tile of N, zeros after them.
template <int D, int N, typename T>
__device__ inline void fetch(T* tile, const T* from, long long stride, int rows, int width) {
    constexpr int PIECES = D / 8;
    #pragma unroll
    for (int i = threadIdx.x; i < N * PIECES; i += LANES<N>) {
        const int row = i / PIECES, column = i % PIECES * 8;
        copy_async<16>(to_shared(tile + row * PITCH<D> + column), from + row * stride + column,
                       row < rows && column < width);
    }
}

// Which weights of each query dropout spares, a bit a key.
template <int N>
__device__ inline void fetch_kept(Word (&kept)[N], const Problem& p, const Dropout& dropout, int head, int sequence) {
    constexpr int SHARERS = N / 16;
    for (int i = threadIdx.x / SHARERS; i < N; i += LANES<N> / SHARERS) {
        const Word query = (Word(sequence) * p.heads + head) * p.queries + i;
        const Word bits = keep_bits<N>(dropout, query * p.keys);
        if (threadIdx.x % SHARERS == 0) kept[i] = bits;
    }
}

// A head's queries, keys, values and dropout, and what else is on its way: all is there for all threads.
template <int D, int N, typename T>
__device__ inline void fetch_head(T* q_tile, T* k_tile, T* v_tile, Word (&kept)[N], const T* q, const T* k,
                                  const T* v, const Problem& p, const Dropout& dropout, int head, int sequence) {
    const int kv_head = head / (p.heads / p.kv_heads);
    fetch<D, N>(q_tile, q + place(p.q, sequence, head, 0), p.q.row, p.queries, p.width);
    fetch<D, N>(k_tile, k + place(p.k, sequence, kv_head, 0), p.k.row, p.keys, p.width);
    fetch<D, N>(v_tile, v + place(p.v, sequence, kv_head, 0), p.v.row, p.keys, p.width);
    copy_commit();
    if (dropout.threshold >= 0) fetch_kept(kept, p, dropout, head, sequence);
    copy_wait<0>();
    __syncthreads();
}

// What the scores of a warp's queries start from.
template <int N>
__device__ inline void start(float (&s)[1][N / 8][4], const Problem& p, const Span& span, const float* bias,
                             int head, int sequence, int row) {
    if (bias == nullptr) clear(s);
    else start_scores<false, 1, N>(s, p, span, bias + sequence * p.bias[0] + head * p.bias[1], row, 0);
}

template <typename T, int D, int N>
__global__ void __launch_bounds__(LANES<N>)
attention_short(T* __restrict__ y, float* __restrict__ logsumexp, const T* __restrict__ q, const T* __restrict__ k,
                const T* __restrict__ v, const float* __restrict__ bias, const __grid_constant__ Problem p,
                const __grid_constant__ Dropout dropout) {
    __shared__ __align__(16) T q_tile[N * PITCH<D>], k_tile[N * PITCH<D>], v_tile[N * PITCH<D>];
    __shared__ Word kept[N];
    const bool drops = dropout.threshold >= 0;
    const int head = blockIdx.x % p.heads, sequence = blockIdx.x / p.heads;
    fetch_head<D, N>(q_tile, k_tile, v_tile, kept, q, k, v, p, dropout, head, sequence);

    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16;   // the warp's first
    if (row >= p.queries) return;
    const Span span = {0, p.queries, 0, p.keys, p.keys - p.queries};
    Rows<1, D, true> queries;
    float s[1][N / 8][4], o[1][D / 8][4], scale[1][2];
    queries.start(q_tile);
    clear(o);
    start<N>(s, p, span, bias, head, sequence, row);
    multiply_rows<N>(s, queries, k_tile);
    hide<false, 1, N>(s, p, span, row, 0);
    #pragma unroll
    for (int h = 0; h < 2; ++h) {
        float largest = -infinity<float>(), sum = 0;
        #pragma unroll
        for (int j = 0; j < N / 8; ++j) largest = fmaxf(largest, fmaxf(s[0][j][2 * h], s[0][j][2 * h + 1]));
        largest = quad_reduce(largest, [](float a, float b) { return fmaxf(a, b); });
        const float base = largest == -infinity<float>() ? 0.0f : largest * p.slope;
        const int at = row + 8 * h + lane / 4;
        const Word bits = drops ? kept[at] >> lane % 4 * 2 : ~Word(0);
        #pragma unroll
        for (int j = 0; j < N / 8; ++j)
            #pragma unroll
            for (int e = 0; e < 2; ++e) {
                float& x = s[0][j][2 * h + e];
                sum += x = fast_exp2(x * p.slope - base);
                if (!(bits >> (8 * j + e) & 1)) x = 0;
            }
        sum = quad_reduce(sum, [](float a, float b) { return a + b; });
        scale[0][h] = sum == 0 ? 0.0f : p.spared / sum;
        if (lane % 4 == 0 && at < p.queries)
            logsumexp[place(p.sums, sequence, head, at)] =
                sum == 0 ? infinity<float>() : base / LOG2_E + logf(sum);
    }
    accumulate<D, 1, N, D>(o, s, v_tile);
    store_rows<D, 1, D>(y + place(p.y, sequence, head, row), p.y.row, min(p.queries - row, 16), p.width, true,
                        q_tile + row * PITCH<D>, o, scale);
}

// c += w^T b for the warp's 16 columns of w; both are tiles of N rows.
template <int D, int N, typename T>
__device__ inline void accumulate_columns(float (&c)[1][D / 8][4], const T* w, const T* b) {
    const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * 16;
    const unsigned w_at = to_shared(w + (lane % 8 + lane / 16 * 8) * PITCH<N> + first + lane / 8 % 2 * 8);
    const unsigned b_at = to_shared(b + lane % 16 * PITCH<D> + lane / 16 * 8);
    #pragma unroll
    for (int n = 0; n < N / 16; ++n) {
        unsigned rows[4], columns[4];
        load_matrices_transposed(rows, w_at + 16 * n * PITCH<N> * 2);
        #pragma unroll
        for (int d = 0; d < D / 16; ++d) {
            load_matrices_transposed(columns, b_at + (16 * n * PITCH<D> + 16 * d) * 2);
            multiply<T>(c[0][2 * d], rows, columns[0], columns[1]);
            multiply<T>(c[0][2 * d + 1], rows, columns[2], columns[3]);
        }
    }
}

// Each warp first has 16 queries: weights w and g = w (dy v^T - dy . y), from which dq follows; both are
// left in shared memory, where it then finds what belongs to its 16 keys: dv = w^T dy, dk = g^T q. y is
// not read: all of a row is here. p.y is of dy; there are as many kv_heads as heads. Shared memory: 4
// tiles of D, 2 of N.
template <typename T, int D, int N>
__global__ void __launch_bounds__(LANES<N>)
attention_short_backward(T* __restrict__ dq, T* __restrict__ dk, T* __restrict__ dv, const T* __restrict__ q,
                         const T* __restrict__ k, const T* __restrict__ v, const T* __restrict__ dy,
                         const float* __restrict__ logsumexp, const float* __restrict__ bias,
                         const __grid_constant__ Problem p, const __grid_constant__ Dropout dropout) {
    extern __shared__ uint4 shared[];
    __shared__ Word kept[N];
    constexpr int TILE = N * PITCH<D>;
    T *q_tile = reinterpret_cast<T*>(shared), *k_tile = q_tile + TILE, *v_tile = k_tile + TILE;
    T *dy_tile = v_tile + TILE, *w_tile = dy_tile + TILE, *g_tile = w_tile + N * PITCH<N>;
    const bool drops = dropout.threshold >= 0;
    const int head = blockIdx.x % p.heads, sequence = blockIdx.x / p.heads;
    fetch<D, N>(dy_tile, dy + place(p.y, sequence, head, 0), p.y.row, p.queries, p.width);
    fetch_head<D, N>(q_tile, k_tile, v_tile, kept, q, k, v, p, dropout, head, sequence);

    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16;   // the warp's first
    const Span span = {0, p.queries, 0, p.keys, p.keys - p.queries};
    float sum[1][D / 8][4];
    clear(sum);
    {
        Rows<1, D, true> queries, dys;
        float s[1][N / 8][4], g[1][N / 8][4];
        queries.start(q_tile);
        dys.start(dy_tile);
        clear(g);
        start<N>(s, p, span, bias, head, sequence, row);
        multiply_rows<N>(s, queries, k_tile);
        hide<false, 1, N>(s, p, span, row, 0);
        multiply_rows<N>(g, dys, v_tile);
        #pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int at = row + 8 * h + lane / 4;
            const float logarithm =
                at < p.queries ? logsumexp[place(p.sums, sequence, head, at)] * LOG2_E : infinity<float>();
            const Word bits = drops ? kept[at] >> lane % 4 * 2 : ~Word(0);
            float delta = 0;   // dy . y, which is the mean of dy v^T with the weights
            #pragma unroll
            for (int j = 0; j < N / 8; ++j)
                #pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float &weight = s[0][j][2 * h + e], &dx = g[0][j][2 * h + e];
                    weight = fast_exp2(weight * p.slope - logarithm);
                    dx *= bits >> (8 * j + e) & 1 ? p.spared : 0.0f;
                    delta += weight * dx;
                }
            delta = quad_reduce(delta, [](float a, float b) { return a + b; });
            T *w_row = w_tile + at * PITCH<N> + lane % 4 * 2, *g_row = g_tile + at * PITCH<N> + lane % 4 * 2;
            #pragma unroll
            for (int j = 0; j < N / 8; ++j) {
                float w[2];
                #pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const float weight = s[0][j][2 * h + e];
                    float& dx = g[0][j][2 * h + e];
                    dx = weight * (dx - delta);
                    w[e] = bits >> (8 * j + e) & 1 ? weight * p.spared : 0.0f;
                }
                *reinterpret_cast<unsigned*>(w_row + 8 * j) = pack(w[0], w[1], T());
                *reinterpret_cast<unsigned*>(g_row + 8 * j) = pack(g[0][j][2 * h], g[0][j][2 * h + 1], T());
            }
        }
        accumulate<D, 1, N, D>(sum, g, k_tile);
    }
    __syncthreads();   // k and v have been read

    const float scale[1][2] = {{p.slope / LOG2_E, p.slope / LOG2_E}}, one[1][2] = {{1, 1}};
    T* own = k_tile + row * PITCH<D>;
    const int queries = min(p.queries - row, 16), keys = min(p.keys - row, 16);
    store_rows<D, 1, D>(dq + place(p.dq, sequence, head, row), p.dq.row, queries, p.width, true, own, sum, scale);
    clear(sum);
    accumulate_columns<D, N>(sum, g_tile, q_tile);
    store_rows<D, 1, D>(dk + place(p.dk, sequence, head, row), p.dk.row, keys, p.width, true, own, sum, scale);
    clear(sum);
    accumulate_columns<D, N>(sum, w_tile, dy_tile);
    store_rows<D, 1, D>(dv + place(p.dv, sequence, head, row), p.dv.row, keys, p.width, true, own, sum, one);
}
