#include "codecs/codecs.h"

#include <algorithm>
#include <cmath>

#include "codecs/table/coder.h"
#include "common/scan.h"
#include "common/vectors.h"

namespace pulse {
namespace {

constexpr int kMostPiece = 16;  // plain bits at once

template <class U>
void count_steps(StepCounts& counts, const U* old, const U* now, size_t elements,
                 const ElementKind& kind) {
    constexpr size_t kGroup = 64, kSample = size_t(1) << 17;
    const ClassOf cls{kind.shift, kind.mask};
    const size_t stride = kGroup * std::max<size_t>(1, elements / kSample);
    counts.elements = elements;
    const size_t ahead = 8 * stride;  // another page, which no processor foresees
    for (size_t at = 0; at < elements; at += stride) {
        const size_t end = std::min(at + kGroup, elements);
        for (size_t i = at + ahead; i < end + ahead; i += 64 / sizeof(U)) {
            __builtin_prefetch(old + i);
            __builtin_prefetch(now + i);
        }
        for (size_t i = at; i < end; i++) {
            const U step = U(to_ordered(now[i], kind.floating) - to_ordered(old[i], kind.floating));
            counts.of[cls(old[i])][std::min(symbol_of(step), most_alphabet(int(sizeof(U))) - 1)]++;
        }
        counts.sampled += end - at;
    }
}

// One group of at most kRansStates elements, the last phase of its decoder first.
template <class U>
void encode_group(RansEncoder& coder, const U* old, const U* now, size_t elements) {
    const ElementKind& kind = coder.kind;
    const ClassOf cls{kind.shift, kind.mask};
    uint32_t entries[kRansStates], plain[kRansStates];
    int bits[kRansStates], most_bits = 0;
    for (size_t i = 0; i < elements; i++) {
        const U step = U(to_ordered(now[i], kind.floating) - to_ordered(old[i], kind.floating));
        coder.changed += step != 0;
        const int symbol = std::min(symbol_of(step), coder.entries.escape);
        entries[i] = coder.entries.of[symbol][coder.entries.table[cls(old[i])]];
        const int coded = entry_symbol(entries[i]);
        bits[i] = plain_bits(coded, coder.entries.escape, kind.width);
        plain[i] = uint32_t(step);
        if (bits[i] && coded != coder.entries.escape) {
            const bool down = step >> (8 * sizeof(U) - 1);
            const uint32_t size = down ? U(-step) : step, top = 1u << (bits[i] - 1);
            plain[i] = (size & (top - 1)) | (down ? top : 0);
        }
        most_bits = std::max(most_bits, bits[i]);
    }
    for (int from = most_bits > kMostPiece ? kMostPiece : 0; most_bits && from >= 0;
         from -= kMostPiece) {
        for (size_t i = elements; i-- > 0;) {
            const int count = std::clamp(bits[i] - from, 0, kMostPiece);
            uint32_t& x = coder.states[i];
            if (count == 0) continue;
            if (x >> (32 - count)) {
                coder.put(x);
                x >>= 16;
            }
            x = x << count | (plain[i] >> from & ((1u << count) - 1));
        }
    }
    for (size_t i = elements; i-- > 0;) {
        coder.symbol(coder.states[i], entry_start(entries[i]), entry_length(entries[i]));
    }
}

// The entry of every slot of every table, for the plain decoder of many elements; empty for one of few.
using Slots = std::vector<uint32_t>;

Slots slots_of(const RansEntries& entries, int tables) {
    Slots slots(size_t(tables) * kRansScale);
    for (int t = 0; t < tables; t++) {
        for (int s = 0; s < entries.alphabet; s++) {
            const uint32_t entry = entries.of[s][t];
            std::fill_n(slots.begin() + t * int(kRansScale) + int(entry_start(entry)),
                        entry_length(entry), entry);
        }
    }
    return slots;
}

inline uint32_t entry_of(const RansEntries& entries, const Slots& slots, int table, uint32_t slot) {
    if (!slots.empty()) return slots[size_t(table) * kRansScale + slot];
    int symbol = entries.escape;
    while (entries.of[symbol][table] > (slot << 20 | kLowOfSlot)) symbol--;
    return entries.of[symbol][table];
}

template <class U>
void decode_group(RansDecoder& coder, const Slots& slots, const U* old, size_t base,
                  size_t elements) {
    const ElementKind& kind = coder.kind;
    const ClassOf cls{kind.shift, kind.mask};
    uint32_t plain[kRansStates];
    uint8_t symbols[kRansStates];
    int most_bits = 0;
    for (size_t i = 0; i < elements; i++) {
        uint32_t& x = coder.states[i];
        const uint32_t entry = entry_of(
            coder.entries, slots, coder.entries.table[cls(old[base + i])], RansReader::slot(x));
        coder.symbol(x, entry_start(entry), entry_length(entry));
        symbols[i] = uint8_t(entry_symbol(entry));
        most_bits = std::max(most_bits, plain_bits(symbols[i], coder.entries.escape, kind.width));
        plain[i] = 0;
    }
    for (int from = 0; from < most_bits; from += kMostPiece) {
        for (size_t i = 0; i < elements; i++) {
            const int bits = plain_bits(symbols[i], coder.entries.escape, kind.width);
            const int count = std::clamp(bits - from, 0, kMostPiece);
            uint32_t& x = coder.states[i];
            if (count == 0) continue;
            plain[i] |= (x & ((1u << count) - 1)) << from;
            x >>= count;
            if (x < kRansLow) x = x << 16 | coder.take();
        }
    }
    U* const values = reinterpret_cast<U*>(coder.values);
    U* const before = reinterpret_cast<U*>(coder.before);
    for (size_t i = 0; i < elements; i++) {
        const int symbol = symbols[i];
        if (symbol == 0) continue;
        U step = symbol == 1 ? U(1) : U(-1);
        if (symbol == coder.entries.escape) {
            step = U(plain[i]);
            if (step == 0) throw Malformed("a change by nothing");
        } else if (symbol >= kFirstLong) {
            const uint32_t top = 1u << (symbol - 2);
            const U size = U(top | (plain[i] & (top - 1)));
            step = plain[i] & top ? U(-size) : size;
        }
        coder.positions[coder.found] = uint32_t(base + i);
        before[coder.found] = old[base + i];
        values[coder.found++] =
            from_ordered(U(to_ordered(old[base + i], kind.floating) + step), kind.floating);
    }
    if (coder.found > coder.most) throw Malformed("there are more changes than announced");
}

template <class U>
Encoded encode(const U* old, const U* now, size_t elements, const ElementKind& kind) {
    StepCounts counts;
    count_steps(counts, old, now, elements, kind);
    const RansTables tables = choose_tables(counts, kind.width);
    const RansEntries entries = RansEntries::for_encoding(tables);

    const size_t groups = elements / kRansStates, rest = elements % kRansStates;
    constexpr size_t kVector = 64;  // vectors store whole registers in front of the words
    const Buffer<uint8_t> code(2 * kWordsOfGroup * (groups + 1) + kVector);
    uint8_t* const end = code.data.get() + code.size;
    RansEncoder coder{{{}, end}, entries, kind};
    std::fill_n(coder.states, kRansStates, kRansLow);
    encode_group(coder, old + groups * kRansStates, now + groups * kRansStates, rest);
    size_t left = groups;
    if (vectors) left -= vector_encode(coder, old, now, 0, groups);
    while (left-- > 0)
        encode_group(coder, old + left * kRansStates, now + left * kRansStates, kRansStates);

    Encoded result{{}, coder.changed};
    if (coder.changed == 0) return result;
    put_varint(result.payload, coder.changed);
    tables.put(result.payload);
    for (uint32_t x : coder.states) {
        for (int k = 0; k < 32; k += 8) result.payload.push_back(uint8_t(x >> k));
    }
    result.payload.insert(result.payload.end(), coder.next, end);
    return result;
}

template <class U>
Decoded decode(const uint8_t* data, size_t size, const U* old, size_t elements,
               const ElementKind& kind) {
    size_t at = 0;
    const uint64_t changed = take_count(data, size, at);
    if (changed == 0 || changed > elements)
        throw Malformed("the number of changes is 0 or exceeds the elements");
    const RansTables tables = RansTables::take(data, size, at, kind);
    const RansEntries entries = RansEntries::for_decoding(tables);
    if (size - at < 4 * kRansStates) throw Malformed("the block ends inside its states");

    Decoded result(changed + kRansStates, sizeof(U));
    RansDecoder coder{{{}, data + at + 4 * kRansStates, data + size},
                      entries,
                      kind,
                      result.positions.data.get(),
                      result.values.data.get(),
                      result.before.data.get(),
                      0,
                      changed};
    for (size_t i = 0; i < kRansStates; i++, at += 4) {
        for (size_t k = 0; k < 4; k++) coder.states[i] |= uint32_t(data[at + k]) << (8 * k);
        if (coder.states[i] < kRansLow) throw Malformed("a state is out of range");
    }
    const size_t groups = elements / kRansStates;
    size_t group = 0;
    if (vectors) group += vector_decode(coder, old, 0, groups);
    const bool many = (groups - group) * kRansStates >= size_t(tables.count) * kRansScale;
    const Slots slots = many ? slots_of(entries, tables.count) : Slots();
    for (; group < groups; group++)
        decode_group(coder, slots, old, group * kRansStates, kRansStates);
    decode_group(coder, slots, old, groups * kRansStates, elements % kRansStates);
    if (coder.found != changed) throw Malformed("there are fewer changes than announced");
    if (coder.next != coder.end || std::any_of(coder.states, coder.states + kRansStates,
                                               [](uint32_t x) { return x != kRansLow; })) {
        throw Malformed("the code is longer or shorter than its elements");
    }
    result.shorten(changed, sizeof(U));
    return result;
}

}  // namespace

Spread sampled_spread(const void* old, const void* now, size_t elements, int width) {
    constexpr size_t kGroup = 64, kGroups = 256;
    const auto bits = [](double share) {
        return share > 0 && share < 1
                   ? -share * std::log2(share) - (1 - share) * std::log2(1 - share)
                   : 0;
    };
    const auto* a = static_cast<const uint8_t*>(old);
    const auto* b = static_cast<const uint8_t*>(now);
    const size_t stride = kGroup * std::max<size_t>(1, elements / (kGroup * kGroups));
    size_t seen = 0, changed = 0;
    double known = 0;
    std::vector<uint32_t> found;
    for (size_t at = 0; at < elements; at += stride) {
        const size_t count = std::min(kGroup, elements - at), from = at * size_t(width);
        found.clear();
        differing(a + from, b + from, count * size_t(width), width, 0, found);
        seen += count;
        changed += found.size();
        // The entropy of a small sample is too low by half a nat (Miller and Madow).
        const bool mixed = !found.empty() && found.size() < count;
        known += double(count) * bits(double(found.size()) / double(count)) +
                 (mixed ? 0.5 / std::log(2.0) : 0);
    }
    if (changed == 0) return {0, 1};
    const double density = double(changed) / double(seen), all = double(seen) * bits(density);
    return {density, all > 0 ? known / all : 1};
}

Encoded encode_steps(const void* old, const void* now, size_t elements, const ElementKind& kind) {
    return for_width(kind.width, [&](auto zero) {
        using U = decltype(zero);
        return encode(static_cast<const U*>(old), static_cast<const U*>(now), elements, kind);
    });
}

Decoded decode_steps(const uint8_t* payload, size_t size, const void* old, size_t elements,
                     const ElementKind& kind) {
    return for_width(kind.width, [&](auto zero) {
        return decode(payload, size, static_cast<const decltype(zero)*>(old), elements, kind);
    });
}

}  // namespace pulse
