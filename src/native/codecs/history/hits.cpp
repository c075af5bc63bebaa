#include "codecs/history/hits.h"

#include <algorithm>
#include <cstdlib>

#include "common/clones.h"

namespace pulse {
namespace {

// The cells of the states; how many are of listed classes, and the largest size of a last step among these.
struct Listed {
    size_t count;
    int most;
};
PULSE_CLONES Listed find_cells(const State* states, size_t n, int first, int count,
                               uint16_t* cells) {
    uint32_t listed = 0;
    int most = 0;
    for (size_t i = 0; i < n; i++) {
        const int place = (int(states[i].cls()) - first) & 255;
        const bool is_listed = place < count;
        cells[i] = uint16_t(states[i].group() * kMostClasses + (is_listed ? place : 0));
        most = std::max(most, is_listed ? std::abs(int(states[i].last())) : 0);
        listed += is_listed;
    }
    return {listed, most};
}

}  // namespace

void HistoryHits::list(int first_class, int classes_listed) {
    first = first_class, count = classes_listed;
    cells.resize(size());
    uint32_t* const positions = remembered.positions.get();
    State* const states = remembered.states.get();
    const Listed listed = find_cells(states, size(), first, count, cells.data());
    large = listed.most > 1;
    if (listed.count == size()) return;
    const size_t all = size();
    size_t kept = 0, from = 0;  // most are kept, so they move many at a time
    const auto keep_up_to = [&](size_t i) {
        if (from > kept) {
            std::copy(positions + from, positions + i, positions + kept);
            std::copy(states + from, states + i, states + kept);
            std::copy(cells.data() + from, cells.data() + i, cells.data() + kept);
        }
        kept += i - from, from = i + 1;
    };
    for (size_t i = 0; i < all; i++) {
        if (((int(states[i].cls()) - first) & 255) < count) continue;
        remembered.marks.remove(positions[i]);
        keep_up_to(i);
    }
    keep_up_to(all);
    remembered.count = kept;
    cells.resize(kept);
}

PULSE_CLONES void HistoryHits::number() {
    remembered.marks.count(0, size() ? remembered.positions[size() - 1] + size_t(1) : 0, 0);
}

}  // namespace pulse
