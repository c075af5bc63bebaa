#include "scan.h"

#include "clones.h"

namespace pulse {
namespace {

PULSE_CLONES void differing_chunks(const uint8_t* a, const uint8_t* b, size_t bytes, int width, uint32_t base,
                                   std::vector<uint32_t>& out) {
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
                out.push_back(base + uint32_t((i + 8 * size_t(j)) / size_t(width)) + uint32_t(lane));
                word &= ~(element << (lane * bits));
            }
        }
    }
    for (; i < bytes; i += size_t(width)) {
        if (std::memcmp(a + i, b + i, size_t(width)) != 0) out.push_back(base + uint32_t(i / size_t(width)));
    }
}

}  // namespace

void differing(const uint8_t* a, const uint8_t* b, size_t bytes, int width, uint32_t base, std::vector<uint32_t>& out) {
    differing_chunks(a, b, bytes, width, base, out);
}

}  // namespace pulse
