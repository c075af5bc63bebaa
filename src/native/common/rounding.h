// Rounding of FP32 to a narrower compute dtype, to nearest, ties to even (docs/loco.md, section 2).
#pragma once

#include <algorithm>
#include <cstddef>
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
inline double double_of(uint64_t bits) {
    double x;
    std::memcpy(&x, &bits, 8);
    return x;
}

constexpr uint32_t kSign = 0x80000000u, kMagnitude = 0x7fffffffu, kInfinity = 0x7f800000u;

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
};

// FP32 bits to the bf16 dtype's own, with the sign in the top bit of 32. Integers only: neither the rounding mode of the
// processor nor its treatment of denormal numbers matters. A NaN becomes what lies beyond the range.
class Rounder {
public:
    explicit Rounder(const Rounding& rounding)
        : rounding_(rounding),
          most_(unbounded(rounding.most)),
          beyond_(most_ + (rounding.beyond > rounding.most)) {}

    uint32_t operator()(uint32_t bits) const {
        return magnitude(bits & kMagnitude) | (bits & kSign);
    }

    uint32_t magnitude(uint32_t bits) const {
        const uint32_t rounded = unbounded(bits);
        return rounded > most_ ? beyond_ : rounded;
    }

    uint32_t beyond() const { return beyond_; }

private:
    // As if the exponents never ended. A significand that is rounded up to the next power of two carries into the exponent.
    uint32_t unbounded(uint32_t magnitude) const {
        const uint32_t exponent = magnitude >> 23, t = rounding_.dropped(exponent),
                       least = rounding_.least;
        const uint32_t significand = (magnitude & 0x7fffff) | (exponent ? 1u << 23 : 0);
        const uint32_t kept = (significand + (1u << (t - 1)) - 1 + ((significand >> t) & 1)) >> t;
        return kept + ((exponent > least ? exponent - least : 0) << rounding_.mantissa);
    }

    Rounding rounding_;
    uint32_t most_, beyond_;
};

// The same for BF16, which has FP32's exponents: the upper half of the bits.
struct Bf16Rounder {
    uint32_t operator()(uint32_t bits) const { return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16; }
    uint32_t magnitude(uint32_t bits) const { return (*this)(bits); }
};

// Where a number lies between the two at which its rounding changes, in units of its last place.
struct Distance {
    uint32_t up, down;  // to the boundary of larger and of smaller magnitude; up + down = 2^dropped
    bool up_is_near() const { return up <= down; }
    uint32_t nearest() const { return std::max(std::min(up, down), 1u); }
};

inline Distance distance_of(uint32_t bits, const Rounding& rounding) {
    const uint32_t magnitude = bits & kMagnitude, exponent = magnitude >> 23,
                   t = rounding.dropped(exponent);
    const uint32_t significand = (magnitude & 0x7fffff) | (exponent ? 1u << 23 : 0);
    const uint32_t mask = (1u << t) - 1, up = ((1u << (t - 1)) - significand) & mask;
    return {up, (1u << t) - up};
}

// The same of BF16.
inline Distance bf16_distance(uint32_t bits) {
    const uint32_t up = (0x8000 - bits) & 0xffff;
    return {up, 0x10000 - up};
}

// Casts `count` FP32 numbers, given by their bits, to `width` bytes, 1 or 2. A NaN keeps its sign and becomes `nan` with the
// top bits of its own mantissa set as well.
void round_values(const uint32_t* bits, size_t count, const Rounding& rounding, uint32_t nan,
                  int width, void* out);

}  // namespace pulse
