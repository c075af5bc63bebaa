// A bit for each element of a block: those that are left out of the weights of all others (docs/format.md, section 3.10.3).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>

namespace pulse {

class Marks {
public:
    static constexpr size_t kBehind = 8;  // words that may be read behind the last element's

    // For whole tiles of so many words, which are to be written all; what is behind the last one is 0.
    Marks() = default;
    explicit Marks(size_t words) : words_(new uint64_t[words + kBehind]) {
        std::fill_n(words_.get() + words, kBehind, 0);
    }

    uint64_t* words() { return words_.get(); }
    const uint64_t* words() const { return words_.get(); }

private:
    std::unique_ptr<uint64_t[]> words_;
};

// Nothing, or the words of marks.
using MarkWords = const uint64_t*;

// The marks of the 64 elements from `i` on.
inline uint64_t marks_from(MarkWords words, size_t i) {
    const size_t word = i / 64, bit = i % 64;
    return bit ? words[word] >> bit | words[word + 1] << (64 - bit) : words[word];
}

// Of the eight elements of a group.
inline uint32_t marks_of_eight(MarkWords words, size_t group) {
    return uint32_t(words[group / 8] >> (8 * (group % 8)) & 255);
}

}  // namespace pulse
