// Fuzzes the leaves' SHA-256 under the address and undefined-behavior sanitizers (make fuzz).
//
//   fuzz_sha256 SECONDS [SEED]
//
// Each round hashes random pieces on every path of this processor, as they are and with changes, from memory of exactly
// their length; each must give the digests of the plain path, one leaf at a time, of the changed bytes. Prints counts; any
// finding aborts with the seed of the round.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>

#include "hash/leaves.h"

using namespace pulse;
using Random = std::mt19937_64;

namespace {

uint64_t below(Random& r, uint64_t n) { return n ? r() % n : 0; }

void fail(const char* what, const std::string& path, uint64_t seed) {
    std::fprintf(stderr, "FOUND: %s, path %s (round seed %llu)\n", what, path.c_str(),
                 (unsigned long long)seed);
    std::abort();
}

std::vector<uint8_t> one_by_one(const std::vector<std::vector<uint8_t>>& pieces, size_t leaf) {
    std::vector<uint8_t> all;
    for (const auto& piece : pieces) {
        for (size_t at = 0; at < piece.size(); at += leaf) {
            const auto part = leaf_digests({{&piece[at], std::min(leaf, piece.size() - at)}}, leaf,
                                           *sha256_plan("portable"));
            all.insert(all.end(), part.begin(), part.end());
        }
    }
    return all;
}

}  // namespace

int main(int argc, char** argv) {
    const double seconds = argc > 1 ? std::atof(argv[1]) : 10;
    const uint64_t first = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
    const auto begin = std::chrono::steady_clock::now();
    std::vector<std::string> paths = sha256_paths();
    paths.push_back("");
    uint64_t seed = first, digests = 0;
    for (;; seed++) {
        if (std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() >
            seconds)
            break;
        Random r(seed);
        const size_t leaf = kSha256Block << below(r, 9), width = size_t(1) << below(r, 4);
        std::vector<std::vector<uint8_t>> contents(1 + below(r, 30));
        std::vector<std::unique_ptr<uint8_t[]>> exact;
        std::vector<Piece> pieces;
        size_t total = 0;
        for (auto& content : contents) {
            content.resize(width * below(r, below(r, 2) ? 200 : 3000));
            for (auto& byte : content) byte = uint8_t(r());
            total += content.size() / width;
            exact.emplace_back(new uint8_t[content.size()]);
            if (!content.empty()) std::memcpy(exact.back().get(), content.data(), content.size());
            pieces.push_back({exact.back().get(), content.size()});
        }
        std::vector<uint32_t> positions;
        const uint64_t gap = 1 + below(r, 3000);
        for (uint64_t at = below(r, gap); at < total; at += 1 + below(r, gap))
            positions.push_back(uint32_t(at));
        std::vector<uint8_t> values(positions.size() * width);
        for (auto& byte : values) byte = uint8_t(r());
        const std::vector<uint8_t> plain = one_by_one(contents, leaf);
        std::vector<Patched> patched;
        size_t base = 0, k = 0;
        for (size_t i = 0; i < contents.size(); i++) {
            std::vector<uint8_t>& content = contents[i];
            const size_t from = k;
            for (; k < positions.size() && positions[k] < base + content.size() / width; k++) {
                std::memcpy(&content[(positions[k] - base) * width], &values[k * width], width);
            }
            patched.push_back({pieces[i], positions.data() + from, uint32_t(base),
                               values.data() + from * width, k - from});
            base += content.size() / width;
        }
        const std::vector<uint8_t> changed = one_by_one(contents, leaf);
        for (const std::string& path : paths) {
            const Sha256Plan& plan = *sha256_plan(path);
            if (leaf_digests(pieces, leaf, plan) != plain) fail("leaves", path, seed);
            if (changed_leaf_digests(patched, leaf, int(width), plan) != changed)
                fail("changed leaves", path, seed);
            digests += 2 * plain.size() / kSha256Digest;
        }
    }
    std::printf("%llu digests on the paths", (unsigned long long)digests);
    for (const std::string& path : paths)
        std::printf(" %s", path.empty() ? "(fastest)" : path.c_str());
    std::printf(": all equal; seeds %llu to %llu\n", (unsigned long long)first,
                (unsigned long long)seed);
    return 0;
}
