#include "common/apply.h"

#include <algorithm>

#include "common/clones.h"

namespace pulse {

PULSE_CLONES
bool all_within(const uint32_t* positions, size_t n, uint32_t base, size_t count) {
    uint32_t most = 0;
    for (size_t i = 0; i < n; i++) most = std::max(most, positions[i] - base);
    const bool below = most > UINT32_MAX - base;  // then a difference has wrapped around
    return n == 0 || (!below && most < count);
}

PULSE_CLONES
bool all_ascending(const uint32_t* positions, size_t n, uint32_t base, size_t count) {
    uint32_t wrong = 0;
    for (size_t i = 1; i < n; i++) wrong |= uint32_t(positions[i - 1] >= positions[i]);
    return n == 0 || (wrong == 0 && positions[0] >= base && positions[n - 1] - base < count);
}

}  // namespace pulse
