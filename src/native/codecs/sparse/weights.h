// The weights of elements and of groups of eight, and the frequencies that follow from them (docs/format.md, section 3.7.2).
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "common/element_mask.h"
#include "common/types.h"
#include "entropy/rans_states.h"
#include "entropy/weights.h"

namespace pulse {

constexpr size_t kGroup = 8;  // elements
constexpr int kHazards = 64;
constexpr uint32_t kCertain = kRansScale;

// 2^12 (1 - exp(-x)) of x = 2^((i + 1/2) / 4 - 13), at least 1 and at most 2^12 - 1.
inline constexpr std::array<uint16_t, kHazards> kHazardFrequencies = {
    1,    1,    1,    1,    1,    1,    2,    2,    2,    3,    3,    4,    4,    5,    6,    7,
    9,    10,   12,   15,   17,   21,   25,   29,   35,   41,   49,   58,   69,   82,   98,   116,
    137,  163,  193,  228,  270,  319,  376,  444,  522,  613,  718,  839,  977,  1134, 1310, 1506,
    1722, 1954, 2202, 2459, 2720, 2976, 3220, 3442, 3633, 3790, 3909, 3991, 4044, 4073, 4087, 4093};

// Quarters of octaves: of 0 as of 1.
inline int quarter_octaves(uint64_t x) {
    const int octave = 63 - __builtin_clzll(x | 1);
    return 4 * octave + int((x << 2 >> octave) & 3);
}

constexpr int kMostRarity =
    88;  // in quarters of octaves: a rarity of r stands for 2^(2 - r / 4) nats
constexpr uint8_t kNever = 255;  // the rarity of a class in which nothing changes

constexpr int kQuarters[4] = {16384, 13777, 11585, 9742};  // 2^14, 2^13.75, …
constexpr float kMostExcess = 2;  // more of a chance than this is never added

struct GroupWeights {
    std::array<uint16_t, kClasses> of{};
    int least;  // the least rarity: 2^14 stands for it
    // The same for vectors: of so many times 64 classes from `first` on, 1, 2 or 4. All others have no weight.
    int tables;
    uint8_t first = 0;
    alignas(64) uint16_t table[kClasses] = {};

    explicit GroupWeights(const std::array<uint8_t, kClasses>& rarities) : least(kMostRarity) {
        int last = 0;
        for (uint8_t rarity : rarities)
            least = rarity == kNever ? least : std::min(least, int(rarity));
        for (int c = kClasses - 1; c >= 0; c--) {
            if (rarities[size_t(c)] == kNever) continue;
            const int further = rarities[size_t(c)] - least;
            of[size_t(c)] = uint16_t(std::max(1, kQuarters[further % 4] >> (further / 4)));
            last = std::max(last, c);
            first = uint8_t(c);
        }
        const int span = last - first;
        tables = span < 64 ? 1 : span < 128 ? 2 : 4;
        for (int c = first; c <= last; c++) table[c - first] = of[size_t(c)];
    }

    // What a unit of the weight behind an element adds to the chance that the element is the first one to change.
    float excess() const { return std::ldexp(float(kQuarters[least % 4]), -27 - least / 4); }
    // What is added to the quarters of octaves of a weight, to look its frequency up.
    int base() const { return 4 - least; }
    // The frequency of what has a weight; `shift`: how much more than that, in quarters of octaves.
    uint16_t frequency(uint32_t weight, int shift) const {
        if (weight == 0) return 0;
        return kHazardFrequencies[size_t(
            std::clamp(quarter_octaves(weight) + shift + base(), 0, kHazards - 1))];
    }
};

// Of 64 groups: their weights, and the frequency with which something in them changes. `elements` are those that are left
// in the block; there is no weight behind them, and none where `marks`, if there are any, have a bit.
template <class U>
void group_frequencies(const U* first, size_t elements, ClassOf cls, const GroupWeights& weights,
                       int shift, MaskWords marks, uint16_t* frequencies);

// What is still to be said of 64 groups in which something changes, element by element.
struct OpenGroups {
    alignas(64) uint16_t weights[kGroup][kRansStates];
    alignas(64) uint32_t rest[kRansStates];  // the weight of the elements that are left
    uint64_t seen = 0;                       // the groups of which a change is known

    // Of `count` groups, at most 64.
    template <class U>
    void open(const U* block, size_t elements, ClassOf cls, const GroupWeights& of, MaskWords marks,
              const uint32_t* groups, size_t count);
    // The frequencies of changes of the next elements, number k of each group; `changed` then says which ones did.
    void frequencies(size_t k, const GroupWeights& of, uint16_t* out) const;
    void passed(size_t k, uint64_t changed);
};

// The same by vectors: of 64 whole groups.
template <class U>
void vector_group_frequencies(const U* first, ClassOf cls, const GroupWeights& weights, int shift,
                              MaskWords marks, uint16_t* frequencies);
template <class U>
void vector_open(OpenGroups& open, const U* block, ClassOf cls, const GroupWeights& weights,
                 MaskWords marks, const uint32_t* groups);
void vector_open_frequencies(const OpenGroups& open, size_t k, const GroupWeights& weights,
                             uint16_t* out);

}  // namespace pulse
