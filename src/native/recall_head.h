// The levels of chances by which the steps of remembered elements are coded, where they stand in a head (docs/format.md, section
// 3.10.5).
#pragma once

#include "chances.h"
#include "history_table.h"
#include "recall_models.h"

namespace pulse {

constexpr uint8_t kWhatever = 255;  // a level that nobody needs: it becomes the one that is expected

struct RecallHead {
    HistoryTable table;
    RecallModels<uint8_t> levels;
    int sizes = 0, distances = 0;  // how many levels by class and length follow, from the first class on

    RecallHead() {
        for (auto* all : {&levels.longer, &levels.differs, &levels.less}) all->fill(kWhatever);
        for (auto* all : {&levels.further, &levels.second, &levels.apart}) all->fill(kWhatever);
        levels.turned.fill(kWhatever);
    }
};

// `there` says which cells have elements, `large` whether a step above 1 is remembered; both sides know it.
template <class Side, class T>
void code_recall_head(Side& side, RecallHead& head, const ByGroup<T>& there, bool large, int first, int count) {
    TableModels models;
    code_table(side, models, there, count, head.table);
    RecallModels<uint8_t>& levels = head.levels;
    const auto code = [&](NearModels& near, uint8_t& level, int expected) {
        const int value = level == kWhatever ? expected : level;
        level = uint8_t(code_within(side, near, value, expected, 0, kNoChance));
        return int(level);
    };
    const auto code_count = [&](int& value) {
        side.next_symbol();
        value = std::min(int(side.plain(uint32_t(value), 9)), count + kMostLength - 1);
    };
    NearModels turned, longer, further, second, differs, less, apart;
    int expected = kEven;
    for (int c = first; c < first + count; c++) {
        for (size_t k : {size_t(c), size_t(kClasses + c)}) expected = code(turned, levels.turned[k], expected);
    }
    expected = kNoChance;
    for (int c = first; c < first + count; c++) {
        expected = std::min(code(longer, levels.longer[size_t(c)], expected) + 2, kNoChance);
    }
    code_count(head.sizes);
    expected = kEven;
    for (int u = first, of_second = kEven; u < first + head.sizes; u++) {
        expected = std::min(code(further, levels.further[size_t(u)], expected) + 2, kNoChance);
        of_second = code(second, levels.second[size_t(u)], of_second);
    }
    expected = kEven;
    for (int c = first, of_less = kEven; large && c < first + count; c++) {
        expected = std::min(code(differs, levels.differs[size_t(c)], expected) + 2, kNoChance);
        if (levels.differs[size_t(c)] != kNoChance) of_less = code(less, levels.less[size_t(c)], of_less);
    }
    if (large) code_count(head.distances);
    expected = kEven;
    for (int u = first; u < first + head.distances; u++) {
        expected = std::min(code(apart, levels.apart[size_t(u)], expected) + 2, kNoChance);
    }
    const auto settle = [](auto& all) { std::replace(all.begin(), all.end(), kWhatever, uint8_t(kNoChance)); };
    settle(levels.turned), settle(levels.longer), settle(levels.differs), settle(levels.less);
    settle(levels.further), settle(levels.second), settle(levels.apart);
}

}  // namespace pulse
