// Building blocks of the kernels: dot products of rows, sums of weighted rows, transposed tiles of rows.
#pragma once

#include "floats.h"

namespace motet {

// Dot products of rows, with the widest operands that the CPU multiplies at once.

template <class T>
struct Operand {
    static constexpr int kWidth = kLanes;
    Floats value;
    Operand() = default;
    explicit Operand(const T* from) : value(widen(from)) {}
    Operand(const T* from, int64_t count) : value(widen(from, count)) {}
};

template <class T>
inline void multiply_add(Floats& total, const Operand<T>& x, const Operand<T>& y) {
    total += x.value * y.value;
}

#ifdef MOTET_BF16_PRODUCTS
template <>
struct Operand<Bfloat16> {
    static constexpr int kWidth = 2 * kLanes;
    __m512bh value;
    Operand() = default;
    explicit Operand(const Bfloat16* from) { std::memcpy(&value, from, sizeof value); }  // GCC spills a cast to memory
    Operand(const Bfloat16* from, int64_t count)
        : value((__m512bh)_mm512_maskz_loadu_epi16(count >= kWidth ? ~0u : (1u << count) - 1, from)) {}
};

inline void multiply_add(Floats& total, const Operand<Bfloat16>& x, const Operand<Bfloat16>& y) {
    total = (Floats)_mm512_dpbf16_ps((__m512)total, x.value, y.value);
}
#endif

// Two rows, each times its own factor, are added to a sum of weighted rows, 32 columns at a time.
//
// Sums keep their columns in the order in which the CPU's products give them; `in_order` restores the right order.

constexpr int kSpan = 2 * kLanes;  // columns

struct Sums {
    Floats first, second;
};

template <class T>
struct RowPair {
    struct Factors {
        float first, second;
    };
    Floats rows[2][2];

    RowPair() = default;
    RowPair(const T* first, const T* second, int64_t count) {
        const T* from[2] = {first, second};
        for (int row = 0; row < 2; row++) {
            rows[row][0] = widen(from[row], count);
            rows[row][1] = count > kLanes ? widen(from[row] + kLanes, count - kLanes) : Floats{};
        }
    }
    // Writes a vector of factors as the factors of half as many pairs, rounded to T.
    static void store_factors(Factors* to, const Floats& factors) { store((float*)to, rounded<T>(factors)); }
    static Factors factors(const T* both) { return {to_float(both[0]), to_float(both[1])}; }
    void add_to(Sums& sums, Factors by) const {
        for (int row = 0; row < 2; row++) {  // one product after the other: their sum would be a third operation
            const float factor = row == 0 ? by.first : by.second;
            sums.first += rows[row][0] * factor;
            sums.second += rows[row][1] * factor;
        }
    }
    static Sums in_order(Sums sums) { return {motet::in_order<T>(sums.first), motet::in_order<T>(sums.second)}; }
};

#ifdef MOTET_BF16_PRODUCTS
template <>
struct RowPair<Bfloat16> {
    typedef uint32_t Factors;
    __m512bh low, high;  // elements of both rows in turn: columns 0-3, 8-11, ... and 4-7, 12-15, ...

    RowPair() = default;
    RowPair(const Bfloat16* first, const Bfloat16* second, int64_t count) {
        __mmask32 mask = count >= kSpan ? ~0u : (1u << count) - 1;
        __m512i one = _mm512_maskz_loadu_epi16(mask, first), other = _mm512_maskz_loadu_epi16(mask, second);
        low = (__m512bh)_mm512_unpacklo_epi16(one, other);
        high = (__m512bh)_mm512_unpackhi_epi16(one, other);
    }
    static void store_factors(Factors* to, const Floats& factors) { store((Bfloat16*)to, factors); }
    static Factors factors(const Bfloat16* both) { return uint32_t(both[0].bits) | uint32_t(both[1].bits) << 16; }
    void add_to(Sums& sums, Factors by) const {
        __m512bh both = (__m512bh)_mm512_set1_epi32(int(by));
        sums.first = (Floats)_mm512_dpbf16_ps((__m512)sums.first, both, low);
        sums.second = (Floats)_mm512_dpbf16_ps((__m512)sums.second, both, high);
    }
    static Sums in_order(Sums sums) {
        const __m512i front = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
        const __m512i back = _mm512_add_epi32(front, _mm512_set1_epi32(8));
        __m512 first = (__m512)sums.first, second = (__m512)sums.second;
        return {(Floats)_mm512_permutex2var_ps(first, front, second),
                (Floats)_mm512_permutex2var_ps(first, back, second)};
    }
};
#endif

// Stands for a `ReadAhead` where nothing is prefetched.
struct NothingAhead {
    void lines_in_loop(int64_t) {}
    void settle() {}
};

// totals[i] += the sum over `kPairs` pairs of rows, each times factors[i][pair]. The columns of totals are in the order
// of `Sums`. `ahead`, if any, gets the number of cache lines of the rows that are about to be read.
template <class T, int kPairs, class Ahead = NothingAhead>
inline void add_weighted_rows(float* totals, int64_t total_stride, int64_t num_totals,
                              const typename RowPair<T>::Factors* factors, int64_t factor_stride, const T* const* rows,
                              int64_t width, Ahead* ahead = nullptr) {
    for (int64_t column = 0; column < width; column += kSpan) {
        if (ahead) ahead->lines_in_loop(2 * kPairs * kSpan * int64_t(sizeof(T)) / 64);
        RowPair<T> pairs[kPairs];
        for (int i = 0; i < kPairs; i++)
            pairs[i] = RowPair<T>(rows[2 * i] + column, rows[2 * i + 1] + column, width - column);
        for (int64_t i = 0; i < num_totals; i++) {
            float* total = totals + i * total_stride + column;
            Sums sums = {load(total), load(total + kLanes)};
            for (int pair = 0; pair < kPairs; pair++) pairs[pair].add_to(sums, factors[i * factor_stride + pair]);
            store(total, sums.first);
            store(total + kLanes, sums.second);
        }
    }
    if (ahead) ahead->settle();
}

// Transposes a tile: 16 rows of 16 elements each, from `offset` on, become floats with element i of all rows side by
// side. Elements after the first `count` become zero and are not read.

#ifdef __AVX512F__
inline void transpose(const float* const* rows, int64_t offset, int64_t count, float* to) {
    __mmask16 mask = count >= kLanes ? 0xffff : __mmask16((1u << count) - 1);
    __m512i x[16], y[16];
    for (int i = 0; i < 16; i++) x[i] = _mm512_maskz_loadu_epi32(mask, rows[i] + offset);
    for (int i = 0; i < 16; i += 2) {
        y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int half = 0; half < 2; half++) {
            x[i + 2 * half] = _mm512_unpacklo_epi64(y[i + half], y[i + 2 + half]);
            x[i + 2 * half + 1] = _mm512_unpackhi_epi64(y[i + half], y[i + 2 + half]);
        }
    // x[4 * r + w] holds, of rows 4r to 4r + 3, the words w, 4 + w, 8 + w and 12 + w.
    for (int w = 0; w < 4; w++) {
        __m512i even = _mm512_shuffle_i32x4(x[w], x[4 + w], 0x88), odd = _mm512_shuffle_i32x4(x[w], x[4 + w], 0xdd);
        __m512i even2 = _mm512_shuffle_i32x4(x[8 + w], x[12 + w], 0x88);
        __m512i odd2 = _mm512_shuffle_i32x4(x[8 + w], x[12 + w], 0xdd);
        _mm512_storeu_si512(to + (w + 0) * 16, _mm512_shuffle_i32x4(even, even2, 0x88));
        _mm512_storeu_si512(to + (w + 8) * 16, _mm512_shuffle_i32x4(even, even2, 0xdd));
        _mm512_storeu_si512(to + (w + 4) * 16, _mm512_shuffle_i32x4(odd, odd2, 0x88));
        _mm512_storeu_si512(to + (w + 12) * 16, _mm512_shuffle_i32x4(odd, odd2, 0xdd));
    }
}

inline void transpose(const Bfloat16* const* rows, int64_t offset, int64_t count, float* to) {
    float wide[kLanes][kLanes];
    const float* at[kLanes];
    for (int i = 0; i < kLanes; i++) store(wide[i], load(rows[i] + offset, count)), at[i] = wide[i];
    transpose(at, 0, kLanes, to);
}
#else
#ifdef __AVX__
// Calls `put(word, values)` with each of the 8 words of all 8 rows.
template <class F>
inline void transpose_words(__m256 (&x)[8], F put) {
    __m256 y[8];
    for (int i = 0; i < 8; i += 2) {
        y[i] = _mm256_unpacklo_ps(x[i], x[i + 1]);
        y[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
    }
    for (int i = 0; i < 8; i += 4)
        for (int half = 0; half < 2; half++) {
            x[i + 2 * half] = _mm256_shuffle_ps(y[i + half], y[i + 2 + half], 0x44);
            x[i + 2 * half + 1] = _mm256_shuffle_ps(y[i + half], y[i + 2 + half], 0xee);
        }
    // x[4 * r + w] holds, of rows 4r to 4r + 3, the words w and 4 + w.
    for (int w = 0; w < 4; w++) {
        put(w, _mm256_permute2f128_ps(x[w], x[4 + w], 0x20));
        put(4 + w, _mm256_permute2f128_ps(x[w], x[4 + w], 0x31));
    }
}
#endif

// Transposes as many rows as a register has lanes, of `kPart` elements, into `to`, whose rows are 16 wide.
template <class T>
struct TransposedPart {
    static constexpr int64_t kPart = kRegister;
    static void take(const T* const* rows, int64_t offset, float* to) {
#ifdef __AVX__
        __m256 x[8];
        for (int i = 0; i < 8; i++) x[i] = (__m256)Memory<FloatPart>::load(rows[i] + offset);
        transpose_words(x, [&](int word, __m256 values) { _mm256_storeu_ps(to + word * kLanes, values); });
#else
        for (int word = 0; word < kRegister; word++)
            for (int row = 0; row < kRegister; row++) to[word * kLanes + row] = to_float(rows[row][offset + word]);
#endif
    }
};

#ifdef __AVX2__
template <>
struct TransposedPart<Bfloat16> {  // two elements are a word, and become floats afterwards
    static constexpr int64_t kPart = 2 * kRegister;
    static void take(const Bfloat16* const* rows, int64_t offset, float* to) {
        __m256 x[8];
        for (int i = 0; i < 8; i++) x[i] = _mm256_loadu_ps((const float*)(rows[i] + offset));
        transpose_words(x, [&](int word, __m256 values) {
            const __m256i second = _mm256_set1_epi32(int(0xffff0000));
            _mm256_storeu_si256((__m256i*)(to + 2 * word * kLanes), _mm256_slli_epi32((__m256i)values, 16));
            _mm256_storeu_si256((__m256i*)(to + (2 * word + 1) * kLanes), _mm256_and_si256((__m256i)values, second));
        });
    }
};
#endif

template <class T>
inline void transpose(const T* const* rows, int64_t offset, int64_t count, float* to) {
    if (count < kLanes) {
        for (int word = 0; word < kLanes; word++)
            for (int row = 0; row < kLanes; row++)
                to[word * kLanes + row] = word < count ? to_float(rows[row][offset + word]) : 0;
        return;
    }
    for (int row = 0; row < kLanes; row += kRegister)
        for (int64_t word = 0; word < kLanes; word += TransposedPart<T>::kPart)
            TransposedPart<T>::take(rows + row, offset + word, to + word * kLanes + row);
}
#endif

}  // namespace motet
