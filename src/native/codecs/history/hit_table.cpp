#include "codecs/history/hit_table.h"

#include <cmath>
#include <vector>

#include "entropy/rans_states.h"

namespace pulse {
namespace {

constexpr int kRounds = 8;
constexpr double kHalfOctave = 0.34657359027997264;  // of odds, in nats

struct Cell {
    size_t group, cls;
    double there, changed;
};

double bounded_step(double gradient, double curvature) {
    return std::clamp(gradient / (curvature + 0.3), -2.0, 2.0);
}

// Logistic regression on group and class, by Newton's steps on either in turn.
void fit(const std::vector<Cell>& cells, HistoryTable& table) {
    std::array<double, kGroups> group{};
    std::array<double, kMostClasses> cls{}, there{}, changed{};
    double all = 0, hit = 0;
    for (const Cell& c : cells) {
        there[c.cls] += c.there, changed[c.cls] += c.changed;
        all += c.there, hit += c.changed;
    }
    for (size_t k = 0; k < kMostClasses; k++) {
        const double p = (changed[k] + 0.5) / (there[k] + 1 + 0.5 * all / std::max(hit, 1.0));
        cls[k] = std::log(p / (1 - std::min(p, 0.98)));
    }
    const auto step = [&](auto& odds, size_t Cell::* place) {
        std::array<double, kGroups> gradient{}, curvature{};
        for (const Cell& c : cells) {
            const double p = 1 / (1 + std::exp(-(group[c.group] + cls[c.cls])));
            gradient[c.*place] += c.changed - c.there * p;
            curvature[c.*place] += c.there * p * (1 - p);
        }
        for (size_t k = 0; k < odds.size(); k++) odds[k] += bounded_step(gradient[k], curvature[k]);
    };
    for (int round = 0; round < kRounds; round++) {
        step(group, &Cell::group);
        step(cls, &Cell::cls);
    }
    const auto rounded = [](double odds) {
        return std::clamp(int(std::lround(odds / kHalfOctave)), -kMostOdds, kMostOdds);
    };
    for (size_t g = 1; g < kGroups; g++) table.of_group[g] = rounded(group[g]);
    for (size_t k = 0; k < kMostClasses; k++) table.of_class[k] = rounded(cls[k]);
}

}  // namespace

void plan_table(const ByCell<uint32_t>& there, const ByCell<uint32_t>& changed, int count,
                HistoryTable& table) {
    std::vector<Cell> cells;
    for (size_t g = 1; g < kGroups; g++) {
        for (size_t k = 0; k < size_t(count); k++) {
            if (there[cell_of(g, k)])
                cells.push_back(
                    {g, k, double(there[cell_of(g, k)]), double(changed[cell_of(g, k)])});
            table.changes[g] = table.changes[g] || changed[cell_of(g, k)];
        }
    }
    fit(cells, table);
    int expected = 0;
    for (size_t k = 0; k < size_t(count); k++) {  // a class of which nothing changed is as expected
        bool any = false, changes = false;
        for (size_t g = 1; g < kGroups; g++)
            any = any || there[cell_of(g, k)], changes = changes || changed[cell_of(g, k)];
        if (!any) continue;
        if (!changes) table.of_class[k] = std::max(expected, -kMostOdds);
        expected = table.of_class[k] - 2;
    }
    for (const Cell& c : cells) {
        const int usual = level_of_odds(table.of_group[c.group] + table.of_class[c.cls]);
        table.levels[cell_of(c.group, c.cls)] =
            uint8_t(c.changed == 0 ? usual : level_near(c.changed, c.there, usual, 4));
    }
}

}  // namespace pulse
