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

inline uint64_t elements_of(const std::vector<Run>& runs) {
    uint64_t elements = 0;
    for (const Run& run : runs) elements += run.elements;
    return elements;
}

// What is compiled for the types of elements of 1, 2 and 4 bytes.
#define PULSE_FOR_WIDTHS(FOR) FOR(uint8_t) FOR(uint16_t) FOR(uint32_t)

// Calls `f` with a zero of the unsigned type of so many bytes: 1, 2 or 4.
template <class F>
auto for_width(int width, F&& f) {
    return width == 1 ? f(uint8_t()) : width == 2 ? f(uint16_t()) : f(uint32_t());
}
// The same where elements of 8 bytes are known as well.
template <class F>
auto for_any_width(int width, F&& f) {
    return width == 8 ? f(uint64_t()) : for_width(width, f);
}

// Memory that is not filled with zeros first.
template <class T>
struct Buffer {
    std::unique_ptr<T[]> data;
    size_t size = 0;
    Buffer() = default;
    explicit Buffer(size_t count) : data(new T[count]), size(count) {}
};

struct Decoded {
    Buffer<uint32_t> positions;  // ascending
    Buffer<uint8_t> values;      // the new elements, `width` bytes each, aligned for every type
    Buffer<uint8_t> before;      // the old elements there

    Decoded() = default;
    Decoded(size_t changes, size_t width)
        : positions(changes), values(changes * width), before(changes * width) {}
    // Leaves out what is behind so many changes.
    void shorten(size_t changes, size_t width) {
        positions.size = changes;
        values.size = before.size = changes * width;
    }
};

}  // namespace pulse
