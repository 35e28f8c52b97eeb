// A mixture of experts within a step: which experts compute each row, and what their outputs add up to. The products
// are those of linear.h; the contract is ../experts.py.
#pragma once

#include <vector>

#include "lora.h"
#include "rows.h"

namespace motet {

// Pairs of a row and one of its experts, sorted by expert; the pairs of an expert are in the order of their rows.
struct ExpertPairs {
    int64_t top_k = 0;             // experts of a row
    std::vector<int64_t> rows;     // of each pair
    std::vector<int64_t> offsets;  // pairs of expert e are offsets[e] to offsets[e + 1]
    std::vector<float> weights;    // of each pair's output in its row's sum
    std::vector<int64_t> places;   // [rows, top_k]: a row's pairs, in order
};

struct ChosenExpert {
    int64_t expert;
    float weight;
};

// How scores choose a row's experts; see ../experts.py.
struct Routing {
    int64_t top_k;
    bool is_normalized, is_sigmoid;
    int64_t num_groups, top_groups, group_best;  // `group_best`: 1 or 2
    float scale, eps;
    const float* bias;     // null: none
    const float* factors;  // of the experts' weights; null: none

    // The experts are the likeliest, by the softmax of their scores.
    bool is_ordinary() const { return !is_sigmoid && num_groups == 1 && scale == 1.0f && eps == 0.0f && !bias; }
};

// Inserts an expert into those of a row, of which there are `count`, in the order of their numbers.
inline void insert_expert(ChosenExpert* to, int64_t count, ChosenExpert chosen) {
    for (; count > 0 && to[count - 1].expert > chosen.expert; count--) to[count] = to[count - 1];
    to[count] = chosen;
}

// The `top_k` likeliest experts of a row in the order of their numbers. Of equally likely ones the first count as the
// likelier. `spare`: for `num_experts` floats in whole vectors.
template <class T>
void choose_of_row(const T* scores, int64_t num_experts, int64_t top_k, bool is_normalized, float* spare,
                   ChosenExpert* to) {
    Floats best = broadcast(-INFINITY), totals = {};
    const auto each = [&](auto use) {
        for (int64_t i = 0; i < num_experts; i += kLanes) use(i, int32_t(std::min<int64_t>(kLanes, num_experts - i)));
    };
    each([&](int64_t i, int32_t count) {
        best = larger(best, keep_lanes(load(scores + i, count), -1, count - 1, -INFINITY));
    });
    const float highest = largest(best);
    each([&](int64_t i, int32_t count) {
        const Floats likely = keep_lanes(exponential(load(scores + i, count) - highest), -1, count - 1, 0.0f);
        totals += likely;
        store(spare + i, likely);
    });
    const float total = sum(totals);
    float chosen_total = 0;
    for (int64_t j = 0; j < top_k; j++) {
        int64_t expert = -1;
        for (int64_t e = 0; e < num_experts; e++)
            if (!(spare[e] < 0) && (expert < 0 || spare[e] > spare[expert])) expert = e;
        const float weight = spare[expert] / total;
        chosen_total += weight;
        spare[expert] = -1;  // taken
        insert_expert(to, j, {expert, weight});
    }
    if (is_normalized)
        for (int64_t j = 0; j < top_k; j++) to[j].weight /= chosen_total;
}

// The largest of `count` numbers; -1: all are minus infinity. The first of equal ones.
inline int64_t largest_place(const float* numbers, int64_t count) {
    int64_t place = -1;
    for (int64_t i = 0; i < count; i++)
        if (numbers[i] > (place < 0 ? -INFINITY : numbers[place])) place = i;
    return place;
}

// Sets the choices of all groups but the `top_groups` whose best or two best have the highest sums to minus infinity.
inline void close_groups(float* choices, int64_t num_experts, const Routing& routing, float* sums) {
    const int64_t num_groups = routing.num_groups, top_groups = routing.top_groups;
    const int64_t size = num_experts / num_groups;
    for (int64_t g = 0; g < num_groups; g++) {
        float first = -INFINITY, second = -INFINITY;
        for (int64_t e = g * size; e < (g + 1) * size; e++) {
            second = std::max(second, std::min(first, choices[e]));
            first = std::max(first, choices[e]);
        }
        sums[g] = routing.group_best == 1 ? first : first + second;
    }
    for (int64_t i = 0; i < top_groups; i++) {
        const int64_t best = largest_place(sums, num_groups);
        if (best >= 0) sums[best] = NAN;  // open: no comparison finds it again
    }
    for (int64_t g = 0; g < num_groups; g++)
        if (!std::isnan(sums[g])) std::fill(choices + g * size, choices + (g + 1) * size, -INFINITY);
}

// The experts of a row by any routing. `spare`: for two numbers of each expert and one of each group, in whole vectors.
template <class T>
void route_row(const T* logits, int64_t num_experts, const Routing& routing, float* spare, ChosenExpert* to) {
    float *scores = spare, *choices = spare + num_experts + kLanes, *sums = choices + num_experts + kLanes;
    Floats best = broadcast(-INFINITY), totals = {};
    const auto each = [&](auto use) {
        for (int64_t i = 0; i < num_experts; i += kLanes) use(i, int32_t(std::min<int64_t>(kLanes, num_experts - i)));
    };
    if (routing.is_sigmoid) {
        each([&](int64_t i, int32_t count) {
            store(scores + i, 1.0f / (1.0f + exponential(-load(logits + i, count))));
        });
    } else {
        each([&](int64_t i, int32_t count) {
            best = larger(best, keep_lanes(load(logits + i, count), -1, count - 1, -INFINITY));
        });
        const float highest = largest(best);
        each([&](int64_t i, int32_t count) {
            const Floats likely = keep_lanes(exponential(load(logits + i, count) - highest), -1, count - 1, 0.0f);
            totals += likely;
            store(scores + i, likely);
        });
        const float total = sum(totals);
        for (int64_t e = 0; e < num_experts; e++) scores[e] /= total;
    }
    if (routing.bias || !routing.is_sigmoid)
        for (int64_t e = 0; e < num_experts; e++) choices[e] = scores[e] + (routing.bias ? routing.bias[e] : 0.0f);
    else if (routing.num_groups > 1)
        std::copy(scores, scores + num_experts, choices);
    else  // sigmoids near 1 are equal
        each([&](int64_t i, int32_t count) { store(choices + i, load(logits + i, count)); });
    if (routing.num_groups > 1) close_groups(choices, num_experts, routing, sums);
    float total = routing.eps;
    for (int64_t j = 0; j < routing.top_k; j++) {
        const int64_t expert = std::max<int64_t>(largest_place(choices, num_experts), 0);
        insert_expert(to, j, {expert, scores[expert]});
        total += scores[expert];
        choices[expert] = -INFINITY;
    }
    const float factor = routing.is_normalized ? routing.scale / total : routing.scale;
    for (int64_t j = 0; j < routing.top_k; j++) to[j].weight *= factor;
}

// The pairs of all rows, by their scores `[num_rows, num_experts]`.
template <class T>
void choose_experts(const T* scores, int64_t num_rows, int64_t num_experts, const Routing& routing, ExpertPairs& pairs,
                    int num_threads) {
    static thread_local std::vector<ChosenExpert> kept;
    const int64_t top_k = routing.top_k, num_pairs = num_rows * top_k;
    kept.resize(size_t(num_pairs));
    ChosenExpert* chosen = kept.data();
    share_rows(num_rows, num_experts * top_k, num_threads, [&](int64_t start, int64_t end) {
        static thread_local std::vector<float> spare;
        spare.resize(size_t(2 * (num_experts + kLanes) + routing.num_groups));
        const bool is_ordinary = routing.is_ordinary();
        for (int64_t row = start; row < end; row++) {
            const T* of_row = scores + row * num_experts;
            if (is_ordinary)
                choose_of_row(of_row, num_experts, top_k, routing.is_normalized, spare.data(), chosen + row * top_k);
            else
                route_row(of_row, num_experts, routing, spare.data(), chosen + row * top_k);
        }
    });
    pairs.top_k = top_k;
    pairs.offsets.assign(size_t(num_experts + 1), 0);
    pairs.rows.resize(size_t(num_pairs)), pairs.weights.resize(size_t(num_pairs));
    pairs.places.resize(size_t(num_pairs));
    for (int64_t i = 0; i < num_pairs; i++) pairs.offsets[size_t(chosen[i].expert + 1)]++;
    for (int64_t e = 0; e < num_experts; e++) pairs.offsets[size_t(e + 1)] += pairs.offsets[size_t(e)];
    static thread_local std::vector<int64_t> next;  // place for each expert's next pair
    next.assign(pairs.offsets.begin(), pairs.offsets.end());
    for (int64_t i = 0; i < num_pairs; i++) {
        const int64_t at = next[size_t(chosen[i].expert)]++;
        const float factor = routing.factors ? routing.factors[chosen[i].expert] : 1.0f;
        pairs.rows[size_t(at)] = i / top_k, pairs.weights[size_t(at)] = chosen[i].weight * factor;
        pairs.places[size_t(i)] = at;
    }
}

// The row of each pair.
template <class T>
void take_pairs(const ExpertPairs& pairs, const T* x, int64_t width, T* to, int num_threads) {
    share_rows(int64_t(pairs.rows.size()), width, num_threads, [&](int64_t start, int64_t end) {
        for (int64_t i = start; i < end; i++)
            std::memcpy(to + i * width, x + pairs.rows[size_t(i)] * width, size_t(width) * sizeof(T));
    });
}

// The row of each pair, times the pair's weight, which is 1 from then on.
template <class T>
void take_scaled(ExpertPairs& pairs, const T* x, int64_t width, T* to, int num_threads) {
    share_rows(int64_t(pairs.rows.size()), width, num_threads, [&](int64_t start, int64_t end) {
        for (int64_t i = start; i < end; i++) {
            const T* row = x + pairs.rows[size_t(i)] * width;
            const Floats weight = rounded<T>(broadcast(pairs.weights[size_t(i)]));
            for (int64_t k = 0; k < width; k += kLanes)
                store(to + i * width + k, load(row + k, width - k) * weight, width - k);
        }
    });
    std::fill(pairs.weights.begin(), pairs.weights.end(), 1.0f);
}

// The weighted sum of each row's pairs.
template <class T>
void combine_pairs(const ExpertPairs& pairs, const T* x, int64_t width, T* to, int num_threads) {
    const int64_t num_rows = int64_t(pairs.rows.size()) / pairs.top_k;
    share_rows(num_rows, width * pairs.top_k, num_threads, [&](int64_t start, int64_t end) {
        for (int64_t row = start; row < end; row++) {
            const int64_t* places = pairs.places.data() + row * pairs.top_k;
            for (int64_t i = 0; i < width; i += kLanes) {
                const int64_t count = width - i;
                Floats total = {};
                for (int64_t j = 0; j < pairs.top_k; j++)
                    total += load(x + places[j] * width + i, count) * pairs.weights[size_t(places[j])];
                store(to + row * width + i, total, count);
            }
        }
    });
}

// y += sigmoid(gate) * x, with one gate for each row. All but the sum is rounded before it is used, as in torch.
template <class T>
void add_gated(const T* x, const T* gates, T* y, int64_t num_rows, int64_t width, int num_threads) {
    share_rows(num_rows, width, num_threads, [&](int64_t start, int64_t end) {
        for (int64_t row = start; row < end; row++) {
            const Floats gate = rounded<T>(1.0f / (1.0f + exponential(-broadcast(to_float(gates[row])))));
            for (int64_t i = row * width; i < (row + 1) * width; i += kLanes) {
                const int64_t count = (row + 1) * width - i;
                store(y + i, load(y + i, count) + rounded<T>(load(x + i, count) * gate), count);
            }
        }
    });
}

// Rows of a step whose adapter has parts for experts. The caller passes these as rows of an int64 table, in this order.
struct ExpertSegment {
    int64_t start, end, first_page;
    const int64_t* modules;  // [experts, modules, 4]: rank, rows of A, and where A and B begin
};

// The parts of adapters that pairs use, of `num_modules` modules that share an input. Neighbours with one expert and one
// adapter are one part. Sets `length` to the number of elements of their shrunk vectors.
inline void find_expert_parts(const ExpertPairs& pairs, const ExpertSegment* segments, int64_t num_segments,
                              int64_t all_modules, int64_t first_module, int64_t num_modules, int64_t num_in,
                              int64_t num_out, std::vector<LoraPart>& parts, int64_t& length) {
    parts.clear(), length = 0;
    const auto rows = pairs.rows.begin();
    for (size_t expert = 0; expert + 1 < pairs.offsets.size(); expert++) {
        const auto first = rows + pairs.offsets[expert], last = rows + pairs.offsets[expert + 1];
        for (int64_t s = 0; s < num_segments && first != last; s++) {
            const int64_t start = std::lower_bound(first, last, segments[s].start) - rows;
            const int64_t end = std::lower_bound(first, last, segments[s].end) - rows;
            for (int64_t module = 0; module < num_modules && start < end; module++) {
                const int64_t* at = segments[s].modules + (int64_t(expert) * all_modules + first_module + module) * 4;
                if (at[0] == 0) continue;
                parts.push_back({start, end, segments[s].first_page, at[0], at[1], at[2], at[3], length,
                                 module * num_out, num_in, num_out});
                length += (end - start) * at[1];
            }
        }
    }
}

}  // namespace motet
