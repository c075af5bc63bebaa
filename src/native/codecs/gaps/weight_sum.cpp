#include "codecs/gaps/weight_sum.h"

#include "common/types.h"

#if defined(__x86_64__)
#include "common/avx512.h"

namespace pulse {
namespace {

// The lowest byte of (x >> shift) of 64 elements; zeros, whatever their class, behind the `count` that there are.
PULSE_AVX512_INLINE __m512i classes(const uint8_t* p, size_t count, __m128i shift) {
    const uint64_t there = count < 64 ? (uint64_t(1) << count) - 1 : ~uint64_t(0);
    return _mm512_srl_epi16(_mm512_maskz_loadu_epi8(there, p),
                            shift);  // bits of a neighbor are above the class's mask
}
PULSE_AVX512_INLINE __m512i classes(const uint16_t* p, size_t count, __m128i shift) {
    const uint64_t there = count < 64 ? (uint64_t(1) << count) - 1 : ~uint64_t(0);
    const __m512i low = _mm512_maskz_loadu_epi16(__mmask32(there), p);
    const __m512i high = _mm512_maskz_loadu_epi16(__mmask32(there >> 32), p + 32);
    return _mm512_inserti64x4(
        _mm512_castsi256_si512(_mm512_cvtepi16_epi8(_mm512_srl_epi16(low, shift))),
        _mm512_cvtepi16_epi8(_mm512_srl_epi16(high, shift)), 1);
}
PULSE_AVX512_INLINE __m512i classes(const uint32_t* p, size_t count, __m128i shift) {
    const uint64_t there = count < 64 ? (uint64_t(1) << count) - 1 : ~uint64_t(0);
    __m128i quarters[4];
    for (int k = 0; k < 4; k++) {
        const __m512i x = _mm512_maskz_loadu_epi32(__mmask16(there >> (16 * k)), p + 16 * k);
        quarters[k] = _mm512_cvtepi32_epi8(_mm512_srl_epi32(x, shift));
    }
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_set_m128i(quarters[1], quarters[0])),
                              _mm256_set_m128i(quarters[3], quarters[2]), 1);
}

constexpr size_t kAhead = 2048;

// The weights of eight eights of elements, `count` of which are there, without those that are `marked`.
template <class U>
PULSE_AVX512_INLINE __m512i eights(const U* p, size_t count, ClassOf cls, const Weights& weights,
                                   bool live, uint64_t marked) {
    const uint64_t there = (count < 64 ? (uint64_t(1) << count) - 1 : ~uint64_t(0)) & ~marked;
    for (size_t at = 0; at < 64 * sizeof(U); at += 64)
        __builtin_prefetch(reinterpret_cast<const uint8_t*>(p) + kAhead + at);
    const __m512i found = _mm512_and_si512(classes(p, count, _mm_cvtsi32_si128(cls.shift)),
                                           _mm512_set1_epi8(char(cls.mask)));
    const __m512i index = _mm512_sub_epi8(found, _mm512_set1_epi8(char(weights.first)));
    const __mmask64 known =
        _mm512_cmplt_epu8_mask(index, _mm512_set1_epi8(char(sizeof(U) == 1 ? 128 : 64))) & there;
    __m512i sum = _mm512_setzero_si512();
    for (int k = 0; k < 4; k++) {
        const __m512i plane = _mm512_loadu_si512(weights.planes[live][k]);
        __m512i bytes;
        if constexpr (sizeof(U) == 1) {
            const __m512i rest = _mm512_loadu_si512(weights.planes[live][k] + 64);
            bytes = _mm512_maskz_permutex2var_epi8(known, plane, index, rest);
        } else {
            bytes = _mm512_maskz_permutexvar_epi8(known, index, plane);
        }
        sum = _mm512_add_epi64(
            sum,
            _mm512_slli_epi64(_mm512_sad_epu8(bytes, _mm512_setzero_si512()), unsigned(8 * k)));
    }
    return sum;
}

template <bool kMarked, class U>
PULSE_AVX512 uint64_t sum_of(const U* p, size_t count, ClassOf cls, const Weights& weights,
                             bool live, MaskWords marks, size_t first) {
    __m512i sum = _mm512_setzero_si512();
    for (size_t at = 0; at < count; at += 64) {
        const uint64_t marked = kMarked ? marks_from(marks, first + at) : 0;
        sum = _mm512_add_epi64(sum, eights(p + at, count - at, cls, weights, live, marked));
    }
    return uint64_t(_mm512_reduce_add_epi64(sum));
}

template <bool kMarked, class U>
PULSE_AVX512 size_t skip(const U* p, size_t count, ClassOf cls, const Weights& weights, bool live,
                         uint64_t& waited, uint64_t target, MaskWords marks,
                         size_t first_of_block) {
    const __m512i zero = _mm512_setzero_si512();
    size_t at = 0;
    while (at + 8 <= count) {
        const size_t here = count - at < 64 ? (count - at) & ~size_t(7) : 64;
        const uint64_t marked = kMarked ? marks_from(marks, first_of_block + at) : 0;
        __m512i passed =
            eights(p + at, here, cls, weights, live, marked);  // becomes the sums up to each eight
        passed = _mm512_add_epi64(passed, _mm512_alignr_epi64(passed, zero, 7));
        passed = _mm512_add_epi64(passed, _mm512_alignr_epi64(passed, zero, 6));
        passed = _mm512_add_epi64(passed, _mm512_alignr_epi64(passed, zero, 4));
        const __mmask8 reached =
            _mm512_cmpge_epu64_mask(passed, _mm512_set1_epi64(int64_t(target - waited)));
        alignas(64) uint64_t sums[8];
        _mm512_store_si512(sums, passed);
        if (reached) {
            const size_t first = size_t(__builtin_ctz(reached));
            if (8 * first >= here) return at + here;
            waited += first ? sums[first - 1] : 0;
            return at + 8 * first;
        }
        waited += sums[7];
        at += here;
    }
    return at;
}

}  // namespace

template <class U>
uint64_t vector_weight_sum(const U* p, size_t count, ClassOf cls, const Weights& weights, bool live,
                           MaskWords marks, size_t first) {
    return marks ? sum_of<true>(p, count, cls, weights, live, marks, first)
                 : sum_of<false>(p, count, cls, weights, live, marks, first);
}
template <class U>
size_t vector_weight_skip(const U* p, size_t count, ClassOf cls, const Weights& weights, bool live,
                          uint64_t& waited, uint64_t target, MaskWords marks, size_t first) {
    return marks ? skip<true>(p, count, cls, weights, live, waited, target, marks, first)
                 : skip<false>(p, count, cls, weights, live, waited, target, marks, first);
}

#define PULSE_FOR(U)                                                                               \
    template uint64_t vector_weight_sum(const U*, size_t, ClassOf, const Weights&, bool,           \
                                        MaskWords, size_t);                                        \
    template size_t vector_weight_skip(const U*, size_t, ClassOf, const Weights&, bool, uint64_t&, \
                                       uint64_t, MaskWords, size_t);
PULSE_FOR_WIDTHS(PULSE_FOR)

}  // namespace pulse
#endif
