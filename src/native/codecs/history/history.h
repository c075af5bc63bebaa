// The stage in front of `sparse` and `gaps`: which of the elements that changed lately change again, and by how much
// (docs/format.md, section 3.9).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "codecs/history/windows.h"
#include "common/types.h"

namespace pulse {

template <class U>
struct BlockChanges;

// Below so many changes, 64 states and a head of chances cost more than `gaps`, which learns.
constexpr size_t kFewForSparse = 8192;

// The payload of a block whose changes are known; false where a history would save little: few of the changed elements had
// changed before, or their classes are too many to list. `few`: whether `gaps` suits the block better. `proved`, if there is
// one, gets what the payload says.
template <class U>
bool encode_history(const std::vector<Window>& history, const U* old,
                    const BlockChanges<U>& changes, const ElementKind& kind,
                    const std::vector<Run>& runs, bool few, std::vector<uint8_t>& payload,
                    Decoded* proved);

// Throws Malformed. Reads and writes nothing out of bounds on any payload, in time linear in elements and payload.
Decoded decode_history(const std::vector<Window>& history, const uint8_t* payload, size_t size,
                       const void* old, const ElementKind& kind, const std::vector<Run>& runs);

}  // namespace pulse
