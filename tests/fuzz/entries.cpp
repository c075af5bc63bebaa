// Fuzzes PULSELoCo's native kernels under the address and undefined-behaviour sanitizers (make fuzz).
//
//   fuzz_entries SECONDS [SEED]
//
// Each round makes a random block (theta, momentum, runs, rounding, density, kind of values), passes it through the gate,
// checks that the entries come back whole on both wires, and then feeds the decoder damaged, truncated, extended and
// random payloads: each must end in Malformed or in finite entries that are in range and in order. Prints counts; any
// finding aborts with the seed of the round.
#include "../../src/native/entries.h"

#include "../../src/native/gate.h"
#include "../../src/native/outer_step.h"
#include "harness.h"

using namespace fuzz;
using namespace pulse;

namespace {

constexpr Rounding kRoundings[] = {
    {7, 1, 0x7F7F0000, 0x7F800000},   {10, 113, 0x477FE000, 0x7F800000}, {3, 121, 0x43E00000, 0x43E00000},
    {2, 113, 0x47600000, 0x7F800000}, {1, 1, 0x7F000000, 0x7F800000},    {22, 254, 0x7F7FFFFE, 0x7F800000},
};

bool finite(float x) { return (bits_of(x) & 0x7f800000u) != 0x7f800000u; }

// A finite number: like a weight, of any size, denormal, or zero.
float number(Random& r, int kind) {
    for (;;) {
        float x;
        switch (kind) {
            case 0: x = float(int64_t(r()) >> 40) * 0x1p-30f; break;
            case 1: x = float_of(uint32_t(r())); break;
            case 2: x = float_of(uint32_t(r()) & 0x807fffffu); break;
            case 3: x = float_of(uint32_t(r()) & 0xffff0000u); break;
            default: x = float_of(uint32_t(r()) & kSign);
        }
        if (finite(x)) return x;
    }
}

struct Parameters {
    Rounding rounding;
    std::vector<Run> runs;
    std::vector<float> theta, momentum, now, residual;

    Shared shared() const { return {theta.data(), momentum.data(), rounding, runs}; }
};

Parameters random_parameters(Random& r) {
    Parameters b{
        kRoundings[below(r, std::size(kRoundings))], random_runs(r, below(r, 20) ? 1000 : 30000), {}, {}, {}, {}};
    const int theta_kind = int(below(r, 6)), move_kind = int(below(r, 6)), size = int(below(r, 30)) - 28;
    const bool still = below(r, 4) == 0;
    for (const Run& run : b.runs) {
        for (uint64_t i = 0; i < run.elements; i++) {
            const float theta = number(r, theta_kind < 5 ? theta_kind : int(below(r, 5)));
            // A step in proportion to theta, as training makes it, or anything.
            float move = move_kind < 3 ? theta * std::ldexp(float(int64_t(r()) >> 40) * 0x1p-23f, size)
                                       : number(r, move_kind - 1);
            if (!(std::abs(move) < 0x1p60f) || !finite(theta - move)) move = 0;
            b.theta.push_back(theta);
            b.now.push_back(theta - move);
            b.momentum.push_back(still ? 0 : number(r, int(below(r, 5))));
            b.residual.push_back(below(r, 2) || std::abs(theta) > 0x1p60f ? 0 : theta * 0x1p-20f);
        }
    }
    return b;
}

void check_range(const Entries& e, const Parameters& b, uint64_t seed) {
    if (e.values.size() != e.positions.size()) fail("values and positions differ in number", seed);
    check_positions(e.positions.data(), e.positions.size(), b.theta.size(), seed);
    for (const float value : e.values) {
        if (!finite(value)) fail("a value that is not finite", seed);
    }
}

void check_gate(const Parameters& b, const std::vector<float>& s, const std::vector<uint32_t>& open, uint64_t seed) {
    const Rounder round(b.rounding);
    size_t k = 0;
    for (size_t i = 0; i < s.size(); i++) {
        if (bits_of(s[i]) != bits_of((b.theta[i] - b.now[i]) + b.residual[i])) fail("s is another sum", seed);
        const bool opens = round(bits_of(b.theta[i])) != round(bits_of(b.theta[i] - s[i]));
        if (opens != (k < open.size() && open[k] == i)) fail("the gate", seed);
        k += opens;
    }
}

}  // namespace

int main(int argc, char** argv) {
    uint64_t entries = 0, bytes[2] = {}, bad_ones = 0, refused = 0;
    Rounds rounds(argc, argv);
    while (rounds.next()) {
        const uint64_t seed = rounds.seed;
        Random r(seed);
        const Parameters b = random_parameters(r);
        std::vector<float> s(b.theta.size());
        std::vector<uint32_t> open;
        if (!gate(b.theta.data(), b.theta.data(), b.now.data(), b.residual.data(), s.data(), s.size(), b.rounding, 0,
                  open)) {
            fail("a finite pseudo-gradient is refused", seed);
        }
        check_gate(b, s, open, seed);
        if (below(r, 3) == 0) {  // what other choices of entries would send
            open.clear();
            for (uint32_t i = 0; i < s.size(); i++) {
                if (below(r, 7) == 0) open.push_back(i);
            }
        }
        entries += open.size();
        for (const bool bf16 : {false, true}) {
            std::vector<float> values;
            for (uint32_t p : open) values.push_back(bf16 ? float_of(bits_of(s[p]) & 0xffff0000u) : s[p]);
            const std::vector<uint8_t> payload =
                encode_entries(b.shared(), open.data(), values.data(), open.size(), bf16);
            bytes[bf16] += payload.size();
            const std::vector<Entries> back =
                decode_entries(b.shared(), {{payload.data(), payload.size()}, {payload.data(), payload.size()}}, bf16);
            for (const Entries& e : back) {
                if (e.positions != open) fail("the positions do not come back", seed);
                for (size_t i = 0; i < open.size(); i++) {
                    if (bits_of(e.values[i]) != bits_of(values[i])) fail("the values do not come back", seed);
                }
            }
            for (int k = 0; k < 4; k++, bad_ones++) {
                const Exact bad(damaged(payload, r));
                try {
                    for (const Entries& e : decode_entries(b.shared(), {{bad.data(), bad.size}}, bf16)) {
                        check_range(e, b, seed);
                    }
                } catch (const Malformed&) {
                    refused++;
                }
            }
        }
        std::vector<float> theta = b.theta, momentum = b.momentum;
        outer_step(theta.data(), momentum.data(), s.data(), s.size(), float(1 + below(r, 8)), 0.7f, 0.9f);
    }
    char more[100];
    std::snprintf(more, sizeof more, " with %llu entries in %.3g MB and %.3g MB (FP32, BF16)",
                  (unsigned long long)entries, double(bytes[0]) / 1e6, double(bytes[1]) / 1e6);
    print_counts(rounds, more, bad_ones, refused);
    return 0;
}
