// LoRA over pages: each segment of rows with its own adapter, at the adapter's real rank.
#pragma once

#include <vector>

#include "native_vectors.h"

namespace motet {

// One module of one segment's adapter; the caller lays these out as rows of int64.
struct LoraPart {
    int64_t start, end;  // rows of x and y
    int64_t first_page;  // where the adapter's pages begin in the list of pages
    int64_t rank, a_rows;
    int64_t a, b;          // offsets in the adapter's virtual array, in elements
    int64_t shrunk;        // offset of `[rows, a_rows]` in what is shrunk
    int64_t column;        // of y
    int64_t num_in, num_out;
};

// One layer of the pool, and the adapters' pages in it.
template <class T>
struct LoraPages {
    const T* layer;
    int64_t page_stride, slab;  // elements
    const int64_t* pages;

    const T* at(const LoraPart& part, int64_t offset) const {
        return layer + pages[part.first_page + offset / slab] * page_stride + offset % slab;
    }

    // The row of `width` elements at `offset`: in its page, or copied to `spare` if it straddles pages.
    const T* row(const LoraPart& part, int64_t offset, int64_t width, T* spare) const {
        if (offset % slab + width <= slab) return at(part, offset);
        for (int64_t done = 0; done < width;) {
            int64_t run = std::min(width - done, slab - (offset + done) % slab);
            std::memcpy(spare + done, at(part, offset + done), size_t(run) * sizeof(T));
            done += run;
        }
        return spare;
    }

    // Adapters are read once a step and lie anywhere in memory: ask for them before they are needed.
    void prefetch(const LoraPart& part, int64_t offset, int64_t end, int64_t width) const {
        const int64_t line = 64 / int64_t(sizeof(T)), stop = std::min(offset + width, end);
        while (offset < stop) {
            const T* from = at(part, offset);
            int64_t run = std::min(stop - offset, slab - offset % slab);
            for (int64_t i = 0; i < run; i += line) __builtin_prefetch(from + i);
            offset += run;
        }
    }
};

constexpr int kDots = 4;  // rows of A at once

template <class T, int kRows>
inline void dot(const T* x, int64_t x_stride, const T* const* a, int64_t width, T* to, int64_t to_stride, int count) {
    constexpr int kStep = Operand<T>::kWidth;
    Floats totals[kRows][kDots] = {};
    int64_t k = 0;
    for (; k + kStep <= width; k += kStep) {
        Operand<T> rows[kDots] = {Operand<T>(a[0] + k), Operand<T>(a[1] + k), Operand<T>(a[2] + k), Operand<T>(a[3] + k)};
        for (int m = 0; m < kRows; m++) {
            Operand<T> own(x + m * x_stride + k);
            for (int j = 0; j < kDots; j++) multiply_add(totals[m][j], own, rows[j]);
        }
    }
    if (k < width)
        for (int m = 0; m < kRows; m++) {
            Operand<T> own(x + m * x_stride + k, width - k);
            for (int j = 0; j < kDots; j++) multiply_add(totals[m][j], own, Operand<T>(a[j] + k, width - k));
        }
    for (int m = 0; m < kRows; m++)
        for (int j = 0; j < count; j++) assign(to[m * to_stride + j], sum(totals[m][j]));
}

// x Aᵀ of the part's rows, `[rows, a_rows]` at `part.shrunk` of `shrunk`.
template <class T>
void shrink_part(const LoraPages<T>& pages, const LoraPart& part, const T* x, int64_t x_stride, T* shrunk) {
    const int64_t width = part.num_in, end = part.a + part.a_rows * width;
    std::vector<T> spare(size_t(kDots * width));
    T* out = shrunk + part.shrunk;
    for (int64_t first = 0; first < part.a_rows; first += kDots) {
        const int count = int(std::min<int64_t>(kDots, part.a_rows - first));
        const int64_t offset = part.a + first * width;
        const T* rows[kDots];
        for (int j = 0; j < kDots; j++)
            rows[j] = j < count ? pages.row(part, offset + j * width, width, spare.data() + j * width) : rows[0];
        pages.prefetch(part, offset + kDots * width, end, kDots * width);
        int64_t m = part.start;
        for (; m + 4 <= part.end; m += 4)
            dot<T, 4>(x + m * x_stride, x_stride, rows, width, out + (m - part.start) * part.a_rows + first,
                      part.a_rows, count);
        for (; m < part.end; m++)
            dot<T, 1>(x + m * x_stride, x_stride, rows, width, out + (m - part.start) * part.a_rows + first,
                      part.a_rows, count);
    }
}

constexpr int kPairs = 4;          // pairs of rows of B at once
constexpr int64_t kTotals = 16;  // rows of y at once

// Adds v B to the part's columns of y, where v is what all workers have shrunk, worker after worker.
template <class T>
void expand_part(const LoraPages<T>& pages, const LoraPart& part, const T* shrunk, int64_t shrunk_stride, T* y,
                 int64_t y_stride) {
    typedef typename RowPair<T>::Factors Factors;
    const int64_t width = part.num_out, padded = (width + kSpan - 1) / kSpan * kSpan;
    const int64_t end = part.b + part.rank * width, num_steps = (part.rank + 2 * kPairs - 1) / (2 * kPairs);
    const int64_t most = std::min(kTotals, part.end - part.start);
    std::vector<T> spare(size_t((2 * kPairs + 1) * width));  // the last row stays zero, for an odd rank
    std::vector<float> totals(size_t(most * padded));
    std::vector<Factors> factors(size_t(most * num_steps * kPairs));
    for (int64_t start = part.start; start < part.end; start += most) {
        const int64_t num_rows = std::min(most, part.end - start);
        std::fill(totals.begin(), totals.end(), 0.0f);
        for (int64_t m = 0; m < num_rows; m++) {
            const T* own = shrunk + part.shrunk + (start + m - part.start) * part.a_rows;
            auto value = [&](int64_t j) {
                return j < part.rank ? to_float(own[j / part.a_rows * shrunk_stride + j % part.a_rows]) : 0.0f;
            };
            for (int64_t j = 0; j < num_steps * kPairs; j++)
                factors[size_t(m * num_steps * kPairs + j)] = RowPair<T>::factors(value(2 * j), value(2 * j + 1));
        }
        for (int64_t step = 0; step < num_steps; step++) {
            const T* rows[2 * kPairs];
            for (int j = 0; j < 2 * kPairs; j++) {
                const int64_t row = step * 2 * kPairs + j;
                rows[j] = row < part.rank
                              ? pages.row(part, part.b + row * width, width, spare.data() + j * width)
                              : spare.data() + 2 * kPairs * width;
            }
            pages.prefetch(part, part.b + (step + 1) * 2 * kPairs * width, end, 2 * kPairs * width);
            add_weighted_rows<T, kPairs>(totals.data(), padded, num_rows, factors.data() + step * kPairs,
                                         num_steps * kPairs, rows, width);
        }
        for (int64_t m = 0; m < num_rows; m++)
            for (int64_t column = 0; column < width; column += kSpan) {
                const float* total = totals.data() + m * padded + column;
                Sums sums = RowPair<T>::in_order({load(total), load(total + kLanes)});
                T* to = y + (start + m) * y_stride + part.column + column;
                const int64_t count = width - column;
                store(to, load(to, count) + sums.first, count);
                if (count > kLanes)
                    store(to + kLanes, load(to + kLanes, count - kLanes) + sums.second, count - kLanes);
            }
    }
}

template <class T>
void shrink(const LoraPages<T>& pages, const LoraPart* parts, int64_t num_parts, const T* x, int64_t x_stride,
            T* shrunk, [[maybe_unused]] int num_threads) {
#pragma omp parallel for schedule(dynamic) num_threads(num_threads) if (num_threads > 1)
    for (int64_t i = 0; i < num_parts; i++) shrink_part(pages, parts[i], x, x_stride, shrunk);
}

template <class T>
void expand(const LoraPages<T>& pages, const LoraPart* parts, int64_t num_parts, const T* shrunk,
            int64_t shrunk_stride, T* y, int64_t y_stride, [[maybe_unused]] int num_threads) {
#pragma omp parallel for schedule(dynamic) num_threads(num_threads) if (num_threads > 1)
    for (int64_t i = 0; i < num_parts; i++) expand_part(pages, parts[i], shrunk, shrunk_stride, y, y_stride);
}

}  // namespace motet
