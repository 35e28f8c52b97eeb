// Linear layers on weights of four bits, or of float8_e4m3fn, packed by ../native/quantised_linear.py. The contract is
// ../quantised.py.
//
// Each code stands for a number, by code_tables.h, less a zero point of its group of inputs, times the group's scale, which
// is a float, or of eight bits if all are powers of two. x keeps its dtype, and sums of a group are floats.
#pragma once

#include <vector>

#include "code_tables.h"
#include "quantised_linear.h"

namespace motet {

constexpr int64_t kUnit = 8;  // inputs, of which there are a multiple in each group
// Rows of a tile: few with all vectors of a panel, or more with some of them, so that their sums fill the registers.
#ifdef __AVX512F__
constexpr int kFewRows = 4, kCodeRows = 12, kCodeVectors = 2;
#else
constexpr int kFewRows = 3, kCodeRows = kTileRows, kCodeVectors = 1;
#endif
constexpr int64_t kPartInputs = 128;  // of which the numbers stay in the first cache level, for the next tiles of rows

template <class T, class Y>
struct CodeCall {
    // By tiles: what is multiplied at once of all rows of a tile, then the next. For matrix instructions as it lies.
    const typename Outputs<T>::Input* x;
    const float* x_sums;  // [rows, parts]: of a part's inputs; null: there are no zero points
    const uint32_t* weight;
    const float* scales;       // [panels, groups, outputs of a panel]; null: they are powers of two
    const uint8_t* exponents;  // of these, more by 127
    const int8_t* zeros;       // likewise; none: null
    const float* table;        // of four bits; null: codes of eight, which are float8_e4m3fn
    const T* bias;             // none: null
    Y* y;
    int64_t y_stride, num_in, num_out, group_size, num_parts, x_stride;  // `x_stride`: for matrix instructions
};

// Inputs of one group, at most `kPartInputs`.
struct CodePart {
    int64_t index, group, start, stop;
};

// Calls `use(part)` with all parts in order.
template <class F>
inline int64_t each_part(int64_t num_in, int64_t group_size, F use) {
    int64_t index = 0;
    for (int64_t group = 0; group * group_size < num_in; group++) {
        const int64_t last = std::min(num_in, (group + 1) * group_size);
        for (int64_t start = group * group_size; start < last; start += kPartInputs)
            use(CodePart{index++, group, start, std::min(last, start + kPartInputs)});
    }
    return index;
}

// What the sums of a part are multiplied with for 16 outputs of a panel.
template <class T, class Y>
struct PartScale {
    const CodeCall<T, Y>& call;
    const CodePart& part;
    Floats scale, zeros = {};
    PartScale(const CodeCall<T, Y>& call, const CodePart& part, int64_t panel, int64_t vector)
        : call(call), part(part) {
        const int64_t num_groups = (call.num_in + call.group_size - 1) / call.group_size;
        const int64_t at = (panel * num_groups + part.group) * kNarrowOutputs + vector * kLanes;
        scale = call.scales ? load(call.scales + at) : widen_exponents(call.exponents + at);
        if (call.zeros) zeros = widen_bytes(call.zeros + at);
    }
    void add_to(float* total, Floats sum, int64_t row) const {
        if (call.zeros) sum = sum - zeros * call.x_sums[row * call.num_parts + part.index];
        store(total, part.index == 0 ? sum * scale : load(total) + sum * scale);
    }
};

// Adds a part of some vectors of a panel, from `vector` on, to the totals of a tile of rows. `kept`: the numbers of the
// weights, written if `is_first`; null: they are not kept.
template <int kBits, int kRows, int kVectors, class T, class Y>
void codes_tile(const CodeCall<T, Y>& call, int64_t panel, int64_t vector, const CodePart& part, int64_t row,
                float* totals, typename Outputs<T>::Input* kept, bool is_first) {
    typedef typename Outputs<T>::Input Input;
    typedef CodeTable<Input, kBits> Table;
    typedef typename Table::Value Value;
    constexpr int64_t kCodes = 32 / kBits, kDepth = Outputs<Input>::kDepth, kSteps = kCodes / kDepth;
    constexpr int64_t kWidth = kLanes * kDepth;
    const Input* x = call.x + row * call.num_in + part.start * kRows;
    Input* numbers = kept ? kept + vector * kWidth : nullptr;
    Floats sums[kRows][kVectors];
#pragma GCC unroll 12
    for (int m = 0; m < kRows; m++)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; v++) sums[m][v] = Floats{};
    const auto add = [&](const Value(&weights)[kVectors]) __attribute__((always_inline)) {
#pragma GCC unroll 12
        for (int m = 0; m < kRows; m++, x += kDepth) {
            const Value inputs = Table::all(x);
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; v++) Table::add(sums[m][v], weights[v], inputs);
        }
    };
    const int64_t blocks = (part.stop - part.start) / kCodes;
    Value weights[kVectors];
    if (is_first) {
        const Table table(call.table);
        const uint32_t* words = call.weight + (panel * call.num_in + part.start) / kCodes * kNarrowOutputs;
        words += vector * kLanes;
        for (int64_t block = 0; block < blocks; block++, words += kNarrowOutputs) {
            const char* ahead = (const char*)words + kWeightsAhead;
            for (int64_t line = 0; line < kVectors; line++) __builtin_prefetch(ahead + line * 64, 0, 2);
#pragma GCC unroll 8
            for (int step = 0; step < kSteps; step++) {
#pragma GCC unroll 4
                for (int v = 0; v < kVectors; v++) weights[v] = table.of(words + v * kLanes, step);
                if (numbers) {
#pragma GCC unroll 4
                    for (int v = 0; v < kVectors; v++) Table::keep(numbers + v * kWidth, weights[v]);
                    numbers += kNarrowVectors * kWidth;
                }
                add(weights);
            }
        }
    } else {
        for (int64_t step = 0; step < blocks * kSteps; step++, numbers += kNarrowVectors * kWidth) {
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; v++) weights[v] = Table::kept(numbers + v * kWidth);
            add(weights);
        }
    }
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; v++) {
        const PartScale<T, Y> scale(call, part, panel, vector + v);
#pragma GCC unroll 12
        for (int m = 0; m < kRows; m++)
            scale.add_to(totals + ((row + m) * kNarrowVectors + vector + v) * kLanes, sums[m][v], row + m);
    }
}

template <int kBits, int kRows, class T, class Y>
void codes_tile_of(const CodeCall<T, Y>& call, int64_t panel, const CodePart& part, int64_t row, int64_t num_rows,
                   float* totals, typename Outputs<T>::Input* kept, bool is_first) {
    if constexpr (kRows > 0) {
        if (num_rows < kRows)
            return codes_tile_of<kBits, kRows - 1>(call, panel, part, row, num_rows, totals, kept, is_first);
        constexpr int kVectors = kRows <= kFewRows ? kNarrowVectors : kCodeVectors;
        for (int64_t vector = 0; vector < kNarrowVectors; vector += kVectors)
            codes_tile<kBits, kRows, kVectors>(call, panel, vector, part, row, totals, kept, is_first);
    }
}

// The tiles of a group of rows, which are about equally high.
struct CodeTiles {
    int64_t first, num_rows, count;
    CodeTiles(int64_t first, int64_t stop)
        : first(first), num_rows(stop - first), count((num_rows + kCodeRows - 1) / kCodeRows) {}
    int64_t row(int64_t tile) const { return first + num_rows * tile / count; }
};

// Keeps the numbers of a part of a panel, where registers hold no sums beside the table: those of `kTogether` vectors
// side by side for all inputs, then those of the next.
template <int kBits, int kTogether, class T, class Y>
void keep_numbers(const CodeCall<T, Y>& call, int64_t panel, const CodePart& part, typename Outputs<T>::Input* kept) {
    typedef CodeTable<typename Outputs<T>::Input, kBits> Table;
    constexpr int64_t kCodes = 32 / kBits;
    constexpr int64_t kDepth = Outputs<typename Outputs<T>::Input>::kDepth, kWidth = kLanes * kDepth;
    const Table table(call.table);
    const uint32_t* words = call.weight + (panel * call.num_in + part.start) / kCodes * kNarrowOutputs;
    for (int64_t i = part.start; i < part.stop; i += kCodes, words += kNarrowOutputs) {
        const char* ahead = (const char*)words + kWeightsAhead;
        for (int64_t line = 0; line < kNarrowVectors; line++) __builtin_prefetch(ahead + line * 64, 0, 2);
#pragma GCC unroll 8
        for (int step = 0; step < kCodes / kDepth; step++, kept += kTogether * kWidth)
#pragma GCC unroll 4
            for (int v = 0; v < kNarrowVectors; v++)
                Table::keep(kept + (v / kTogether * kPartInputs / kDepth * kTogether + v % kTogether) * kWidth,
                            table.of(words + v * kLanes, step));
    }
}

#ifdef MOTET_TILES
// Floats next to zero are zero while it lives, as matrix instructions have it.
class FlushedFloats {
  public:
    FlushedFloats() { _mm_setcsr(before | 0x8040); }
    ~FlushedFloats() { _mm_setcsr(before); }
    FlushedFloats(const FlushedFloats&) = delete;

  private:
    const unsigned before = _mm_getcsr();
};

// The inputs of a row in the order in which `codes_part_of_row` multiplies two at once.
inline void pair_inputs(const Bfloat16* x, int64_t num_in, Bfloat16* to) {
    constexpr int kOrder[] = {2, 0, 3, 1, 6, 4, 7, 5};
    for (int64_t i = 0; i < num_in; i += kUnit)
        for (int place = 0; place < kUnit; place++) to[i + place] = x[i + kOrder[place]];
}

// Adds a part of a panel to the totals of a lone row, by products of vectors, which for one row are faster, to the same
// bits as in tiles. Of each 32 inputs matrix instructions add up the products of even ones, those of odd ones, and both
// to what there was. A product of vectors multiplies first the upper and then the lower one of two inputs.
template <int kBits, class Y>
void codes_part_of_row(const CodeCall<Bfloat16, Y>& call, int64_t panel, const CodePart& part, int64_t row,
                       const Bfloat16* paired, float* totals) {
    typedef CodeTable<Bfloat16, kBits> Table;
    constexpr int64_t kCodes = 32 / kBits;
    const Table table(call.table);
    const uint32_t* words = call.weight + (panel * call.num_in + part.start) / kCodes * kNarrowOutputs;
    Floats sums[kNarrowVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kNarrowVectors; v++) sums[v] = Floats{};
    for (int64_t start = part.start; start < part.stop; start += kTileInputs) {
        Floats even[kNarrowVectors], odd[kNarrowVectors];
#pragma GCC unroll 4
        for (int v = 0; v < kNarrowVectors; v++) even[v] = odd[v] = Floats{};
        for (int64_t i = start; i < std::min(part.stop, start + kTileInputs); i += kCodes, words += kNarrowOutputs) {
            typename Table::Value inputs[kCodes / 2];
#pragma GCC unroll 4
            for (int pair = 0; pair < kCodes / 2; pair++) inputs[pair] = Table::all(paired + i + 2 * pair);
#pragma GCC unroll 4
            for (int v = 0; v < kNarrowVectors; v++) {
                __builtin_prefetch((const char*)(words + v * kLanes) + kWeightsAhead, 0, 2);
                const __m512i codes = _mm512_loadu_si512(words + v * kLanes);
                constexpr __mmask32 kLower = 0x55555555;
                const __m512i upper = _mm512_slli_epi32(codes, 16), lower = _mm512_srli_epi32(codes, 16 + kBits);
                const __m512i of_even = _mm512_mask_srli_epi16(upper, kLower, codes, kBits);
                const __m512i of_odd = _mm512_mask_blend_epi16(kLower, codes, lower);
#pragma GCC unroll 2
                for (int shift = 0; shift < 16; shift += 2 * kBits) {
                    const typename Table::Value* x = inputs + shift / kBits;
                    Table::add(even[v], table.at(_mm512_srli_epi16(of_even, unsigned(shift))), x[0]);
                    Table::add(odd[v], table.at(_mm512_srli_epi16(of_odd, unsigned(shift))), x[1]);
                }
            }
        }
#pragma GCC unroll 4
        for (int v = 0; v < kNarrowVectors; v++) sums[v] += even[v] + odd[v];
    }
#pragma GCC unroll 4
    for (int v = 0; v < kNarrowVectors; v++)
        PartScale<Bfloat16, Y>(call, part, panel, v).add_to(totals + (row * kNarrowVectors + v) * kLanes, sums[v], row);
}

// Adds a part of a panel to the totals of rows by matrix instructions. The last tile of 16 rows ends with the last row:
// of rows that it has in common with the one before, only the first sums count.
template <int kBits, class Y>
void codes_part_in_tiles(const CodeCall<Bfloat16, Y>& call, int64_t panel, const CodePart& part, int64_t first,
                         int64_t num_rows, float* totals, Bfloat16* kept) {
    constexpr int kVectors = 2;  // as `tile_sums` takes them
    keep_numbers<kBits, kVectors>(call, panel, part, kept);
    finish_stores();
    const int64_t height = std::min<int64_t>(num_rows, kLanes), stop = first + num_rows, last = stop - height;
    alignas(64) float sums[2][kLanes][kVectors * kLanes];
    for (int64_t vector = 0; vector < kNarrowVectors; vector += kVectors, kept += kPartInputs * kVectors * kLanes) {
        const PartScale<Bfloat16, Y> scales[] = {{call, part, panel, vector}, {call, part, panel, vector + 1}};
        for (int64_t row = first; row < stop; row += 2 * kLanes) {
            const int64_t begin[] = {std::min(row, last), std::min(row + kLanes, last)};
            const Bfloat16* x = call.x + part.start;
            const Bfloat16* const both[] = {x + begin[0] * call.x_stride, x + begin[1] * call.x_stride};
            const int count = row + height < stop ? 2 : 1;
            const int64_t num_in = part.stop - part.start;
            if (count == 2)
                tile_sums<2>(both, call.x_stride, height, kept, num_in, sums, false);
            else
                tile_sums<1>({both[0]}, call.x_stride, height, kept, num_in, *(float (*)[1][kLanes][32])sums, false);
            for (int tile = 0; tile < count; tile++)
                for (int64_t at = row + tile * kLanes; at < begin[tile] + height; at++)
                    for (int v = 0; v < kVectors; v++)
                        scales[v].add_to(totals + (at * kNarrowVectors + vector + v) * kLanes,
                                         load(sums[tile][at - begin[tile]] + v * kLanes), at);
        }
    }
}
#endif

// Computes tiles `first` to `last` for panels `start` to `stop` of outputs, of which the first is of panel `zeroth`.
template <int kBits, class T, class Y>
void codes_panels(const CodeCall<T, Y>& call, const CodeTiles& tiles, int64_t first, int64_t last, int64_t start,
                  int64_t stop, int64_t zeroth) {
    typedef typename Outputs<T>::Input Input;
    static thread_local std::vector<Input> kept(size_t(kPartInputs * kNarrowOutputs));
    static thread_local std::vector<float> spare;
    const int64_t first_row = tiles.row(first), num_rows = tiles.row(last) - first_row;
    spare.resize(std::max(spare.size(), size_t(num_rows * kNarrowOutputs)));
    float* totals = spare.data() - first_row * kNarrowOutputs;
    const auto compute = [&](auto add_part) {
        for (int64_t panel = start; panel < stop; panel++) {
            each_part(call.num_in, call.group_size, [&](const CodePart& part) { add_part(panel, part); });
            for (int v = 0; v < kNarrowVectors; v++) {
                const int64_t column = ((panel - zeroth) * kNarrowVectors + v) * kLanes, count = call.num_out - column;
                if (count <= 0) break;
                const Floats bias = call.bias ? load(call.bias + column, count) : Floats{};
                for (int64_t row = first_row; row < first_row + num_rows; row++) {
                    const Floats total = load(totals + (row * kNarrowVectors + v) * kLanes);
                    store(call.y + row * call.y_stride + column, rounded<T>(total + bias), count);
                }
            }
        }
    };
#ifdef MOTET_TILES
    if constexpr (std::is_same<T, Bfloat16>::value)
        if (tiles_are_allowed()) {
            const FlushedFloats flushed;
            if (num_rows == 1) {
                static thread_local std::vector<Bfloat16> paired;
                paired.resize(std::max(paired.size(), size_t(call.num_in)));
                pair_inputs(call.x + first_row * call.x_stride, call.num_in, paired.data());
                return compute([&](int64_t panel, const CodePart& part) {
                    codes_part_of_row<kBits>(call, panel, part, first_row, paired.data(), totals);
                });
            }
            configure_tiles(int(std::min<int64_t>(num_rows, kLanes)));
            compute([&](int64_t panel, const CodePart& part) {
                codes_part_in_tiles<kBits>(call, panel, part, first_row, num_rows, totals, kept.data());
            });
            return _tile_release();
        }
#endif
    const bool keeps_first = kCodeVectors == kNarrowVectors && num_rows > kFewRows;
    const bool keeps = keeps_first || last - first > 1;
    compute([&](int64_t panel, const CodePart& part) {
        if (keeps_first) keep_numbers<kBits, kNarrowVectors>(call, panel, part, kept.data());
        for (int64_t tile = first; tile < last; tile++)
            codes_tile_of<kBits, kCodeRows>(call, panel, part, tiles.row(tile), tiles.row(tile + 1) - tiles.row(tile),
                                            totals, keeps ? kept.data() : nullptr, tile == first && !keeps_first);
    });
}

// Groups of rows, each of which has a weight of its own: group g has rows `offsets[g]` to `offsets[g + 1]`.
struct RowGroups {
    const int64_t* offsets;
    int64_t count;
    int64_t num_rows() const { return offsets[count]; }
    CodeTiles tiles(int64_t group) const { return {offsets[group], offsets[group + 1]}; }
    bool are_single_rows() const {
        for (int64_t group = 0; group < count; group++)
            if (offsets[group + 1] - offsets[group] > 1) return false;
        return true;
    }
};

// The rows of x in the order in which tiles read them, in `to`.
template <class T>
void order_inputs(const T* x, int64_t x_stride, const RowGroups& groups, int64_t num_in, typename Outputs<T>::Input* to,
                  int num_threads) {
    typedef typename Outputs<T>::Input Input;
    constexpr int64_t kDepth = Outputs<T>::kDepth;
    share_rows(num_in / kUnit, kUnit * groups.num_rows(), num_threads, [&](int64_t start, int64_t end) {
        for (int64_t group = 0; group < groups.count; group++) {
            const CodeTiles tiles = groups.tiles(group);
            for (int64_t tile = 0; tile < tiles.count; tile++) {
                const int64_t first = tiles.row(tile), rows = tiles.row(tile + 1) - first;
                for (int64_t m = 0; m < rows; m++) {
                    const T* from = x + (first + m) * x_stride;
                    Input* own = to + first * num_in + m * kDepth;
                    for (int64_t i = start * kUnit; i < end * kUnit; i += kDepth)
                        for (int64_t d = 0; d < kDepth; d++) assign(own[i * rows + d], to_float(from[i + d]));
                }
            }
        }
    });
}

// y = x Wᵀ + bias of weights of four bits, those of groups one behind the other, each in whole panels, as their biases.
// `num_in` and `group_size` are multiples of eight.
template <class T, class Y>
void linear_of_codes(const T* x, int64_t x_stride, const RowGroups& groups, CodeCall<T, Y> call, int num_threads) {
    typedef typename Outputs<T>::Input Input;
    const int64_t num_rows = groups.num_rows();
    if (num_rows == 0) return;
    static thread_local std::vector<Input> ordered;
    static thread_local std::vector<float> kept_sums;
    if constexpr (std::is_same<T, Input>::value)
        if ((std::is_same<T, Bfloat16>::value && tiles_are_allowed()) ||
            ((num_rows == 1 || x_stride == call.num_in) && groups.are_single_rows()))
            call.x = x, call.x_stride = x_stride;  // else they are to be in order
    if (!call.x) {
        ordered.resize(std::max(ordered.size(), size_t(num_rows * call.num_in)));
        order_inputs(x, x_stride, groups, call.num_in, ordered.data(), num_threads);
        call.x = ordered.data();
    }
    call.num_parts = each_part(call.num_in, call.group_size, [](const CodePart&) {});
    if (call.zeros) {
        kept_sums.resize(std::max(kept_sums.size(), size_t(num_rows * call.num_parts)));
        float* x_sums = kept_sums.data();
        share_rows(num_rows, call.num_in, num_threads, [&](int64_t start, int64_t end) {
            for (int64_t row = start; row < end; row++)
                each_part(call.num_in, call.group_size, [&](const CodePart& part) {
                    Floats total = {};
                    for (int64_t i = part.start; i < part.stop; i += kLanes)
                        total += load(x + row * x_stride + i, part.stop - i);
                    x_sums[row * call.num_parts + part.index] = sum(total);
                });
        });
        call.x_sums = x_sums;
    }
    const int64_t num_panels = (call.num_out + kNarrowOutputs - 1) / kNarrowOutputs;
    const int64_t near = std::max(kLeastBlock, kNearInputs / std::max<int64_t>(1, call.num_in)) / kCodeRows;
    share_groups(groups.offsets, groups.count, num_panels, num_threads,
                 [&](int64_t group, int64_t start, int64_t stop) {
                     const CodeTiles tiles = groups.tiles(group);
                     const int64_t zeroth = group * num_panels;
                     CodeCall<T, Y> own = call;
                     if (own.bias) own.bias += group * call.num_out;
                     for (int64_t tile = 0; tile < tiles.count; tile += near) {
                         const int64_t last = std::min(tile + near, tiles.count);
                         if constexpr (takes_float8<T>())
                             if (!own.table) {
                                 codes_panels<8>(own, tiles, tile, last, zeroth + start, zeroth + stop, zeroth);
                                 continue;
                             }
                         codes_panels<4>(own, tiles, tile, last, zeroth + start, zeroth + stop, zeroth);
                     }
                 });
}

}  // namespace motet
