// What all codecs of blocks take and give.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace pulse {

// What both sides know of the elements. `floating`: sign and magnitude; else a two's complement integer. The class of an
// element is (bits >> shift) & mask; mask is at most 255.
struct ElementKind {
    int width;  // bytes: 1, 2 or 4
    int shift;
    uint32_t mask;
    bool floating;
};

// `elements` of one tensor, whose rows have `row` elements; the first one is number `phase` of its row.
struct Run {
    uint64_t elements, row, phase;
    size_t end_after(size_t at) const {
        return std::min<uint64_t>(((at + phase) / row + 1) * row - phase, elements);
    }
};

struct Encoded {
    std::vector<uint8_t> payload;
    size_t changed;
};

struct Decoded {
    std::vector<uint32_t> positions;  // ascending
    std::vector<uint8_t> values;      // the new elements, `width` bytes each
    std::vector<uint8_t> before;      // the old elements there
};

// Memory that is not filled with zeros first.
template <class T>
struct Buffer {
    std::unique_ptr<T[]> data;
    size_t size = 0;
    Buffer() = default;
    explicit Buffer(size_t count) : data(new T[count]), size(count) {}
};

}  // namespace pulse
