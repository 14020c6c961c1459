// Cross entropy of logits (rows, width) and targets (rows,), and its gradient. With p the softmax
// of the first `classes` logits of a row, q the target distribution and z the log-sum-exp of the
// logits, the loss of a row is -sum(q * log p) + z_loss * z^2 and its gradient is
// (p * (1 + 2 * z_loss * z) - q) * scale; 0 for columns from `classes` on. Rows whose target is
// ignored get zeros, whatever they hold. dlogits may be logits, but not in cross_entropy_backward.
//
//   cross_entropy_count     how many targets count, for the mean
//   cross_entropy_group     short rows, held in the registers of up to 32 threads: 256 logits, or
//                           1,024 in whole vectors. Loss and gradient, each if wanted, in
//                           2 * sizeof(T) bytes an element
//   cross_entropy_staged    loss and gradient of rows that fit in shared memory: the same bytes.
//                           Each thread loads its part of the next row over what it has just used
//   cross_entropy_forward   any row, a block each. For the gradient the logits are read again, from
//                           the L2 cache if it holds them
//   cross_entropy_backward  the gradient, from the logits and `peaks`, in the same bytes
//   cross_entropy_tangent   the tangents of the losses, see there, and their gradients
//   cross_entropy_total     the sum of the losses, in a fixed order
//   cross_entropy_rescale   values *= scale, or nothing where that is 1
//
// `peaks` has the row maxima and then, for each row, the sum of exp(logit - maximum). `prepared`
// says that dlogits is already the gradient for dy == 1; with that dy nothing is done.
// logits and dlogits begin at 16-byte boundaries. All results are written with =.
// Launched by kernels/cross_entropy.py.
//
// The naive kernel, a thread for row r, without z_loss and label smoothing:
//
//   float row_max = -INFINITY, sum = 0;
//   for (int j = 0; j < classes; ++j) row_max = max(row_max, logits[r][j]);
//   for (int j = 0; j < classes; ++j) sum += exp(logits[r][j] - row_max);
//   losses[r] = log(sum) + row_max - logits[r][ids[r]];
//   for (int j = 0; j < classes; ++j)
//       dlogits[r][j] = (exp(logits[r][j] - row_max) / sum - (j == ids[r])) * scale;
//
// Phases of a row: load; online softmax (maximum and sum in one pass), then across the threads;
// loss; gradient; the gradient at the target once more.
//
// where: TYPE = double | float | __half | __nv_bfloat16
// instantiate: {cross_entropy_forward | cross_entropy_backward | cross_entropy_rescale}<{TYPE}>
// instantiate: cross_entropy_tangent<{TYPE}>
// instantiate: cross_entropy_group<{TYPE}, 8>
// instantiate: cross_entropy_group<{float | __half | __nv_bfloat16}, 32>
// instantiate: cross_entropy_staged<{float | __half | __nv_bfloat16}>
// instantiate: cross_entropy_total<{double | float}>
// instantiate: cross_entropy_count
#include "async.cuh"
#include "exp.cuh"
#include "rows.cuh"

// Which targets count, which part of the wanted distribution is theirs and which each class's, and
// the weight of z^2.
struct Targets {
    const long long* ids;
    long long ignored;
    long long ignores;
    double target;
    double each;
    double z_loss;

    __device__ bool counts(long long id) const { return !(ignores && id == ignored); }

    // below: the sum of logit - maximum where `each` is not 0, else 0. What the
    // logits have in common counts in z alone, so it costs no digits.
    template <typename C>
    __device__ C loss(C row_max, C total, C at_target, C below) const {
        const C part = log(total), lse = row_max + part;
        return part - C(target) * (at_target - row_max) - C(each) * below + C(z_loss) * lse * lse;
    }
};

// The factor of a row's gradient: dy, one for all rows (stride 0) or one a row, by
// the number of rows that count. Null stands for 1.
template <typename C>
struct GradientScale {
    const C* dy;
    const long long* count;
    long long stride;

    __device__ C operator()(long long row) const {
        const C weight = dy != nullptr ? dy[row * stride] : C(1);
        return count != nullptr ? weight / C(*count > 0 ? *count : 1) : weight;
    }
    __device__ bool is_one() const { return dy != nullptr && stride == 0 && *dy == C(1); }
};

// The gradient of a row is exp(x - row_max) * rise - floor, and drop less at the target.
template <typename T, typename C = Compute<T>>
struct LogitGradient {
    C row_max, rise, floor, drop;

    __device__ LogitGradient(C row_max, C total, const Targets& targets, C scale)
        : row_max(row_max),
          rise(scale * (1 + 2 * C(targets.z_loss) * (row_max + log(total))) / total),
          floor(C(targets.each) * scale), drop(C(targets.target) * scale) {}

    __device__ C operator()(C x) const { return exp_less<T>(x, row_max) * rise - floor; }
};

template <typename C> __device__ inline C not_a_number() { return C(0) * infinity<C>(); }

// `count` is 0 before if there is more than one block. A sum of integers has the same bits in any
// order.
__global__ void __launch_bounds__(1024)
cross_entropy_count(unsigned long long* __restrict__ count, const Targets targets, long long rows) {
    unsigned long long own = 0;
    for (long long i = blockIdx.x * 1024ll + threadIdx.x; i < rows; i += gridDim.x * 1024ll)
        own += targets.counts(targets.ids[i]);
    own = block_sum(own);
    if (threadIdx.x > 0) return;
    if (gridDim.x == 1) *count = own;
    else atomicAdd(count, own);
}

// Block b adds `chunk` losses.
template <typename C>
__global__ void __launch_bounds__(1024)
cross_entropy_total(C* __restrict__ sums, const C* __restrict__ losses,
                    const long long* __restrict__ count, long long rows, long long chunk) {
    const long long end = min(rows, (blockIdx.x + 1) * chunk);
    C sum = 0;
    #pragma unroll 4
    for (long long i = blockIdx.x * chunk + threadIdx.x; i < end; i += blockDim.x) sum += losses[i];
    sum = block_sum(sum);
    if (threadIdx.x == 0) sums[blockIdx.x] = GradientScale<C>{nullptr, count, 0}(0) * sum;
}

template <typename T>
__global__ void __launch_bounds__(256)
cross_entropy_rescale(T* __restrict__ values, const GradientScale<Compute<T>> scale,
                      long long size) {
    const Compute<T> factor = scale(0);
    if (factor == 1) return;
    const long long all = gridDim.x * 256ll, own = blockIdx.x * 256ll + threadIdx.x;
    for (long long v = own; v < size / VECTOR<T>; v += all) {
        Compute<T> part[VECTOR<T>];
        unpack<T>(load_words(values + v * VECTOR<T>), part);
        #pragma unroll
        for (Compute<T>& value : part) value *= factor;
        store_values(values + v * VECTOR<T>, part);
    }
    for (long long i = size / VECTOR<T> * VECTOR<T> + own; i < size; i += all)
        values[i] = from_compute<T>(to_compute(values[i]) * factor);
}

// A thread's part of a row: value j is that of column(j), W of them side by side: a vector, or
// 1 where rows do not consist of whole vectors. Those from `end` on are -inf.
template <typename T, int N, int W>
struct RowRegisters {
    using Vector = Vec<T, W>;
    Vector pieces[N / W];

    __device__ static int column(int j) { return (j / W * blockDim.x + threadIdx.x) * W + j % W; }

    __device__ void fetch(const T* row, int end) {
        #pragma unroll
        for (int j = 0; j < N; j += W)
            if (column(j) < end) pieces[j / W] = load<W>(row + column(j));
    }
    template <typename C> __device__ void unpack_to(C (&values)[N], int end) const {
        #pragma unroll
        for (int j = 0; j < N; j += W) {
            C part[W];
            if constexpr (W > 1) unpack<T>(reinterpret_cast<const Words&>(pieces[j / W]), part);
            else part[0] = to_compute(pieces[j].values[0]);
            #pragma unroll
            for (int k = 0; k < W; ++k) values[j + k] = column(j) < end ? part[k] : -infinity<C>();
        }
        if (W > 1 && end % W != 0)   // a vector of which some count
            #pragma unroll
            for (int j = 0; j < N; ++j)
                if (column(j) >= end) values[j] = -infinity<C>();
    }
};

// See cross_entropy_group. The next row is on its way while a row is worked on.
template <typename T, int N, int W, typename C = Compute<T>>
__device__ inline void group_of_threads(C* losses, T* dlogits, const T* logits,
                                        const Targets& targets, const GradientScale<C>& scale,
                                        long long rows, int width, int classes) {
    using Own = RowRegisters<T, N, W>;
    const long long stride = gridDim.x * (long long)blockDim.y, last = rows - 1;
    const bool smooth = targets.each != 0;
    // Load the first row.
    long long next = min(group_row(), last), next_id = targets.ids[next];
    Own next_registers;
    next_registers.fetch(logits + next * width, classes);
    // Every thread of a warp takes every turn; a row beyond the last is the last one again,
    // unwritten.
    for (long long r = group_row(); r - threadIdx.y < rows; r += stride) {
        // Take over the row that was loaded, and load the next.
        const long long id = next_id, row = min(r, last);
        C values[N];
        next_registers.unpack_to(values, classes);
        const bool counts = targets.counts(id), known = 0 <= id && id < classes;
        const C at_target = known ? to_compute(logits[row * width + id]) : not_a_number<C>();
        const C weight = scale(row);
        next = min(r + stride, last);
        next_id = targets.ids[next];
        next_registers.fetch(logits + next * width, classes);
        asm volatile("" :: "r"(int(at_target != 0)));   // read before a thread writes over it
        // Online softmax, then across the threads.
        OnlineSoftmax<C> own = {-infinity<C>(), 0};
        own.template absorb<T>(values);
        own = warp_reduce(
            own, [](OnlineSoftmax<C> a, OnlineSoftmax<C> b) { return merge<T>(a, b); }, blockDim.x);
        const C row_max = own.shift();
        C below = 0;
        if (smooth) {
            #pragma unroll
            for (int j = 0; j < N; ++j)
                if (Own::column(j) < classes) below += values[j] - row_max;
            below = warp_sum(below, blockDim.x);
        }
        if (r >= rows) continue;
        // Loss.
        const LogitGradient<T> gradient(row_max, own.total, targets, weight);
        if (losses != nullptr && threadIdx.x == 0)
            losses[r] = counts ? targets.loss(row_max, own.total, at_target, below) : C(0);
        if (dlogits == nullptr) continue;
        // Gradient.
        T* dx = dlogits + r * width;
        if (!counts) {
            for (int column = threadIdx.x; column < width; column += blockDim.x)
                dx[column] = T(0.f);
            continue;
        }
        #pragma unroll
        for (int j = 0; j < N; j += W) {
            if (Own::column(j) >= width) break;
            #pragma unroll
            for (int k = j; k < j + W; ++k) values[k] = gradient(values[k]);
            if (classes < width)
                #pragma unroll
                for (int k = j; k < j + W; ++k)
                    if (Own::column(k) >= classes) values[k] = 0;
            if constexpr (W > 1)
                store_values(dx + Own::column(j), reinterpret_cast<const C(&)[W]>(values[j]));
            else dx[Own::column(j)] = from_compute<T>(values[j]);
        }
        if (known && int(id) / W % blockDim.x == threadIdx.x)   // once more, by the same thread
            dx[id] = from_compute<T>(gradient(at_target) - gradient.drop);
    }
}

// blockDim.x threads, a power of two up to 32, hold N logits of a row each; blockDim.y rows a
// block. With more than 8 the rows consist of whole vectors.
template <typename T, int N>
__global__ void __launch_bounds__(256, N == 8 && sizeof(T) < 8 ? 4 : 2)
cross_entropy_group(Compute<T>* losses, T* dlogits, const T* logits, const Targets targets,
                    const GradientScale<Compute<T>> scale, int prepared, long long rows, int width,
                    int classes) {
    if (prepared && scale.is_one()) return;
    if (N > 8 || width % VECTOR<T> == 0)
        group_of_threads<T, N, VECTOR<T>>(losses, dlogits, logits, targets, scale, rows, width,
                                          classes);
    else if constexpr (N == 8)
        group_of_threads<T, N, 1>(losses, dlogits, logits, targets, scale, rows, width, classes);
}

// The thread's one element outside the vectors, if any.
template <typename T> __device__ inline T own_other(const UnalignedRow<T>& row) {
    return threadIdx.x < row.others() ? row.x[row.other(threadIdx.x)] : T(0.f);
}

// Zeros in columns [begin, end) of a row.
template <typename T>
__device__ inline void clear(T* row, int begin, int end) {
    for_places(row + begin, end - begin, true, [&](int place, auto n) {
        Vec<T, n> zeros;
        #pragma unroll
        for (T& value : zeros.values) value = T(0.f);
        store(row + begin + place, zeros);
    });
}

// A single thread of a block looks after the target: it writes the loss and the gradient there.
template <typename T>
struct Target {
    bool known, mine;
    int place;

    __device__ Target(long long id, const UnalignedRow<T>& row)
        : known(0 <= id && id < row.width), mine(threadIdx.x == 0), place(known ? int(id) : 0) {
        if (known) mine = row.owns(place);
    }
};

// The statistics of a row: online softmax and, where `smooth`, the sum of logit - maximum. This is
// taken relative to the first logit, if finite, until the maximum is known.
template <typename T, typename C = Compute<T>>
struct LogitStatistics {
    OnlineSoftmax<C> all = {-infinity<C>(), 0};
    C base, below = 0;
    bool smooth;

    __device__ LogitStatistics(bool smooth, T first) : base(to_compute(first)), smooth(smooth) {
        if (!(abs(base) < infinity<C>())) base = 0;
    }
    template <int N> __device__ void absorb(const C (&values)[N]) {
        all.template absorb<T>(values);
        if (!smooth) return;
        #pragma unroll
        for (C value : values) below += value - base;
    }
    __device__ void absorb(const Words& bits) {
        C values[VECTOR<T>];
        unpack<T>(bits, values);
        absorb(values);
    }
    // Take in this thread's element outside the vectors, then merge the threads of the block.
    __device__ void finish(const UnalignedRow<T>& row, T other) {
        if (threadIdx.x < row.others()) {
            const C value[1] = {to_compute(other)};
            absorb(value);
        }
        all = block_reduce(all, OnlineSoftmax<C>{-infinity<C>(), 0},
                           [](OnlineSoftmax<C> a, OnlineSoftmax<C> b) { return merge<T>(a, b); });
        if (smooth) below = block_sum(below) + C(row.width) * (base - all.shift());
    }
};

template <typename T, typename C>
__device__ inline void store_gradient(T* place, const Words& bits,
                                      const LogitGradient<T>& gradient) {
    C values[VECTOR<T>];
    unpack<T>(bits, values);
    #pragma unroll
    for (C& value : values) value = gradient(value);
    store_values(place, values);
}

// The gradient outside the vectors, and once more at the target, by the thread that wrote it
// before.
template <typename T, typename C>
__device__ inline void finish_gradient(T* dx, const UnalignedRow<T>& row, T other,
                                       const Target<T>& target, C at_target,
                                       const LogitGradient<T>& gradient, int width) {
    if (threadIdx.x < row.others())
        dx[row.other(threadIdx.x)] = from_compute<T>(gradient(to_compute(other)));
    if (target.known && target.mine)
        dx[target.place] = from_compute<T>(gradient(at_target) - gradient.drop);
    clear(dx, row.width, width);
}

template <typename T>
__global__ void __launch_bounds__(512, sizeof(T) == 8 ? 1 : 2)
cross_entropy_forward(Compute<T>* __restrict__ losses, Compute<T>* __restrict__ peaks, T* dlogits,
                      const T* logits, const Targets targets, const GradientScale<Compute<T>> scale,
                      int width, int classes) {
    using C = Compute<T>;
    constexpr int UNROLL = sizeof(T) == 8 ? 1 : 4;
    const long long r = blockIdx.x, id = targets.ids[r];
    T* dx = dlogits + r * width;
    if (!targets.counts(id)) {
        if (threadIdx.x == 0) losses[r] = 0;
        if (dlogits != nullptr) clear(dx, 0, width);
        return;
    }
    // Load what is outside the vectors.
    const UnalignedRow<T> row(logits + r * width, classes);
    const Target<T> target(id, row);
    const C at_target = target.known ? to_compute(row.x[target.place]) : not_a_number<C>();
    const T other = own_other(row);
    const C weight = scale(r);
    const bool smooth = targets.each != 0;
    // Online softmax, then across the threads.
    LogitStatistics<T> statistics(smooth, smooth ? row.x[0] : T(0.f));
    for (int base = threadIdx.x; base < row.vectors; base += UNROLL * blockDim.x) {
        Words xs[UNROLL];
        #pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const int v = base + u * blockDim.x;
            if (v < row.vectors) xs[u] = load_words(row.vector(v));
        }
        #pragma unroll
        for (int u = 0; u < UNROLL; ++u)
            if (base + u * blockDim.x < row.vectors) statistics.absorb(xs[u]);
    }
    statistics.finish(row, other);
    // Loss.
    const C row_max = statistics.all.shift(), total = statistics.all.total;
    const LogitGradient<T> gradient(row_max, total, targets, weight);
    if (target.mine) {
        losses[r] = targets.loss(row_max, total, at_target, statistics.below);
        peaks[r] = row_max;
        peaks[gridDim.x + r] = total;
    }
    if (dlogits == nullptr) return;
    // Gradient.
    #pragma unroll 2
    for (int v = threadIdx.x; v < row.vectors; v += blockDim.x)
        store_gradient<T, C>(dx + row.head + v * VECTOR<T>, load_words(row.vector(v)), gradient);
    finish_gradient(dx, row, other, target, at_target, gradient, width);
}

// Dynamic shared memory: classes / VECTOR<T> vectors. Each thread reads what it has copied itself,
// so copies need no barrier. What else the next row needs waits in registers.
template <typename T>
__global__ void __launch_bounds__(1024)
cross_entropy_staged(Compute<T>* __restrict__ losses, Compute<T>* __restrict__ peaks, T* dlogits,
                     const T* logits, const Targets targets, const GradientScale<Compute<T>> scale,
                     long long rows, int width, int classes) {
    using C = Compute<T>;
    extern __shared__ __align__(16) unsigned char memory[];
    Words* staged = reinterpret_cast<Words*>(memory);
    const bool smooth = targets.each != 0;
    // Load the first row.
    long long id = targets.ids[blockIdx.x];
    UnalignedRow<T> row(logits + blockIdx.x * (long long)width, classes);
    T other = own_other(row), first = smooth ? row.x[0] : T(0.f);
    if (targets.counts(id))
        for (int v = threadIdx.x; v < row.vectors; v += blockDim.x)
            cp_async(staged + v, row.vector(v), true);
    cp_async_commit();
    for (long long r = blockIdx.x; r < rows; r += gridDim.x) {
        // Load what is outside the vectors of the next row.
        const long long next = min(r + gridDim.x, rows - 1);
        const UnalignedRow<T> next_row(logits + next * width, classes);
        const long long next_id = targets.ids[next];
        const T next_other = own_other(next_row), next_first = smooth ? next_row.x[0] : T(0.f);
        const int next_vectors = r + gridDim.x < rows && targets.counts(next_id) ? next_row.vectors
                                                                                 : 0;
        const bool counts = targets.counts(id);
        const int vectors = counts ? row.vectors : 0;
        const Target<T> target(id, row);
        const C weight = scale(r);
        T* dx = dlogits + r * width;
        // Online softmax, then across the threads.
        cp_async_wait<0>();
        LogitStatistics<T> statistics(smooth, first);
        #pragma unroll 2
        for (int v = threadIdx.x; v < vectors; v += blockDim.x) statistics.absorb(staged[v]);
        C at_target = not_a_number<C>();
        if (counts && target.known && target.mine)
            at_target = to_compute(!row.in_vector(target.place) ? other :
                reinterpret_cast<const T*>(staged)[target.place - row.head]);
        if (counts) statistics.finish(row, other);
        // Loss.
        const C row_max = statistics.all.shift(), total = statistics.all.total;
        const LogitGradient<T> gradient(row_max, total, targets, weight);
        if (target.mine) {
            losses[r] = counts ? targets.loss(row_max, total, at_target, statistics.below) : C(0);
            peaks[r] = row_max;
            peaks[rows + r] = total;
        }
        // Gradient; load the next row.
        #pragma unroll 2
        for (int v = threadIdx.x; v < max(vectors, next_vectors); v += blockDim.x) {
            if (v < vectors)
                store_gradient<T, C>(dx + row.head + v * VECTOR<T>, staged[v], gradient);
            if (v < next_vectors) cp_async(staged + v, next_row.vector(v), true);
        }
        cp_async_commit();
        if (counts) finish_gradient(dx, row, other, target, at_target, gradient, width);
        else clear(dx, 0, width);
        row = next_row;
        id = next_id;
        other = next_other;
        first = next_first;
    }
}

// Computed as forward does.
template <typename T>
__global__ void __launch_bounds__(512, sizeof(T) == 8 ? 1 : 2)
cross_entropy_backward(T* dlogits, const T* logits, const Targets targets,
                       const Compute<T>* __restrict__ peaks, const GradientScale<Compute<T>> scale,
                       int prepared, long long rows, int width) {
    if (prepared && scale.is_one()) return;
    for (long long r = blockIdx.x; r < rows; r += gridDim.x) {
        const T* x = logits + r * width;
        T* dx = dlogits + r * width;
        const long long target = targets.ids[r];
        if (!targets.counts(target)) {
            clear(dx, 0, width);
            continue;
        }
        const LogitGradient<T> gradient(peaks[r], peaks[rows + r], targets, scale(r));
        for_places(x, width, true, [&](int place, auto n) {
            auto out = load<n>(x + place);
            #pragma unroll
            for (T& value : out.values) value = from_compute<T>(gradient(to_compute(value)));
            store(dx + place, out);
        });
        __syncthreads();
        if (threadIdx.x == 0 && 0 <= target && target < width)
            dx[target] = from_compute<T>(gradient(to_compute(x[target])) - gradient.drop);
    }
}

// Online softmax of logits beside their tangents: also the sums of exp(logit - maximum) times the
// tangent, and of the tangents.
template <typename C>
struct TangentSums {
    OnlineSoftmax<C> all;
    C moved, tangents;

    template <typename T, int N>
    __device__ void absorb(const C (&x)[N], const C (&t)[N]) {
        C largest = all.maximum;
        #pragma unroll
        for (C value : x) largest = max(value, largest);
        if (largest > all.maximum) {
            const C smaller = exp_for<T>(all.maximum - largest);
            all = {largest, all.total * smaller};
            moved *= smaller;
        }
        const C base = all.shift();
        #pragma unroll
        for (int k = 0; k < N; ++k) {
            const C power = exp_less<T>(x[k], base);
            all.total += power;
            moved += power * t[k];
            tangents += t[k];
        }
    }
};

template <typename T, typename C>
__device__ inline TangentSums<C> merge(const TangentSums<C>& a, const TangentSums<C>& b) {
    const OnlineSoftmax<C> all = merge<T>(a.all, b.all);
    return {all, a.moved * exp_for<T>(a.all.maximum - all.shift())
                 + b.moved * exp_for<T>(b.all.maximum - all.shift()), a.tangents + b.tangents};
}

// The tangents of the losses from the logits and their tangents t, a block each row: with m the
// mean of t by p, and f = 1 + 2 * z_loss * z, they are m * f - sum(q * t). With `differentiate` the
// row of t becomes the gradient by t, (p * f - q) * scale, and the row of logits that by the
// logits, p * (f * (t - m) + 2 * z_loss * m) * scale; 0 for columns from `classes` on.
// 4 * sizeof(T) bytes an element, half without gradients: these read the row again, which the L2
// cache holds.
template <typename T>
__global__ void __launch_bounds__(512, sizeof(T) == 8 ? 1 : 2)
cross_entropy_tangent(Compute<T>* __restrict__ losses, T* __restrict__ logits,
                      T* __restrict__ tangents, const Targets targets,
                      const GradientScale<Compute<T>> scale, int differentiate, int width,
                      int classes) {
    using C = Compute<T>;
    const long long r = blockIdx.x, id = targets.ids[r];
    T *x = logits + r * width, *t = tangents + r * width;
    if (!targets.counts(id)) {
        if (threadIdx.x == 0) losses[r] = 0;
        if (differentiate) {
            clear(x, 0, width);
            clear(t, 0, width);
        }
        return;
    }
    const bool known = 0 <= id && id < classes, alike = aligned_alike(x, t);
    const C x_target = known ? to_compute(x[id]) : C(0);
    const C t_target = known ? to_compute(t[id]) : not_a_number<C>();
    // Sums of the thread, then across the threads.
    const TangentSums<C> nothing = {{-infinity<C>(), 0}, 0, 0};
    TangentSums<C> sums = nothing;
    for_places(x, classes, alike, [&](int place, auto n) {
        const auto xs = load<n>(x + place), ts = load<n>(t + place);
        C x_values[n], t_values[n];
        #pragma unroll
        for (int j = 0; j < n; ++j) {
            x_values[j] = to_compute(xs.values[j]);
            t_values[j] = to_compute(ts.values[j]);
        }
        sums.template absorb<T>(x_values, t_values);
    });
    sums = block_reduce(sums, nothing, [](const TangentSums<C>& a, const TangentSums<C>& b) {
        return merge<T>(a, b);
    });
    // The tangent of the loss.
    const C row_max = sums.all.shift(), part = C(1) / sums.all.total, mean = sums.moved * part;
    const C twice = 2 * C(targets.z_loss), rise = 1 + twice * (row_max + log(sums.all.total));
    const C each = C(targets.each);
    if (threadIdx.x == 0)
        losses[r] = mean * rise - C(targets.target) * t_target - each * sums.tangents;
    if (!differentiate) return;
    // The gradients, and once more at the target.
    const C weight = scale(r);
    for_places(x, classes, alike, [&](int place, auto n) {
        auto xs = load<n>(x + place), ts = load<n>(t + place);
        #pragma unroll
        for (int j = 0; j < n; ++j) {
            const C p = exp_less<T>(to_compute(xs.values[j]), row_max) * part;
            const C away = to_compute(ts.values[j]) - mean;
            xs.values[j] = from_compute<T>(p * (rise * away + twice * mean) * weight);
            ts.values[j] = from_compute<T>((p * rise - each) * weight);
        }
        store(x + place, xs);
        store(t + place, ts);
    });
    clear(x, classes, width);
    clear(t, classes, width);
    __syncthreads();
    if (threadIdx.x == 0 && known) {
        const C p = exp_less<T>(x_target, row_max) * part;
        t[id] = from_compute<T>((p * rise - each - C(targets.target)) * weight);
    }
}
