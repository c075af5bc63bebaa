// Fuzzes the table codec under the address and undefined-behaviour sanitizers (make fuzz).
//
//   fuzz_table SECONDS [SEED]
//
// Each round makes a random block (dtype, density, kind of change) in memory of exactly its length, checks that it comes
// back whole with and without vectors and that both make the same bytes, and then feeds the decoder damaged, truncated,
// extended and random payloads: each must end in Malformed or in changes that are in range and in order, the same both
// ways. Prints counts; any finding aborts with the seed of the round.
#include "codecs/table/table.h"

#include "harness.h"

using namespace fuzz;
using namespace pulse;

namespace {

// What a payload makes of the block; empty where it is refused.
std::vector<uint8_t> decoded(const Exact& payload, const Block& b, uint64_t seed) {
    try {
        const DecodedSteps d = decode_steps(payload.data(), payload.size, b.old.data(), b.elements, b.kind);
        return changed(b, d.positions.data.get(), d.positions.size, d.values.data.get(), d.values.size,
                       d.before.data.get(), d.before.size, seed);
    } catch (const Malformed&) {
        return {};
    }
}

std::vector<uint8_t> decoded_both_ways(const std::vector<uint8_t>& payload, const Block& b, uint64_t seed) {
    const Exact exact(payload);
    std::vector<uint8_t> made[2];
    for (bool use : {false, true}) {
        rans_vectors = use && has_rans_vectors();
        made[use] = decoded(exact, b, seed);
    }
    if (made[0] != made[1]) fail("vectors decode something else", seed);
    return made[0];
}

}  // namespace

int main(int argc, char** argv) {
    uint64_t bad_ones = 0, refused = 0;
    Rounds rounds(argc, argv);
    while (rounds.next()) {
        const uint64_t seed = rounds.seed;
        Random r(seed);
        const Block b = random_block(r);
        Encoded encoded[2];
        for (bool use : {false, true}) {
            rans_vectors = use && has_rans_vectors();
            encoded[use] = encode_steps(b.old.data(), b.now.data(), b.elements, b.kind);
        }
        const std::vector<uint8_t>& payload = encoded[0].payload;
        if (payload != encoded[1].payload || encoded[0].changed != encoded[1].changed) {
            fail("vectors make other bytes", seed);
        }
        const Spread spread = sampled_spread(b.old.data(), b.now.data(), b.elements, b.kind.width);
        if (!(spread.density >= 0 && spread.density <= 1 && spread.evenness >= 0)) fail("the spread", seed);
        if (encoded[0].changed && decoded_both_ways(payload, b, seed) != b.after) fail("round trip", seed);
        for (int k = 0; k < 8; k++, bad_ones++) refused += decoded_both_ways(damaged(payload, r), b, seed).empty();
    }
    print_counts(rounds, "", bad_ones, refused);
    return 0;
}
