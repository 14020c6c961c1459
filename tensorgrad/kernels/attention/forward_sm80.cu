// Flash attention with mma.sync, forward, on sm_80 and later (Dao 2023, arXiv:2307.08691).
//
//   y = softmax(scale q k^T + bias) v, and the logarithm of each row's sum, all written with =
//
// A block holds 64 R queries and meets N keys at a time, which cp.async brings while those before are
// worked on. Scores and weights exist in registers alone: the layout in which a product leaves the
// weights is the one in which the next product wants them. All rules are there at run time: one that
// a launch does not use costs it one test a tile.
//
// Floor: 4 D operations and one exponential for each query and key that meet. mma.sync does 0.62 of
// what wgmma does on a Hopper chip. A fragment that ldmatrix brings serves R products.
//
// where: T = __half | __nv_bfloat16
// where: TILES = 32, 2, 64 | 64, 2, 64 | 96, 2, 32 | 128, 2, 32 | 256, 1, 32
// instantiate: attention_forward<{T}, {TILES}>
#include "attention/sm80.cuh"

// y: (B, Tq, H, D). logsumexp: (B, H, Tq); infinite, and y zero, where a query sees no key.
template <typename T, int D, int R, int N>
__global__ void __launch_bounds__(THREADS, 2)
attention_forward(T* __restrict__ y, float* __restrict__ logsumexp, const T* __restrict__ q,
                  const T* __restrict__ k, const T* __restrict__ v, const float* __restrict__ bias,
                  const int* __restrict__ q_starts, const int* __restrict__ k_starts,
                  const __grid_constant__ Problem p, const __grid_constant__ Dropout dropout) {
    constexpr int M = 64 * R, STAGE = 2 * N * PITCH<D>;
    extern __shared__ uint4 shared[];
    T *q_tile = reinterpret_cast<T*>(shared), *stages = q_tile + M * PITCH<D>;
    const Tile tile = tile_of(p, p.heads, p.queries, M, false);
    const Span span = span_of(p, q_starts, k_starts, tile.sequence);
    const int block_row = tile.block * M, rows = min(span.queries - block_row, M);
    if (rows <= 0) return;
    const int kv_head = tile.head / (p.heads / p.kv_heads);
    q += place(p.q, tile.sequence, tile.head, span.q_start + block_row);
    k += place(p.k, tile.sequence, kv_head, span.k_start);
    v += place(p.v, tile.sequence, kv_head, span.k_start);
    const Range met = tiles_met<false>(p, span, block_row, rows, span.keys, N);
    const int row = block_row + threadIdx.x / 32 * 16 * R;   // the warp's first

    auto bring = [&](int n) {
        T* stage = stages + n % 2 * STAGE;
        load_tile<N, D>(stage, k + n * N * p.k.row, p.k.row, span.keys - n * N, p.width, p.aligned);
        load_tile<N, D>(stage + STAGE / 2, v + n * N * p.v.row, p.v.row, span.keys - n * N, p.width, p.aligned);
        copy_commit();
    };
    load_tile<M, D>(q_tile, q, p.q.row, rows, p.width, p.aligned);
    copy_commit();
    if (met.first < met.last) bring(met.first);

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const bool drops = dropout.threshold >= 0;
    Rows<R, D, R * D <= 128> queries;
    float s[R][N / 8][4], o[R][D / 8][4], peak[R][2], total[R][2];
    #pragma unroll
    for (int r = 0; r < R; ++r) {
        peak[r][0] = peak[r][1] = -infinity<float>();
        total[r][0] = total[r][1] = 0;
    }
    clear(o);
    copy_wait<0>();
    __syncthreads();
    queries.start(q_tile);
    for (int n = met.first; n < met.last; ++n) {
        const T* k_tile = stages + n % 2 * STAGE;
        copy_wait<0>();
        __syncthreads();
        if (n + 1 < met.last) bring(n + 1);
        if (drops) {   // a row's bits for this tile go into its padding
            #pragma unroll 1
            for (int i = threadIdx.x / (N / 16); i < M; i += THREADS / (N / 16)) {
                const Word query = (Word(tile.sequence) * p.heads + tile.head) * p.queries + block_row + i;
                const Word bits = keep_bits<N>(dropout, query * p.keys + n * N);
                if (threadIdx.x % (N / 16) == 0) *reinterpret_cast<Word*>(q_tile + i * PITCH<D> + D) = bits;
            }
            __syncthreads();
        }
        if (!meets<R, false>(p, span, row, n * N, N)) continue;
        if (bias == nullptr) {
            clear(s);
        } else {
            const float* at = bias + tile.sequence * p.bias[0] + tile.head * p.bias[1];
            start_scores<false, R, N>(s, p, span, at, row, n * N);
        }
        multiply_rows<N>(s, queries, k_tile);
        if (!meets_all<R, false>(p, span, row, n * N, N)) hide<false, R, N>(s, p, span, row, n * N);
        bool shrinks = false;
        float shrink[R][2];
        #pragma unroll
        for (int r = 0; r < R; ++r)
            #pragma unroll
            for (int h = 0; h < 2; ++h) {
                float largest = peak[r][h];
                #pragma unroll
                for (int j = 0; j < N / 8; ++j)
                    largest = fmaxf(largest, fmaxf(s[r][j][2 * h], s[r][j][2 * h + 1]));
                largest = quad_reduce(largest, [](float a, float b) { return fmaxf(a, b); });
                const float base = largest == -infinity<float>() ? 0.0f : largest * p.slope;
                shrink[r][h] = fast_exp2(peak[r][h] * p.slope - base);
                shrinks |= shrink[r][h] != 1;
                peak[r][h] = largest;
                float sum = 0;
                #pragma unroll
                for (int j = 0; j < N / 8; ++j)
                    #pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        float& x = s[r][j][2 * h + e];
                        sum += x = fast_exp2(x * p.slope - base);
                    }
                total[r][h] = total[r][h] * shrink[r][h] + sum;
            }
        if (__any_sync(0xffffffff, shrinks)) {
            #pragma unroll
            for (int r = 0; r < R; ++r)
                #pragma unroll
                for (int d = 0; d < D / 8; ++d)
                    #pragma unroll
                    for (int i = 0; i < 4; ++i) o[r][d][i] *= shrink[r][i / 2];
        }
        if (drops) drop<false, D, R, N>(s, q_tile, 1);
        accumulate<D, R, N, D>(o, s, k_tile + STAGE / 2);
    }

    // Where to write is computed again, for it took registers.
    const int first = anew(row), sequence = anew(tile.sequence);
    const Span own = span_of(p, q_starts, k_starts, sequence);
    const int count = min(own.queries - first, 16 * R), start = own.q_start + first;
    float scale[R][2];
    #pragma unroll
    for (int r = 0; r < R; ++r)
        #pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float sum = quad_reduce(total[r][h], [](float a, float b) { return a + b; });
            scale[r][h] = sum == 0 ? 0.0f : p.spared / sum;
            const int at = 16 * r + 8 * h + lane / 4;
            if (lane % 4 == 0 && at < count)
                logsumexp[place(p.sums, sequence, tile.head, start + at)] =
                    sum == 0 ? infinity<float>() : peak[r][h] * p.slope / LOG2_E + logf(sum);
        }
    store_rows<D, R, D>(y + place(p.y, sequence, tile.head, start), p.y.row, count,
                        p.width, p.aligned, q_tile + warp * 16 * R * PITCH<D>, o, scale);
}
