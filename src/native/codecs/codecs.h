// The codecs: what each makes of the changes of one block, against its old elements, and the way back. Which one codes a
// block is for block.h to say.
//
// All that decodes throws Malformed. It reads and writes nothing out of bounds on any payload, in time linear in elements
// and payload. The arrays are aligned to `kind.width` and have at most 2^24 elements.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "codecs/history/windows.h"
#include "codecs/sparse/block_statistics.h"
#include "common/types.h"

namespace pulse {

class HistoryDecoder;
class HistoryEncoder;

// `gaps` (docs/format.md, section 3.6): one change after another, by a range coder. `changes` are those that `compare_block`
// has found. `recall`, where there is one, is put in front; its elements are not among the changes.
template <class U>
std::vector<uint8_t> encode_gaps(const U* old, const BlockChanges<U>& changes,
                                 const ElementKind& kind, const std::vector<Run>& runs,
                                 HistoryEncoder* recall = nullptr);
Decoded decode_gaps(const uint8_t* payload, size_t size, const void* old, const ElementKind& kind,
                    const std::vector<Run>& runs, HistoryDecoder* recall = nullptr);

// `sparse` (section 3.7): by groups of eight elements, 64 groups at once. For blocks of many elements of which few changed.
template <class U>
std::vector<uint8_t> encode_sparse(const U* old, const BlockChanges<U>& changes,
                                   const ElementKind& kind, const std::vector<Run>& runs,
                                   HistoryEncoder* recall = nullptr);
Decoded decode_sparse(const uint8_t* payload, size_t size, const void* old, const ElementKind& kind,
                      const std::vector<Run>& runs, HistoryDecoder* recall = nullptr);

// Whether `gaps` suits a block's changes better: few, or of many elements, or with rows that differ much.
bool suits_gaps(const BlockStatistics& statistics);

// `table` (section 3.8): the step of every element, by tables that belong to the old element's class. For blocks of which
// many elements changed. The payload is empty where nothing changed.
struct Encoded {
    std::vector<uint8_t> payload;
    size_t changed;
};
Encoded encode_steps(const void* old, const void* now, size_t elements, const ElementKind& kind);
Decoded decode_steps(const uint8_t* payload, size_t size, const void* old, size_t elements,
                     const ElementKind& kind);

// What a sample of at most 2^14 elements tells of a block's changes: their share of the elements, and how evenly they
// are spread: the share of the bits of their positions that would remain if the density of every 64 elements were known.
struct Spread {
    double density, evenness;
};
Spread sampled_spread(const void* old, const void* now, size_t elements, int width);

// `history` (section 3.9), in front of `sparse` and `gaps`: which of the elements that changed lately change again, and by
// how much. False where that would save little: few of the changed elements had changed before, or their classes are too
// many to list. `few`: whether `gaps` suits the block better. `proved`, if there is one, gets what the payload says.
template <class U>
bool encode_history(const std::vector<Window>& history, const U* old,
                    const BlockChanges<U>& changes, const ElementKind& kind,
                    const std::vector<Run>& runs, bool few, std::vector<uint8_t>& payload,
                    Decoded* proved);
Decoded decode_history(const std::vector<Window>& history, const uint8_t* payload, size_t size,
                       const void* old, const ElementKind& kind, const std::vector<Run>& runs);

// `nibbles` (section 3.10): integers of one or four bytes that are codes of four bits, packed, as `gaps` or `sparse` code the
// changes of these. Nothing where too many of the nibbles change for packed codes, unless it is `asked` for.
inline bool may_be_nibbles(const ElementKind& kind) { return !kind.floating && kind.width != 2; }
template <class U>
std::vector<uint8_t> encode_nibbles(const U* old, const U* now, const BlockChanges<U>& changes,
                                    const std::vector<Run>& runs, bool asked);
Decoded decode_nibbles(const uint8_t* payload, size_t size, const void* old,
                       const ElementKind& kind, const std::vector<Run>& runs);

}  // namespace pulse
