#include "hash/leaves.h"

#include <algorithm>
#include <cstring>

#include "common/types.h"

namespace pulse {

std::vector<uint8_t> leaf_digests(const std::vector<Piece>& pieces, size_t leaf,
                                  const Sha256Plan& plan) {
    std::vector<std::vector<Piece>> leaves;
    for (const Piece& piece : pieces) {
        for (size_t at = 0; at < piece.bytes; at += leaf)
            leaves.push_back({{piece.data + at, std::min(leaf, piece.bytes - at)}});
    }
    return message_digests(leaves, plan);
}

std::vector<uint8_t> message_digests(const std::vector<std::vector<Piece>>& messages,
                                     const Sha256Plan& plan) {
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
                            while (place.at == pieces[place.piece].bytes)
                                place = {place.piece + 1, 0};
                            const size_t part =
                                std::min(bytes - done, pieces[place.piece].bytes - place.at);
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
std::vector<uint8_t> digests_with(const std::vector<Patched>& pieces, size_t leaf,
                                  const Sha256Plan& plan) {
    // A lane's tile starts at another line of the cache than its neighbor's: equal ones would throw each other out.
    constexpr size_t kTile = 1024, kStride = kTile + 64;
    struct Source {
        const uint8_t* data;
        size_t start;     // of the leaf, in its piece
        size_t next = 0;  // the first change that has not been seen
        const Patched* of;
    };
    std::vector<Source> sources;
    std::vector<size_t> sizes;
    for (const Patched& patched : pieces) {
        const Piece& piece = patched.piece;
        for (size_t at = 0; at < piece.bytes; at += leaf) {
            const uint32_t *const first = patched.positions, *const end = first + patched.count;
            const size_t next =
                size_t(std::lower_bound(first, end, patched.base + at / width) - first);
            sources.push_back({piece.data + at, at, next, &patched});
            sizes.push_back(std::min(leaf, piece.bytes - at));
        }
    }
    std::vector<uint8_t> digests(kSha256Digest * sources.size()), room(kStride * kMostLanes);
    sha256_messages(plan, sizes.data(), sizes.size(), kTile, digests.data(),
                    [&](size_t message, size_t at, size_t bytes, int lane) -> const uint8_t* {
                        Source& source = sources[message];
                        const Patched& patched = *source.of;
                        const uint8_t *const data = source.data + at, *const behind = data + bytes;
                        for (size_t ahead = 0; ahead < bytes; ahead += 64)
                            __builtin_prefetch(behind + ahead);
                        const size_t start = source.start + at;
                        const auto place = [&] {
                            return (patched.positions[source.next] - patched.base) * width - start;
                        };
                        if (source.next == patched.count || place() >= bytes) return data;
                        uint8_t* const tile = room.data() + kStride * size_t(lane);
                        std::memcpy(tile, data, bytes);
                        for (; source.next < patched.count && place() < bytes; source.next++) {
                            std::memcpy(tile + place(), patched.values + source.next * width,
                                        width);
                        }
                        return tile;
                    });
    return digests;
}

}  // namespace

std::vector<uint8_t> changed_leaf_digests(const std::vector<Patched>& pieces, size_t leaf,
                                          int width, const Sha256Plan& plan) {
    return for_any_width(width,
                         [&](auto zero) { return digests_with<sizeof(zero)>(pieces, leaf, plan); });
}

}  // namespace pulse
