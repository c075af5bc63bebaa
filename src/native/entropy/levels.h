// Chances as levels that take few bits to say: half octaves of odds (docs/format.md, section 3.7).
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>

#include "entropy/models.h"
#include "entropy/rans_states.h"

namespace pulse {

constexpr int kNoChance = 49;  // levels of chances: half octaves of odds, 24 being even ones

// 2^12 / (1 + 2^((i - 24) / 2)), at most 2^12 - 1; 0 for what never happens.
inline constexpr std::array<uint16_t, kNoChance + 1> kChances = {
    4095, 4095, 4094, 4093, 4092, 4090, 4088, 4085, 4080, 4073, 4064, 4051, 4033,
    4007, 3972, 3923, 3855, 3763, 3641, 3481, 3277, 3026, 2731, 2399, 2048, 1697,
    1365, 1070, 819,  615,  455,  333,  241,  173,  124,  89,   63,   45,   32,
    23,   16,   11,   8,    6,    4,    3,    2,    1,    1,    0};

constexpr int kEven = 24;

inline uint16_t chance(uint8_t level) { return kChances[level]; }

// The level whose chance is next to that of `often` of `all`.
inline int level_of(double often, double all) {
    if (often == 0) return kNoChance;
    return std::clamp(int(std::lround(kEven - 2 * std::log2(often / std::max(all - often, 0.25)))),
                      0, kNoChance - 1);
}

// The level for what is so often 1, of all: the expected one, unless another one saves more bits than it takes to say so.
inline int level_near(double often, double all, int expected, int price) {
    const auto bits = [&](int level) {
        const double p = double(chance(uint8_t(level))) / double(kRansScale);
        return -(often > 0 ? often * std::log2(p) : 0) - (all - often) * std::log2(1 - p);
    };
    const int own = level_of(often, all);
    return bits(expected) - bits(own) > price + std::abs(own - expected) ? own : expected;
}

// What is too far from `expected` comes as near as it must.
template <class Side>
int code_within(Side& side, NearModels& models, int value, int expected, int least, int most) {
    constexpr int kFurthest = kMostFurther + 1;
    side.next_symbol();
    const int near = std::clamp(value, expected - kFurthest, expected + kFurthest);
    return std::clamp(code_near(side, models, near, expected), least, most);
}

}  // namespace pulse
