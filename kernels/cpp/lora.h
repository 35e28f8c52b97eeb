// LoRA over pages: each segment of rows with its own adapter, at the adapter's own rank. The contract is ../lora.py.
#pragma once

#include <type_traits>
#include <utility>
#include <vector>

#include "lora_single.h"
#include "team.h"

namespace motet {

constexpr int kDots = 4;           // rows of A at once for several rows of x
constexpr int kOneDots = 8;        // rows of A at once for a single row of x
constexpr int64_t kAhead = 16384;  // bytes that are prefetched ahead of the reader (2 KiB is half as fast)

// Dot products of `kRows` rows of x and `kCount` rows of A, of which the first `count` are written to `to`.
template <class T, int kRows, int kCount, class To>
inline void dot(const T* x, int64_t x_stride, const T* const* a, int64_t width, To* to, int64_t to_stride, int count) {
    constexpr int kStep = Operand<T>::kWidth;
    Floats totals[kRows][kCount] = {};
    for (int64_t k = 0; k + kStep <= width; k += kStep) {
        Operand<T> own[kRows];
        for (int m = 0; m < kRows; m++) own[m] = Operand<T>(x + m * x_stride + k);
        for (int j = 0; j < kCount; j++) {
            Operand<T> row(a[j] + k);
            for (int m = 0; m < kRows; m++) multiply_add(totals[m][j], own[m], row);
        }
    }
    if (const int64_t k = width / kStep * kStep; k < width) {
        for (int m = 0; m < kRows; m++) {
            Operand<T> own(x + m * x_stride + k, width - k);
            for (int j = 0; j < kCount; j++) multiply_add(totals[m][j], own, Operand<T>(a[j] + k, width - k));
        }
    }
    for (int m = 0; m < kRows; m++) {
        float each[kCount];
        sums<kCount>(totals[m], each);
        for (int j = 0; j < count; j++) assign(to[m * to_stride + j], each[j]);
    }
}

template <class T>
struct LoraScratch : SingleScratch<T> {
    PartList singles, several;
    std::vector<std::pair<int64_t, int64_t>> cuts;  // start and end row of each part of `several`
    std::vector<const T*> rows;
    std::vector<RowPair<T>> pairs;
};

// x Aᵀ of rows `start` to `end` of the part, written to the part's `[rows, a_rows]` at `shrunk + part.shrunk`.
template <class T, class Ahead>
void shrink_part(const LoraPages<T>& pages, const LoraPart& part, int64_t start, int64_t end, const T* x,
                 int64_t x_stride, T* shrunk, LoraScratch<T>& scratch, Ahead& ahead) {
    const int64_t width = part.num_in;
    const int64_t most = end - start == 1 ? kOneDots : kDots;
    T* spare = room(scratch.spare, kOneDots * width);
    T* out = shrunk + part.shrunk + (start - part.start) * part.a_rows;
    for (int64_t first = 0; first < part.a_rows; first += most) {
        const int count = int(std::min(most, part.a_rows - first));
        const T* rows[kOneDots];
        for (int j = 0; j < kOneDots; j++)
            rows[j] = j < count ? pages.row(part, part.a + (first + j) * width, width, spare + j * width) : rows[0];
        const T* own = x + start * x_stride;
        T* to = out + first;
        ahead.lines(count * width * int64_t(sizeof(T)) / 64);
        if (most == kOneDots) {
            dot<T, 1, kOneDots>(own, x_stride, rows, width, to, part.a_rows, count);
            continue;
        }
        int64_t m = end - start;
        for (; m >= 4; m -= 4, own += 4 * x_stride, to += 4 * part.a_rows)
            dot<T, 4, kDots>(own, x_stride, rows, width, to, part.a_rows, count);
        for (; m > 0; m--, own += x_stride, to += part.a_rows)
            dot<T, 1, kDots>(own, x_stride, rows, width, to, part.a_rows, count);
    }
}

constexpr int kPairs = 4;       // pairs of rows of B at once, for few rows of y
constexpr int64_t kTotals = 4;  // for this many rows of y and more, `expand_many` is faster than `expand_few`
constexpr int64_t kStrip = 16;  // the most spans of columns of a strip

// Adds v B to few rows of y: B is read row by row, in the order of memory.
template <class T, class Ahead>
void expand_few(const LoraPages<T>& pages, const LoraPart& part, int64_t num_rows, T* y, int64_t y_stride,
                const typename RowPair<T>::Factors* factors, int64_t num_pairs, LoraScratch<T>& scratch, Ahead& ahead) {
    const int64_t width = part.num_out, padded = (width + kSpan - 1) / kSpan * kSpan;
    T* spare = room(scratch.spare, 2 * kPairs * width);
    const T* zeros = room(scratch.zeros, width);
    float* totals = room(scratch.totals, kTotals * padded);
    std::fill(totals, totals + num_rows * padded, 0.0f);
    for (int64_t first = 0; first < num_pairs; first += kPairs) {
        const T* rows[2 * kPairs];
        for (int j = 0; j < 2 * kPairs; j++) {
            const int64_t row = 2 * first + j;
            rows[j] = row < part.rank ? pages.row(part, part.b + row * width, width, spare + j * width) : zeros;
        }
        add_weighted_rows<T, kPairs>(totals, padded, num_rows, factors + first, num_pairs, rows, width, &ahead);
    }
    for (int64_t m = 0; m < num_rows; m++)
        for (int64_t column = 0; column < width; column += kSpan) {
            const float* total = totals + m * padded + column;
            add_to(y + m * y_stride + column, {load(total), load(total + kLanes)}, width - column);
        }
}

// Adds v B to `kRows` rows and one span of columns of y, over all pairs of rows of B. The sums stay in registers.
template <class T, int kRows>
inline void expand_span(const RowPair<T>* pairs, int64_t num_pairs, const typename RowPair<T>::Factors* factors, T* y,
                        int64_t y_stride, int64_t count) {
    Sums sums[kRows] = {};
    for (int64_t i = 0; i < num_pairs; i++)
        for (int m = 0; m < kRows; m++) pairs[i].add_to(sums[m], factors[m * num_pairs + i]);
    for (int m = 0; m < kRows; m++) add_to(y + m * y_stride, sums[m], count);
}

// Adds v B to many rows of y: the pairs of rows of a strip of B are made once and used for all rows of y.
template <class T, class Ahead>
void expand_many(const LoraPages<T>& pages, const LoraPart& part, int64_t num_rows, T* y, int64_t y_stride,
                 const typename RowPair<T>::Factors* factors, int64_t num_pairs, LoraScratch<T>& scratch,
                 Ahead& ahead) {
    const int64_t width = part.num_out;
    ahead.lines(part.rank * width * int64_t(sizeof(T)) / 64);  // all of B at once: a strip reads a bit of each row
    T* spare = room(scratch.spare, part.rank * width);
    const T* zeros = room(scratch.zeros, width);
    const T** rows = room(scratch.rows, 2 * num_pairs);
    // As wide as fits in the first cache level: with a narrow strip only few columns of each row of y are written.
    const int64_t strip = std::max<int64_t>(2, std::min(kStrip, 256 / num_pairs));
    RowPair<T>* pairs = room(scratch.pairs, strip * num_pairs);
    for (int64_t j = 0; j < 2 * num_pairs; j++)
        rows[j] = j < part.rank ? pages.row(part, part.b + j * width, width, spare + j * width) : zeros;
    for (int64_t first = 0; first < width; first += strip * kSpan) {
        const int64_t num_spans = std::min(strip, (width - first + kSpan - 1) / kSpan);
        for (int64_t i = 0; i < num_pairs; i++)
            for (int64_t span = 0; span < num_spans; span++) {
                const int64_t at = first + span * kSpan;
                pairs[span * num_pairs + i] = RowPair<T>(rows[2 * i] + at, rows[2 * i + 1] + at, width - at);
            }
        int64_t m = 0;
        auto rows_of_y = [&](auto count) {
            for (int64_t span = 0; span < num_spans; span++) {
                const int64_t column = first + span * kSpan;
                expand_span<T, decltype(count)::value>(pairs + span * num_pairs, num_pairs, factors + m * num_pairs,
                                                       y + m * y_stride + column, y_stride, width - column);
            }
            m += count;
        };
        while (m + 4 <= num_rows) rows_of_y(std::integral_constant<int, 4>());
        while (m < num_rows) rows_of_y(std::integral_constant<int, 1>());
    }
}

// Adds v B to rows `start` to `end` of the part's columns of y, where v are the shrunk vectors of all workers.
template <class T, class Ahead>
void expand_part(const LoraPages<T>& pages, const LoraPart& part, int64_t start, int64_t end, const T* shrunk,
                 int64_t shrunk_stride, T* y, int64_t y_stride, LoraScratch<T>& scratch, Ahead& ahead) {
    const int64_t num_pairs = (part.rank + 2 * kPairs - 1) / (2 * kPairs) * kPairs, num_rows = end - start;
    T* values = room(scratch.values, 2 * num_pairs);
    auto* factors = room(scratch.factors, num_rows * num_pairs);
    for (int64_t m = 0; m < num_rows; m++) {
        const T* own = shrunk + part.shrunk + (start + m - part.start) * part.a_rows;
        take_factors(own, shrunk_stride, part, values, num_pairs, factors + m * num_pairs);
    }
    T* to = y + start * y_stride + part.column;
    if (num_rows < kTotals)
        expand_few(pages, part, num_rows, to, y_stride, factors, num_pairs, scratch, ahead);
    else
        expand_many(pages, part, num_rows, to, y_stride, factors, num_pairs, scratch, ahead);
}

// Cuts parts into blocks of about the same work, which threads share. A block calls `one(parts, scratch)` once, with its
// parts of one row, and `several(part, start row, end row, scratch, read-ahead)` for each other part; a part of many
// rows may be cut between blocks. `kRun` is the matrix that is read of a part. `readers_hold(part)` is how many bytes
// each reader of `one` uses again and again: a part goes to `several` if the first cache level cannot hold these for
// all readers.
template <class T, Run (*kRun)(const LoraPart&), class Hold, class One, class Several>
void share_out(const LoraPages<T>& pages, const LoraPart* parts, int64_t num_parts, int num_threads, Hold readers_hold,
               One one, Several several) {
    constexpr double kReading = 4;  // reading a matrix costs about as much as multiplying this many rows with it
    auto cost = [](const LoraPart& part) {
        const Run run = kRun(part);
        return double(run.end - run.start) * (double(part.end - part.start) + kReading);
    };
    auto is_for_readers = [&](const LoraPart& part) {
        return part.end - part.start == 1 && kReaders * readers_hold(part) <= kNearBytes;
    };
    double total = 0;
    int64_t num_single = 0;
    for (int64_t i = 0; i < num_parts; i++) total += cost(parts[i]), num_single += is_for_readers(parts[i]);
    const bool has_readers = num_single >= kLeastSingles;
    // Blocks of fewer single rows would leave readers idle.
    const int64_t blocks = blocks_of(std::max<int64_t>(num_threads, num_parts / kLeastSingles), num_threads);
    Team::of_process().share(num_threads, blocks, [&](int64_t block) {
        const double low = total * double(block) / double(blocks), high = total * double(block + 1) / double(blocks);
        double before = 0;
        int64_t first = 0;
        while (first < num_parts && before + cost(parts[first]) <= low) before += cost(parts[first++]);
        static thread_local LoraScratch<T> scratch;
        scratch.singles.clear(), scratch.several.clear(), scratch.cuts.clear();
        for (int64_t i = first; i < num_parts && (before < high || block + 1 == blocks); i++) {
            const LoraPart& part = parts[i];
            const double own = cost(part), num_rows = double(part.end - part.start);
            auto row_at = [&](double at) {
                return part.start + int64_t(std::clamp((at - before) / own, 0.0, 1.0) * num_rows + 0.5);
            };
            const int64_t start = block == 0 ? part.start : row_at(low);
            const int64_t end = block + 1 == blocks ? part.end : row_at(high);
            before += own;
            if (start >= end) continue;
            if (has_readers && is_for_readers(part)) {
                scratch.singles.push_back(&part);
                continue;
            }
            scratch.several.push_back(&part);
            scratch.cuts.emplace_back(start, end);
        }
        if (!scratch.singles.empty()) one(scratch.singles, scratch);
        ReadAhead<T, kRun> ahead(pages, scratch.several, kAhead);
        for (size_t i = 0; i < scratch.several.size(); i++)
            several(*scratch.several[i], scratch.cuts[i].first, scratch.cuts[i].second, scratch, ahead);
    });
}

// The shrunk vectors x Aᵀ of all parts.
template <class T>
void shrink(const LoraPages<T>& pages, const LoraPart* parts, int64_t num_parts, const T* x, int64_t x_stride,
            T* shrunk, int num_threads) {
    share_out<T, run_of_a>(
        pages, parts, num_parts, num_threads, [](const LoraPart& part) { return part.num_in * int64_t(sizeof(T)); },
        [&](const PartList& singles, auto& scratch) { shrink_singles(pages, singles, x, x_stride, shrunk, scratch); },
        [&](const LoraPart& part, int64_t start, int64_t end, auto& scratch, auto& ahead) {
            shrink_part(pages, part, start, end, x, x_stride, shrunk, scratch, ahead);
        });
}

// y += v B for all parts, where v are the shrunk vectors, `shrunk_stride` elements from one worker's to the next one's.
template <class T>
void expand(const LoraPages<T>& pages, const LoraPart* parts, int64_t num_parts, const T* shrunk, int64_t shrunk_stride,
            T* y, int64_t y_stride, int num_threads) {
    share_out<T, run_of_b>(
        pages, parts, num_parts, num_threads,
        [](const LoraPart& part) { return part.num_out * int64_t(sizeof(float)); },
        [&](const PartList& singles, auto& scratch) {
            expand_singles(pages, singles, shrunk, shrunk_stride, y, y_stride, scratch);
        },
        [&](const LoraPart& part, int64_t start, int64_t end, auto& scratch, auto& ahead) {
            expand_part(pages, part, start, end, shrunk, shrunk_stride, y, y_stride, scratch, ahead);
        });
}

// y += x Aᵀ B on one worker, which holds all rows of A; `length` is the number of elements of the shrunk vectors.
template <class T>
void add(const LoraPages<T>& pages, const LoraPart* parts, int64_t num_parts, const T* x, int64_t x_stride, T* y,
         int64_t y_stride, int64_t length, int num_threads) {
    static thread_local std::vector<T> shrunk;
    T* between = room(shrunk, length);
    shrink(pages, parts, num_parts, x, x_stride, between, num_threads);
    expand(pages, parts, num_parts, between, length, y, y_stride, num_threads);
}

// Writes the products of rows of x with each row of a table, which is the part's A, to columns `ids` of rows of y. The
// contract is `EndKernels.set_columns` of ../model_ends.py.
template <class T>
void set_columns(const LoraPages<T>& pages, const LoraPart& table, const T* x, int64_t x_stride, const int64_t* ids,
                 float* y, int64_t y_stride, int num_threads) {
    const int64_t width = table.num_in, num_rows = table.end - table.start;
    share_ranges(table.a_rows, blocks_of(table.a_rows, num_threads), num_threads, [&](int64_t first, int64_t last) {
        static thread_local std::vector<T> spare;
        T* copies = room(spare, kOneDots * width);
        LoraPart part = table;
        part.a += first * width, part.a_rows = last - first;
        const PartList parts = {&part};
        ReadAhead<T, run_of_a> ahead(pages, parts, kAhead);
        Rows<T> rows(pages, part, part.a);
        const int64_t most = num_rows == 1 ? kOneDots : kDots;
        for (int64_t at = first; at < last; at += most) {
            const int count = int(std::min(most, last - at));
            const T* a[kOneDots];
            for (int j = 0; j < kOneDots; j++) a[j] = j < count ? rows.take(width, copies + j * width) : a[0];
            ahead.lines(count * width * int64_t(sizeof(T)) / 64);
            const auto columns_of = [&](int64_t row, auto num_x, auto num_dots) {
                constexpr int kRows = decltype(num_x)::value, kCount = decltype(num_dots)::value;
                float products[kRows * kCount];
                dot<T, kRows, kCount>(x + row * x_stride, x_stride, a, width, products, kCount, count);
                for (int m = 0; m < kRows; m++)
                    for (int j = 0; j < count; j++) y[(row + m) * y_stride + ids[at + j]] = products[m * kCount + j];
            };
            const std::integral_constant<int, 1> one;
            const std::integral_constant<int, kDots> dots;
            if (most == kOneDots) {
                columns_of(0, one, std::integral_constant<int, kOneDots>());
                continue;
            }
            int64_t row = 0;
            for (; row + 4 <= num_rows; row += 4) columns_of(row, std::integral_constant<int, 4>(), dots);
            for (; row < num_rows; row++) columns_of(row, one, dots);
        }
    });
}

// y = y * (1 + gain) + shift in place, for all parts: their two vectors lie one after the other at `b`. The contract is
// ../output_vectors.py.
template <class T>
void scale_outputs(const LoraPages<T>& pages, const LoraPart* parts, int64_t num_parts, T* y, int64_t y_stride,
                   int num_threads) {
    int64_t num_rows = 0;
    for (int64_t i = 0; i < num_parts; i++) num_rows += parts[i].end - parts[i].start;
    share_ranges(num_rows, blocks_of(num_rows, num_threads), num_threads, [&](int64_t first, int64_t last) {
        static thread_local std::vector<T> spare;
        int64_t before = 0;  // rows of the parts before
        for (const LoraPart* part = parts; part != parts + num_parts && before < last; part++) {
            const int64_t start = part->start + std::max<int64_t>(first - before, 0);
            const int64_t end = std::min(part->start + last - before, part->end), width = part->num_out;
            before += part->end - part->start;
            if (start >= end) continue;
            T* both = room(spare, 2 * width);
            const T* gain = pages.row(*part, part->b, width, both);
            const T* shift = pages.row(*part, part->b + width, width, both + width);
            for (int64_t row = start; row < end; row++) {
                T* to = y + row * y_stride + part->column;
                for (int64_t k = 0; k < width; k += kLanes) {
                    const Floats value = load(to + k, width - k);
                    store(to + k, value + value * load(gain + k, width - k) + load(shift + k, width - k), width - k);
                }
            }
        }
    });
}

}  // namespace motet
