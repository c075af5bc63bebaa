#include "loco/entry_classes.h"

#include <algorithm>
#include <array>

#include "common/clones.h"

namespace pulse {
namespace {

PULSE_CLONES void bf16_classes(const float* theta, const float* momentum, size_t count,
                               Octaves octaves, uint8_t* classes) {
    const int32_t distance_base = octaves.distance, momentum_base = octaves.momentum;
    for (size_t i = 0; i < count; i++) {
        const uint32_t t = bits_of(theta[i]), m = bits_of(momentum[i]);
        const int32_t up = int32_t((0x8000 - t) & 0xffff), down = 0x10000 - up;
        const int32_t nearest = up < down ? (up > 1 ? up : 1) : down;
        int32_t d =
            int32_t(bits_of(float(nearest)) >> 23) - 127 + int32_t((t >> 23) & 255) - distance_base;
        d = d < 0 ? 0 : d > 15 ? 15 : d;
        int32_t k = int32_t((m >> 23) & 255) - momentum_base;
        k = k < 1 ? 1 : k > 7 ? 7 : k;
        k = (m & 0x7f800000u) ? k : 0;
        const uint32_t up_is_near = up <= down, moves_up = (t ^ m) >> 31;
        classes[i] = uint8_t(d << 4 | k << 1 | int32_t(up_is_near == moves_up));
    }
}

}  // namespace

void classify(const float* theta, const float* momentum, size_t count, const Rounding& rounding,
              Octaves octaves, uint8_t* classes) {
    if (rounding.is_bf16()) return bf16_classes(theta, momentum, count, octaves, classes);
    for (size_t i = 0; i < count; i++) {
        const uint32_t t = bits_of(theta[i]);
        classes[i] = class_of(t, bits_of(momentum[i]), distance_of(t, rounding), octaves);
    }
}

uint8_t momentum_octave(const float* momentum, size_t count) {
    std::array<std::array<uint32_t, 256>, 4> seen_by{};  // neighbors often are of one octave
    std::array<uint32_t, 256> seen{};
    uint64_t total = 0;
    constexpr size_t kGroup = 256;
    const size_t stride = kGroup * (count > (1 << 18) ? 64 : 1);
    for (size_t at = 0; at < count; at += stride) {
        for (size_t i = at; i < std::min(at + kGroup, count); i++)
            seen_by[i & 3][(bits_of(momentum[i]) >> 23) & 255]++;
    }
    for (size_t e = 0; e < 256; e++)
        seen[e] = seen_by[0][e] + seen_by[1][e] + seen_by[2][e] + seen_by[3][e];
    for (int e = 1; e < 256; e++) total += seen[e];
    uint64_t above = 0;
    for (int e = 255; e >= 1; e--) {
        above += seen[e];
        if (above * 128 > total) return uint8_t(e);
    }
    return 0;
}

}  // namespace pulse
