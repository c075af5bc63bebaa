#include "entropy/rans_bits.h"

#include <cstring>

namespace pulse {

void put_bits(RansWriter& coder, const uint16_t* frequencies, const uint64_t* bits,
              size_t batches) {
    if (vector_put_bits(coder, frequencies, bits, batches)) return;
    for (size_t b = batches; b-- > 0;) {
        for (size_t i = kRansStates; i-- > 0;) {
            const uint32_t f = frequencies[b * kRansStates + i];
            const bool one = bits[b] >> i & 1;
            coder.symbol(coder.states[i], one ? 0 : f, one ? f : kRansScale - f);
        }
    }
}

uint64_t take_bits(RansReader& coder, const uint16_t* frequencies) {
    uint64_t bits = 0;
    if (vector_take_bits(coder, frequencies, bits)) return bits;
    for (size_t i = 0; i < kRansStates; i++) {
        const uint32_t f = frequencies[i];
        const bool one = RansReader::slot(coder.states[i]) < f;
        coder.symbol(coder.states[i], one ? 0 : f, one ? f : kRansScale - f);
        bits |= uint64_t(one) << i;
    }
    return bits;
}

size_t put_ones(uint64_t bits, uint32_t first, uint32_t* out) {
    const size_t count = size_t(__builtin_popcountll(bits));
    if (vector_put_ones(bits, first, out)) return count;
    for (; bits; bits &= bits - 1) *out++ = first + uint32_t(__builtin_ctzll(bits));
    return count;
}

void turn_bits(const uint64_t* bits, uint8_t* bytes) {
    if (vector_turn_bits(bits, bytes)) return;
    std::memset(bytes, 0, kRansStates);
    for (size_t k = 0; k < 8; k++) {
        for (uint64_t left = bits[k]; left; left &= left - 1)
            bytes[__builtin_ctzll(left)] |= uint8_t(1 << k);
    }
}

}  // namespace pulse
