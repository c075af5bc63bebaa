// One block: which codec codes it, and the way back (docs/format.md, section 3.5).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "codecs/history/windows.h"
#include "common/types.h"

namespace pulse {

// The codecs of this module by their ids in a patch; `any`: the encoder chooses.
enum class BlockCodec : uint8_t {
    any = 0,
    gaps = 3,
    sparse = 4,
    table = 5,
    history = 6,
    nibbles = 7
};

struct EncodedBlock {
    BlockCodec codec;
    std::vector<uint8_t> payload;
    size_t changed;
    // What changed, as it was found: ascending, and the new elements there. None of `table`, which lists no changes.
    std::vector<uint32_t> positions;
    std::vector<uint8_t> values;
    Decoded decoded;  // of `history`, where it is to be proved: what the payload says
};

// The runs cover the arrays, which are aligned to `kind.width` and have at most 2^24 elements; `history`, of at most
// kMaxWindows, ends at the old elements. To `prove` a payload of `history` it is decoded, by the history as it was put
// together to code it. `only`: for tests, the codec that is used (`history` where it has anything to say).
EncodedBlock encode_block(const std::vector<Window>& history, const void* old, const void* now,
                          const ElementKind& kind, const std::vector<Run>& runs, bool prove,
                          BlockCodec only = BlockCodec::any);

// Throws Malformed. Reads and writes nothing out of bounds on any payload, in
// time linear in elements and payload.
Decoded decode_block(BlockCodec codec, const std::vector<Window>& history, const uint8_t* payload,
                     size_t size, const void* old, const ElementKind& kind,
                     const std::vector<Run>& runs);

}  // namespace pulse
