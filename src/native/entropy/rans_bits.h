// 64 bits at a time, each by a state of an asymmetric numeral system of its own (docs/format.md, section 3.7.3).
#pragma once

#include <cstddef>
#include <cstdint>

#include "entropy/rans_states.h"

namespace pulse {

// Bit i of a batch belongs to state i; a 1 has the part [0, frequencies[i]) of 2^12, a 0 the rest. Frequencies are 0 to 2^12:
// what is certain takes no room.

constexpr size_t kInFront = 64;  // bytes that vectors may overwrite in front of the words
constexpr size_t kBehind = 128;  // bytes that they may read behind the end

// The batches from the last to the first. In front of `next` there are 2 bytes for each bit, and kInFront.
void put_bits(RansWriter& coder, const uint16_t* frequencies, const uint64_t* bits, size_t batches);

// One batch. Throws Malformed.
uint64_t take_bits(RansReader& coder, const uint16_t* frequencies);

// Appends first + i for each bit i that is set, ascending; there is room for 64. How many there were.
size_t put_ones(uint64_t bits, uint32_t first, uint32_t* out);

// Bytes of which bit k is bit i of bits[k], for i = 0 … 63 and k = 0 … 7.
void turn_bits(const uint64_t* bits, uint8_t* bytes);

// The vectors' share: all of them, or none.
bool vector_put_bits(RansWriter& coder, const uint16_t* frequencies, const uint64_t* bits,
                     size_t batches);
bool vector_take_bits(RansReader& coder, const uint16_t* frequencies, uint64_t& bits);
bool vector_put_ones(uint64_t bits, uint32_t first, uint32_t* out);
bool vector_turn_bits(const uint64_t* bits, uint8_t* bytes);

}  // namespace pulse
