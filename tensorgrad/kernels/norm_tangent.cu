// The tangent of layer_norm and rms_norm, and its gradients (see norm.cuh): J(x) u, and what is
// needed to differentiate it.
//
//   norm_tangent            y = (u - mean(u) - x_hat mean(u x_hat)) rstd weight + x_hat tw + tb
//   norm_tangent_backward   gradients of x and u, from the gradient g of y
//   norm_tangent_columns    partial rows of the gradients of weight, tw and tb
//
// Any width and alignment; a row is read from DRAM once and then from the L1 cache. They move 3, 5
// and 3 * sizeof(T) bytes an element. All results are written with =. sum_parts in reduce.cu adds
// up the partial rows. Launched by kernels/norm_tangent.py.
//
// The naive backward, a thread for row r, where a = g weight, b = g tw, x_hat = (x - mean) rstd,
// and E is a mean over the row (rms_norm: E(u), E(a) and E(b) are 0):
//
//   m = E(u x_hat); p = E(a x_hat); c = E(a u) - E(a) E(u) - m p;
//   du = rstd (a - E(a) - x_hat p);
//   dx = rstd (b - E(b) - x_hat E(b x_hat))
//      - rstd^2 (p (u - E(u) - x_hat m) + m (a - E(a) - x_hat p) + x_hat c);
//
// where: TYPE = double | float | __half | __nv_bfloat16
// instantiate: {norm_tangent | norm_tangent_backward | norm_tangent_columns}<{TYPE}>
#include "norm.cuh"

template <typename C>
struct RowSums {
    C values[5];
};
template <typename C> __device__ inline RowSums<C> operator+(RowSums<C> a, const RowSums<C>& b) {
    #pragma unroll
    for (int i = 0; i < 5; ++i) a.values[i] += b.values[i];
    return a;
}

// stats: (rows, 2), E(u) and E(u x_hat).
template <typename T>
__global__ void __launch_bounds__(256, 4)
norm_tangent(T* __restrict__ y, Compute<T>* __restrict__ stats, const T* __restrict__ u,
             const T* __restrict__ x,
             const void* __restrict__ weight, bool weight_wide, const void* __restrict__ tweight,
             bool tweight_wide, const void* __restrict__ tbias, bool tbias_wide,
             const Compute<T>* __restrict__ mean_in, const Compute<T>* __restrict__ rstd_in,
             long long rows, int width) {
    using C = Compute<T>;
    __shared__ Pair<C> sums[64];
    GroupReducer<Pair<C>> group(sums);
    const long long row = group_row();
    const int count = row < rows ? width : 0;
    const C mean = count > 0 && mean_in != nullptr ? mean_in[row] : C(0);
    const C rstd = count > 0 ? rstd_in[row] : C(0);
    x += row * width;
    u += row * width;
    y += row * width;
    // Sums of the row.
    Pair<C> sum = {0, 0};
    for_places(x, count, aligned_alike(x, u), [&](int place, auto n) {
        const auto xs = load<n>(x + place), us = load<n>(u + place);
        #pragma unroll
        for (int j = 0; j < n; ++j) {
            const C value = to_compute(us.values[j]);
            sum.first += value;
            sum.second += value * ((to_compute(xs.values[j]) - mean) * rstd);
        }
    });
    sum = group.sum(sum);
    const C shift = mean_in != nullptr ? sum.first / C(width) : C(0),
            projection = sum.second / C(width);
    if (threadIdx.x == 0 && count > 0) {
        stats[row * 2] = shift;
        stats[row * 2 + 1] = projection;
    }
    // The tangent.
    for_places(x, count, aligned_alike(x, u) && aligned_alike(x, y), [&](int place, auto n) {
        auto values = load<n>(x + place);
        const auto us = load<n>(u + place);
        #pragma unroll
        for (int j = 0; j < n; ++j) {
            const C x_hat = (to_compute(values.values[j]) - mean) * rstd;
            C t = rstd * (to_compute(us.values[j]) - shift - x_hat * projection);
            if (weight != nullptr) t *= load_parameter<T>(weight, weight_wide, place + j);
            if (tweight != nullptr)
                t += x_hat * load_parameter<T>(tweight, tweight_wide, place + j);
            if (tbias != nullptr) t += load_parameter<T>(tbias, tbias_wide, place + j);
            values.values[j] = from_compute<T>(t);
        }
        store(y + place, values);
    });
}

template <typename T>
__global__ void __launch_bounds__(256)
norm_tangent_backward(T* __restrict__ dx, T* __restrict__ du, const T* __restrict__ g,
                      const T* __restrict__ u, const T* __restrict__ x,
                      const void* __restrict__ weight, bool weight_wide,
                      const void* __restrict__ tweight, bool tweight_wide,
                      const Compute<T>* __restrict__ stats,
                      const Compute<T>* __restrict__ mean_in,
                      const Compute<T>* __restrict__ rstd_in, long long rows, int width) {
    using C = Compute<T>;
    __shared__ RowSums<C> sums[64];
    GroupReducer<RowSums<C>> group(sums);
    const long long row = group_row();
    const int count = row < rows ? width : 0;
    const bool centre = mean_in != nullptr;
    const C mean = count > 0 && centre ? mean_in[row] : C(0);
    const C rstd = count > 0 ? rstd_in[row] : C(0);
    const C u_mean = count > 0 ? stats[row * 2] : C(0), m = count > 0 ? stats[row * 2 + 1] : C(0);
    x += row * width;
    u += row * width;
    g += row * width;
    dx += row * width;
    du += row * width;

    // Sums of the row: a, a x_hat, a (u - E(u)), b, b x_hat.
    RowSums<C> sum = {};
    const bool reads_alike = aligned_alike(x, u) && aligned_alike(x, g);
    for_places(x, count, reads_alike, [&](int place, auto n) {
        const auto xs = load<n>(x + place), us = load<n>(u + place), gs = load<n>(g + place);
        #pragma unroll
        for (int j = 0; j < n; ++j) {
            const C x_hat = (to_compute(xs.values[j]) - mean) * rstd;
            const C gradient = to_compute(gs.values[j]);
            C a = gradient, b = 0;
            if (weight != nullptr) a *= load_parameter<T>(weight, weight_wide, place + j);
            if (tweight != nullptr)
                b = gradient * load_parameter<T>(tweight, tweight_wide, place + j);
            sum.values[0] += a;
            sum.values[1] += a * x_hat;
            sum.values[2] += a * (to_compute(us.values[j]) - u_mean);
            sum.values[3] += b;
            sum.values[4] += b * x_hat;
        }
    });
    sum = group.sum(sum);
    #pragma unroll
    for (C& value : sum.values) value /= C(width);
    const C a_mean = centre ? sum.values[0] : C(0), b_mean = centre ? sum.values[3] : C(0);
    const C p = sum.values[1], b_hat = sum.values[4], c = sum.values[2] - m * p;
    // Gradients of x and u.
    const bool alike = reads_alike && aligned_alike(x, dx) && aligned_alike(x, du);
    for_places(x, count, alike, [&](int place, auto n) {
        auto xs = load<n>(x + place), us = load<n>(u + place);
        const auto gs = load<n>(g + place);
        #pragma unroll
        for (int j = 0; j < n; ++j) {
            const C x_hat = (to_compute(xs.values[j]) - mean) * rstd;
            const C gradient = to_compute(gs.values[j]);
            C a = gradient, b = 0;
            if (weight != nullptr) a *= load_parameter<T>(weight, weight_wide, place + j);
            if (tweight != nullptr)
                b = gradient * load_parameter<T>(tweight, tweight_wide, place + j);
            const C own_a = a - a_mean - x_hat * p,
                    own_u = to_compute(us.values[j]) - u_mean - x_hat * m;
            us.values[j] = from_compute<T>(rstd * own_a);
            xs.values[j] = from_compute<T>(rstd * (b - b_mean - x_hat * b_hat)
                                           - rstd * rstd * (p * own_u + m * own_a + x_hat * c));
        }
        store(du + place, us);
        store(dx + place, xs);
    });
}

// A block of 32 x 8 threads: 32 columns of a chunk of the rows. Grid: tiles of columns, chunks.
// partials: (chunks, 3, width), of the gradients of weight, tw and tb.
template <typename T>
__global__ void __launch_bounds__(256)
norm_tangent_columns(Compute<T>* __restrict__ partials, const T* __restrict__ g,
                     const T* __restrict__ u, const T* __restrict__ x,
                     const Compute<T>* __restrict__ stats, const Compute<T>* __restrict__ mean_in,
                     const Compute<T>* __restrict__ rstd_in, long long rows, int width,
                     long long chunk) {
    using C = Compute<T>;
    __shared__ C sums[3][8][32];
    const int column = blockIdx.x * 32 + threadIdx.x;
    const long long begin = blockIdx.y * chunk, end = min(begin + chunk, rows);
    // Sums of a thread.
    C own[3] = {};
    if (column < width) {
        #pragma unroll 2
        for (long long row = begin + threadIdx.y; row < end; row += 8) {
            const C gradient = to_compute(g[row * width + column]), rstd = rstd_in[row];
            const C mean = mean_in != nullptr ? mean_in[row] : C(0);
            const C x_hat = (to_compute(x[row * width + column]) - mean) * rstd;
            const C value = to_compute(u[row * width + column]);
            own[0] += gradient * (rstd * (value - stats[row * 2] - x_hat * stats[row * 2 + 1]));
            own[1] += gradient * x_hat;
            own[2] += gradient;
        }
    }
    // Sums of the block.
    #pragma unroll
    for (int i = 0; i < 3; ++i) sums[i][threadIdx.y][threadIdx.x] = own[i];
    __syncthreads();
    if (threadIdx.y > 0 || column >= width) return;
    #pragma unroll
    for (int i = 0; i < 3; ++i) {
        for (int j = 1; j < 8; ++j) own[i] += sums[i][j][threadIdx.x];
        partials[(blockIdx.y * 3ll + i) * width + column] = own[i];
    }
}
