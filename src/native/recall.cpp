#include "recall.h"

#include <algorithm>
#include <cstdlib>

#include "clones.h"

namespace pulse {
namespace {

// The cells of the states; how many are of listed classes, and the largest size of a last step among these.
struct Listed {
    size_t count;
    int most;
};
PULSE_CLONES Listed find_cells(const State* states, size_t n, int first, int count, uint16_t* cells) {
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

void Recollection::list(int first_class, int classes_listed) {
    first = first_class, count = classes_listed;
    cells.resize(size());
    const Listed listed = find_cells(remembered.states.get(), size(), first, count, cells.data());
    large = listed.most > 1;
    if (listed.count == size()) return;
    size_t kept = 0;
    for (size_t i = 0; i < size(); i++) {
        const uint32_t at = remembered.positions[i];
        if (((int(state(i).cls()) - first) & 255) >= count) {
            remembered.marks.words()[at / 64] &= ~(uint64_t(1) << (at % 64));
            continue;
        }
        remembered.positions[kept] = at;
        remembered.states[kept] = state(i);
        cells[kept++] = cells[i];
    }
    remembered.count = kept;
    cells.resize(kept);
    for (size_t i = kept; i-- > 0;) remembered.before[remembered.positions[i] / 64] = uint32_t(i);
}

}  // namespace pulse
