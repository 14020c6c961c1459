// The next token of each sequence, drawn from its logits: a block a sequence, which reads its row
// of float32 logits from L1 and L2 as often as sampling needs. Greedy: once. Otherwise once to find
// the largest, some twenty times for each of top-k and top-p, whose threshold is found by
// bisection, and twice to draw.
//
// ops/sampling.py has the same formulas in NumPy, and both take the same tokens: weights are whole
// numbers of 2^-40, whose sums do not depend on their order, made by operations of double that
// round alike everywhere, and nothing is contracted to fma.
//
// The naive kernel, a thread a sequence, greedy or from all tokens (u: uniform in [0, 1)):
//
//   int best = 0;
//   for (int t = 1; t < vocabulary; ++t) if (logits[t] > logits[best]) best = t;
//   float sum = 0, drawn = 0;
//   for (int t = 0; t < vocabulary; ++t) sum += exp((logits[t] - logits[best]) / temperature);
//   int token = 0;
//   for (; token < vocabulary - 1; ++token)
//       if ((drawn += exp((logits[token] - logits[best]) / temperature)) > u * sum) break;
//
// top_k and top_p keep the tokens from a threshold on. Phases: the largest logit; the thresholds of
// top-k and top-p; draw; write the token.
//
// options: -fmad=false
// instantiate: sample_tokens
#include "overlap.cuh"
#include "philox.cuh"
#include "reduce.cuh"

constexpr int THREADS = 1024;

// exp(x) for x <= 0 as a whole number of 2^-40.
__device__ inline Word weight_of(double x) {
    if (!(x > -27.7)) return 0;
    const double n = rint(x * 1.4426950408889634);
    const double r = (x - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10;
    double sum = 1.0 / 6227020800.0;   // 1 / 13!
    const double factors[13] = {479001600., 39916800., 3628800., 362880., 40320., 5040., 720.,
                                120.,       24.,       6.,       2.,      1.,     1.};
    #pragma unroll
    for (int i = 0; i < 13; ++i) sum = sum * r + 1.0 / factors[i];
    return Word(sum * __longlong_as_double((1063 + (long long)n) << 52));   // 2^(40 + n)
}

struct TokenMass {
    Word weight, count;
    __device__ TokenMass operator+(TokenMass other) const {
        return {weight + other.weight, count + other.count};
    }
};

// A row of logits, and the order of its tokens: keys fall with the logit, equal ones with the
// number of the token, and all differ.
struct OrderedLogits {
    const float* logits;
    const unsigned char* seen;   // or null
    float penalty;
    int vocabulary;
    double largest, temperature;

    __device__ float logit(int token) const { return adjusted(logits[token], token); }
    __device__ float adjusted(float x, int token) const {
        x += 0.f;   // -0 becomes 0
        if (seen != nullptr && seen[token]) x = x > 0.f ? x / penalty : x * penalty;
        return x;
    }
    __device__ Word key(int token) const { return key_of(logit(token), token); }
    __device__ Word key_of(float x, int token) const {
        const unsigned bits = __float_as_uint(x);
        const unsigned order = x != x ? 0xffffffffu : bits >> 31 ? ~bits : bits | 0x80000000u;
        return Word(order) << 32 | (0xffffffffu - token);
    }
    __device__ Word weight(int token) const {
        return weight_of((double(logit(token)) - largest) / temperature);
    }

    // The weight of the tokens with keys from `low` up to, but not including, `high`.
    __device__ TokenMass between(Word low, Word high, bool weighted) const {
        TokenMass own = {0, 0};
        for (int token = threadIdx.x; token < vocabulary; token += THREADS) {
            const Word found = key(token);
            if (found >= low && found < high)
                own = own + TokenMass{weighted ? weight(token) : 1, 1};
        }
        return block_sum(own);
    }

    // A key such that the tokens from it on come to `target` or more, and without the last of them
    // to less. Those from `low` on, `count` of them, do come to that.
    __device__ Word threshold(Word low, Word high, Word count, Word target, bool weighted) const {
        Word above = 0;   // the weight of the tokens from `high` on
        while (count > 1) {
            const Word middle = low + (high - low) / 2;
            const TokenMass upper = between(middle, high, weighted);
            if (above + upper.weight >= target) {
                low = middle;
                count = upper.count;
            } else {
                high = middle;
                count -= upper.count;
                above += upper.weight;
            }
        }
        return low;
    }
};

// tokens: (sequences, capacity), of which counts[b] are known; the next one is added, to `latest`
// too, and the cache's lengths[b] grows by the one that was read. A row of logits begins `pitch`
// after the one before. flags: 1 is added once a token of `stops` came, 2 where the logits were not
// finite. seen: (sequences, vocabulary), 1 for each token that occurred, or null without a penalty.
// Temperature 0 is greedy; top_k 0 and top_p 1 exclude nothing.
__global__ void __launch_bounds__(THREADS)
sample_tokens(long long* tokens, int* counts, int* lengths, long long* latest, unsigned char* flags,
              const float* logits, unsigned char* seen, const Word* seeds, const long long* stops,
              int stop_count, long long capacity, long long pitch, int vocabulary, float penalty,
              double temperature, int top_k, double top_p) {
    __shared__ int chosen;
    __shared__ Word warps[THREADS / 32];
    const int b = blockIdx.x;
    wait_for_previous_kernel();
    if (seen != nullptr) seen += b * (long long)vocabulary;
    OrderedLogits row = {logits + b * pitch, seen, penalty, vocabulary, 0, temperature};

    // The largest logit.
    Word best = 0;
    constexpr int AHEAD = 16;   // logits that a thread has under way
    for (int start = threadIdx.x; start < vocabulary; start += AHEAD * THREADS) {
        float found[AHEAD];
        #pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const int token = start + i * THREADS;
            if (token < vocabulary) found[i] = row.logits[token];
        }
        #pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const int token = start + i * THREADS;
            if (token < vocabulary)
                best = max(best, row.key_of(row.adjusted(found[i], token), token));
        }
    }
    best = block_reduce(best, Word(0), [](Word a, Word b) { return b > a ? b : a; });
    int token = int(0xffffffffu - unsigned(best));
    row.largest = row.logit(token);
    const bool broken = !(row.largest - row.largest == 0);

    if (temperature > 0 && !broken) {
        // The thresholds of top_k and top_p.
        const Word high = best + 1;
        Word low = 0;
        if (top_k > 0 && top_k < vocabulary)
            low = row.threshold(low, high, vocabulary, top_k, false);
        TokenMass kept = row.between(low, high, true);
        if (top_p < 1) {
            const double target = ceil(top_p * double(kept.weight));
            low = row.threshold(low, high, kept.count, min(max(Word(target), Word(1)), kept.weight),
                                true);
            kept = row.between(low, high, true);
        }
        // Draw.
        const Word drawn = __umul64hi(philox(seeds[b], counts[b], 0, 0).values[0], kept.weight);

        // Tokens in the order of their numbers: the one whose weight the drawn number falls into.
        const int each = (vocabulary + THREADS - 1) / THREADS, lane = threadIdx.x % 32;
        const int first = threadIdx.x * each, end = min(first + each, vocabulary);
        Word own = 0;
        for (int t = first; t < end; ++t) own += row.key(t) >= low ? row.weight(t) : 0;
        Word before = own;
        for (int offset = 1; offset < 32; offset *= 2) {
            const Word other = __shfl_up_sync(0xffffffff, before, offset);
            before += lane >= offset ? other : 0;
        }
        if (lane == 31) warps[threadIdx.x / 32] = before;
        __syncthreads();
        for (int w = 0; w < int(threadIdx.x) / 32; ++w) before += warps[w];
        before -= own;
        if (drawn >= before && drawn - before < own) {   // true in one thread alone
            for (int t = first; t < end; ++t) {
                const Word weight = row.key(t) >= low ? row.weight(t) : 0;
                if (drawn - before < weight) {
                    chosen = t;
                    break;
                }
                before += weight;
            }
        }
        __syncthreads();
        token = chosen;
    }

    // Write the token and whether the sequence ends.
    if (threadIdx.x > 0) return;
    bool stopped = false;
    for (int i = 0; i < stop_count; ++i) stopped |= stops[i] == token;
    flags[b] |= (stopped ? 1 : 0) | (broken ? 2 : 0);
    if (seen != nullptr) seen[token] = 1;
    tokens[b * capacity + counts[b]] = latest[b] = token;
    counts[b] += 1;
    lengths[b] += 1;
}
