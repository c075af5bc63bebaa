#include "codecs/table/frequencies.h"

#include <algorithm>
#include <cmath>

#include "entropy/payload.h"

namespace pulse {

std::array<uint8_t, kClasses> RansTables::by_class() const {
    std::array<uint8_t, kClasses> table{};
    for (int t = 1; t < count; t++) {
        for (int c = first[size_t(t)]; c < kClasses; c++) table[size_t(c)] = uint8_t(t);
    }
    return table;
}

void RansTables::put(std::vector<uint8_t>& out) const {
    out.push_back(uint8_t(alphabet));
    out.push_back(uint8_t(count));
    for (int t = 1; t < count; t++) out.push_back(first[size_t(t)]);
    for (int t = 0; t < count; t++) {
        for (int s = 1; s < alphabet; s++) put_varint(out, lengths[t][s]);
    }
}

RansTables RansTables::take(const uint8_t* data, size_t size, size_t& at, const ElementKind& kind) {
    RansTables tables;
    tables.alphabet = take_byte(data, size, at);
    tables.count = take_byte(data, size, at);
    if (tables.alphabet <= kFirstLong || tables.alphabet > most_alphabet(kind.width) ||
        tables.count < 1 || tables.count > kRansTables) {
        throw Malformed("the number of symbols or tables is out of range");
    }
    for (int t = 1; t < tables.count; t++) {
        tables.first[size_t(t)] = take_byte(data, size, at);
        if (tables.first[size_t(t)] <= tables.first[size_t(t - 1)] ||
            tables.first[size_t(t)] > kind.mask) {
            throw Malformed("the classes of the tables are not ascending or out of range");
        }
    }
    for (int t = 0; t < tables.count; t++) {
        uint64_t rest = kRansScale;
        for (int s = 1; s < tables.alphabet; s++) {
            const uint64_t length = take_count(data, size, at);
            if (length > rest) throw Malformed("the frequencies of a table exceed their sum");
            tables.lengths[t][s] = uint16_t(length);
            rest -= length;
        }
        tables.lengths[t][0] = uint16_t(rest);
    }
    return tables;
}

RansEntries RansEntries::for_decoding(const RansTables& tables) {
    RansEntries entries;
    entries.table = tables.by_class();
    entries.alphabet = tables.alphabet;
    entries.escape = tables.alphabet - 1;
    for (int t = 0; t < kRansTables; t++) {
        uint32_t start = 0;
        for (int s = 0; s < tables.alphabet; s++) {
            const uint32_t length = t < tables.count ? tables.lengths[t][s] : 0;
            // A symbol without an interval repeats the one before; where none is before, the next one replaces it.
            entries.of[s][t] = length ? rans_entry(start, length, s) : s ? entries.of[s - 1][t] : 0;
            start += length;
        }
    }
    return entries;
}

RansEntries RansEntries::for_encoding(const RansTables& tables) {
    RansEntries entries = for_decoding(tables);
    for (int t = 0; t < tables.count; t++) {
        for (int s = 0; s < tables.alphabet; s++) {
            if (!tables.lengths[t][s]) entries.of[s][t] = entries.of[entries.escape][t];
        }
    }
    return entries;
}

namespace {

using Counts = std::array<double, kRansAlphabet>;

// Classes that share a table.
struct Segment {
    int first;
    Counts counts;
    double bits;
};

double order0_bits(const Counts& counts) {
    double total = 0, bits = 0;
    for (double n : counts) {
        total += n;
        if (n > 0) bits -= n * std::log2(n);
    }
    return total > 0 ? bits + total * std::log2(total) : 0;
}

Segment joined(const Segment& a, const Segment& b) {
    Segment both{a.first, a.counts, 0};
    for (size_t s = 0; s < both.counts.size(); s++) both.counts[s] += b.counts[s];
    both.bits = order0_bits(both.counts);
    return both;
}

// The smallest alphabet whose escapes cost few bits more than symbols of their own would.
int choose_alphabet(const StepCounts& counts, int width) {
    Counts all{};
    for (const auto& of_class : counts.of) {
        for (int s = 0; s < most_alphabet(width); s++) all[size_t(s)] += of_class[s];
    }
    double allowed = order0_bits(all) / 256, spent = 0;
    int alphabet = most_alphabet(width);
    while (alphabet > kFirstLong + 1) {
        const int last = alphabet - 2;
        spent += all[size_t(last)] * (8 * width - plain_bits(last, -1, width));
        if (spent > allowed) break;
        alphabet--;
    }
    return alphabet;
}

// Frequencies in proportion to the counts; what occurs gets one. So do a step of 0 and the escape, which the elements that
// are not in the sample may need.
void quantize(const Counts& counts, int alphabet, uint16_t* lengths) {
    double total = 0;
    for (int s = 0; s < alphabet; s++) total += counts[size_t(s)];
    int sum = 0, largest = 0;
    for (int s = 0; s < alphabet; s++) {
        const double share = total > 0 ? counts[size_t(s)] / total * kRansScale : 0;
        const bool needed = counts[size_t(s)] > 0 || s == 0 || s == alphabet - 1;
        lengths[s] = uint16_t(std::max(int(share + 0.5), needed ? 1 : 0));
        sum += lengths[s];
        if (lengths[s] > lengths[largest]) largest = s;
    }
    lengths[largest] = uint16_t(int(lengths[largest]) + int(kRansScale) - sum);
}

}  // namespace

RansTables choose_tables(const StepCounts& counts, int width) {
    RansTables tables;
    tables.alphabet = choose_alphabet(counts, width);
    std::vector<Segment> segments;
    for (int c = 0; c < kClasses; c++) {
        Segment segment{c, {}, 0};
        bool any = false;
        for (int s = 0; s < most_alphabet(width); s++) {
            segment.counts[size_t(std::min(s, tables.alphabet - 1))] += counts.of[c][s];
            any |= counts.of[c][s] != 0;
        }
        segment.bits = order0_bits(segment.counts);
        if (any) segments.push_back(segment);
    }
    if (segments.empty()) segments.push_back({0, {}, 0});
    // Neighbors are joined while there are too many, or while a table costs more than it gains.
    const double scale = double(counts.elements) / double(std::max<uint64_t>(counts.sampled, 1));
    const double table_bits = 8 + 10.0 * (tables.alphabet - 1);
    while (segments.size() > 1) {
        size_t best = 0;
        double least = INFINITY;
        for (size_t i = 0; i + 1 < segments.size(); i++) {
            const double more =
                joined(segments[i], segments[i + 1]).bits - segments[i].bits - segments[i + 1].bits;
            if (more < least) least = more, best = i;
        }
        if (segments.size() <= size_t(kRansTables) && least * scale > table_bits) break;
        segments[best] = joined(segments[best], segments[best + 1]);
        segments.erase(segments.begin() + std::ptrdiff_t(best) + 1);
    }
    tables.count = int(segments.size());
    for (int t = 0; t < tables.count; t++) {
        tables.first[size_t(t)] = uint8_t(t ? segments[size_t(t)].first : 0);
        quantize(segments[size_t(t)].counts, tables.alphabet, tables.lengths[t]);
    }
    return tables;
}

}  // namespace pulse
