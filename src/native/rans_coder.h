// Groups of elements through 64 states of an asymmetric numeral system (docs/format.md, section 3.8.3): plainly, and by
// vectors. An encoder walks backwards and writes words in front of those that it has written; a decoder walks forwards.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "payload.h"
#include "rans_tables.h"
#include "step.h"

namespace pulse {

constexpr size_t kRansStates = 64;
constexpr uint32_t kRansLow = 1u << 16;            // states are at least this between symbols
constexpr size_t kWordsOfGroup = 3 * kRansStates;  // at most: a symbol and two pieces of plain bits for each state

struct RansEncoder {
    const RansEntries& entries;
    ElementKind kind;
    alignas(64) uint32_t states[kRansStates];
    uint8_t* next;  // words are put in front of it
    size_t changed = 0;

    void put(uint32_t word) {
        next -= 2;
        next[0] = uint8_t(word), next[1] = uint8_t(word >> 8);
    }
};

struct RansDecoder {
    const RansEntries& entries;
    ElementKind kind;
    alignas(64) uint32_t states[kRansStates];
    const uint8_t *next, *end;
    uint32_t* positions;  // room for `most` and another group
    uint8_t* values;
    size_t found = 0, most;

    uint32_t take() {
        if (end - next < 2) throw Malformed("the code ends too early");
        const uint32_t word = uint32_t(next[0]) | uint32_t(next[1]) << 8;
        next += 2;
        return word;
    }
};

// The vectors' share, of whole groups [from, to): how many of them were coded; an encoder's are the last ones, a
// decoder's the first ones. Only where `has_rans_vectors`.
template <class U>
size_t vector_encode(RansEncoder& coder, const U* old, const U* now, size_t from, size_t to);
template <class U>
size_t vector_decode(RansDecoder& coder, const U* old, size_t from, size_t to);

}  // namespace pulse
