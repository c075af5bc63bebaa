// The `nibbles` codec: integers that are codes of four bits, packed, as `gaps` or `sparse` code the changes of these
// (docs/format.md, section 3.10).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/types.h"

namespace pulse {

template <class U>
struct BlockChanges;

// Integers of one and four bytes are coded so.
inline bool may_be_nibbles(const ElementKind& kind) { return !kind.floating && kind.width != 2; }

// The payload of a block of integers with these `changes`; nothing where too many of their nibbles change for packed codes,
// unless it is `asked` for.
template <class U>
std::vector<uint8_t> encode_nibbles(const U* old, const U* now, const BlockChanges<U>& changes,
                                    const std::vector<Run>& runs, bool asked);

// Throws Malformed. Reads and writes nothing out of bounds on any payload, in time linear in elements and payload.
Decoded decode_nibbles(const uint8_t* payload, size_t size, const void* old,
                       const ElementKind& kind, const std::vector<Run>& runs);

}  // namespace pulse
