#include "loco/gate.h"

#include <algorithm>

#include "common/clones.h"
#include "common/flags.h"

namespace pulse {
namespace {

constexpr size_t kChunk = 256;

PULSE_CLONES void as_bf16(const float* from, size_t count, float* to) {
    const Bf16Rounder round;
    for (size_t i = 0; i < count; i++) to[i] = float_of(round(bits_of(from[i])) << 16);
}

// Sets open[i] for a chunk; false if a pseudo-gradient is not finite.
template <class R>
PULSE_CLONES bool gate_chunk(const float* theta, const float* start, const float* now,
                             const float* residual, float* s, size_t count, const R& round,
                             uint8_t* open, uint32_t& any) {
    uint32_t highest = 0, changed = 0;
    for (size_t i = 0; i < count; i++) {
        const float x = (start[i] - now[i]) + residual[i];
        s[i] = x;
        const uint32_t exponent = bits_of(x) & 0x7f800000u;
        highest = exponent > highest ? exponent : highest;
        const uint32_t differs = round(bits_of(theta[i])) != round(bits_of(theta[i] - x));
        open[i] = uint8_t(differs);
        changed |= differs;
    }
    any = changed;
    return highest < kHuge;
}

}  // namespace

PULSE_CLONES void look_ahead(const float* theta, const float* residual, float lookahead,
                             size_t count, float* start) {
    for (size_t i = 0; i < count; i++) start[i] = theta[i] - lookahead * residual[i];
}

bool gate(const Local& local, float* s, size_t count, const Rounding& rounding, uint32_t base,
          std::vector<uint32_t>& open) {
    const Rounder round(rounding);
    uint8_t differs[kChunk];
    float ahead[kChunk];
    for (size_t at = 0; at < count; at += kChunk) {
        const size_t n = std::min(kChunk, count - at);
        const float *theta = local.theta + at, *now = local.now + at,
                    *residual = local.residual + at, *start = theta;
        if (local.lookahead != 0) {
            look_ahead(theta, residual, local.lookahead, n, ahead);
            start = ahead;
        }
        if (local.bf16_start) {
            as_bf16(start, n, ahead);
            start = ahead;
        }
        uint32_t any = 0;
        const bool finite =
            rounding.is_bf16()
                ? gate_chunk(theta, start, now, residual, s + at, n, Bf16Rounder{}, differs, any)
                : gate_chunk(theta, start, now, residual, s + at, n, round, differs, any);
        if (!finite) return false;
        if (!any) continue;
        each_set(differs, n, [&](size_t i) { open.push_back(base + uint32_t(at + i)); });
    }
    return true;
}

}  // namespace pulse
