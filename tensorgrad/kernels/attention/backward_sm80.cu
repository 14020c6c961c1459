// Flash attention with mma.sync, backward, on sm_80 and later (Dao 2023, arXiv:2307.08691, algorithm 2).
// With w the weights:
//
//   dv = w^T dy, g = w (dy v^T - delta), dq = scale g k, dk = scale g^T q, all written with =
//
// Two launches, one with rows of keys and one of queries, so that weights and g leave one product in
// the registers where the next wants them. That takes seven products for the least possible five, but
// no atomics, no order among blocks, and no shared memory but for tiles of the inputs.
//
// Floor: 14 D operations and two exponentials for each query and key that meet.
//
// where: T = __half | __nv_bfloat16
// where: KEYS = 32, 2, 32 | 64, 1, 64 | 96, 1, 64 | 128, 1, 32 | 256, 1, 16
// where: QUERIES = 32, 2, 32 | 64, 2, 32 | 96, 2, 32 | 128, 2, 16 | 256, 1, 16
// instantiate: attention_backward<{T}, {KEYS}, true>
// instantiate: attention_backward<{T}, {QUERIES}, false>
#include "attention/sm80.cuh"

// With KEYS rows are keys and columns queries: a1, a2, b1, b2 are k, v, q, dy, and d1, d2 become dk,
// dv. Else rows are queries: a1, a2, b1, b2 are q, dy, k, v, and d1 becomes dq:
//   s = a1 b1^T, w = exp(scale s - logsumexp), g = w (a2 b2^T - delta), d1 = scale g b1, d2 = w b2
// Keys of more than 128 elements take two blocks, each of which sums half of the elements.
template <typename T, int D, int R, int N, bool KEYS>
__global__ void __launch_bounds__(THREADS, 2)
attention_backward(T* __restrict__ d1, T* __restrict__ d2, const Sums<float>* __restrict__ sums,
                   const T* __restrict__ a1, const T* __restrict__ a2, const T* __restrict__ b1,
                   const T* __restrict__ b2, const float* __restrict__ bias,
                   const int* __restrict__ q_starts, const int* __restrict__ k_starts,
                   const __grid_constant__ Problem p, const __grid_constant__ Dropout dropout) {
    constexpr int M = 64 * R, HALF = N * PITCH<D>, W = KEYS && D > 128 ? 128 : D;
    extern __shared__ uint4 shared[];
    T *a1_tile = reinterpret_cast<T*>(shared), *a2_tile = a1_tile + M * PITCH<D>;
    T* stages = a2_tile + M * PITCH<D>;
    const Tile tile = tile_of(p, KEYS ? p.kv_heads : p.heads, KEYS ? p.keys : p.queries, M, KEYS);
    const Span span = span_of(p, q_starts, k_starts, tile.sequence);
    const int length = KEYS ? span.keys : span.queries, columns = KEYS ? span.queries : span.keys;
    const int block_row = tile.block * M, rows = min(length - block_row, M);
    if (rows <= 0) return;
    const int share = p.heads / p.kv_heads, heads = KEYS ? share : 1;   // heads that the block's rows meet
    const int b_head = KEYS ? tile.head * share : tile.head / share;
    const Strides &a1_at = KEYS ? p.k : p.q, &a2_at = KEYS ? p.v : p.y, &b1_at = KEYS ? p.q : p.k,
                  &b2_at = KEYS ? p.y : p.v, &d1_at = KEYS ? p.dk : p.dq;
    const int a_start = (KEYS ? span.k_start : span.q_start) + block_row;
    const int b_start = KEYS ? span.q_start : span.k_start;
    a1 += place(a1_at, tile.sequence, tile.head, a_start);
    a2 += place(a2_at, tile.sequence, tile.head, a_start);
    b1 += place(b1_at, tile.sequence, b_head, b_start);
    b2 += place(b2_at, tile.sequence, b_head, b_start);
    sums += place(p.sums, tile.sequence, KEYS ? b_head : tile.head, span.q_start);
    const Range met = tiles_met<KEYS>(p, span, block_row, rows, columns, N);
    const int row = block_row + threadIdx.x / 32 * 16 * R;   // the warp's first
    const int each = max(met.last - met.first, 0), steps = each * heads;

    auto bring = [&](int i, int head, int column) {   // head: counted from b_head
        T* stage = stages + i % 2 * (2 * HALF);
        load_tile<N, D>(stage, b1 + head * b1_at.head + column * b1_at.row, b1_at.row, columns - column,
                        p.width, p.aligned);
        load_tile<N, D>(stage + HALF, b2 + head * b2_at.head + column * b2_at.row, b2_at.row, columns - column,
                        p.width, p.aligned);
        if (KEYS && threadIdx.x < N) {   // a query's sums go into the padding of its dy
            const bool valid = column + threadIdx.x < columns;
            copy_async<8>(to_shared(stage + HALF + threadIdx.x * PITCH<D> + D),
                          sums + (valid ? head * p.sums.head + column + threadIdx.x : 0), valid ? 8 : 0);
        }
        copy_commit();
    };
    load_tile<M, D>(a1_tile, a1, a1_at.row, rows, p.width, p.aligned);
    load_tile<M, D>(a2_tile, a2, a2_at.row, rows, p.width, p.aligned);
    copy_commit();
    if (steps > 0) bring(0, 0, met.first * N);

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const bool drops = dropout.threshold >= 0;
    Rows<R, D, R * D <= 64> rows1, rows2;
    Sums<float> own[R][2];
    float s[R][N / 8][4], g[R][N / 8][4], sum1[R][W / 8][4], sum2[R][KEYS ? W / 8 : 1][4];
    #pragma unroll
    for (int r = 0; r < R; ++r) {
        #pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int at = row + 16 * r + 8 * h + lane / 4;
            own[r][h] = !KEYS && at < span.queries ? sums[at] : Sums<float>{infinity<float>(), 0};
        }
    }
    clear(sum1);
    clear(sum2);
    copy_wait<0>();
    __syncthreads();
    rows1.start(a1_tile);
    rows2.start(a2_tile);
    int next_head = 0, next = met.first;   // the tile that step i + 1 meets
    for (int i = 0; i < steps; ++i) {
        T *b1_tile = stages + i % 2 * (2 * HALF), *b2_tile = b1_tile + HALF;
        const int head = b_head + next_head, column = next * N;
        if (++next == met.last) {
            next = met.first;
            ++next_head;
        }
        copy_wait<0>();
        __syncthreads();
        if (i + 1 < steps) bring(i + 1, next_head, next * N);
        if (drops) {   // a query's bits for this tile go into the padding of its q
            constexpr int BITS = KEYS ? 64 : N, SHARERS = BITS / 16, WORDS = KEYS ? R : 1;
            #pragma unroll 1
            for (int j = threadIdx.x / SHARERS; j < (KEYS ? N : M) * WORDS; j += THREADS / SHARERS) {
                const int query = j / WORDS, word = j % WORDS;
                const Word at = (Word(tile.sequence) * p.heads + (KEYS ? head : tile.head)) * p.queries +
                                 (KEYS ? column : block_row) + query;
                const Word bits = keep_bits<BITS>(dropout, at * p.keys + (KEYS ? block_row + 64 * word : column));
                T* to = (KEYS ? b1_tile : a1_tile) + query * PITCH<D> + D;
                if (threadIdx.x % SHARERS == 0) reinterpret_cast<Word*>(to)[word] = bits;
            }
            __syncthreads();
        }
        if (!meets<R, KEYS>(p, span, row, column, N)) continue;
        if (bias == nullptr) {
            clear(s);
        } else {
            const float* at = bias + tile.sequence * p.bias[0] + (KEYS ? head : tile.head) * p.bias[1];
            start_scores<KEYS, R, N>(s, p, span, at, row, column);
        }
        multiply_rows<N>(s, rows1, b1_tile);
        if (!meets_all<R, KEYS>(p, span, row, column, N)) hide<KEYS, R, N>(s, p, span, row, column);
        clear(g);
        multiply_rows<N>(g, rows2, b2_tile);
        if (drops) drop<KEYS, D, R, N>(g, KEYS ? b1_tile : a1_tile, p.spared);
        #pragma unroll
        for (int j = 0; j < N / 8; ++j)
            #pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int c = 8 * j + lane % 4 * 2 + e;
                Sums<float> other;
                if (KEYS) other = *reinterpret_cast<const Sums<float>*>(b2_tile + c * PITCH<D> + D);
                #pragma unroll
                for (int r = 0; r < R; ++r)
                    #pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        const Sums<float>& sum = KEYS ? other : own[r][h];
                        float &x = s[r][j][2 * h + e], &dx = g[r][j][2 * h + e];
                        x = fast_exp2(x * p.slope - sum.logarithm);
                        dx = x * (dx - sum.delta);
                    }
            }
        if (KEYS && drops) drop<KEYS, D, R, N>(s, b1_tile, p.spared);
        const int half = KEYS && D > 128 ? blockIdx.y * W : 0;
        if constexpr (KEYS) accumulate<D, R, N, W>(sum2, s, b2_tile + half);
        accumulate<D, R, N, W>(sum1, g, b1_tile + half);
    }

    float scale[R][2], one[R][2];
    #pragma unroll
    for (int r = 0; r < R; ++r)
        #pragma unroll
        for (int h = 0; h < 2; ++h) {
            scale[r][h] = p.slope / LOG2_E;
            one[r][h] = 1;
        }
    // Where to write is computed again, for it took registers.
    const int half = KEYS && D > 128 ? blockIdx.y * W : 0, first = anew(row), sequence = anew(tile.sequence);
    const Span here = span_of(p, q_starts, k_starts, sequence);
    const int count = min((KEYS ? here.keys : here.queries) - first, 16 * R);
    const int start = (KEYS ? here.k_start : here.q_start) + first;
    T* own_tile = a1_tile + warp * 16 * R * PITCH<D>;
    store_rows<D, R, W>(d1 + place(d1_at, sequence, tile.head, start) + half, d1_at.row, count,
                        p.width - half, p.aligned, own_tile, sum1, scale);
    if constexpr (KEYS)
        store_rows<D, R, W>(d2 + place(p.dv, sequence, tile.head, start) + half, p.dv.row, count,
                            p.width - half, p.aligned, own_tile, sum2, one);
}
