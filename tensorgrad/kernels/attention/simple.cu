// Attention in float and double with plain arithmetic, for heads of any width, on any GPU: for what
// the fast kernels do not support, without the matrix of scores in memory. Formulas and roles are
// those of forward_sm80.cu and backward_sm80.cu; all results are written with =.
//
// A block of 256 threads holds 64 rows and streams 32 columns at a time; a thread has 4 x 2 scores,
// and 4 x 4 elements of results. It writes 64 elements of each row's result: wider heads take more
// blocks, of which each computes the scores again.
//
// Floor: 4 D operations for each query and key that meet, forward, 14 D backward, at what the plain
// units can do; reading operands from shared memory halves that.
//
// The naive kernels: those of forward_sm80.cu and backward_sm80.cu. That of
// attention_backward_rows, a thread a query: delta[i] = 0; for (d) delta[i] += dy[i][d] * y[i][d];
//
// Phases, forward: scores, mask and bias, online softmax, dropout, weighted values; at the end
// divide and store. Backward: scores, gradients of the weights, dropout, weights and gradients of
// the scores, sums; at the end store.
//
// where: T = float | double
// instantiate: attention_backward_rows<{float | double | __half | __nv_bfloat16}>
// instantiate: attention_forward<{T}>
// instantiate: attention_backward<{T}, {true | false}>
#include "attention/arguments.cuh"

constexpr int THREADS = 256, ROWS = 64, COLUMNS = 32, STEP = 16, PIECE = 64;

template <typename T> struct SharedTiles {
    T weights[ROWS][COLUMNS + 1];
    union {
        struct {
            T a[STEP][ROWS + 1], b[STEP][COLUMNS + 1];
        } steps;
        T tile[COLUMNS][PIECE];
    };
    Word keep[ROWS];   // the keep mask of each query
};

// c = a b^T, of `rows` rows of a and `columns` rows of b; the others count as zeros.
template <typename T>
__device__ inline void multiply_rows(T (&c)[4][2], SharedTiles<T>& shared, const T* a,
                                     long long a_row, int rows, const T* b, long long b_row,
                                     int columns, int width) {
    const int x = threadIdx.x % 16, y = threadIdx.x / 16;
    #pragma unroll
    for (int i = 0; i < 4; ++i) c[i][0] = c[i][1] = 0;
    for (int start = 0; start < width; start += STEP) {
        const bool inside = start + x < width;
        __syncthreads();
        for (int row = y; row < ROWS; row += 16)
            shared.steps.a[x][row] = inside && row < rows ? a[row * a_row + start + x] : T(0);
        for (int row = y; row < COLUMNS; row += 16)
            shared.steps.b[x][row] = inside && row < columns ? b[row * b_row + start + x] : T(0);
        __syncthreads();
        #pragma unroll
        for (int d = 0; d < STEP; ++d)
            #pragma unroll
            for (int i = 0; i < 4; ++i)
                #pragma unroll
                for (int j = 0; j < 2; ++j)
                    c[i][j] += shared.steps.a[d][4 * y + i] * shared.steps.b[d][x + 16 * j];
    }
}

// c += w b, of `columns` rows of b and at most 64 elements of each, `width` of them there.
template <typename T>
__device__ inline void accumulate(T (&c)[4][4], SharedTiles<T>& shared, const T (&w)[4][2],
                                  const T* b, long long b_row, int columns, int width) {
    const int x = threadIdx.x % 16, y = threadIdx.x / 16;
    __syncthreads();
    #pragma unroll
    for (int i = 0; i < 4; ++i)
        #pragma unroll
        for (int j = 0; j < 2; ++j) shared.weights[4 * y + i][x + 16 * j] = w[i][j];
    for (int i = threadIdx.x; i < COLUMNS * PIECE; i += THREADS) {
        const int row = i / PIECE, d = i % PIECE;
        shared.tile[row][d] = row < columns && d < width ? b[row * b_row + d] : T(0);
    }
    __syncthreads();
    #pragma unroll 8
    for (int n = 0; n < COLUMNS; ++n)
        #pragma unroll
        for (int i = 0; i < 4; ++i)
            #pragma unroll
            for (int j = 0; j < 4; ++j)
                c[i][j] += shared.weights[4 * y + i][n] * shared.tile[n][x + 16 * j];
}

// Call f(i, j, row, column) for the scores of a thread, row and column within the tile.
template <typename F> __device__ inline void for_scores(F f) {
    #pragma unroll
    for (int i = 0; i < 4; ++i)
        #pragma unroll
        for (int j = 0; j < 2; ++j) f(i, j, threadIdx.x / 16 * 4 + i, threadIdx.x % 16 + 16 * j);
}

// Scale the scores and add the bias of the head; -inf where a row does not see a column.
template <bool KEYS, typename T>
__device__ inline void finish_scores(T (&s)[4][2], const AttentionArguments& p, const Span& span,
                                     const T* bias, int block_row, int block_column) {
    for_scores([&](int i, int j, int row, int column) {
        const int own = block_row + row, other = block_column + column;
        const int query = KEYS ? other : own, key = KEYS ? own : other;
        const ColumnRange range = range_of<KEYS>(p, span, own);
        s[i][j] *= T(p.scale);
        if (other < range.first || other >= range.last || query >= span.queries || key >= span.keys)
            s[i][j] = -infinity<T>();
        else if (bias != nullptr)
            s[i][j] += bias[query * p.bias[2] + key * p.bias[3]];
    });
}

// Draw the keep mask of a tile, from a query and a key on.
template <bool KEYS, typename T>
__device__ inline void draw_keep_mask(SharedTiles<T>& shared, const AttentionArguments& p,
                                      const AttentionDropout& dropout, Word head, int query,
                                      int key) {
    __syncthreads();
    draw_keep_bits<KEYS ? COLUMNS : ROWS, KEYS ? ROWS : COLUMNS>(
        p, dropout, head, query, key, THREADS, [&](int row, int column, unsigned bits) {
            reinterpret_cast<unsigned short*>(shared.keep + row)[column / 16] = bits;
        });
    __syncthreads();
}
// x times `factor` where dropout keeps the weight, else 0.
template <bool KEYS, typename T>
__device__ inline void apply_dropout(T (&x)[4][2], const SharedTiles<T>& shared, T factor) {
    for_scores([&](int i, int j, int row, int column) {
        const int query = KEYS ? column : row, key = KEYS ? row : column;
        x[i][j] *= shared.keep[query] >> key & 1 ? factor : T(0);
    });
}

// Over the 16 threads that share rows.
template <typename T, typename F> __device__ inline T row_reduce(T x, F combine) {
    #pragma unroll
    for (int offset = 8; offset > 0; offset /= 2)
        x = combine(x, __shfl_xor_sync(0xffffffff, x, offset));
    return x;
}

template <typename T>
__device__ inline void store_rows(T* to, long long stride, int rows, int width, const T (&c)[4][4],
                                  T scale) {
    #pragma unroll
    for (int i = 0; i < 4; ++i)
        #pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int row = threadIdx.x / 16 * 4 + i, column = threadIdx.x % 16 + 16 * j;
            if (row < rows && column < width) to[row * stride + column] = c[i][j] * scale;
        }
}

// logsumexp: infinite, and y zero, where a query sees no key.
template <typename T>
__global__ void __launch_bounds__(THREADS)
attention_forward(T* __restrict__ y, T* __restrict__ logsumexp, const T* __restrict__ q,
                  const T* __restrict__ k, const T* __restrict__ v, const T* __restrict__ bias,
                  const int* __restrict__ q_starts, const int* __restrict__ k_starts,
                  const __grid_constant__ AttentionArguments p,
                  const __grid_constant__ AttentionDropout dropout) {
    __shared__ SharedTiles<T> shared;
    const RowBlock<false> block(p, q_starts, k_starts, ROWS);
    const Span& span = block.span;
    const int block_row = block.row, rows = block.rows, piece = blockIdx.y * PIECE;
    if (rows <= 0) return;
    const int kv_head = block.head / (p.heads / p.kv_heads);
    q += place(p.q, block.sequence, block.head, span.q_start + block_row);
    k += place(p.k, block.sequence, kv_head, span.k_start);
    v += place(p.v, block.sequence, kv_head, span.k_start) + piece;
    y += place(p.y, block.sequence, block.head, span.q_start + block_row) + piece;
    if (bias != nullptr) bias += block.sequence * p.bias[0] + block.head * p.bias[1];
    const ColumnRange seen = block.tiles_seen(p, COLUMNS);
    const Word head = Word(block.sequence) * p.heads + block.head;

    T s[4][2], o[4][4] = {}, row_max[4], row_sum[4] = {};
    #pragma unroll
    for (T& x : row_max) x = -infinity<T>();
    for (int column = seen.first * COLUMNS; column < seen.last * COLUMNS; column += COLUMNS) {
        // Scores, mask and bias.
        const int left = span.keys - column;
        multiply_rows(s, shared, q, p.q.row, rows, k + column * p.k.row, p.k.row, left, p.width);
        finish_scores<false>(s, p, span, bias, block_row, column);
        // Online softmax.
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
            T largest = row_reduce(max(s[i][0], s[i][1]), [](T a, T b) { return max(a, b); });
            largest = max(largest, row_max[i]);
            const T base = largest == -infinity<T>() ? T(0) : largest,
                    rescale = exp(row_max[i] - base);
            row_max[i] = largest;
            s[i][0] = exp(s[i][0] - base);
            s[i][1] = exp(s[i][1] - base);
            row_sum[i] = row_sum[i] * rescale + s[i][0] + s[i][1];
            #pragma unroll
            for (T& x : o[i]) x *= rescale;
        }
        // Dropout.
        if (dropout.threshold >= 0) {
            draw_keep_mask<false>(shared, p, dropout, head, block_row, column);
            apply_dropout<false>(s, shared, T(1));
        }
        // Weighted values.
        accumulate(o, shared, s, v + column * p.v.row, p.v.row, left, p.width - piece);
    }
    // Divide by the row sums and store.
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int row = threadIdx.x / 16 * 4 + i;
        const T sum = row_reduce(row_sum[i], [](T a, T b) { return a + b; });
        #pragma unroll
        for (T& x : o[i]) x = sum == 0 ? T(0) : x / (sum * T(p.keep_probability));
        if (piece == 0 && threadIdx.x % 16 == 0 && row < rows)
            logsumexp[place(p.sums, block.sequence, block.head, span.q_start + block_row + row)] =
                sum == 0 ? infinity<T>() : row_max[i] + log(sum);
    }
    store_rows(y, p.y.row, rows, p.width - piece, o, T(1));
}

// With KEYS rows are keys and columns queries: a1, a2, b1, b2 are k, v, q, dy, and d1, d2 become
// dk, dv. Else rows are queries: a1, a2, b1, b2 are q, dy, k, v, and d1 becomes dq.
template <typename T, bool KEYS>
__global__ void __launch_bounds__(THREADS)
attention_backward(T* __restrict__ d1, T* __restrict__ d2,
                   const RowStatistics<T>* __restrict__ sums, const T* __restrict__ a1,
                   const T* __restrict__ a2, const T* __restrict__ b1, const T* __restrict__ b2,
                   const T* __restrict__ bias, const int* __restrict__ q_starts,
                   const int* __restrict__ k_starts, const __grid_constant__ AttentionArguments p,
                   const __grid_constant__ AttentionDropout dropout) {
    __shared__ SharedTiles<T> shared;
    const RowBlock<KEYS> block(p, q_starts, k_starts, ROWS);
    const Span& span = block.span;
    const int block_row = block.row, rows = block.rows, piece = blockIdx.y * PIECE;
    if (rows <= 0) return;
    // A block of keys has query heads that use its head; one of queries, the head that it uses.
    const int group = p.heads / p.kv_heads, heads = KEYS ? group : 1;
    const Strides &a1_at = KEYS ? p.k : p.q, &a2_at = KEYS ? p.v : p.y, &b1_at = KEYS ? p.q : p.k,
                  &b2_at = KEYS ? p.y : p.v, &d1_at = KEYS ? p.dk : p.dq;
    const int a_start = (KEYS ? span.k_start : span.q_start) + block_row;
    const int b_start = KEYS ? span.q_start : span.k_start;
    a1 += place(a1_at, block.sequence, block.head, a_start);
    a2 += place(a2_at, block.sequence, block.head, a_start);
    const ColumnRange seen = block.tiles_seen(p, COLUMNS);
    const T inverse_keep = 1 / T(p.keep_probability);

    T s[4][2], g[4][2], sum1[4][4] = {}, sum2[4][4] = {};
    for (int each = 0; each < heads; ++each) {
        const int b_head = KEYS ? block.head * group + each : block.head / group;
        const int head = KEYS ? b_head : block.head;
        const T* b1_rows = b1 + place(b1_at, block.sequence, b_head, b_start);
        const T* b2_rows = b2 + place(b2_at, block.sequence, b_head, b_start);
        const T* head_bias = bias == nullptr ? bias
                                             : bias + block.sequence * p.bias[0] + head * p.bias[1];
        const RowStatistics<T>* head_sums = sums +
                                            place(p.sums, block.sequence, head, span.q_start);
        for (int column = seen.first * COLUMNS; column < seen.last * COLUMNS; column += COLUMNS) {
            const T *b1_tile = b1_rows + column * b1_at.row,
                    *b2_tile = b2_rows + column * b2_at.row;
            const int left = block.columns - column;
            // Scores, mask and bias.
            multiply_rows(s, shared, a1, a1_at.row, rows, b1_tile, b1_at.row, left, p.width);
            finish_scores<KEYS>(s, p, span, head_bias, block_row, column);
            // Gradients of the weights.
            multiply_rows(g, shared, a2, a2_at.row, rows, b2_tile, b2_at.row, left, p.width);
            if (dropout.threshold >= 0) {
                draw_keep_mask<KEYS>(shared, p, dropout, Word(block.sequence) * p.heads + head,
                                     KEYS ? column : block_row, KEYS ? block_row : column);
                apply_dropout<KEYS>(g, shared, inverse_keep);
            }
            // Weights, and gradients of the scores.
            for_scores([&](int i, int j, int row, int other) {
                const int query = KEYS ? column + other : block_row + row;
                const RowStatistics<T> own = query < span.queries
                    ? head_sums[query] : RowStatistics<T>{infinity<T>(), 0};
                s[i][j] = exp(s[i][j] - own.logsumexp);
                g[i][j] = s[i][j] * (g[i][j] - own.delta);
            });
            if (KEYS && dropout.threshold >= 0) apply_dropout<KEYS>(s, shared, inverse_keep);
            // Sums over the columns.
            accumulate(sum1, shared, g, b1_tile + piece, b1_at.row, left, p.width - piece);
            if (KEYS)
                accumulate(sum2, shared, s, b2_tile + piece, b2_at.row, left, p.width - piece);
        }
    }
    // Store.
    d1 += place(d1_at, block.sequence, block.head, a_start) + piece;
    store_rows(d1, d1_at.row, rows, p.width - piece, sum1, T(p.scale));
    if (KEYS) {
        d2 += place(p.dv, block.sequence, block.head, a_start) + piece;
        store_rows(d2, p.dv.row, rows, p.width - piece, sum2, T(1));
    }
}

// Statistics of a query for backward: its log-sum-exp times `unit`, and dy . y.
// Arrays (batch, heads, queries, width); 8 lanes a row.
template <typename T>
__global__ void __launch_bounds__(256, 4)
attention_backward_rows(RowStatistics<Compute<T>>* __restrict__ sums, const T* __restrict__ y,
                        const T* __restrict__ dy, const Compute<T>* __restrict__ logsumexp,
                        const __grid_constant__ Strides y_at, const __grid_constant__ Strides dy_at,
                        int batch, int heads, int queries, int width, int aligned,
                        double unit) {
    // neighbouring rows are heads of one query
    const long long row = (blockIdx.x * 256ll + threadIdx.x) / 8;
    const int lane = threadIdx.x % 8, head = row % heads, query = row / heads % queries;
    const long long sequence = row / heads / queries;
    const bool valid = sequence < batch;
    Compute<T> delta = 0;
    if (valid) {
        y += sequence * y_at.batch + head * y_at.head + query * y_at.row;
        dy += sequence * dy_at.batch + head * dy_at.head + query * dy_at.row;
        if (aligned) {
            for (int i = lane * VECTOR<T>; i < width; i += 8 * VECTOR<T>) {
                const Vec<T> one = load<VECTOR<T>>(y + i), two = load<VECTOR<T>>(dy + i);
                #pragma unroll
                for (int e = 0; e < VECTOR<T>; ++e)
                    delta += Compute<T>(one.values[e]) * Compute<T>(two.values[e]);
            }
        } else {
            for (int i = lane; i < width; i += 8) delta += Compute<T>(y[i]) * Compute<T>(dy[i]);
        }
    }
    #pragma unroll
    for (int offset = 4; offset > 0; offset /= 2)
        delta += __shfl_xor_sync(0xffffffff, delta, offset);
    if (!valid || lane != 0) return;
    const long long place = (sequence * heads + head) * queries + query;
    sums[place] = {logsumexp[place] * Compute<T>(unit), delta};
}
