#include "leaves.h"

#include <algorithm>
#include <cstring>

namespace pulse {
namespace {

struct Leaves {
    std::vector<const uint8_t*> data;
    std::vector<size_t> sizes, starts;  // `starts`: bytes of the pieces before it

    Leaves(const std::vector<Piece>& pieces, size_t leaf) {
        size_t base = 0;
        for (const Piece& piece : pieces) {
            for (size_t at = 0; at < piece.bytes; at += leaf) {
                data.push_back(piece.data + at);
                sizes.push_back(std::min(leaf, piece.bytes - at));
                starts.push_back(base + at);
            }
            base += piece.bytes;
        }
    }
};

}  // namespace

std::vector<uint8_t> leaf_digests(const std::vector<Piece>& pieces, size_t leaf, const Sha256Plan& plan) {
    const Leaves leaves(pieces, leaf);
    std::vector<uint8_t> digests(kSha256Digest * leaves.data.size());
    sha256_messages(plan, leaves.sizes.data(), leaves.sizes.size(), leaf, digests.data(),
                    [&](size_t message, size_t at, size_t, int) { return leaves.data[message] + at; });
    return digests;
}

std::vector<uint8_t> message_digests(const std::vector<std::vector<Piece>>& messages, const Sha256Plan& plan) {
    constexpr size_t kTile = 16384, kStride = kTile + 64;
    struct Place {
        size_t piece = 0, at = 0;
    };
    std::vector<Place> places(messages.size());
    std::vector<size_t> sizes;
    for (const auto& pieces : messages) {
        sizes.push_back(0);
        for (const Piece& piece : pieces) sizes.back() += piece.bytes;
    }
    std::vector<uint8_t> digests(kSha256Digest * messages.size()), room(kStride * kMostLanes);
    sha256_messages(plan, sizes.data(), sizes.size(), kTile, digests.data(),
                    [&](size_t message, size_t, size_t bytes, int lane) -> const uint8_t* {
                        const std::vector<Piece>& pieces = messages[message];
                        Place& place = places[message];
                        while (place.at == pieces[place.piece].bytes) place = {place.piece + 1, 0};
                        if (pieces[place.piece].bytes - place.at >= bytes) {
                            place.at += bytes;
                            return pieces[place.piece].data + place.at - bytes;
                        }
                        uint8_t* tile = room.data() + kStride * size_t(lane);
                        for (size_t done = 0; done < bytes;) {
                            while (place.at == pieces[place.piece].bytes) place = {place.piece + 1, 0};
                            const size_t part = std::min(bytes - done, pieces[place.piece].bytes - place.at);
                            std::memcpy(tile + done, pieces[place.piece].data + place.at, part);
                            place.at += part;
                            done += part;
                        }
                        return tile;
                    });
    return digests;
}

namespace {

template <size_t width>
std::vector<uint8_t> digests_with(const std::vector<Piece>& pieces, size_t leaf, const Patchwork& changes,
                                  const Sha256Plan& plan) {
    // A lane's tile starts at another line of the cache than its neighbour's: equal ones would throw each other out.
    constexpr size_t kTile = 1024, kStride = kTile + 64;
    const Leaves leaves(pieces, leaf);
    std::vector<uint8_t> digests(kSha256Digest * leaves.data.size()), room(kStride * kMostLanes);
    std::vector<size_t> next(leaves.data.size());  // the first change that a leaf has not seen
    for (size_t k = 0; k < next.size(); k++) {
        const uint32_t* end = changes.positions + changes.count;
        next[k] = size_t(std::lower_bound(changes.positions, end, leaves.starts[k] / width) - changes.positions);
    }
    sha256_messages(plan, leaves.sizes.data(), leaves.sizes.size(), kTile, digests.data(),
                    [&](size_t message, size_t at, size_t bytes, int lane) {
                        uint8_t* tile = room.data() + kStride * size_t(lane);
                        std::memcpy(tile, leaves.data[message] + at, bytes);
                        const uint8_t* const behind = leaves.data[message] + at + bytes;
                        for (size_t ahead = 0; ahead < bytes; ahead += 64) __builtin_prefetch(behind + ahead);
                        const size_t start = leaves.starts[message] + at;
                        size_t& k = next[message];
                        for (; k < changes.count; k++) {
                            const size_t place = changes.positions[k] * width - start;
                            if (place >= bytes) break;
                            std::memcpy(tile + place, changes.values + k * width, width);
                        }
                        return tile;
                    });
    return digests;
}

}  // namespace

std::vector<uint8_t> changed_leaf_digests(const std::vector<Piece>& pieces, size_t leaf, const Patchwork& changes,
                                          const Sha256Plan& plan) {
    switch (changes.width) {
        case 1: return digests_with<1>(pieces, leaf, changes, plan);
        case 2: return digests_with<2>(pieces, leaf, changes, plan);
        case 4: return digests_with<4>(pieces, leaf, changes, plan);
        default: return digests_with<8>(pieces, leaf, changes, plan);
    }
}

}  // namespace pulse
