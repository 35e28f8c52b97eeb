// LoRA of segments of many rows, by matrix instructions: an adapter's matrices are packed into tiles of weights once, and
// multiplied with all rows.
#pragma once

#include "lora_single.h"
#include "tiles.h"

#ifdef MOTET_TILES

namespace motet {

constexpr int64_t kLeastTileRows = 8;                // of a segment: for fewer, packing costs more than it saves
constexpr int64_t kTile = kTilePairs * kTileInputs;  // elements of a tile of weights

inline bool tiles_are_best(int64_t num_rows) { return num_rows >= kLeastTileRows && tiles_are_allowed(); }

// Buffers that a thread keeps from call to call.
struct LoraTiles {
    std::vector<Bfloat16> weights, rows, spare, zeros;
};

// Rows `first` and on of a matrix with `count` rows of `width` elements, 16 of them; those beyond its end are zeros.
struct SixteenRows {
    const Bfloat16* at[kLanes];

    SixteenRows(const LoraPages<Bfloat16>& pages, const LoraPart& part, int64_t matrix, int64_t first, int64_t count,
                int64_t width, LoraTiles& scratch) {
        Bfloat16* spare = room(scratch.spare, kLanes * width);
        const Bfloat16* zeros = room(scratch.zeros, width);
        for (int64_t j = 0; j < kLanes; j++)
            at[j] = first + j < count ? pages.row(part, matrix + (first + j) * width, width, spare + j * width) : zeros;
    }
};

// Tiles of weights for products along 16 rows: for each 32 elements of the rows, the pairs of elements of all of them.
inline void pack_along(const SixteenRows& rows, int64_t width, Bfloat16* to) {
    int64_t at = 0;
    for (; at + kTileInputs <= width; at += kTileInputs, to += kTile)
        transpose((const float* const*)rows.at, at / 2, kTilePairs, (float*)to);
    if (at == width) return;
    alignas(64) Bfloat16 last[kLanes][kTileInputs] = {};
    const float* padded[kLanes];
    for (int row = 0; row < kLanes; row++) {
        std::copy_n(rows.at[row] + at, width - at, last[row]);
        padded[row] = (const float*)last[row];
    }
    transpose(padded, 0, kTilePairs, (float*)to);
}

// The same for products across pairs of rows: their elements in turn, 16 columns in a tile. Tiles of the next columns
// are `stride` elements apart, the row of a pair in a tile begins at `to`.
inline void pack_across(const Bfloat16* first, const Bfloat16* second, int64_t width, Bfloat16* to, int64_t stride) {
    const __m512i left = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
    const __m512i right = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    for (int64_t column = 0; column < width; column += 2 * kLanes, to += 2 * stride) {
        const int64_t count = width - column;
        const __mmask32 mask = count >= 2 * kLanes ? ~0u : (1u << count) - 1;
        const __m512i one = _mm512_maskz_loadu_epi16(mask, first + column);
        const __m512i other = _mm512_maskz_loadu_epi16(mask, second + column);
        const __m512i low = _mm512_unpacklo_epi16(one, other), high = _mm512_unpackhi_epi16(one, other);
        _mm512_storeu_si512(to, _mm512_permutex2var_epi64(low, left, high));
        _mm512_storeu_si512(to + stride, _mm512_permutex2var_epi64(low, right, high));
    }
}

// Calls `two(first row, second row, rows of these that were in a tile before)` for pairs of tiles and `one` for a last
// single one. A tile has `height` rows; the last one ends with the last row, and may begin within the one before.
template <class Two, class One>
void for_tiles(int64_t num_rows, int64_t height, Two two, One one) {
    const int64_t last = num_rows - height;
    int64_t row = 0;
    for (; row + height < num_rows; row += 2 * height) {
        const int64_t second = std::min(row + height, last);
        two(row, second, row + height - second);
    }
    if (row < num_rows) one(std::min(row, last), row - std::min(row, last));
}

// See `shrink_part` in lora.h.
template <class Ahead>
void shrink_in_tiles(const LoraPages<Bfloat16>& pages, const LoraPart& part, int64_t start, int64_t end,
                     const Bfloat16* x, int64_t x_stride, Bfloat16* shrunk, LoraTiles& scratch, Ahead& ahead) {
    const int64_t width = part.num_in, num_rows = end - start, height = std::min<int64_t>(num_rows, kLanes);
    const int64_t steps = (width + kTileInputs - 1) / kTileInputs, whole = width / kTileInputs;
    const int64_t groups = (part.a_rows + kLanes - 1) / kLanes;
    Bfloat16* weights = room(scratch.weights, groups * steps * kTile);
    for (int64_t group = 0; group < groups; group++) {
        const int64_t first = group * kLanes, count = std::min<int64_t>(kLanes, part.a_rows - first);
        ahead.lines(count * width * int64_t(sizeof(Bfloat16)) / 64);
        pack_along({pages, part, part.a, first, part.a_rows, width, scratch}, width, weights + group * steps * kTile);
    }
    const Bfloat16* own = x + start * x_stride;
    Bfloat16* out = shrunk + part.shrunk + (start - part.start) * part.a_rows;
    finish_stores();
    configure_tiles(int(height));
    // The products of `kCount` tiles of rows with `kColumns` tiles of A's rows from `group` on.
    auto products = [&](auto count, auto columns, const int64_t (&rows)[decltype(count)::value], int64_t group) {
        constexpr int kCount = decltype(count)::value, kColumns = decltype(columns)::value;
        const Bfloat16 *left = weights + group * steps * kTile, *right = left + (kColumns - 1) * steps * kTile;
        const Bfloat16 *one = own + rows[0] * x_stride, *other = own + rows[kCount - 1] * x_stride;
        zero_sums<kCount, kColumns>();
        for (int64_t step = 0; step < whole; step++)
            add_products<kCount, kColumns>(one + step * kTileInputs, other + step * kTileInputs,
                                           x_stride * int64_t(sizeof(Bfloat16)), left + step * kTile,
                                           right + step * kTile, 64);
        if (whole < steps) {  // what lies beyond the inputs is not read
            alignas(64) Bfloat16 padded[kCount][kLanes][kTileInputs] = {};
            for (int tile = 0; tile < kCount; tile++)
                for (int64_t row = 0; row < height; row++)
                    std::copy_n(own + (rows[tile] + row) * x_stride + whole * kTileInputs, width - whole * kTileInputs,
                                padded[tile][row]);
            finish_stores();
            add_products<kCount, kColumns>(padded[0][0], padded[kCount - 1][0], 64, left + whole * kTile,
                                           right + whole * kTile, 64);
        }
        alignas(64) float sums[kCount][kLanes][2 * kLanes];
        store_sums<kCount, kColumns>(sums[0][0], sums[kCount - 1][0], sizeof sums[0][0]);
        for (int tile = 0; tile < kCount; tile++)
            for (int64_t row = 0; row < height; row++)
                for (int v = 0; v < kColumns; v++) {
                    const int64_t rank = (group + v) * kLanes;
                    store(out + (rows[tile] + row) * part.a_rows + rank, load(sums[tile][row] + v * kLanes),
                          part.a_rows - rank);
                }
    };
    typedef std::integral_constant<int, 1> One;
    typedef std::integral_constant<int, 2> Two;
    auto all_groups = [&](auto count, const int64_t (&rows)[decltype(count)::value]) {
        int64_t group = 0;
        for (; group + 2 <= groups; group += 2) products(count, Two(), rows, group);
        if (group < groups) products(count, One(), rows, group);
    };
    for_tiles(
        num_rows, height, [&](int64_t first, int64_t second, int64_t) { all_groups(Two(), {first, second}); },
        [&](int64_t first, int64_t) { all_groups(One(), {first}); });
    _tile_release();
}

// See `expand_part` in lora.h.
template <class Ahead>
void expand_in_tiles(const LoraPages<Bfloat16>& pages, const LoraPart& part, int64_t start, int64_t end,
                     const Bfloat16* shrunk, int64_t shrunk_stride, Bfloat16* y, int64_t y_stride, LoraTiles& scratch,
                     Ahead& ahead) {
    const int64_t width = part.num_out, num_rows = end - start, height = std::min<int64_t>(num_rows, kLanes);
    const int64_t depth = (part.rank + kTileInputs - 1) / kTileInputs;   // tiles along the rank
    const int64_t pairs = depth > 1 ? kTilePairs : (part.rank + 1) / 2;  // of a tile
    const int64_t inputs = 2 * pairs * depth, blocks = (width + 2 * kLanes - 1) / (2 * kLanes) * 2, tile = pairs * 32;
    ahead.lines(part.rank * width * int64_t(sizeof(Bfloat16)) / 64);
    // Weights of 16 columns for all ranks lie side by side.
    Bfloat16* weights = room(scratch.weights, blocks * depth * tile);
    for (int64_t first = 0; first < inputs; first += kLanes) {
        const SixteenRows rows(pages, part, part.b, first, part.rank, width, scratch);
        for (int64_t j = 0; j < kLanes && first + j < inputs; j += 2) {
            const int64_t pair = (first + j) / 2;
            pack_across(rows.at[j], rows.at[j + 1], width, weights + pair / pairs * tile + pair % pairs * 32,
                        depth * tile);
        }
    }
    Bfloat16* vectors = room(scratch.rows, num_rows * inputs);
    for (int64_t m = 0; m < num_rows; m++) {
        const Bfloat16* own = shrunk + part.shrunk + (start + m - part.start) * part.a_rows;
        Bfloat16* to = vectors + m * inputs;
        for (int64_t j = 0; j < part.rank; j += part.a_rows, own += shrunk_stride)
            std::copy_n(own, std::min(part.a_rows, part.rank - j), to + j);
        std::fill(to + part.rank, to + inputs, Bfloat16{});
    }
    Bfloat16* out = y + start * y_stride + part.column;
    finish_stores();
    configure_tiles(int(height), int(pairs));
    // `rows`: the first one of each tile; the first `skipped` of the last tile's have got their sums already.
    auto add = [&](auto count, const int64_t (&rows)[decltype(count)::value], int64_t skipped) {
        constexpr int kCount = decltype(count)::value;
        const Bfloat16 *one = vectors + rows[0] * inputs, *other = vectors + rows[kCount - 1] * inputs;
        for (int64_t block = 0; block < blocks; block += 2) {
            const Bfloat16 *left = weights + block * depth * tile, *right = left + depth * tile;
            zero_sums<kCount>();
            for (int64_t step = 0; step < depth; step++)
                add_products<kCount>(one + step * kTileInputs, other + step * kTileInputs,
                                     inputs * int64_t(sizeof(Bfloat16)), left + step * tile, right + step * tile, 64);
            alignas(64) float sums[kCount][kLanes][2 * kLanes];
            store_sums<kCount>(sums[0][0], sums[kCount - 1][0], sizeof sums[0][0]);
            const int64_t column = block * kLanes, left_columns = width - column;
            for (int at = 0; at < kCount; at++)
                for (int64_t row = at == kCount - 1 ? skipped : 0; row < height; row++) {
                    Bfloat16* to = out + (rows[at] + row) * y_stride + column;
                    const float* sum = sums[at][row];
                    store(to, load(to, left_columns) + load(sum), left_columns);
                    if (left_columns > kLanes)
                        store(to + kLanes, load(to + kLanes, left_columns - kLanes) + load(sum + kLanes),
                              left_columns - kLanes);
                }
        }
    };
    for_tiles(
        num_rows, height,
        [&](int64_t first, int64_t second, int64_t skipped) {
            add(std::integral_constant<int, 2>(), {first, second}, skipped);
        },
        [&](int64_t first, int64_t skipped) { add(std::integral_constant<int, 1>(), {first}, skipped); });
    _tile_release();
}

}  // namespace motet

#endif
