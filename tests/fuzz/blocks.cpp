// Fuzzes the codecs gaps and nibbles under the address and undefined-behavior sanitizers (make fuzz).
//
//   fuzz_blocks SECONDS [SEED]
//
// Each round makes a random block (dtype, runs, density, kind of change), checks that it comes back whole, and then feeds
// the decoders damaged, truncated, extended and random payloads: each must end in Malformed or in changes that are in range
// and in order. All of it with vectors and without, alike. Prints counts; any finding aborts with the seed of the round.
#include "codecs/block.h"

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
        for (const BlockCodec codec : {BlockCodec::gaps, BlockCodec::nibbles}) {
            if (codec == BlockCodec::nibbles && !may_be_nibbles(b.kind)) continue;
            const EncodedBlock encoded = encoded_both_ways(
                [&] {
                    return encode_block({}, b.old.data(), b.now.data(), b.kind, b.runs, false,
                                        codec);
                },
                seed);
            const auto decode = [&](const Exact& payload) {
                const Decoded d = decode_block(codec, {}, payload.data(), payload.size,
                                               b.old.data(), b.kind, b.runs);
                return changed(b, d, seed);
            };
            if (encoded.changed && decoded_both_ways(encoded.payload, decode, seed) != b.after) {
                fail("round trip", seed);
            }
            tried.try_some(encoded.payload, decode, r, seed);
        }
    }
    print_counts(rounds, "", tried.bad, tried.refused);
    return 0;
}
