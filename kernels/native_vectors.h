// Vectors of 16 floats and what the kernels need of them, for float and bfloat16 elements.
//
// GCC's and Clang's vector extensions carry most of it, so that it compiles for any CPU; intrinsics stand where a CPU has
// an instruction that the compilers do not find: products of bfloat16 pairs, and a transposition.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define MOTET_BF16_PRODUCTS 1
#endif
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace motet {

constexpr int kLanes = 16;

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));

struct Bfloat16 {
    uint16_t bits;
};

inline Floats broadcast(float value) { return Floats{} + value; }

// ---- One element

inline float to_float(float value) { return value; }

inline float to_float(Bfloat16 value) {
    uint32_t bits = uint32_t(value.bits) << 16;
    float wide;
    std::memcpy(&wide, &bits, 4);
    return wide;
}

inline void assign(float& target, float value) { target = value; }

inline void assign(Bfloat16& target, float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    // To the nearest, ties to even. A NaN stays one: its payload may be in the half that is cut off.
    target.bits = value == value ? uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) : 0x7fc0;
}

// ---- 16 elements

inline Floats load(const float* from) {
    Floats found;
    std::memcpy(&found, from, sizeof found);
    return found;
}

inline Floats load(const Bfloat16* from) {
    Halves halves;
    std::memcpy(&halves, from, sizeof halves);
    return (Floats)(__builtin_convertvector(halves, Words) << 16);
}

inline void store(float* to, Floats value) { std::memcpy(to, &value, sizeof value); }

inline void store(Bfloat16* to, Floats value) {
#ifdef MOTET_BF16_PRODUCTS
    __m256bh narrow = _mm512_cvtneps_pbh((__m512)value);
    std::memcpy(to, &narrow, sizeof narrow);
#else
    Words bits = (Words)value;
    Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    Halves narrow = __builtin_convertvector(value == value ? rounded : Words{} + 0x7fc0, Halves);
    std::memcpy(to, &narrow, sizeof narrow);
#endif
}

// ---- The first `count` of 16 elements; the others are zero, or stay as they are

template <class T>
inline Floats load(const T* from, int64_t count) {
    if (count >= kLanes) return load(from);
    T padded[kLanes] = {};
    std::memcpy(padded, from, size_t(count) * sizeof(T));
    return load(padded);
}

template <class T>
inline void store(T* to, Floats value, int64_t count) {
    if (count >= kLanes) return store(to, value);
    T padded[kLanes];
    store(padded, value);
    std::memcpy(to, padded, size_t(count) * sizeof(T));
}

// ---- Sums, largest, exponentials

inline float sum(Floats x) {
#ifdef __AVX512F__
    return _mm512_reduce_add_ps((__m512)x);
#else
    float total = 0;
    for (int i = 0; i < kLanes; i++) total += x[i];
    return total;
#endif
}

// The sum of each of `kCount` vectors. In one order whatever the count, so that a row's result never depends on how many
// others are computed with it.
template <int kCount>
inline void sums(const Floats* x, float* to) {
#ifdef __AVX512F__
    static_assert(kCount % 4 == 0);
    for (int i = 0; i < kCount; i += 4) {
        __m512 a = (__m512)x[i], b = (__m512)x[i + 1], c = (__m512)x[i + 2], d = (__m512)x[i + 3];
        __m512d ab = (__m512d)_mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
        __m512d cd = (__m512d)_mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
        // Each quarter of the register holds a quarter of all four sums.
        __m512 all = _mm512_add_ps((__m512)_mm512_unpacklo_pd(ab, cd), (__m512)_mm512_unpackhi_pd(ab, cd));
        all = _mm512_add_ps(all, _mm512_shuffle_f32x4(all, all, 0xb1));
        all = _mm512_add_ps(all, _mm512_shuffle_f32x4(all, all, 0x4e));
        _mm_storeu_ps(to + i, _mm512_castps512_ps128(all));
    }
#else
    for (int i = 0; i < kCount; i++) to[i] = sum(x[i]);
#endif
}

inline float largest(Floats x) {
#ifdef __AVX512F__
    return _mm512_reduce_max_ps((__m512)x);
#else
    float found = x[0];
    for (int i = 1; i < kLanes; i++) found = x[i] > found ? x[i] : found;
    return found;
#endif
}

// e^x to 2 units in the last place, for x up to 88; below -87 it is e^-87. NaN stays NaN.
inline Floats exponential(Floats x) {
    x = x < -87.0f ? broadcast(-87.0f) : x;
    x = x > 88.0f ? broadcast(88.0f) : x;
    const Floats magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
    Floats turns = (x * 1.44269504088896f + magic) - magic;
    Floats rest = (x - turns * 0.693359375f) + turns * 2.12194440e-4f;  // ln 2 in two parts
    Floats series = broadcast(1.9875691500e-4f);  // minimax polynomial of Cephes' expf
    series = series * rest + 1.3981999507e-3f;
    series = series * rest + 8.3334519073e-3f;
    series = series * rest + 4.1665795894e-2f;
    series = series * rest + 1.6666665459e-1f;
    series = series * rest + 5.0000001201e-1f;
    series = series * rest * rest + rest + 1.0f;
    Ints exponent = (__builtin_convertvector(turns, Ints) + 127) << 23;
    return series * (Floats)exponent;
}

inline Floats hyperbolic_tangent(Floats x) {
    Floats limited = x > 20.0f ? broadcast(20.0f) : x;
    return 1.0f - 2.0f / (exponential(2.0f * limited) + 1.0f);
}

// ---- Dot products of rows: the widest operands that the CPU multiplies at once

template <class T>
struct Operand {
    static constexpr int kWidth = kLanes;
    Floats value;
    Operand() = default;
    explicit Operand(const T* from) : value(load(from)) {}
    Operand(const T* from, int64_t count) : value(load(from, count)) {}
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
    explicit Operand(const Bfloat16* from) : value((__m512bh)_mm512_loadu_si512(from)) {}
    Operand(const Bfloat16* from, int64_t count)
        : value((__m512bh)_mm512_maskz_loadu_epi16(count >= kWidth ? ~0u : (1u << count) - 1, from)) {}
};

inline void multiply_add(Floats& total, const Operand<Bfloat16>& x, const Operand<Bfloat16>& y) {
    total = (Floats)_mm512_dpbf16_ps((__m512)total, x.value, y.value);
}
#endif

// ---- Two rows, each times its own factor: the step of a sum of weighted rows, 32 columns at a time
//
// Sums are kept in whatever order of columns the products give; `in_order` undoes it in the end.

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
            rows[row][0] = load(from[row], count);
            rows[row][1] = count > kLanes ? load(from[row] + kLanes, count - kLanes) : Floats{};
        }
    }
    static Factors factors(const T* both) { return {to_float(both[0]), to_float(both[1])}; }
    void add_to(Sums& sums, Factors by) const {
        sums.first += rows[0][0] * by.first + rows[1][0] * by.second;
        sums.second += rows[0][1] * by.first + rows[1][1] * by.second;
    }
    static Sums in_order(Sums sums) { return sums; }
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

struct NothingAhead {
    void lines_in_loop(int64_t) {}
    void settle() {}
};

// totals[i] += the sum over `kPairs` pairs of rows, each times factors[i][pair]; totals in the order of the products.
// `ahead`, if any, hears how many cache lines of the rows are about to be read.
template <class T, int kPairs, class Ahead = NothingAhead>
inline void add_weighted_rows(float* totals, int64_t total_stride, int64_t num_totals,
                              const typename RowPair<T>::Factors* factors, int64_t factor_stride,
                              const T* const* rows, int64_t width, Ahead* ahead = nullptr) {
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

// ---- 16 rows of 16 words each, so that word i of all rows lies together

inline void transpose(const uint32_t* const* rows, int64_t offset, int64_t count, uint32_t* to) {
#ifdef __AVX512F__
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
#else
    for (int word = 0; word < 16; word++)
        for (int row = 0; row < 16; row++) to[word * 16 + row] = word < count ? rows[row][offset + word] : 0;
#endif
}

}  // namespace motet
