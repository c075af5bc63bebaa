// Fuzzes the groups codec under the address and undefined-behavior sanitizers (make fuzz).
//
//   fuzz_sparse SECONDS [SEED]
//
// Each round makes a random block (dtype, runs, chance to change by class, kind of change), large enough to be coded by
// groups, in memory of exactly its length, checks that it comes back whole with and without vectors and that both make the
// same bytes, and then feeds the decoder damaged, truncated, extended, renumbered and random payloads: each must end in
// Malformed or in changes that are in range and in order, the same both ways. Prints counts; any finding aborts with the
// seed of the round.
#include "codecs/block.h"

#include "harness.h"

using namespace fuzz;
using namespace pulse;

namespace {

uint32_t random_step(Random& r, uint64_t kind, int width) {
    const uint64_t bits = 8 * uint64_t(width);
    const uint32_t size = kind == 0                  ? 1
                          : kind == 1                ? 1u << below(r, bits)
                          : kind == 2                ? uint32_t(1 + below(r, 8))
                          : kind == 3 && below(r, 8) ? 1
                                                     : uint32_t(r());
    return below(r, 2) ? size : 0 - size;
}

// Another number of changes, and perhaps random bytes behind some place: what follows the head is read for longer.
std::vector<uint8_t> renumbered(const std::vector<uint8_t>& payload, size_t elements, Random& r) {
    size_t at = 0;
    while (at < payload.size() && payload[at] >= 128) at++;
    std::vector<uint8_t> bad;
    put_varint(bad, 1 + below(r, elements));
    bad.insert(bad.end(), payload.begin() + std::ptrdiff_t(std::min(at + 1, payload.size())),
               payload.end());
    const size_t from = std::min(size_t(20 + below(r, below(r, 2) ? 600 : bad.size())), bad.size());
    switch (below(r, 4)) {
        case 0: break;
        case 1: bad.resize(from); break;
        case 2: bad.resize(bad.size() + below(r, 300), uint8_t(r())); [[fallthrough]];
        default:
            std::generate(bad.begin() + std::ptrdiff_t(from), bad.end(),
                          [&] { return uint8_t(r()); });
    }
    return bad;
}

// Elements of which at most one in sixteen changes, seldom or often by class; now and then too few or too many.
Block sparse_block(Random& r) {
    const ElementKind kind = kKinds[below(r, std::size(kKinds))];
    const uint64_t most = below(r, 8) ? 60000 : below(r, 4) ? 200000 : 3000;
    std::vector<Run> runs;
    for (uint64_t n = 1 + below(r, 6); n; n--) {
        const uint64_t row = 1 + below(r, below(r, 2) ? 50 : 5000);
        runs.push_back({below(r, below(r, 3) ? most : 20), row, below(r, row)});
    }
    uint64_t count = 0;
    for (const Run& run : runs) count += run.elements;
    if (count < 72000 && below(r, 20)) {
        runs.push_back({72000 + below(r, 9000), 700, 5});
        count += runs.back().elements;
    }

    const double density = std::min(0.0615, 4300.0 / double(count + 1) * (1 + 3 * unit(r)));
    const bool by_class = below(r, 2), in_part = !below(r, 8);
    const uint64_t steps = below(r, 5), likeness = below(r, 4);
    const uint32_t center = uint32_t(r());
    const uint64_t span = 1 + below(r, 160);
    double of_class[256];
    for (double& d : of_class) d = by_class ? 0.08 * unit(r) * double(below(r, 3) > 0) : density;
    std::vector<uint8_t> before, after;
    for (const Run& run : runs) {
        for (uint64_t i = 0; i < run.elements; i++) {
            const uint32_t x = likeness == 0   ? uint32_t(r())
                               : likeness == 1 ? center + uint32_t(below(r, 1000))
                               : likeness == 2
                                   ? (40u + uint32_t(below(r, span))) << kind.shift |
                                         uint32_t(below(r, 1u << kind.shift))
                                   : (127u - uint32_t(below(r, 9) + below(r, 9))) << kind.shift |
                                         uint32_t(below(r, 1u << kind.shift));
            const double chance =
                in_part ? (i < run.elements / 32 || !i) : of_class[(x >> kind.shift) & kind.mask];
            append(before, x, kind.width);
            append(after, unit(r) < chance ? x + random_step(r, steps, kind.width) : x, kind.width);
        }
    }
    return Block(kind, std::move(runs), std::move(before), std::move(after));
}

// Equal elements, of which one in eight changes by one step in every few batches of 512: all states go the same way.
Block regular_block(Random& r) {
    const ElementKind kind = kKinds[below(r, std::size(kKinds))];
    const uint64_t batches = 150 + below(r, 400), every = 2 + below(r, 12), behind = below(r, 520),
                   place = below(r, 8);
    const uint32_t x = uint32_t(r()) & 0x3c003c00u;
    std::vector<uint8_t> before, after;
    for (uint64_t i = 0; i < 512 * batches + behind; i++) {
        append(before, x, kind.width);
        append(after, i / 512 % every == 0 && i % 8 == place ? x + 1 : x, kind.width);
    }
    const std::vector<Run> runs{
        {512 * batches + behind, below(r, 2) ? uint64_t(4096) : uint64_t(1) << 24, 0}};
    return Block(kind, runs, std::move(before), std::move(after));
}

}  // namespace

int main(int argc, char** argv) {
    Damaged tried;
    uint64_t by_groups = 0;
    Rounds rounds(argc, argv);
    while (rounds.next()) {
        const uint64_t seed = rounds.seed;
        Random r(seed);
        const Block b = below(r, 4) ? sparse_block(r) : regular_block(r);
        BlockCodec codecs[2];
        const EncodedBlock encoded = encoded_both_ways(
            [&, way = 0]() mutable {
                EncodedBlock made =
                    encode_block({}, b.old.data(), b.now.data(), b.kind, b.runs, false);
                codecs[way++] = made.codec;
                return made;
            },
            seed);
        if (codecs[0] != codecs[1]) fail("vectors choose another codec", seed);
        const auto decode = [&](const Exact& payload) {
            return changed(
                b, decode_sparse(payload.data(), payload.size, b.old.data(), b.kind, b.runs), seed);
        };
        std::vector<uint8_t> payload;  // empty where another codec suits better
        if (encoded.codec == BlockCodec::sparse) {
            payload = encoded.payload;
            by_groups += !payload.empty();
            if (!payload.empty() && decoded_both_ways(payload, decode, seed) != b.after)
                fail("round trip", seed);
        }
        tried.try_some(payload, decode, r, seed);
        if (b.elements) {
            for (int k = 0; k < 8; k++)
                tried.count(renumbered(payload, b.elements, r), decode, seed);
        }
    }
    char more[60];
    std::snprintf(more, sizeof more, ", %llu of them by groups", (unsigned long long)by_groups);
    print_counts(rounds, more, tried.bad, tried.refused);
    return 0;
}
