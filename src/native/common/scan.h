// Where do old and new differ?
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace pulse {

// Appends base + i for every byte offset i * width at which the two arrays differ. `bytes` is a multiple of width.
void differing(const uint8_t* a, const uint8_t* b, size_t bytes, int width, uint32_t base,
               std::vector<uint32_t>& out);

}  // namespace pulse
