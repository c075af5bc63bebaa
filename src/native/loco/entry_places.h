// Which elements of a block are entries: one binary symbol an element, by the frequency that belongs to its class
// (docs/loco.md, section 3.2).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "entropy/rans_states.h"
#include "entropy/weights.h"

namespace pulse {

// Of 2^12: how often an element of a class of each level is an entry. Half octaves of the chance, or of its opposite.
// Level 0 is that of classes without entries.
constexpr int kOpenLevels = 32;
constexpr std::array<uint16_t, kOpenLevels> kOpens = {
    0,   1,   2,   3,   4,    6,    8,    11,   16,   23,   32,   45,   64,   91,   128,  181,
    256, 362, 512, 724, 1024, 1448, 2048, 2648, 3072, 3372, 3584, 3734, 3840, 3936, 4032, 4080};
using OpenLevels = std::array<uint8_t, kClasses>;

// A window of a block: the classes of `elements` from number `from` on, which is a multiple of 64.
struct Tile {
    const uint8_t* classes;
    size_t from, elements;
};

// `positions` ascend; those in the tile are the last ones of `count`, which falls by as many. They are of elements whose
// classes have entries. Tiles are encoded from the last one to the first.
void encode_places(RansWriter& coder, const Tile& tile, const OpenLevels& levels,
                   const uint32_t* positions, size_t& count);

// What a decoder's vectors may read behind the words.
constexpr size_t kWordsPadding = 2 * kRansStates + 32;

// Puts the positions behind the `found` ones in `positions`, which has room for `most` and 64 more. Throws Malformed if
// they are more.
void decode_places(RansReader& coder, const Tile& tile, const OpenLevels& levels,
                   uint32_t* positions, size_t& found, size_t most);

// The vectors' share of a tile's whole groups of 64: an encoder's all; a decoder's first ones, which it counts.
void vector_encode_places(RansWriter& coder, const Tile& tile, const OpenLevels& levels,
                          const uint32_t* positions, size_t& count);
size_t vector_decode_places(RansReader& coder, const Tile& tile, const OpenLevels& levels,
                            uint32_t* positions, size_t& found, size_t most);

}  // namespace pulse
