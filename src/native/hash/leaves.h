// The leaves of the SHA-256 tree (docs/format.md, section 2): many at once, as they are or with changes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "hash/sha256.h"

namespace pulse {

struct Piece {
    const uint8_t* data;
    size_t bytes;
};

// The digests of all leaves of `leaf` bytes, a piece's last one shorter, one after another.
std::vector<uint8_t> leaf_digests(const std::vector<Piece>& pieces, size_t leaf,
                                  const Sha256Plan& plan);

// The digest of each message, whose pieces lie apart.
std::vector<uint8_t> message_digests(const std::vector<std::vector<Piece>>& messages,
                                     const Sha256Plan& plan);

// Changes of the elements of a piece: the values of those at `positions`, ascending, less `base`.
struct Patched {
    Piece piece;
    const uint32_t* positions;
    uint32_t base;
    const uint8_t* values;
    size_t count;
};

// The same of the pieces, of elements of `width` bytes, with their changes made, which stay in the cache; the pieces
// themselves stay as they are.
std::vector<uint8_t> changed_leaf_digests(const std::vector<Patched>& pieces, size_t leaf,
                                          int width, const Sha256Plan& plan);

}  // namespace pulse
