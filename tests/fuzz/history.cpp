// Fuzzes the history codec under the address and undefined-behaviour sanitizers (make fuzz).
//
//   fuzz_history SECONDS [SEED]
//
// Each round makes a random block and stretches of a random past, some of whose changes the block repeats; or records of
// random bytes. Checks that stretches merge into the sums of their steps, that the block comes back whole, and then feeds
// the decoder damaged payloads and other records: each must end in Malformed or in changes that are in range and in order.
// Prints counts; any finding aborts with the seed of the round.
#include "../../src/native/history.h"

#include "../../src/native/step.h"
#include "harness.h"

using namespace fuzz;
using namespace pulse;

namespace {

struct Past {
    std::vector<Exact> records;
    std::vector<Stretch> stretches;

    void add(const std::vector<uint8_t>& bytes, uint32_t span) {
        records.emplace_back(bytes);
        stretches.push_back({records.back().data(), records.back().size, span});
    }
};

uint32_t random_span(Random& r) {
    const uint64_t kind = below(r, 10);
    return uint32_t(kind < 6 ? 1 : 1 + below(r, kind < 9 ? 64 : 1 << 20));
}

size_t random_length(Random& r) { return below(r, below(r, 20) ? 8 : 257); }

// Steps as one-byte integers that go up from 0: what `records_of` makes records of.
std::vector<uint8_t> records_of_steps(const std::vector<uint8_t>& steps) {
    std::vector<uint32_t> positions;
    std::vector<uint8_t> zeros, values;
    for (size_t i = 0; i < steps.size(); i++) {
        if (steps[i]) positions.push_back(uint32_t(i)), zeros.push_back(0), values.push_back(steps[i]);
    }
    return records_of(positions.data(), positions.size(), zeros.data(), values.data(), 1, false);
}

// Stretches of which some elements are part again and again; these go on in `now`, often by the same step.
Past random_past(Random& r, const Block& b, std::vector<uint8_t>& now, uint64_t seed) {
    Past past;
    const double mobile = unit(r) * unit(r), again = unit(r);
    const uint64_t most = below(r, 2) ? 1 : 1 + below(r, 127);
    std::vector<int> drift(b.elements);
    for (int& step : drift) {
        if (unit(r) < mobile) step = int(1 + below(r, most)) * (below(r, 2) ? 1 : -1);
    }
    std::vector<uint8_t> total(b.elements);
    for (size_t n = random_length(r); n; n--) {
        std::vector<uint8_t> steps(b.elements);
        for (size_t i = 0; i < b.elements; i++) {
            if (drift[i] && unit(r) < again) steps[i] = uint8_t(below(r, 8) ? drift[i] : -drift[i]);
            if (below(r, 500) == 0) steps[i] = uint8_t(r());
            total[i] = uint8_t(total[i] + steps[i]);
        }
        past.add(records_of_steps(steps), random_span(r));
    }
    if (merged_records(past.stretches, b.elements) != records_of_steps(total)) fail("the merged stretches", seed);
    now.clear();
    for (size_t i = 0; i < b.elements; i++) {
        const uint32_t x = element(b.before, i, b.kind.width), y = element(b.after, i, b.kind.width);
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
        for (size_t i = 0; i < bytes.size(); i++) bytes[i] = uint8_t(any || i % 3 == 2 ? r() : below(r, 40) ? 0 : r());
        past.add(bytes, random_span(r));
    }
    return past;
}

}  // namespace

int main(int argc, char** argv) {
    uint64_t bad_ones = 0, refused = 0, coded = 0;
    Rounds rounds(argc, argv);
    while (rounds.next()) {
        const uint64_t seed = rounds.seed;
        Random r(seed);
        const Block made = random_block(r);
        std::vector<uint8_t> after = made.after;
        const bool hostile = below(r, 4) == 0;
        const Past past = hostile ? hostile_past(r) : random_past(r, made, after, seed);
        const Block b(made.kind, made.runs, made.before, after);
        const std::vector<Stretch>& stretches = past.stretches;
        use_vectors(false);
        const auto encoded = encode_with_history(stretches, b.old.data(), b.now.data(), b.kind, b.runs);
        use_vectors(true);
        const auto again = encode_with_history(stretches, b.old.data(), b.now.data(), b.kind, b.runs);
        if (encoded.has_value() != again.has_value() || (encoded && encoded->payload != again->payload)) {
            fail("vectors make other bytes", seed);
        }
        use_vectors(below(r, 2));
        std::vector<uint8_t> payload;
        if (encoded) {
            coded++;
            payload = encoded->payload;
            const Exact exact(payload);
            const Decoded d = decode_with_history(stretches, exact.data(), exact.size, b.old.data(), b.kind, b.runs);
            if (changed(b, d, seed) != b.after || d.positions.size() != encoded->changed) fail("round trip", seed);
        }
        const Past other = hostile_past(r);
        for (int k = 0; k < 8; k++, bad_ones++) {
            const Exact bad(below(r, 4) ? damaged(payload, r) : payload);
            const std::vector<Stretch>& known = below(r, 2) ? stretches : other.stretches;
            try {
                changed(b, decode_with_history(known, bad.data(), bad.size, b.old.data(), b.kind, b.runs), seed);
            } catch (const Malformed&) {
                refused++;
            }
        }
    }
    char more[64];
    std::snprintf(more, sizeof more, ", %llu of them by their history", (unsigned long long)coded);
    print_counts(rounds, more, bad_ones, refused);
    return 0;
}
