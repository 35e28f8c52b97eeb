// Linear layers, on weights in a layout of their own (packed by ../native/linear.py).
//
// Packed weights are panels. A panel holds a few vectors of outputs: for the first `kDepth` inputs the weights of all
// its outputs, then for the next `kDepth` inputs, and so on. So weights are read in order, once for a tile of a few rows
// of x, and each element of x is multiplied with whole vectors of outputs. The sums of a row run over its inputs in
// order, so that its result is the same to the last bit for any number of rows and threads.
//
// Tiles of rows take turns with a panel, and each of them fetches a part of the next panel, so that memory is read while
// all of them compute. Where a CPU multiplies floats only, the first tile keeps the weights that it converts for the
// others, of some inputs at a time: so many that they stay in the first cache level.
#pragma once

#include <type_traits>
#include <vector>

#include "rows.h"
#include "tiles.h"

namespace motet {

// The weights of 16 outputs for the inputs that the CPU multiplies at once.
template <class T>
struct Outputs {
    static constexpr int64_t kDepth = 1;  // inputs
    typedef float Input;                  // to what the elements of x are converted
    Floats value;
    explicit Outputs(const T* from) : value(widen(from)) {}
    void add_to(Floats& sum, const Input* x) const { sum += value * *x; }
    void keep(float* to) const { store(to, value); }
};

#ifdef MOTET_BF16_PRODUCTS
template <>
struct Outputs<Bfloat16> {
    static constexpr int64_t kDepth = 2;
    typedef Bfloat16 Input;
    __m512bh value;
    explicit Outputs(const Bfloat16* from) : value((__m512bh)_mm512_loadu_si512(from)) {}
    void add_to(Floats& sum, const Input* x) const {
        int both;
        std::memcpy(&both, x, sizeof both);
        sum = (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(both), value);
    }
};
#endif

#ifdef __AVX512F__
constexpr int64_t kNearInputs = 1 << 20;  // elements of x that are multiplied with all weights before the next ones
#else
constexpr int64_t kNearInputs = 1 << 17;
#endif
constexpr int kTileRows = 6;         // rows at once
constexpr int64_t kLeastBlock = 24;  // the fewest rows of a block, even of very wide ones

// Vectors of 16 outputs that are computed together.
template <class T>
constexpr int panel_of() {
#ifdef MOTET_TILES
    if (std::is_same<T, Bfloat16>::value) return 2;  // so that two tiles of rows and two of outputs are in registers
#endif
#ifdef __AVX512F__
    return 4;
#else
    return 1;  // registers hold the sums of six rows and one vector
#endif
}

// Y: of the results, T or float; these are rounded to T either way.
template <class T, class Y = T>
struct LinearCall {
    const typename Outputs<T>::Input* x;
    const T *weight, *bias;  // no bias: null
    Y* y;
    int64_t x_stride, y_stride, num_in, num_out;  // elements
};

constexpr int64_t kKeptBytes = 20480;     // of weights as floats
constexpr int64_t kWeightsAhead = 16384;  // bytes that are fetched ahead of the reader, where tiles do not share that
constexpr int64_t kRunBytes = 2048;       // of weights, after which a tile fetches again

// Some inputs of a panel.
struct PanelPart {
    int64_t panel, start, stop;  // inputs
    float* kept;                 // the weights as floats; null: they are not kept
    bool is_kept;                // an earlier tile has kept them
    float* sums;                 // `[rows, outputs of a panel]`, which wait for the next part
    const char* ahead;           // weights that are read later: `lines` cache lines with each `run` of inputs
    int64_t lines, run;
};

template <class T>
constexpr bool converts() {
    return !std::is_same<T, typename Outputs<T>::Input>::value;
}

// Adds the products with weights of `kVectors` vectors to the sums of `kRows` rows. `kept`: where to keep the weights;
// null: nowhere.
template <class T, int kRows, int kVectors>
__attribute__((always_inline)) inline void add_products(const T* weight, float* kept, const PanelPart& part,
                                                        const typename Outputs<T>::Input* x, int64_t x_stride,
                                                        Floats (&sums)[kRows][kVectors]) {
    typedef Outputs<T> Weights;
    constexpr int64_t kDepth = Weights::kDepth, kWidth = kLanes * kDepth;
    const int64_t steps = (part.stop - part.start) / kDepth, run = part.run / kDepth;
    const char* ahead = part.ahead;
    for (int64_t first = 0; first < steps; first += run) {
        for (int64_t line = 0; line < part.lines; line++, ahead += 64) __builtin_prefetch(ahead, 0, 2);
        const int64_t end = std::min(steps, first + run);
        for (int64_t step = first; step < end; step++)
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; v++) {
                const Weights outputs(weight + (step * kVectors + v) * kWidth);
                if constexpr (converts<T>())
                    if (kept) outputs.keep(kept + (step * kVectors + v) * kLanes);
#pragma GCC unroll 6
                for (int m = 0; m < kRows; m++) outputs.add_to(sums[m][v], x + m * x_stride + step * kDepth);
            }
    }
}

// Computes a tile of `kRows` rows for a part of a panel. The sums stay in registers.
template <int kRows, class T, class Y>
void linear_tile(const LinearCall<T, Y>& call, const PanelPart& part, int64_t row) {
    typedef Outputs<T> Weights;
    constexpr int64_t kDepth = Weights::kDepth, kWidth = kLanes * kDepth;
    constexpr int kVectors = panel_of<T>();
    const int64_t steps = (call.num_in + kDepth - 1) / kDepth;
    const T* weight = call.weight + (part.panel * steps + part.start / kDepth) * kVectors * kWidth;
    const auto* x = call.x + row * call.x_stride + part.start;
    float* waiting = part.sums + row * kVectors * kLanes;
    Floats sums[kRows][kVectors];
#pragma GCC unroll 6  // one by one: GCC clears a whole array in memory
    for (int m = 0; m < kRows; m++)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; v++)
            sums[m][v] = part.start == 0 ? Floats{} : load(waiting + (m * kVectors + v) * kLanes);
    if constexpr (converts<T>()) {
        if (part.is_kept)
            add_products((const float*)part.kept, nullptr, part, x, call.x_stride, sums);
        else
            add_products(weight, part.kept, part, x, call.x_stride, sums);
    } else {
        add_products(weight, nullptr, part, x, call.x_stride, sums);
    }
    if (part.stop < call.num_in) {
#pragma GCC unroll 6
        for (int m = 0; m < kRows; m++)
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; v++) store(waiting + (m * kVectors + v) * kLanes, sums[m][v]);
        return;
    }
    if (const int64_t left = call.num_in % kDepth; left > 0)  // fewer than `kDepth` inputs
        for (int m = 0; m < kRows; m++) {
            const int64_t whole = part.stop - part.start - left;
            typename Weights::Input last[kDepth] = {};
            std::copy_n(x + m * call.x_stride + whole, left, last);
            for (int v = 0; v < kVectors; v++)
                Weights(weight + (whole / kDepth * kVectors + v) * kWidth).add_to(sums[m][v], last);
        }
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; v++) {
        const int64_t column = (part.panel * kVectors + v) * kLanes, count = call.num_out - column;
        if (count <= 0) return;
        const Floats bias = call.bias ? load(call.bias + column, count) : Floats{};
#pragma GCC unroll 6
        for (int m = 0; m < kRows; m++)
            store(call.y + (row + m) * call.y_stride + column, rounded<T>(in_order<T>(sums[m][v]) + bias), count);
    }
}

// Computes a tile of `num_rows` rows, which are at most `kRows`.
template <int kRows, class T, class Y>
void linear_tile_of(const LinearCall<T, Y>& call, const PanelPart& part, int64_t row, int64_t num_rows) {
    if constexpr (kRows > 0) {
        if (num_rows == kRows)
            linear_tile<kRows>(call, part, row);
        else
            linear_tile_of<kRows - 1>(call, part, row, num_rows);
    }
}

#ifdef MOTET_TILES
// The sums of `kCount` tiles of rows, which begin at `x`, and of a panel of two vectors of outputs, over all inputs:
// `[kCount, 16 rows, 32 outputs]`. A tile has `num_rows` rows. The first of the passes over a panel fetches its weights.
template <int kCount>
inline void tile_sums(const Bfloat16* const (&x)[kCount], int64_t x_stride, int64_t num_rows, const Bfloat16* weight,
                      int64_t num_in, float (&to)[kCount][kLanes][2 * kLanes], bool is_first_pass) {
    constexpr int kStride = 128;  // bytes of a panel from a pair of inputs to the next one
    zero_sums<kCount>();
    const char* weights = (const char*)weight;
    int64_t at = 0;
    for (; at + kTileInputs <= num_in; at += kTileInputs, weights += kTilePairs * kStride) {
        for (int64_t line = 0; is_first_pass && line < kTilePairs * kStride; line += 64)
            __builtin_prefetch(weights + kWeightsAhead + line, 0, 2);
        add_products<kCount>(x[0] + at, x[kCount - 1] + at, x_stride * int64_t(sizeof(Bfloat16)), weights,
                             weights + kStride / 2, kStride);
    }
    if (const int64_t left = num_in - at; left > 0) {  // what lies beyond the inputs is not read
        alignas(64) Bfloat16 rows[kCount][kLanes][kTileInputs] = {};
        alignas(64) char padded[kTilePairs * kStride] = {};
        for (int tile = 0; tile < kCount; tile++)
            for (int64_t row = 0; row < num_rows; row++)
                std::copy_n(x[tile] + row * x_stride + at, left, rows[tile][row]);
        std::memcpy(padded, weights, size_t((left + 1) / 2 * kStride));
        finish_stores();
        add_products<kCount>(rows[0][0], rows[kCount - 1][0], 64, padded, padded + kStride / 2, kStride);
    }
    store_sums<kCount>(to[0][0], to[kCount - 1][0], sizeof to[0][0]);
}

// Computes the rows from each of `first_rows` on, a tile of them each, for one panel of outputs.
template <int kCount, class Y>
void tiles_of_panel(const LinearCall<Bfloat16, Y>& call, const int64_t (&first_rows)[kCount], int64_t num_rows,
                    int64_t panel, bool is_first_pass) {
    alignas(64) float sums[kCount][kLanes][2 * kLanes];
    const Bfloat16* x[kCount];
    for (int tile = 0; tile < kCount; tile++) x[tile] = call.x + first_rows[tile] * call.x_stride;
    const int64_t pairs = (call.num_in + 1) / 2;
    tile_sums<kCount>(x, call.x_stride, num_rows, call.weight + panel * pairs * 4 * kLanes, call.num_in, sums,
                      is_first_pass);
    for (int v = 0; v < 2; v++) {
        const int64_t column = (2 * panel + v) * kLanes, count = call.num_out - column;
        if (count <= 0) return;
        const Floats bias = call.bias ? load(call.bias + column, count) : Floats{};
        for (int tile = 0; tile < kCount; tile++)
            for (int64_t row = 0; row < num_rows; row++) {
                const Floats sum = load(sums[tile][row] + v * kLanes);
                store(call.y + (first_rows[tile] + row) * call.y_stride + column, rounded<Bfloat16>(sum + bias), count);
            }
    }
}

// `linear_panels` in tiles. The last tile of 16 rows begins where it ends with the last row: rows that it has in common
// with the one before are computed twice, with the same result.
template <class Y>
void linear_panels_in_tiles(const LinearCall<Bfloat16, Y>& call, int64_t num_rows, int64_t start, int64_t stop) {
    const int64_t height = std::min<int64_t>(num_rows, kLanes), last = num_rows - height;
    if (height == 0) return;
    configure_tiles(int(height));
    for (int64_t panel = start; panel < stop; panel++)
        for (int64_t row = 0; row < num_rows; row += 2 * kLanes)
            if (row + height < num_rows)
                tiles_of_panel<2>(call, {std::min(row, last), std::min(row + height, last)}, height, panel, row == 0);
            else
                tiles_of_panel<1>(call, {std::min(row, last)}, height, panel, row == 0);
    _tile_release();
}
#endif

// Computes some rows for panels `start` to `stop` of outputs.
template <class T, class Y>
void linear_panels(const LinearCall<T, Y>& call, int64_t num_rows, int64_t start, int64_t stop) {
#ifdef MOTET_TILES
    if constexpr (std::is_same<T, Bfloat16>::value)
        if (tiles_are_allowed()) return linear_panels_in_tiles(call, num_rows, start, stop);
#endif
    if (num_rows == 0) return;
    constexpr int64_t kDepth = Outputs<T>::kDepth, kOutputs = panel_of<T>() * kLanes;
    constexpr int64_t kInputBytes = kOutputs * int64_t(sizeof(T)), kRunInputs = kRunBytes / kInputBytes;
    static thread_local std::vector<float> kept, sums;
    const int64_t tiles = (num_rows + kTileRows - 1) / kTileRows;
    int64_t parts = 1;
    if (converts<T>() && tiles > 1) {
        constexpr int64_t kInputs = kKeptBytes / (kOutputs * int64_t(sizeof(float)));  // of a part, at most
        kept.resize(size_t(kInputs * kOutputs));
        sums.resize(std::max(sums.size(), size_t(num_rows * kOutputs)));
        parts = std::max<int64_t>(1, (call.num_in + kInputs - 1) / kInputs);
    }
    // In float32 a single tile is faster if it fetches nothing.
    const int64_t lines = tiles == 1 && !std::is_same<T, Bfloat16>::value ? 0 : (kRunBytes / 64 + tiles - 1) / tiles;
    const int64_t panel_inputs = (call.num_in + kDepth - 1) / kDepth * kDepth;
    for (int64_t panel = start; panel < stop; panel++)
        for (int64_t i = 0; i < parts; i++) {
            const int64_t first = call.num_in * i / parts, end = call.num_in * (i + 1) / parts;
            const int64_t bytes = (end - first) * kInputBytes;
            const char* ahead = (const char*)call.weight + (panel * panel_inputs + first) * kInputBytes;
            ahead += tiles > 1 ? bytes : std::min(bytes, kWeightsAhead);
            for (int64_t tile = 0; tile < tiles; tile++) {
                // Tiles are about equally high: a low one takes more time for a row.
                const int64_t row = num_rows * tile / tiles, next = num_rows * (tile + 1) / tiles;
                const PanelPart part{panel,
                                     first,
                                     end,
                                     tiles > 1 ? kept.data() : nullptr,
                                     tile > 0,
                                     sums.data(),
                                     ahead + bytes * tile / tiles,
                                     lines,
                                     kRunInputs};
                linear_tile_of<kTileRows>(call, part, row, next - row);
            }
        }
}

// Rows of x with the elements that `Outputs` takes: x itself, or a converted copy in `spare`. Sets `stride` to that of
// the rows returned.
template <class T>
inline const T* inputs_of(const T* x, int64_t&, int64_t, int64_t, std::vector<T>&, int) {
    return x;
}

inline const float* inputs_of(const Bfloat16* x, int64_t& stride, int64_t num_rows, int64_t width,
                              std::vector<float>& spare, int num_threads) {
    const int64_t padded = (width + kLanes - 1) / kLanes * kLanes;
    if (int64_t(spare.size()) < num_rows * padded) spare.resize(size_t(num_rows * padded));
    float* to = spare.data();
    share_rows(num_rows, width, num_threads, [&](int64_t start, int64_t end) {
        for (int64_t row = start; row < end; row++)
            for (int64_t i = 0; i < width; i += kLanes)
                store(to + row * padded + i, load(x + row * stride + i, width - i));
    });
    stride = padded;
    return to;
}

// Calls `compute(group, start, stop)` for ranges of the panels of each group that has rows.
template <class F>
void share_groups(const int64_t* offsets, int64_t num_groups, int64_t num_panels, int num_threads, F compute) {
    static thread_local std::vector<int64_t> kept;
    kept.clear();
    for (int64_t group = 0; group < num_groups; group++)
        if (offsets[group + 1] > offsets[group]) kept.push_back(group);
    const int64_t *groups = kept.data(), count = int64_t(kept.size());  // helpers have a vector of their own
    if (count == 0) return;
    const int64_t blocks = std::min(num_panels, (blocks_of(count * num_panels, num_threads) - 1) / count + 1);
    share_ranges(count * blocks, count * blocks, num_threads, [&](int64_t block, int64_t) {
        const int64_t part = block % blocks;
        compute(groups[block / blocks], num_panels * part / blocks, num_panels * (part + 1) / blocks);
    });
}

// y = x Wᵀ + bias for groups of rows, each with a weight of its own: group g has rows `offsets[g]` to `offsets[g + 1]`,
// and its weight begins at `g * weight_stride`, its bias at `g * num_out`. Threads share the panels of outputs.
template <class T, class Y>
void linear(const T* x, int64_t x_stride, const int64_t* offsets, int64_t num_groups, LinearCall<T, Y> call,
            int64_t weight_stride, int num_threads) {
    static thread_local std::vector<typename Outputs<T>::Input> spare;
    call.x_stride = x_stride;
    call.x = inputs_of(x, call.x_stride, offsets[num_groups], call.num_in, spare, num_threads);
    constexpr int64_t kOutputs = panel_of<T>() * kLanes;
    const int64_t num_panels = (call.num_out + kOutputs - 1) / kOutputs;
    const int64_t most = std::max(kLeastBlock, kNearInputs / std::max<int64_t>(1, call.num_in) / kTileRows * kTileRows);
    share_groups(offsets, num_groups, num_panels, num_threads, [&](int64_t group, int64_t start, int64_t stop) {
        for (int64_t row = offsets[group]; row < offsets[group + 1]; row += most) {
            LinearCall<T, Y> own = call;
            if (own.bias) own.bias += group * call.num_out;
            own.weight += group * weight_stride, own.x += row * call.x_stride, own.y += row * call.y_stride;
            linear_panels(own, std::min(offsets[group + 1] - row, most), start, stop);
        }
    });
}

// Whether these are the fastest linears for this CPU. In bfloat16 oneDNN is faster where the CPU has matrix instructions
// and these cannot use them.
template <class T>
bool linear_is_best() {
#ifdef __AMX_BF16__
    return !std::is_same<T, Bfloat16>::value || tiles_are_allowed();
#else
    return true;
#endif
}

}  // namespace motet
