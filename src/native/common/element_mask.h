// A bit for each element of a block: those that are left out of the weights of all others (docs/format.md, section 3.9.3).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "common/clones.h"

namespace pulse {

// Nothing, or a bit for each element from the lowest one of the first word on.
using MaskWords = const uint64_t*;

// Bits that are set and then counted, from the first element on.
class ElementMask {
public:
    static constexpr size_t kBehind = 8;  // words that may be read behind the last element's

    ElementMask() = default;
    explicit ElementMask(uint64_t elements)
        : words_(new uint64_t[size_t(elements / 64) + 1 + kBehind]()),
          before_(new uint32_t[size_t(elements / 64) + 1]) {}

    MaskWords words() const { return words_.get(); }
    PULSE_INLINE bool has(size_t element) const {
        return words_[element / 64] >> (element % 64) & 1;
    }
    PULSE_INLINE void add(size_t element, bool is) {
        words_[element / 64] |= uint64_t(is) << (element % 64);
    }
    void remove(size_t element) { words_[element / 64] &= ~(uint64_t(1) << (element % 64)); }

    // How many of these elements have a bit.
    size_t count_of(const std::vector<uint32_t>& elements) const {
        size_t count = 0;
        for (uint32_t element : elements) count += has(element);
        return count;
    }
    // Of all elements below `end`, how many have a bit. What is in front of `counted`, as many as that, is taken for counted.
    PULSE_INLINE size_t count(size_t begin, size_t end, size_t counted) {
        for (size_t word = begin / 64; word < (end + 63) / 64; word++) {
            before_[word] = uint32_t(counted);
            counted += size_t(__builtin_popcountll(words_[word]));
        }
        return counted;
    }
    // How many of the elements in front of one that was counted have a bit.
    PULSE_INLINE size_t before(size_t element) const {
        const uint64_t below = (uint64_t(1) << (element % 64)) - 1;
        return before_[element / 64] + size_t(__builtin_popcountll(words_[element / 64] & below));
    }

private:
    std::unique_ptr<uint64_t[]> words_;
    std::unique_ptr<uint32_t[]> before_;  // each word
};

// The marks of the 64 elements from `i` on.
inline uint64_t marks_from(MaskWords words, size_t i) {
    const size_t word = i / 64, bit = i % 64;
    return bit ? words[word] >> bit | words[word + 1] << (64 - bit) : words[word];
}

// Of the eight elements of a group.
inline uint32_t marks_of_eight(MaskWords words, size_t group) {
    return uint32_t(words[group / 8] >> (8 * (group % 8)) & 255);
}

}  // namespace pulse
