#include "codecs/table/coder.h"
#include "common/types.h"

#if defined(__x86_64__)
#include <algorithm>

#include "entropy/rans_vectors.h"

namespace pulse {
namespace {

// Elements, widened to 32 bits.
PULSE_AVX512_INLINE __m512i load(const uint8_t* p) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
PULSE_AVX512_INLINE __m512i load(const uint16_t* p) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
PULSE_AVX512_INLINE __m512i load(const uint32_t* p) { return _mm512_loadu_si512(p); }

PULSE_AVX512_INLINE void store(uint8_t* p, __m512i x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(x));
}
PULSE_AVX512_INLINE void store(uint16_t* p, __m512i x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(x));
}
PULSE_AVX512_INLINE void store(uint32_t* p, __m512i x) { _mm512_storeu_si512(p, x); }

constexpr size_t kAhead = 2048;  // elements that are fetched before they are needed

// What does not change while a block is coded.
template <class U>
struct Constants {
    ByteTable table;  // of each class
    __m512i sign, mask, class_mask;
    __m128i shift;
    bool floating;
};

template <class U>
PULSE_AVX512_INLINE Constants<U> constants_of(const RansEntries& entries, const ElementKind& kind) {
    Constants<U> c;
    c.table = ByteTable::from(entries.table.data());
    c.sign = _mm512_set1_epi32(int(1u << (8 * sizeof(U) - 1)));
    c.mask = _mm512_set1_epi32(int(~0u >> (32 - 8 * sizeof(U))));
    c.class_mask = _mm512_set1_epi8(char(kind.mask));
    c.shift = _mm_cvtsi32_si128(kind.shift);
    c.floating = kind.floating;
    return c;
}

// The tables of 64 elements, given in four vectors.
template <class U>
PULSE_AVX512_INLINE void tables_of(const Constants<U>& c, const __m512i* old, __m512i* tables) {
    __m128i quarter[kVectors];
    for (int v = 0; v < kVectors; v++)
        quarter[v] = _mm512_cvtepi32_epi8(_mm512_srl_epi32(old[v], c.shift));
    const __m512i raw =
        _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_set_m128i(quarter[1], quarter[0])),
                           _mm256_set_m128i(quarter[3], quarter[2]), 1);
    const __m512i classes = _mm512_and_si512(raw, c.class_mask);
    c.table.of(classes, tables);
}

template <class U>
PULSE_AVX512_INLINE __m512i ordered(const Constants<U>& c, __m512i x) {
    if (!c.floating) return x;
    const __mmask16 negative = _mm512_test_epi32_mask(x, c.sign);
    return _mm512_mask_xor_epi32(_mm512_or_si512(x, c.sign), negative, x, c.mask);
}
template <class U>
PULSE_AVX512_INLINE __m512i unordered(const Constants<U>& c, __m512i y) {
    if (!c.floating) return y;
    const __mmask16 positive = _mm512_test_epi32_mask(y, c.sign);
    return _mm512_mask_xor_epi32(_mm512_xor_si512(y, c.mask), positive, y, c.sign);
}

template <class U>
PULSE_AVX512 size_t encode(RansEncoder& coder, const U* old, const U* now, size_t from, size_t to) {
    const Constants<U> c = constants_of<U>(coder.entries, coder.kind);
    const __m512i one = _mm512_set1_epi32(1), two = _mm512_set1_epi32(2);
    const __m512i escape = _mm512_set1_epi32(coder.entries.escape), piece = _mm512_set1_epi32(16);
    const __m512i length_mask = _mm512_set1_epi32(int(kRansScale - 1));
    constexpr int kWidth = 8 * int(sizeof(U));
    __m512i x[kVectors];
    for (int v = 0; v < kVectors; v++) x[v] = _mm512_load_si512(coder.states + 16 * v);
    uint8_t* next = coder.next;
    size_t changed = 0;
    for (size_t group = to; group-- > from;) {
        __m512i before[kVectors], tables[kVectors], step[kVectors], symbol[kVectors],
            entry[kVectors];
        const size_t first = group * kRansStates;
        for (size_t i = 0; i < kRansStates; i += 64 / sizeof(U)) {
            __builtin_prefetch(old + first - std::min(first, kAhead) + i);
            __builtin_prefetch(now + first - std::min(first, kAhead) + i);
        }
        for (int v = 0; v < kVectors; v++) before[v] = load(old + first + 16 * v);
        tables_of(c, before, tables);
        for (int v = 0; v < kVectors; v++) {
            const __m512i after = load(now + group * kRansStates + 16 * v);
            step[v] = _mm512_sub_epi32(ordered(c, after), ordered(c, before[v]));
            if (kWidth < 32)
                step[v] = _mm512_srai_epi32(_mm512_slli_epi32(step[v], 32 - kWidth), 32 - kWidth);
            changed += size_t(__builtin_popcount(_mm512_test_epi32_mask(step[v], step[v])));
            const __m512i size = _mm512_abs_epi32(step[v]);
            const __m512i small =
                _mm512_sub_epi32(size, _mm512_srai_epi32(step[v], 31));  // 0, 1, or 2 for -1
            const __m512i large = _mm512_sub_epi32(_mm512_set1_epi32(33), _mm512_lzcnt_epi32(size));
            symbol[v] = _mm512_mask_mov_epi32(small, _mm512_cmpgt_epu32_mask(size, one), large);
            symbol[v] = _mm512_min_epu32(symbol[v], escape);
            entry[v] = _mm512_permutexvar_epi32(tables[v], _mm512_load_si512(coder.entries.of[0]));
        }
        for (int s = 1; s < coder.entries.alphabet; s++) {
            const __m512i of_symbol = _mm512_load_si512(coder.entries.of[s]),
                          wanted = _mm512_set1_epi32(s);
            for (int v = 0; v < kVectors; v++) {
                const __mmask16 here = _mm512_cmpeq_epi32_mask(symbol[v], wanted);
                entry[v] = _mm512_mask_permutexvar_epi32(entry[v], here, tables[v], of_symbol);
            }
        }
        // The plain bits of symbols that have some.
        __mmask16 longer[kVectors];
        int any = 0;
        for (int v = 0; v < kVectors; v++) {
            symbol[v] = _mm512_and_si512(entry[v], _mm512_set1_epi32(63));
            longer[v] = _mm512_cmpgt_epu32_mask(symbol[v], two);
            any |= longer[v];
        }
        if (any) {
            __m512i plain[kVectors], bits[kVectors];
            for (int v = 0; v < kVectors; v++) {
                const __mmask16 escaped = _mm512_cmpeq_epi32_mask(symbol[v], escape);
                bits[v] = _mm512_maskz_sub_epi32(longer[v], symbol[v], one);
                const __m512i top =
                    _mm512_maskz_sllv_epi32(longer[v], one, _mm512_sub_epi32(bits[v], one));
                const __m512i size =
                    _mm512_and_si512(_mm512_abs_epi32(step[v]), _mm512_sub_epi32(top, one));
                plain[v] = _mm512_mask_or_epi32(size, _mm512_movepi32_mask(step[v]), size, top);
                plain[v] = _mm512_mask_and_epi32(plain[v], escaped, step[v], c.mask);
                bits[v] = _mm512_mask_mov_epi32(bits[v], escaped, _mm512_set1_epi32(kWidth));
            }
            for (int from_bit = kWidth > 16 ? 16 : 0; from_bit >= 0; from_bit -= 16) {
                for (int v = kVectors - 1; v >= 0; v--) {
                    __m512i count = bits[v], value = plain[v];
                    if (from_bit) {
                        count = _mm512_subs_epu16(count, piece);
                        value = _mm512_srli_epi32(value, 16);
                    }
                    count = _mm512_min_epu32(count, piece);
                    const __mmask16 here = _mm512_test_epi32_mask(count, count);
                    const __m512i out = _mm512_maskz_srlv_epi32(
                        here, x[v], _mm512_sub_epi32(_mm512_set1_epi32(32), count));
                    const __mmask16 full = _mm512_test_epi32_mask(out, out);
                    put_words(next, full, x[v]);
                    x[v] = _mm512_mask_srli_epi32(x[v], full, x[v], 16);
                    const __m512i low = _mm512_sub_epi32(_mm512_sllv_epi32(one, count), one);
                    x[v] = _mm512_or_si512(_mm512_sllv_epi32(x[v], count),
                                           _mm512_and_si512(value, low));
                }
            }
        }
        for (int v = kVectors - 1; v >= 0; v--) {
            const __m512i length = _mm512_add_epi32(
                _mm512_and_si512(_mm512_srli_epi32(entry[v], 6), length_mask), one);
            const __mmask16 full =
                _mm512_cmpge_epu32_mask(_mm512_srli_epi32(x[v], 32 - kRansBits), length);
            put_words(next, full, x[v]);
            x[v] = _mm512_mask_srli_epi32(x[v], full, x[v], 16);
            x[v] = put_symbol(x[v], length, _mm512_srli_epi32(entry[v], 20));
        }
    }
    for (int v = 0; v < kVectors; v++) _mm512_store_si512(coder.states + 16 * v, x[v]);
    coder.next = next;
    coder.changed += changed;
    return to - from;
}

template <class U>
PULSE_AVX512 size_t decode(RansDecoder& coder, const U* old, size_t from, size_t to) {
    const Constants<U> c = constants_of<U>(coder.entries, coder.kind);
    const __m512i one = _mm512_set1_epi32(1), two = _mm512_set1_epi32(2),
                  piece = _mm512_set1_epi32(16);
    const __m512i escape = _mm512_set1_epi32(coder.entries.escape),
                  lowest = _mm512_set1_epi32(int(kRansLow));
    const __m512i length_mask = _mm512_set1_epi32(int(kRansScale - 1)),
                  low_of_slot = _mm512_set1_epi32(kLowOfSlot);
    const __m512i iota = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    constexpr int kWidth = 8 * int(sizeof(U));
    __m512i x[kVectors];
    for (int v = 0; v < kVectors; v++) x[v] = _mm512_load_si512(coder.states + 16 * v);
    const uint8_t* next = coder.next;
    uint32_t* const positions = coder.positions;
    U* const values = reinterpret_cast<U*>(coder.values);
    U* const replaced = reinterpret_cast<U*>(coder.before);
    size_t found = coder.found, group = from;
    for (; group < to && size_t(coder.end - next) >= 2 * kWordsOfGroup; group++) {
        __m512i before[kVectors], tables[kVectors], key[kVectors], entry[kVectors], step[kVectors];
        for (int v = 0; v < kVectors; v++) before[v] = load(old + group * kRansStates + 16 * v);
        tables_of(c, before, tables);
        for (int v = 0; v < kVectors; v++) {
            key[v] = _mm512_or_si512(_mm512_slli_epi32(x[v], 20), low_of_slot);
            entry[v] = _mm512_permutexvar_epi32(tables[v], _mm512_load_si512(coder.entries.of[0]));
        }
        for (int s = 1; s < coder.entries.alphabet; s++) {
            const __m512i of_symbol = _mm512_load_si512(coder.entries.of[s]);
            for (int v = 0; v < kVectors; v++) {
                const __m512i candidate = _mm512_permutexvar_epi32(tables[v], of_symbol);
                entry[v] = _mm512_mask_mov_epi32(
                    entry[v], _mm512_cmpge_epu32_mask(key[v], candidate), candidate);
            }
        }
        __m512i symbol[kVectors];
        __mmask16 longer[kVectors];
        int any = 0;
        for (int v = 0; v < kVectors; v++) {
            const __m512i length = _mm512_add_epi32(
                _mm512_and_si512(_mm512_srli_epi32(entry[v], 6), length_mask), one);
            const __m512i rest = _mm512_srli_epi32(_mm512_sub_epi32(key[v], entry[v]), 20);
            x[v] = _mm512_add_epi32(_mm512_mullo_epi32(length, _mm512_srli_epi32(x[v], kRansBits)),
                                    rest);
            const __mmask16 empty = _mm512_cmplt_epu32_mask(x[v], lowest);
            const __m512i words = take_words(next, empty);
            x[v] = _mm512_mask_or_epi32(x[v], empty, _mm512_slli_epi32(x[v], 16), words);
            symbol[v] = _mm512_and_si512(entry[v], _mm512_set1_epi32(63));
            longer[v] = _mm512_cmpgt_epu32_mask(symbol[v], two);
            any |= longer[v];
            // 0, 1, -1 of the symbols 0, 1, 2
            step[v] =
                _mm512_sub_epi32(_mm512_and_si512(symbol[v], one), _mm512_srli_epi32(symbol[v], 1));
        }
        if (any) {
            __m512i plain[kVectors], bits[kVectors];
            for (int v = 0; v < kVectors; v++) {
                bits[v] = _mm512_maskz_sub_epi32(longer[v], symbol[v], one);
                bits[v] = _mm512_mask_mov_epi32(bits[v], _mm512_cmpeq_epi32_mask(symbol[v], escape),
                                                _mm512_set1_epi32(kWidth));
                plain[v] = _mm512_setzero_si512();
            }
            for (int from_bit = 0; from_bit < kWidth; from_bit += 16) {
                for (int v = 0; v < kVectors; v++) {
                    const __m512i left = from_bit ? _mm512_subs_epu16(bits[v], piece) : bits[v];
                    const __m512i count = _mm512_min_epu32(left, piece);
                    const __m512i low = _mm512_sub_epi32(_mm512_sllv_epi32(one, count), one);
                    const __m512i value = _mm512_and_si512(x[v], low);
                    plain[v] =
                        _mm512_or_si512(plain[v], from_bit ? _mm512_slli_epi32(value, 16) : value);
                    x[v] = _mm512_srlv_epi32(x[v], count);
                    const __mmask16 empty = _mm512_cmplt_epu32_mask(x[v], lowest);
                    const __m512i words = take_words(next, empty);
                    x[v] = _mm512_mask_or_epi32(x[v], empty, _mm512_slli_epi32(x[v], 16), words);
                }
            }
            for (int v = 0; v < kVectors; v++) {
                const __mmask16 escaped = _mm512_cmpeq_epi32_mask(symbol[v], escape);
                const __m512i top = _mm512_sllv_epi32(one, _mm512_sub_epi32(bits[v], one));
                const __m512i size =
                    _mm512_or_si512(top, _mm512_and_si512(plain[v], _mm512_sub_epi32(top, one)));
                const __mmask16 down = _mm512_test_epi32_mask(plain[v], top);
                const __m512i moved =
                    _mm512_mask_sub_epi32(size, down, _mm512_setzero_si512(), size);
                step[v] = _mm512_mask_mov_epi32(step[v], longer[v], moved);
                step[v] = _mm512_mask_mov_epi32(step[v], escaped, plain[v]);
                if (_mm512_mask_testn_epi32_mask(escaped, plain[v], plain[v]))
                    throw Malformed("a change by nothing");
            }
        }
        for (int v = 0; v < kVectors; v++) {
            const __m512i after = unordered(
                c, _mm512_and_si512(_mm512_add_epi32(ordered(c, before[v]), step[v]), c.mask));
            const __mmask16 changed = _mm512_test_epi32_mask(symbol[v], symbol[v]);
            const __m512i place =
                _mm512_add_epi32(iota, _mm512_set1_epi32(int(group * kRansStates) + 16 * v));
            _mm512_storeu_si512(positions + found, _mm512_maskz_compress_epi32(changed, place));
            store(values + found, _mm512_maskz_compress_epi32(changed, after));
            store(replaced + found, _mm512_maskz_compress_epi32(changed, before[v]));
            found += size_t(__builtin_popcount(changed));
        }
        if (found > coder.most) throw Malformed("there are more changes than announced");
    }
    for (int v = 0; v < kVectors; v++) _mm512_store_si512(coder.states + 16 * v, x[v]);
    coder.next = next;
    coder.found = found;
    return group - from;
}

}  // namespace

// Not compiled for vectors themselves: a template is not known by another one's attributes.
template <class U>
size_t vector_encode(RansEncoder& coder, const U* old, const U* now, size_t from, size_t to) {
    return encode(coder, old, now, from, to);
}
template <class U>
size_t vector_decode(RansDecoder& coder, const U* old, size_t from, size_t to) {
    return decode(coder, old, from, to);
}

#define PULSE_FOR(U)                                                                 \
    template size_t vector_encode(RansEncoder&, const U*, const U*, size_t, size_t); \
    template size_t vector_decode(RansDecoder&, const U*, size_t, size_t);
PULSE_FOR_WIDTHS(PULSE_FOR)

}  // namespace pulse
#endif
