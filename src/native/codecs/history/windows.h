// What changed in the last versions: kept in few bytes, and looked up (docs/format.md, section 3.9.1).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "common/element_mask.h"
#include "common/types.h"

namespace pulse {

// The steps of a block in one version, modulo 256: a record of four bytes for each element that changed, with its class
// after the step. Where the step is 0 modulo 256, nothing is remembered but that class.
constexpr size_t kRecordBytes = 4;
constexpr size_t kMaxWindows = 64;  // of a history
struct Window {
    const uint8_t* records;
    size_t bytes;
};

// A group is an age, an activity, and whether the last step turned.
constexpr int kAges = 7, kVigours = 7, kGroups = 1 + kAges * kVigours * 2;
constexpr int kLastVersion = kVigours * 2;  // the last group of what changed in the last version

// What is known of an element that changed lately: its group, above 0, the sign of the step to expect, that step, and its class, from
// the lowest bit on: 7, 1, 8, 8 of them.
struct State {
    uint32_t value;

    uint8_t group() const { return uint8_t(value & 127); }
    int8_t last() const { return int8_t(value >> 8); }
    uint8_t cls() const { return uint8_t(value >> 16); }
};

// The elements of a block that changed lately, ascending, and marked.
struct Remembered {
    std::unique_ptr<uint32_t[]> positions;
    std::unique_ptr<State[]> states;
    size_t count = 0;
    ElementMask marks;
};

// The records of what changed. `old` and `now` are the elements at the positions.
std::vector<uint8_t> records_of(const uint32_t* positions, size_t count, const void* old,
                                const void* now, const ElementKind& kind);

// How many elements below `end` the last 0, 1, 2… of the windows remember, and how many of the first `changed` of the positions, which
// are below `end`, all of them do.
struct RememberedCount {
    std::vector<size_t> by_last;
    size_t of_changed = 0;
};
RememberedCount count_remembered(const std::vector<Window>& windows, uint64_t end,
                                 const uint32_t* positions, size_t changed);

// `windows` are in order; the last one ends at the block's old elements.
Remembered remember(const std::vector<Window>& windows, uint64_t elements);

}  // namespace pulse
