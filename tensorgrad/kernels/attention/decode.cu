// Attention of one new query a sequence against its cache, to which the new key and value are added
// first. What counts is reading the cache once: 4 D bytes a key in 16 bits, at 4.2 TB/s on an H200.
//
//   decode_attention        16 bits, heads up to 128 wide, on tensor cores: up to 8 query heads
//                           that use the same keys are one operand. Keys and values go from memory
//                           straight into the registers that mma wants, 8 kB a warp at a time
//   decode_attention_plain  any type, alignment and heads up to 256 wide: threads share a key
//
// A cache is split over blocks (split-K over the keys), and the last of them merges the splits in
// their order, so the result does not depend on which one that is. It is written with =. Launched
// by kernels/attention/decode.py.
//
// The naive kernel, a thread for a query head, whose key and value are in the cache already:
//
//   float s[KEYS], row_max = -INFINITY, row_sum = 0;
//   for (int j = 0; j < keys; ++j) {
//       s[j] = 0;
//       for (int d = 0; d < D; ++d) s[j] += scale * q[d] * k[j][d];
//       row_max = max(row_max, s[j]);
//   }
//   for (int j = 0; j < keys; ++j) row_sum += s[j] = exp(s[j] - row_max);
//   for (int d = 0; d < D; ++d)
//       for (int j = 0; j < keys; ++j) y[d] += s[j] / row_sum * v[j][d];
//
// Phases: load what the cache has of the first tile; wait for the kernel before (see overlap.py);
// rotate the queries and append to the cache; for each tile of keys scores, online softmax,
// weighted values; merge warps; merge splits (as flash-decoding does).
//
// where: FLOAT = float | __half | __nv_bfloat16
// instantiate: decode_attention<{__half | __nv_bfloat16}, {1 | 2}, {4 | 8}>
// instantiate: decode_attention_plain<{FLOAT}>
#include "ampere.cuh"
#include "exp.cuh"
#include "overlap.cuh"
#include "reduce.cuh"

constexpr int LEAST = 3;   // steps of a split: fewer cost less than merging it
constexpr float LOWEST = -3e38f;   // finite, so that no difference of two is NaN

struct CacheStrides {   // in elements
    long long sequence, head, key;
};
struct DecodeAttentionArguments {
    CacheStrides key_at, value_at;
    int heads, kv_heads, width, window, interleaved;
    float scale;   // scale of scores, with the factor log2(e)
};

// The keys of a block, from `from` up to `to`; `place` is that of the newest. They are of kv head
// `group`, and `count` query heads from `head` on, at most MOST, use them. Grid: splits, groups *
// pieces of their query heads, sequences. A block loads `step` keys at a time; `active` splits have
// any.
template <int MOST>
struct KeySplit {
    int sequence, group, head, count, place, from, to, active;

    __device__ KeySplit(const DecodeAttentionArguments& p, const int* lengths, int step) {
        const int each = p.heads / p.kv_heads, pieces = (each + MOST - 1) / MOST,
                  splits = gridDim.x;
        sequence = blockIdx.z;
        group = blockIdx.y / pieces;
        head = group * each + blockIdx.y % pieces * MOST;
        count = min(MOST, (group + 1) * each - head);
        place = lengths[sequence];
        const int begin = max(0, place + 1 - p.window), seen = place + 1 - begin;
        const int keys = max(LEAST, (seen + splits * step - 1) / (splits * step)) * step;
        active = (seen + keys - 1) / keys;
        from = begin + blockIdx.x * keys;
        to = min(place + 1, from + keys);
    }
};

// Element i of a head, rotated by the angles of its position and rounded to T.
template <typename T>
__device__ inline T rotated(const T* head, int i, const DecodeAttentionArguments& p,
                            const float* cosine, const float* sine) {
    if (cosine == nullptr) return head[i];
    const int half = p.width / 2, pair = p.interleaved ? i / 2 : i % half;
    const bool second = p.interleaved ? i % 2 : i >= half;
    const float a = to_compute(head[p.interleaved ? 2 * pair : pair]);
    const float b = to_compute(head[p.interleaved ? 2 * pair + 1 : pair + half]);
    return from_compute<T>(second ? b * cosine[pair] + a * sine[pair]
                                  : a * cosine[pair] - b * sine[pair]);
}

// The block's queries, rotated, zeros where there are none. The block that has the newest position
// appends its key and value to the cache, of which keys and values are the block's, and writes them
// to `newest`, padded with zeros.
template <int THREADS, typename T, int MOST, int WIDTH>
__device__ inline void load_queries(T (&queries)[MOST][WIDTH], T (&newest)[2][WIDTH], T* keys,
                                    T* values, const T* qkv, const float* cosines,
                                    const float* sines, const DecodeAttentionArguments& p,
                                    const KeySplit<MOST>& own) {
    qkv += own.sequence * (long long)(p.heads + 2 * p.kv_heads) * p.width;
    if (cosines != nullptr) {
        cosines += own.place * (long long)(p.width / 2);
        sines += own.place * (long long)(p.width / 2);
    }
    // Rotate the queries.
    for (int i = threadIdx.x; i < MOST * WIDTH; i += THREADS) {
        const int j = i / WIDTH, e = i % WIDTH;
        const bool exists = j < own.count && e < p.width;
        queries[j][e] = exists ? rotated(qkv + (own.head + j) * p.width, e, p, cosines, sines)
                               : T(0.f);
    }
    // Append to the cache.
    if (own.to <= own.place) return;
    const T* k = qkv + (p.heads + own.group) * p.width, *v = k + p.kv_heads * p.width;
    for (int i = threadIdx.x; i < WIDTH; i += THREADS) {
        const bool exists = i < p.width;
        newest[0][i] = exists ? rotated(k, i, p, cosines, sines) : T(0.f);
        newest[1][i] = exists ? v[i] : T(0.f);
        if (!exists) continue;
        keys[own.place * p.key_at.key + i] = newest[0][i];
        values[own.place * p.value_at.key + i] = newest[1][i];
    }
}

// The online softmax of some keys: the largest score, and the sum of weights 2^(score - row_max).
struct SoftmaxPartial {
    float row_max, row_sum;
};

// Merge the warps: `outputs`, their sums of weighted values, and `sums`. Then, where there are
// several splits, merge these: parts, (sequences, heads, splits, width), and part_softmax. N
// elements at a time. arrived: 0 for each (y, z) of the grid, and 0 after.
template <int N, typename T, int WARPS, int MOST, int WIDTH>
__device__ inline void merge_splits(T* y, float* parts, SoftmaxPartial* part_softmax,
                                    unsigned* arrived, const float (&outputs)[WARPS][MOST][WIDTH],
                                    const SoftmaxPartial (&sums)[WARPS][MOST],
                                    const DecodeAttentionArguments& p, const KeySplit<MOST>& own) {
    constexpr int THREADS = 32 * WARPS;
    __shared__ bool last;
    const int splits = gridDim.x, across = p.width / N, items = own.count * across;
    const long long first = own.sequence * (long long)p.heads + own.head;
    __syncthreads();
    // Merge the warps.
    for (int i = threadIdx.x; i < items; i += THREADS) {
        const int j = i / across, e = i % across * N;
        float top = LOWEST, row_sum = 0;
        #pragma unroll
        for (int w = 0; w < WARPS; ++w) top = max(top, sums[w][j].row_max);
        Vec<float, N> value = {};
        #pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            const float weight = exp2f(sums[w][j].row_max - top);
            row_sum += sums[w][j].row_sum * weight;
            const Vec<float, N> found = load<N>(&outputs[w][j][e]);
            #pragma unroll
            for (int n = 0; n < N; ++n) value.values[n] += found.values[n] * weight;
        }
        if (own.active == 1) {
            #pragma unroll
            for (int n = 0; n < N; ++n)
                y[(first + j) * p.width + e + n] = from_compute<T>(value.values[n] / row_sum);
        } else {
            const long long part = (first + j) * splits + blockIdx.x;
            store(parts + part * p.width + e, value);
            if (e == 0) part_softmax[part] = {top, row_sum};
        }
    }
    if (own.active == 1) return;

    // Wait for the other splits: the last block continues.
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0)   // counts to active - 1 and restarts at 0
        last = atomicInc(arrived + own.sequence * gridDim.y + blockIdx.y, own.active - 1) ==
               own.active - 1;
    __syncthreads();
    if (!last) return;
    __threadfence();
    // Merge the splits.
    parts += first * splits * p.width;
    part_softmax += first * splits;
    constexpr int AHEAD = 16;
    for (int i = threadIdx.x; i < items; i += THREADS) {
        const int j = i / across, e = i % across * N;
        const float* part = parts + j * splits * (long long)p.width + e;
        const float2* sums = reinterpret_cast<const float2*>(part_softmax + j * splits);
        float top = LOWEST, row_sum = 0;
        Vec<float, N> value = {};
        for (int start = 0; start < own.active; start += AHEAD) {
            Vec<float, N> found[AHEAD];
            float2 partials[AHEAD];   // row_max and row_sum
            #pragma unroll
            for (int s = 0; s < AHEAD; ++s) {
                const bool exists = start + s < own.active;
                found[s] = exists ? load<N>(part + (start + s) * p.width) : Vec<float, N>{};
                partials[s] = exists ? __ldcg(sums + start + s) : float2{LOWEST, 0};
            }
            const float before = top;
            #pragma unroll
            for (int s = 0; s < AHEAD; ++s) top = max(top, partials[s].x);
            const float rescale = exp2f(before - top);
            row_sum *= rescale;
            #pragma unroll
            for (int n = 0; n < N; ++n) value.values[n] *= rescale;
            #pragma unroll
            for (int s = 0; s < AHEAD; ++s) {
                const float weight = exp2f(partials[s].x - top);
                row_sum += partials[s].y * weight;
                #pragma unroll
                for (int n = 0; n < N; ++n) value.values[n] += found[s].values[n] * weight;
            }
        }
        #pragma unroll
        for (int n = 0; n < N; ++n)
            y[(first + j) * p.width + e + n] = from_compute<T>(value.values[n] / row_sum);
    }
}

// width: a multiple of 8, at most 64 * CHUNKS; keys and values aligned to 16 bytes. A warp takes
// TILE keys in turn. Thread t of quad g has query head g, and of 8 keys it loads 8 neighbouring
// elements of key g, from 8 t on, and so on: the order of both operands of the scores. Of 4 keys it
// has 8 neighbouring elements of the values, from 8 g on: mma then gives 8 neighbouring elements of
// the results of heads 2 t and 2 t + 1. Eight warps are for short caches, of which they take twice
// as many keys at a time, and for grids that leave each block an SM of its own; with 128
// registers, where they do, a block fits beside blocks of the product before it.
template <typename T, int CHUNKS, int WARPS>
__global__ void __launch_bounds__(32 * WARPS, CHUNKS == 2 ? (WARPS == 4 ? 3 : 1) : 16 / WARPS)
decode_attention(T* y, T* keys, T* values, const T* qkv, float* parts,
                 SoftmaxPartial* part_softmax, unsigned* arrived, const int* lengths,
                 const float* __restrict__ cosines, const float* __restrict__ sines,
                 const __grid_constant__ DecodeAttentionArguments p) {
    constexpr int MOST = 8, WIDTH = 64 * CHUNKS, TILE = 32 / CHUNKS, STEP = WARPS * TILE;
    __shared__ __align__(16) T queries[MOST][WIDTH], newest[2][WIDTH];
    __shared__ __align__(16) float outputs[WARPS][MOST][WIDTH];
    __shared__ SoftmaxPartial sums[WARPS][MOST];
    start_next_kernel();
    const KeySplit<MOST> own(p, lengths, STEP);
    if (blockIdx.x >= own.active) return;
    keys += own.sequence * p.key_at.sequence + own.group * p.key_at.head;
    values += own.sequence * p.value_at.sequence + own.group * p.value_at.head;

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    Words k[TILE / 8][2 * CHUNKS], v[TILE / 16][4][CHUNKS];
    const int key_row = int(p.key_at.key), value_row = int(p.value_at.key);
    const auto load_keys = [&](int first, int end) {
        asm volatile("" : "+r"(first));   // or the compiler would keep an address for each row
        #pragma unroll
        for (int i = 0; i < TILE / 8; ++i) {
            const int key = first + 8 * i + g;
            #pragma unroll
            for (int c = 0; c < 2 * CHUNKS; ++c) {
                const int e = 32 * c + 8 * t;
                load_words_if(key < end && e < p.width, k[i][c],
                              keys + ((long long)key * key_row + e));
            }
        }
    };
    const auto load_values = [&](int first, int end) {
        asm volatile("" : "+r"(first));
        #pragma unroll
        for (int i = 0; i < TILE / 16; ++i)
            #pragma unroll
            for (int r = 0; r < 4; ++r) {
                const int key = first + 16 * i + r / 2 * 8 + 2 * t + r % 2;
                #pragma unroll
                for (int c = 0; c < CHUNKS; ++c) {
                    const int e = 64 * c + 8 * g;
                    load_words_if(key < end && e < p.width, v[i][r][c],
                                  values + ((long long)key * value_row + e));
                }
            }
    };
    // Before the wait load what the cache has of the first tile, and bring the second into L2.
    int first = own.from + warp * TILE;
    const int known = min(own.to, own.place), later = first + STEP + lane;
    load_keys(first, known);
    load_values(first, known);
    if (lane < TILE && later < known)
        for (int e = 0; e < p.width; e += 64) {
            prefetch_to_l2(keys + (later * p.key_at.key + e));
            prefetch_to_l2(values + (later * p.value_at.key + e));
        }
    wait_for_previous_kernel();
    load_queries<32 * WARPS>(queries, newest, keys, values, qkv, cosines, sines, p, own);
    __syncthreads();
    // The newest key and value, where they are of the first tile.
    if (const int past = own.place - first; known < own.to && past >= 0 && past < TILE) {
        #pragma unroll
        for (int i = 0; i < TILE / 8; ++i)
            #pragma unroll
            for (int c = 0; c < 2 * CHUNKS; ++c)
                if (8 * i + g == past)
                    k[i][c] = load_words_shared(shared_address(&newest[0][32 * c + 8 * t]));
        #pragma unroll
        for (int i = 0; i < TILE / 16; ++i)
            #pragma unroll
            for (int r = 0; r < 4; ++r)
                #pragma unroll
                for (int c = 0; c < CHUNKS; ++c)
                    if (16 * i + r / 2 * 8 + 2 * t + r % 2 == past)
                        v[i][r][c] = load_words_shared(shared_address(&newest[1][64 * c + 8 * g]));
    }
    const unsigned query_at = shared_address(&queries[g][8 * t]);
    float row_max = LOWEST, row_sum = 0, out[CHUNKS][4][4] = {};
    for (; first < own.to; first += STEP) {   // alike for all threads of a warp
        // Scores.
        float s[TILE / 8][4] = {};   // head g, keys 8 i + 2 t and + 1; nothing of the other two
        #pragma unroll
        for (int c = 0; c < 2 * CHUNKS; ++c) {
            // reloaded: registers are short
            const Words q = load_words_shared(query_at + 32 * c * sizeof(T));
            #pragma unroll
            for (int half = 0; half < 4; half += 2) {
                const unsigned query[4] = {q.words[half], 0, q.words[half + 1], 0};
                #pragma unroll
                for (int i = 0; i < TILE / 8; ++i)
                    mma<T>(s[i], query, k[i][c].words[half], k[i][c].words[half + 1]);
            }
        }
        // Load the next keys.
        load_keys(first + STEP, own.to);

        // Mask and online softmax.
        float top = row_max;
        #pragma unroll
        for (int i = 0; i < TILE / 8; ++i)
            #pragma unroll
            for (int e = 0; e < 2; ++e) {
                s[i][e] = first + 8 * i + 2 * t + e < own.to ? s[i][e] * p.scale
                                                             : -infinity<float>();
                top = s[i][e] > top ? s[i][e] : top;
            }
        top = max(top, shuffle_xor(top, 1));
        top = max(top, shuffle_xor(top, 2));
        const float rescale = fast_exp2(row_max - top);
        row_max = top;
        row_sum *= rescale;
        const float rescales[2] = {__shfl_sync(0xffffffff, rescale, 8 * t),
                                   __shfl_sync(0xffffffff, rescale, 8 * t + 4)};
        #pragma unroll
        for (int i = 0; i < 16 * CHUNKS; ++i) out[i / 16][i / 4 % 4][i % 4] *= rescales[i % 2];
        #pragma unroll
        for (int i = 0; i < TILE / 8; ++i)
            #pragma unroll
            for (int e = 0; e < 2; ++e) {
                s[i][e] = fast_exp2(s[i][e] - top);
                row_sum += s[i][e];
            }

        // Weighted values.
        #pragma unroll
        for (int i = 0; i < TILE / 16; ++i) {
            const unsigned low = pack<T>(s[2 * i][0], s[2 * i][1]),
                           high = pack<T>(s[2 * i + 1][0], s[2 * i + 1][1]);
            #pragma unroll
            for (int c = 0; c < CHUNKS; ++c)
                #pragma unroll
                for (int m = 0; m < 4; ++m) {   // elements 2 m and 2 m + 1 of the thread's 8
                    const unsigned a = v[i][0][c].words[m], b = v[i][1][c].words[m];
                    const unsigned x = v[i][2][c].words[m], z = v[i][3][c].words[m];
                    const unsigned value[4] = {
                        __byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632),
                        __byte_perm(x, z, 0x5410), __byte_perm(x, z, 0x7632),
                    };
                    mma<T>(out[c][m], value, low, high);
                }
        }
        // Load the next values.
        load_values(first + STEP, own.to);
    }

    // Merge.
    row_sum = warp_sum(row_sum, 4);
    if (t == 0) sums[warp][g] = {row_max, row_sum};
    #pragma unroll
    for (int h = 0; h < 2; ++h)
        #pragma unroll
        for (int c = 0; c < CHUNKS; ++c)
            #pragma unroll
            for (int m = 0; m < 4; m += 2)
                store(&outputs[warp][2 * t + h][64 * c + 8 * g + 2 * m],
                      Vec<float, 4>{out[c][m][h], out[c][m][2 + h], out[c][m + 1][h],
                                    out[c][m + 1][2 + h]});
    merge_splits<4>(y, parts, part_softmax, arrived, outputs, sums, p, own);
}

constexpr int PART = 8;       // elements of a head that a thread holds
constexpr int TOGETHER = 4;   // keys that it loads at a time
constexpr int WARPS = 4, THREADS = 32 * WARPS;

// PART elements, of which `count` exist; in as few accesses as `aligned` allows.
template <typename T>
__device__ inline void load_part(T (&out)[PART], const T* p, int count, bool aligned) {
    if (aligned && count == PART) {
        load_all<PART>(out, p);
    } else {
        #pragma unroll
        for (int i = 0; i < PART; ++i) out[i] = i < count ? p[i] : T(0.f);
    }
}

template <typename T>
__device__ inline float exp2_for(float x) { return sizeof(T) == 2 ? fast_exp2(x) : exp2f(x); }

// `lanes`, a power of two, share a key. aligned: keys and values to 16 bytes.
template <typename T>
__global__ void __launch_bounds__(THREADS, 2)
decode_attention_plain(T* y, T* keys, T* values, const T* qkv, float* parts,
                       SoftmaxPartial* part_softmax, unsigned* arrived, const int* lengths,
                       const float* __restrict__ cosines, const float* __restrict__ sines,
                       const __grid_constant__ DecodeAttentionArguments p, int lanes, int aligned) {
    constexpr int MOST = 4, WIDTH = 32 * PART;
    __shared__ T queries[MOST][WIDTH], newest[2][WIDTH];
    __shared__ float outputs[WARPS][MOST][WIDTH];
    __shared__ SoftmaxPartial sums[WARPS][MOST];
    const int own_groups = THREADS / lanes, step = own_groups * TOGETHER;
    start_next_kernel();
    wait_for_previous_kernel();
    const KeySplit<MOST> own(p, lengths, step);
    if (blockIdx.x >= own.active) return;
    keys += own.sequence * p.key_at.sequence + own.group * p.key_at.head;
    values += own.sequence * p.value_at.sequence + own.group * p.value_at.head;
    // Rotate the queries and append to the cache.
    load_queries<THREADS>(queries, newest, keys, values, qkv, cosines, sines, p, own);
    __syncthreads();   // threads of a block read what others of it have written to memory

    const int place = threadIdx.x / lanes, element = threadIdx.x % lanes * PART;
    const int held = max(0, min(PART, p.width - element));
    float q[MOST][PART], row_max[MOST], row_sum[MOST], out[MOST][PART];
    #pragma unroll
    for (int j = 0; j < MOST; ++j) {
        row_max[j] = LOWEST;
        row_sum[j] = 0;
        #pragma unroll
        for (int e = 0; e < PART; ++e) {
            q[j][e] = to_compute(queries[j][element + e]) * p.scale;
            out[j][e] = 0;
        }
    }
    for (int base = own.from; base < own.to; base += step) {   // alike for all threads of a warp
        // Load some keys and values.
        T k[TOGETHER][PART], v[TOGETHER][PART];
        #pragma unroll
        for (int u = 0; u < TOGETHER; ++u) {
            const int key = base + u * own_groups + place, exist = key < own.to ? held : 0;
            load_part(k[u], keys + key * p.key_at.key + element, exist, aligned);
            load_part(v[u], values + key * p.value_at.key + element, exist, aligned);
        }
        #pragma unroll
        for (int j = 0; j < MOST; ++j) {
            if (j >= own.count) continue;
            // Scores.
            float scores[TOGETHER], top = row_max[j];
            #pragma unroll
            for (int u = 0; u < TOGETHER; ++u) {
                float score = 0;
                #pragma unroll
                for (int e = 0; e < PART; ++e) score += q[j][e] * to_compute(k[u][e]);
                score = warp_sum(score, lanes);
                scores[u] = base + u * own_groups + place < own.to ? score : -infinity<float>();
                top = scores[u] > top ? scores[u] : top;
            }
            // Online softmax and weighted values.
            const float rescale = exp2_for<T>(row_max[j] - top);
            row_max[j] = top;
            row_sum[j] *= rescale;
            #pragma unroll
            for (int e = 0; e < PART; ++e) out[j][e] *= rescale;
            #pragma unroll
            for (int u = 0; u < TOGETHER; ++u) {
                const float weight = exp2_for<T>(scores[u] - top);
                row_sum[j] += weight;
                #pragma unroll
                for (int e = 0; e < PART; ++e) out[j][e] += weight * to_compute(v[u][e]);
            }
        }
    }

    // Merge.
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    #pragma unroll
    for (int j = 0; j < MOST; ++j) {   // merge the threads that had different keys
        for (int offset = lanes; offset < 32; offset *= 2) {
            const float other_peak = shuffle_xor(row_max[j], offset),
                        other_total = shuffle_xor(row_sum[j], offset);
            const float top = other_peak > row_max[j] ? other_peak : row_max[j];
            const float mine = exp2_for<T>(row_max[j] - top), other = exp2_for<T>(other_peak - top);
            row_max[j] = top;
            row_sum[j] = row_sum[j] * mine + other_total * other;
            #pragma unroll
            for (int e = 0; e < PART; ++e)
                out[j][e] = out[j][e] * mine + shuffle_xor(out[j][e], offset) * other;
        }
        if (lane == 0) sums[warp][j] = {row_max[j], row_sum[j]};
        if (lane < lanes)
            #pragma unroll
            for (int e = 0; e < PART; ++e) outputs[warp][j][element + e] = out[j][e];
    }
    merge_splits<1>(y, parts, part_softmax, arrived, outputs, sums, p, own);
}
