// The `groups` codec: the changes of one block by groups of eight elements, 64 groups at once (docs/format.md, section 3.11).
// For blocks of many elements of which few changed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "context.h"

namespace pulse {

// By groups, or by `context` where that suits better: few changes, changes of many elements, or rows that differ much.
// Arguments as of `encode_block`.
struct EncodedEither {
    Encoded encoded;
    bool by_groups;
    std::vector<uint32_t> positions;  // what changed, as it was found: ascending
    std::vector<uint8_t> values;      // the new elements there, `width` bytes each
};
EncodedEither encode_groups(const void* old, const void* now, const ElementKind& kind, const std::vector<Run>& runs);

// Throws Malformed. Reads and writes nothing out of bounds on any payload, in time linear in elements and payload.
Decoded decode_groups(const uint8_t* payload, size_t size, const void* old, const ElementKind& kind,
                      const std::vector<Run>& runs);

}  // namespace pulse
