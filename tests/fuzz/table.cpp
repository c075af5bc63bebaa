// Fuzzes the table codec under the address and undefined-behavior sanitizers (make fuzz).
//
//   fuzz_table SECONDS [SEED]
//
// Each round makes a random block (dtype, density, kind of change) in memory of exactly its length, checks that it comes
// back whole with and without vectors and that both make the same bytes, and then feeds the decoder damaged, truncated,
// extended and random payloads: each must end in Malformed or in changes that are in range and in order, the same both
// ways. Prints counts; any finding aborts with the seed of the round.
#include "codecs/codecs.h"
#include "harness.h"

using namespace fuzz;
using namespace pulse;

int main(int argc, char** argv) {
    Damaged tried;
    Rounds rounds(argc, argv);
    while (rounds.next()) {
        const uint64_t seed = rounds.seed;
        Random r(seed);
        const Block b = random_block(r);
        const Encoded encoded = encoded_both_ways(
            [&] { return encode_steps(b.old.data(), b.now.data(), b.elements, b.kind); }, seed);
        const auto decode = [&](const Exact& payload) {
            return changed(
                b, decode_steps(payload.data(), payload.size, b.old.data(), b.elements, b.kind),
                seed);
        };
        const Spread spread = sampled_spread(b.old.data(), b.now.data(), b.elements, b.kind.width);
        if (!(spread.density >= 0 && spread.density <= 1 && spread.evenness >= 0))
            fail("the spread", seed);
        if (encoded.changed && decoded_both_ways(encoded.payload, decode, seed) != b.after)
            fail("round trip", seed);
        tried.try_some(encoded.payload, decode, r, seed);
    }
    print_counts(rounds, "", tried.bad, tried.refused);
    return 0;
}
