// Sampling: penalties, the token with the highest logit, or a draw by inverse transform sampling, in double, in a few passes over
// a row. The contract is ../sampling.py.
//
// Top-k, top-p and min-p each keep some number of the most likely tokens; the smallest of these numbers counts. To find
// it, tokens are counted in buckets by how far their logits lie below the highest one. Only the bucket in which a limit
// or the draw falls is sorted.
#pragma once

#include <memory>
#include <vector>

#include "floats.h"
#include "team.h"

namespace motet {

constexpr int kDoubles = kRegister / 2;  // doubles that a register holds
typedef double DoublePart __attribute__((vector_size(8 * kDoubles)));
typedef int64_t LongPart __attribute__((vector_size(8 * kDoubles)));
typedef float NarrowPart __attribute__((vector_size(4 * kDoubles)));
typedef int32_t BucketPart __attribute__((vector_size(4 * kDoubles)));

// e^x for x up to 0, to a unit in the last place; 0 below -700.
inline DoublePart exponential(DoublePart x) {
    const DoublePart limited = x < -700.0 ? DoublePart{} - 700.0 : x;
    const DoublePart magic = DoublePart{} + 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to a whole number
    const DoublePart rounded = limited * 1.4426950408889634 + magic, turns = rounded - magic;
    // What is left of x beyond whole multiples of ln 2, and Taylor's series of it to 1 / 13!.
    const DoublePart rest = (limited - turns * 6.93147180369123816490e-01) - turns * 1.90821492927058770002e-10;
    DoublePart series = DoublePart{} + 1.0 / 6227020800.0;
    const double factorials[] = {479001600.0, 39916800.0, 3628800.0, 362880.0, 40320.0, 5040.0, 720.0,
                                 120.0,       24.0,       6.0,       2.0,      1.0,     1.0};
    for (double factorial : factorials) series = series * rest + 1.0 / factorial;
    const LongPart exponent = ((LongPart)rounded << 52) + (int64_t(1023) << 52);  // the low bits are the whole number
    return x < -700.0 ? DoublePart{} : series * (DoublePart)exponent;
}

// Which tokens may be chosen: a bit for each, the lowest first; null: all.
typedef const uint32_t* Mask;

inline bool is_allowed(Mask mask, int64_t token) { return !mask || mask[token / 32] >> token % 32 & 1; }

// The highest of some logits, and their sum, which is NaN if one of them is (or if infinities cancel out).
struct Peak {
    float most, sum;
};

inline Peak peak(const float* logits, int64_t num) {
    int64_t i = 0;
    Floats high = broadcast(-INFINITY), total = broadcast(0);
    for (; i + kLanes <= num; i += kLanes) {
        const Floats own = load(logits + i);
        high = larger(own, high);
        total += own;
    }
    Peak found = {largest(high), sum(total)};
    for (; i < num; i++) found.most = std::max(found.most, logits[i]), found.sum += logits[i];
    return found;
}

// The same of those that a mask allows. Logits of which it allows none are not read.
inline Peak peak(const float* logits, int64_t num, Mask mask) {
    IntPart lane_bits;
    for (int lane = 0; lane < kRegister; lane++) lane_bits[lane] = 1 << lane;
    FloatPart high = FloatPart{} - INFINITY, total = {};
    Peak last = {-INFINITY, 0};  // of a word that the vocabulary ends in
    for (int64_t at = 0; at < num; at += 32) {
        const uint32_t bits = mask[at / 32];
        if (!bits) continue;
        if (at + 32 > num) {
            for (int64_t i = at; i < num; i++)
                if (is_allowed(mask, i)) last.most = std::max(last.most, logits[i]), last.sum += logits[i];
            break;
        }
        for (int lane = 0; lane < 32; lane += kRegister) {
            FloatPart own;
            std::memcpy(&own, logits + at + lane, sizeof own);
            const IntPart on = (IntPart{} + int32_t(bits >> lane)) & lane_bits;
            high = larger(on != 0 ? own : FloatPart{} - INFINITY, high);
            total += on != 0 ? own : FloatPart{};
        }
    }
    return {std::max(last.most, largest(high)), last.sum + sum(total)};
}

// The index of the highest of `vocab` logits that `mask` allows, of equal ones the first; -1 if it is infinite or any of
// them is NaN.
inline int64_t highest(const float* logits, int64_t vocab, Mask mask) {
    constexpr int64_t kBlock = 2048;  // the index is searched only in the block that has the highest logit
    float most = -INFINITY;
    int64_t start = 0;
    for (int64_t at = 0; at < vocab; at += kBlock) {
        const int64_t num = std::min(vocab - at, kBlock);
        const Peak own = mask ? peak(logits + at, num, mask + at / 32) : peak(logits + at, num);
        if (own.sum != own.sum)
            for (int64_t i = at; i < at + num; i++)
                if (logits[i] != logits[i] && is_allowed(mask, i)) return -1;
        if (own.most > most) most = own.most, start = at;
    }
    if (most == INFINITY || most == -INFINITY) return -1;
    while (logits[start] != most || !is_allowed(mask, start)) start++;
    return start;
}

// The fields of `DrawParams` in ../sampling.py in their order, and u: rows of a table of doubles.
struct Draw {
    double temperature, top_k, top_p, min_p, uniform;
};

// Draws tokens, one after the other; keeps its buffers between them.
class Drawing {
  public:
    // A token for one row, of those that `mask` allows. The highest of their logits must be finite.
    int64_t token(const float* logits, int64_t num_tokens, Mask mask, const Draw& how) {
        vocab = num_tokens;
        const bool is_filtered = how.top_k > 0 || how.top_p < 1 || how.min_p > 0;
        // The smallest temperatures have an infinite inverse, so they are raised to 1e-300. Tokens below the highest
        // logit have a probability of zero either way.
        weigh(logits, mask, 1 / std::max(how.temperature, 1e-300), is_filtered);
        if (!is_filtered) return draw_of_all(how.uniform);
        count();
        int64_t kept = how.top_k > 0 ? std::min(vocab, int64_t(how.top_k)) : vocab;
        if (how.top_p < 1) kept = std::min(kept, num_within(how.top_p * (how.top_k > 0 ? mass_of(kept) : total)));
        if (how.min_p > 0) {
            int64_t likely = 0;
            for (int64_t i = 0; i < vocab; i++) likely += weights[size_t(i)] >= how.min_p;
            kept = std::min(kept, likely);
        }
        return draw_of_likeliest(std::max<int64_t>(1, kept), how.uniform);
    }

  private:
    static constexpr int kBuckets = 4096;
    static constexpr double kPerNat = 32;   // buckets for each unit of logit / temperature
    static constexpr int64_t kBlock = 512;  // tokens whose sum is kept, so that a draw need not add all weights again

    int64_t vocab;
    double total;
    std::vector<double> weights;   // by token, proportional to its probability; the likeliest token's is 1
    std::vector<double> blocks;    // by block of tokens, the sum of their weights
    std::vector<int32_t> bucket;   // by token
    double mass[kBuckets];         // by bucket, the sum of its tokens' weights
    int64_t size[kBuckets];        // by bucket, its number of tokens
    std::vector<int32_t> ordered;  // the tokens of one bucket, the likeliest first, of equal ones the first

    // Sets weights, blocks and total; with a filter the buckets, too.
    void weigh(const float* logits, Mask mask, double inverse, bool is_filtered) {
        const float highest = (mask ? peak(logits, vocab, mask) : peak(logits, vocab)).most;
        BucketPart lane_bits;
        for (int lane = 0; lane < kDoubles; lane++) lane_bits[lane] = 1 << lane;
        const int64_t padded = (vocab + kDoubles - 1) / kDoubles * kDoubles;
        if (int64_t(weights.size()) < padded) weights.resize(size_t(padded)), bucket.resize(size_t(padded));
        blocks.clear();
        total = 0;
        for (int64_t start = 0; start < vocab; start += kBlock) {
            const int64_t end = std::min(vocab, start + kBlock);
            DoublePart sums = {};
            for (int64_t i = start; i < end; i += kDoubles) {
                NarrowPart narrow = NarrowPart{} - INFINITY;
                std::memcpy(&narrow, logits + i, size_t(std::min<int64_t>(kDoubles, end - i)) * sizeof(float));
                if (mask) {
                    const BucketPart on = (BucketPart{} + int32_t(mask[i / 32] >> i % 32)) & lane_bits;
                    narrow = on != 0 ? narrow : NarrowPart{} - INFINITY;
                }
                const DoublePart below = (__builtin_convertvector(narrow, DoublePart) - double(highest)) * inverse;
                const DoublePart weight = exponential(below);
                std::memcpy(weights.data() + i, &weight, sizeof weight);
                sums += weight;
                if (!is_filtered) continue;
                const DoublePart at = below * -kPerNat;
                const DoublePart last = DoublePart{} + double(kBuckets - 1);
                const BucketPart own = __builtin_convertvector(at < last ? at : last, BucketPart);
                std::memcpy(bucket.data() + i, &own, sizeof own);
            }
            double sum = 0;
            for (int lane = 0; lane < kDoubles; lane++) sum += sums[lane];
            blocks.push_back(sum);
            total += sum;
        }
    }

    // Draws one of all tokens, which are in the order of the vocabulary.
    int64_t draw_of_all(double uniform) const {
        const double target = uniform * total;
        double before = 0;
        size_t block = 0;
        while (block + 1 < blocks.size() && before + blocks[block] <= target) before += blocks[block++];
        for (int64_t i = int64_t(block) * kBlock; i < vocab; i++)
            if ((before += weights[size_t(i)]) > target) return i;
        int64_t last = vocab - 1;  // reached if rounding made the running sum too small
        while (weights[size_t(last)] == 0) last--;
        return last;
    }

    // Sets mass and size of all buckets.
    void count() {
        std::fill(mass, mass + kBuckets, 0.0);
        std::fill(size, size + kBuckets, 0);
        for (int64_t i = 0; i < vocab; i++) {
            const int32_t own = bucket[size_t(i)];
            mass[own] += weights[size_t(i)];
            size[own]++;
        }
    }

    // Sets `ordered` to the tokens of bucket `own`.
    void order(int own) {
        ordered.clear();
        for (int64_t i = 0; i < vocab; i++)
            if (bucket[size_t(i)] == own) ordered.push_back(int32_t(i));
        std::stable_sort(ordered.begin(), ordered.end(),
                         [this](int32_t a, int32_t b) { return weights[size_t(a)] > weights[size_t(b)]; });
    }

    // The sum of the first `number` of `ordered`.
    double sum_of(int64_t number) const {
        double sum = 0;
        for (int64_t i = 0; i < number; i++) sum += weights[size_t(ordered[size_t(i)])];
        return sum;
    }

    // The sum of the weights of the `kept` likeliest tokens.
    double mass_of(int64_t kept) {
        double sum = 0;
        for (int own = 0; own < kBuckets; kept -= size[own++]) {
            if (kept <= size[own]) {
                if (kept == size[own]) return sum + mass[own];
                order(own);
                return sum + sum_of(kept);
            }
            sum += mass[own];
        }
        return sum;
    }

    // The number of tokens for which the likelier ones have less than `limit` together.
    int64_t num_within(double limit) {
        double before = 0;
        int64_t kept = 0;
        for (int own = 0; own < kBuckets; own++) {
            if (before + mass[own] < limit) {
                before += mass[own], kept += size[own];
                continue;
            }
            order(own);
            for (int32_t token : ordered) {
                if (before >= limit) break;
                before += weights[size_t(token)], kept++;
            }
            return kept;
        }
        return kept;
    }

    // Draws one of the `kept` likeliest tokens, which are in the order of their probabilities.
    int64_t draw_of_likeliest(int64_t kept, double uniform) {
        const double target = uniform * mass_of(kept);
        double before = 0;
        for (int own = 0; own < kBuckets; kept -= size[own++]) {
            const bool is_last = kept <= size[own];
            if (!is_last && before + mass[own] <= target) {
                before += mass[own];
                continue;
            }
            if (size[own] == 0) continue;
            order(own);
            const int64_t number = std::min(kept, size[own]);
            for (int64_t i = 0; i < number; i++)
                if ((before += weights[size_t(ordered[size_t(i)])]) > target) return ordered[size_t(i)];
            if (is_last) {  // reached if rounding made the running sum too small
                int64_t i = number - 1;
                while (i > 0 && weights[size_t(ordered[size_t(i)])] == 0) i--;
                return ordered[size_t(i)];
            }
        }
        return 0;
    }
};

// See `Penalty` in ../sampling.py; the caller passes these as rows of two tables.
struct PenalisedRow {
    int64_t row, num_tokens;
    const int32_t *token_ids, *counts;
};
struct PenaltyFactors {  // `PENALTIES` in ../sampling.py
    double repetition, presence, frequency;
};

// Changes the logits of the tokens that some rows' sequences have.
inline void penalise(float* logits, int64_t stride, const PenalisedRow* rows, int64_t num_rows,
                     const PenaltyFactors* factors, int num_threads) {
    Team::of_process().share(num_threads, num_rows, [&](int64_t i) {
        const PenalisedRow& own = rows[i];
        const float repetition = float(factors[i].repetition);
        float* row = logits + own.row * stride;
        for (int64_t k = 0; k < own.num_tokens; k++) {
            float& logit = row[own.token_ids[k]];
            const float repeated = logit > 0 ? logit / repetition : logit * repetition;
            const int32_t count = own.counts[k];
            const double taken = count > 0 ? factors[i].presence + factors[i].frequency * count : 0.0;
            logit = repeated - float(taken);
        }
    });
}

// A token for each of `num_rows` of the rows of logits. `masks`: by row; null: there are none.
inline void draw(const float* logits, int64_t stride, int64_t vocab, const Mask* masks, const int64_t* rows,
                 int64_t num_rows, const Draw* draws, int64_t* tokens, int num_threads) {
    Team::of_process().share(num_threads, num_rows, [&](int64_t i) {
        static thread_local std::unique_ptr<Drawing> kept;
        if (!kept) kept.reset(new Drawing);
        const int64_t row = rows[i];
        tokens[i] = kept->token(logits + row * stride, vocab, masks ? masks[row] : nullptr, draws[i]);
    });
}

// The highest token of each of `num_rows` rows of logits. `masks`: by row; null: there are none.
inline void highest(const float* logits, int64_t stride, int64_t vocab, const Mask* masks, int64_t num_rows,
                    int64_t* tokens, int num_threads) {
    Team::of_process().share(num_threads, num_rows, [&](int64_t row) {
        tokens[row] = highest(logits + row * stride, vocab, masks ? masks[row] : nullptr);
    });
}

}  // namespace motet
