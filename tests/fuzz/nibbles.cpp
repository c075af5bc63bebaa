// Fuzzes the nibbles codec under the address and undefined-behaviour sanitizers (make fuzz).
//
//   fuzz_nibbles SECONDS [SEED]
//
// Each round makes a random block of integers (dtype, runs, density, kind of change), checks that it comes back whole, and then feeds
// the decoder damaged, truncated, extended and random payloads: each must end in Malformed or in changes that are in range
// and in order. Prints counts; any finding aborts with the seed of the round.
#include "codecs/nibbles/nibbles.h"

#include "codecs/block.h"

#include "harness.h"

using namespace fuzz;
using namespace pulse;

int main(int argc, char** argv) {
    uint64_t bad_ones = 0, refused = 0;
    Rounds rounds(argc, argv);
    while (rounds.next()) {
        const uint64_t seed = rounds.seed;
        Random r(seed);
        const Block b = random_block(r);
        if (!may_be_nibbles(b.kind)) continue;
        const EncodedBlock encoded =
            encode_block({}, b.old.data(), b.now.data(), b.kind, b.runs, false, BlockCodec::nibbles);
        if (encoded.changed) {
            const Exact payload(encoded.payload);
            const Decoded d = decode_nibbles(payload.data(), payload.size, b.old.data(), b.kind, b.runs);
            if (changed(b, d, seed) != b.after || d.positions.size() != encoded.changed) fail("round trip", seed);
        }
        for (int k = 0; k < 8; k++, bad_ones++) {
            const Exact bad(damaged(encoded.payload, r));
            try {
                changed(b, decode_nibbles(bad.data(), bad.size, b.old.data(), b.kind, b.runs), seed);
            } catch (const Malformed&) {
                refused++;
            }
        }
    }
    print_counts(rounds, "", bad_ones, refused);
    return 0;
}
