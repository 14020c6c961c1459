// One step of generation: kernels for a few rows of x, one for each sequence. Between two steps
// nothing changes but what lies on the device, so that a launch can be prepared once.
//
//   decode_embed       rows of the tables of tokens and of positions, added
//   decode_norm        layer_norm or rms_norm, a block a row; x is read three times, from L1
//   decode_product     y = x W^T, W read once: 2 bytes a weight is all that counts. Tensor cores
//                      take 16 rows of W by 8 of x at a time, straight from 16-byte loads
//   decode_product_plain  the same for any type and alignment, a warp a row of W
//   decode_attention   one query a sequence against its cache, to which the new key and value are
//                      added; long caches are split over blocks, and the last of them joins the
//                      parts in their order
//
// All results are written with =. Launched by ops/decode_cuda.py.
//
// where: FLOAT = float | __half | __nv_bfloat16
// instantiate: {decode_embed | decode_norm | decode_product_plain}<{FLOAT}>
// instantiate: decode_product<{__half | __nv_bfloat16}, {1 | 2 | 4}>
// instantiate: decode_attention<{FLOAT}, {1 | 4}>
constexpr bool ROUGH = false;   // of elementwise.cuh: results may have 32 bits
#include "ampere.cuh"
#include "elementwise.cuh"
#include "reduce.cuh"
#include "rows.cuh"

// latest: the newest token of each sequence; lengths: how many before it are in its cache. positions may
// be null.
template <typename T>
__global__ void __launch_bounds__(256)
decode_embed(T* __restrict__ y, const T* __restrict__ table, const T* __restrict__ positions,
             const long long* __restrict__ latest, const int* __restrict__ lengths, int width) {
    const int b = blockIdx.x;
    const T* row = table + latest[b] * width;
    const T* shift = positions == nullptr ? nullptr : positions + lengths[b] * (long long)width;
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        Compute<T> value = to_compute(row[i]);
        if (shift != nullptr) value += to_compute(shift[i]);
        y[b * (long long)width + i] = from_compute<T>(value);
    }
}

// A null bias is 0. CENTRED by the mean: layer_norm, otherwise rms_norm.
template <typename T>
__global__ void __launch_bounds__(256)
decode_norm(T* __restrict__ y, const T* __restrict__ x, const T* __restrict__ weight,
            const T* __restrict__ bias, int width, float eps, int centred) {
    using C = Compute<T>;
    x += blockIdx.x * (long long)width;
    y += blockIdx.x * (long long)width;
    const bool alike = aligned_alike(x, y) && aligned_alike(x, weight) && (bias == nullptr || aligned_alike(x, bias));
    C mean = 0, squares = 0;
    if (centred) {
        for_places(x, width, true, [&](int place, auto n) {
            const auto values = load<n>(x + place);
            #pragma unroll
            for (int j = 0; j < n; ++j) mean += to_compute(values.values[j]);
        });
        mean = block_sum(mean) / C(width);
    }
    for_places(x, width, true, [&](int place, auto n) {
        const auto values = load<n>(x + place);
        #pragma unroll
        for (int j = 0; j < n; ++j) {
            const C apart = to_compute(values.values[j]) - mean;
            squares += apart * apart;
        }
    });
    const C rstd = rsqrt(block_sum(squares) / C(width) + C(eps));
    for_places(x, width, alike, [&](int place, auto n) {
        auto values = load<n>(x + place);
        const auto weights = load<n>(weight + place), biases = load<n>((bias == nullptr ? weight : bias) + place);
        #pragma unroll
        for (int j = 0; j < n; ++j) {
            C value = (to_compute(values.values[j]) - mean) * rstd * to_compute(weights.values[j]);
            if (bias != nullptr) value += to_compute(biases.values[j]);
            values.values[j] = from_compute<T>(value);
        }
        store(y + place, values);
    });
}

// What becomes of a sum before it is stored, each or null: bias (columns), gate and residual (rows,
// columns). gelu: 1 for the approximation by tanh, 2 for the exact one. With `wide` the result goes
// there, not rounded to T.
template <typename T>
struct Finish {
    T* y;
    float* wide;
    const T* bias;
    const T* gate;
    const T* residual;
    int gelu;

    __device__ void operator()(float sum, int row, int column, int columns) const {
        const long long place = row * (long long)columns + column;
        if (bias != nullptr) sum += to_compute(bias[column]);
        if (gelu == 1) sum = gelu_tanh(sum);
        if (gelu == 2) sum *= normal_share(sum);
        if (gate != nullptr) {
            const float open = to_compute(gate[place]);
            sum *= open * sigmoid(open);
        }
        if (residual != nullptr) sum += to_compute(residual[place]);
        if (wide != nullptr) wide[place] = sum;
        else y[place] = from_compute<T>(sum);
    }
};

// A block: 16 rows of weight, which are columns of y, by 8 * TILES rows of x from blockIdx.y on. Its
// warps share the terms, 32 in turn, and their sums are added in order. Both operands are asked for
// in the same order of terms: thread t of four has 8 neighbours, the first 4 for one mma and the
// others for the next. width is a multiple of 8. Shared memory: 512 * TILES bytes a warp.
template <typename T, int TILES>
__global__ void __launch_bounds__(512, 1)
decode_product(T* y, float* wide, const T* __restrict__ x, const T* __restrict__ weight,
               const T* __restrict__ bias, const T* __restrict__ gate, const T* residual, int rows,
               int width, int columns, int gelu) {
    extern __shared__ __align__(16) unsigned char memory[];
    constexpr int AHEAD = TILES == 1 ? 4 : 2;   // pieces that a warp has under way
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const int first = blockIdx.x * 16, top = blockIdx.y * 8 * TILES;
    const T* one = weight + min(first + lane / 4, columns - 1) * (long long)width;
    const T* two = weight + min(first + lane / 4 + 8, columns - 1) * (long long)width;

    float sums[TILES][4] = {};
    for (int start = warp * 32; start < width; start += AHEAD * warps * 32) {
        Words a[AHEAD][2], b[AHEAD][TILES];
        #pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const int k = start + i * warps * 32 + lane % 4 * 8;
            const bool inside = k < width;
            a[i][0] = inside ? load_words(one + k) : Words{};
            a[i][1] = inside ? load_words(two + k) : Words{};
            #pragma unroll
            for (int j = 0; j < TILES; ++j) {
                const int row = top + 8 * j + lane / 4;
                b[i][j] = inside && row < rows ? load_words_cached(x + row * (long long)width + k) : Words{};
            }
        }
        #pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            #pragma unroll
            for (int half = 0; half < 4; half += 2) {
                const unsigned (&p)[4] = a[i][0].words, (&q)[4] = a[i][1].words;
                const unsigned block[4] = {p[half], q[half], p[half + 1], q[half + 1]};
                #pragma unroll
                for (int j = 0; j < TILES; ++j)
                    multiply<T>(sums[j], block, b[i][j].words[half], b[i][j].words[half + 1]);
            }
        }
    }

    float (*shared)[TILES * 8][16] = reinterpret_cast<float (*)[TILES * 8][16]>(memory);   // [warp][row][column]
    #pragma unroll
    for (int j = 0; j < TILES; ++j)
        #pragma unroll
        for (int e = 0; e < 4; ++e)
            shared[warp][8 * j + lane % 4 * 2 + e % 2][lane / 4 + e / 2 * 8] = sums[j][e];
    __syncthreads();
    const Finish<T> finish = {y, wide, bias, gate, residual, gelu};
    for (int i = threadIdx.x; i < TILES * 8 * 16; i += blockDim.x) {
        const int row = i / 16, column = i % 16;
        float sum = 0;
        for (int w = 0; w < warps; ++w) sum += shared[w][row][column];
        if (top + row < rows && first + column < columns) finish(sum, top + row, first + column, columns);
    }
}

// A warp: one row of weight by 8 rows of x from 8 * blockIdx.y on.
template <typename T>
__global__ void __launch_bounds__(256)
decode_product_plain(T* y, float* wide, const T* __restrict__ x, const T* __restrict__ weight,
                     const T* __restrict__ bias, const T* __restrict__ gate, const T* residual,
                     int rows, int width, int columns, int gelu) {
    constexpr int ROWS = 8;
    const int lane = threadIdx.x % 32, column = blockIdx.x * 8 + threadIdx.x / 32, top = blockIdx.y * ROWS;
    if (column >= columns) return;
    weight += column * (long long)width;
    x += top * (long long)width;
    const int count = min(ROWS, rows - top);
    float sums[ROWS] = {};
    #pragma unroll 4
    for (int k = lane; k < width; k += 32) {
        const float w = to_compute(weight[k]);
        #pragma unroll
        for (int r = 0; r < ROWS; ++r)
            if (r < count) sums[r] += w * to_compute(x[r * (long long)width + k]);
    }
    const Finish<T> finish = {y, wide, bias, gate, residual, gelu};
    #pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const float sum = warp_sum(sums[r]);
        if (lane == 0 && r < count) finish(sum, top + r, column, columns);
    }
}

template <typename T> __device__ inline float exp2_for(float x) { return sizeof(T) == 2 ? fast_exp2(x) : exp2f(x); }

// Element i of a head of D elements, turned by the angles of its position and rounded to T.
template <typename T>
__device__ inline T turned(const T* head, int i, int width, const float* cosine, const float* sine, int interleaved) {
    if (cosine == nullptr) return head[i];
    const int half = width / 2, pair = interleaved ? i / 2 : i % half;
    const bool second = interleaved ? i % 2 : i >= half;
    const Compute<T> a = to_compute(head[interleaved ? 2 * pair : pair]);
    const Compute<T> b = to_compute(head[interleaved ? 2 * pair + 1 : pair + half]);
    return from_compute<T>(second ? b * cosine[pair] + a * sine[pair] : a * cosine[pair] - b * sine[pair]);
}

constexpr int PART = 8;     // elements of a head that a thread holds
constexpr int TOGETHER = 4;   // keys that it has under way

// PART elements, of which `count` exist; in as few accesses as `aligned` allows.
template <typename T>
__device__ inline void load_part(T (&out)[PART], const T* p, int count, bool aligned) {
    if (aligned && count == PART) {
        constexpr int N = VECTOR<T> < PART ? VECTOR<T> : PART;
        #pragma unroll
        for (int i = 0; i < PART; i += N) {
            const Vec<T, N> v = load<N>(p + i);
            #pragma unroll
            for (int j = 0; j < N; ++j) out[i + j] = v.values[j];
        }
    } else {
        #pragma unroll
        for (int i = 0; i < PART; ++i) out[i] = i < count ? p[i] : T(0.f);
    }
}

// The softmax of some keys: the largest score, the sum of 2^(score - largest), and the values so
// weighted. Parts are joined in the order in which they are given.
template <typename T>
__device__ inline void join(float& peak, float& total, float& value, float other_peak, float other_total, float other_value) {
    const float top = max(peak, other_peak);
    const float own = exp2_for<T>(peak - top), other = exp2_for<T>(other_peak - top);
    peak = top;
    total = total * own + other_total * other;
    value = value * own + other_value * other;
}

struct Strides {   // in elements
    long long sequence, head, key;
};

// qkv: (sequences, (heads + 2 kv_heads) * width), new queries, keys and values; y: (sequences, heads *
// width). The cache holds lengths[b] keys of sequence b, to which the new one is added. `lanes`, a
// power of two, share a key, and GROUP query heads that use the same keys share their loads.
// cosines and sines: a row of width / 2 for each position, or null. scale has the factor log2(e).
// partials: (sequences, heads, splits, width + 2); arrived: 0 for each (y, z) of the grid, and 0 after.
// Grid: splits, kv_heads * pieces of their query heads, sequences.
template <typename T, int GROUP>
__global__ void __launch_bounds__(128)
decode_attention(T* __restrict__ y, T* keys, T* values, const T* __restrict__ qkv, float* partials,
                 unsigned* arrived, const int* __restrict__ lengths, const float* __restrict__ cosines,
                 const float* __restrict__ sines, Strides key_at, Strides value_at, int heads, int kv_heads,
                 int width, int lanes, int window, int interleaved, int aligned, float scale) {
    extern __shared__ __align__(16) unsigned char memory[];
    __shared__ bool last;
    float* queries = reinterpret_cast<float*>(memory);   // (GROUP, width), then what warps join
    const int each = heads / kv_heads, pieces = (each + GROUP - 1) / GROUP, sequence = blockIdx.z;
    const int group = blockIdx.y / pieces, head = group * each + blockIdx.y % pieces * GROUP;
    const int count = min(GROUP, (group + 1) * each - head);   // of the query heads here
    const int place = lengths[sequence], begin = max(0, place + 1 - window), own_groups = 128 / lanes;

    const int step = own_groups * TOGETHER;   // keys that the block has under way
    int share = (place + 1 - begin + gridDim.x - 1) / gridDim.x;
    share = (share + step - 1) / step * step;
    const int active = (place + 1 - begin + share - 1) / share;
    if (blockIdx.x >= active) return;
    const int from = begin + blockIdx.x * share, to = min(place + 1, from + share);

    keys += sequence * key_at.sequence + group * key_at.head;
    values += sequence * value_at.sequence + group * value_at.head;
    qkv += sequence * (long long)(heads + 2 * kv_heads) * width;
    if (cosines != nullptr) {
        cosines += place * (long long)(width / 2);
        sines += place * (long long)(width / 2);
    }
    for (int i = threadIdx.x; i < GROUP * width; i += 128) {
        const T* q = qkv + (head + i / width) * width;
        queries[i] = i < count * width
            ? to_compute(turned(q, i % width, width, cosines, sines, interleaved)) * scale : 0.f;
    }
    if (to == place + 1) {
        const T* k = qkv + (heads + group) * width, *v = k + kv_heads * width;
        for (int i = threadIdx.x; i < width; i += 128) {
            keys[place * key_at.key + i] = turned(k, i, width, cosines, sines, interleaved);
            values[place * value_at.key + i] = v[i];
        }
    }
    __syncthreads();   // what a block has written to memory, its own threads read

    const int own = threadIdx.x / lanes, element = threadIdx.x % lanes * PART;
    const int held = max(0, min(PART, width - element));
    float q[GROUP][PART], peak[GROUP], total[GROUP], mixed[GROUP][PART];
    #pragma unroll
    for (int j = 0; j < GROUP; ++j) {
        peak[j] = -3e38f;   // finite, so that no difference is NaN
        total[j] = 0;
        #pragma unroll
        for (int e = 0; e < PART; ++e) {
            q[j][e] = e < held ? queries[j * width + element + e] : 0.f;
            mixed[j][e] = 0;
        }
    }
    for (int base = from; base < to; base += step) {   // alike for all threads of a warp
        T k[TOGETHER][PART], v[TOGETHER][PART];
        #pragma unroll
        for (int u = 0; u < TOGETHER; ++u) {
            const int key = base + u * own_groups + own, exist = key < to ? held : 0;
            load_part(k[u], keys + key * key_at.key + element, exist, aligned);
            load_part(v[u], values + key * value_at.key + element, exist, aligned);
        }
        #pragma unroll
        for (int j = 0; j < GROUP; ++j) {
            float scores[TOGETHER], top = peak[j];
            #pragma unroll
            for (int u = 0; u < TOGETHER; ++u) {
                float score = 0;
                #pragma unroll
                for (int e = 0; e < PART; ++e) score += q[j][e] * to_compute(k[u][e]);
                score = warp_sum(score, lanes);
                scores[u] = base + u * own_groups + own < to ? score : -infinity<float>();
                top = scores[u] > top ? scores[u] : top;
            }
            const float shrink = exp2_for<T>(peak[j] - top);
            peak[j] = top;
            total[j] *= shrink;
            #pragma unroll
            for (int e = 0; e < PART; ++e) mixed[j][e] *= shrink;
            #pragma unroll
            for (int u = 0; u < TOGETHER; ++u) {
                const float weight = exp2_for<T>(scores[u] - top);
                total[j] += weight;
                #pragma unroll
                for (int e = 0; e < PART; ++e) mixed[j][e] += weight * to_compute(v[u][e]);
            }
        }
    }

    // The groups of a warp are joined, then its warps, then the splits.
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float* parts = queries + GROUP * width;   // (warps, GROUP, width + 2)
    #pragma unroll
    for (int j = 0; j < GROUP; ++j) {
        for (int offset = lanes; offset < 32; offset *= 2) {
            const float other_peak = shuffle_xor(peak[j], offset), other_total = shuffle_xor(total[j], offset);
            const float top = other_peak > peak[j] ? other_peak : peak[j];
            const float mine = exp2_for<T>(peak[j] - top), other = exp2_for<T>(other_peak - top);
            peak[j] = top;
            total[j] = total[j] * mine + other_total * other;
            #pragma unroll
            for (int e = 0; e < PART; ++e)
                mixed[j][e] = mixed[j][e] * mine + shuffle_xor(mixed[j][e], offset) * other;
        }
        float* part = parts + (warp * GROUP + j) * (width + 2);
        if (lane < lanes)
            #pragma unroll
            for (int e = 0; e < PART; ++e)
                if (e < held) part[element + e] = mixed[j][e];
        if (lane == 0) {
            part[width] = peak[j];
            part[width + 1] = total[j];
        }
    }
    __syncthreads();
    const int splits = gridDim.x;
    for (int i = threadIdx.x; i < count * width; i += 128) {
        const int j = i / width, e = i % width;
        float top = parts[j * (width + 2) + width], sum = parts[j * (width + 2) + width + 1], value = parts[j * (width + 2) + e];
        for (int w = 1; w < 4; ++w) {
            const float* part = parts + (w * GROUP + j) * (width + 2);
            join<T>(top, sum, value, part[width], part[width + 1], part[e]);
        }
        if (active == 1) {
            y[(sequence * (long long)heads + head + j) * width + e] = from_compute<T>(value / sum);
            continue;
        }
        float* part = partials + ((sequence * (long long)heads + head + j) * splits + blockIdx.x) * (width + 2);
        part[e] = value;
        if (e == 0) {
            part[width] = top;
            part[width + 1] = sum;
        }
    }
    if (active == 1) return;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0)   // counts to active - 1 and begins again at 0
        last = atomicInc(arrived + sequence * gridDim.y + blockIdx.y, active - 1) == active - 1;
    __syncthreads();
    if (!last) return;
    __threadfence();
    for (int i = threadIdx.x; i < count * width; i += 128) {
        const int j = i / width, e = i % width;
        const float* part = partials + (sequence * (long long)heads + head + j) * splits * (width + 2);
        float top = __ldcg(part + width), sum = __ldcg(part + width + 1), value = __ldcg(part + e);
        for (int s = 1; s < active; ++s) {
            part += width + 2;
            join<T>(top, sum, value, __ldcg(part + width), __ldcg(part + width + 1), __ldcg(part + e));
        }
        y[(sequence * (long long)heads + head + j) * width + e] = from_compute<T>(value / sum);
    }
}
