// The `table` codec: the step of every element of a block, coded by tables that belong to the old element's class
// (docs/format.md, section 3.8). For blocks of which many elements changed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/types.h"

namespace pulse {

// What a sample of at most 2^14 elements tells of a block's changes: their share of the elements, and how evenly they
// are spread: the share of the bits of their positions that would remain if the density of every 64 elements were known.
struct Spread {
    double density, evenness;
};
Spread sampled_spread(const void* old, const void* now, size_t elements, int width);

// The arrays are aligned to `kind.width` and have at most 2^24 elements. The payload is empty where nothing changed.
Encoded encode_steps(const void* old, const void* now, size_t elements, const ElementKind& kind);

// Throws Malformed. Reads and writes nothing out of bounds on any payload, in time linear in elements and payload.
Decoded decode_steps(const uint8_t* payload, size_t size, const void* old, size_t elements,
                     const ElementKind& kind);

}  // namespace pulse
