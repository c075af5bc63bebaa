// What the fuzzers of this folder share: rounds, random blocks, damaged payloads, and how a finding is told.
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <memory>
#include <random>
#include <vector>

#include "codecs/codecs.h"
#include "common/vectors.h"
#include "entropy/payload.h"

namespace fuzz {

using Random = std::mt19937_64;

constexpr pulse::ElementKind kKinds[] = {
    {2, 7, 255, true}, {2, 10, 31, true}, {4, 23, 255, true}, {1, 3, 15, true},
    {1, 2, 31, true},  {1, 0, 0, false},  {2, 0, 0, false},   {4, 0, 0, false},
};

inline uint64_t below(Random& r, uint64_t n) { return n ? r() % n : 0; }

// From 0 up to 1.
inline double unit(Random& r) { return double(r() >> 11) / 9007199254740992.0; }

[[noreturn]] inline void fail(const char* what, uint64_t seed) {
    std::fprintf(stderr, "FOUND: %s (round seed %llu)\n", what, (unsigned long long)seed);
    std::abort();
}

// The rounds of a program that is called as PROGRAM SECONDS [SEED].
class Rounds {
public:
    Rounds(int argc, char** argv)
        : seconds_(argc > 1 ? std::atof(argv[1]) : 10),
          first(argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1) {}

    // Goes on to the next seed; false when the time is over.
    bool next() {
        if (std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count() >
            seconds_)
            return false;
        seed = first + count++;
        return true;
    }

private:
    const std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
    const double seconds_;

public:
    const uint64_t first;
    uint64_t seed = 0, count = 0;
};

// A copy in memory of exactly its length, so that the sanitizer sees a read of one byte too many.
class Exact {
public:
    explicit Exact(const std::vector<uint8_t>& bytes)
        : size(bytes.size()), bytes_(new uint8_t[bytes.size()]) {
        std::copy(bytes.begin(), bytes.end(), bytes_.get());
    }
    const uint8_t* data() const { return bytes_.get(); }
    const size_t size;

private:
    std::unique_ptr<uint8_t[]> bytes_;
};

// Flipped bits, truncated, extended, another head, or random bytes.
inline std::vector<uint8_t> damaged(std::vector<uint8_t> bad, Random& r) {
    switch (below(r, 5)) {
        case 0:
            for (uint64_t n = 1 + below(r, 3); n && !bad.empty(); n--) {
                bad[below(r, bad.size())] ^= uint8_t(1 << below(r, 8));
            }
            break;
        case 1: bad.resize(below(r, bad.size() + 1)); break;
        case 2:
            for (uint64_t n = 1 + below(r, 20); n; n--) bad.push_back(uint8_t(r()));
            break;
        case 3:
            for (uint64_t n = 1 + below(r, 3); n && !bad.empty(); n--) {
                bad[below(r, std::min<uint64_t>(bad.size(), 60))] = uint8_t(r());
            }
            break;
        default:
            bad.resize(below(r, below(r, 2) ? 200 : 900));
            for (auto& x : bad) x = uint8_t(below(r, 3) ? r() : below(r, 2) * 255);
    }
    return bad;
}

// One to four tensors in rows of any length.
inline std::vector<pulse::Run> random_runs(Random& r, uint64_t most) {
    std::vector<pulse::Run> runs;
    for (uint64_t n = 1 + below(r, 4); n; n--) {
        const uint64_t row = 1 + below(r, below(r, 2) ? 50 : 5000);
        runs.push_back({below(r, most), row, below(r, row)});
    }
    return runs;
}

// Elements before and after, in memory of exactly their length.
struct Block {
    pulse::ElementKind kind;
    std::vector<pulse::Run> runs;
    size_t elements;
    std::vector<uint8_t> before, after;
    Exact old, now;

    Block(pulse::ElementKind kind_, std::vector<pulse::Run> runs_, std::vector<uint8_t> before_,
          std::vector<uint8_t> after_)
        : kind(kind_),
          runs(std::move(runs_)),
          elements(before_.size() / size_t(kind.width)),
          before(std::move(before_)),
          after(std::move(after_)),
          old(before),
          now(after) {}
};

inline uint32_t element(const std::vector<uint8_t>& bytes, size_t at, int width) {
    uint32_t x = 0;
    std::memcpy(&x, &bytes[at * size_t(width)], size_t(width));
    return x;
}

inline void append(std::vector<uint8_t>& bytes, uint32_t element, int width) {
    const uint8_t* const from = reinterpret_cast<const uint8_t*>(&element);
    bytes.insert(bytes.end(), from, from + width);
}

// A block of any dtype and runs; from few changes to every element, by one step or by any.
inline Block random_block(Random& r) {
    const pulse::ElementKind kind = kKinds[below(r, std::size(kKinds))];
    std::vector<pulse::Run> runs = random_runs(r, below(r, 20) ? 3000 : 40000);
    const double density = std::pow(10, -double(below(r, 500)) / 100);
    const bool alike = below(r, 2);
    const uint64_t steps = below(r, 4);
    const uint32_t center = uint32_t(r());
    std::vector<uint8_t> before, after;
    for (const pulse::Run& run : runs) {
        for (uint64_t i = 0; i < run.elements; i++) {
            const uint32_t x = alike ? center + uint32_t(below(r, 1000)) : uint32_t(r());
            const uint32_t size = steps == 1 ? 1u << below(r, 8 * uint64_t(kind.width)) : 1;
            const uint32_t y = steps == 0 ? uint32_t(r()) : below(r, 2) ? x + size : x - size;
            append(before, x, kind.width);
            append(after, unit(r) < density ? y : x, kind.width);
        }
    }
    return Block(kind, std::move(runs), std::move(before), std::move(after));
}

inline void check_positions(const uint32_t* positions, size_t count, size_t elements,
                            uint64_t seed) {
    for (size_t i = 0; i < count; i++) {
        if (positions[i] >= elements) fail("position out of range", seed);
        if (i && positions[i] <= positions[i - 1]) fail("positions not ascending", seed);
    }
}

// The elements after changes, which are in range and in order, and changes.
inline std::vector<uint8_t> changed(const Block& b, const uint32_t* positions, size_t count,
                                    const uint8_t* values, size_t bytes, const uint8_t* before,
                                    size_t bytes_before, uint64_t seed) {
    const size_t width = size_t(b.kind.width);
    if (bytes != count * width || bytes_before != bytes)
        fail("values and positions differ in number", seed);
    check_positions(positions, count, b.elements, seed);
    std::vector<uint8_t> made = b.before;
    for (size_t i = 0; i < count; i++) {
        uint8_t* const at = &made[positions[i] * width];
        if (!std::memcmp(at, values + i * width, width)) fail("a change by nothing", seed);
        if (std::memcmp(at, before + i * width, width)) fail("other old bits", seed);
        std::memcpy(at, values + i * width, width);
    }
    return made;
}
inline std::vector<uint8_t> changed(const Block& b, const pulse::Decoded& d, uint64_t seed) {
    return changed(b, d.positions.data.get(), d.positions.size, d.values.data.get(), d.values.size,
                   d.before.data.get(), d.before.size, seed);
}

// What a codec makes of a block, with vectors and without: the same payload.
template <class Encode>
auto encoded_both_ways(Encode&& encode, uint64_t seed) {
    pulse::use_vectors(false);
    auto plain = encode();
    pulse::use_vectors(true);
    const auto by_vectors = encode();
    if (plain.payload != by_vectors.payload || plain.changed != by_vectors.changed) {
        fail("vectors make other bytes", seed);
    }
    return plain;
}

// The elements that `decode` makes of a payload, with vectors and without; empty where both refuse it.
template <class Decode>
std::vector<uint8_t> decoded_both_ways(const std::vector<uint8_t>& payload, Decode&& decode,
                                       uint64_t seed) {
    const Exact exact(payload);
    std::vector<uint8_t> made[2];
    for (const bool use : {false, true}) {
        pulse::use_vectors(use);
        try {
            made[use] = decode(exact);
        } catch (const pulse::Malformed&) {
        }
    }
    if (made[0] != made[1]) fail("vectors decode something else", seed);
    return made[0];
}

// How many damaged payloads there were, and how many of them were refused.
struct Damaged {
    uint64_t bad = 0, refused = 0;

    template <class Decode>
    void try_some(const std::vector<uint8_t>& payload, Decode&& decode, Random& r, uint64_t seed) {
        for (int k = 0; k < 8; k++) count(damaged(payload, r), decode, seed);
    }
    template <class Decode>
    void count(const std::vector<uint8_t>& payload, Decode&& decode, uint64_t seed) {
        bad++;
        refused += decoded_both_ways(payload, decode, seed).empty();
    }
};

// `more`: what else is to be said of the blocks.
inline void print_counts(const Rounds& rounds, const char* more, uint64_t damaged,
                         uint64_t refused) {
    std::printf(
        "%llu blocks came back whole%s, %llu damaged payloads: %llu refused, the rest in range; seeds %llu to %llu\n",
        (unsigned long long)rounds.count, more, (unsigned long long)damaged,
        (unsigned long long)refused, (unsigned long long)rounds.first,
        (unsigned long long)(rounds.first + rounds.count));
}

}  // namespace fuzz
