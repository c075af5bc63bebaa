#include "common/rounding.h"

#include "common/clones.h"

namespace pulse {
namespace {

// Inlined into the clones below.
template <class U, class R>
inline __attribute__((always_inline)) void round_all(const uint32_t* __restrict bits, size_t count,
                                                     const R& round, uint32_t mantissa,
                                                     uint32_t nan, U* __restrict out) {
    constexpr int kNarrower = 32 - 8 * int(sizeof(U));
    for (size_t i = 0; i < count; i++) {
        const uint32_t x = bits[i], magnitude = x & kMagnitude;
        const uint32_t quiet = nan | (x & 0x7fffff) >> (23 - mantissa),
                       rounded = round.magnitude(magnitude);
        out[i] = U((magnitude > kInfinity ? quiet : rounded) | (x & kSign) >> kNarrower);
    }
}

PULSE_CLONES void to_bf16(const uint32_t* bits, size_t count, uint32_t nan, uint16_t* out) {
    round_all(bits, count, Bf16Rounder{}, 7, nan, out);
}

template <class U>
PULSE_CLONES void to_narrow(const uint32_t* bits, size_t count, const Rounding& rounding,
                            uint32_t nan, U* out) {
    round_all(bits, count, Rounder(rounding), rounding.mantissa, nan, out);
}

}  // namespace

void round_values(const uint32_t* bits, size_t count, const Rounding& rounding, uint32_t nan,
                  uint8_t* out) {
    to_narrow(bits, count, rounding, nan, out);
}

void round_values(const uint32_t* bits, size_t count, const Rounding& rounding, uint32_t nan,
                  uint16_t* out) {
    if (rounding.is_bf16()) return to_bf16(bits, count, nan, out);
    to_narrow(bits, count, rounding, nan, out);
}

}  // namespace pulse
