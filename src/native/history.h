// The `history` codec: as `context`, but an element that changed lately is known by when and how (docs/format.md, 3.10).
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "context.h"
#include "stretches.h"

namespace pulse {

// As `encode_block` and `decode_block`; `history` ends at the old elements. Nothing where it would save little: few of the
// changed elements had changed before, or their classes are too many to list.
std::optional<Encoded> encode_with_history(const std::vector<Stretch>& history, const void* old, const void* now,
                                           const ElementKind& kind, const std::vector<Run>& runs);
Decoded decode_with_history(const std::vector<Stretch>& history, const uint8_t* payload, size_t size, const void* old,
                            const ElementKind& kind, const std::vector<Run>& runs);

}  // namespace pulse
