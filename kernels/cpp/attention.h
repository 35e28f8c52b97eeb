// Paged attention with online softmax (FlashAttention-2, arXiv 2307.08691), 64 keys at a time, which are read in their
// pages. The contract is ../attention.py.
#pragma once

#include <memory>
#include <optional>
#include <type_traits>
#include <vector>

#include "team.h"
#include "tiles.h"
#include "vectors.h"

namespace motet {

constexpr int64_t kMostDims = 576;   // elements of a head
constexpr int64_t kTilesAhead = 3;   // tiles of 16 keys that are prefetched, at least
constexpr int kTiles = 4;            // tiles of 16 keys that get their weights together
constexpr int64_t kManyQueries = 8;  // for this many query rows and more, pairs of rows of V are made once for all
// Vectors of scores, rows of them, and rows of output, whose sums fit in registers.
#if defined(__AVX512F__)
constexpr int kScores = 16, kScoreRows = 4, kSumRows = 4;
#elif defined(__AVX__)
constexpr int kScores = 6, kScoreRows = 6, kSumRows = 3;
#else
constexpr int kScores = 1, kScoreRows = 4, kSumRows = 1;
#endif
constexpr int64_t kAttentionBlocks = 8;  // blocks of tasks for each thread
constexpr int64_t kNearKV = 1 << 19;  // bytes of a sequence in a layer that the second cache level holds for all heads
// Query rows that share the keys of a tile: rows times heads of a group.
#ifdef MOTET_TILES
constexpr int64_t kMostQueries = 64;  // products are so fast that making the tiles of keys would take most of the time
#else
constexpr int64_t kMostQueries = 32;
#endif

template <class T>
struct AttentionCall {
    const T* q;
    T* out;  // [rows, heads, dim], contiguous
    const T* kv;
    const int64_t *query_starts, *context_lens;
    const int32_t* pages;  // of all sequences
    const int64_t* page_starts;
    int64_t num_sequences;
    int64_t num_heads, num_kv_heads, dim, block_size;
    int64_t q_row_stride, q_head_stride, page_stride, v_offset, slot_stride;  // elements
    float scale;
    int64_t window;      // 0: none; below 0: chunks of as many tokens
    float softcap;       // 0: none
    const float* sinks;  // a score of each head that has no value; null: there are none

    // Newest tokens that a row sees, itself included; 0: all.
    int64_t reach(int64_t position) const { return window >= 0 ? window : position % -window + 1; }
};

// Tiles of 16 keys, transposed for products with queries: element d of all keys of a tile lies side by side.
template <class T>
struct KeyTiles {
    typedef float Query;  // to what the elements of a query are converted
    static constexpr int64_t words(int64_t dim) { return dim * kLanes; }  // floats of one tile

    static void take(const T* const* rows, int64_t dim, float* to) {
        for (int64_t d = 0; d < dim; d += kLanes) transpose(rows, d, dim - d, to + d * kLanes);
    }

    // Writes the scores of `kRows` queries for `kCount` tiles to `[kRows, kTiles]`.
    template <int kRows, int kCount>
    static void scores(const float* tiles, const Query* const* q, int64_t dim, Floats* to) {
        Floats totals[kRows][kCount] = {};
        for (int64_t d = 0; d < dim; d++)
            for (int t = 0; t < kCount; t++) {
                const Floats keys = load(tiles + t * words(dim) + d * kLanes);
                for (int m = 0; m < kRows; m++) totals[m][t] += keys * q[m][d];
            }
        for (int m = 0; m < kRows; m++)
            for (int t = 0; t < kCount; t++) to[m * kTiles + t] = totals[m][t];
    }
};

#ifdef MOTET_BF16_PRODUCTS
// Here elements 2d and 2d + 1 of all keys of a tile lie side by side, as the CPU multiplies them.
template <>
struct KeyTiles<Bfloat16> {
    typedef Bfloat16 Query;
    static constexpr int64_t words(int64_t dim) { return (dim / 2 + kLanes - 1) / kLanes * kLanes * kLanes; }

    static void take(const Bfloat16* const* rows, int64_t dim, float* to) {
        for (int64_t pair = 0; 2 * pair < dim; pair += kLanes)
            transpose((const float* const*)rows, pair, dim / 2 - pair, to + pair * kLanes);
    }

    template <int kRows, int kCount>
    static void scores(const float* tiles, const Bfloat16* const* q, int64_t dim, Floats* to) {
        __m512 totals[kRows][kCount];
        for (int m = 0; m < kRows; m++)
            for (int t = 0; t < kCount; t++) totals[m][t] = _mm512_setzero_ps();
        for (int64_t pair = 0; 2 * pair < dim; pair++) {
            __m512bh keys[kCount];
            for (int t = 0; t < kCount; t++)
                std::memcpy(&keys[t], tiles + t * words(dim) + pair * kLanes, sizeof keys[t]);
            for (int m = 0; m < kRows; m++) {
                uint32_t own;
                std::memcpy(&own, q[m] + 2 * pair, sizeof own);
                const __m512bh query = (__m512bh)_mm512_set1_epi32(int(own));
                for (int t = 0; t < kCount; t++) totals[m][t] = _mm512_dpbf16_ps(totals[m][t], query, keys[t]);
            }
        }
        for (int m = 0; m < kRows; m++)
            for (int t = 0; t < kCount; t++) to[m * kTiles + t] = (Floats)totals[m][t];
    }
};
#endif

// A query with the elements that `KeyTiles` takes: `from` itself, or a converted copy in `spare`.
template <class T>
inline const T* query_of(const T* from, int64_t, T*) {
    return from;
}

inline const float* query_of(const Bfloat16* from, int64_t dim, float* spare) {
    for (int64_t d = 0; d < dim; d += kLanes) store(spare + d, load(from + d, dim - d), dim - d);
    return spare;
}

// Walks a sequence's tokens through its pages, 16 at a time.
template <class T>
struct TokenWalk {
    const AttentionCall<T>& call;
    const int32_t* pages;
    int64_t token, page, slot;

    TokenWalk(const AttentionCall<T>& call, int64_t sequence, int64_t first)
        : call(call), pages(call.pages + call.page_starts[sequence]), token(first), page(first / call.block_size),
          slot(first % call.block_size) {}

    // Prefetches K and V of the next `count` tokens below `end`.
    void prefetch(int64_t count, int64_t end, int64_t head_offset, int64_t dim) {
        const int64_t step = 64 / int64_t(sizeof(T));
        for (int64_t i = 0; i < count && token < end; i++, token++) {
            const T* k = call.kv + pages[page] * call.page_stride + slot * call.slot_stride + head_offset;
            for (int64_t d = 0; d < dim; d += step) {
                __builtin_prefetch(k + d, 0, 2);
                __builtin_prefetch(k + call.v_offset + d, 0, 2);
            }
            if (++slot == call.block_size) slot = 0, page++;
        }
    }

    // K and V of the next 16 tokens; `zeros` for tokens from `end` on, so that nothing beyond the context is read.
    void next(int64_t end, int64_t head_offset, const T* zeros, const T** k, const T** v) {
        for (int i = 0; i < kLanes; i++, token++) {
            if (token >= end) {
                k[i] = v[i] = zeros;
                continue;
            }
            k[i] = call.kv + pages[page] * call.page_stride + slot * call.slot_stride + head_offset;
            v[i] = k[i] + call.v_offset;
            if (++slot == call.block_size) slot = 0, page++;
        }
    }
};

template <class T>
struct AttentionScratch {
    typedef typename RowPair<T>::Factors Factors;
    typedef typename KeyTiles<T>::Query Query;
    static constexpr int kPairs = kTiles * kLanes / 2;
    alignas(64) float keys[kTiles * KeyTiles<T>::words(kMostDims)];
    alignas(64) float totals[kMostQueries * kMostDims];
    alignas(64) Factors weights[kMostQueries][kPairs];
    alignas(64) T zeros[kMostDims] = {};
    alignas(64) Floats scores[kMostQueries][kTiles];  // where they are computed in tiles
    RowPair<T> values[kPairs];                        // pairs of rows of V, for one span of columns
    Floats weight_sum[kMostQueries];
    const Query* q[kMostQueries];
    Query spare[kMostQueries * kMostDims];  // converted queries
    int64_t position[kMostQueries];
    float highest[kMostQueries];
};

// The softmax weights of some tiles of keys for one query, relative to the highest score so far. When a score is
// higher, the totals so far are scaled down.
template <class T>
inline void weigh(const AttentionCall<T>& call, AttentionScratch<T>& s, int64_t query, Floats* scores, int num_tiles,
                  int64_t first_key, int64_t padded) {
    // The query sees the lanes `start(last) + 1` to `last` of a tile.
    const int64_t reach = call.reach(s.position[query]);
    const auto start = [&](int64_t last) {
        return reach > 0 ? int32_t(std::clamp<int64_t>(last - reach, -1, kLanes)) : -1;
    };
    const int64_t last_of_first = s.position[query] - first_key;
    Floats best = broadcast(-INFINITY);
    for (int t = 0; t < num_tiles; t++) {
        const int64_t last = last_of_first - t * kLanes;
        scores[t] *= call.scale;
        if (call.softcap > 0) scores[t] = call.softcap * hyperbolic_tangent(scores[t] / call.softcap);
        if (last < kLanes - 1 || start(last) >= 0)
            scores[t] = keep_lanes(scores[t], start(last), int32_t(std::max<int64_t>(last, -1)), -INFINITY);
        best = larger(best, scores[t]);
    }
    const float highest = std::max(s.highest[query], largest(best));
    Floats weight_sum = s.weight_sum[query];
    if (highest > s.highest[query]) {
        const float factor = std::exp(s.highest[query] - highest);
        float* totals = s.totals + query * padded;
        for (int64_t d = 0; d < padded; d += kLanes) store(totals + d, load(totals + d) * factor);
        weight_sum *= factor;
        s.highest[query] = highest;
    }
    for (int t = 0; t < num_tiles; t++) {  // unseen keys get exactly zero: exponential(-inf) is a little more than that
        const int64_t last = last_of_first - t * kLanes;
        Floats weights = exponential(scores[t] - s.highest[query]);
        if (last < kLanes - 1 || start(last) >= 0)
            weights = keep_lanes(weights, start(last), int32_t(std::max<int64_t>(last, -1)), 0.0f);
        weight_sum += weights;
        RowPair<T>::store_factors(s.weights[query] + t * kLanes / 2, weights);
    }
    s.weight_sum[query] = weight_sum;
}

// Computes the scores and weights of `kRows` queries for some tiles of keys.
template <class T, int kRows>
inline void score(const AttentionCall<T>& call, AttentionScratch<T>& s, int64_t query, int num_tiles, int64_t first_key,
                  int64_t padded) {
    Floats scores[kRows * kTiles];
    int t = 0;
    auto some = [&](auto count) {
        KeyTiles<T>::template scores<kRows, decltype(count)::value>(s.keys + t * KeyTiles<T>::words(call.dim),
                                                                    s.q + query, call.dim, scores + t);
        t += count;
    };
    constexpr int kCount = std::min(kTiles, std::max(1, kScores / kRows));
    while (t + kCount <= num_tiles) some(std::integral_constant<int, kCount>());
    while (t < num_tiles) some(std::integral_constant<int, 1>());
    for (int m = 0; m < kRows; m++) weigh(call, s, query + m, scores + m * kTiles, num_tiles, first_key, padded);
}

// Calls `compute(first, count)` for runs of `kMost` and, at the end, fewer, where `count` is a constant.
template <int kMost, class F>
inline void in_runs(int64_t total, F compute) {
    int64_t first = 0;
    for (; first + kMost <= total; first += kMost) compute(first, std::integral_constant<int, kMost>());
    if constexpr (kMost > 1)
        if (first < total)
            in_runs<kMost - 1>(total - first, [&](int64_t at, auto count) { compute(first + at, count); });
}

// Adds the weighted rows of V to the totals of all queries.
template <class T>
inline void add_values(AttentionScratch<T>& s, int64_t num_queries, const T* const* v, int num_tiles, int64_t dim,
                       int64_t padded) {
    const int64_t num_pairs = num_tiles * kLanes / 2;
    for (int64_t column = 0; column < dim; column += kSpan) {
        const auto pair = [&](int64_t i) { return RowPair<T>(v[2 * i] + column, v[2 * i + 1] + column, dim - column); };
        const auto add = [&](auto values_of) {
            in_runs<kSumRows>(num_queries, [&](int64_t query, auto count) {
                constexpr int kRows = decltype(count)::value;
                Sums sums[kRows];
                float* totals = s.totals + query * padded + column;
                for (int m = 0; m < kRows; m++)
                    sums[m] = {load(totals + m * padded), load(totals + m * padded + kLanes)};
                for (int64_t i = 0; i < num_pairs; i++) {
                    const RowPair<T>& values = values_of(i);
                    for (int m = 0; m < kRows; m++) values.add_to(sums[m], s.weights[query + m][i]);
                }
                for (int m = 0; m < kRows; m++) {
                    store(totals + m * padded, sums[m].first);
                    store(totals + m * padded + kLanes, sums[m].second);
                }
            });
        };
        if (num_queries < kManyQueries) {
            add(pair);
        } else {
            for (int64_t i = 0; i < num_pairs; i++) s.values[i] = pair(i);
            add([&](int64_t i) -> const RowPair<T>& { return s.values[i]; });
        }
    }
}

// The same by matrix instructions, where the CPU has them: for all rows or for none, or a row's result would not be the
// same alone and in a chunk. `num_tiles` of keys is even.
template <class T>
struct AttentionTiles {
    static bool are_used() { return false; }
    static void begin(int64_t) {}
    static void end() {}
    static void take_query(const T*, int64_t, int64_t, AttentionScratch<T>&) {}
    static void scores(AttentionScratch<T>&, int64_t, int, int64_t) {}
    template <class F>
    static void add_values(AttentionScratch<T>&, int64_t, const T* const*, int, int64_t, int64_t, F) {}
};

#ifdef MOTET_TILES
template <>
struct AttentionTiles<Bfloat16> {
    typedef AttentionScratch<Bfloat16> Scratch;
    static constexpr int64_t kRows = kLanes;  // queries of a tile

    static bool are_used() { return tiles_are_allowed(); }
    static void begin(int64_t num_queries) { configure_tiles(int(std::min(num_queries, kRows))); }
    static void end() { _tile_release(); }

    static int64_t width(int64_t dim) { return (dim + kTileInputs - 1) / kTileInputs * kTileInputs; }

    static void take_query(const Bfloat16* from, int64_t dim, int64_t query, Scratch& s) {
        Bfloat16* to = s.spare + query * width(dim);
        std::fill(std::copy_n(from, dim, to), to + width(dim), Bfloat16{});
    }

    // Calls `compute(query, count)` for one or two tiles of queries at a time. The last one may have queries too many,
    // whose results are not used.
    template <class F>
    static void each(int64_t num_queries, F compute) {
        for (int64_t query = 0; query < num_queries; query += 2 * kRows)
            if (query + kRows < num_queries)
                compute(query, std::integral_constant<int, 2>());
            else
                compute(query, std::integral_constant<int, 1>());
    }

    static void scores(Scratch& s, int64_t num_queries, int num_tiles, int64_t dim) {
        const int64_t words = KeyTiles<Bfloat16>::words(dim), stride = width(dim) * int64_t(sizeof(Bfloat16));
        finish_stores();
        for (int t = 0; t < num_tiles; t += 2)
            each(num_queries, [&](int64_t query, auto count) {
                constexpr int kCount = decltype(count)::value;
                const Bfloat16 *first = s.spare + query * width(dim), *last = first + kRows * width(dim);
                const float* keys = s.keys + t * words;
                zero_sums<kCount>();
                for (int64_t d = 0; d < dim; d += kTileInputs, keys += kTilePairs * kLanes)
                    add_products<kCount>(first + d, last + d, stride, keys, keys + words, 4 * kLanes);
                float* to = (float*)&s.scores[query][t];
                store_sums<kCount>(to, to + kRows * kTiles * kLanes, sizeof s.scores[0]);
            });
    }

    // Calls `turn` between the steps.
    template <class F>
    static void add_values(Scratch& s, int64_t num_queries, const Bfloat16* const* v, int num_tiles, int64_t dim,
                           int64_t padded, F turn) {
        const int64_t num_pairs = num_tiles * kLanes / 2, stride = padded * int64_t(sizeof(float));
        for (int64_t column = 0; column < dim; column += kSpan) {
            for (int64_t i = 0; i < num_pairs; i++) {
                if (i % kLanes == 0) turn();
                s.values[i] = RowPair<Bfloat16>(v[2 * i] + column, v[2 * i + 1] + column, dim - column);
            }
            finish_stores();
            each(num_queries, [&](int64_t query, auto count) {
                constexpr int kCount = decltype(count)::value;
                float *first = s.totals + query * padded + column, *last = first + kRows * padded;
                const auto* weights = s.weights[query];
                load_sums<kCount>(first, last, stride);
                for (int64_t i = 0; i < num_pairs; i += kTilePairs)
                    add_products<kCount>(weights + i, weights + kRows * Scratch::kPairs + i, sizeof s.weights[0],
                                         &s.values[i].low, &s.values[i].high, sizeof s.values[0]);
                store_sums<kCount>(first, last, stride);
            });
        }
    }
};
#endif

// Some rows of a sequence, for KV heads `kv_head` to `end_head`. They see the keys `first_key` to `end_key`.
struct AttentionTask {
    int64_t sequence, kv_head, end_head, first, end, first_key, end_key;
};

// Prefetches K and V of a thread's tasks, one after the other. The first head of a task asks for what all of its heads
// need, since heads lie side by side, and memory is read in order. While the other heads are computed, memory would be
// idle: then the next task is asked for.
template <class T>
class KeysAhead {
  public:
    KeysAhead(const AttentionCall<T>& call, const AttentionTask* tasks, const AttentionTask* stop)
        : call(call), task(tasks), stop(stop) {
        take();
    }

    // Called before the first `num_tokens` of a task are read, and when it begins with 0: asks for what some tiles more
    // still lack.
    void reach(const AttentionTask& current, int64_t num_tokens) {
        num_reached = num_tokens;
        const int64_t least = num_tokens + kTilesAhead * kLanes;
        if (task == &current && num_fetched < least) fetch(least - num_fetched);
    }

    // Called between the steps of the computation: a core has few buffers for lines that it asked for, and a longer row
    // of requests would wait for them.
    void advance(const AttentionTask& current) {
        if (task == &current) {
            if (num_fetched < num_reached + kMostAhead) fetch(kTokensOfTurn);
            return;
        }
        if (task == stop || task != &current + 1 || num_fetched * 2 * width() * int64_t(sizeof(T)) >= kNearKV) return;
        fetch(std::max<int64_t>(1, kTokensOfTurn / (current.end_head - current.kv_head)));
    }

  private:
    static constexpr int64_t kTokensOfTurn = 4;
    static constexpr int64_t kMostAhead = 96;  // tokens of a task: of a long one more would not stay in the cache

    const AttentionCall<T>& call;
    const AttentionTask *task, *stop;  // what is fetched now
    std::optional<TokenWalk<T>> walk;
    int64_t num_fetched = 0;  // tokens of it
    int64_t num_reached = 0;  // tokens of the task that is computed, which are read now

    int64_t width() const { return (task->end_head - task->kv_head) * call.dim; }

    void take() {
        if (task != stop) walk.emplace(call, task->sequence, task->first_key);
        num_fetched = 0;
    }

    void fetch(int64_t count) {
        walk->prefetch(count, task->end_key, task->kv_head * call.dim, width());
        num_fetched += count;
        if (walk->token >= task->end_key) task++, take();
    }
};

// Computes the rows of a task for the heads that share one of its KV heads.
template <class T>
void attend(const AttentionCall<T>& call, AttentionScratch<T>& s, const AttentionTask& task, int64_t kv_head,
            KeysAhead<T>& ahead) {
    const int64_t sequence = task.sequence, first = task.first, end = task.end, end_key = task.end_key;
    const int64_t group = call.num_heads / call.num_kv_heads, num_queries = (end - first) * group, dim = call.dim;
    const int64_t padded = (dim + kSpan - 1) / kSpan * kSpan, first_position = end_key - (end - first);
    const bool in_tiles = AttentionTiles<T>::are_used();
    for (int64_t i = 0; i < num_queries; i++) {
        const int64_t row = first + i / group, head = kv_head * group + i % group;
        const T* q = call.q + row * call.q_row_stride + head * call.q_head_stride;
        if (in_tiles)
            AttentionTiles<T>::take_query(q, dim, i, s);
        else
            s.q[i] = query_of(q, dim, s.spare + i * dim);
        s.position[i] = first_position + i / group;
        s.highest[i] = -1e30f;
        s.weight_sum[i] = Floats{};
    }
    std::fill(s.totals, s.totals + num_queries * padded, 0.0f);
    TokenWalk<T> walk(call, sequence, task.first_key);
    const auto turn = [&] { ahead.advance(task); };
    if (in_tiles) AttentionTiles<T>::begin(num_queries);
    for (int64_t key = task.first_key; key < end_key; key += kTiles * kLanes) {
        const T *k[kLanes], *v[kTiles * kLanes];
        int num_tiles = int(std::min<int64_t>(kTiles, (end_key - key + kLanes - 1) / kLanes));
        if (in_tiles) num_tiles += num_tiles % 2;  // with keys that no query sees
        for (int t = 0; t < num_tiles; t++) {
            ahead.reach(task, key - task.first_key + (t + 1) * kLanes);
            walk.next(end_key, kv_head * dim, s.zeros, k, v + t * kLanes);
            turn();
            KeyTiles<T>::take(k, dim, s.keys + t * KeyTiles<T>::words(dim));
        }
        turn();
        if (in_tiles) {
            AttentionTiles<T>::scores(s, num_queries, num_tiles, dim);
            for (int64_t i = 0; i < num_queries; i++) {
                turn();
                weigh(call, s, i, s.scores[i], num_tiles, key, padded);
            }
            AttentionTiles<T>::add_values(s, num_queries, v, num_tiles, dim, padded, turn);
            continue;
        }
        in_runs<kScoreRows>(num_queries, [&](int64_t query, auto count) {
            score<T, decltype(count)::value>(call, s, query, num_tiles, key, padded);
        });
        add_values(s, num_queries, v, num_tiles, dim, padded);
    }
    if (in_tiles) AttentionTiles<T>::end();
    for (int64_t i = 0; i < num_queries; i++) {
        const int64_t row = first + i / group, head = kv_head * group + i % group;
        T* to = call.out + (row * call.num_heads + head) * dim;
        float weight = sum(s.weight_sum[i]);
        if (call.sinks) weight += std::exp(call.sinks[head] - s.highest[i]);
        const float scale = 1.0f / weight;
        for (int64_t d = 0; d < dim; d += kSpan) {
            const float* total = s.totals + i * padded + d;
            Sums sums = RowPair<T>::in_order({load(total), load(total + kLanes)});
            store(to + d, sums.first * scale, dim - d);
            if (dim - d > kLanes) store(to + d + kLanes, sums.second * scale, dim - d - kLanes);
        }
    }
}

// What a task takes, about: reading a key costs as much as the products of a few rows with it.
inline int64_t cost_of(const AttentionTask& task) {
    return (task.end_key - task.first_key) * (task.end_head - task.kv_head) * (task.end - task.first + 4);
}

template <class T>
void attend_all(const AttentionCall<T>& call, int num_threads) {
    const int64_t group = call.num_heads / call.num_kv_heads, block = std::max<int64_t>(1, kMostQueries / group);
    const bool are_many = num_threads < 2 || call.num_sequences >= num_threads * kBlocksOfAThread;
    std::vector<AttentionTask> tasks;
    int64_t cost = 0;
    for (int64_t sequence = 0; sequence < call.num_sequences; sequence++) {
        const int64_t start = call.query_starts[sequence], end = call.query_starts[sequence + 1];
        const int64_t context = call.context_lens[sequence];
        const int64_t seen = call.window ? std::min(std::abs(call.window), context) : context;
        const bool is_near = 2 * seen * call.num_kv_heads * call.dim * int64_t(sizeof(T)) <= kNearKV;
        const int64_t heads = are_many && is_near && end - start <= block ? call.num_kv_heads : 1;
        for (int64_t kv_head = 0; kv_head < call.num_kv_heads; kv_head += heads)
            for (int64_t row = start; row < end; row += block) {
                const int64_t stop = std::min(row + block, end), first_position = context - (end - row);
                const int64_t reach = call.reach(first_position);
                const int64_t first_key = reach > 0 ? std::max<int64_t>(0, first_position - reach + 1) : 0;
                tasks.push_back({sequence, kv_head, kv_head + heads, row, stop, first_key, context - (end - stop)});
                cost += cost_of(tasks.back());
            }
    }
    // Blocks of about the same work: tasks of a block follow each other on one thread.
    const int64_t most = cost / (num_threads < 2 ? 1 : num_threads * kAttentionBlocks) + 1;
    std::vector<size_t> starts;
    int64_t left = 0;
    for (size_t i = 0; i < tasks.size(); left -= cost_of(tasks[i++]))
        if (left <= 0) starts.push_back(i), left = most;
    starts.push_back(tasks.size());
    Team::of_process().share(num_threads, int64_t(starts.size()) - 1, [&](int64_t block) {
        static thread_local std::unique_ptr<AttentionScratch<T>> kept;  // kept, because it is large and slow to clear
        if (!kept) kept.reset(new AttentionScratch<T>);
        const AttentionTask *task = &tasks[starts[size_t(block)]], *stop = tasks.data() + starts[size_t(block) + 1];
        KeysAhead<T> ahead(call, task, stop);
        for (; task != stop; task++) {
            ahead.reach(*task, 0);
            for (int64_t head = task->kv_head; head < task->end_head; head++) attend(call, *kept, *task, head, ahead);
        }
    });
}

}  // namespace motet
