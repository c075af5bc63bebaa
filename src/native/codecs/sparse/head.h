// What stands in front of the code of a block of the `sparse` codec (docs/format.md, section 3.7.1).
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "codecs/sparse/weights.h"
#include "common/types.h"
#include "entropy/levels.h"
#include "entropy/models.h"
#include "entropy/payload.h"

namespace pulse {

constexpr int kMostShift = 12;  // of a run, in quarters of octaves
constexpr int kMajorities =
    12;  // 0, 1, … 11 or more steps of a row more in one direction than in the other

struct SparseHead {
    int first = 0, count = 0;                // the classes that are listed
    std::array<uint8_t, kClasses> rarities;  // of changes, by class
    std::array<uint8_t, kClasses> longer;    // levels, by class: is a size above 1?
    int lengths = 0;  // how many follow, from first + 1 on, by class + n of sizes of n + 1 bits
    std::array<uint8_t, kClasses + kMostLength> further,
        second;  // levels: has it more bits; is the one below the top one set?
    std::array<uint8_t, kMajorities> against;  // levels, by majority: is a sign against it?
    std::vector<int8_t> shifts;                // of the runs that have a batch's first element

    SparseHead() {
        rarities.fill(kNever);
        longer.fill(kNoChance);
        further.fill(kNoChance);
        second.fill(kEven);
        against.fill(kEven);
    }
    // Makes numbers that differ much from their neighbors' what they can be: what was put counts.
    void put(std::vector<uint8_t>& out);
    static SparseHead take(const uint8_t* data, size_t size, size_t& at, const ElementKind& kind,
                           size_t runs);
};

}  // namespace pulse
