#include "common/scan.h"

#include "common/clones.h"
#include "common/types.h"
#include "common/vectors.h"

#if defined(__x86_64__)
#include "common/avx512.h"
#endif

namespace pulse {
namespace {

PULSE_CLONES void differing_chunks(const uint8_t* a, const uint8_t* b, size_t bytes, int width,
                                   uint32_t base, std::vector<uint32_t>& out) {
    constexpr size_t kChunk = 128;
    const int bits = 8 * width;
    const uint64_t element = width == 8 ? ~uint64_t(0) : (uint64_t(1) << bits) - 1;
    size_t i = 0;
    for (; i + kChunk <= bytes; i += kChunk) {
        uint64_t x[kChunk / 8], y[kChunk / 8], any = 0;
        std::memcpy(x, a + i, kChunk);
        std::memcpy(y, b + i, kChunk);
        for (size_t j = 0; j < kChunk / 8; j++) {
            x[j] ^= y[j];
            any |= x[j];
        }
        if (!any) continue;
        uint32_t words = 0;
        for (size_t j = 0; j < kChunk / 8; j++) words |= uint32_t(x[j] != 0) << j;
        for (; words; words &= words - 1) {
            const int j = __builtin_ctz(words);
            for (uint64_t word = x[j]; word;) {
                const int lane = __builtin_ctzll(word) / bits;
                out.push_back(base + uint32_t((i + 8 * size_t(j)) / size_t(width)) +
                              uint32_t(lane));
                word &= ~(element << (lane * bits));
            }
        }
    }
    for (; i < bytes; i += size_t(width)) {
        if (std::memcmp(a + i, b + i, size_t(width)) != 0)
            out.push_back(base + uint32_t(i / size_t(width)));
    }
}

#if defined(__x86_64__)
#define PULSE_BW __attribute__((target("avx512f,avx512bw,bmi,popcnt")))

template <int kWidth>
PULSE_BW inline uint64_t lanes_that_differ(const uint8_t* a, const uint8_t* b) {
    const __m512i x = _mm512_loadu_si512(a), y = _mm512_loadu_si512(b);
    if constexpr (kWidth == 1) return _mm512_cmpneq_epi8_mask(x, y);
    if constexpr (kWidth == 2) return _mm512_cmpneq_epi16_mask(x, y);
    if constexpr (kWidth == 4) return _mm512_cmpneq_epi32_mask(x, y);
    return _mm512_cmpneq_epi64_mask(x, y);
}

// 64 elements at a time, whole ones only; returns how many. Up to two positions are written without a branch, since it is
// hard to foresee where changes are.
template <int kWidth>
PULSE_BW size_t differing_vectors(const uint8_t* a, const uint8_t* b, size_t elements,
                                  uint32_t base, std::vector<uint32_t>& out) {
    constexpr size_t kStep = 64, kMost = 4096;
    constexpr int kLanes = 64 / kWidth;
    uint32_t found[kMost + kStep];
    size_t count = 0, at = 0;
    for (; at + kStep <= elements; at += kStep) {
        uint64_t mask = 0;
        for (int k = 0; k < kWidth; k++) {
            const size_t place = at * kWidth + 64 * size_t(k);
            mask |= lanes_that_differ<kWidth>(a + place, b + place) << (kLanes * k % 64);
        }
        const uint32_t start = base + uint32_t(at);
        const int n = __builtin_popcountll(mask);
        if (n <= 2) {
            found[count] = start + uint32_t(_tzcnt_u64(mask));
            found[count + 1] = start + uint32_t(_tzcnt_u64(_blsr_u64(mask)));
        } else {
            uint32_t* next = found + count;
            for (; mask; mask = _blsr_u64(mask)) *next++ = start + uint32_t(_tzcnt_u64(mask));
        }
        count += size_t(n);
        if (count >= kMost) {
            out.insert(out.end(), found, found + count);
            count = 0;
        }
    }
    out.insert(out.end(), found, found + count);
    return at;
}
#endif

}  // namespace

void differing(const uint8_t* a, const uint8_t* b, size_t bytes, int width, uint32_t base,
               std::vector<uint32_t>& out) {
    size_t done = 0;
#if defined(__x86_64__)
    if (scan_vectors) {
        done = for_any_width(width, [&](auto zero) {
            return differing_vectors<sizeof(zero)>(a, b, bytes / sizeof(zero), base, out);
        });
    }
#endif
    const size_t rest = done * size_t(width);
    differing_chunks(a + rest, b + rest, bytes - rest, width, base + uint32_t(done), out);
}

}  // namespace pulse
