// Cross entropy of logits (rows, vocabulary) and targets (rows,), and its gradient. With
// p = softmax(logits) and q the wanted distribution, the loss of a row is -sum(q * log p) and the
// gradient (p - q) * dy. A block takes a row; ignored rows are not read.
//
//   cross_entropy_count     1 / how many targets count, for the mean
//   cross_entropy_forward   losses and logsumexp, with a running maximum: sizeof(T) bytes an element.
//                           Where dlogits is not null also the gradient for dy == 1, for which the
//                           logits are read again, from the L2 cache if that holds them
//   cross_entropy_forward_staged  the same with the gradient, for rows that fit in shared memory: the
//                           logits are read once, 2 * sizeof(T) bytes an element. Where two rows
//                           fit, the next one is on its way while a row is worked on
//   cross_entropy_total     the sum of the losses, in a fixed order; notes that dlogits is for dy == 1
//   cross_entropy_backward  the gradient for any dy: 2 * sizeof(T) bytes an element, or nothing at
//                           all where `written` says that dlogits is already the one for this dy
//
// Any vocabulary; logits and dlogits begin at 16-byte boundaries. All results are written with =.
// Launched by ops/cross_entropy_cuda.py.
//
// where: TYPE = double | float | __half | __nv_bfloat16
// instantiate: {cross_entropy_forward | cross_entropy_backward}<{TYPE}>
// instantiate: cross_entropy_forward_staged<{float | __half | __nv_bfloat16}>
// instantiate: {cross_entropy_count | cross_entropy_total}<{double | float}>
#include "async.cuh"
#include "exp.cuh"
#include "rows.cuh"

// Which targets count, and how much of the uniform distribution is mixed in.
struct Targets {
    const long long* ids;
    long long ignored;
    long long ignores;
    double smoothing;

    __device__ bool counts(long long id) const { return !(ignores && id == ignored); }
};

template <typename C>
__global__ void __launch_bounds__(1024)
cross_entropy_count(C* __restrict__ share, const Targets targets, long long rows) {
    long long count = 0;
    for (long long i = threadIdx.x; i < rows; i += blockDim.x) count += targets.counts(targets.ids[i]);
    count = block_sum(count);
    if (threadIdx.x == 0) *share = C(1) / C(count > 0 ? count : 1);
}

template <typename C>
__global__ void __launch_bounds__(1024)
cross_entropy_total(C* __restrict__ loss, C* __restrict__ written, const C* __restrict__ losses,
                    const C* __restrict__ share, long long rows) {
    C sum = 0;
    #pragma unroll 4
    for (long long i = threadIdx.x; i < rows; i += blockDim.x) sum += losses[i];
    sum = block_sum(sum);
    if (threadIdx.x > 0) return;
    *loss = share != nullptr ? sum * *share : sum;
    if (written != nullptr) *written = 1;
}

// Fill a row with zeros; it is aligned as `p` is.
template <typename T>
__device__ inline void clear_row(T* p, int width) {
    for_places(p, width, true, [&](int place, auto n) {
        Vec<T, n> zeros;
        #pragma unroll
        for (T& value : zeros.values) value = T(0.f);
        store(p + place, zeros);
    });
}

// One row of logits: `head` elements before the first 16-byte boundary, then vectors, then the rest.
template <typename T>
struct Row {
    static constexpr int WIDTH = VECTOR<T>;
    const T* x;
    int width, head, vectors;

    __device__ Row(const T* x, int width) : x(x), width(width) {
        const int past = int(reinterpret_cast<size_t>(x) / sizeof(T) % WIDTH);
        head = min(width, (WIDTH - past) % WIDTH);
        vectors = (width - head) / WIDTH;
    }
    __device__ const T* vector(int v) const { return x + head + v * WIDTH; }
    // How many elements lie outside the vectors, and the place of number i of them.
    __device__ int others() const { return width - vectors * WIDTH; }
    __device__ int other(int i) const { return i < head ? i : i + vectors * WIDTH; }
    // Whether this thread of the block writes the element at `place`, if vectors are dealt in turn.
    __device__ bool owns(int place) const {
        const int v = (place - head) / WIDTH;
        const int turn = place < head ? place : v < vectors ? v : place - vectors * WIDTH;
        return turn % blockDim.x == threadIdx.x;
    }
};

// Which part of the distribution is the target's, and which part is each class's.
template <typename C>
struct Wanted {
    C target, each;

    __device__ Wanted(double smoothing, int vocabulary)
        : target(1 - smoothing), each(smoothing / vocabulary) {}
};

// Join what the threads have found, write the loss, and return the whole row's peak and total.
template <typename T, typename C = Compute<T>>
__device__ inline Peak<C> finish_row(Peak<C> own, C plain, const Row<T>& row, long long target,
                                     double smoothing, C* loss, C* logsumexp) {
    own = block_reduce(own, Peak<C>{-infinity<C>(), 0}, [](Peak<C> a, Peak<C> b) { return join<T>(a, b); });
    if (smoothing != 0) plain = block_sum(plain);
    if (threadIdx.x == 0) {
        const bool known = 0 <= target && target < row.width;
        const Wanted<C> wanted(smoothing, row.width);
        const C lse = own.shift() + log(own.total);
        *logsumexp = lse;
        *loss = known ? lse - wanted.target * to_compute(row.x[target]) - wanted.each * plain
                      : C(0) * infinity<C>();
    }
    return own;
}

template <typename T, typename C>
__device__ inline void absorb_vector(Peak<C>& own, C& plain, const Words& bits, bool smooth) {
    C values[VECTOR<T>];
    unpack<T>(bits, values);
    own.template absorb<T>(values);
    if (!smooth) return;
    #pragma unroll
    for (C value : values) plain += value;
}

template <typename T, typename C>
__device__ inline void absorb_others(Peak<C>& own, C& plain, const Row<T>& row) {
    for (int i = threadIdx.x; i < row.others(); i += blockDim.x) {
        const C value[1] = {to_compute(row.x[row.other(i)])};
        own.template absorb<T>(value);
        plain += value[0];
    }
}

// dx = (exp(x - peak) / total - q) * scale. vector(v): the bits of vector v of the row.
template <typename T, typename C, typename F>
__device__ inline void write_gradient(T* dx, const Row<T>& row, long long target, Peak<C> whole,
                                      double smoothing, C scale, F vector) {
    const Wanted<C> wanted(smoothing, row.width);
    const C peak = whole.shift(), slope = scale / whole.total, floor = wanted.each * scale;
    const auto gradient = [=](C x) { return exp_less<T>(x, peak) * slope - floor; };
    #pragma unroll 2
    for (int v = threadIdx.x; v < row.vectors; v += blockDim.x) {
        C values[VECTOR<T>];
        unpack<T>(vector(v), values);
        #pragma unroll
        for (C& value : values) value = gradient(value);
        store_values(dx + row.head + v * VECTOR<T>, values);
    }
    for (int i = threadIdx.x; i < row.others(); i += blockDim.x)
        dx[row.other(i)] = from_compute<T>(gradient(to_compute(row.x[row.other(i)])));
    if (0 <= target && target < row.width && row.owns(int(target)))   // once more, by the same thread
        dx[target] = from_compute<T>(gradient(to_compute(row.x[target])) - wanted.target * scale);
}

// losses, logsumexp: (rows,). share: what dlogits is scaled with, null for 1.
template <typename T>
__global__ void __launch_bounds__(512, 2)
cross_entropy_forward(Compute<T>* __restrict__ losses, Compute<T>* __restrict__ logsumexp,
                      T* __restrict__ dlogits, const T* __restrict__ logits, const Targets targets,
                      const Compute<T>* __restrict__ share, int vocabulary) {
    using C = Compute<T>;
    constexpr int UNROLL = sizeof(T) == 8 ? 1 : 4;
    const long long place = blockIdx.x * (long long)vocabulary, target = targets.ids[blockIdx.x];
    if (!targets.counts(target)) {
        if (threadIdx.x == 0) losses[blockIdx.x] = logsumexp[blockIdx.x] = 0;
        if (dlogits != nullptr) clear_row(dlogits + place, vocabulary);
        return;
    }
    const Row<T> row(logits + place, vocabulary);
    Peak<C> own = {-infinity<C>(), 0};
    C plain = 0;   // the sum of the logits, for smoothing
    for (int base = threadIdx.x; base < row.vectors; base += UNROLL * blockDim.x) {
        Words xs[UNROLL];
        #pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const int v = base + u * blockDim.x;
            if (v < row.vectors) xs[u] = load_words(row.vector(v));
        }
        #pragma unroll
        for (int u = 0; u < UNROLL; ++u)
            if (base + u * blockDim.x < row.vectors)
                absorb_vector<T>(own, plain, xs[u], targets.smoothing != 0);
    }
    absorb_others(own, plain, row);
    own = finish_row(own, plain, row, target, targets.smoothing, losses + blockIdx.x, logsumexp + blockIdx.x);
    if (dlogits == nullptr) return;
    write_gradient(dlogits + place, row, target, own, targets.smoothing, share != nullptr ? *share : C(1),
                   [&](int v) { return load_words(row.vector(v)); });
}

// Dynamic shared memory: `slots` times vocabulary / VECTOR<T> vectors. With 2 slots a block takes
// many rows and copies one ahead. Each thread reads what it has copied, so no barrier is needed.
template <typename T>
__global__ void __launch_bounds__(1024)
cross_entropy_forward_staged(Compute<T>* __restrict__ losses, Compute<T>* __restrict__ logsumexp,
                             T* __restrict__ dlogits, const T* __restrict__ logits,
                             const Targets targets, const Compute<T>* __restrict__ share,
                             long long rows, int vocabulary, int slots) {
    using C = Compute<T>;
    extern __shared__ __align__(16) unsigned char memory[];
    Words* shared = reinterpret_cast<Words*>(memory);
    const int room = vocabulary / VECTOR<T>;
    const auto fetch = [&](long long r, int slot) {
        if (r < rows) {
            const Row<T> row(logits + r * vocabulary, vocabulary);
            for (int v = threadIdx.x; v < row.vectors; v += blockDim.x)
                copy_async(shared + slot * room + v, row.vector(v), true);
        }
        end_batch();
    };
    const C scale = share != nullptr ? *share : C(1);
    int slot = 0;
    fetch(blockIdx.x, 0);
    for (long long r = blockIdx.x; r < rows; r += gridDim.x) {
        const Words* mine = shared + slot * room;
        if (slots == 2) {
            slot ^= 1;
            fetch(r + gridDim.x, slot);
            wait_for_batches<1>();
        } else {
            wait_for_batches<0>();
        }
        const Row<T> row(logits + r * vocabulary, vocabulary);
        T* dx = dlogits + r * vocabulary;
        const long long target = targets.ids[r];
        if (targets.counts(target)) {
            Peak<C> own = {-infinity<C>(), 0};
            C plain = 0;
            #pragma unroll 2
            for (int v = threadIdx.x; v < row.vectors; v += blockDim.x)
                absorb_vector<T>(own, plain, mine[v], targets.smoothing != 0);
            absorb_others(own, plain, row);
            own = finish_row(own, plain, row, target, targets.smoothing, losses + r, logsumexp + r);
            write_gradient(dx, row, target, own, targets.smoothing, scale, [&](int v) { return mine[v]; });
        } else {
            if (threadIdx.x == 0) losses[r] = logsumexp[r] = 0;
            clear_row(dx, vocabulary);
        }
        if (slots == 1) fetch(r + gridDim.x, 0);
    }
}

// dy: one a row (stride 1) or one for all (stride 0), then times share where that is not null.
// written: the dy that dlogits was computed for, null if it was not. Computed as forward does,
// but for p = exp(x - logsumexp).
template <typename T>
__global__ void __launch_bounds__(512, 2)
cross_entropy_backward(T* __restrict__ dlogits, const T* __restrict__ logits, const Targets targets,
                       const Compute<T>* __restrict__ logsumexp, const Compute<T>* __restrict__ dy,
                       int stride, const Compute<T>* __restrict__ share,
                       const Compute<T>* __restrict__ written, int vocabulary) {
    using C = Compute<T>;
    const long long row = blockIdx.x;
    C scale = dy[row * stride];
    if (written != nullptr && *written == scale) return;
    if (share != nullptr) scale *= *share;
    const T* x = logits + row * vocabulary;
    T* dx = dlogits + row * vocabulary;
    const long long target = targets.ids[row];
    if (!targets.counts(target)) {
        clear_row(dx, vocabulary);
        return;
    }
    const C lse = logsumexp[row];
    const C picked = C(1 - targets.smoothing) * scale, even = C(targets.smoothing / vocabulary) * scale;
    for_places(x, vocabulary, true, [&](int place, auto n) {
        auto out = load<n>(x + place);
        #pragma unroll
        for (T& value : out.values)
            value = from_compute<T>(exp_for<T>(to_compute(value) - lse) * scale - even);
        store(dx + place, out);
    });
    __syncthreads();
    if (threadIdx.x == 0 && 0 <= target && target < vocabulary)
        dx[target] = from_compute<T>(exp_for<T>(to_compute(x[target]) - lse) * scale - even - picked);
}
