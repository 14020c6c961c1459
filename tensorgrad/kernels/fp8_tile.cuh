// Rounding a tile of a matrix to 8 bits, as it is and transposed; see fp8.cu.
#pragma once
#include "fp8.cuh"

constexpr int ROWS = 128, COLUMNS = 64, THREADS = 256;   // of a block
constexpr int WORDS = ROWS / 4 + 1;   // of a column in shared memory: lanes write to other banks

struct Plain {
    static constexpr bool TWO = false;

    __device__ void begin(int) {}
    __device__ float operator()(float x, float, int, int) const { return x; }
};

// A block takes 128 rows of 64 columns, a warp 32 of 32, a lane 4 of 8: the four rows of a column
// are a word of the transpose. Words go through shared memory, so that 128 rows of a column are
// written side by side.
//
// before: begin(row) is told the first of a thread's 4 rows; before(x, beside, r, column) returns
// the value that takes the place of x in row r of them; TWO says that `beside` is read.
template <typename T, Format FORMAT, bool IN_ROWS, bool IN_COLUMNS, bool SUMS, typename Before>
__device__ inline void quantize_tile(Before before, unsigned char* __restrict__ q,
                                     unsigned char* __restrict__ transposed,
                                     float* __restrict__ sums, Fp8Scale* state, bool reports,
                                     const T* __restrict__ x, const T* __restrict__ beside,
                                     int height, int width, int pitch, int tile_row,
                                     int tile_column) {
    __shared__ unsigned words[IN_COLUMNS ? COLUMNS * WORDS : 1];
    __shared__ float warp_sums[SUMS ? 4 : 1][SUMS ? COLUMNS : 1];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int column_here = warp % 2 * 32 + lane % 4 * 8, row_here = warp / 2 * 32 + lane / 4 * 4;
    const int column = tile_column * COLUMNS + column_here, row = tile_row * ROWS + row_here;
    const bool inside = row < height && column < width;   // with all 4 rows and 8 columns
    // Load.
    constexpr bool TWO = Before::TWO;
    T stored[4][8] = {}, others[TWO ? 4 : 1][8] = {};
    if (inside)
        #pragma unroll
        for (int r = 0; r < 4; ++r) {
            const long long place = (row + r) * (long long)width + column;
            load_all<8>(stored[r], x + place);
            if constexpr (TWO) load_all<8>(others[r], beside + place);
        }
    // What comes before.
    before.begin(inside ? row : 0);
    float values[4][8];
    Fp8Meter meter;
    #pragma unroll
    for (int r = 0; r < 4; ++r)
        #pragma unroll
        for (int c = 0; c < 8; ++c)
            values[r][c] = before(to_compute(stored[r][c]), to_compute(others[TWO ? r : 0][c]), r,
                                  column + c);
    if (!inside)
        #pragma unroll
        for (int r = 0; r < 4; ++r)
            #pragma unroll
            for (int c = 0; c < 8; ++c) values[r][c] = 0;
    // Sums over rows.
    if constexpr (SUMS) {
        #pragma unroll
        for (int c = 0; c < 8; ++c) {
            float sum = (values[0][c] + values[1][c]) + (values[2][c] + values[3][c]);
            #pragma unroll
            for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(0xffffffff, sum, step);
            if (lane < 4) warp_sums[warp / 2][column_here + c] = sum;
        }
    }
    // Round, store the rows.
    const float scale = state->scale;
    #pragma unroll
    for (int r = 0; r < 4; ++r) meter.see<FORMAT>(values[r], scale);
    unsigned rounded[4][2];
    #pragma unroll
    for (int r = 0; r < 4; ++r)
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            float four[4];
            #pragma unroll
            for (int c = 0; c < 4; ++c) four[c] = values[r][half * 4 + c] * scale;
            rounded[r][half] = round_to_fp8<FORMAT>(four);
        }
    if (IN_ROWS && inside)
        #pragma unroll
        for (int r = 0; r < 4; ++r)
            *reinterpret_cast<uint2*>(q + (row + r) * (long long)width + column) =
                make_uint2(rounded[r][0], rounded[r][1]);
    // Store the columns.
    if constexpr (IN_COLUMNS) {
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            unsigned across[4];
            transpose_bytes(across, rounded[0][half], rounded[1][half], rounded[2][half],
                            rounded[3][half]);
            #pragma unroll
            for (int c = 0; c < 4; ++c)
                words[(column_here + half * 4 + c) * WORDS + row_here / 4] = across[c];
        }
    }
    if (IN_COLUMNS || SUMS) __syncthreads();
    if constexpr (IN_COLUMNS) {
        const int first = tile_row * ROWS + lane * 4;
        #pragma unroll
        for (int i = 0; i < COLUMNS / 8; ++i) {
            const int c = warp * (COLUMNS / 8) + i, to = tile_column * COLUMNS + c;
            if (first < height && to < width)
                *reinterpret_cast<unsigned*>(transposed + to * (long long)pitch + first) =
                    words[c * WORDS + lane];
        }
    }
    if constexpr (SUMS) {
        const int c = threadIdx.x, to = tile_column * COLUMNS + c;
        if (c < COLUMNS && to < width)
            sums[tile_row * (long long)width + to] = (warp_sums[0][c] + warp_sums[1][c])
                                                   + (warp_sums[2][c] + warp_sums[3][c]);
    }
    // Report the largest.
    if (reports) meter.report(state);
}
