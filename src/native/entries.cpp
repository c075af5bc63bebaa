#include "entries.h"

#include <array>
#include <map>
#include <memory>

#include "block_statistics.h"
#include "entry_classes.h"
#include "gate.h"
#include "symbols.h"

namespace pulse {
namespace {

constexpr int kEscape = kSymbols - 1;
constexpr size_t kTile = 1 << 13;

// One description of each value serves both directions, as in payload.h: a range coder, and plain bits beside it.
struct EntryWriter : Writer {
    BitWriter bits;
    uint32_t symbol(AdaptiveSymbol& model, uint32_t value) {
        coder.share(model.bound(value), model.bound(value + 1));
        model.adapt(value);
        return value;
    }
    uint32_t rest(uint32_t value, int count) {
        bits.put(value, count);
        return value;
    }
};
struct EntryReader : Reader {
    BitReader bits;
    uint32_t symbol(AdaptiveSymbol& model, uint32_t) {
        const uint32_t value = model.at(coder.share_place());
        coder.take_share(model.bound(value), model.bound(value + 1));
        model.adapt(value);
        return value;
    }
    uint32_t rest(uint32_t, int count) { return bits.take(count); }
};

struct Models {
    AdaptiveBit absent, as_expected, lower;
    std::array<AdaptiveBit, 8> further;
    std::array<AdaptiveBit, 26 * 16> near;
    std::array<AdaptiveSymbol, 512> sizes;
};

// The levels of all classes of which one is present, each expected where its neighbour of one octave of momentum less is.
template <class Side>
void code_levels(Side& side, Models& models, std::array<uint8_t, kClasses>& levels, int first, int count) {
    for (int c = first; c < first + count; c++) {
        side.next_symbol();
        if (side.bit(models.absent, levels[size_t(c)] == kAbsent)) {
            levels[size_t(c)] = kAbsent;
            continue;
        }
        int expected = 10;
        for (int back : {2, 16, 1}) {
            if (c - back >= first && levels[size_t(c - back)] != kAbsent) {
                expected = levels[size_t(c - back)];
                break;
            }
        }
        const int away = int(levels[size_t(c)]) - expected;
        int read = 0;
        if (!side.bit(models.as_expected, away == 0)) {
            const bool lower = side.bit(models.lower, away < 0);
            const int distance = std::abs(away) - 1;
            int k = 0;
            while (k < kMostLevel && !side.bit(models.further[size_t(std::min(k, 7))], distance == k)) k++;
            read = lower ? -(k + 1) : k + 1;
        }
        levels[size_t(c)] = uint8_t(std::clamp(expected + read, 0, kMostLevel));
    }
}

// A value against theta. Its direction says which of theta's two boundaries it crosses; where it is a multiple of theta's
// unit in the last place, as differences of close numbers are, only the excess over that boundary is left to say.
template <class Side>
float code_value(Side& side, Models& models, const Rounding& rounding, uint32_t theta, uint32_t cls, int base,
                 bool bf16, float value) {
    side.next_symbol();
    const uint32_t bits = bits_of(value), exponent = (theta & kMagnitude) >> 23;
    const Distance distance = distance_of(theta, rounding);
    const uint32_t octave = (bits_of(float(distance.nearest())) >> 23) - 127;
    const bool up = (bits ^ theta) >> 31;
    const bool near = side.bit(models.near[octave << 4 | (cls & 15)], up == distance.up_is_near());
    const bool is_up = near == distance.up_is_near();
    const uint32_t sign = is_up ? ~theta & kSign : theta & kSign;
    const uint32_t own = (bits & kMagnitude) >> 23;
    if (bf16) {
        const int octave_of = int(own) - base, known = octave_of >= 0 && octave_of < kEscape ? octave_of : kEscape;
        const int read = int(side.symbol(models.sizes[cls << 1 | near], uint32_t(known)));
        if (read == kEscape) return float_of(sign | side.rest((bits & kMagnitude) >> 16, 15) << 16);
        return float_of(sign | uint32_t(base + read) << 23 | side.rest((bits >> 16) & 127, 7) << 16);
    }
    const uint32_t need = is_up ? distance.up : distance.down;
    uint64_t excess = 0;  // plus one; 0: escape
    {
        const uint64_t significand = (bits & 0x7fffff) | (own ? 1u << 23 : 0);
        const int shift = int(std::max(own, 1u)) - int(std::max(exponent, 1u));
        uint64_t multiple = 0;
        if (shift >= 0 && shift <= 7) {
            multiple = significand << shift;
        } else if (shift < 0 && shift > -24 && (significand & ((1u << -shift) - 1)) == 0) {
            multiple = significand >> -shift;
        }
        if (multiple >= need && multiple != 0) excess = multiple - need + 1;
        if (excess >> 31) excess = 0;
    }
    const uint32_t binade = uint32_t(std::clamp(int(exponent) - base, 0, 15));
    const int length = excess ? 31 - __builtin_clz(uint32_t(excess)) : kEscape;
    const int read = int(side.symbol(models.sizes[binade << 5 | (cls & 15) << 1 | near], uint32_t(length)));
    if (read == kEscape) return float_of(sign | side.rest(bits & kMagnitude, 31));
    const uint32_t rest = (1u << read) | side.rest(uint32_t(excess) & ((1u << read) - 1), read);
    const uint64_t multiple = uint64_t(rest) - 1 + need;
    // multiple * 2^(exponent - 150); a power of two below the normal numbers scales exactly in two steps.
    const uint32_t e = std::max(exponent, 1u);
    const float unit = e > 23 ? float_of((e - 23) << 23) : float_of(1u << (e - 1));
    const float result = float(multiple) * unit;
    return float_of((bits_of(result) & kMagnitude) | sign);
}

size_t total_of(const std::vector<Run>& runs) {
    size_t total = 0;
    for (const Run& run : runs) total += run.elements;
    return total;
}

struct Head {
    int boost, first, count, base;
    Octaves octaves;
};

// `data` is the payload past its head: first the range coder's part, then the plain bits.
Entries decode_one(const Shared& shared, const uint8_t* data, size_t size, size_t count, const Head& head,
                   const uint8_t* classes, bool bf16) {
    size_t at = 0;
    uint32_t coded = 0;
    for (int k = 0; k < 4; k++) coded |= uint32_t(take_byte(data, size, at)) << (8 * k);
    if (coded > size - at) throw Malformed("the code ends past the block");
    EntryReader side{{RangeDecoder(data + at, coded)}, {data + at + coded, size - at - coded}};
    const auto models = std::make_unique<Models>();
    std::array<uint8_t, kClasses> levels;
    levels.fill(kAbsent);
    code_levels(side, *models, levels, head.first, head.count);
    const Weights weights(levels, head.boost);
    PositionReader<uint8_t> reader(classes, {0, 255}, weights, shared.runs);
    Entries result;
    result.positions.resize(count);
    result.values.resize(count);
    for (size_t i = 0; i < count; i++) {
        reader.read(side);
        const size_t p = reader.position();
        const float value =
            code_value(side, *models, shared.rounding, bits_of(shared.theta[p]), classes[p], head.base, bf16, 0.0f);
        if ((bits_of(value) & kMagnitude) >= kHuge) throw Malformed("a value that is not finite");
        result.positions[i] = uint32_t(p);
        result.values[i] = value;
    }
    if (!side.coder.finished() || !side.bits.finished()) {
        throw Malformed("the code is longer or shorter than its entries");
    }
    return result;
}

}  // namespace

std::vector<uint8_t> encode_entries(const Shared& shared, const uint32_t* positions, const float* values, size_t count,
                                    bool bf16) {
    std::vector<uint8_t> payload;
    put_varint(payload, count);
    if (count == 0) return payload;
    const size_t total = total_of(shared.runs);

    // The octaves in use: few entries lie outside, and the base of the distance is even, so that trainers mostly agree.
    std::array<uint32_t, 512> distances{};
    std::array<uint32_t, 256> exponents{};
    for (size_t i = 0; i < count; i++) {
        const uint32_t theta = bits_of(shared.theta[positions[i]]);
        distances[distance_octave(theta, distance_of(theta, shared.rounding))]++;
        exponents[(bits_of(bf16 ? values[i] : shared.theta[positions[i]]) >> 23) & 255]++;
    }
    const auto top = [count](const auto& histogram, size_t share) {
        size_t e = histogram.size() - 1;
        for (size_t above = 0; e > 0 && (above += histogram[e]) * share <= count; e--) continue;
        return int(e);
    };
    Head head;
    head.octaves.distance = uint8_t(std::clamp((top(distances, 1024) - 14) & ~1, 0, 254));
    head.octaves.momentum = uint8_t(std::max(int(momentum_octave(shared.momentum, total)) - 7, 0));
    head.base = std::max(top(exponents, bf16 ? 1 << 30 : 1024) - (bf16 ? kEscape - 1 : 15), 0);

    std::vector<uint8_t> classes(total);
    BlockStatistics statistics;
    statistics.elements = total;
    for (size_t at = 0; at < total; at += kTile) {
        const size_t end = std::min(at + kTile, total);
        classify(shared.theta + at, shared.momentum + at, end - at, shared.rounding, head.octaves, &classes[at]);
        statistics.sample(classes.data(), at, end, {0, 255});
    }
    std::vector<uint32_t> at(positions, positions + count);
    for (uint32_t p : at) statistics.changes[classes[p]]++;
    statistics.count_live(at, shared.runs);
    CodePlan plan = plan_code(statistics);
    for (int x :
         {plan.boost, plan.first, plan.count - 1, int(head.octaves.distance), int(head.octaves.momentum), head.base}) {
        payload.push_back(uint8_t(x));
    }
    EntryWriter side;
    const auto models = std::make_unique<Models>();
    code_levels(side, *models, plan.levels, plan.first, plan.count);
    const Weights weights(plan.levels, plan.boost);
    PositionWriter<uint8_t> writer(classes.data(), {0, 255}, weights, shared.runs);
    for (size_t i = 0; i < count; i++) {
        const size_t p = positions[i];
        writer.write(side.coder, p);
        code_value(side, *models, shared.rounding, bits_of(shared.theta[p]), classes[p], head.base, bf16, values[i]);
    }
    const std::vector<uint8_t> code = side.coder.finish(), rest = side.bits.finish();
    for (int k = 0; k < 4; k++) payload.push_back(uint8_t(code.size() >> (8 * k)));
    payload.insert(payload.end(), code.begin(), code.end());
    payload.insert(payload.end(), rest.begin(), rest.end());
    return payload;
}

std::vector<Entries> decode_entries(const Shared& shared,
                                    const std::vector<std::pair<const uint8_t*, size_t>>& payloads, bool bf16) {
    const size_t total = total_of(shared.runs);
    std::map<std::pair<uint8_t, uint8_t>, std::vector<uint8_t>> classes;
    std::vector<Entries> results;
    for (const auto& [data, size] : payloads) {
        size_t at = 0;
        const uint64_t count = take_count(data, size, at);
        if (count == 0) {
            if (at != size) throw Malformed("an empty block has a code");
            results.emplace_back();
            continue;
        }
        if (count > total) throw Malformed("more entries than parameters");
        Head head;
        head.boost = take_byte(data, size, at);
        head.first = take_byte(data, size, at);
        head.count = take_byte(data, size, at) + 1;
        head.octaves.distance = take_byte(data, size, at);
        head.octaves.momentum = take_byte(data, size, at);
        head.base = take_byte(data, size, at);
        if (head.boost > kMostBoost || head.first + head.count > kClasses || (bf16 && head.base > 255 - kEscape)) {
            throw Malformed("the block's head is out of range");
        }
        std::vector<uint8_t>& known = classes[{head.octaves.distance, head.octaves.momentum}];
        if (known.empty()) {
            known.resize(total);
            classify(shared.theta, shared.momentum, total, shared.rounding, head.octaves, known.data());
        }
        results.push_back(decode_one(shared, data + at, size - at, size_t(count), head, known.data(), bf16));
    }
    return results;
}

}  // namespace pulse
