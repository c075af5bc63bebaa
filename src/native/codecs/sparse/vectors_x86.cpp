#include "codecs/sparse/weights.h"
#include "entropy/rans_bits.h"

#if defined(__x86_64__)
#include "entropy/rans_vectors.h"

namespace pulse {
namespace {

// The low bits of (x >> shift) of 32 elements.
PULSE_AVX512_INLINE __m512i shifted(const uint8_t* p, __m128i shift) {
    return _mm512_srl_epi16(
        _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), shift);
}
PULSE_AVX512_INLINE __m512i shifted(const uint16_t* p, __m128i shift) {
    return _mm512_srl_epi16(_mm512_loadu_si512(p), shift);
}
PULSE_AVX512_INLINE __m512i shifted(const uint32_t* p, __m128i shift) {
    const __m256i low = _mm512_cvtepi32_epi16(_mm512_srl_epi32(_mm512_loadu_si512(p), shift));
    const __m256i high = _mm512_cvtepi32_epi16(_mm512_srl_epi32(_mm512_loadu_si512(p + 16), shift));
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

// Looks the weights of 32 elements up, 16 bits each, in so many tables of 64.
template <int kTables>
struct Lookup {
    __m512i low[kTables], high[kTables], mask, first, most;
    __m128i shift;

    PULSE_AVX512_INLINE static Lookup from(ClassOf cls, const GroupWeights& weights) {
        Lookup made;
        for (int t = 0; t < kTables; t++) {
            made.low[t] = _mm512_load_si512(weights.table + 64 * t);
            made.high[t] = _mm512_load_si512(weights.table + 64 * t + 32);
        }
        made.mask = _mm512_set1_epi16(short(cls.mask));
        made.first = _mm512_set1_epi16(short(weights.first));
        made.most = _mm512_set1_epi16(short(64 * kTables));
        made.shift = _mm_cvtsi32_si128(cls.shift);
        return made;
    }
    PULSE_AVX512_INLINE __m512i of(__m512i shifted_elements, uint32_t marked) const {
        const __m512i index = _mm512_sub_epi16(_mm512_and_si512(shifted_elements, mask), first);
        const __mmask32 known = _mm512_cmplt_epu16_mask(index, most) & __mmask32(~marked);
        __m512i found = _mm512_maskz_permutex2var_epi16(known, low[0], index, high[0]);
        const __mmask32 odd = known & _mm512_test_epi16_mask(index, _mm512_set1_epi16(64));
        if constexpr (kTables > 1) {
            found = _mm512_mask_mov_epi16(found, odd,
                                          _mm512_permutex2var_epi16(low[1], index, high[1]));
        }
        if constexpr (kTables == 4) {
            const __mmask32 upper = known & _mm512_test_epi16_mask(index, _mm512_set1_epi16(128));
            __m512i other = _mm512_permutex2var_epi16(low[2], index, high[2]);
            other = _mm512_mask_mov_epi16(other, odd,
                                          _mm512_permutex2var_epi16(low[3], index, high[3]));
            found = _mm512_mask_mov_epi16(found, upper, other);
        }
        return found;
    }
};

// The frequencies of weights.
struct Frequencies {
    __m512i low, high, base;  // the first 32 and the last 32 of kHazardFrequencies

    PULSE_AVX512_INLINE static Frequencies from(const GroupWeights& weights, int shift) {
        return {_mm512_loadu_si512(kHazardFrequencies.data()),
                _mm512_loadu_si512(kHazardFrequencies.data() + 32),
                _mm512_set1_epi32(weights.base() + shift - 4 * 127)};
    }
    PULSE_AVX512_INLINE __m256i index(__m512i sums) const {
        const __m512i quarters =
            _mm512_srli_epi32(_mm512_castps_si512(_mm512_cvtepi32_ps(sums)), 21);
        const __m512i of =
            _mm512_max_epi32(_mm512_add_epi32(quarters, base), _mm512_setzero_si512());
        return _mm512_cvtepi32_epi16(_mm512_min_epi32(of, _mm512_set1_epi32(kHazards - 1)));
    }
    PULSE_AVX512_INLINE __m512i of(__m512i first, __m512i second) const {
        const __m512i indices =
            _mm512_inserti64x4(_mm512_castsi256_si512(index(first)), index(second), 1);
        const __mmask32 some = __mmask32(_mm512_test_epi32_mask(first, first)) |
                               __mmask32(_mm512_test_epi32_mask(second, second)) << 16;
        return _mm512_maskz_permutex2var_epi16(some, low, indices, high);
    }
};

template <int kTables, bool kMarked, class U>
PULSE_AVX512 void of_groups(const U* first, ClassOf cls, const GroupWeights& weights, int shift,
                            MaskWords marks, uint16_t* frequencies) {
    const auto lookup = Lookup<kTables>::from(cls, weights);
    const Frequencies of = Frequencies::from(weights, shift);
    const __m512i ones = _mm512_set1_epi16(1);
    const __m512i in_order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
    __m512i sums[kVectors];
    for (int v = 0; v < kVectors; v++) {
        __m512i pairs[4];
        for (int k = 0; k < 4; k++) {
            const uint32_t marked = kMarked ? uint32_t(marks[2 * v + k / 2] >> (32 * (k % 2))) : 0;
            pairs[k] = _mm512_madd_epi16(
                lookup.of(shifted(first + 128 * v + 32 * k, lookup.shift), marked), ones);
        }
        const __m512i a = _mm512_add_epi32(_mm512_unpacklo_epi32(pairs[0], pairs[1]),
                                           _mm512_unpackhi_epi32(pairs[0], pairs[1]));
        const __m512i b = _mm512_add_epi32(_mm512_unpacklo_epi32(pairs[2], pairs[3]),
                                           _mm512_unpackhi_epi32(pairs[2], pairs[3]));
        const __m512i both =
            _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
        sums[v] = _mm512_permutexvar_epi32(in_order, both);
    }
    _mm512_storeu_si512(frequencies, of.of(sums[0], sums[1]));
    _mm512_storeu_si512(frequencies + 32, of.of(sums[2], sums[3]));
}

// Eight elements, widened to 16 bits.
PULSE_AVX512_INLINE __m128i eight(const uint8_t* p, __m128i shift) {
    return _mm_srl_epi16(_mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))),
                         shift);
}
PULSE_AVX512_INLINE __m128i eight(const uint16_t* p, __m128i shift) {
    return _mm_srl_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)), shift);
}
PULSE_AVX512_INLINE __m128i eight(const uint32_t* p, __m128i shift) {
    return _mm256_cvtepi32_epi16(
        _mm256_srl_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), shift));
}

template <int kTables, bool kMarked, class U>
PULSE_AVX512 void open_groups(OpenGroups& open, const U* block, ClassOf cls,
                              const GroupWeights& weights, MaskWords marks,
                              const uint32_t* groups) {
    const auto lookup = Lookup<kTables>::from(cls, weights);
    for (size_t half = 0; half < kRansStates; half += 32) {
        // Row r of four squares of 8 groups by 8 elements; then columns.
        __m512i x[8], y[8];
        for (size_t r = 0; r < 8; r++) {
            const uint32_t* const of = groups + half + r;
            __m512i row = _mm512_castsi128_si512(eight(block + of[0] * kGroup, lookup.shift));
            row = _mm512_inserti32x4(row, eight(block + of[8] * kGroup, lookup.shift), 1);
            row = _mm512_inserti32x4(row, eight(block + of[16] * kGroup, lookup.shift), 2);
            row = _mm512_inserti32x4(row, eight(block + of[24] * kGroup, lookup.shift), 3);
            uint32_t marked = 0;
            if constexpr (kMarked) {
                for (size_t k = 0; k < 4; k++)
                    marked |= marks_of_eight(marks, of[8 * k]) << (8 * k);
            }
            x[r] = lookup.of(row, marked);
        }
        for (size_t r = 0; r < 8; r += 2) {
            y[r] = _mm512_unpacklo_epi16(x[r], x[r + 1]);
            y[r + 1] = _mm512_unpackhi_epi16(x[r], x[r + 1]);
        }
        for (size_t r = 0; r < 8; r += 4) {
            x[r] = _mm512_unpacklo_epi32(y[r], y[r + 2]);
            x[r + 1] = _mm512_unpackhi_epi32(y[r], y[r + 2]);
            x[r + 2] = _mm512_unpacklo_epi32(y[r + 1], y[r + 3]);
            x[r + 3] = _mm512_unpackhi_epi32(y[r + 1], y[r + 3]);
        }
        for (size_t r = 0; r < 4; r++) {
            y[2 * r] = _mm512_unpacklo_epi64(x[r], x[r + 4]);
            y[2 * r + 1] = _mm512_unpackhi_epi64(x[r], x[r + 4]);
        }
        __m512i low = _mm512_setzero_si512(), high = low;
        for (size_t k = 0; k < kGroup; k++) {
            _mm512_store_si512(open.weights[k] + half, y[k]);
            low = _mm512_add_epi32(low, _mm512_cvtepu16_epi32(_mm512_castsi512_si256(y[k])));
            high =
                _mm512_add_epi32(high, _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(y[k], 1)));
        }
        _mm512_store_si512(open.rest + half, low);
        _mm512_store_si512(open.rest + half + 16, high);
    }
}

// Calls `f` with how many tables the weights have and whether there are marks, both constant.
template <class F>
void for_lookup(const GroupWeights& weights, MaskWords marks, F&& f) {
    const auto with = [&](auto tables) {
        marks ? f(tables, std::true_type()) : f(tables, std::false_type());
    };
    switch (weights.tables) {
        case 1: return with(std::integral_constant<int, 1>());
        case 2: return with(std::integral_constant<int, 2>());
        default: return with(std::integral_constant<int, 4>());
    }
}

}  // namespace

PULSE_AVX512 void vector_put_bits(RansWriter& coder, const uint16_t* frequencies,
                                  const uint64_t* bits, size_t batches) {
    const __m512i scale = _mm512_set1_epi32(int(kRansScale));
    __m512i x[kVectors];
    for (int v = 0; v < kVectors; v++) x[v] = _mm512_load_si512(coder.states + 16 * v);
    uint8_t* next = coder.next;
    for (size_t b = batches; b-- > 0;) {
        __m512i start[kVectors], length[kVectors];
        for (int v = kVectors - 1; v >= 0; v--) {
            const uint16_t* const of = frequencies + b * kRansStates + size_t(16 * v);
            const __m512i f =
                _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(of)));
            const __mmask16 here = __mmask16(bits[b] >> (16 * v));
            length[v] = _mm512_mask_mov_epi32(_mm512_sub_epi32(scale, f), here, f);
            start[v] = _mm512_mask_mov_epi32(f, here, _mm512_setzero_si512());
            const __mmask16 full =
                _mm512_cmpge_epu32_mask(_mm512_srli_epi32(x[v], 32 - kRansBits), length[v]);
            put_words(next, full, x[v]);
            x[v] = _mm512_mask_srli_epi32(x[v], full, x[v], 16);
        }
        for (int v = 0; v < kVectors; v++) x[v] = put_symbol(x[v], length[v], start[v]);
    }
    for (int v = 0; v < kVectors; v++) _mm512_store_si512(coder.states + 16 * v, x[v]);
    coder.next = next;
}

// Without branches: nobody can foresee which states want a word.
PULSE_AVX512 uint64_t vector_take_bits(RansReader& coder, const uint16_t* frequencies) {
    const __m512i scale = _mm512_set1_epi32(int(kRansScale)),
                  slots = _mm512_set1_epi32(int(kRansScale - 1));
    const __m512i lowest = _mm512_set1_epi32(int(kRansLow));
    __m512i x[kVectors];
    __mmask16 empty[kVectors];
    uint64_t bits = 0;
    for (int v = 0; v < kVectors; v++) {
        x[v] = _mm512_load_si512(coder.states + 16 * v);
        const __m256i* const of = reinterpret_cast<const __m256i*>(frequencies + 16 * v);
        const __m512i f = _mm512_cvtepu16_epi32(_mm256_loadu_si256(of));
        const __m512i slot = _mm512_and_si512(x[v], slots);
        const __mmask16 one = _mm512_cmplt_epu32_mask(slot, f);
        bits |= uint64_t(one) << (16 * v);
        const __m512i length = _mm512_mask_mov_epi32(_mm512_sub_epi32(scale, f), one, f);
        const __m512i rest = _mm512_mask_sub_epi32(slot, __mmask16(~one), slot, f);
        x[v] =
            _mm512_add_epi32(_mm512_mullo_epi32(length, _mm512_srli_epi32(x[v], kRansBits)), rest);
        empty[v] = _mm512_cmplt_epu32_mask(x[v], lowest);
    }
    const uint8_t* next = coder.next;
    for (int v = 0; v < kVectors; v++) {
        const __m512i words = take_words(next, empty[v]);
        x[v] = _mm512_mask_or_epi32(x[v], empty[v], _mm512_slli_epi32(x[v], 16), words);
        _mm512_store_si512(coder.states + 16 * v, x[v]);
    }
    if (next > coder.end) throw Malformed("the code ends too early");
    coder.next = next;
    return bits;
}

PULSE_AVX512 void vector_put_ones(uint64_t bits, uint32_t first, uint32_t* out) {
    const __m512i iota = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    for (int v = 0; v < kVectors; v++) {
        const __mmask16 here = __mmask16(bits >> (16 * v));
        const __m512i places = _mm512_add_epi32(iota, _mm512_set1_epi32(int(first) + 16 * v));
        _mm512_storeu_si512(out, _mm512_maskz_compress_epi32(here, places));
        out += __builtin_popcount(here);
    }
}

PULSE_AVX512 void vector_turn_bits(const uint64_t* bits, uint8_t* bytes) {
    __m512i all = _mm512_setzero_si512();
    for (int k = 0; k < 8; k++)
        all = _mm512_or_si512(all, _mm512_maskz_set1_epi8(bits[k], char(1 << k)));
    _mm512_storeu_si512(bytes, all);
}

template <class U>
void vector_group_frequencies(const U* first, ClassOf cls, const GroupWeights& weights, int shift,
                              MaskWords marks, uint16_t* frequencies) {
    for_lookup(weights, marks, [&](auto tables, auto marked) {
        of_groups<tables(), marked()>(first, cls, weights, shift, marks, frequencies);
    });
}
template <class U>
void vector_open(OpenGroups& open, const U* block, ClassOf cls, const GroupWeights& weights,
                 MaskWords marks, const uint32_t* groups) {
    for_lookup(weights, marks, [&](auto tables, auto marked) {
        open_groups<tables(), marked()>(open, block, cls, weights, marks, groups);
    });
}

PULSE_AVX512 void vector_open_frequencies(const OpenGroups& open, size_t k,
                                          const GroupWeights& weights, uint16_t* out) {
    const Frequencies of = Frequencies::from(weights, 0);
    const __m512 scale = _mm512_set1_ps(float(kRansScale)), unit = _mm512_set1_ps(1);
    const __m512 excess = _mm512_set1_ps(weights.excess()),
                 most_excess = _mm512_set1_ps(kMostExcess);
    const __m512i one = _mm512_set1_epi32(1), most = _mm512_set1_epi32(int(kRansScale - 1));
    for (size_t half = 0; half < kRansStates; half += 32) {
        __m512i weight[2];
        __m256i share[2];
        for (size_t q = 0; q < 2; q++) {
            const size_t at = half + 16 * q;
            weight[q] = _mm512_cvtepu16_epi32(
                _mm256_load_si256(reinterpret_cast<const __m256i*>(open.weights[k] + at)));
            const __m512i rest = _mm512_load_si512(open.rest + at);
            const __mmask16 some = _mm512_test_epi32_mask(weight[q], weight[q]);
            const __m512 ratio =
                _mm512_maskz_div_ps(some, _mm512_cvtepi32_ps(weight[q]), _mm512_cvtepi32_ps(rest));
            const __m512 behind = _mm512_cvtepi32_ps(_mm512_sub_epi32(rest, weight[q]));
            const __m512 more = _mm512_min_ps(_mm512_mul_ps(behind, excess), most_excess);
            const __m512 likely = _mm512_mul_ps(ratio, _mm512_add_ps(unit, more));
            __m512i f = _mm512_cvttps_epi32(_mm512_mul_ps(likely, scale));
            f = _mm512_min_epi32(_mm512_max_epi32(f, one), most);
            f = _mm512_mask_mov_epi32(f, _mm512_cmpeq_epi32_mask(weight[q], rest),
                                      _mm512_set1_epi32(int(kCertain)));
            share[q] = _mm512_cvtepi32_epi16(_mm512_maskz_mov_epi32(some, f));
        }
        const __m512i shares = _mm512_inserti64x4(_mm512_castsi256_si512(share[0]), share[1], 1);
        const __mmask32 seen = __mmask32(open.seen >> half);
        _mm512_storeu_si512(out + half,
                            _mm512_mask_mov_epi16(shares, seen, of.of(weight[0], weight[1])));
    }
}

#define PULSE_FOR(U)                                                                               \
    template void vector_group_frequencies(const U*, ClassOf, const GroupWeights&, int, MaskWords, \
                                           uint16_t*);                                             \
    template void vector_open(OpenGroups&, const U*, ClassOf, const GroupWeights&, MaskWords,      \
                              const uint32_t*);
PULSE_FOR_WIDTHS(PULSE_FOR)

}  // namespace pulse
#endif
