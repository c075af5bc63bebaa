#include "common/rounding.h"

#include "common/clones.h"

namespace pulse {
namespace {

template <class U, class R>
PULSE_CLONES void round_all(const uint32_t* __restrict bits, size_t count, R round,
                            uint32_t mantissa, uint32_t nan, U* __restrict out) {
    constexpr int kNarrower = 32 - 8 * int(sizeof(U));
    for (size_t i = 0; i < count; i++) {
        const uint32_t x = bits[i], magnitude = x & kMagnitude;
        const uint32_t quiet = nan | (x & 0x7fffff) >> (23 - mantissa),
                       rounded = round.magnitude(magnitude);
        out[i] = U((magnitude > kInfinity ? quiet : rounded) | (x & kSign) >> kNarrower);
    }
}

}  // namespace

void round_values(const uint32_t* bits, size_t count, const Rounding& rounding, uint32_t nan,
                  int width, void* out) {
    const uint32_t mantissa = rounding.mantissa;
    auto* const halves = static_cast<uint16_t*>(out);
    if (width == 2 && rounding.is_bf16())
        return round_all(bits, count, Bf16Rounder{}, mantissa, nan, halves);
    if (width == 2) return round_all(bits, count, Rounder(rounding), mantissa, nan, halves);
    round_all(bits, count, Rounder(rounding), mantissa, nan, static_cast<uint8_t*>(out));
}

}  // namespace pulse
