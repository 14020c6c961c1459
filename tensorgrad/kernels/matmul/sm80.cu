// Matrix products on tensor cores by mma.sync, for any GPU from Ampere on: float16, bfloat16, and
// float32 rounded to TF32 (10 bits of mantissa), all summed in float32.
//
// A block computes a tile of y: 128 x 256 with 8 warps or, where there is too little work for such
// tiles, 64 x 64 with 4. It copies 128 bytes of terms of each row of a and column of b at a time to
// shared memory, up to three copies ahead of the arithmetic, in lines as they lie in global memory,
// the 16-byte pieces of a line permuted so that the eight that ldmatrix reads at once lie in
// different banks. A warp computes 64 x 64 (or 32 x 32) of the tile: 8 ldmatrix for 32 products of
// 16 x 8 x 16, and while those run, the operands of the next come in.
//
// Each y is written once, with =, or += where the problem says so.
//
// An operand must be contiguous along one axis and aligned to 16 bytes along the other; anything
// else is read element by element, which is several times slower.
//
// The naive kernel, a thread for y[i][j]:
//
//   float sum = 0;
//   for (int k = 0; k < width; ++k) sum += a[i][k] * b[k][j];
//   y[i][j] = sum;
//
// Phases: prologue (load the first tiles); mainloop, for each step of a tile of terms (load a part
// of another, ldmatrix of the next step, mma of this one); epilogue (by way of shared memory,
// epilogue_rows).
//
// where: FLAG = true | false
// instantiate: matmul_mma<{__half | __nv_bfloat16 | float}, {FLAG}, {FLAG}, {4, 64 | 2, 32}>
#include "ampere.cuh"
#include "fragment.cuh"
#include "matmul/arguments.cuh"

constexpr int STEPS = 4;          // products along the terms of one tile in shared memory
constexpr int LINE = 32 * STEPS;  // bytes of terms of each row and column there

// A tile of one operand in shared memory: LENGTH rows of a (or columns of b) by LINE bytes of
// terms. ALONG_TERMS: a line in memory holds the terms of one row of a; else one term of all rows.
template <typename T, int LENGTH, bool ALONG_TERMS> struct MmaTileLayout {
    static constexpr int PIECE = 16 / sizeof(T), TERMS = LINE / sizeof(T);
    static constexpr int LINES = ALONG_TERMS ? LENGTH : TERMS;
    static constexpr int PIECES = (ALONG_TERMS ? TERMS : LENGTH) / PIECE;   // in a line; 8 or more
    static constexpr int BYTES = LENGTH * LINE;

    __device__ static int offset(int line, int piece) {
        // Floats across lines are read word by word, four lines and two pieces at once.
        const int swizzle = sizeof(T) == 4 && !ALONG_TERMS ? line * 2 : line;
        return (line * PIECES + (piece ^ (swizzle & 7))) * 16;
    }

    // Operand words of the i-th 16 rows (or columns) from `start`, a multiple of 32, for the
    // products of `step`. Word 2 t + h has half t of the terms and half h of the rows; for b, word
    // 2 h + t.
    template <bool B>
    __device__ static void read(unsigned (&x)[4], unsigned tile, int start, int i, int step) {
        const int lane = threadIdx.x % 32;
        // the bits of the matrix that this lane names
        const int low = lane / 8 % 2, high = lane / 16;
        const int term = B ? low : high, half = B ? high : low;
        if constexpr (ALONG_TERMS)
            ldmatrix(x, tile + offset(start + i * 16 + half * 8 + lane % 8, step * 2 + term));
        else if constexpr (sizeof(T) == 2)
            ldmatrix_transposed(
                x, tile + offset(step * 16 + term * 8 + lane % 8, start / 8 + i * 2 + half));
        else {   // offset() spelled out, so that the compiler sees four addresses and constants
            const unsigned from = tile + (lane % 4 * PIECES + start / 4 + i / 2 * 8) * 16 +
                                  lane / 4 % 4 * 4;
            #pragma unroll
            for (int w = 0; w < 4; ++w) {
                const int t = B ? w % 2 : w / 2, h = B ? w / 2 : w % 2;
                const int piece = (lane % 4 * 2 ^ lane / 16) ^ (i % 2 * 4 + h * 2);
                x[w] = load_word(from + piece * 16 + (step * 8 + t * 4) * PIECES * 16);
            }
        }
        if constexpr (sizeof(T) == 4) {
            #pragma unroll
            for (int i = 0; i < 4; ++i) x[i] = round_to_tf32(x[i]);
        }
    }
};

// Copies such tiles, one along the terms after the other, each in STEPS parts. The operand is seen
// as `length` rows of `width` terms, with the distances `step` from row to row and `term_step`.
template <typename T, int LENGTH, bool ALONG_TERMS, int THREADS> struct MmaLoader {
    using Layout = MmaTileLayout<T, LENGTH, ALONG_TERMS>;
    static constexpr int PASS = THREADS / Layout::PIECES;   // lines at a time
    static constexpr int PASSES = Layout::LINES / PASS;

    const T* from;
    long long line_step, element_step, tile_step;
    int line, piece, left, width;
    bool vectors;

    __device__ MmaLoader(const T* data, long long step, long long term_step, int start, int length,
                         int width, bool vectors)
        : line_step(ALONG_TERMS ? step : term_step), element_step(ALONG_TERMS ? term_step : step),
          tile_step(Layout::TERMS * term_step), width(width), vectors(vectors) {
        line = threadIdx.x / Layout::PIECES;
        piece = threadIdx.x % Layout::PIECES;
        from = data + start * step + line * line_step + piece * Layout::PIECE * element_step;
        left = length - start - (ALONG_TERMS ? line : piece * Layout::PIECE);   // rows from here on
    }

    // Where the piece of a pass goes to: the lines of the passes are permuted alike.
    __device__ unsigned place(unsigned tile, int pass) const {
        static_assert(PASS * (sizeof(T) == 4 && !ALONG_TERMS ? 2 : 1) % 8 == 0, "");
        return tile + Layout::offset(line, piece) + pass * PASS * Layout::PIECES * 16;
    }

    // Rows and terms that are left, from the piece of a pass on.
    __device__ int rows_left(int pass) const { return ALONG_TERMS ? left - pass * PASS : left; }
    __device__ int terms_left(int first, int pass) const {
        return width - first - (ALONG_TERMS ? piece * Layout::PIECE : line + pass * PASS);
    }

    __device__ void copy(unsigned tile, int first, int part) const {
        #pragma unroll
        for (int i = 0; i < PASSES / STEPS; ++i) {
            const int pass = part * (PASSES / STEPS) + i;
            cp_async<16>(place(tile, pass), from + pass * PASS * line_step,
                           rows_left(pass) > 0 && terms_left(first, pass) > 0);
        }
    }

    // The whole tile, element by element. Not unrolled: it would push the loop out of the
    // instruction cache.
    __device__ void gather(unsigned tile, int first) const {
        #pragma unroll 1
        for (int pass = 0; pass < PASSES; ++pass) {
            const T* source = from + pass * PASS * line_step;
            const int rows = rows_left(pass), terms = terms_left(first, pass);
            const int exist = min(rows, terms) > 0 ? (ALONG_TERMS ? terms : rows) : 0;
            Vec<T> v;
            #pragma unroll
            for (int i = 0; i < Layout::PIECE; ++i, source += element_step)
                v.values[i] = i < exist ? *source : T(0.f);
            const int4 bits = reinterpret_cast<const int4&>(v);
            asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};"
                         :: "r"(place(tile, pass)), "r"(bits.x), "r"(bits.y), "r"(bits.z),
                            "r"(bits.w) : "memory");
        }
    }

    __device__ void advance() { from += tile_step; }
};

// Until at most `stages` - 2 tiles are on their way, of 2, 3 or 4 stages.
__device__ inline void wait_for_tile(int stages) {
    if (stages == 4) cp_async_wait<2>();
    else if (stages == 3) cp_async_wait<1>();
    else cp_async_wait<0>();
}

// stages: of the pipeline, as many tiles of both operands as shared memory holds.
template <typename T, bool A_ALONG_TERMS, bool B_ALONG_TERMS, int WARPS, int SIZE>
__global__ void __launch_bounds__(64 * WARPS, 1)
    matmul_mma(const __grid_constant__ MatmulArguments p, int stages) {
    constexpr int THREADS = 64 * WARPS, ROWS = 2 * SIZE, COLUMNS = WARPS * SIZE;
    // products that make up what a warp computes
    constexpr int TALL = SIZE / 16, BROAD = SIZE / 8;
    using LayoutA = MmaTileLayout<T, ROWS, A_ALONG_TERMS>;
    using LayoutB = MmaTileLayout<T, COLUMNS, B_ALONG_TERMS>;
    extern __shared__ __align__(128) unsigned char memory[];
    const unsigned tiles = shared_address(memory);

    const OutputTile tile = tile_of_block<ROWS, COLUMNS>(p);
    MmaLoader<T, ROWS, A_ALONG_TERMS, THREADS> load_a(
        static_cast<const T*>(p.a.data) + tile.batch * p.a.batch, p.a.row, p.a.column,
        tile.row, p.rows, p.width, p.a_vectors);
    MmaLoader<T, COLUMNS, B_ALONG_TERMS, THREADS> load_b(
        static_cast<const T*>(p.b.data) + tile.batch * p.b.batch, p.b.column, p.b.row,
        tile.column, p.columns, p.width, p.b_vectors);
    const int count = (p.width + LayoutA::TERMS - 1) / LayoutA::TERMS;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int warp_row = warp % 2 * SIZE, warp_column = warp / 2 * SIZE;

    const auto copy = [&](int index, int stage, int part) {
        const unsigned to = tiles + stage * (LayoutA::BYTES + LayoutB::BYTES);
        const bool more = index < count;
        if (more && load_a.vectors) load_a.copy(to, index * LayoutA::TERMS, part);
        else if (more && part == 0) load_a.gather(to, index * LayoutA::TERMS);
        if (more && load_b.vectors) load_b.copy(to + LayoutA::BYTES, index * LayoutA::TERMS, part);
        else if (more && part == 0) load_b.gather(to + LayoutA::BYTES, index * LayoutA::TERMS);
        if (part == STEPS - 1) {
            load_a.advance();
            load_b.advance();
            cp_async_commit();
        }
    };
    // Prologue: load the first tiles.
    #pragma unroll 1
    for (int i = 0; i < stages - 1; ++i)
        #pragma unroll
        for (int part = 0; part < STEPS; ++part) copy(i, i, part);

    Fragment<TALL, SIZE> sums;
    sums.clear();
    unsigned a[2][TALL][4], b[2][BROAD / 2][4];
    const auto read = [&](int set, int stage, int step) {
        const unsigned from = tiles + stage * (LayoutA::BYTES + LayoutB::BYTES);
        #pragma unroll
        for (int i = 0; i < TALL; ++i)
            LayoutA::template read<false>(a[set][i], from, warp_row, i, step);
        #pragma unroll
        for (int j = 0; j < BROAD / 2; ++j)
            LayoutB::template read<true>(b[set][j], from + LayoutA::BYTES, warp_column, j, step);
    };

    // Mainloop.
    wait_for_tile(stages);
    __syncthreads();
    read(0, 0, 0);
    int stage = 0, free = stages - 1;   // the tile to multiply, and the place of the next to copy
    for (int index = 0; index < count; ++index) {
        const int next = stage + 1 == stages ? 0 : stage + 1;
        #pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            // Load a part of another tile.
            copy(index + stages - 1, free, step);
            if (step == STEPS - 1) {   // all copies of this tile have been read into registers
                wait_for_tile(stages);
                __syncthreads();
            }
            // Read the operands of the next step.
            read((step + 1) % 2, step == STEPS - 1 ? next : stage, (step + 1) % STEPS);
            // Multiply those of this one.
            #pragma unroll
            for (int i = 0; i < TALL; ++i)
                #pragma unroll
                for (int j = 0; j < BROAD; ++j)
                    mma<T>(sums.block(i, j), a[step % 2][i], b[step % 2][j / 2][j % 2 * 2],
                           b[step % 2][j / 2][j % 2 * 2 + 1]);
        }
        free = stage;
        stage = next;
    }

    // Epilogue, by way of shared memory.
    cp_async_wait<0>();
    __syncthreads();
    constexpr int PITCH = SIZE + 8, HALF = SIZE / 2;   // the rows of two stages
    float* const rows = reinterpret_cast<float*>(memory) + warp * HALF * PITCH;
    #pragma unroll
    for (int half = 0; half < 2; ++half) {
        #pragma unroll
        for (int h = 0; h < TALL; ++h)
            #pragma unroll
            for (int c = 0; c < SIZE; c += 8)
                *reinterpret_cast<float2*>(rows + sums.row_of(h) * PITCH + sums.column_of(c)) =
                    make_float2(sums.at(half * TALL + h, c), sums.at(half * TALL + h, c + 1));
        __syncwarp();
        epilogue_rows<T, HALF, SIZE, PITCH>(p, tile.batch, tile.row + warp_row + half * HALF,
                                            tile.column + warp_column, rows);
        __syncwarp();
    }
}
