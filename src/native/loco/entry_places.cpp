#include "loco/entry_places.h"

#include "common/vectors.h"

namespace pulse {
namespace {

constexpr size_t kMask = kRansStates - 1;

std::array<uint32_t, kClasses> opens_of(const OpenLevels& levels) {
    std::array<uint32_t, kClasses> opens;
    for (size_t c = 0; c < kClasses; c++) opens[c] = kOpens[levels[c]];
    return opens;
}

}  // namespace

void encode_places(RansWriter& coder, const Tile& tile, const OpenLevels& levels,
                   const uint32_t* positions, size_t& count) {
    const std::array<uint32_t, kClasses> opens = opens_of(levels);
    const auto encode = [&](size_t from, size_t to) {
        for (size_t i = to; i-- > from;) {
            const bool open = count > 0 && positions[count - 1] == tile.from + i;
            count -= open;
            coder.bit(coder.states[i & kMask], opens[tile.classes[i]], open);
        }
    };
    const size_t whole = tile.elements & ~kMask;
    encode(whole, tile.elements);
    if (vectors) return vector_encode_places(coder, tile, levels, positions, count);
    encode(0, whole);
}

void decode_places(RansReader& coder, const Tile& tile, const OpenLevels& levels,
                   uint32_t* positions, size_t& found, size_t most) {
    const std::array<uint32_t, kClasses> opens = opens_of(levels);
    size_t i = 0;
    if (vectors)
        i = kRansStates * vector_decode_places(coder, tile, levels, positions, found, most);
    while (i < tile.elements && found <= most) {
        const size_t end = std::min(i + kRansStates, tile.elements);
        for (; i < end; i++) {
            positions[found] = uint32_t(tile.from + i);
            found += coder.bit(coder.states[i & kMask], opens[tile.classes[i]]);
        }
    }
    if (found > most) throw Malformed("there are more entries than announced");
}

}  // namespace pulse
