// Linear layers on weights of eight and of four bits, in layouts of their own (packed by ../native/quantised_linear.py).
// The contract is ../quantised.py.
//
// As in linear.h weights are panels of a few vectors of outputs, tiles of rows take turns with a panel, and a row's result
// is the same to the last bit for any number of rows and threads.
#pragma once

#include <vector>

#include "linear.h"

namespace motet {

#ifdef __AVX512F__
constexpr int kNarrowVectors = 4;  // of 16 outputs, in a panel
#else
constexpr int kNarrowVectors = 1;
#endif
constexpr int64_t kNarrowOutputs = kNarrowVectors * kLanes;

// Eight bits: rows of x are rounded to eight bits, each with a scale of its own, and products are summed as integers.
// Weights are stored more by 128, because CPUs multiply unsigned with signed bytes; a sum begins with what that is too
// much. All of it is exact: sums of 2^17 products fit 32 bits.

constexpr int64_t kBytesAtOnce = 4;  // inputs of an output that are multiplied at once

#ifdef __AVX512VNNI__
constexpr int64_t kInputWords = 1;  // int32 that hold these inputs of a row
#else
constexpr int64_t kInputWords = 2;  // of 16 bits each, in the order 0, 2, 1, 3
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__)
typedef __m512i Integers;  // 16 sums
inline Integers broadcast_integer(int32_t value) { return _mm512_set1_epi32(value); }
inline Floats to_floats(Integers value) { return (Floats)_mm512_cvtepi32_ps(value); }

struct ByteWeights {
#ifdef __AVX512VNNI__
    __m512i value;
    explicit ByteWeights(const uint8_t* from) : value(_mm512_loadu_si512(from)) {}
    void add_to(Integers& sum, const int32_t* x) const {
        sum = _mm512_dpbusd_epi32(sum, value, _mm512_set1_epi32(x[0]));
    }
#else
    __m512i even, odd;
    explicit ByteWeights(const uint8_t* from) {
        const __m512i bytes = _mm512_loadu_si512(from);
        even = _mm512_and_si512(bytes, _mm512_set1_epi16(0xff)), odd = _mm512_srli_epi16(bytes, 8);
    }
    void add_to(Integers& sum, const int32_t* x) const {
        sum = _mm512_add_epi32(sum, _mm512_madd_epi16(even, _mm512_set1_epi32(x[0])));
        sum = _mm512_add_epi32(sum, _mm512_madd_epi16(odd, _mm512_set1_epi32(x[1])));
    }
#endif
};
#elif defined(__AVX2__)
struct Integers {
    __m256i low, high;
};
inline Integers broadcast_integer(int32_t value) { return {_mm256_set1_epi32(value), _mm256_set1_epi32(value)}; }
inline Floats to_floats(Integers value) {
    return {(FloatPart)_mm256_cvtepi32_ps(value.low), (FloatPart)_mm256_cvtepi32_ps(value.high)};
}

struct ByteWeights {
    __m256i low_even, low_odd, high_even, high_odd;
    explicit ByteWeights(const uint8_t* from) {
        const __m256i low = _mm256_loadu_si256((const __m256i*)from), mask = _mm256_set1_epi16(0xff);
        const __m256i high = _mm256_loadu_si256((const __m256i*)(from + 32));
        low_even = _mm256_and_si256(low, mask), low_odd = _mm256_srli_epi16(low, 8);
        high_even = _mm256_and_si256(high, mask), high_odd = _mm256_srli_epi16(high, 8);
    }
    void add_to(Integers& sum, const int32_t* x) const {
        const __m256i even = _mm256_set1_epi32(x[0]), odd = _mm256_set1_epi32(x[1]);
        sum.low = _mm256_add_epi32(sum.low, _mm256_madd_epi16(low_even, even));
        sum.low = _mm256_add_epi32(sum.low, _mm256_madd_epi16(low_odd, odd));
        sum.high = _mm256_add_epi32(sum.high, _mm256_madd_epi16(high_even, even));
        sum.high = _mm256_add_epi32(sum.high, _mm256_madd_epi16(high_odd, odd));
    }
};
#else
struct Integers {
    uint32_t of[kLanes];
};
inline Integers broadcast_integer(int32_t value) {
    Integers all;
    for (uint32_t& each : all.of) each = uint32_t(value);
    return all;
}
inline Floats to_floats(const Integers& value) {
    float wide[kLanes];
    for (int i = 0; i < kLanes; i++) wide[i] = float(int32_t(value.of[i]));
    return load(wide);
}

struct ByteWeights {
    const uint8_t* from;
    explicit ByteWeights(const uint8_t* from) : from(from) {}
    void add_to(Integers& sum, const int32_t* x) const {
        int16_t inputs[kBytesAtOnce];  // 0, 2, 1, 3
        std::memcpy(inputs, x, sizeof inputs);
        for (int i = 0; i < kLanes; i++) {
            const uint8_t* weights = from + i * kBytesAtOnce;
            sum.of[i] += uint32_t(weights[0] * inputs[0] + weights[2] * inputs[1]) +
                         uint32_t(weights[1] * inputs[2] + weights[3] * inputs[3]);
        }
    }
};
#endif

// 16 numbers from -127 to 127, rounded to the nearest, ties to even; NaN is any of them.
inline void round_to_bytes(const Floats& value, int8_t* to) {
#ifdef __AVX512F__
    _mm_storeu_si128((__m128i*)to, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32((__m512)value)));
#else
    float numbers[kLanes];
    store(numbers, value);
#ifdef __AVX2__
    const __m256i low = _mm256_cvtps_epi32(_mm256_loadu_ps(numbers)),
                  high = _mm256_cvtps_epi32(_mm256_loadu_ps(numbers + 8));
    const __m256i halves = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8);
    _mm_storeu_si128((__m128i*)to,
                     _mm_packs_epi16(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1)));
#else
    for (int i = 0; i < kLanes; i++) to[i] = int8_t(std::lrint(numbers[i]));
#endif
#endif
}

// A row rounded to eight bits. Returns its scale, which is NaN if the row has an element that is not finite.
template <class T>
float quantise_row(const T* x, int64_t num_in, int8_t* to) {
    Floats most = {}, unfit = {};
    for (int64_t i = 0; i < num_in; i += kLanes) {
        const Floats value = load(x + i, num_in - i);
        most = larger(most, larger(value, -value)), unfit += value - value;
    }
    const float highest = largest(most);
    const float inverse = highest > 0 ? 127.0f / highest : 0.0f;
    for (int64_t i = 0; i < num_in; i += kLanes) round_to_bytes(load(x + i, num_in - i) * inverse, to + i);
    return highest / 127.0f + sum(unfit);
}

template <class T, class Y>
struct ByteCall {
    const int32_t* x;  // [rows, steps * kInputWords]
    const float* x_scales;
    const int32_t* starts;  // of each row's sums: -128 times the sum of its inputs
    const uint8_t* weight;
    const float* scales;  // [outputs of all panels]
    const T* bias;        // none: null
    Y* y;
    int64_t y_stride, num_out, steps;
};

// A tile of rows for one panel. Fetches `lines` cache lines from `ahead` on with every `run` steps.
template <int kRows, class T, class Y>
void bytes_tile(const ByteCall<T, Y>& call, int64_t panel, int64_t row, const char* ahead, int64_t run) {
    constexpr int64_t kWidth = kLanes * kBytesAtOnce;
    const uint8_t* weight = call.weight + panel * call.steps * kNarrowVectors * kWidth;
    const int64_t stride = call.steps * kInputWords;
    const int32_t* x = call.x + row * stride;
    Integers sums[kRows][kNarrowVectors];
#pragma GCC unroll 6
    for (int m = 0; m < kRows; m++)
#pragma GCC unroll 4
        for (int v = 0; v < kNarrowVectors; v++) sums[m][v] = broadcast_integer(call.starts[row + m]);
    for (int64_t first = 0; first < call.steps; first += run) {
        for (int64_t line = 0; line < kNarrowVectors; line++, ahead += 64) __builtin_prefetch(ahead, 0, 2);
        const int64_t end = std::min(call.steps, first + run);
        for (int64_t step = first; step < end; step++)
#pragma GCC unroll 4
            for (int v = 0; v < kNarrowVectors; v++) {
                const ByteWeights outputs(weight + (step * kNarrowVectors + v) * kWidth);
#pragma GCC unroll 6
                for (int m = 0; m < kRows; m++) outputs.add_to(sums[m][v], x + m * stride + step * kInputWords);
            }
    }
#pragma GCC unroll 4
    for (int v = 0; v < kNarrowVectors; v++) {
        const int64_t column = (panel * kNarrowVectors + v) * kLanes, count = call.num_out - column;
        if (count <= 0) return;
        const Floats bias = call.bias ? load(call.bias + column, count) : Floats{}, scale = load(call.scales + column);
#pragma GCC unroll 6
        for (int m = 0; m < kRows; m++) {
            const Floats value = to_floats(sums[m][v]) * call.x_scales[row + m] * scale + bias;
            store(call.y + (row + m) * call.y_stride + column, rounded<T>(value), count);
        }
    }
}

template <int kRows, class T, class Y>
void bytes_tile_of(const ByteCall<T, Y>& call, int64_t panel, int64_t row, int64_t num_rows, const char* ahead,
                   int64_t run) {
    if constexpr (kRows > 0) {
        if (num_rows == kRows)
            bytes_tile<kRows>(call, panel, row, ahead, run);
        else
            bytes_tile_of<kRows - 1>(call, panel, row, num_rows, ahead, run);
    }
}

// y = x Wᵀ + bias, with x rounded to eight bits.
template <class T, class Y>
void linear_of_bytes(const T* x, int64_t x_stride, int64_t num_rows, const uint8_t* weight, const float* scales,
                     const T* bias, Y* y, int64_t y_stride, int64_t num_in, int64_t num_out, int num_threads) {
    if (num_rows == 0) return;
    static thread_local std::vector<int32_t> kept_rows, kept_starts;
    static thread_local std::vector<float> kept_scales;
    const int64_t steps = (num_in + kBytesAtOnce - 1) / kBytesAtOnce;
    kept_rows.resize(std::max(kept_rows.size(), size_t(num_rows * steps * kInputWords)));
    kept_starts.resize(std::max(kept_starts.size(), size_t(num_rows)));
    kept_scales.resize(std::max(kept_scales.size(), size_t(num_rows)));
    int32_t *words = kept_rows.data(), *starts = kept_starts.data();
    float* x_scales = kept_scales.data();
    share_rows(num_rows, num_in, num_threads, [&](int64_t start, int64_t end) {
        static thread_local std::vector<int8_t> bytes;
        bytes.resize(size_t(num_in + kLanes + kBytesAtOnce));
        for (int64_t row = start; row < end; row++) {
            x_scales[row] = quantise_row(x + row * x_stride, num_in, bytes.data());
            std::fill(bytes.begin() + num_in, bytes.end(), int8_t(0));
            int32_t total = 0;
            for (int64_t i = 0; i < num_in; i++) total += bytes[size_t(i)];
            starts[row] = -128 * total;
            int32_t* to = words + row * steps * kInputWords;
#ifdef __AVX512VNNI__
            std::memcpy(to, bytes.data(), size_t(steps) * 4);
#else
            int16_t* wide = (int16_t*)to;
            for (int64_t i = 0; i < steps * kBytesAtOnce; i += 4, wide += 4) {
                const int8_t* four = bytes.data() + i;
                wide[0] = four[0], wide[1] = four[2], wide[2] = four[1], wide[3] = four[3];
            }
#endif
        }
    });
    const int64_t num_panels = (num_out + kNarrowOutputs - 1) / kNarrowOutputs;
    const int64_t panel_bytes = steps * kNarrowOutputs * kBytesAtOnce;
    const int64_t near = std::max(kLeastBlock, kNearInputs / std::max<int64_t>(1, num_in) / kTileRows * kTileRows);
    share_ranges(num_panels, blocks_of(num_panels, num_threads), num_threads, [&](int64_t start, int64_t stop) {
        for (int64_t first = 0; first < num_rows; first += near) {
            const int64_t rows = std::min(near, num_rows - first), tiles = (rows + kTileRows - 1) / kTileRows;
            const ByteCall<T, Y> call{words + first * steps * kInputWords,
                                      x_scales + first,
                                      starts + first,
                                      weight,
                                      scales,
                                      bias,
                                      y + first * y_stride,
                                      y_stride,
                                      num_out,
                                      steps};
            for (int64_t panel = start; panel < stop; panel++)
                for (int64_t tile = 0; tile < tiles; tile++) {
                    // Tiles fetch a part of the next panel each; a single one fetches what it reads itself soon.
                    const char* ahead = (const char*)weight + panel * panel_bytes;
                    ahead += tiles > 1 ? panel_bytes + panel_bytes * tile / tiles : kWeightsAhead;
                    const int64_t row = rows * tile / tiles, next = rows * (tile + 1) / tiles;
                    bytes_tile_of<kTileRows>(call, panel, row, next - row, ahead, tiles);
                }
        }
    });
}

// Four bits: each code stands for one of 16 numbers, less a zero point of its group of inputs, times the group's scale. A
// word has the codes of eight inputs of an output: of even ones in its low half, of odd ones in its high half, the first
// ones lowest. x keeps its dtype, and sums of a group are floats.

constexpr int64_t kCodes = 8;  // of a word
// Rows of a tile: few with all vectors of a panel, or more with some of them, so that their sums fill the registers.
#ifdef __AVX512F__
constexpr int kFewRows = 4, kCodeRows = 12, kCodeVectors = 2;
#else
constexpr int kFewRows = 3, kCodeRows = kTileRows, kCodeVectors = 1;
#endif
constexpr int64_t kPartInputs = 128;  // of which the numbers stay in the first cache level, for the next tiles of rows

inline Floats widen_bytes(const int8_t* from) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
#elif defined(__AVX2__)
    const __m128i first = _mm_loadl_epi64((const __m128i*)from), last = _mm_loadl_epi64((const __m128i*)(from + 8));
    return {(FloatPart)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(first)),
            (FloatPart)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(last))};
#else
    float wide[kLanes];
    for (int i = 0; i < kLanes; i++) wide[i] = float(from[i]);
    return load(wide);
#endif
}

// The numbers of 16 outputs for the inputs that the CPU multiplies at once, from their words.
template <class Input>
struct CodeTable;

#ifdef MOTET_BF16_PRODUCTS
template <>
struct CodeTable<Bfloat16> {
    typedef __m512bh Value;
    __m512i numbers;  // twice, because a look-up takes five bits of a code and what lies above it
    explicit CodeTable(const float* table) {
        Bfloat16 twice[32];
        for (int i = 0; i < 32; i++) assign(twice[i], table[i % 16]);
        std::memcpy(&numbers, twice, sizeof numbers);
    }
    Value of(const uint32_t* words, int step) const {
        const __m512i codes = _mm512_srli_epi16(_mm512_loadu_si512(words), unsigned(4 * step));
        return (Value)_mm512_permutexvar_epi16(codes, numbers);
    }
    static Value kept(const Bfloat16* from) { return (Value)_mm512_loadu_si512(from); }
    static void keep(Bfloat16* to, const Value& weights) { _mm512_storeu_si512(to, (__m512i)weights); }
    static Value all(const Bfloat16* x) {  // two inputs, as a float, because GCC takes integers through other registers
        float both;
        std::memcpy(&both, x, sizeof both);
        return (Value)_mm512_set1_ps(both);
    }
    static void add(Floats& sum, const Value& weights, const Value& x) {
        sum = (Floats)_mm512_dpbf16_ps((__m512)sum, x, weights);
    }
};
#endif

template <>
struct CodeTable<float> {
    typedef Floats Value;
    static Value kept(const float* from) { return load(from); }
    static void keep(float* to, const Value& weights) { store(to, weights); }
    static Value all(const float* x) {
#if defined(__AVX__) && !defined(__AVX512F__)
        const FloatPart value = (FloatPart)_mm256_broadcast_ss(x);  // GCC would load it and broadcast then
        return {value, value};
#else
        return broadcast(*x);
#endif
    }
    static void add(Floats& sum, const Value& weights, const Value& x) { sum += weights * x; }
#if defined(__AVX512F__)
    __m512 numbers;
    explicit CodeTable(const float* table) : numbers(_mm512_loadu_ps(table)) {}
    Floats at(const uint32_t* words, int shift) const {
        return (Floats)_mm512_permutexvar_ps(_mm512_srli_epi32(_mm512_loadu_si512(words), unsigned(shift)), numbers);
    }
#elif defined(__AVX2__)
    __m256 first, last;
    explicit CodeTable(const float* table) : first(_mm256_loadu_ps(table)), last(_mm256_loadu_ps(table + 8)) {}
    FloatPart half(const uint32_t* words, int shift) const {
        const __m256i all = _mm256_loadu_si256((const __m256i*)words), codes = _mm256_srli_epi32(all, shift);
        const __m256 is_last = _mm256_castsi256_ps(_mm256_slli_epi32(codes, 28));  // the fourth bit as a sign
        return (FloatPart)_mm256_blendv_ps(_mm256_permutevar8x32_ps(first, codes),
                                           _mm256_permutevar8x32_ps(last, codes), is_last);
    }
    Floats at(const uint32_t* words, int shift) const { return {half(words, shift), half(words + 8, shift)}; }
#else
    const float* table;
    explicit CodeTable(const float* table) : table(table) {}
    Floats at(const uint32_t* words, int shift) const {
        float numbers[kLanes];
        for (int i = 0; i < kLanes; i++) numbers[i] = table[words[i] >> shift & 15];
        return load(numbers);
    }
#endif
    Value of(const uint32_t* words, int step) const { return at(words, step / 2 * 4 + step % 2 * 16); }
};

template <class T, class Y>
struct CodeCall {
    const typename Outputs<T>::Input* x;  // by tiles: what is multiplied at once of all rows of a tile, then the next
    const float* x_sums;                  // [rows, parts]: of a part's inputs; null: there are no zero points
    const uint32_t* weight;
    const float* scales;  // [panels, groups, outputs of a panel]
    const int8_t* zeros;  // likewise; none: null
    const float* table;
    const T* bias;  // none: null
    Y* y;
    int64_t y_stride, num_in, num_out, group_size, num_parts;
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

// Adds a part of some vectors of a panel, from `vector` on, to the totals of a tile of rows. `kept`: the numbers of the
// weights, written if `is_first`; null: they are not kept.
template <int kRows, int kVectors, class T, class Y>
void codes_tile(const CodeCall<T, Y>& call, int64_t panel, int64_t vector, const CodePart& part, int64_t row,
                float* totals, typename Outputs<T>::Input* kept, bool is_first) {
    typedef typename Outputs<T>::Input Input;
    typedef typename CodeTable<Input>::Value Value;
    constexpr int64_t kDepth = Outputs<Input>::kDepth, kSteps = kCodes / kDepth, kWidth = kLanes * kDepth;
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
            const Value inputs = CodeTable<Input>::all(x);
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; v++) CodeTable<Input>::add(sums[m][v], weights[v], inputs);
        }
    };
    const int64_t blocks = (part.stop - part.start) / kCodes;
    Value weights[kVectors];
    if (is_first) {
        const CodeTable<Input> table(call.table);
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
                    for (int v = 0; v < kVectors; v++) CodeTable<Input>::keep(numbers + v * kWidth, weights[v]);
                    numbers += kNarrowVectors * kWidth;
                }
                add(weights);
            }
        }
    } else {
        for (int64_t step = 0; step < blocks * kSteps; step++, numbers += kNarrowVectors * kWidth) {
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; v++) weights[v] = CodeTable<Input>::kept(numbers + v * kWidth);
            add(weights);
        }
    }
    const int64_t num_groups = (call.num_in + call.group_size - 1) / call.group_size;
    const int64_t at = (panel * num_groups + part.group) * kNarrowOutputs + vector * kLanes;
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; v++) {
        const Floats scale = load(call.scales + at + v * kLanes);
        Floats zeros = {};
        if (call.zeros) zeros = widen_bytes(call.zeros + at + v * kLanes);
#pragma GCC unroll 12
        for (int m = 0; m < kRows; m++) {
            float* total = totals + ((row + m) * kNarrowVectors + vector + v) * kLanes;
            Floats sum = sums[m][v];
            if (call.zeros) sum = sum - zeros * call.x_sums[(row + m) * call.num_parts + part.index];
            store(total, part.index == 0 ? sum * scale : load(total) + sum * scale);
        }
    }
}

template <int kRows, class T, class Y>
void codes_tile_of(const CodeCall<T, Y>& call, int64_t panel, const CodePart& part, int64_t row, int64_t num_rows,
                   float* totals, typename Outputs<T>::Input* kept, bool is_first) {
    if constexpr (kRows > 0) {
        if (num_rows < kRows) return codes_tile_of<kRows - 1>(call, panel, part, row, num_rows, totals, kept, is_first);
        constexpr int kVectors = kRows <= kFewRows ? kNarrowVectors : kCodeVectors;
        for (int64_t vector = 0; vector < kNarrowVectors; vector += kVectors)
            codes_tile<kRows, kVectors>(call, panel, vector, part, row, totals, kept, is_first);
    }
}

// Some tiles of the rows of a call, which are about equally high.
struct CodeTiles {
    int64_t num_rows, count;  // of all
    explicit CodeTiles(int64_t num_rows) : num_rows(num_rows), count((num_rows + kCodeRows - 1) / kCodeRows) {}
    int64_t row(int64_t tile) const { return num_rows * tile / count; }
};

// Keeps the numbers of a part of a panel, where registers hold no sums beside the table.
template <class T, class Y>
void keep_numbers(const CodeCall<T, Y>& call, int64_t panel, const CodePart& part, typename Outputs<T>::Input* kept) {
    typedef CodeTable<typename Outputs<T>::Input> Table;
    constexpr int64_t kDepth = Outputs<typename Outputs<T>::Input>::kDepth, kWidth = kLanes * kDepth;
    const Table table(call.table);
    const uint32_t* words = call.weight + (panel * call.num_in + part.start) / kCodes * kNarrowOutputs;
    for (int64_t i = part.start; i < part.stop; i += kCodes, words += kNarrowOutputs) {
        __builtin_prefetch((const char*)words + kWeightsAhead, 0, 2);
#pragma GCC unroll 8
        for (int step = 0; step < kCodes / kDepth; step++)
#pragma GCC unroll 4
            for (int v = 0; v < kNarrowVectors; v++, kept += kWidth)
                Table::keep(kept, table.of(words + v * kLanes, step));
    }
}

// Computes tiles `first` to `last` for panels `start` to `stop` of outputs.
template <class T, class Y>
void codes_panels(const CodeCall<T, Y>& call, const CodeTiles& tiles, int64_t first, int64_t last, int64_t start,
                  int64_t stop) {
    typedef typename Outputs<T>::Input Input;
    static thread_local std::vector<Input> kept(size_t(kPartInputs * kNarrowOutputs));
    static thread_local std::vector<float> spare;
    const int64_t first_row = tiles.row(first), num_rows = tiles.row(last) - first_row;
    spare.resize(std::max(spare.size(), size_t(num_rows * kNarrowOutputs)));
    float* totals = spare.data() - first_row * kNarrowOutputs;
    for (int64_t panel = start; panel < stop; panel++) {
        each_part(call.num_in, call.group_size, [&](const CodePart& part) {
            const bool keeps_first = kCodeVectors == kNarrowVectors && num_rows > kFewRows;
            const bool keeps = keeps_first || last - first > 1;
            if (keeps_first) keep_numbers(call, panel, part, kept.data());
            for (int64_t tile = first; tile < last; tile++)
                codes_tile_of<kCodeRows>(call, panel, part, tiles.row(tile), tiles.row(tile + 1) - tiles.row(tile),
                                         totals, keeps ? kept.data() : nullptr, tile == first && !keeps_first);
        });
        for (int v = 0; v < kNarrowVectors; v++) {
            const int64_t column = (panel * kNarrowVectors + v) * kLanes, count = call.num_out - column;
            if (count <= 0) break;
            const Floats bias = call.bias ? load(call.bias + column, count) : Floats{};
            for (int64_t row = first_row; row < first_row + num_rows; row++) {
                const Floats total = load(totals + (row * kNarrowVectors + v) * kLanes);
                store(call.y + row * call.y_stride + column, rounded<T>(total + bias), count);
            }
        }
    }
}

// The rows of x in the order in which tiles read them, in `to`.
template <class T>
void order_inputs(const T* x, int64_t x_stride, const CodeTiles& tiles, int64_t num_in, typename Outputs<T>::Input* to,
                  int num_threads) {
    typedef typename Outputs<T>::Input Input;
    constexpr int64_t kDepth = Outputs<T>::kDepth;
    share_rows(num_in / kCodes, kCodes * tiles.num_rows, num_threads, [&](int64_t start, int64_t end) {
        for (int64_t tile = 0; tile < tiles.count; tile++) {
            const int64_t first = tiles.row(tile), rows = tiles.row(tile + 1) - first;
            for (int64_t m = 0; m < rows; m++) {
                const T* from = x + (first + m) * x_stride;
                Input* own = to + first * num_in + m * kDepth;
                for (int64_t i = start * kCodes; i < end * kCodes; i += kDepth)
                    for (int64_t d = 0; d < kDepth; d++) assign(own[i * rows + d], to_float(from[i + d]));
            }
        }
    });
}

// y = x Wᵀ + bias of weights of four bits; `num_in` and `group_size` are multiples of eight.
template <class T, class Y>
void linear_of_codes(const T* x, int64_t x_stride, int64_t num_rows, CodeCall<T, Y> call, int num_threads) {
    typedef typename Outputs<T>::Input Input;
    if (num_rows == 0) return;
    static thread_local std::vector<Input> ordered;
    static thread_local std::vector<float> kept_sums;
    const CodeTiles tiles(num_rows);
    if constexpr (std::is_same<T, Input>::value)
        if (num_rows == 1) call.x = x;  // it is in order
    if (!call.x) {
        ordered.resize(std::max(ordered.size(), size_t(num_rows * call.num_in)));
        order_inputs(x, x_stride, tiles, call.num_in, ordered.data(), num_threads);
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
    share_ranges(num_panels, blocks_of(num_panels, num_threads), num_threads, [&](int64_t start, int64_t stop) {
        for (int64_t tile = 0; tile < tiles.count; tile += near)
            codes_panels(call, tiles, tile, std::min(tile + near, tiles.count), start, stop);
    });
}

}  // namespace motet
