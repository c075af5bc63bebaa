// What the vectors of both coders with 64 states share. For sources that are compiled for x86-64 alone.
#pragma once

#include "common/avx512.h"
#include "entropy/rans_states.h"

namespace pulse {

constexpr int kVectors = 4;  // of sixteen states each

// Sixteen words in the lanes of the mask, from the front; and how many they are.
PULSE_AVX512_INLINE __m512i take_words(const uint8_t*& next, __mmask16 lanes) {
    const __m512i words =
        _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(next)));
    next += 2 * __builtin_popcount(lanes);
    return _mm512_maskz_expand_epi32(lanes, words);
}

// The low words of the lanes of the mask are put in front of `next`; whatever is in front of them is lost.
PULSE_AVX512_INLINE void put_words(uint8_t*& next, __mmask16 lanes, __m512i x) {
    const __m512i count = _mm512_set1_epi32(__builtin_popcount(lanes));
    const __m512i iota = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i last = _mm512_permutexvar_epi32(_mm512_add_epi32(iota, count),
                                                  _mm512_maskz_compress_epi32(lanes, x));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(next - 32), _mm512_cvtepi32_epi16(last));
    next -= 2 * __builtin_popcount(lanes);
}

// Quotient and rest by an approximation that is never too large and one too small at most: a state is below length << 20
// when it is divided. The reciprocal's 14 bits become 23 by a step of Newton's, towards 1 - 2^-21 of it.
PULSE_AVX512_INLINE __m512i put_symbol(__m512i x, __m512i length, __m512i start) {
    const __m512 divisor = _mm512_cvtepi32_ps(length), rough = _mm512_rcp14_ps(divisor);
    const __m512 off = _mm512_fnmadd_ps(divisor, rough, _mm512_set1_ps(1 - 0x1p-21f));
    const __m512 about = _mm512_mul_ps(_mm512_cvtepu32_ps(x), _mm512_fmadd_ps(rough, off, rough));
    __m512i quotient = _mm512_cvttps_epi32(about);
    __m512i rest = _mm512_sub_epi32(x, _mm512_mullo_epi32(quotient, length));
    const __m512i one = _mm512_set1_epi32(1);
    const __mmask16 below = _mm512_cmpge_epi32_mask(rest, length);
    quotient = _mm512_mask_add_epi32(quotient, below, quotient, one);
    rest = _mm512_mask_sub_epi32(rest, below, rest, length);
    return _mm512_add_epi32(_mm512_slli_epi32(quotient, kRansBits), _mm512_add_epi32(rest, start));
}

// A byte for each of 256, looked up for 64 at once and widened to four vectors.
struct ByteTable {
    __m512i first, second, third, fourth;  // of 0 to 63, …

    PULSE_AVX512_INLINE static ByteTable from(const uint8_t* table) {
        return {_mm512_loadu_si512(table), _mm512_loadu_si512(table + 64),
                _mm512_loadu_si512(table + 128), _mm512_loadu_si512(table + 192)};
    }
    PULSE_AVX512_INLINE void of(__m512i bytes, __m512i* found) const {
        const __m512i low = _mm512_permutex2var_epi8(first, bytes, second);
        const __m512i high = _mm512_permutex2var_epi8(third, bytes, fourth);
        const __m512i all = _mm512_mask_mov_epi8(low, _mm512_movepi8_mask(bytes), high);
        found[0] = _mm512_cvtepu8_epi32(_mm512_castsi512_si128(all));
        found[1] = _mm512_cvtepu8_epi32(_mm512_extracti32x4_epi32(all, 1));
        found[2] = _mm512_cvtepu8_epi32(_mm512_extracti32x4_epi32(all, 2));
        found[3] = _mm512_cvtepu8_epi32(_mm512_extracti32x4_epi32(all, 3));
    }
};

}  // namespace pulse
