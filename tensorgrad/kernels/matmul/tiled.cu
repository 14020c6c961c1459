// Matrix products in float32 and float64 on the ordinary units, each term added in full precision.
//
// A block computes a tile of y: 128 x 128 in float32, where there is enough work for such tiles,
// else 64 x 64. It copies 16 columns of a and 16 rows of b at a time to shared memory, two copies
// ahead of the arithmetic, both stored by rows of terms: a thread then reads four rows and four
// columns that lie side by side with one 16-byte access each. Every thread holds 8 x 8 results (4 x
// 4 in the small tile) in registers: 16 values read for 64 multiplications.
//
// An operand whose rows (a) or columns (b) are contiguous and aligned is copied 16 bytes at a time;
// one whose terms are is transposed on the way, element by element, and so is any other.
//
// Each y is written once, with =, or += where the problem says so. The order of the sum is that of
// the terms, whatever the sizes.
//
// The naive kernel, a thread for y[i][j]:
//
//   float sum = 0;
//   for (int k = 0; k < width; ++k) sum += a[i][k] * b[k][j];
//   y[i][j] = sum;
//
// Phases: prologue (load the first tiles); mainloop, for each tile of terms (load another, read
// from shared memory, multiply and add); epilogue (by way of shared memory, epilogue_rows).
//
// where: FLAG = true | false
// instantiate: matmul_tile<{float, {FLAG}, {FLAG}, {2 | 1} | double, {FLAG}, {FLAG}, 1}>
#include "ampere.cuh"
#include "matmul/arguments.cuh"

constexpr int THREADS = 256, TERMS = 16, STAGES = 3;

// Copies tiles of TERMS x LENGTH of one operand to shared memory, one along the terms after the
// other. The operand is seen as `length` lines of `width` terms, with the distances `step` from
// line to line and `term_step`. VECTORS: lines lie side by side, aligned and in whole pieces of 16
// bytes.
template <typename T, int LENGTH, bool VECTORS> struct SimtLoader {
    static constexpr int PIECE = VECTORS ? 16 / sizeof(T) : 1;
    // transposed copies spread over the banks
    static constexpr int PITCH = LENGTH + 16 / sizeof(T);
    static constexpr int SIZE = TERMS * PITCH;

    const T* from;
    long long pass_step, tile_step;
    int place;   // where this thread begins to write
    int lines, terms;   // left, from those of this thread on

    __device__ SimtLoader(const T* data, long long step, long long term_step, int start, int length,
                          int width) {
        const int line = VECTORS ? threadIdx.x % (LENGTH / PIECE) * PIECE : threadIdx.x / TERMS;
        const int term = VECTORS ? threadIdx.x / (LENGTH / PIECE) : threadIdx.x % TERMS;
        from = data + (start + line) * step + term * term_step;
        pass_step = VECTORS ? THREADS / (LENGTH / PIECE) * term_step : THREADS / TERMS * step;
        tile_step = TERMS * term_step;
        place = term * PITCH + line;
        lines = length - start - line;
        terms = width - term;
    }

    __device__ void copy(T* tile) {
        const unsigned to = shared_address(tile + place);
        const T* source = from;
        constexpr int PASS = VECTORS ? THREADS / (LENGTH / PIECE) : THREADS / TERMS;
        #pragma unroll
        for (int i = 0; i < (VECTORS ? TERMS : LENGTH); i += PASS, source += pass_step) {
            const bool exist = VECTORS ? i < terms && lines > 0 : terms > 0 && i < lines;
            cp_async<PIECE * sizeof(T)>(to + i * (VECTORS ? PITCH : 1) * int(sizeof(T)), source,
                                        exist);
        }
        from += tile_step;
        terms -= TERMS;
    }
};

template <typename T, bool A_VECTORS, bool B_VECTORS, int REPEAT>
__global__ void __launch_bounds__(THREADS, 2)
    matmul_tile(const __grid_constant__ MatmulArguments p) {
    // warps 4 x 2, lanes 4 x 8, 4 x 4 each
    constexpr int ROWS = 64 * REPEAT, COLUMNS = 64 * REPEAT;
    using LoadA = SimtLoader<T, ROWS, A_VECTORS>;
    using LoadB = SimtLoader<T, COLUMNS, B_VECTORS>;
    extern __shared__ __align__(16) unsigned char memory[];
    T* const a_tiles = reinterpret_cast<T*>(memory);
    T* const b_tiles = a_tiles + STAGES * LoadA::SIZE;

    const OutputTile tile = tile_of_block<ROWS, COLUMNS>(p);
    LoadA load_a(static_cast<const T*>(p.a.data) + tile.batch * p.a.batch, p.a.row, p.a.column,
                 tile.row, p.rows, p.width);
    LoadB load_b(static_cast<const T*>(p.b.data) + tile.batch * p.b.batch, p.b.column, p.b.row,
                 tile.column, p.columns, p.width);
    const auto copy = [&](int index) {
        load_a.copy(a_tiles + index % STAGES * LoadA::SIZE);
        load_b.copy(b_tiles + index % STAGES * LoadB::SIZE);
    };

    // Neighbouring lanes share columns, so that one access of a warp reads each bank twice at most.
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int lane_row = (lane % 2 + lane / 16 * 2) * 4, lane_column = lane / 2 % 8 * 4;
    const int row = warp % 4 * 16 * REPEAT + lane_row,
              column = warp / 4 * 32 * REPEAT + lane_column;

    // Prologue: load the first tiles.
    T sums[REPEAT * 4][REPEAT * 4] = {};
    const int count = (p.width + TERMS - 1) / TERMS;
    #pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) {
        if (i < count) copy(i);
        cp_async_commit();
    }
    // Mainloop.
    for (int index = 0; index < count; ++index) {
        // Wait for a tile and load another.
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        if (index + STAGES - 1 < count) copy(index + STAGES - 1);
        cp_async_commit();
        // Multiply this one.
        const T* a = a_tiles + index % STAGES * LoadA::SIZE + row;
        const T* b = b_tiles + index % STAGES * LoadB::SIZE + column;
        #pragma unroll
        for (int k = 0; k < TERMS; ++k) {
            T x[REPEAT * 4], z[REPEAT * 4];
            #pragma unroll
            for (int i = 0; i < REPEAT; ++i) {
                load_all<4>(x + 4 * i, a + k * LoadA::PITCH + i * 16);
                load_all<4>(z + 4 * i, b + k * LoadB::PITCH + i * 32);
            }
            #pragma unroll
            for (int i = 0; i < REPEAT * 4; ++i)
                #pragma unroll
                for (int j = 0; j < REPEAT * 4; ++j) sums[i][j] += x[i] * z[j];
        }
    }

    // Epilogue, by way of shared memory.
    cp_async_wait<0>();
    __syncthreads();
    constexpr int WARP_COLUMNS = 32 * REPEAT, PITCH = WARP_COLUMNS + 4;
    T* const rows = a_tiles + warp * 16 * PITCH;
    #pragma unroll
    for (int r = 0; r < REPEAT; ++r) {
        #pragma unroll
        for (int i = 0; i < 4; ++i)
            #pragma unroll
            for (int j = 0; j < REPEAT; ++j)
                store_all<4>(rows + (lane_row + i) * PITCH + lane_column + j * 32,
                           &sums[r * 4 + i][j * 4]);
        __syncwarp();
        epilogue_rows<T, 16, WARP_COLUMNS, PITCH>(p, tile.batch,
                                                  tile.row + warp % 4 * 16 * REPEAT + r * 16,
                                                  tile.column + warp / 4 * WARP_COLUMNS, rows);
        __syncwarp();
    }
}
