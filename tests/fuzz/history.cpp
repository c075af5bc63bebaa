// Fuzzes the history codec under the address and undefined-behavior sanitizers (make fuzz).
//
//   fuzz_history SECONDS [SEED]
//
// Each round makes a random block, now and then one that is large enough to be coded by groups, and windows of a random past, some
// of whose changes the block repeats; or records of random bytes. Checks that the block comes back whole, and then feeds
// the decoder damaged payloads and other records: each must end in Malformed or in changes that are in range and in order.
// Prints counts; any finding aborts with the seed of the round.
#include "codecs/block.h"

#include "common/step.h"
#include "harness.h"

using namespace fuzz;
using namespace pulse;

namespace {

struct Past {
    std::vector<Exact> records;
    std::vector<Window> windows;

    void add(const std::vector<uint8_t>& bytes) {
        records.emplace_back(bytes);
        windows.push_back({records.back().data(), records.back().size});
    }
};

size_t random_length(Random& r) { return below(r, below(r, 20) ? 8 : kMaxWindows + 1); }

// Steps as one-byte integers that go up from 0: what `records_of` makes records of.
std::vector<uint8_t> records_of_steps(const std::vector<uint8_t>& steps) {
    std::vector<uint32_t> positions;
    std::vector<uint8_t> zeros, values;
    for (size_t i = 0; i < steps.size(); i++) {
        if (steps[i])
            positions.push_back(uint32_t(i)), zeros.push_back(0), values.push_back(steps[i]);
    }
    return records_of(positions.data(), positions.size(), zeros.data(), values.data(),
                      {1, 0, 0, false});
}

// The records with the classes that the elements have; of some, the class is all that is left.
std::vector<uint8_t> with_classes(Random& r, std::vector<uint8_t> records, const Block& b) {
    uint64_t at = 0;
    for (size_t i = 0; i + kRecordBytes <= records.size(); i += kRecordBytes) {
        at += uint32_t(records[i]) | uint32_t(records[i + 1]) << 8;
        if (!records[i + 2]) continue;
        const uint32_t x = element(b.before, at++, b.kind.width);
        records[i + 3] = uint8_t((x >> b.kind.shift) & b.kind.mask);
        if (below(r, 50) == 0 && records[i] != 255) records[i + 2] = 0;
    }
    return records;
}

// Windows of which some elements are part again and again; these go on in `now`, often by the same step.
Past random_past(Random& r, const Block& b, std::vector<uint8_t>& now) {
    Past past;
    const double mobile = unit(r) * unit(r), again = unit(r);
    const uint64_t most = below(r, 2) ? 1 : 1 + below(r, 127);
    std::vector<int> drift(b.elements);
    for (int& step : drift) {
        if (unit(r) < mobile) step = int(1 + below(r, most)) * (below(r, 2) ? 1 : -1);
    }
    for (size_t n = random_length(r); n; n--) {
        std::vector<uint8_t> steps(b.elements);
        for (size_t i = 0; i < b.elements; i++) {
            if (drift[i] && unit(r) < again) steps[i] = uint8_t(below(r, 8) ? drift[i] : -drift[i]);
            if (below(r, 500) == 0) steps[i] = uint8_t(r());
        }
        const std::vector<uint8_t> records = records_of_steps(steps);
        past.add(below(r, 8) ? with_classes(r, records, b) : records);
    }
    now.clear();
    for (size_t i = 0; i < b.elements; i++) {
        const uint32_t x = element(b.before, i, b.kind.width),
                       y = element(b.after, i, b.kind.width);
        const bool goes_on = drift[i] && unit(r) < again;
        append(now, goes_on ? x + uint32_t(drift[i]) : y, b.kind.width);
    }
    return past;
}

// Records of any bytes; gaps are small, so that most of them are inside the block.
Past hostile_past(Random& r) {
    Past past;
    for (size_t n = random_length(r); n; n--) {
        std::vector<uint8_t> bytes(below(r, 3000));
        const bool any = below(r, 4) == 0;
        for (size_t i = 0; i < bytes.size(); i++)
            bytes[i] = uint8_t(any || i % 4 >= 2 ? r() : below(r, 40) ? 0 : r());
        past.add(bytes);
    }
    return past;
}

// Many elements of few classes, of which a twentieth moves.
Block large_block(Random& r) {
    const uint64_t elements = (1 << 17) + below(r, 1 << 17);
    const int width = below(r, 4) ? 2 : below(r, 2) ? 1 : 4;
    const ElementKind kind =
        width == 2 ? ElementKind{2, 7, 255, true} : ElementKind{width, 0, 0, false};
    std::vector<uint8_t> before, after;
    const uint32_t top = uint32_t(0x3a00 + below(r, 0x400)),
                   span = uint32_t(1 + below(r, 1 << (7 + below(r, 6))));
    const double changes = 0.01 * unit(r);
    for (uint64_t i = 0; i < elements; i++) {
        const uint32_t x = top - uint32_t(below(r, span));
        append(before, x, width);
        append(after, unit(r) < changes ? x + uint32_t(1 + below(r, 3)) : x, width);
    }
    const uint64_t row = 1 + below(r, 3000), first = 1 + below(r, elements - 1);
    return Block(kind, {{first, row, below(r, row)}, {elements - first, 512, 0}}, before, after);
}

// Of a block that is large: few elements move, and most of these go on.
Past large_past(Random& r, const Block& b, std::vector<uint8_t>& now) {
    Past past;
    std::vector<uint8_t> drift(b.elements);
    const uint64_t most = below(r, 2) ? 1 : 1 + below(r, 60);
    for (uint8_t& step : drift) {
        if (below(r, 12) == 0) step = uint8_t((1 + below(r, most)) * (below(r, 2) ? 1 : 255));
    }
    for (size_t n = 1 + below(r, 3); n; n--) {
        std::vector<uint8_t> steps(b.elements);
        for (size_t i = 0; i < b.elements; i++) steps[i] = drift[i] && below(r, 3) ? drift[i] : 0;
        past.add(with_classes(r, records_of_steps(steps), b));
    }
    now.clear();
    for (size_t i = 0; i < b.elements; i++) {
        const uint32_t x = element(b.before, i, b.kind.width),
                       y = element(b.after, i, b.kind.width);
        append(now, drift[i] && below(r, 2) ? x + uint32_t(int8_t(drift[i])) : y, b.kind.width);
    }
    return past;
}

}  // namespace

int main(int argc, char** argv) {
    uint64_t bad_ones = 0, refused = 0, coded = 0, by_groups = 0;
    Rounds rounds(argc, argv);
    while (rounds.next()) {
        const uint64_t seed = rounds.seed;
        Random r(seed);
        const bool large = below(r, 60) == 0;
        const Block made = large ? large_block(r) : random_block(r);
        std::vector<uint8_t> after = made.after;
        const bool hostile = !large && below(r, 4) == 0;
        const Past past = hostile ? hostile_past(r)
                          : large ? large_past(r, made, after)
                                  : random_past(r, made, after);
        const Block b(made.kind, made.runs, made.before, after);
        const std::vector<Window>& windows = past.windows;
        use_vectors(false);
        const EncodedBlock encoded = encode_block(windows, b.old.data(), b.now.data(), b.kind,
                                                  b.runs, true, BlockCodec::history);
        use_vectors(true);
        const EncodedBlock again = encode_block(windows, b.old.data(), b.now.data(), b.kind, b.runs,
                                                false, BlockCodec::history);
        if (encoded.codec != again.codec || encoded.payload != again.payload) {
            fail("vectors make other bytes", seed);
        }
        std::vector<uint8_t> payload;
        if (encoded.codec == BlockCodec::history) {
            coded++;
            payload = encoded.payload;
            by_groups += payload[0] >> 7;
            if (changed(b, encoded.decoded, seed) != b.after) fail("proof", seed);
            const Exact exact(payload);
            for (bool use : {false, true}) {
                use_vectors(use);
                try {
                    const Decoded d = decode_history(windows, exact.data(), exact.size,
                                                     b.old.data(), b.kind, b.runs);
                    if (changed(b, d, seed) == b.after && d.positions.size == encoded.changed)
                        continue;
                } catch (const Malformed& error) {
                    std::fprintf(stderr, "%s\n", error.what());
                }
                fail("round trip", seed);
            }
        }
        const Past other = hostile_past(r);
        for (int k = 0; k < 8; k++, bad_ones++) {
            const Exact bad(below(r, 4) ? damaged(payload, r) : payload);
            const std::vector<Window>& known = below(r, 2) ? windows : other.windows;
            std::vector<uint8_t> found[2];  // nothing where it is refused
            for (bool use : {false, true}) {
                use_vectors(use);
                try {
                    found[use] = changed(
                        b,
                        decode_history(known, bad.data(), bad.size, b.old.data(), b.kind, b.runs),
                        seed);
                } catch (const Malformed&) {
                }
            }
            if (found[0] != found[1]) fail("vectors decode otherwise", seed);
            refused += found[0].empty();
        }
    }
    char more[96];
    std::snprintf(more, sizeof more, ", %llu of them by their history, %llu with groups",
                  (unsigned long long)coded, (unsigned long long)by_groups);
    print_counts(rounds, more, bad_ones, refused);
    return 0;
}
