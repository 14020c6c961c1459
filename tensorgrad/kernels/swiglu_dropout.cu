// Dropout of SwiGLU: y = keep * scale * round(silu(gate) * up), which `gated_linear` ends with.
//
// swiglu_dropout: 3 * sizeof(T) bytes an element; written with =. The product is rounded to T
//   before it is scaled, so that bits are those of the generated kernel of `swiglu` and of
//   dropout.cu.
// swiglu_backward: 5 * sizeof(T) bytes an element; dgate and dup are written with =. With DROPS the
//   keep mask is drawn again, and keep * scale * dy is rounded to T first. With a width other than
//   0, of vectors, the rows of dgate and of dup have that many elements and lie side by side: a row
//   of dgate, then one of dup. One matrix product then multiplies both.
// Arrays are aligned to 16 bytes. A warp takes 512 elements; see dropout.cuh.
//
// The naive kernels, a thread for element i, `random16` being 16 random bits of that number:
//
//   const float kept = random16(seed, draw, stream, i) < keep_probability * 65536 ? scale : 0;
//   y[i] = kept * (gate[i] * sigmoid(gate[i]) * up[i]);
//
//   const float dhidden = kept * dy[i];
//   dgate[i] = dhidden * up[i] * silu_derivative(gate[i]);
//   dup[i] = dhidden * (gate[i] * sigmoid(gate[i]));
//
// Phases: load; draw the keep mask of 16 elements; exchange masks; compute and store.
//
// where: FLOAT = __half | __nv_bfloat16 | float | double
// where: DROPS = true | false
// instantiate: swiglu_dropout<{FLOAT}>
// instantiate: swiglu_backward<{FLOAT}, {DROPS}>
constexpr bool ROUGH = false;   // constant of elementwise.cuh, where the type does not say
#include "dropout.cuh"
#include "elementwise.cuh"

template <typename T> constexpr bool FAST = sizeof(T) == 2;

// Round values to T and back.
template <typename T>
__device__ inline void round_to(Compute<T> (&values)[VECTOR<T>]) {
    if constexpr (sizeof(T) == 2) unpack<T>(pack<T>(values), values);
}

// Round a vector and write elements i and those behind it that exist.
template <bool WHOLE, typename T>
__device__ inline void store_rounded_within(T* p, long long i, long long size,
                                            const Compute<T> (&values)[VECTOR<T>]) {
    if constexpr (WHOLE) {
        store_values(p + i, values);
    } else {
        Vec<T> v;
        #pragma unroll
        for (int j = 0; j < VECTOR<T>; ++j) v.values[j] = from_compute<T>(values[j]);
        store_within<false, VECTOR<T>>(p, i, size, v);
    }
}

// The 32 * LANES elements of a warp; WHOLE where all of them exist.
template <bool WHOLE, typename T>
__device__ inline void forward(T* y, const T* gate, const T* up, long long start, long long size,
                               Word seed, Word draw, Word stream, unsigned int limit,
                               Compute<T> scale) {
    using C = Compute<T>;
    constexpr int N = VECTOR<T>, VECTORS = LANES / N;   // vectors of a thread
    const int thread = threadIdx.x % 32;
    Vec<T> gates[VECTORS], ups[VECTORS];
    #pragma unroll
    for (int k = 0; k < VECTORS; ++k) {
        const long long i = start + (k * 32 + thread) * N;
        gates[k] = load_within<WHOLE, N>(gate, i, size);
        ups[k] = load_within<WHOLE, N>(up, i, size);
    }
    const unsigned int kept = keep_bits(seed, draw, stream, start / LANES + thread, limit);
    #pragma unroll
    for (int k = 0; k < VECTORS; ++k) {
        const int vector = k * 32 + thread;
        const unsigned int keep = keep_of_vector<N>(kept, vector);
        C values[N];
        #pragma unroll
        for (int j = 0; j < N; ++j) {
            const C g = to_compute(gates[k].values[j]);
            values[j] = g * sigmoid<FAST<T>>(g) * to_compute(ups[k].values[j]);
        }
        round_to<T>(values);
        #pragma unroll
        for (int j = 0; j < N; ++j) values[j] *= keep & 1u << j ? scale : C(0);
        store_rounded_within<WHOLE>(y, start + vector * N, size, values);
    }
}

template <bool WHOLE, bool DROPS, typename T>
__device__ inline void backward(T* dgate, T* dup, const T* dy, const T* gate, const T* up,
                                long long start, long long size, unsigned int width, Word seed,
                                Word draw, Word stream, unsigned int limit, Compute<T> scale) {
    using C = Compute<T>;
    constexpr int N = VECTOR<T>, VECTORS = LANES / N;   // vectors of a thread
    const int thread = threadIdx.x % 32;
    Vec<T> dys[VECTORS], gates[VECTORS], ups[VECTORS];
    #pragma unroll
    for (int k = 0; k < VECTORS; ++k) {
        const long long i = start + (k * 32 + thread) * N;
        dys[k] = load_within<WHOLE, N>(dy, i, size);
        gates[k] = load_within<WHOLE, N>(gate, i, size);
        ups[k] = load_within<WHOLE, N>(up, i, size);
    }
    unsigned int kept = 0;
    if constexpr (DROPS) kept = keep_bits(seed, draw, stream, start / LANES + thread, limit);
    #pragma unroll
    for (int k = 0; k < VECTORS; ++k) {
        const int vector = k * 32 + thread;
        const long long i = start + vector * N;
        C dhidden[N], of_gate[N], of_up[N];
        #pragma unroll
        for (int j = 0; j < N; ++j) dhidden[j] = to_compute(dys[k].values[j]);
        if constexpr (DROPS) {
            const unsigned int keep = keep_of_vector<N>(kept, vector);
            #pragma unroll
            for (int j = 0; j < N; ++j) dhidden[j] *= keep & 1u << j ? scale : C(0);
            round_to<T>(dhidden);
        }
        #pragma unroll
        for (int j = 0; j < N; ++j) {
            const Silu<C, FAST<T>> silu(to_compute(gates[k].values[j]));
            of_gate[j] = dhidden[j] * to_compute(ups[k].values[j]) * silu.derivative;
            of_up[j] = dhidden[j] * silu.value;
        }
        // the elements of the other array that lie before this row
        const long long skipped = width ? (long long)((unsigned int)i / width) * width : 0;
        store_rounded_within<WHOLE>(dgate + skipped, i, size, of_gate);
        store_rounded_within<WHOLE>(dup + skipped, i, size, of_up);
    }
}

// Blocks that an SM holds at once: as many as ptxas finds registers for.
template <typename T> constexpr int BLOCKS = sizeof(T) == 8 ? 2 : 4;
template <typename T> constexpr int BACKWARD_BLOCKS = sizeof(T) == 8 ? 1 : 3;

template <typename T>
__global__ void __launch_bounds__(256, BLOCKS<T>)
swiglu_dropout(T* __restrict__ y, const T* __restrict__ gate, const T* __restrict__ up,
               long long size, Word seed, Word draw, Word stream, const Word* offset,
               unsigned int limit, double scale) {
    const long long start = (blockIdx.x * 256ll + threadIdx.x) / 32 * (32 * LANES);
    draw = draw_number(draw, offset);
    if (start + 32 * LANES <= size)
        forward<true>(y, gate, up, start, size, seed, draw, stream, limit, scale);
    else if (start < size)
        forward<false>(y, gate, up, start, size, seed, draw, stream, limit, scale);
}

template <typename T, bool DROPS>
__global__ void __launch_bounds__(256, BACKWARD_BLOCKS<T>)
swiglu_backward(T* __restrict__ dgate, T* __restrict__ dup, const T* __restrict__ dy,
                const T* __restrict__ gate, const T* __restrict__ up, long long size,
                unsigned int width, Word seed, Word draw, Word stream, const Word* offset,
                unsigned int limit, double scale) {
    const long long start = (blockIdx.x * 256ll + threadIdx.x) / 32 * (32 * LANES);
    if constexpr (DROPS) draw = draw_number(draw, offset);
    if (start + 32 * LANES <= size)
        backward<true, DROPS>(dgate, dup, dy, gate, up, start, size, width, seed, draw, stream,
                              limit, scale);
    else if (start < size)
        backward<false, DROPS>(dgate, dup, dy, gate, up, start, size, width, seed, draw, stream,
                               limit, scale);
}
