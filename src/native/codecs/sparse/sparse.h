// The `sparse` codec: the changes of one block by groups of eight elements, 64 groups at once (docs/format.md, section 3.7).
// For blocks of many elements of which few changed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/types.h"

namespace pulse {

// Whether `gaps` suits a block's changes better: few, or of many elements, or with rows that differ much.
struct BlockStatistics;
template <class U>
struct BlockChanges;
class HistoryDecoder;
class HistoryEncoder;
bool suits_gaps(const BlockStatistics& statistics);

// By groups, as `encode_changes`.
template <class U>
Encoded encode_sparse(const U* old, const BlockChanges<U>& changes, const ElementKind& kind,
                      const std::vector<Run>& runs, HistoryEncoder* recall = nullptr);

// Throws Malformed. Reads and writes nothing out of bounds on any payload, in time linear in elements and payload.
Decoded decode_sparse(const uint8_t* payload, size_t size, const void* old, const ElementKind& kind,
                      const std::vector<Run>& runs, HistoryDecoder* recall = nullptr);

}  // namespace pulse
