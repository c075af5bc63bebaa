// The `history` codec: elements that changed lately are known by when and how, and said before all others, which are coded by
// `context` or by `groups` (docs/format.md, 3.10).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "codecs/history/windows.h"
#include "common/types.h"

namespace pulse {

enum class BlockCodec { context, groups, history };

// Without the history where it would save little: few of the changed elements had changed before, or their classes are too
// many to list.
struct EncodedByAny {
    Encoded encoded;
    BlockCodec codec;
    std::vector<uint32_t> positions;  // what changed, as it was found: ascending
    std::vector<uint8_t> values;      // the new elements there, `width` bytes each
    Decoded decoded;                  // of the codec `history`, where it is to be proved: what the payload says
};

// Below so many changes, 64 states and a head of chances cost more than `context`, which learns.
constexpr size_t kFewForGroups = 8192;

// As `encode_block` and `decode_block`; `history`, of at most kMostStretches, ends at the old elements. Behind what is remembered,
// `few` changes and more are coded by `groups`, where the block suits it; 0: any. To `prove` a payload it is decoded, by the
// history as it was put together to code it: that takes as long as much of the rest.
EncodedByAny encode_with_history(const std::vector<Stretch>& history, const void* old, const void* now,
                                 const ElementKind& kind, const std::vector<Run>& runs, bool prove,
                                 size_t few = kFewForGroups);
Decoded decode_with_history(const std::vector<Stretch>& history, const uint8_t* payload, size_t size, const void* old,
                            const ElementKind& kind, const std::vector<Run>& runs);

}  // namespace pulse
