// Fuzzes PULSELoCo's native kernels under the address and undefined-behavior sanitizers (make fuzz).
//
//   fuzz_entries SECONDS [SEED]
//
// Each round makes a random block (theta, momentum, rounding, density, kind of values), passes it through the gate, checks
// that the entries come back whole on every wire, and then feeds the decoder damaged, truncated, extended and random
// payloads: each must end in Malformed or in finite entries that are in range and in order, the same with vectors and
// without. Then it takes the outer step along several sums, sparsely in segments and densely, and compares the bits. Prints
// counts; any finding aborts with the seed of the round.
#include "loco/entries.h"

#include "harness.h"
#include "loco/gate.h"
#include "loco/outer_step.h"

using namespace fuzz;
using namespace pulse;

namespace {

constexpr Rounding kRoundings[] = {
    {7, 1, 0x7F7F0000, 0x7F800000},   {10, 113, 0x477FE000, 0x7F800000},
    {3, 121, 0x43E00000, 0x43E00000}, {2, 113, 0x47600000, 0x7F800000},
    {1, 1, 0x7F000000, 0x7F800000},   {22, 254, 0x7F7FFFFE, 0x7F800000},
};

constexpr int kMantissas[] = {23, 7, 2, 0};  // explicit bits of the values of each wire

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
    float lookahead;
    bool bf16_start;
    std::vector<float> theta, momentum, now, residual;

    Shared shared() const { return {theta.data(), momentum.data(), theta.size(), rounding}; }
    Local local() const {
        return {theta.data(), now.data(), residual.data(), lookahead, bf16_start};
    }
    float start(size_t i) const {
        const float exact = lookahead != 0 ? theta[i] - lookahead * residual[i] : theta[i];
        return bf16_start ? float_of(uint32_t(Bf16Rounder{}(bits_of(exact))) << 16) : exact;
    }
};

size_t any_count(Random& r) {
    constexpr size_t kEdges[] = {0, 1, 63, 64, 65, 128, 8191, 8192, 8193};
    return below(r, 4) ? below(r, below(r, 20) ? 2000 : 40000)
                       : kEdges[below(r, std::size(kEdges))];
}

Parameters random_parameters(Random& r) {
    Parameters b{kRoundings[below(r, std::size(kRoundings))],
                 below(r, 2) ? 0 : 7.0f,
                 below(r, 3) == 0,
                 {},
                 {},
                 {},
                 {}};
    const int theta_kind = int(below(r, 6)), move_kind = int(below(r, 6)),
              size = int(below(r, 30)) - 28;
    const bool still = below(r, 4) == 0;
    const size_t count = any_count(r);
    for (size_t i = 0; i < count; i++) {
        const float theta = number(r, theta_kind < 5 ? theta_kind : int(below(r, 5)));
        b.theta.push_back(theta);
        b.momentum.push_back(still ? 0 : number(r, int(below(r, 5))));
        b.residual.push_back(below(r, 2) || std::abs(theta) > 0x1p56f ? 0 : theta * 0x1p-20f);
        // A step in proportion to theta, as training makes it, or anything.
        float move = move_kind < 3 ? theta * std::ldexp(float(int64_t(r()) >> 40) * 0x1p-23f, size)
                                   : number(r, move_kind - 1);
        const float start = b.start(i);
        if (!(std::abs(move) < 0x1p60f) || !finite(start - move)) move = 0;
        // What a model holds is finite; the cast may have made an infinity of the start.
        if (!finite(start)) b.theta[i] = b.residual[i] = move = 0;
        b.now.push_back(b.start(i) - move);
    }
    return b;
}

void check_range(const Entries& e, const Parameters& b, uint64_t seed) {
    if (e.values.size() != e.positions.size()) fail("values and positions differ in number", seed);
    check_positions(e.positions.data(), e.positions.size(), b.theta.size(), seed);
    for (const float value : e.values) {
        if (!(std::abs(value) < 0x1p64f)) fail("a value that is not finite", seed);
    }
}

void check_gate(const Parameters& b, const std::vector<float>& s, const std::vector<uint32_t>& open,
                uint32_t base, uint64_t seed) {
    const Rounder round(b.rounding);
    size_t k = 0;
    for (size_t i = 0; i < s.size(); i++) {
        if (bits_of(s[i]) != bits_of((b.start(i) - b.now[i]) + b.residual[i]))
            fail("s is another sum", seed);
        const bool opens = round(bits_of(b.theta[i])) != round(bits_of(b.theta[i] - s[i]));
        if (opens != (k < open.size() && open[k] == base + i)) fail("the gate", seed);
        k += opens;
    }
    if (k != open.size()) fail("more entries than open the gate", seed);
}

bool same(const std::vector<float>& a, const std::vector<float>& b) {
    return a.size() == b.size() &&
           (a.empty() || !std::memcmp(a.data(), b.data(), a.size() * sizeof(float)));
}

bool same(const Entries& a, const Entries& b) {
    return a.positions == b.positions && same(a.values, b.values);
}

// The entries of a payload; false if it is refused. The same with vectors and without.
bool decode(const Parameters& b, const Exact& payload, int mantissa, Entries& found,
            uint64_t seed) {
    bool decoded[2] = {};
    Entries both[2];
    for (const bool use : {false, true}) {
        use_vectors(use);
        try {
            both[use] = decode_entries(b.shared(), {{payload.data(), payload.size}}, mantissa)[0];
            check_range(both[use], b, seed);
            decoded[use] = true;
        } catch (const Malformed&) {
        }
    }
    if (decoded[0] != decoded[1] || !same(both[0], both[1]))
        fail("vectors decode something else", seed);
    found = std::move(both[0]);
    return decoded[0];
}

std::vector<uint8_t> encode(const Parameters& b, const Entries& e, int mantissa, uint64_t seed) {
    std::vector<uint8_t> payloads[2];
    for (const bool use : {false, true}) {
        use_vectors(use);
        payloads[use] = encode_entries(b.shared(), e.positions.data(), e.values.data(),
                                       e.positions.size(), mantissa);
    }
    if (payloads[0] != payloads[1]) fail("vectors encode something else", seed);
    return payloads[0];
}

// One step along the sum of entries, all at once and densely; and by segments and sparsely.
void check_steps(const Parameters& b, const std::vector<Entries>& entries, Random& r,
                 uint64_t seed) {
    const size_t count = b.theta.size(), offset = below(r, 600), granule = 1 + below(r, 300);
    const Nesterov nesterov{float(1 + below(r, 8)), 0.7f, 0.9f};
    std::vector<float> total(count);
    std::vector<Summand> summands;
    for (const Entries& e : entries) {
        summands.push_back({e.positions.data(), e.values.data(), e.positions.size()});
        for (size_t i = 0; i < e.positions.size(); i++) total[e.positions[i]] += e.values[i];
    }
    Entries dense, sums;
    std::vector<int64_t> expected((offset + count) / granule + 1), counts(expected.size());
    for (size_t i = 0; i < count; i++) {
        if (total[i] == 0) continue;
        dense.positions.push_back(uint32_t(i));
        dense.values.push_back(total[i]);
        expected[(offset + i) / granule]++;
    }
    sum_entries(summands, count, sums.positions, sums.values);
    if (!same(sums, dense)) fail("the sums", seed);

    std::vector<float> theta[2] = {b.theta, b.theta}, momentum[2] = {b.momentum, b.momentum},
                       start(count);
    outer_step(theta[0].data(), momentum[0].data(), total.data(), count, nesterov);
    const Octaves octaves{uint8_t(r()), uint8_t(r())};
    std::vector<uint8_t> classes[2] = {std::vector<uint8_t>(count), std::vector<uint8_t>(count)};
    classify(theta[0].data(), momentum[0].data(), count, b.rounding, octaves, classes[0].data());
    for (size_t from = 0; from < count;) {
        const size_t size = std::min(count - from, 1 + below(r, below(r, 2) ? 10000 : 300));
        outer_step(theta[1].data() + from, momentum[1].data() + from, b.residual.data() + from,
                   b.lookahead, start.data() + from, from, size, summands, nesterov, offset + from,
                   granule, counts.data(), {b.rounding, octaves, classes[1].data() + from});
        from += size;
    }
    if (!same(theta[0], theta[1]) || !same(momentum[0], momentum[1]))
        fail("the sparse outer step", seed);
    if (counts != expected) fail("the counts of the sums", seed);
    if (classes[0] != classes[1]) fail("the classes", seed);
    for (size_t i = 0; i < count; i++) {
        const float ahead =
            b.lookahead != 0 ? theta[0][i] - b.lookahead * b.residual[i] : theta[0][i];
        if (bits_of(start[i]) != bits_of(ahead)) fail("where the next steps start", seed);
    }
}

}  // namespace

int main(int argc, char** argv) {
    uint64_t entries = 0, bytes[std::size(kMantissas)] = {}, bad_ones = 0, refused = 0;
    Rounds rounds(argc, argv);
    while (rounds.next()) {
        const uint64_t seed = rounds.seed;
        Random r(seed);
        const Parameters b = random_parameters(r);
        std::vector<float> s(b.theta.size());
        std::vector<uint32_t> open;
        const uint32_t base = below(r, 2) ? 0 : 1000;
        if (!gate(b.local(), s.data(), s.size(), b.rounding, base, open)) {
            fail("a finite pseudo-gradient is refused", seed);
        }
        check_gate(b, s, open, base, seed);
        for (uint32_t& p : open) p -= base;
        if (below(r, 3) == 0) {  // what other choices of entries would send
            open.clear();
            const uint64_t one_in = 1 + below(r, 3) * below(r, 300);
            for (uint32_t i = 0; i < s.size(); i++) {
                if (below(r, one_in) == 0) open.push_back(i);
            }
        }
        entries += open.size();
        std::vector<Entries> arrived;
        for (size_t wire = 0; wire < std::size(kMantissas); wire++) {
            const int mantissa = kMantissas[wire];
            const uint32_t kept = ~0u << (23 - mantissa);
            Entries sent{open, {}}, back;
            for (uint32_t p : open) sent.values.push_back(float_of(bits_of(s[p]) & kept));
            const std::vector<uint8_t> payload = encode(b, sent, mantissa, seed);
            bytes[wire] += payload.size();
            if (!decode(b, Exact(payload), mantissa, back, seed))
                fail("a payload is refused", seed);
            if (!same(back, sent)) fail("the entries do not come back", seed);
            arrived.push_back(std::move(back));
            std::vector<std::pair<const uint8_t*, size_t>> together(
                3, {payload.data(), payload.size()});
            for (int k = 0; k < 4; k++, bad_ones++) {
                const Exact bad(damaged(payload, r));
                if (!decode(b, bad, mantissa, back, seed)) {
                    refused++;
                } else if (below(r, 4) == 0) {
                    arrived.push_back(back);
                }
                together[1] = {bad.data(), bad.size};
                try {  // a payload of other octaves between two
                    const std::vector<Entries> three =
                        decode_entries(b.shared(), together, mantissa);
                    if (!same(three[0], sent) || !same(three[2], sent))
                        fail("a payload changes another one", seed);
                } catch (const Malformed&) {
                }
            }
        }
        check_steps(b, arrived, r, seed);
    }
    char more[100];
    std::snprintf(more, sizeof more,
                  " with %llu entries in %.3g, %.3g, %.3g and %.3g MB (FP32, BF16, int4, int2)",
                  (unsigned long long)entries, double(bytes[0]) / 1e6, double(bytes[1]) / 1e6,
                  double(bytes[2]) / 1e6, double(bytes[3]) / 1e6);
    print_counts(rounds, more, bad_ones, refused);
    return 0;
}
