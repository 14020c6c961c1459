// Storage types, the types that arithmetic on them is done in, and vector access to memory.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

// The type that one element is computed in: float for 16 bits, int for what C++ promotes to it.
template <typename T> struct ComputeType { using type = T; };
template <> struct ComputeType<__half> { using type = float; };
template <> struct ComputeType<__nv_bfloat16> { using type = float; };
template <> struct ComputeType<bool> { using type = int; };
template <typename T> using Compute = typename ComputeType<T>::type;

template <typename T> __device__ inline Compute<T> to_compute(T x) { return Compute<T>(x); }
template <typename T> __device__ inline T from_compute(Compute<T> x) { return T(x); }

// How many elements of T one 16-byte access moves; 1 for a type that does not divide 16 bytes.
template <typename T> constexpr int VECTOR = 16 % sizeof(T) == 0 ? 16 / int(sizeof(T)) : 1;

template <typename T, int N = VECTOR<T>>
struct alignas(N == 1 ? alignof(T) : sizeof(T) * N) Vec {
    T values[N];
};

// An access of N elements; p is aligned to all of them.
template <int N, typename T> __device__ inline Vec<T, N> load(const T* p) {
    return *reinterpret_cast<const Vec<T, N>*>(p);
}
template <int N, typename T> __device__ inline void store(T* p, const Vec<T, N>& v) {
    *reinterpret_cast<Vec<T, N>*>(p) = v;
}
// N elements side by side, in as few accesses as possible; p is aligned to these.
template <int N, typename T> __device__ inline void load_all(T* to, const T* p) {
    constexpr int WIDTH = VECTOR<T> < N ? VECTOR<T> : N;
    #pragma unroll
    for (int i = 0; i < N; i += WIDTH) {
        const Vec<T, WIDTH> v = load<WIDTH>(p + i);
        #pragma unroll
        for (int j = 0; j < WIDTH; ++j) to[i + j] = v.values[j];
    }
}
template <int N, typename T> __device__ inline void store_all(T* p, const T* from) {
    constexpr int WIDTH = VECTOR<T> < N ? VECTOR<T> : N;
    #pragma unroll
    for (int i = 0; i < N; i += WIDTH) {
        Vec<T, WIDTH> v;
        #pragma unroll
        for (int j = 0; j < WIDTH; ++j) v.values[j] = from[i + j];
        store(p + i, v);
    }
}

// A row of any alignment: `head` elements before the first 16-byte boundary, then vectors, then the
// rest. The threads of a block take vectors in turn, and the other elements in turn.
template <typename T>
struct UnalignedRow {
    static constexpr int WIDTH = VECTOR<T>;
    const T* x;
    int width, head, vectors;

    __device__ UnalignedRow(const T* x, int width) : x(x), width(width) {
        const int past = int(reinterpret_cast<size_t>(x) / sizeof(T) % WIDTH);
        head = min(width, (WIDTH - past) % WIDTH);
        vectors = (width - head) / WIDTH;
    }
    __device__ const T* vector(int v) const { return x + head + v * WIDTH; }
    // How many elements are outside the vectors, fewer than 2 * WIDTH, and the index of number i of
    // them.
    __device__ int others() const { return width - vectors * WIDTH; }
    __device__ int other(int i) const { return i < head ? i : i + vectors * WIDTH; }
    __device__ bool in_vector(int i) const { return i >= head && i < head + vectors * WIDTH; }
    // Whether this thread takes element i.
    __device__ bool owns(int i) const {
        const int turn = i < head ? i : in_vector(i) ? (i - head) / WIDTH : i - vectors * WIDTH;
        return turn % blockDim.x == threadIdx.x;
    }
};

// The address of shared memory that PTX instructions take.
__device__ inline unsigned shared_address(const void* p) {
    return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

// 16 bytes as four registers. Kernels that hold a row keep it packed like this, two 16-bit values a
// register, and unpack it for each pass.
struct alignas(16) Words {
    unsigned int words[4];
};

// A streaming load, for 16 bytes that the whole GPU reads exactly once: caches evict them first.
template <typename T> __device__ inline Words load_words(const T* p) {
    const uint4 bits = __ldcs(reinterpret_cast<const uint4*>(p));
    return {{bits.x, bits.y, bits.z, bits.w}};
}
template <typename T> __device__ inline Words load_words_cached(const T* p) {   // to be read again
    const uint4 bits = *reinterpret_cast<const uint4*>(p);
    return {{bits.x, bits.y, bits.z, bits.w}};
}

// Two 16-bit values in one register.
template <typename T> struct PairType;
template <> struct PairType<__half> { using type = __half2; };
template <> struct PairType<__nv_bfloat16> { using type = __nv_bfloat162; };

// Round two floats to one register of two T, and back.
template <typename T> __device__ inline unsigned pack(float low, float high);
template <> __device__ inline unsigned pack<__half>(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    return reinterpret_cast<const unsigned&>(pair);
}
template <> __device__ inline unsigned pack<__nv_bfloat16>(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const unsigned&>(pair);
}
template <typename T> __device__ inline float2 unpack(unsigned word);
template <> __device__ inline float2 unpack<__half>(unsigned word) {
    return __half22float2(reinterpret_cast<const __half2&>(word));
}
template <> __device__ inline float2 unpack<__nv_bfloat16>(unsigned word) {
    // bfloat16 is the upper half of a float
    return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
}

// The VECTOR<T> values of 16 bytes in the compute type, and back.
template <typename T>
__device__ inline void unpack(const Words& bits, Compute<T> (&values)[VECTOR<T>]) {
    #pragma unroll
    for (int i = 0; i < VECTOR<T>; ++i) {
        if constexpr (sizeof(T) == 8)
            values[i] = __hiloint2double(bits.words[2 * i + 1], bits.words[2 * i]);
        else if constexpr (sizeof(T) == 4)
            values[i] = __uint_as_float(bits.words[i]);
        else
            values[i] = i % 2 ? unpack<T>(bits.words[i / 2]).y : unpack<T>(bits.words[i / 2]).x;
    }
}
template <typename T> __device__ inline Words pack(const Compute<T> (&values)[VECTOR<T>]) {
    Words bits;
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
        if constexpr (sizeof(T) == 8)
            bits.words[i] = i % 2 ? __double2hiint(values[i / 2]) : __double2loint(values[i / 2]);
        else if constexpr (sizeof(T) == 4)
            bits.words[i] = __float_as_uint(values[i]);
        else
            bits.words[i] = pack<T>(values[2 * i], values[2 * i + 1]);
    }
    return bits;
}

// Let the compiler forget what it has unpacked, so that it holds these registers and no others.
template <typename T> __device__ inline void keep_packed(Words& bits) {
    if constexpr (sizeof(T) == 2)
        asm volatile("" : "+r"(bits.words[0]), "+r"(bits.words[1]), "+r"(bits.words[2]),
                     "+r"(bits.words[3]));
}

template <typename T> __device__ inline void store_words(T* p, const Words& bits) {
    // An assignment may be taken apart, and the parts are not always joined again.
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" :: "l"(__cvta_generic_to_global(p)),
        "r"(bits.words[0]), "r"(bits.words[1]), "r"(bits.words[2]), "r"(bits.words[3]) : "memory");
}
// Round and write VECTOR<T> values to an aligned place.
template <typename T>
__device__ inline void store_values(T* p, const Compute<T> (&values)[VECTOR<T>]) {
    store_words(p, pack<T>(values));
}
