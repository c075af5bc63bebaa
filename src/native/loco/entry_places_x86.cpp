#include "loco/entry_places.h"

#if defined(__x86_64__)
#include "entropy/rans_vectors.h"

namespace pulse {
namespace {

struct Opens {
    ByteTable level;      // of each class
    __m512i rare, often;  // the frequencies of levels 0 to 15, 16 to 31

    PULSE_AVX512_INLINE static Opens from(const OpenLevels& levels) {
        const __m512i pairs = _mm512_loadu_si512(kOpens.data());
        return {ByteTable::from(levels.data()),
                _mm512_cvtepu16_epi32(_mm512_castsi512_si256(pairs)),
                _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(pairs, 1))};
    }
    // Of a group of elements.
    PULSE_AVX512_INLINE void of(const uint8_t* classes, __m512i* frequencies) const {
        level.of(_mm512_loadu_si512(classes), frequencies);
        for (int v = 0; v < kVectors; v++)
            frequencies[v] = _mm512_permutex2var_epi32(rare, frequencies[v], often);
    }
};

}  // namespace

PULSE_AVX512 void vector_encode_places(RansWriter& coder, const Tile& tile,
                                       const OpenLevels& levels, const uint32_t* positions,
                                       size_t& count) {
    const Opens opens = Opens::from(levels);
    const __m512i scale = _mm512_set1_epi32(int(kRansScale));
    __m512i x[kVectors];
    for (int v = 0; v < kVectors; v++) x[v] = _mm512_load_si512(coder.states + 16 * v);
    uint8_t* next = coder.next;
    size_t left = count;
    for (size_t group = tile.elements / kRansStates; group-- > 0;) {
        const size_t from = tile.from + group * kRansStates;
        uint64_t open = 0;
        for (; left > 0 && positions[left - 1] >= from; left--) {
            open |= uint64_t(1) << (positions[left - 1] & (kRansStates - 1));
        }
        __m512i start[kVectors], length[kVectors];
        opens.of(tile.classes + group * kRansStates, start);
        for (int v = kVectors - 1; v >= 0; v--) {
            const __mmask16 here = __mmask16(open >> (16 * v));
            length[v] = _mm512_mask_mov_epi32(_mm512_sub_epi32(scale, start[v]), here, start[v]);
            start[v] = _mm512_mask_mov_epi32(start[v], here, _mm512_setzero_si512());
            const __mmask16 full =
                _mm512_cmpge_epu32_mask(_mm512_srli_epi32(x[v], 32 - kRansBits), length[v]);
            if (!full) continue;  // mostly: a place takes far less than a bit
            put_words(next, full, x[v]);
            x[v] = _mm512_mask_srli_epi32(x[v], full, x[v], 16);
        }
        for (int v = 0; v < kVectors; v++) x[v] = put_symbol(x[v], length[v], start[v]);
    }
    for (int v = 0; v < kVectors; v++) _mm512_store_si512(coder.states + 16 * v, x[v]);
    coder.next = next;
    count = left;
}

PULSE_AVX512 size_t vector_decode_places(RansReader& coder, const Tile& tile,
                                         const OpenLevels& levels, uint32_t* positions,
                                         size_t& found, size_t most) {
    const Opens opens = Opens::from(levels);
    const __m512i scale = _mm512_set1_epi32(int(kRansScale)),
                  slots = _mm512_set1_epi32(int(kRansScale - 1));
    const __m512i lowest = _mm512_set1_epi32(int(kRansLow));
    const __m512i iota = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    __m512i x[kVectors];
    for (int v = 0; v < kVectors; v++) x[v] = _mm512_load_si512(coder.states + 16 * v);
    const uint8_t* next = coder.next;
    const size_t groups = tile.elements / kRansStates;
    size_t group = 0, known = found;
    for (; group < groups && next <= coder.end && known <= most; group++) {
        __m512i frequency[kVectors];
        opens.of(tile.classes + group * kRansStates, frequency);
        __mmask16 open[kVectors];
        for (int v = 0; v < kVectors; v++) {
            const __m512i slot = _mm512_and_si512(x[v], slots);
            open[v] = _mm512_cmplt_epu32_mask(slot, frequency[v]);
            const __m512i length =
                _mm512_mask_mov_epi32(_mm512_sub_epi32(scale, frequency[v]), open[v], frequency[v]);
            const __m512i rest =
                _mm512_mask_sub_epi32(slot, __mmask16(~open[v]), slot, frequency[v]);
            x[v] = _mm512_add_epi32(_mm512_mullo_epi32(length, _mm512_srli_epi32(x[v], kRansBits)),
                                    rest);
            const __mmask16 empty = _mm512_cmplt_epu32_mask(x[v], lowest);
            if (!empty) continue;
            const __m512i words = take_words(next, empty);
            x[v] = _mm512_mask_or_epi32(x[v], empty, _mm512_slli_epi32(x[v], 16), words);
        }
        for (int v = 0; v < kVectors; v++) {
            const __m512i place = _mm512_add_epi32(
                iota, _mm512_set1_epi32(int(tile.from + group * kRansStates) + 16 * v));
            _mm512_storeu_si512(positions + known, _mm512_maskz_compress_epi32(open[v], place));
            known += size_t(__builtin_popcount(open[v]));
        }
    }
    for (int v = 0; v < kVectors; v++) _mm512_store_si512(coder.states + 16 * v, x[v]);
    if (next > coder.end) throw Malformed("the code ends too early");
    coder.next = next;
    found = known;
    return group;
}

}  // namespace pulse
#endif
