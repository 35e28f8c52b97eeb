// Linear layers, on weights in a layout of their own (packed by ../native/linear.py).
//
// Packed weights are panels. A panel holds a few vectors of outputs: for the first `kDepth` inputs the weights of all
// its outputs, then for the next `kDepth` inputs, and so on. So weights are read in order, once for a few rows of x,
// and each element of x is multiplied with whole vectors of outputs. The sums of a row run over its inputs in order, so
// that its result is the same to the last bit for any number of rows and threads.
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
    explicit Outputs(const T* from) : value(load(from)) {}
    void add_to(Floats& sum, const Input* x) const { sum += value * *x; }
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

// Computes `kRows` rows and the vectors of outputs of a panel that begins with vector `first`. The sums
// stay in registers.
template <int kRows, class T, class Y>
void linear_tile(const LinearCall<T, Y>& call, int64_t row, int64_t first) {
    typedef Outputs<T> Weights;
    constexpr int64_t kDepth = Weights::kDepth, kWidth = kLanes * kDepth;
    constexpr int kVectors = panel_of<T>();
    const int64_t steps = (call.num_in + kDepth - 1) / kDepth, whole = call.num_in / kDepth;
    const T* weight = call.weight + first * steps * kWidth;
    const auto* x = call.x + row * call.x_stride;
    Floats sums[kRows][kVectors];
    for (int m = 0; m < kRows; m++)
        for (int v = 0; v < kVectors; v++) sums[m][v] = Floats{};  // one by one: GCC clears a whole array in memory
    for (int64_t step = 0; step < whole; step++, weight += kVectors * kWidth)
        for (int v = 0; v < kVectors; v++) {
            const Weights outputs(weight + v * kWidth);
            for (int m = 0; m < kRows; m++) outputs.add_to(sums[m][v], x + m * call.x_stride + step * kDepth);
        }
    if (whole < steps)  // fewer than `kDepth` inputs are left
        for (int m = 0; m < kRows; m++) {
            typename Weights::Input last[kDepth] = {};
            std::copy_n(x + m * call.x_stride + whole * kDepth, call.num_in % kDepth, last);
            for (int v = 0; v < kVectors; v++) Weights(weight + v * kWidth).add_to(sums[m][v], last);
        }
    for (int v = 0; v < kVectors; v++) {
        const int64_t column = (first + v) * kLanes, count = call.num_out - column;
        if (count <= 0) return;
        const Floats bias = call.bias ? load(call.bias + column, count) : Floats{};
        for (int m = 0; m < kRows; m++)
            store(call.y + (row + m) * call.y_stride + column, rounded<T>(sums[m][v] + bias), count);
    }
}

// Computes the last `num_rows` rows, which are at most `kRows`.
template <int kRows, class T, class Y>
void linear_rest(const LinearCall<T, Y>& call, int64_t num_rows, int64_t row, int64_t first) {
    if constexpr (kRows > 0) {
        if (num_rows == kRows)
            linear_tile<kRows>(call, row, first);
        else
            linear_rest<kRows - 1>(call, num_rows, row, first);
    }
}

#ifdef MOTET_TILES
constexpr int64_t kWeightsAhead = 16384;  // bytes of weights that are prefetched ahead of the reader

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
    for (int64_t first = start * panel_of<T>(); first < stop * panel_of<T>(); first += panel_of<T>()) {
        int64_t row = 0;
        for (; row + kTileRows <= num_rows; row += kTileRows) linear_tile<kTileRows>(call, row, first);
        linear_rest<kTileRows - 1>(call, num_rows - row, row, first);
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

// y = x Wᵀ + bias for groups of rows, each with a weight of its own: group g has rows `offsets[g]` to `offsets[g + 1]`,
// and its weight begins at `g * weight_stride`. Threads share the panels of outputs.
template <class T, class Y>
void linear(const T* x, int64_t x_stride, const int64_t* offsets, int64_t num_groups, LinearCall<T, Y> call,
            int64_t weight_stride, int num_threads) {
    static thread_local std::vector<typename Outputs<T>::Input> spare;
    call.x_stride = x_stride;
    call.x = inputs_of(x, call.x_stride, offsets[num_groups], call.num_in, spare, num_threads);
    constexpr int64_t kOutputs = panel_of<T>() * kLanes;
    const int64_t num_panels = (call.num_out + kOutputs - 1) / kOutputs;
    const int64_t most = std::max(kLeastBlock, kNearInputs / std::max<int64_t>(1, call.num_in) / kTileRows * kTileRows);
    const int64_t blocks = std::min(num_panels, (blocks_of(num_groups * num_panels, num_threads) - 1) / num_groups + 1);
    share_ranges(num_groups * blocks, num_groups * blocks, num_threads, [&](int64_t block, int64_t) {
        const int64_t group = block / blocks, part = block % blocks;
        const int64_t start = num_panels * part / blocks, stop = num_panels * (part + 1) / blocks;
        for (int64_t row = offsets[group]; row < offsets[group + 1]; row += most) {
            LinearCall<T, Y> own = call;
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
