// What an encoder learns of a block before it codes it: the changes, statistics of the classes, and the code plan that
// follows from them. A decoder gets the plan from the payload; how it was chosen affects the size only.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/scan.h"
#include "common/types.h"
#include "entropy/weights.h"

namespace pulse {

// What stands at the head of a block's payload: the boost, the classes that are listed, and their levels.
struct CodePlan {
    int boost = 0, first = 0, count = 0;
    std::array<uint8_t, kClasses> levels;
};

// How many elements and changes a block has, by class. `seen` counts a sample of the elements, `marked` all those that have no
// weight; `live` are those behind the first change of their row.
struct BlockStatistics {
    std::array<uint32_t, kClasses> changes{}, seen[2]{}, marked{};
    uint64_t elements = 0, sampled = 0, changed = 0, live_elements = 0, live_changes = 0;

    // The groups of a tile [from, to) that are in the sample; a sample tells enough of a large block. Two counters each,
    // since neighbors often are of one class.
    template <class U>
    void sample(const U* block, size_t from, size_t to, ClassOf cls) {
        constexpr size_t kSample = 64;
        const size_t stride = elements > (1 << 21) ? 16 : elements > (1 << 18) ? 8 : 1;
        for (size_t at = from; at < to; at += kSample * stride, group_++) {
            const size_t start =
                             std::min(at + kSample * ((group_ * 2654435769u >> 16) % stride), to),
                         end = std::min(start + kSample, to);
            for (size_t k = start; k + 2 <= end; k += 2) {
                seen[0][cls(block[k])]++;
                seen[1][cls(block[k + 1])]++;
            }
            sampled += (end - start) & ~size_t(1);
        }
    }

    // How many elements a class has, but for those that are marked.
    double elements_of(size_t cls) const {
        const double scale = double(elements) / double(std::max<uint64_t>(sampled, 1));
        return std::max<double>(changes[cls],
                                double(seen[0][cls] + seen[1][cls]) * scale - double(marked[cls]));
    }

    void count_live(const std::vector<uint32_t>& positions, const std::vector<Run>& runs) {
        changed = positions.size();
        uint64_t base = 0;
        size_t i = 0;
        for (const Run& run : runs) {
            for (size_t row_end = 0; i < positions.size() && positions[i] < base + run.elements;
                 i++) {
                const size_t p = positions[i] - base;
                if (p < row_end) {
                    live_changes++;
                } else {
                    row_end = run.end_after(p);
                    live_elements += row_end - p - 1;
                }
            }
            base += run.elements;
        }
    }

private:
    size_t group_ = 0;
};

// The changes of a block, and its statistics.
template <class U>
struct BlockChanges {
    std::vector<uint32_t> positions;
    std::vector<U> before, values;  // the old and the new elements there
    BlockStatistics statistics;
};

// One walk over old and new, in tiles that stay in the first-level cache: a second look at the new values of the changes
// would miss the cache once a change.
template <class U>
BlockChanges<U> compare_block(const U* old, const U* now, uint64_t elements,
                              const std::vector<Run>& runs, ClassOf cls) {
    constexpr size_t kWindow = 1 << 13;
    BlockChanges<U> block;
    block.statistics.elements = elements;
    for (size_t tile = 0; tile < elements; tile += kWindow) {
        const size_t end = std::min<size_t>(tile + kWindow, elements),
                     known = block.positions.size();
        differing(reinterpret_cast<const uint8_t*>(old + tile),
                  reinterpret_cast<const uint8_t*>(now + tile), (end - tile) * sizeof(U),
                  int(sizeof(U)), uint32_t(tile), block.positions);
        block.before.resize(block.positions.size());
        block.values.resize(block.positions.size());
        for (size_t i = known; i < block.positions.size(); i++) {
            block.before[i] = old[block.positions[i]];
            block.values[i] = now[block.positions[i]];
            block.statistics.changes[cls(block.before[i])]++;
        }
        block.statistics.sample(old, tile, end, cls);
    }
    block.statistics.count_live(block.positions, runs);
    return block;
}

inline CodePlan plan_code(const BlockStatistics& s) {
    CodePlan plan;
    plan.levels.fill(kAbsent);
    if (s.live_changes > 8) {
        const double there = double(s.live_changes) / double(s.live_elements + 1);
        const double elsewhere =
            double(s.changed - s.live_changes) / double(s.elements - s.live_elements + 1);
        if (there >
            3 * elsewhere) {  // below that it may be the mix of tensors in the block, and a boost would cost
            while (plan.boost < kMostBoost && there / elsewhere > 1.4142 * double(1 << plan.boost))
                plan.boost++;
        }
    }
    const double live = double(s.live_elements) / double(s.elements);
    const double scale = 1 - live + live * double(1 << plan.boost);
    int last = 0;
    for (int c = kClasses - 1; c >= 0; c--) {
        if (!s.changes[c]) continue;
        last = std::max(last, c);
        plan.first = c;
        const double nats =
            -std::log(1 - std::min(s.changes[c] / s.elements_of(size_t(c)), 0.98)) / scale;
        plan.levels[c] = uint8_t(std::clamp(int(2 * (2 - std::log2(nats)) + 0.5), 0, kMostLevel));
    }
    plan.count = last - plan.first + 1;
    return plan;
}

}  // namespace pulse
