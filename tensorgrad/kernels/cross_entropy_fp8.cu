// The gradient of cross entropy (see cross_entropy.cu), rounded to 8 bits (see fp8.cu): operands of
// the products that give the gradients of a head.
//
//   cross_entropy_round   q = round(dlogits scale), in rows and transposed; the largest |dlogits|
//
// It reads the logits, and the maximum and the sum of each row, and writes 2 bytes an element: 4
// with logits of 16 bits. All is written with =, but for the largest value and the count of clipped
// ones.
//
// The naive kernel, a thread for logits[i][j]:
//
//   float dx = (exp(logits[i][j] - row_max[i]) / sum[i] - (j == ids[i])) * factor;
//   q[i][j] = transposed[j][i] = fp8(dx * scale);
//
// Phases: as of quantize_tile.
//
// arch: sm_90a
// instantiate: cross_entropy_round<{__half | __nv_bfloat16}>
#include "cross_entropy.cuh"
#include "fp8_tile.cuh"

// The gradient of the logits in a thread's 4 rows.
template <typename T> struct RoundedLogits {
    static constexpr bool TWO = false;
    const Targets& targets;
    const GradientScale<float>& scale;
    const float* peaks;
    int rows, classes;
    float row_max[4], rise[4], floor[4], drop[4];
    long long ids[4];

    __device__ void begin(int row) {
        #pragma unroll
        for (int r = 0; r < 4; ++r) {
            ids[r] = targets.ids[row + r];
            const bool counts = targets.counts(ids[r]);
            const LogitGradient<T> gradient(counts ? peaks[row + r] : 0.f,
                                            counts ? peaks[rows + row + r] : 1.f, targets,
                                            counts ? scale(row + r) : 0.f);
            row_max[r] = counts ? gradient.row_max : infinity<float>();
            rise[r] = gradient.rise;
            floor[r] = gradient.floor;
            drop[r] = gradient.drop;
        }
    }
    __device__ float operator()(float x, float, int r, int column) const {
        if (column >= classes || row_max[r] == infinity<float>()) return 0;
        const float dx = exp_less<T>(x, row_max[r]) * rise[r] - floor[r];
        return column == ids[r] ? dx - drop[r] : dx;
    }
};

template <typename T>
__global__ void __launch_bounds__(THREADS, 3)
cross_entropy_round(unsigned char* __restrict__ q, unsigned char* __restrict__ transposed,
                    Fp8Scale* state, const T* __restrict__ logits,
                    const float* __restrict__ peaks,
                    const __grid_constant__ Targets targets,
                    const __grid_constant__ GradientScale<float> scale, int rows, int width,
                    int classes, bool reports) {
    const RoundedLogits<T> before = {targets, scale, peaks, rows, classes};
    quantize_tile<T, E5M2, true, true, false>(before, q, transposed, nullptr, state, reports,
                                              logits, logits, rows, width, rows, blockIdx.y,
                                              blockIdx.x);
}
