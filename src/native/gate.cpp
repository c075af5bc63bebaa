#include "gate.h"

#include <array>
#include <cmath>

#include "clones.h"

namespace pulse {
namespace {

constexpr size_t kChunk = 256;

struct Bf16Rounding {
    uint32_t round(uint32_t bits) const { return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16; }
};

// Sets open[i] for a chunk; false if a pseudo-gradient is not finite. Inlined into the clones below.
template <class R>
inline __attribute__((always_inline)) bool gate_chunk(const float* theta, const float* start, const float* now,
                                                      const float* residual, float* s, size_t count, const R& rounding,
                                                      uint8_t* open, uint32_t& any) {
    uint32_t highest = 0, changed = 0;
    for (size_t i = 0; i < count; i++) {
        const float x = (start[i] - now[i]) + residual[i];
        s[i] = x;
        const uint32_t exponent = bits_of(x) & 0x7f800000u;
        highest = exponent > highest ? exponent : highest;
        const uint32_t differs = rounding.round(bits_of(theta[i])) != rounding.round(bits_of(theta[i] - x));
        open[i] = uint8_t(differs);
        changed |= differs;
    }
    any = changed;
    return highest < kHuge;
}

PULSE_CLONES bool bf16_chunk(const float* theta, const float* start, const float* now, const float* residual, float* s,
                             size_t count, uint8_t* open, uint32_t& any) {
    return gate_chunk(theta, start, now, residual, s, count, Bf16Rounding{}, open, any);
}

PULSE_CLONES void bf16_classes(const float* theta, const float* momentum, size_t count, Octaves octaves,
                               uint8_t* classes) {
    const int32_t distance_base = octaves.distance, momentum_base = octaves.momentum;
    for (size_t i = 0; i < count; i++) {
        const uint32_t t = bits_of(theta[i]), m = bits_of(momentum[i]);
        const int32_t up = int32_t((0x8000 - t) & 0xffff), down = 0x10000 - up;
        const int32_t nearest = up < down ? (up > 1 ? up : 1) : down;
        int32_t d = int32_t(bits_of(float(nearest)) >> 23) - 127 + int32_t((t >> 23) & 255) - distance_base;
        d = d < 0 ? 0 : d > 15 ? 15 : d;
        int32_t k = int32_t((m >> 23) & 255) - momentum_base;
        k = k < 1 ? 1 : k > 7 ? 7 : k;
        k = (m & 0x7f800000u) ? k : 0;
        const uint32_t up_is_near = up <= down, moves_up = (t ^ m) >> 31;
        classes[i] = uint8_t(d << 4 | k << 1 | int32_t(up_is_near == moves_up));
    }
}

PULSE_CLONES void nesterov(float* theta, float* momentum, const float* sum, size_t count, float trainers, float lr,
                           float mu) {
    for (size_t i = 0; i < count; i++) {
        const float g = sum[i] / trainers;
        const float m = mu * momentum[i];
        const float next = m + g;
        momentum[i] = next;
        theta[i] = __builtin_fmaf(-lr, __builtin_fmaf(mu, next, g), theta[i]);
    }
}

}  // namespace

bool gate(const float* theta, const float* start, const float* now, const float* residual, float* s, size_t count,
          const Rounding& rounding, uint32_t base, std::vector<uint32_t>& open) {
    uint8_t differs[kChunk];
    for (size_t at = 0; at < count; at += kChunk) {
        const size_t n = std::min(kChunk, count - at);
        uint32_t any = 0;
        const bool finite =
            rounding.is_bf16()
                ? bf16_chunk(theta + at, start + at, now + at, residual + at, s + at, n, differs, any)
                : gate_chunk(theta + at, start + at, now + at, residual + at, s + at, n, rounding, differs, any);
        if (!finite) return false;
        if (!any) continue;
        for (size_t i = 0; i < n; i++) {
            if (differs[i]) open.push_back(base + uint32_t(at + i));
        }
    }
    return true;
}

void classify(const float* theta, const float* momentum, size_t count, const Rounding& rounding, Octaves octaves,
              uint8_t* classes) {
    if (rounding.is_bf16()) return bf16_classes(theta, momentum, count, octaves, classes);
    for (size_t i = 0; i < count; i++) {
        const uint32_t t = bits_of(theta[i]), m = bits_of(momentum[i]);
        const Distance distance = distance_of(t, rounding);
        const int d = std::clamp(int(distance_octave(t, distance)) - int(octaves.distance), 0, 15);
        const int k = m & 0x7f800000u ? std::clamp(int((m >> 23) & 255) - int(octaves.momentum), 1, 7) : 0;
        classes[i] = uint8_t(d << 4 | k << 1 | int(distance.up_is_near() == bool((t ^ m) >> 31)));
    }
}

uint8_t momentum_octave(const float* momentum, size_t count) {
    std::array<uint32_t, 256> seen{};
    uint64_t total = 0;
    for (size_t i = 0; i < count; i++) seen[(bits_of(momentum[i]) >> 23) & 255]++;
    for (int e = 1; e < 256; e++) total += seen[e];
    uint64_t above = 0;
    for (int e = 255; e >= 1; e--) {
        above += seen[e];
        if (above * 128 > total) return uint8_t(e);
    }
    return 0;
}

void outer_step(float* theta, float* momentum, const float* sum, size_t count, float trainers, float lr, float mu) {
    nesterov(theta, momentum, sum, count, trainers, lr, mu);
}

}  // namespace pulse
