#include "entropy/rans_bits.h"

#include <cstring>

#include "common/vectors.h"

namespace pulse {

void put_bits(RansWriter& coder, const uint16_t* frequencies, const uint64_t* bits,
              size_t batches) {
    if (vectors) return vector_put_bits(coder, frequencies, bits, batches);
    for (size_t b = batches; b-- > 0;) {
        for (size_t i = kRansStates; i-- > 0;)
            coder.bit(coder.states[i], frequencies[b * kRansStates + i], bits[b] >> i & 1);
    }
}

uint64_t take_bits(RansReader& coder, const uint16_t* frequencies) {
    if (vectors) return vector_take_bits(coder, frequencies);
    uint64_t bits = 0;
    for (size_t i = 0; i < kRansStates; i++)
        bits |= uint64_t(coder.bit(coder.states[i], frequencies[i])) << i;
    return bits;
}

size_t put_ones(uint64_t bits, uint32_t first, uint32_t* out) {
    const size_t count = size_t(__builtin_popcountll(bits));
    if (vectors) {
        vector_put_ones(bits, first, out);
        return count;
    }
    for (; bits; bits &= bits - 1) *out++ = first + uint32_t(__builtin_ctzll(bits));
    return count;
}

void turn_bits(const uint64_t* bits, uint8_t* bytes) {
    if (vectors) return vector_turn_bits(bits, bytes);
    std::memset(bytes, 0, kRansStates);
    for (size_t k = 0; k < 8; k++) {
        for (uint64_t left = bits[k]; left; left &= left - 1)
            bytes[__builtin_ctzll(left)] |= uint8_t(1 << k);
    }
}

}  // namespace pulse
