// Vectors of 16 floats, in one register or in as many as the CPU needs, loaded from and stored as float or bfloat16.
//
// Most of this uses the vector extensions of GCC and Clang, so that it compiles for any CPU. Intrinsics are used where
// a CPU has an instruction that the compilers do not choose by themselves. A vector that is wider than a register is a
// `Two` of halves, because GCC keeps wider vectors of its own in memory and loads and stores them in every operation.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define MOTET_BF16_PRODUCTS 1
#endif
#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace motet {

constexpr int kLanes = 16;

#if defined(__AVX512F__)
constexpr int kRegister = 16;  // lanes
#elif defined(__AVX__)
constexpr int kRegister = 8;
#else
constexpr int kRegister = 4;
#endif

typedef float FloatPart __attribute__((vector_size(4 * kRegister)));
typedef int32_t IntPart __attribute__((vector_size(4 * kRegister)));
typedef uint32_t WordPart __attribute__((vector_size(4 * kRegister)));
typedef uint16_t HalfPart __attribute__((vector_size(2 * kRegister)));

template <class V>
struct Two {
    V low, high;
};

#if defined(__AVX512F__)
typedef FloatPart Floats;
#elif defined(__AVX__)
typedef Two<FloatPart> Floats;
#else
typedef Two<Two<FloatPart>> Floats;
#endif

template <class V>
constexpr int lanes() {
    return int(sizeof(V) / sizeof(float));
}

struct Bfloat16 {
    uint16_t bits;
};

// Conversion of one element.

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
    // To the nearest, ties to even. NaN is set by hand, because cutting off its lower half may give infinity.
    target.bits = value == value ? uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) : 0x7fc0;
}

// Arithmetic of `Two`; the compiler has that of registers.

// clang-format off
#define MOTET_ARITHMETIC(OP)                                            \
    template <class V>                                                  \
    inline Two<V> operator OP(const Two<V>& x, const Two<V>& y) {       \
        return {x.low OP y.low, x.high OP y.high};                      \
    }                                                                   \
    template <class V>                                                  \
    inline Two<V> operator OP(const Two<V>& x, float y) {               \
        return {x.low OP y, x.high OP y};                               \
    }                                                                   \
    template <class V>                                                  \
    inline Two<V> operator OP(float x, const Two<V>& y) {               \
        return {x OP y.low, x OP y.high};                               \
    }                                                                   \
    template <class V, class Y>                                         \
    inline Two<V>& operator OP##=(Two<V>& x, const Y& y) {              \
        return x = x OP y;                                              \
    }
// clang-format on

MOTET_ARITHMETIC(+)
MOTET_ARITHMETIC(-)
MOTET_ARITHMETIC(*)
MOTET_ARITHMETIC(/)
#undef MOTET_ARITHMETIC

template <class V>
inline Two<V> operator-(const Two<V>& x) {
    return {-x.low, -x.high};
}

inline Floats broadcast(float value) { return Floats{} + value; }

// Loads and stores of a whole vector.

template <class V>
struct Memory {
    static V load(const float* from) {
        V found;
        std::memcpy(&found, from, sizeof found);
        return found;
    }
    static V load(const Bfloat16* from) {
        HalfPart halves;
        std::memcpy(&halves, from, sizeof halves);
        return (V)(__builtin_convertvector(halves, WordPart) << 16);
    }
    static void store(float* to, V value) { std::memcpy(to, &value, sizeof value); }
    static void store(Bfloat16* to, V value) {
#ifdef MOTET_BF16_PRODUCTS
        __m256bh narrow = _mm512_cvtneps_pbh((__m512)value);
        std::memcpy(to, &narrow, sizeof narrow);
#else
        WordPart bits = (WordPart)value;
        WordPart rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
        HalfPart narrow = __builtin_convertvector(value == value ? rounded : WordPart{} + 0x7fc0, HalfPart);
        std::memcpy(to, &narrow, sizeof narrow);
#endif
    }
};

template <class V>
struct Memory<Two<V>> {
    template <class T>
    static Two<V> load(const T* from) {
        return {Memory<V>::load(from), Memory<V>::load(from + lanes<V>())};
    }
    template <class T>
    static void store(T* to, const Two<V>& value) {
        Memory<V>::store(to, value.low), Memory<V>::store(to + lanes<V>(), value.high);
    }
};

template <class T>
inline Floats load(const T* from) {
    return Memory<Floats>::load(from);
}

template <class T>
inline void store(T* to, const Floats& value) {
    Memory<Floats>::store(to, value);
}

// Loads and stores of the first `count` of 16 elements. A load fills the others with zeros; a store leaves them alone.

template <class T>
inline Floats load(const T* from, int64_t count) {
    if (count >= kLanes) return load(from);
    T padded[kLanes] = {};
    std::memcpy(padded, from, size_t(count) * sizeof(T));
    return load(padded);
}

template <class T>
inline void store(T* to, const Floats& value, int64_t count) {
    if (count >= kLanes) return store(to, value);
    T padded[kLanes];
    store(padded, value);
    std::memcpy(to, padded, size_t(count) * sizeof(T));
}

// The same as floats in whichever order the CPU makes them soonest: products with all of them, or of two such, need no
// other. `in_order` restores the right one.

template <class T>
inline Floats widen(const T* from) {
    return load(from);
}

template <class T>
inline Floats in_order(const Floats& widened) {
    return widened;
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// Elements become floats by interleaving them with zeros, since shifts would take the turns of products. So their order
// is 0-3, 8-11, 4-7, 12-15.
template <>
inline Floats widen(const Bfloat16* from) {
    const __m256i narrow = _mm256_loadu_si256((const __m256i*)from), zeros = _mm256_setzero_si256();
    return {(FloatPart)_mm256_unpacklo_epi16(zeros, narrow), (FloatPart)_mm256_unpackhi_epi16(zeros, narrow)};
}

template <>
inline Floats in_order<Bfloat16>(const Floats& widened) {
    const __m256 low = (__m256)widened.low, high = (__m256)widened.high;
    return {(FloatPart)_mm256_permute2f128_ps(low, high, 0x20), (FloatPart)_mm256_permute2f128_ps(low, high, 0x31)};
}
#endif

template <class T>
inline Floats widen(const T* from, int64_t count) {
    if (count >= kLanes) return widen(from);
    T padded[kLanes] = {};
    std::memcpy(padded, from, size_t(count) * sizeof(T));
    return widen((const T*)padded);
}

// The values as T can hold them: rounded to the nearest, ties to even; NaN stays NaN.

template <class T>
inline FloatPart rounded(FloatPart value) {
    if constexpr (std::is_same<T, Bfloat16>::value) {
#ifdef MOTET_BF16_PRODUCTS
        const __m512i halves = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)value));
        return (FloatPart)_mm512_slli_epi32(halves, 16);
#else
        const WordPart bits = (WordPart)value;
        const WordPart nearest = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000;
        return value == value ? (FloatPart)nearest : value;
#endif
    }
    return value;
}

template <class T, class V>
inline Two<V> rounded(const Two<V>& value) {
    return {rounded<T>(value.low), rounded<T>(value.high)};
}

// x in the lanes after `before` up to `last`, `other` in the rest.
inline FloatPart keep_lanes(FloatPart x, int32_t before, int32_t last, float other) {
    IntPart lane;
    for (int i = 0; i < kRegister; i++) lane[i] = i;
    return ((lane > before) & (lane <= last)) ? x : FloatPart{} + other;
}

template <class V>
inline Two<V> keep_lanes(const Two<V>& x, int32_t before, int32_t last, float other) {
    constexpr int kHalf = lanes<V>();
    return {keep_lanes(x.low, before, last, other), keep_lanes(x.high, before - kHalf, last - kHalf, other)};
}

// ---- Sums, largest, exponentials

inline float sum(FloatPart x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)x);
#elif defined(__SSE2__)
#if defined(__AVX__)
    __m128 half = _mm_add_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
#else
    __m128 half = (__m128)x;
#endif
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_shuffle_ps(half, half, 1)));
#else
    float total = 0;
    for (int i = 0; i < kRegister; i++) total += x[i];
    return total;
#endif
}

template <class V>
inline float sum(const Two<V>& x) {
    return sum(x.low + x.high);
}

inline FloatPart larger(FloatPart x, FloatPart y) { return x > y ? x : y; }

template <class V>
inline Two<V> larger(const Two<V>& x, const Two<V>& y) {
    return {larger(x.low, y.low), larger(x.high, y.high)};
}

inline float largest(FloatPart x) {
#ifdef __AVX512F__
    return _mm512_reduce_max_ps((__m512)x);
#else
    float found = x[0];
    for (int i = 1; i < kRegister; i++) found = x[i] > found ? x[i] : found;
    return found;
#endif
}

template <class V>
inline float largest(const Two<V>& x) {
    return largest(larger(x.low, x.high));
}

// The sum of each of `kCount` vectors. In one order whatever the count, so that a row's result never depends on how
// many others are computed with it.
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

// e^x to 2 units in the last place, for x up to 88; below -87 it is e^-87. NaN stays NaN.
inline FloatPart exponential(FloatPart x) {
    x = x < -87.0f ? FloatPart{} - 87.0f : x;
    x = x > 88.0f ? FloatPart{} + 88.0f : x;
    const FloatPart magic = FloatPart{} + 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
    FloatPart turns = (x * 1.44269504088896f + magic) - magic;
    FloatPart rest = (x - turns * 0.693359375f) + turns * 2.12194440e-4f;  // ln 2 in two parts
    // Minimax polynomial of Cephes' expf.
    FloatPart series = FloatPart{} + 1.9875691500e-4f;
    series = series * rest + 1.3981999507e-3f;
    series = series * rest + 8.3334519073e-3f;
    series = series * rest + 4.1665795894e-2f;
    series = series * rest + 1.6666665459e-1f;
    series = series * rest + 5.0000001201e-1f;
    series = series * rest * rest + rest + 1.0f;
    IntPart exponent = (__builtin_convertvector(turns, IntPart) + 127) << 23;
    return series * (FloatPart)exponent;
}

template <class V>
inline Two<V> exponential(const Two<V>& x) {
    return {exponential(x.low), exponential(x.high)};
}

inline FloatPart hyperbolic_tangent(FloatPart x) {
    FloatPart limited = x > 20.0f ? FloatPart{} + 20.0f : x;
    return 1.0f - 2.0f / (exponential(2.0f * limited) + 1.0f);
}

template <class V>
inline Two<V> hyperbolic_tangent(const Two<V>& x) {
    return {hyperbolic_tangent(x.low), hyperbolic_tangent(x.high)};
}

}  // namespace motet
