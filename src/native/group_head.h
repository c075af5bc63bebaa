// What stands in front of the code of a block of the `groups` codec (docs/format.md, section 3.11.1).
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "block_models.h"
#include "context.h"
#include "group_weights.h"
#include "payload.h"
#include "positions.h"

namespace pulse {

constexpr int kMostShift = 12;  // of a run, in quarters of octaves
constexpr int kNoChance = 49;   // levels of chances: half octaves of odds, 24 being even ones

// 2^12 / (1 + 2^((i - 24) / 2)), at most 2^12 - 1; 0 for what never happens.
inline constexpr std::array<uint16_t, kNoChance + 1> kChances = {
    4095, 4095, 4094, 4093, 4092, 4090, 4088, 4085, 4080, 4073, 4064, 4051, 4033, 4007, 3972, 3923, 3855,
    3763, 3641, 3481, 3277, 3026, 2731, 2399, 2048, 1697, 1365, 1070, 819,  615,  455,  333,  241,  173,
    124,  89,   63,   45,   32,   23,   16,   11,   8,    6,    4,    3,    2,    1,    1,    0};

constexpr int kEven = 24;
constexpr int kMajorities = 4;  // 0, 1, 2, 3 or more steps of a row more in one direction than in the other

struct GroupHead {
    int first = 0, count = 0;                // the classes that are listed
    std::array<uint8_t, kClasses> rarities;  // of changes, by class
    std::array<uint8_t, kClasses> longer;    // levels, by class: is a size above 1?
    int lengths = 0;                         // how many follow, from first + 1 on, by class + n of sizes of n + 1 bits
    std::array<uint8_t, kClasses + kMostLength> further,
        second;                                // levels: has it more bits; is the one below the top one set?
    std::array<uint8_t, kMajorities> against;  // levels, by majority: is a sign against it?
    std::vector<int8_t> shifts;                // of the runs that have a batch's first element

    GroupHead() {
        rarities.fill(kNever);
        longer.fill(kNoChance);
        further.fill(kNoChance);
        second.fill(kEven);
        against.fill(kEven);
    }
    // Makes numbers that differ much from their neighbours' what they can be: what was put counts.
    void put(std::vector<uint8_t>& out);
    static GroupHead take(const uint8_t* data, size_t size, size_t& at, const ElementKind& kind, size_t runs);
};

inline uint16_t chance(uint8_t level) { return kChances[level]; }

// The level whose chance is next to that of `often` of `all`.
int level_of(double often, double all);

}  // namespace pulse
