// What codes of four and eight bits stand for, looked up in registers. Words, which ../native/quantised_linear.py packs,
// have 32 bits of codes of an output: of even inputs in the low half, of odd ones in the high half, the first ones lowest.
#pragma once

#include "linear.h"

namespace motet {

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

// Powers of two by their exponents, more by 127.
inline Floats widen_exponents(const uint8_t* from) {
#if defined(__AVX512F__)
    const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from));
    return (Floats)_mm512_castsi512_ps(_mm512_slli_epi32(wide, 23));
#else
    uint32_t bits[kLanes];
    float wide[kLanes];
    for (int i = 0; i < kLanes; i++) bits[i] = uint32_t(from[i]) << 23;
    std::memcpy(wide, bits, sizeof wide);
    return load(wide);
#endif
}

// The numbers of 16 outputs for the inputs that the CPU multiplies at once, from their words.
template <class Input, int kBits>
struct CodeTable;

#ifdef MOTET_BF16_PRODUCTS
struct PairTable {
    typedef __m512bh Value;
    __m512i numbers;
    template <class F>
    explicit PairTable(F number) {
        Bfloat16 all[32];  // a look-up takes five bits of a code, whatever lies above them
        for (int i = 0; i < 32; i++) assign(all[i], number(i));
        std::memcpy(&numbers, all, sizeof numbers);
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

template <>
struct CodeTable<Bfloat16, 4> : PairTable {
    explicit CodeTable(const float* table) : PairTable([&](int i) { return table[i % 16]; }) {}
    Value at(__m512i codes) const { return (Value)_mm512_permutexvar_epi16(codes, numbers); }
    Value of(const uint32_t* words, int step) const {
        return at(_mm512_srli_epi16(_mm512_loadu_si512(words), unsigned(4 * step)));
    }
};

// float8_e4m3fn: four bits of exponent, three of mantissa. Bits are moved to their places; of numbers whose exponent is 0,
// which here have a normal one, the table has eight.
template <>
struct CodeTable<Bfloat16, 8> : PairTable {
    explicit CodeTable(const float*) : PairTable([](int i) { return float(i % 8) / 512; }) {}
    Value at(__m512i codes) const {
        const __m512i moved = _mm512_and_si512(_mm512_slli_epi16(codes, 4), _mm512_set1_epi16(0x7f0));
        const __mmask32 is_small = _mm512_testn_epi16_mask(codes, _mm512_set1_epi16(0x78));
        const __m512i normal = _mm512_add_epi16(moved, _mm512_set1_epi16(120 << 7));
        const __m512i positive = _mm512_mask_permutexvar_epi16(normal, is_small, codes, numbers);
        const __m512i signs = _mm512_and_si512(_mm512_slli_epi16(codes, 8), _mm512_set1_epi16(int16_t(0x8000)));
        return (Value)_mm512_or_si512(positive, signs);
    }
    Value of(const uint32_t* words, int step) const {
        return at(_mm512_srli_epi16(_mm512_loadu_si512(words), unsigned(8 * step)));
    }
};
#endif

template <>
struct CodeTable<float, 4> {
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

// Whether codes may be float8_e4m3fn: where vectors multiply pairs of inputs, so that it is faster than bfloat16.
template <class T>
constexpr bool takes_float8() {
#ifdef MOTET_BF16_PRODUCTS
    return std::is_same<T, Bfloat16>::value;
#else
    return false;
#endif
}

}  // namespace motet
