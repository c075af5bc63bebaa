// The chances of the elements that changed lately, by group and class (docs/format.md, section 3.9.4).
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "codecs/history/windows.h"
#include "entropy/levels.h"
#include "entropy/models.h"

namespace pulse {

constexpr int kMostClasses = 63;  // that are listed, from the first on
constexpr int kMostOdds = 21;     // so that no two are further apart than `code_near` reaches

// Cells are groups by places in the list of classes. Group 0, elements that are not remembered, is not used.
constexpr size_t kCells = size_t(kGroups) * kMostClasses;
template <class T>
using ByCell = std::array<T, kCells>;

inline size_t cell_of(size_t group, size_t place) { return group * kMostClasses + place; }

// The chance of an element is that of the sum of its group's and its class's log odds, in half octaves; `levels` (of kChances) has
// what follows from that, and where a cell differs. A group of which nothing `changes` has no chance.
struct HistoryTable {
    std::array<int, kMostClasses> of_class{};
    std::array<int, kGroups> of_group{};
    std::array<bool, kGroups> changes{};
    ByCell<uint8_t> levels;

    HistoryTable() { levels.fill(kNoChance); }
    // The frequencies of changes, by cell.
    ByCell<uint16_t> frequencies() const {
        ByCell<uint16_t> found;
        for (size_t cell = 0; cell < kCells; cell++) found[cell] = chance(levels[cell]);
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
void code_table(Side& side, TableModels& models, const ByCell<T>& there, int count,
                HistoryTable& table) {
    const auto bounded = [](int odds) { return std::clamp(odds, -kMostOdds, kMostOdds); };
    int expected = 0;
    for (int k = 0; k < count; k++) {
        bool any = false;
        for (int g = 1; g < kGroups; g++) any = any || there[cell_of(size_t(g), size_t(k))];
        if (!any) continue;
        int& odds = table.of_class[size_t(k)];
        side.next_symbol();
        odds = bounded(code_near(side, models.classes, odds, expected));
        expected = odds - 2;
    }
    expected = 0;
    for (size_t g = 1; g < kGroups; g++) {
        const T* const cells = &there[cell_of(g, 0)];
        if (std::none_of(cells, cells + count, [](T n) { return n > 0; })) continue;
        side.next_symbol();
        table.changes[g] = !side.bit(models.absent, !table.changes[g]);
        std::fill_n(&table.levels[cell_of(g, 0)], table.changes[g] ? 0 : count, uint8_t(kNoChance));
        if (!table.changes[g]) continue;
        int& odds = table.of_group[g];
        odds = bounded(code_near(side, models.groups, odds, expected));
        expected = odds;
        for (size_t k = 0; k < size_t(count); k++) {
            if (!cells[k]) continue;
            const int usual = level_of_odds(odds + table.of_class[k]);
            side.next_symbol();
            uint8_t& level = table.levels[cell_of(g, k)];
            level = uint8_t(code_within(side, models.cells, level, usual, 0, kNoChance));
        }
    }
}

// What an encoder chooses, by how many elements of each cell there are and how many of them changed.
void plan_table(const ByCell<uint32_t>& there, const ByCell<uint32_t>& changed, int count,
                HistoryTable& table);

}  // namespace pulse
