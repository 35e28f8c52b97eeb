// Paged attention with online softmax (FlashAttention-2, arXiv 2307.08691), 16 keys at a time.
#pragma once

#include <memory>

#include "native_vectors.h"

namespace motet {

constexpr int64_t kMostDims = 512;   // of a head
constexpr int64_t kTilesAhead = 3;   // of 16 keys, that memory is asked for before they are needed
constexpr int64_t kMostQueries = 32;  // query rows that share the keys of a tile: rows times heads of a group

template <class T>
struct AttentionCall {
    const T* q;
    T* out;  // [rows, heads, dim], contiguous
    const T* kv;
    const int64_t *query_starts, *context_lens, *page_table;
    int64_t num_sequences, table_width;
    int64_t num_heads, num_kv_heads, dim, block_size;
    int64_t q_row_stride, q_head_stride, page_stride, v_offset, slot_stride;  // elements
    float scale;
    int64_t window;  // 0: none
    float softcap;   // 0: none
};

// 16 keys, transposed for products with queries: element d of all keys lies together.
template <class T>
struct KeyTile {
    typedef float Query;  // what an element of a query is taken as
    alignas(64) float words[kMostDims * kLanes];

    void take(const T* const* rows, int64_t dim) {
        for (int64_t d = 0; d < dim; d += kLanes) transpose(rows, d, dim - d, words + d * kLanes);
    }

    template <int kRows>
    void scores(const Query* const* q, int64_t dim, Floats* to) const {
        Floats totals[kRows] = {};
        for (int64_t d = 0; d < dim; d++) {
            Floats key = load(words + d * kLanes);
            for (int m = 0; m < kRows; m++) totals[m] += key * q[m][d];
        }
        for (int m = 0; m < kRows; m++) to[m] = totals[m];
    }
};

#ifdef MOTET_BF16_PRODUCTS
// Pairs of elements lie together.
template <>
struct KeyTile<Bfloat16> {
    typedef Bfloat16 Query;
    alignas(64) float words[kMostDims / 2 * kLanes];

    void take(const Bfloat16* const* rows, int64_t dim) {
        for (int64_t pair = 0; 2 * pair < dim; pair += kLanes)
            transpose((const float* const*)rows, pair, dim / 2 - pair, words + pair * kLanes);
    }

    template <int kRows>
    void scores(const Bfloat16* const* q, int64_t dim, Floats* to) const {
        Floats totals[kRows] = {};
        for (int64_t pair = 0; 2 * pair < dim; pair++) {
            __m512bh keys = (__m512bh)_mm512_load_si512(words + pair * kLanes);
            for (int m = 0; m < kRows; m++) {
                uint32_t own;
                std::memcpy(&own, q[m] + 2 * pair, sizeof own);
                totals[m] = (Floats)_mm512_dpbf16_ps((__m512)totals[m], (__m512bh)_mm512_set1_epi32(int(own)), keys);
            }
        }
        for (int m = 0; m < kRows; m++) to[m] = totals[m];
    }
};
#endif

// A query as key tiles take it: where it lies, or converted to `spare`.
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
    const int64_t* pages;
    int64_t token, page, slot;

    TokenWalk(const AttentionCall<T>& call, int64_t sequence, int64_t first)
        : call(call), pages(call.page_table + sequence * call.table_width), token(first),
          page(first / call.block_size), slot(first % call.block_size) {}

    // Asks memory for K and V of the next tokens below `end`.
    void ask(int64_t end, int64_t head_offset, int64_t dim) {
        const int64_t step = 64 / int64_t(sizeof(T));
        for (int i = 0; i < kLanes && token < end; i++, token++) {
            const T* k = call.kv + pages[page] * call.page_stride + slot * call.slot_stride + head_offset;
            for (int64_t d = 0; d < dim; d += step) {
                __builtin_prefetch(k + d, 0, 2);
                __builtin_prefetch(k + call.v_offset + d, 0, 2);
            }
            if (++slot == call.block_size) slot = 0, page++;
        }
    }

    // K and V of the next tokens below `end`; `zeros` in place of those after it, so that nothing beyond is read.
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
    KeyTile<T> keys;
    alignas(64) float totals[kMostQueries * kMostDims];
    Factors weights[kMostQueries][kLanes / 2];
    alignas(64) T zeros[kMostDims] = {};
    const typename KeyTile<T>::Query* q[kMostQueries];
    typename KeyTile<T>::Query spare[kMostQueries * kMostDims];  // for queries
    int64_t position[kMostQueries];
    float highest[kMostQueries], weight_sum[kMostQueries];
};

// Weights of 16 keys for one query, relative to the highest score so far; earlier totals are scaled down when it rises.
template <class T>
inline void weigh(const AttentionCall<T>& call, AttentionScratch<T>& s, int64_t query, Floats scores, int64_t first_key,
                  int64_t padded) {
    scores *= call.scale;
    if (call.softcap > 0) scores = call.softcap * hyperbolic_tangent(scores / call.softcap);
    const int64_t last = s.position[query] - first_key, before = call.window > 0 ? last - call.window : -1;
    const int32_t end = int32_t(std::min<int64_t>(last, kLanes));
    const int32_t start = int32_t(std::max<int64_t>(std::min<int64_t>(before, kLanes), -1));
    scores = keep_lanes(scores, start, end, -INFINITY);
    const float highest = std::max(s.highest[query], largest(scores));
    if (highest > s.highest[query]) {
        const float factor = std::exp(s.highest[query] - highest);
        float* totals = s.totals + query * padded;
        for (int64_t d = 0; d < padded; d += kLanes) store(totals + d, load(totals + d) * factor);
        s.weight_sum[query] *= factor;
        s.highest[query] = highest;
    }
    const Floats weights = keep_lanes(exponential(scores - s.highest[query]), start, end, 0.0f);
    s.weight_sum[query] += sum(weights);
    T each[kLanes];
    store(each, weights);
    for (int i = 0; i < kLanes / 2; i++) s.weights[query][i] = RowPair<T>::factors(each + 2 * i);
}

// Rows `first` to `end` of one sequence, for the heads that share one KV head.
template <class T>
void attend(const AttentionCall<T>& call, AttentionScratch<T>& s, int64_t sequence, int64_t kv_head, int64_t first,
            int64_t end) {
    const int64_t group = call.num_heads / call.num_kv_heads, num_queries = (end - first) * group, dim = call.dim;
    const int64_t padded = (dim + kSpan - 1) / kSpan * kSpan;
    const int64_t first_position = call.context_lens[sequence] - (call.query_starts[sequence + 1] - first);
    const int64_t end_key = first_position + (end - first);
    for (int64_t i = 0; i < num_queries; i++) {
        const int64_t row = first + i / group, head = kv_head * group + i % group;
        s.q[i] = query_of(call.q + row * call.q_row_stride + head * call.q_head_stride, dim, s.spare + i * dim);
        s.position[i] = first_position + i / group;
        s.highest[i] = -1e30f;
        s.weight_sum[i] = 0;
    }
    std::fill(s.totals, s.totals + num_queries * padded, 0.0f);
    int64_t key = call.window > 0 ? std::max<int64_t>(0, first_position - call.window + 1) : 0;
    TokenWalk<T> walk(call, sequence, key), ahead(call, sequence, key);
    for (int64_t i = 0; i < kTilesAhead; i++) ahead.ask(end_key, kv_head * dim, dim);
    for (; key < end_key; key += kLanes) {
        const T *k[kLanes], *v[kLanes];
        ahead.ask(end_key, kv_head * dim, dim);
        walk.next(end_key, kv_head * dim, s.zeros, k, v);
        s.keys.take(k, dim);
        Floats scores[4];
        int64_t query = 0;
        for (; query + 4 <= num_queries; query += 4) {
            s.keys.template scores<4>(s.q + query, dim, scores);
            for (int i = 0; i < 4; i++) weigh(call, s, query + i, scores[i], key, padded);
        }
        const int left = int(num_queries - query);
        if (left == 3) s.keys.template scores<3>(s.q + query, dim, scores);
        if (left == 2) s.keys.template scores<2>(s.q + query, dim, scores);
        if (left == 1) s.keys.template scores<1>(s.q + query, dim, scores);
        for (int i = 0; i < left; i++) weigh(call, s, query + i, scores[i], key, padded);
        add_weighted_rows<T, kLanes / 2>(s.totals, padded, num_queries, s.weights[0], kLanes / 2, v, dim);
    }
    for (int64_t i = 0; i < num_queries; i++) {
        const int64_t row = first + i / group, head = kv_head * group + i % group;
        T* to = call.out + (row * call.num_heads + head) * dim;
        const float scale = 1.0f / s.weight_sum[i];
        for (int64_t d = 0; d < dim; d += kSpan) {
            const float* total = s.totals + i * padded + d;
            Sums sums = RowPair<T>::in_order({load(total), load(total + kLanes)});
            store(to + d, sums.first * scale, dim - d);
            if (dim - d > kLanes) store(to + d + kLanes, sums.second * scale, dim - d - kLanes);
        }
    }
}

template <class T>
void attend_all(const AttentionCall<T>& call, [[maybe_unused]] int num_threads) {
    const int64_t group = call.num_heads / call.num_kv_heads, block = std::max<int64_t>(1, kMostQueries / group);
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    {
        static thread_local std::unique_ptr<AttentionScratch<T>> kept;  // large, and clearing it takes its time
        if (!kept) kept.reset(new AttentionScratch<T>);
        AttentionScratch<T>& scratch = *kept;
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < call.num_sequences * call.num_kv_heads; i++) {
            const int64_t sequence = i / call.num_kv_heads, end = call.query_starts[sequence + 1];
            for (int64_t row = call.query_starts[sequence]; row < end; row += block)
                attend(call, scratch, sequence, i % call.num_kv_heads, row, std::min(row + block, end));
        }
    }
}

}  // namespace motet
