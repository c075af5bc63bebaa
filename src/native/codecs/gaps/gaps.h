// The `gaps` codec: the changes of one block, coded against its old elements (docs/format.md, section 3.6).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/types.h"

namespace pulse {

// What `compare_block` has found. `recall`, where there is one, is put in front; its elements are not among the
// changes.
template <class U>
struct BlockChanges;
class HistoryDecoder;
class HistoryEncoder;
template <class U>
Encoded encode_gaps(const U* old, const BlockChanges<U>& changes, const ElementKind& kind,
                    const std::vector<Run>& runs, HistoryEncoder* recall = nullptr);

// Throws Malformed. Reads and writes nothing out of bounds on any payload, in time linear in elements and payload.
Decoded decode_gaps(const uint8_t* payload, size_t size, const void* old, const ElementKind& kind,
                    const std::vector<Run>& runs, HistoryDecoder* recall = nullptr);

}  // namespace pulse
