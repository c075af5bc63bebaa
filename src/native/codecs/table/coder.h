// Groups of elements through 64 states of an asymmetric numeral system (docs/format.md, section 3.8.3): plainly, and by
// vectors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "codecs/table/frequencies.h"
#include "common/step.h"
#include "entropy/rans_states.h"

namespace pulse {

constexpr size_t kWordsOfGroup =
    3 * kRansStates;  // at most: a symbol and two pieces of plain bits for each state

struct RansEncoder : RansWriter {
    const RansEntries& entries;
    ElementKind kind;
    size_t changed = 0;
};

struct RansDecoder : RansReader {
    const RansEntries& entries;
    ElementKind kind;
    uint32_t* positions;  // room for `most` and another group
    uint8_t *values, *before;
    size_t found = 0, most;
};

// The vectors' share, of whole groups [from, to): how many of them were coded; an encoder's are the last ones, a
// decoder's the first ones. Only where `vectors` are used.
template <class U>
size_t vector_encode(RansEncoder& coder, const U* old, const U* now, size_t from, size_t to);
template <class U>
size_t vector_decode(RansDecoder& coder, const U* old, size_t from, size_t to);

}  // namespace pulse
