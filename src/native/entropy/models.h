// Adaptive models that the codecs of blocks share: the levels of classes, and the size of a step (docs/format.md, 3.6.2).
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>

#include "entropy/payload.h"
#include "entropy/weights.h"

namespace pulse {

constexpr int kMostLength = 32;
constexpr int kRareLevel = 12;  // from this level on a change is expected to be by one step
constexpr int kMostFurther = 44;

// A number near the one that is expected.
struct NearModels {
    AdaptiveBit as_expected, lower;
    std::array<AdaptiveBit, 8> further;
};

// What is read, at most kMostFurther + 1 from `expected`.
template <class Side>
int code_near(Side& side, NearModels& models, int value, int expected) {
    const int away = value - expected;
    if (side.bit(models.as_expected, away == 0)) return expected;
    const bool lower = side.bit(models.lower, away < 0);
    const int distance = std::abs(away) - 1;
    int k = 0;
    while (k < kMostFurther && !side.bit(models.further[std::min(k, 7)], distance == k)) k++;
    return expected + (lower ? -(k + 1) : k + 1);
}

struct LevelModels {
    AdaptiveBit absent;
    NearModels near;
};

// The levels of classes first .. first + count - 1. A float's rounding step doubles from one exponent to the next, which
// halves the chance to change: two levels further.
template <class Side>
void code_levels(Side& side, LevelModels& models, std::array<uint8_t, kClasses>& levels, int first,
                 int count) {
    int expected = 30;
    for (int c = first; c < first + count; c++) {
        side.next_symbol();
        if (side.bit(models.absent, levels[c] == kAbsent)) {
            levels[c] = kAbsent;
            continue;
        }
        levels[c] =
            uint8_t(std::clamp(code_near(side, models.near, levels[c], expected), 0, kMostLevel));
        expected = std::min(levels[c] + 2, kMostLevel);
    }
}

struct SizeModels {
    std::array<AdaptiveBit, kClasses> single;
    std::array<AdaptiveBit, kClasses + kMostLength> longer, second;

    void expect(const std::array<uint8_t, kClasses>& levels) {
        for (int c = 0; c < kClasses; c++) {
            if (levels[c] >= kRareLevel) {
                single[c].p = 64512;
                single[c].seen = 6;
            }
        }
    }
};

// The size of a step, at least 1: its bit length in unary, one modeled bit below the top one, the rest plain.
template <class Side>
PULSE_INLINE uint32_t code_size(Side& side, SizeModels& models, int cls, uint32_t size) {
    const int length = 31 - __builtin_clz(size | 1);
    if (side.bit(models.single[cls], length == 0)) return 1;
    int n = 1;
    while (n < kMostLength - 1 && !side.bit(models.longer[cls + n], length == n)) n++;
    const uint32_t top = 2 | uint32_t(side.bit(models.second[cls + n], (size >> (n - 1)) & 1));
    return top << (n - 1) | code_plain(side, size, n - 1);
}

// A size above 1 but for its plain bits, those below the two top ones: these are 0 in what is returned. The models belong to
// a class and a length: has it more bits; is the one below the top one set?
template <class Side, class Models>
uint32_t code_long(Side& side, Models& further, Models& second, size_t cls, uint32_t size) {
    const int length = 31 - __builtin_clz(size | 1);
    int n = 1;
    while (n < kMostLength - 1 && side.bit(further[cls + size_t(n)], length > n)) n++;
    const bool set = side.bit(second[cls + size_t(n)], (size >> (n - 1)) & 1);
    return (2 | uint32_t(set)) << (n - 1);
}
inline int plain_bits_of_long(uint32_t size) { return 30 - __builtin_clz(size); }

}  // namespace pulse
