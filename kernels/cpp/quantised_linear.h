// Linear layers on weights of eight bits, in a layout of their own (packed by ../native/quantised_linear.py). The contract
// is ../quantised.py; those of four bits are in four_bits.h.
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

}  // namespace motet
