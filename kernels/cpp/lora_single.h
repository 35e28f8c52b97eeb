// LoRA of segments of one row, which nearly all segments of decodes are. The speed of memory limits these.
//
// A single loop with software prefetches reads at most 20 GB/s on one core of the machine that this was measured on:
// the core cannot have more cache lines under way. The hardware prefetcher adds to that, but only for memory that is
// read in order. So eight readers take turns, two cache lines each; each of them reads its own adapters in order.
// Together they read 31 GB/s; one core reads 34 GB/s where all memory lies in order.
#pragma once

#include "pages.h"

namespace motet {

inline Run run_of_a(const LoraPart& part) { return {part.a, part.a + part.a_rows * part.num_in}; }
inline Run run_of_b(const LoraPart& part) { return {part.b, part.b + part.rank * part.num_out}; }

constexpr int kReaders = 8;
constexpr int64_t kLeastSingles = 16;   // for fewer parts a single reader is faster
constexpr int kTurn = 2;                // cache lines that a reader reads in its turn
constexpr int64_t kNearBytes = 49152;   // of the first cache level: room for what all readers use again and again
constexpr int64_t kReaderAhead = 2048;  // bytes that are prefetched beyond a reader's current rows

// At least `count` elements in `values`, which grows if it must.
template <class V>
inline typename V::value_type* room(V& values, int64_t count) {
    if (int64_t(values.size()) < count) values.resize(size_t(count));
    return values.data();
}

// Buffers that a thread keeps from call to call.
template <class T>
struct SingleScratch {
    PartList lists[kReaders];
    std::vector<T> spare, zeros, values;
    std::vector<float> totals;
    std::vector<typename RowPair<T>::Factors> factors;
};

// Shares parts out to readers so that all have about as much to read. A reader's parts stay in their order.
template <Run (*kRun)(const LoraPart&)>
void share_out_to_readers(const PartList& parts, PartList* lists) {
    int64_t sizes[kReaders] = {};
    for (int s = 0; s < kReaders; s++) lists[s].clear();
    for (const LoraPart* part : parts) {
        const int least = int(std::min_element(sizes, sizes + kReaders) - sizes);
        const Run run = kRun(*part);
        sizes[least] += run.end - run.start;
        lists[least].push_back(part);
    }
}

// x Aᵀ of parts of one row each.
template <class T>
void shrink_singles(const LoraPages<T>& pages, const PartList& parts, const T* x, int64_t x_stride, T* shrunk,
                    SingleScratch<T>& scratch) {
    typedef ReadAhead<T, run_of_a> Ahead;
    constexpr int64_t kStep = Operand<T>::kWidth, kBlock = 64 / int64_t(sizeof(T));
    const int64_t width = parts[0]->num_in;  // modules that share an input
    share_out_to_readers<run_of_a>(parts, scratch.lists);
    T* spare = room(scratch.spare, kReaders * width);
    const T* zeros = room(scratch.zeros, width);
    const int64_t ahead_bytes = width * int64_t(sizeof(T)) + kReaderAhead;
    struct Reader {
        const PartList& list;
        Ahead ahead;
        size_t index;
        int64_t row;
        Rows<T> rows;
    };
    std::vector<Reader> readers;
    readers.reserve(kReaders);
    for (const PartList& list : scratch.lists) readers.push_back({list, Ahead(pages, list, ahead_bytes), 0, 0, {}});
    T nowhere;
    for (;;) {
        const T *own[kReaders], *a[kReaders];
        T* to[kReaders];
        bool is_live = false;
        for (int s = 0; s < kReaders; s++) {
            Reader& at = readers[s];
            own[s] = a[s] = zeros, to[s] = &nowhere;
            if (at.index == at.list.size()) continue;
            const LoraPart& part = *at.list[at.index];
            if (at.row == 0) at.rows = Rows<T>(pages, part, part.a);
            own[s] = x + part.start * x_stride, a[s] = at.rows.take(width, spare + s * width);
            to[s] = shrunk + part.shrunk + at.row;
            is_live = true;
            if (++at.row == part.a_rows) at.index++, at.row = 0;
        }
        if (!is_live) return;
        Floats totals[kReaders] = {};
        const char* later[kReaders];  // memory that is read later and prefetched now
        for (int s = 0; s < kReaders; s++) later[s] = readers[s].ahead.take(width * int64_t(sizeof(T)), a[s]);
        int64_t k = 0;
        for (; k + kTurn * kBlock <= width; k += kTurn * kBlock)
#pragma GCC unroll 8  // so that the sums stay in registers
            for (int s = 0; s < kReaders; s++) {
                const T *from = own[s] + k, *row = a[s] + k;
                const char* line = later[s] + k * int64_t(sizeof(T));
#pragma GCC unroll 2
                for (int i = 0; i < kTurn; i++) __builtin_prefetch(line + 64 * i, 0, 2);
#pragma GCC unroll 8
                for (int64_t i = 0; i < kTurn * kBlock; i += kStep)
                    multiply_add(totals[s], Operand<T>(from + i), Operand<T>(row + i));
            }
        if (k < width)
#pragma GCC unroll 8
            for (int s = 0; s < kReaders; s++) {
                for (int64_t i = k; i < width; i += kBlock) __builtin_prefetch(later[s] + i * int64_t(sizeof(T)), 0, 2);
                for (int64_t i = k; i < width; i += kStep)
                    multiply_add(totals[s], Operand<T>(own[s] + i, width - i), Operand<T>(a[s] + i, width - i));
            }
        float each[kReaders];
        Floats ended[kReaders];  // a copy, because an array that is passed to a function leaves the registers
#pragma GCC unroll 8
        for (int s = 0; s < kReaders; s++) ended[s] = totals[s];
        sums<kReaders>(ended, each);
        for (int s = 0; s < kReaders; s++) assign(*to[s], each[s]), readers[s].ahead.settle();
    }
}

// The factors of each pair of rows of B for one row: its shrunk vector, which is in parts of `a_rows` from each worker.
template <class T>
inline void take_factors(const T* own, int64_t stride, const LoraPart& part, T* values, int64_t num_pairs,
                         typename RowPair<T>::Factors* to) {
    for (int64_t j = 0; j < part.rank; j += part.a_rows, own += stride)
        std::memcpy(values + j, own, size_t(std::min(part.a_rows, part.rank - j)) * sizeof(T));
    std::memset(values + part.rank, 0, size_t(2 * num_pairs - part.rank) * sizeof(T));
    for (int64_t j = 0; j < num_pairs; j++) to[j] = RowPair<T>::factors(values + 2 * j);
}

template <class T>
inline void add_to(T* to, Sums sums, int64_t count) {
    sums = RowPair<T>::in_order(sums);
    store(to, load(to, count) + sums.first, count);
    if (count > kLanes) store(to + kLanes, load(to + kLanes, count - kLanes) + sums.second, count - kLanes);
}

// Adds v B to the one row of each part.
template <class T>
void expand_singles(const LoraPages<T>& pages, const PartList& parts, const T* shrunk, int64_t shrunk_stride, T* y,
                    int64_t y_stride, SingleScratch<T>& scratch) {
    typedef ReadAhead<T, run_of_b> Ahead;
    typedef typename RowPair<T>::Factors Factors;
    constexpr int64_t kLinesOfSpan = 2 * kSpan * int64_t(sizeof(T)) / 64;
    share_out_to_readers<run_of_b>(parts, scratch.lists);
    int64_t widest = 0, most_pairs = 0;
    for (const LoraPart* part : parts) {
        widest = std::max(widest, part->num_out);
        most_pairs = std::max(most_pairs, (part->rank + 1) / 2);
    }
    const int64_t padded = (widest + kSpan - 1) / kSpan * kSpan;
    T* spare = room(scratch.spare, kReaders * 2 * widest);
    const T* zeros = room(scratch.zeros, widest);
    T* values = room(scratch.values, 2 * most_pairs);
    float* totals = room(scratch.totals, kReaders * padded);
    Factors* factors = room(scratch.factors, kReaders * most_pairs);
    const int64_t ahead_bytes = 2 * widest * int64_t(sizeof(T)) + kReaderAhead;

    struct Reader {
        const PartList& list;
        Ahead ahead;
        float* totals;
        Factors* factors;
        T* spare;
        const LoraPart* part = nullptr;  // null: this reader is done
        size_t index = 0;                // of the next part
        int64_t row = 0, column = 0, width = 0;
        Rows<T> rows_of_b = {};
        const T *first = nullptr, *second = nullptr;  // the current pair of rows
    };
    auto next_rows = [&](Reader& at) {
        at.column = 0;
        at.first = at.rows_of_b.take(at.width, at.spare);
        at.second = at.row + 1 < at.part->rank ? at.rows_of_b.take(at.width, at.spare + at.width) : zeros;
    };
    auto next_part = [&](Reader& at) {
        at.part = at.index < at.list.size() ? at.list[at.index++] : nullptr;
        if (!at.part) return;
        at.row = 0, at.width = at.part->num_out, at.rows_of_b = Rows<T>(pages, *at.part, at.part->b);
        std::fill(at.totals, at.totals + padded, 0.0f);
        take_factors(shrunk + at.part->shrunk, shrunk_stride, *at.part, values, (at.part->rank + 1) / 2, at.factors);
        next_rows(at);
    };
    auto end_part = [&](Reader& at) {
        T* to = y + at.part->start * y_stride + at.part->column;
        for (int64_t column = 0; column < at.width; column += kSpan) {
            const float* total = at.totals + column;
            add_to(to + column, {load(total), load(total + kLanes)}, at.width - column);
        }
        next_part(at);
    };
    std::vector<Reader> readers;
    readers.reserve(kReaders);
    for (int s = 0; s < kReaders; s++) {
        readers.push_back({scratch.lists[s], Ahead(pages, scratch.lists[s], ahead_bytes), totals + s * padded,
                           factors + s * most_pairs, spare + s * 2 * widest});
        next_part(readers.back());
    }
    for (bool is_live = true; is_live;) {
        is_live = false;
        for (Reader& at : readers) {
            if (!at.part) continue;
            is_live = true;
            float* total = at.totals + at.column;
            const Factors factors = at.factors[at.row / 2];
            const T *first = at.first + at.column, *second = at.second + at.column;
            auto span = [&](int64_t column, int64_t count) {
                Sums sums = {load(total + column), load(total + column + kLanes)};
                RowPair<T>(first + column, second + column, count).add_to(sums, factors);
                store(total + column, sums.first);
                store(total + column + kLanes, sums.second);
            };
            const int64_t left = at.width - at.column;
            if (left >= kTurn * kSpan) {
                at.ahead.lines_in_loop(kTurn * kLinesOfSpan);
                for (int i = 0; i < kTurn; i++) span(i * kSpan, kSpan);
            } else {
                at.ahead.lines_in_loop((left + kSpan - 1) / kSpan * kLinesOfSpan);
                for (int64_t column = 0; column < left; column += kSpan) span(column, left - column);
            }
            if ((at.column += kTurn * kSpan) < at.width) continue;
            at.ahead.settle();
            if ((at.row += 2) < at.part->rank)
                next_rows(at);
            else
                end_part(at);
        }
    }
}

}  // namespace motet
