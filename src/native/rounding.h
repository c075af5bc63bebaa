// Rounding of FP32 to a narrower compute dtype, to nearest, ties to even (docs/loco.md, section 2).
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace pulse {

inline uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}
inline float float_of(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

constexpr uint32_t kSign = 0x80000000u, kMagnitude = 0x7fffffffu;

// `mantissa`: explicit mantissa bits. `least`: FP32 exponent field of the smallest normal number. `most`: FP32 bits of the
// largest finite number. `beyond`: what a larger one becomes; infinity, or `most` for dtypes that saturate.
struct Rounding {
    uint32_t mantissa, least, most, beyond;

    bool is_bf16() const { return mantissa == 7 && least == 1; }

    // How many low bits of a significand of 24 bits are rounded away: 1 to 25. With 25, all of it is.
    uint32_t dropped(uint32_t exponent) const {
        exponent = std::max(exponent, 1u);
        const uint32_t below = least > exponent ? least - exponent : 0;
        return std::min(23 - mantissa + below, 25u);
    }

    // The FP32 bits of the rounded value.
    uint32_t round(uint32_t bits) const {
        const uint32_t magnitude = bits & kMagnitude, exponent = magnitude >> 23, t = dropped(exponent);
        uint32_t rounded;
        if (t < 23) {
            rounded = (magnitude + (1u << (t - 1)) - 1 + ((magnitude >> t) & 1)) >> t << t;
        } else if (t == 23) {  // a multiple of the implicit bit, which is odd
            rounded = (magnitude + (1u << 22)) >> 23 << 23;
        } else {  // half of the smallest number is a tie, and goes to zero
            rounded = t == 24 && (magnitude & 0x7fffff) ? (exponent + 1) << 23 : 0;
        }
        return (rounded > most ? beyond : rounded) | (bits & kSign);
    }
};

// Where a number lies between the two at which its rounding changes, in units of its last place.
struct Distance {
    uint32_t up, down;  // to the boundary of larger and of smaller magnitude; up + down = 2^dropped
    bool up_is_near() const { return up <= down; }
    uint32_t nearest() const { return std::max(std::min(up, down), 1u); }
};

inline Distance distance_of(uint32_t bits, const Rounding& rounding) {
    const uint32_t magnitude = bits & kMagnitude, exponent = magnitude >> 23, t = rounding.dropped(exponent);
    const uint32_t significand = (magnitude & 0x7fffff) | (exponent ? 1u << 23 : 0);
    const uint32_t mask = (1u << t) - 1, up = ((1u << (t - 1)) - significand) & mask;
    return {up, (1u << t) - up};
}

}  // namespace pulse
