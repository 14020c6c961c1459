// The scores that softmax is taken of: x * scale + mask, -inf where a Boolean or causal mask hides
// x.
#pragma once
#include "exp.cuh"

// Arguments as the host gives them. The mask has the shape of x, by strides that may be 0: of three
// leading axes, the last two of these lengths, and of the row. `queries`: the length of the axis
// before the last under a causal mask, which is aligned at the end of both axes; else 0.
struct ScoreArguments {
    double scale;
    const void* mask;
    long long kind;   // kind of the mask: none, bool, T, Compute<T>
    long long lengths[2], strides[4], queries;
};
enum { NO_MASK, BOOL_MASK, OWN_MASK, WIDE_MASK };

// The scores of one row; without MASKED there is neither a mask nor causality.
template <typename T, bool MASKED>
struct RowScores {
    using C = Compute<T>;
    C scale;
    const ScoreArguments& all;
    long long place;   // place of the row in the mask
    int limit;         // nothing is allowed from this column on
    bool whole;        // vectors of the mask can be loaded as such

    // head: the first column that vectors begin at.
    __device__ RowScores(const ScoreArguments& all, long long row, int width, int head)
        : scale(all.scale), all(all), place(0), limit(width), whole(false) {
        if (!MASKED) return;
        if (all.queries > 0)
            limit = max(0, min(width, int(unsigned(row) % unsigned(all.queries)) + 1 + width -
                                          int(all.queries)));
        if (all.kind == NO_MASK) return;
        const long long size = all.kind == BOOL_MASK  ? 1
                               : all.kind == OWN_MASK ? sizeof(T)
                                                      : sizeof(C);
        const unsigned middle = unsigned(all.lengths[0]), inner = unsigned(all.lengths[1]);
        // under a mask there are less than 2^32 rows
        const unsigned outer = unsigned(row) / inner;
        place = outer / middle * all.strides[0] + outer % middle * all.strides[1]
              + unsigned(row) % inner * all.strides[2];
        const size_t address = reinterpret_cast<size_t>(all.mask) + (place + head) * size;
        whole = all.strides[3] == 1 && address % (size * VECTOR<T>) == 0;
    }
    // ScoreArguments of COUNT times N values of x, which `fill` gets; part i is that of columns
    // first + i * step onward. Those outside are -inf.
    template <int COUNT, int N, typename F>
    __device__ void make(C (&values)[COUNT][N], int first, int step, F fill) const {
        if (MASKED && all.kind == BOOL_MASK)
            add_mask(static_cast<const bool*>(all.mask), values, first, step, fill);
        else if (MASKED && all.kind == OWN_MASK)
            add_mask(static_cast<const T*>(all.mask), values, first, step, fill);
        else if (MASKED && all.kind == WIDE_MASK)
            add_mask(static_cast<const C*>(all.mask), values, first, step, fill);
        else {
            fill(values);
            if (all.scale != 1) each(values, [&](C& value, int, int) { value *= scale; });
        }
        if (first + (COUNT - 1) * step + N > limit)
            each(values, [&](C& value, int i, int j) {
                if (first + i * step + j >= limit) value = -infinity<C>();
            });
    }

private:
    template <int COUNT, int N, typename F>
    __device__ static void each(C (&values)[COUNT][N], F f) {
        #pragma unroll
        for (int i = 0; i < COUNT; ++i)
            #pragma unroll
            for (int j = 0; j < N; ++j) f(values[i][j], i, j);
    }
    template <typename M, int COUNT, int N, typename F>
    __device__ void add_mask(const M* mask, C (&values)[COUNT][N], int first, int step,
                             F fill) const {
        Vec<M, N> parts[COUNT];
        #pragma unroll
        for (int i = 0; i < COUNT; ++i) {   // all loads before what waits for x
            const int column = first + i * step;
            const M* p = mask + place + column * all.strides[3];
            if (column >= limit) continue;
            if (N > 1 && whole) {
                constexpr int PART = N * sizeof(M) <= 16 ? N : 16 / sizeof(M);   // a single access
                #pragma unroll
                for (int j = 0; j < N; j += PART)
                    reinterpret_cast<Vec<M, PART>&>(parts[i].values[j]) = load<PART>(p + j);
            } else {
                #pragma unroll
                for (int j = 0; j < N; ++j)
                    if (column + j < limit) parts[i].values[j] = p[j * all.strides[3]];
            }
        }
        fill(values);
        each(values, [&](C& value, int i, int j) {
            if constexpr (sizeof(M) == 1)
                value = parts[i].values[j] ? value * scale : -infinity<C>();
            else value = value * scale + to_compute(parts[i].values[j]);
        });
    }
};
