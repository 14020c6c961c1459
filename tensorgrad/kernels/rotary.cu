// Rotary position embedding of q and k beside v in the packed projection: (rows, H, D) of which the
// first `heads` of the H are rotated. The others are copied, or not touched where y is x.
//
// rotary_turn: 2 * sizeof(T) bytes an element; written with =. A thread rotates P pairs in two
//   accesses of 16 bytes, whether a pair is (i, i + D / 2) or, interleaved, (2 i, 2 i + 1). Cosines
//   and sines are fp32 (fp64 for double), one for each pair of a row or of a row and head; they
//   stay in L2. A thread reads its pairs before it writes them, and no other thread reads them: so
//   y may be x.
//   Backward is the rotation by the opposite angle, direction = -1.
// P is 16 / sizeof(T), and 1 where an array is not aligned or D / 2 no multiple of it.
//
// The naive kernel, a thread for pair i of a head of row r:
//
//   const float a = x[r][head][i], b = x[r][head][i + D / 2];     // interleaved: [2 i], [2 i + 1]
//   const float c = cosines[r][i], s = direction * sines[r][i];
//   y[r][head][i] = a * c - b * s;
//   y[r][head][i + D / 2] = b * c + a * s;
//
// instantiate: rotary_turn<double, {1 | 2}>
// instantiate: rotary_turn<float, {1 | 4}>
// instantiate: rotary_turn<{__half | __nv_bfloat16}, {1 | 8}>
#include "rotary.cuh"

// In one access, which the compiler takes apart where the elements were computed one by one.
template <typename T, int P> __device__ inline void store_whole(T* p, const Vec<T, P>& v) {
    if constexpr (sizeof(v) == 16) store_words(p, reinterpret_cast<const Words&>(v));
    else store(p, v);
}

// Row r takes the angles of row r % angle_rows; angle_heads is 1 or `heads`. The first `written` of
// the heads are written. Threads: x along the vectors of a row, y along rows.
template <typename T, int P>
__global__ void __launch_bounds__(256)
rotary_turn(T* y, const T* x, const Compute<T>* __restrict__ cosines,
            const Compute<T>* __restrict__ sines, long long rows, int all_heads, int written,
            int half, int heads, long long angle_rows, int angle_heads, int interleaved,
            int direction) {
    using C = Compute<T>;
    constexpr int PART = P < VECTOR<C> ? P : VECTOR<C>;   // angles that one access moves
    constexpr int HEADS = 4;   // that share a thread's angles, under way at a time
    const long long row = blockIdx.x * (long long)blockDim.y + threadIdx.y;
    if (row >= rows) return;
    const long long start = row * all_heads * 2 * half;
    const long long angle_start = row % angle_rows * angle_heads * half;
    const int vectors = half / P, groups = (written + HEADS - 1) / HEADS;
    for (int slot = threadIdx.x; slot < groups * vectors; slot += blockDim.x) {
        const int group = slot / vectors, pair = slot % vectors * P;
        // Load the halves of the heads.
        Vec<T, P> one[HEADS], two[HEADS];
        #pragma unroll
        for (int k = 0; k < HEADS; ++k) {
            const int head = k * groups + group;
            if (head >= written) break;
            const T* p = x + start + head * 2 * half + (interleaved ? 2 * pair : pair);
            one[k] = load<P>(p);
            two[k] = load<P>(p + (interleaved ? P : half));
        }
        // Load the angles, rotate and store.
        Vec<C, PART> cosine[P / PART], sine[P / PART];
        #pragma unroll
        for (int k = 0; k < HEADS; ++k) {
            const int head = k * groups + group;
            if (head >= written) break;
            if (head < heads) {
                if (k == 0 || angle_heads > 1)
                    #pragma unroll
                    for (int i = 0; i < P / PART; ++i) {
                        const long long angle =
                            angle_start + (angle_heads > 1 ? head * half : 0) + pair + i * PART;
                        cosine[i] = load<PART>(cosines + angle);
                        sine[i] = load<PART>(sines + angle);
                    }
                if (interleaved) rotate<true>(one[k], two[k], cosine, sine, C(direction));
                else rotate<false>(one[k], two[k], cosine, sine, C(direction));
            }
            T* p = y + start + head * 2 * half + (interleaved ? 2 * pair : pair);
            store_whole(p, one[k]);
            store_whole(p + (interleaved ? P : half), two[k]);
        }
    }
}
