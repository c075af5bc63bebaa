// Bits by the 64 states of an asymmetric numeral system, 64 at a time, or one by one (docs/format.md, section 3.7.3).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "entropy/levels.h"
#include "entropy/rans_states.h"

namespace pulse {

// Bit i of a batch belongs to state i; a 1 has the part [0, frequencies[i]) of 2^12, a 0 the rest. Frequencies are 0 to 2^12:
// what is certain takes no room.

constexpr size_t kInFront = 64;  // bytes that vectors may overwrite in front of the words
constexpr size_t kBehind = 128;  // bytes that they may read behind the end

inline size_t batches_of(size_t count) { return (count + kRansStates - 1) / kRansStates; }

// The batches from the last to the first. In front of `next` there are 2 bytes for each bit, and kInFront.
void put_bits(RansWriter& coder, const uint16_t* frequencies, const uint64_t* bits, size_t batches);

// One batch. Throws Malformed.
uint64_t take_bits(RansReader& coder, const uint16_t* frequencies);

// Of a batch of `count` bits, at most 64, whose frequencies are frequency_of(0), …
template <class FrequencyOf>
uint64_t take_bits(RansReader& coder, size_t count, FrequencyOf&& frequency_of) {
    uint16_t frequencies[kRansStates] = {};
    for (size_t k = 0; k < count; k++) frequencies[k] = frequency_of(k);
    return take_bits(coder, frequencies);
}

// Appends first + i for each bit i that is set, ascending; there is room for 64. How many there were.
size_t put_ones(uint64_t bits, uint32_t first, uint32_t* out);

// Bytes of which bit k is bit i of bits[k], for i = 0 … 63 and k = 0 … 7.
void turn_bits(const uint64_t* bits, uint8_t* bytes);

// The same by vectors.
void vector_put_bits(RansWriter& coder, const uint16_t* frequencies, const uint64_t* bits,
                     size_t batches);
uint64_t vector_take_bits(RansReader& coder, const uint16_t* frequencies);
void vector_put_ones(uint64_t bits, uint32_t first, uint32_t* out);
void vector_turn_bits(const uint64_t* bits, uint8_t* bytes);

// Bits one by one, by single states and the chances of levels: sizes that are rare. `state` is the one to use next. The
// writer keeps what a decoder reads first in front.
struct PieceWriter {
    struct Piece {
        uint32_t state, frequency;
        bool one;
    };
    std::vector<Piece> pieces;
    uint32_t state = 0;

    bool bit(uint8_t level, bool value) {
        pieces.push_back({state, chance(level), value});
        return value;
    }
    void next_state() { state = (state + 1) % kRansStates; }
    void put(RansWriter& coder) const {
        for (size_t i = pieces.size(); i-- > 0;)
            coder.bit(coder.states[pieces[i].state], pieces[i].frequency, pieces[i].one);
    }
};

struct PieceReader {
    RansReader& coder;
    uint32_t state = 0;

    bool bit(uint8_t level, bool) { return coder.bit(coder.states[state], chance(level)); }
    void next_state() { state = (state + 1) % kRansStates; }
};

}  // namespace pulse
