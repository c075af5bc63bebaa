// The in-place apply of a block's changes, and what undoes it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace pulse {

// Whether all positions, less `base`, are below `count`.
bool all_within(const uint32_t* positions, size_t n, uint32_t base, size_t count);

// Whether they also ascend strictly.
bool all_ascending(const uint32_t* positions, size_t n, uint32_t base, size_t count);

// The elements at the positions: the old bits, to be kept until the apply is confirmed.
template <class U>
void gather(const U* elements, const uint32_t* positions, size_t n, uint32_t base, U* out) {
    for (size_t i = 0; i < n; i++) out[i] = elements[positions[i] - base];
}

// Whether the elements at the positions are the values.
template <class U>
bool holds(const U* elements, const uint32_t* positions, size_t n, uint32_t base, const U* values) {
    constexpr size_t kAhead = 32;  // what is there is in no cache
    U other = 0;
    for (size_t i = 0; i < n; i++) {
        __builtin_prefetch(elements + (positions[std::min(i + kAhead, n - 1)] - base));
        other |= U(elements[positions[i] - base] ^ values[i]);
    }
    return other == 0;
}

// Writes values at the positions. Repeating it changes nothing, and scattering the gathered old bits undoes it, even if
// only a part of it was done.
template <class U>
void scatter(U* elements, const uint32_t* positions, size_t n, uint32_t base, const U* values) {
    for (size_t i = 0; i < n; i++) elements[positions[i] - base] = values[i];
}

}  // namespace pulse
