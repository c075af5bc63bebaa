// The chances of the elements that changed lately, by group and class (docs/format.md, section 3.10.3).
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "block_models.h"
#include "stretches.h"

namespace pulse {

constexpr int kMostClasses = 63;  // that a block lists, from the first on
constexpr int kMostOdds = 21;     // so that no two are further apart than `code_near` reaches

// By group and place in the list of classes, the last place for those that are not listed. Group 0, elements that are not remembered, is not used.
template <class T>
using ByGroup = std::array<std::array<T, kMostClasses + 1>, kGroups>;

// The chance of an element is that of the sum of its group's and its class's log odds, in half octaves; `levels` has what
// follows from that, and where a cell differs. A group of which nothing `changes` has no chance.
struct HistoryTable {
    std::array<int, kMostClasses> of_class{};
    std::array<int, kGroups> of_group{};
    std::array<bool, kGroups> changes{};
    ByGroup<uint8_t> levels;

    HistoryTable() {
        for (auto& group : levels) group.fill(kAbsent);
    }
};

struct TableModels {
    NearModels classes, groups, cells;
    AdaptiveBit absent;
};

// The level of an element whose chance to change has these log odds.
inline int level_of_odds(int odds) {
    constexpr uint8_t likely[] = {8, 7, 7, 6, 5, 4, 4, 3, 3, 2, 2, 1, 1, 1, 0};  // from -4 on
    if (odds < -4) return std::min(4 - odds, kMostLevel);
    return odds > 10 ? 0 : likely[odds + 4];
}

// `there` says how many elements each cell has, and is known to both sides.
template <class Side>
void code_table(Side& side, TableModels& models, const ByGroup<uint32_t>& there, int count, HistoryTable& table) {
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
        if (std::none_of(there[g].begin(), there[g].begin() + count, [](uint32_t n) { return n > 0; })) continue;
        side.next_symbol();
        table.changes[g] = !side.bit(models.absent, !table.changes[g]);
        if (!table.changes[g]) {
            table.levels[g].fill(kAbsent);
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
                uint8_t(std::clamp(code_near(side, models.cells, table.levels[g][k], usual), 0, kMostLevel));
        }
    }
}

// What an encoder chooses, by how many elements of each cell there are and how many of them changed.
void plan_table(const ByGroup<uint32_t>& there, const ByGroup<uint32_t>& changed, int count, HistoryTable& table);

}  // namespace pulse
