// Fuzzes the native codec under the address and undefined-behaviour sanitizers (make fuzz).
//
//   fuzz_context SECONDS [SEED]
//
// Each round makes a random block (dtype, runs, density, kind of change), checks that it comes back whole, and then feeds
// the decoder damaged, truncated, extended and random payloads: each must end in Malformed or in changes that are in range
// and in order. Prints counts; any finding aborts with the seed of the round.
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>

#include "../../src/native/context.h"
#include "../../src/native/scan.h"
#include "../../src/native/weight_sum.h"

using namespace pulse;
using Random = std::mt19937_64;

namespace {

constexpr ElementKind kKinds[] = {
    {2, 7, 255, true}, {2, 10, 31, true}, {4, 23, 255, true}, {1, 3, 15, true},
    {1, 2, 31, true},  {1, 0, 0, false},  {2, 0, 0, false},   {4, 0, 0, false},
};

uint64_t below(Random& r, uint64_t n) { return n ? r() % n : 0; }

void fail(const char* what, uint64_t seed) {
    std::fprintf(stderr, "FOUND: %s (round seed %llu)\n", what, (unsigned long long)seed);
    std::abort();
}

struct Block {
    ElementKind kind;
    std::vector<Run> runs;
    std::vector<uint32_t> old, now;  // widened

    std::vector<uint8_t> bf16(const std::vector<uint32_t>& values) const {
        std::vector<uint8_t> bytes(values.size() * kind.width + 1);
        for (size_t i = 0; i < values.size(); i++) std::memcpy(&bytes[i * kind.width], &values[i], kind.width);
        return bytes;
    }
};

Block random_block(Random& r) {
    Block b{kKinds[below(r, std::size(kKinds))], {}, {}, {}};
    const uint64_t most = below(r, 20) ? 3000 : 40000;
    for (uint64_t n = 1 + below(r, 4); n; n--) {
        const uint64_t row = 1 + below(r, below(r, 2) ? 50 : 5000);
        b.runs.push_back({below(r, most), row, below(r, row)});
    }
    const uint32_t full = b.kind.width == 4 ? ~0u : (1u << (8 * b.kind.width)) - 1;
    const double density = std::pow(10, -double(below(r, 500)) / 100);
    const bool alike = below(r, 2), steps = below(r, 3);
    const uint32_t center = uint32_t(r());
    for (const Run& run : b.runs) {
        for (uint64_t i = 0; i < run.elements; i++) {
            const uint32_t x = (alike ? center + uint32_t(below(r, 1000)) : uint32_t(r())) & full;
            const bool changes = double(r() >> 11) / 9007199254740992.0 < density;
            const uint32_t y = steps ? x + (below(r, 2) ? 1u : ~0u) : uint32_t(r());
            b.old.push_back(x);
            b.now.push_back(changes ? y & full : x);
        }
    }
    return b;
}

void check_decoded(const Decoded& d, const Block& b, uint64_t seed) {
    if (d.values.size() != d.positions.size() * b.kind.width) fail("values and positions differ in number", seed);
    for (size_t i = 0; i < d.positions.size(); i++) {
        if (d.positions[i] >= b.old.size()) fail("position out of range", seed);
        if (i && d.positions[i] <= d.positions[i - 1]) fail("positions not ascending", seed);
    }
}

}  // namespace

int main(int argc, char** argv) {
    const double seconds = argc > 1 ? std::atof(argv[1]) : 10;
    const uint64_t first = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
    const auto begin = std::chrono::steady_clock::now();
    uint64_t rounds = 0, damaged = 0, refused = 0;
    for (uint64_t seed = first;; seed++, rounds++) {
        if (std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() > seconds) break;
        Random r(seed);
        const Block b = random_block(r);
        const std::vector<uint8_t> old = b.bf16(b.old), now = b.bf16(b.now);
        const auto use_vectors = [](bool use) {
            scan_vectors = use && has_scan_vectors();
            weight_vectors = use && has_weight_vectors();
        };
        use_vectors(false);
        const Encoded encoded = encode_block(old.data(), now.data(), b.kind, b.runs);
        use_vectors(true);
        if (encode_block(old.data(), now.data(), b.kind, b.runs).payload != encoded.payload) {
            fail("vectors make other bytes", seed);
        }
        use_vectors(below(r, 2));
        if (encoded.changed) {
            const Decoded d = decode_block(encoded.payload.data(), encoded.payload.size(), old.data(), b.kind, b.runs);
            check_decoded(d, b, seed);
            std::vector<uint8_t> made = old;
            for (size_t i = 0; i < d.positions.size(); i++) {
                std::memcpy(&made[d.positions[i] * b.kind.width], &d.values[i * b.kind.width], b.kind.width);
            }
            if (made != now || d.positions.size() != encoded.changed) fail("round trip", seed);
        }
        for (int k = 0; k < 8; k++, damaged++) {
            std::vector<uint8_t> bad = encoded.payload;
            switch (below(r, 4)) {
                case 0:
                    for (uint64_t n = 1 + below(r, 3); n && !bad.empty(); n--)
                        bad[below(r, bad.size())] ^= 1 << below(r, 8);
                    break;
                case 1: bad.resize(below(r, bad.size() + 1)); break;
                case 2:
                    for (uint64_t n = 1 + below(r, 20); n; n--) bad.push_back(uint8_t(r()));
                    break;
                default:
                    bad.resize(below(r, 200));
                    for (auto& x : bad) x = uint8_t(below(r, 3) ? r() : below(r, 2) * 255);
            }
            // A copy of exactly this size, so that the sanitizer sees a read of one byte too many.
            uint8_t* exact = static_cast<uint8_t*>(std::malloc(bad.size() ? bad.size() : 1));
            std::memcpy(exact, bad.data(), bad.size());
            try {
                check_decoded(decode_block(exact, bad.size(), old.data(), b.kind, b.runs), b, seed);
            } catch (const Malformed&) {
                refused++;
            }
            std::free(exact);
        }
    }
    std::printf(
        "%llu blocks came back whole, %llu damaged payloads: %llu refused, the rest in range; seeds %llu to %llu\n",
        (unsigned long long)rounds, (unsigned long long)damaged, (unsigned long long)refused, (unsigned long long)first,
        (unsigned long long)(first + rounds));
    return 0;
}
