// Bytes of 0 and 1, one for each of some neighbors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace pulse {

// Calls `found` with the place of every 1, in order. Eight at a time: most are 0.
template <class Found>
inline void each_set(const uint8_t* flags, size_t count, Found&& found) {
    size_t i = 0;
    for (; i + 8 <= count; i += 8) {
        uint64_t eight;
        std::memcpy(&eight, flags + i, 8);
        for (; eight; eight &= eight - 1) found(i + (size_t(__builtin_ctzll(eight)) >> 3));
    }
    for (; i < count; i++) {
        if (flags[i]) found(i);
    }
}

}  // namespace pulse
