// The levels of chances by which the steps of remembered elements are coded, where they stand in a head (docs/format.md, section
// 3.9.6).
#pragma once

#include <cmath>

#include "codecs/history/hit_models.h"
#include "codecs/history/hit_table.h"
#include "entropy/levels.h"
#include "entropy/rans_states.h"

namespace pulse {

// How often a bit is said, and how often it is 1.
struct Tally {
    uint32_t asked = 0, ones = 0;

    // The level for it: the expected one, unless another one saves more than it takes to say so.
    int level(int expected) const {
        if (asked == 0) return expected;
        const int own = level_of(ones, asked);
        return bits(expected) - bits(own) > 3 + std::abs(own - expected) ? own : expected;
    }

private:
    double bits(int level) const {
        const double p = double(chance(uint8_t(level))) / double(kRansScale);
        if (ones && p == 0) return HUGE_VAL;
        return -(ones ? ones * std::log2(p) : 0.0) - (asked - ones) * std::log2(1 - p);
    }
};

struct HitHead {
    HistoryTable table;
    RecallModels<uint8_t> levels;
    int sizes = 0,
        distances = 0;  // how many levels by class and length follow, from the first class on

    HitHead() {
        for (auto* all : {&levels.longer, &levels.differs, &levels.less}) all->fill(kNoChance);
        for (auto* all : {&levels.further, &levels.second, &levels.apart}) all->fill(kNoChance);
        levels.turned.fill(kNoChance);
    }
};

// `there` says which cells have elements, `large` whether a step above 1 is remembered; both sides know it. An encoder chooses by
// `tallies`.
template <class Side, class T>
void code_recall_head(Side& side, HitHead& head, const ByCell<T>& there, bool large, int first,
                      int count, const RecallModels<Tally>& tallies) {
    TableModels models;
    code_table(side, models, there, count, head.table);
    RecallModels<uint8_t>& levels = head.levels;
    const auto code = [&](NearModels& near, auto& of, const auto& tally, size_t k, int expected) {
        of[k] = uint8_t(code_within(side, near, tally[k].level(expected), expected, 0, kNoChance));
        return int(of[k]);
    };
    const auto code_count = [&](int& value) {
        side.next_symbol();
        value = std::min(int(side.plain(uint32_t(value), 9)), count + kMostLength - 1);
    };
    NearModels turned, longer, further, second, differs, less, apart;
    int expected = kEven;
    for (int c = first; c < first + count; c++) {
        for (size_t k : {size_t(c), size_t(kClasses + c)})
            expected = code(turned, levels.turned, tallies.turned, k, expected);
    }
    expected = kNoChance;
    for (int c = first; c < first + count; c++) {
        expected = std::min(code(longer, levels.longer, tallies.longer, size_t(c), expected) + 2,
                            kNoChance);
    }
    code_count(head.sizes);
    expected = kEven;
    for (int u = first, of_second = kEven; u < first + head.sizes; u++) {
        expected = std::min(code(further, levels.further, tallies.further, size_t(u), expected) + 2,
                            kNoChance);
        of_second = code(second, levels.second, tallies.second, size_t(u), of_second);
    }
    expected = kEven;
    for (int c = first, of_less = kEven; large && c < first + count; c++) {
        expected = std::min(code(differs, levels.differs, tallies.differs, size_t(c), expected) + 2,
                            kNoChance);
        if (levels.differs[size_t(c)] != kNoChance)
            of_less = code(less, levels.less, tallies.less, size_t(c), of_less);
    }
    if (large) code_count(head.distances);
    expected = kEven;
    for (int u = first; u < first + head.distances; u++) {
        expected =
            std::min(code(apart, levels.apart, tallies.apart, size_t(u), expected) + 2, kNoChance);
    }
}

}  // namespace pulse
