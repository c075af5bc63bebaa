// Fuzzes the rans codec under the address and undefined-behaviour sanitizers (make fuzz).
//
//   fuzz_rans SECONDS [SEED]
//
// Each round makes a random block (dtype, density, kind of change) in memory of exactly its length, checks that it comes
// back whole with and without vectors and that both make the same bytes, and then feeds the decoder damaged, truncated,
// extended and random payloads: each must end in Malformed or in changes that are in range and in order, the same both
// ways. Prints counts; any finding aborts with the seed of the round.
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>

#include "../../src/native/rans.h"

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
    size_t elements;
    Buffer<uint8_t> old, now;
};

Block random_block(Random& r) {
    const ElementKind kind = kKinds[below(r, std::size(kKinds))];
    const size_t elements = below(r, below(r, 10) ? 3000 : 80000), width = size_t(kind.width);
    Block b{kind, elements, Buffer<uint8_t>(elements * width), Buffer<uint8_t>(elements * width)};
    const double density = std::pow(10, -double(below(r, 300)) / 100);
    const bool alike = below(r, 2);
    const int steps = int(below(r, 3));
    const uint32_t center = uint32_t(r());
    for (size_t i = 0; i < elements; i++) {
        const uint32_t x = alike ? center + uint32_t(below(r, 1000)) : uint32_t(r());
        const bool changes = double(r() >> 11) / 9007199254740992.0 < density;
        const uint32_t size = steps == 0 ? 1 : 1u << below(r, 8 * width);
        const uint32_t y = steps == 2 ? uint32_t(r()) : below(r, 2) ? x + size : x - size;
        std::memcpy(b.old.data.get() + i * width, &x, width);
        std::memcpy(b.now.data.get() + i * width, changes ? &y : &x, width);
    }
    return b;
}

// What a payload decodes to, in values as in `old` where nothing changed; empty where it is refused.
std::vector<uint8_t> decoded(const uint8_t* payload, size_t size, const Block& b, uint64_t seed) {
    const size_t width = size_t(b.kind.width);
    std::vector<uint8_t> made(b.old.data.get(), b.old.data.get() + b.old.size);
    try {
        const DecodedSteps d = decode_steps(payload, size, b.old.data.get(), b.elements, b.kind);
        if (d.values.size != d.positions.size * width) fail("values and positions differ in number", seed);
        for (size_t i = 0; i < d.positions.size; i++) {
            if (d.positions.data[i] >= b.elements) fail("position out of range", seed);
            if (i && d.positions.data[i] <= d.positions.data[i - 1]) fail("positions not ascending", seed);
            uint8_t* const at = &made[d.positions.data[i] * width];
            if (!std::memcmp(at, d.values.data.get() + i * width, width)) fail("a change by nothing", seed);
            std::memcpy(at, d.values.data.get() + i * width, width);
        }
    } catch (const Malformed&) {
        made.clear();
    }
    return made;
}

std::vector<uint8_t> decoded_both_ways(const std::vector<uint8_t>& payload, const Block& b, uint64_t seed) {
    // A copy of exactly this size, so that the sanitizer sees a read of one byte too many.
    Buffer<uint8_t> exact(payload.size());
    if (!payload.empty()) std::memcpy(exact.data.get(), payload.data(), payload.size());
    std::vector<uint8_t> made[2];
    for (bool use : {false, true}) {
        rans_vectors = use && has_rans_vectors();
        made[use] = decoded(exact.data.get(), exact.size, b, seed);
    }
    if (made[0] != made[1]) fail("vectors decode something else", seed);
    return made[0];
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
        Encoded encoded[2];
        for (bool use : {false, true}) {
            rans_vectors = use && has_rans_vectors();
            encoded[use] = encode_steps(b.old.data.get(), b.now.data.get(), b.elements, b.kind);
        }
        const std::vector<uint8_t>& payload = encoded[0].payload;
        if (payload != encoded[1].payload || encoded[0].changed != encoded[1].changed) {
            fail("vectors make other bytes", seed);
        }
        const Spread spread = sampled_spread(b.old.data.get(), b.now.data.get(), b.elements, b.kind.width);
        if (!(spread.density >= 0 && spread.density <= 1 && spread.evenness >= 0)) fail("the spread", seed);
        if (encoded[0].changed) {
            const std::vector<uint8_t> made = decoded_both_ways(payload, b, seed);
            if (made.size() != b.now.size || std::memcmp(made.data(), b.now.data.get(), made.size())) {
                fail("round trip", seed);
            }
        }
        for (int k = 0; k < 8; k++, damaged++) {
            std::vector<uint8_t> bad = payload;
            switch (below(r, 5)) {
                case 0:
                    for (uint64_t n = 1 + below(r, 3); n && !bad.empty(); n--)
                        bad[below(r, bad.size())] ^= uint8_t(1 << below(r, 8));
                    break;
                case 1: bad.resize(below(r, bad.size() + 1)); break;
                case 2:
                    for (uint64_t n = 1 + below(r, 20); n; n--) bad.push_back(uint8_t(r()));
                    break;
                case 3:  // the head, where the tables are
                    for (uint64_t n = 1 + below(r, 3); n && !bad.empty(); n--)
                        bad[below(r, std::min<uint64_t>(bad.size(), 60))] = uint8_t(r());
                    break;
                default:
                    bad.resize(below(r, 900));
                    for (auto& x : bad) x = uint8_t(below(r, 3) ? r() : below(r, 2) * 255);
            }
            refused += decoded_both_ways(bad, b, seed).empty();
        }
    }
    std::printf(
        "%llu blocks came back whole, %llu damaged payloads: %llu refused, the rest in range; seeds %llu to %llu\n",
        (unsigned long long)rounds, (unsigned long long)damaged, (unsigned long long)refused, (unsigned long long)first,
        (unsigned long long)(first + rounds));
    return 0;
}
