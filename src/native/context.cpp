#include "context.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "hazard.h"
#include "range_coder.h"
#include "scan.h"
#include "survey.h"

namespace pulse {
namespace {

constexpr int kMostLength = 32;
constexpr int kRareLevel = 12;  // from this level on a change is expected to be by one step

// The adaptive models of a block; the same on both sides.
struct Models {
    std::array<AdaptiveBit, 4> against;  // is the sign against the majority of the row's changes so far?
    std::array<AdaptiveBit, kClasses> single;
    std::array<AdaptiveBit, kClasses + kMostLength> longer, second;
    AdaptiveBit absent, as_expected, lower;
    std::array<AdaptiveBit, 8> further;

    void expect(const std::array<uint8_t, kClasses>& levels) {
        for (int c = 0; c < kClasses; c++) {
            if (levels[c] >= kRareLevel) {
                single[c].p = 64512;
                single[c].seen = 6;
            }
        }
    }
};

// One description of each symbol serves both directions: `value` is what an encoder writes, the result what is read.
struct Writer {
    Encoder coder;
    bool bit(AdaptiveBit& model, bool value) {
        coder.bit(model, value);
        return value;
    }
    uint32_t plain(uint32_t value, int count) {
        coder.plain(value, count);
        return value;
    }
    void next_symbol() { coder.make_room(); }
};
struct Reader {
    Decoder coder;
    bool bit(AdaptiveBit& model, bool) { return coder.bit(model); }
    uint32_t plain(uint32_t, int count) { return coder.plain(count); }
    void next_symbol() {
        if (!coder.within()) throw Malformed("the code ends too early");
    }
};

// The levels of classes first .. first + count - 1. A float's rounding step doubles from one exponent to the next, which
// halves the chance to change: two levels further.
template <class Side>
void code_levels(Side& side, Models& models, std::array<uint8_t, kClasses>& levels, int first, int count) {
    int expected = 30;
    for (int c = first; c < first + count; c++) {
        side.next_symbol();
        if (side.bit(models.absent, levels[c] == kAbsent)) {
            levels[c] = kAbsent;
            continue;
        }
        const int away = int(levels[c]) - expected;
        int read = 0;
        if (!side.bit(models.as_expected, away == 0)) {
            const bool lower = side.bit(models.lower, away < 0);
            const int distance = std::abs(away) - 1;
            int k = 0;
            while (k < kMostLevel && !side.bit(models.further[std::min(k, 7)], distance == k)) k++;
            read = lower ? -(k + 1) : k + 1;
        }
        const int level = std::clamp(expected + read, 0, kMostLevel);
        levels[c] = uint8_t(level);
        expected = std::min(level + 2, kMostLevel);
    }
}

// The size of a step, at least 1: its bit length in unary, one modelled bit below the top one, the rest plain.
template <class Side>
uint32_t code_size(Side& side, Models& models, int cls, uint32_t size) {
    const int length = 31 - __builtin_clz(size | 1);
    if (side.bit(models.single[cls], length == 0)) return 1;
    int n = 1;
    while (n < kMostLength - 1 && !side.bit(models.longer[cls + n], length == n)) n++;
    uint32_t read = 2 | uint32_t(side.bit(models.second[cls + n], (size >> (n - 1)) & 1));
    for (int rest = n - 1; rest > 0;) {
        const int count = std::min(rest, 16);
        rest -= count;
        read = read << count | side.plain((size >> rest) & ((1u << count) - 1), count);
    }
    return read;
}

// A bijection of the bit patterns of a float, ascending with the value: neighbours differ by one step.
template <class U>
U ordered(U x, bool floating) {
    constexpr U sign = U(U(1) << (8 * sizeof(U) - 1));
    if (!floating) return x;
    return U(x & sign ? ~x : x | sign);
}
template <class U>
U unordered(U y, bool floating) {
    constexpr U sign = U(U(1) << (8 * sizeof(U) - 1));
    if (!floating) return y;
    return U(y & sign ? y & ~sign : ~y);
}

struct Weights {
    std::array<uint32_t, kClasses> of[2];  // in a row without and with a change
    Weights(const std::array<uint8_t, kClasses>& levels, int boost) {
        for (int c = 0; c < kClasses; c++) {
            of[0][c] = weight_of_level(levels[c]);
            of[1][c] = uint32_t(std::min(uint64_t(of[0][c]) << boost, kMostWeight));
        }
    }
};

void put_varint(std::vector<uint8_t>& out, uint64_t x) {
    for (; x >= 128; x >>= 7) out.push_back(uint8_t(x | 128));
    out.push_back(uint8_t(x));
}

template <class U>
Encoded encode(const U* old, const U* now, const Elements& kind, const std::vector<Run>& runs) {
    const ClassOf cls{kind.shift, kind.mask};
    uint64_t total = 0;
    for (const Run& run : runs) total += run.elements;
    const Survey<U> survey = survey_block(old, now, total, runs, cls);
    const std::vector<uint32_t>& positions = survey.positions;
    Encoded result{{}, positions.size()};
    put_varint(result.payload, positions.size());
    if (positions.empty()) return result;

    Plan plan = plan_block(survey);
    for (int x : {plan.boost, plan.first, plan.count - 1}) result.payload.push_back(uint8_t(x));
    Writer side;
    Models models;
    code_levels(side, models, plan.levels, plan.first, plan.count);
    models.expect(plan.levels);
    const Weights weights(plan.levels, plan.boost);

    WaitingTime waiting;
    uint64_t waited = 0;
    size_t i = 0, base = 0;
    for (size_t r = 0; r < runs.size(); r++) {
        const Run& run = runs[r];
        const U* before = old + base;
        const Rows rows{run.row, run.phase, run.elements};
        size_t at = 0, row_end = 0;
        int tally = 0;
        bool live = false;
        const auto pass = [&](size_t to, bool boosted) {
            waited += weight_sum(before + at, to - at, cls, weights.of[boosted].data());
            at = to;
        };
        for (; i < positions.size() && positions[i] < base + run.elements; i++) {
            const size_t p = positions[i] - base;
            if (p >= row_end) {
                if (live) pass(row_end, true);
                live = false;
                tally = 0;
                row_end = rows.end_after(p);
            }
            pass(p, live);
            at = p + 1;
            const uint32_t c = cls(before[p]);
            const uint64_t weight = weights.of[live][c];
            for (uint64_t half; waited >= (half = waiting.half());) {
                side.next_symbol();
                side.coder.interval(0, WaitingTime::escape_top());
                waited -= half;
                waiting.escaped();
            }
            side.next_symbol();
            side.coder.interval(waiting.survival(waited + weight), waiting.survival(waited));
            waiting.changed(waited, weight);
            waited = 0;

            const U step = U(ordered(survey.values[i], kind.floating) - ordered(before[p], kind.floating));
            const bool down = step >> (8 * sizeof(U) - 1);
            side.bit(models.against[std::min(std::abs(tally), 3)], down != (tally < 0));
            tally += down ? -1 : 1;
            code_size(side, models, int(c), down ? U(-step) : step);
            live = true;
        }
        if (r + 1 == runs.size()) break;
        if (live) pass(row_end, true);
        pass(run.elements, false);
        base += run.elements;
    }
    const std::vector<uint8_t> code = side.coder.finish();
    result.payload.insert(result.payload.end(), code.begin(), code.end());
    return result;
}

// The head of a payload; advances `at`.
uint8_t take_byte(const uint8_t* data, size_t size, size_t& at) {
    if (at == size) throw Malformed("the block ends inside its head");
    return data[at++];
}

template <class U>
Decoded decode(const uint8_t* data, size_t size, const U* old, const Elements& kind, const std::vector<Run>& runs) {
    const ClassOf cls{kind.shift, kind.mask};
    uint64_t total = 0, left = 0;
    for (const Run& run : runs) total += run.elements;
    size_t at_byte = 0;
    for (int shift = 0;; shift += 7) {
        const uint8_t byte = take_byte(data, size, at_byte);
        if (shift > 28) throw Malformed("the number of changes is too long");
        left |= uint64_t(byte & 127) << shift;
        if (byte == 0 && shift > 0) throw Malformed("the number of changes is padded");
        if (byte < 128) break;
    }
    if (left == 0 || left > total) throw Malformed("the number of changes is 0 or exceeds the elements");
    Plan plan;
    plan.boost = take_byte(data, size, at_byte);
    plan.first = take_byte(data, size, at_byte);
    plan.count = take_byte(data, size, at_byte) + 1;
    if (plan.boost > kMostBoost || uint32_t(plan.first + plan.count - 1) > kind.mask) {
        throw Malformed("the block's head is out of range");
    }
    plan.levels.fill(kAbsent);
    Reader side{Decoder(data + at_byte, size - at_byte)};
    Models models;
    code_levels(side, models, plan.levels, plan.first, plan.count);
    models.expect(plan.levels);
    const Weights weights(plan.levels, plan.boost);

    Decoded result;
    result.positions.reserve(left);
    result.values.resize(left * sizeof(U));
    WaitingTime waiting;
    uint64_t waited = 0, escaped = 0, place = 0, target = 0;
    const uint64_t most = total * kMostWeight;
    bool searching = false;
    size_t base = 0, found = 0;
    for (const Run& run : runs) {
        if (left == 0) break;
        const U* before = old + base;
        const Rows rows{run.row, run.phase, run.elements};
        size_t at = 0, row_end = 0;
        int tally = 0;
        bool live = false;
        while (left) {
            if (!searching) {
                while ((place = side.coder.place()) < WaitingTime::escape_top()) {
                    side.next_symbol();
                    if (escaped > most) throw Malformed("a change lies past the block's end");
                    side.coder.take(0, WaitingTime::escape_top());
                    escaped += waiting.half();
                    waiting.escaped();
                }
                target = escaped + waiting.reach(place);
                searching = true;
            }
            // The first element at which the weight that passed, its own included, reaches the target.
            const size_t limit = live ? row_end : run.elements;
            const uint32_t* weight_of = weights.of[live].data();
            for (; at + 8 <= limit; at += 8) {
                const uint64_t next = waited + weight8(before + at, cls, weight_of);
                if (next >= target) break;
                waited = next;
            }
            uint64_t weight = 0;
            for (; at < limit; at++) {
                weight = weight_of[cls(before[at])];
                if (waited + weight >= target) break;
                waited += weight;
            }
            if (at == limit) {
                if (at == run.elements) break;
                live = false;  // past the end of a live row
                continue;
            }
            if (waited < escaped || weight == 0) throw Malformed("a change at an element that cannot change");
            const uint64_t high = waiting.survival(waited - escaped), low = waiting.survival(waited - escaped + weight);
            if (place < low || place >= high) throw Malformed("a change outside its interval");
            side.next_symbol();
            side.coder.take(low, high);
            waiting.changed(waited - escaped, weight);
            waited = escaped = 0;
            searching = false;

            if (at >= row_end) {
                tally = 0;
                row_end = rows.end_after(at);
            }
            const bool down = side.bit(models.against[std::min(std::abs(tally), 3)], false) != (tally < 0);
            tally += down ? -1 : 1;
            const U c = U(cls(before[at])), length = U(code_size(side, models, c, 0));
            const U step = down ? U(-length) : length;
            const U value = unordered(U(ordered(before[at], kind.floating) + step), kind.floating);
            if (length == 0) throw Malformed("a change by nothing");
            std::memcpy(&result.values[found * sizeof(U)], &value, sizeof(U));
            result.positions.push_back(uint32_t(base + at));
            found++;
            at++;
            left--;
            live = true;
        }
        base += run.elements;
    }
    if (left) throw Malformed("the block has fewer changes than it claims");
    if (!side.coder.finished()) throw Malformed("the code is longer or shorter than its changes");
    return result;
}

}  // namespace

Encoded encode_block(const void* old, const void* now, const Elements& kind, const std::vector<Run>& runs) {
    switch (kind.width) {
        case 1: return encode(static_cast<const uint8_t*>(old), static_cast<const uint8_t*>(now), kind, runs);
        case 2: return encode(static_cast<const uint16_t*>(old), static_cast<const uint16_t*>(now), kind, runs);
        default: return encode(static_cast<const uint32_t*>(old), static_cast<const uint32_t*>(now), kind, runs);
    }
}

Decoded decode_block(const uint8_t* payload, size_t size, const void* old, const Elements& kind,
                     const std::vector<Run>& runs) {
    switch (kind.width) {
        case 1: return decode(payload, size, static_cast<const uint8_t*>(old), kind, runs);
        case 2: return decode(payload, size, static_cast<const uint16_t*>(old), kind, runs);
        default: return decode(payload, size, static_cast<const uint32_t*>(old), kind, runs);
    }
}

}  // namespace pulse
