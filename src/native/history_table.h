// The chances of the elements that changed lately, by group and class (docs/format.md, section 3.10.3).
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "block_models.h"
#include "chances.h"
#include "stretches.h"

namespace pulse {

constexpr int kMostClasses = 63;  // that are listed, from the first on
constexpr size_t kUnlisted = 63;  // the place of all others
constexpr int kMostOdds = 21;     // so that no two are further apart than `code_near` reaches

// By group and place in the list of classes, the last place for those that are not listed. Group 0, elements that are not remembered, is not used.
template <class T>
using ByGroup = std::array<std::array<T, kMostClasses + 1>, kGroups>;

// The place of a cell in such an array.
constexpr size_t kCells = size_t(kGroups) * (kMostClasses + 1);
inline uint16_t cell_of(uint8_t group, size_t place) { return uint16_t(group * (kMostClasses + 1) + place); }
template <class T>
T* cells_of(ByGroup<T>& table) {
    return table[0].data();
}

// The chance of an element is that of the sum of its group's and its class's log odds, in half octaves; `levels` (of kChances) has
// what follows from that, and where a cell differs. A group of which nothing `changes` has no chance.
struct HistoryTable {
    std::array<int, kMostClasses> of_class{};
    std::array<int, kGroups> of_group{};
    std::array<bool, kGroups> changes{};
    ByGroup<uint8_t> levels;

    HistoryTable() {
        for (auto& group : levels) group.fill(kNoChance);
    }
    // The frequencies of changes, by cell.
    std::array<uint16_t, kCells> frequencies() const {
        std::array<uint16_t, kCells> found;
        for (size_t cell = 0; cell < kCells; cell++) found[cell] = chance(levels[0].data()[cell]);
        return found;
    }
};

struct TableModels {
    NearModels classes, groups, cells;
    AdaptiveBit absent;
};

// The level of an element whose chance to change has these log odds.
inline int level_of_odds(int odds) { return std::clamp(kEven - odds, 0, kNoChance - 1); }

// `there` says which cells have elements, and is known to both sides.
template <class Side, class T>
void code_table(Side& side, TableModels& models, const ByGroup<T>& there, int count, HistoryTable& table) {
    const auto bounded = [](int odds) { return std::clamp(odds, -kMostOdds, kMostOdds); };
    int expected = 0;
    for (int k = 0; k < count; k++) {
        bool any = false;
        for (int g = 1; g < kGroups; g++) any = any || there[size_t(g)][size_t(k)];
        if (!any) continue;
        int& odds = table.of_class[size_t(k)];
        side.next_symbol();
        odds = bounded(code_near(side, models.classes, odds, expected));
        expected = odds - 2;
    }
    expected = 0;
    for (size_t g = 1; g < kGroups; g++) {
        if (std::none_of(there[g].begin(), there[g].begin() + count, [](T n) { return n > 0; })) continue;
        side.next_symbol();
        table.changes[g] = !side.bit(models.absent, !table.changes[g]);
        if (!table.changes[g]) {
            table.levels[g].fill(kNoChance);
            continue;
        }
        int& odds = table.of_group[g];
        odds = bounded(code_near(side, models.groups, odds, expected));
        expected = odds;
        for (size_t k = 0; k < size_t(count); k++) {
            if (!there[g][k]) continue;
            const int usual = level_of_odds(odds + table.of_class[k]);
            side.next_symbol();
            table.levels[g][k] =
                uint8_t(code_within(side, models.cells, table.levels[g][k], usual, 0, kNoChance));
        }
    }
}

// What an encoder chooses, by how many elements of each cell there are and how many of them changed.
void plan_table(const ByGroup<uint32_t>& there, const ByGroup<uint32_t>& changed, int count, HistoryTable& table);

}  // namespace pulse
