#include "loco/entry_head.h"

#include <algorithm>
#include <cmath>

#include "entropy/models.h"

namespace pulse {
namespace {

constexpr size_t kFewEntries = 256, kSomeEntries = 12288;  // below: 1 or 16 contexts of values
constexpr int kFirstOpen = 10, kFirstLevel = 6;            // expected where nothing is known

// The levels of classes, each expected where its neighbor of one octave of momentum less is.
template <class Side>
void code_opens(Side& side, EntryHead& head) {
    LevelModels models;
    for (int c = head.first; c < head.first + head.count; c++) {
        uint8_t& level = head.opens[size_t(c)];
        side.next_symbol();
        if (side.bit(models.absent, level == 0)) {
            level = 0;
            continue;
        }
        int expected = kFirstOpen;
        for (int back : {2, 16, 1}) {
            if (c - back >= head.first && head.opens[size_t(c - back)]) {
                expected = head.opens[size_t(c - back)];
                break;
            }
        }
        level =
            uint8_t(std::clamp(code_near(side, models.near, level, expected), 1, kOpenLevels - 1));
    }
}

// The levels of symbols, context by context, each expected where it is in a context that is alike: of smaller parameters or
// nearer boundaries, of one octave of momentum less, or the one before.
template <class Side>
void code_tables(Side& side, SymbolTables& tables, int symbols) {
    AdaptiveBit none;
    std::array<LevelModels, 3> models;
    for (int c = 0; c < tables.contexts; c++) {
        auto& levels = tables.levels[size_t(c)];
        side.next_symbol();
        if (side.bit(none, tables.empty(c, symbols))) {
            levels.fill(kAbsent);
            continue;
        }
        const std::array<uint8_t, kMostEntrySymbols>* like = nullptr;
        for (int back : {16, 2, 1}) {
            if (!like && c >= back && !tables.empty(c - back, symbols))
                like = &tables.levels[size_t(c - back)];
        }
        for (size_t s = 0; s < size_t(symbols); s++) {
            LevelModels& model = models[like ? size_t((*like)[s] != kAbsent) : 2];
            side.next_symbol();
            if (side.bit(model.absent, levels[s] == kAbsent)) {
                levels[s] = kAbsent;
                continue;
            }
            int expected = kFirstLevel;
            if (like && (*like)[s] != kAbsent) {
                expected = (*like)[s];
            } else if (s >= 2 && levels[s - 2] != kAbsent) {
                expected = levels[s - 2];
            }
            levels[s] = uint8_t(
                std::clamp(code_near(side, model.near, levels[s], expected), 0, kMostLevel));
        }
    }
}

// The level whose frequency codes `entries` of `elements` of a class in the fewest bits.
uint8_t open_level(double entries, double elements) {
    struct Bits {
        std::array<double, kOpenLevels> open, shut;
        Bits() {
            for (size_t l = 1; l < kOpenLevels; l++) {
                open[l] = std::log2(kRansScale / double(kOpens[l]));
                shut[l] = std::log2(kRansScale / double(kRansScale - kOpens[l]));
            }
        }
    };
    static const Bits bits;
    size_t best = 1;
    double least = INFINITY;
    for (size_t l = 1; l < kOpenLevels; l++) {
        const double cost = entries * bits.open[l] + (elements - entries) * bits.shut[l];
        if (cost < least) least = cost, best = l;
    }
    return uint8_t(best);
}

void choose_opens(EntryHead& head, const Shared& shared,
                  const std::array<uint32_t, kClasses>& entries) {
    // A sample tells enough of a large block. Four counters each, since neighbors often are of one class.
    constexpr size_t kGroup = 1 << 10;
    const size_t stride = kGroup * (shared.elements > (1 << 18) ? 8 : 1);
    std::array<std::array<uint32_t, kClasses>, 4> seen{};
    size_t sampled = 0;
    for (size_t at = 0; at < shared.elements; at += stride) {
        const size_t count = std::min(kGroup, shared.elements - at);
        uint8_t group[kGroup];
        const uint8_t* const known = shared.classes_for(head.octaves);
        const uint8_t* classes = known ? known + at : group;
        if (!known) {
            classify(shared.theta + at, shared.momentum + at, count, shared.rounding, head.octaves,
                     group);
        }
        for (size_t i = 0; i < count; i++) seen[i & 3][classes[i]]++;
        sampled += count;
    }
    const double scale = double(shared.elements) / double(sampled);
    head.opens.fill(0);
    head.first = kClasses;
    int last = 0;
    for (int c = 0; c < kClasses; c++) {
        if (!entries[size_t(c)]) continue;
        head.first = std::min(head.first, c);
        last = c;
        uint32_t found = 0;
        for (const auto& counts : seen) found += counts[size_t(c)];
        const double own = entries[size_t(c)];
        head.opens[size_t(c)] = open_level(own, std::max(own, found * scale));
    }
    head.count = last - head.first + 1;
}

// The highest place of a histogram that all but one in `share` lie at or below.
template <class Histogram>
int top_of(const Histogram& histogram, size_t count, size_t share) {
    int e = int(histogram.size()) - 1;
    for (size_t above = 0; e > 0 && (above += histogram[size_t(e)]) * share <= count; e--) continue;
    return e;
}

}  // namespace

void EntryHead::put(std::vector<uint8_t>& out) {
    for (int x : {int(octaves.distance), int(octaves.momentum), first, count - 1, kind.base,
                  kind.sizes, tables.contexts, tables.top}) {
        out.push_back(uint8_t(x));
    }
    put_code(out, [&](Writer& side) {
        code_opens(side, *this);
        code_tables(side, tables, kind.symbols());
    });
}

EntryHead EntryHead::take(const uint8_t* data, size_t size, size_t& at, const Rounding& rounding,
                          int mantissa) {
    EntryHead head;
    head.octaves.distance = take_byte(data, size, at);
    head.octaves.momentum = take_byte(data, size, at);
    head.first = take_byte(data, size, at);
    head.count = take_byte(data, size, at) + 1;
    const int base = take_byte(data, size, at), sizes = take_byte(data, size, at);
    const int contexts = head.tables.contexts = take_byte(data, size, at);
    head.tables.top = take_byte(data, size, at);
    if (head.first + head.count > kClasses || sizes < 1 || sizes > kMostSizes ||
        base + sizes > 255 || (contexts != 1 && contexts != 16 && contexts != kMostContexts)) {
        throw Malformed("the block's head is out of range");
    }
    head.kind = {rounding, mantissa, base, sizes};
    head.opens.fill(0);
    take_code(data, size, at, [&](Reader& side) {
        code_opens(side, head);
        code_tables(side, head.tables, head.kind.symbols());
    });
    head.tables.set_lengths(head.kind.symbols());
    return head;
}

EntryHead choose_octaves(const Shared& shared, const uint32_t* positions, const float* values,
                         size_t count, int mantissa) {
    constexpr size_t kSample = 1 << 13;
    std::array<uint32_t, 512> distances{}, octaves{};
    std::array<uint32_t, 256> exponents{};
    size_t sampled = 0;
    for (size_t i = 0; i < count; i += 1 + count / kSample, sampled++) {
        const uint32_t theta = bits_of(shared.theta[positions[i]]);
        const Distance distance = distance_of(theta, shared.rounding);
        distances[distance_octave(theta, distance)]++;
        exponents[(theta >> 23) & 255]++;
        const Sized value = sized(values[i], theta, distance, mantissa);
        if (value.octave != Sized::kNone) octaves[size_t(value.octave)]++;
    }
    EntryHead head;
    // Even, so that trainers mostly agree.
    const int distance = std::clamp((top_of(distances, sampled, 1024) - 14) & ~1, 0, 254);
    head.octaves =
        shared.classes && std::abs(distance - int(shared.octaves.distance)) <= 2
            ? shared.octaves
            : Octaves{uint8_t(distance), shared_octaves(shared.momentum, shared.elements).momentum};
    const int top = std::min(top_of(octaves, sampled, 4096) + (count > kSample), 254);
    const int least = std::max(top - (kMostSizes - 1), 0);
    int base = least;
    while (base < top && !octaves[size_t(base)]) base++;
    base = std::max(base - (count > kSample), least);
    head.kind = {shared.rounding, mantissa, base, top - base + 1};
    head.tables.contexts = count < kFewEntries ? 1 : count < kSomeEntries ? 16 : kMostContexts;
    head.tables.top = top_of(exponents, sampled, 1024);
    return head;
}

void choose_levels(EntryHead& head, const Shared& shared, const EntryCounts& counts) {
    choose_opens(head, shared, counts.classes);
    set_levels(head.tables, counts.symbols, head.kind.symbols());
    head.tables.set_lengths(head.kind.symbols());
}

}  // namespace pulse
