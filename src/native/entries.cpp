#include "entries.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>

#include "block_models.h"
#include "entry_classes.h"
#include "entry_places.h"
#include "entry_values.h"
#include "plain_bits.h"

namespace pulse {
namespace {

constexpr size_t kFewEntries = 256, kSomeEntries = 12288;  // below: 1 or 16 contexts of values
constexpr size_t kTile = 1 << 13;
constexpr int kFirstOpen = 10, kFirstLevel = 6;  // expected where nothing is known

// What stands in front of the states of a payload.
struct Head {
    Octaves octaves;
    int first, count;  // classes whose levels are listed
    int base, sizes;
    OpenLevels opens;
    SymbolTables tables;
};

// The levels of classes, each expected where its neighbour of one octave of momentum less is.
template <class Side>
void code_opens(Side& side, Head& head) {
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
        level = uint8_t(std::clamp(code_near(side, models.near, level, expected), 1, kOpenLevels - 1));
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
            if (!like && c >= back && !tables.empty(c - back, symbols)) like = &tables.levels[size_t(c - back)];
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
            levels[s] = uint8_t(std::clamp(code_near(side, model.near, levels[s], expected), 0, kMostLevel));
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

void choose_opens(Head& head, const Shared& shared, const std::array<uint32_t, kClasses>& entries) {
    // A sample tells enough of a large block. Four counters each, since neighbours often are of one class.
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
            classify(shared.theta + at, shared.momentum + at, count, shared.rounding, head.octaves, group);
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

// Chooses the head but for the levels, by a sample of the entries: by the octaves in use, which few entries lie outside.
// The base of the distance is even, so that trainers mostly agree.
void choose_octaves(Head& head, const Shared& shared, const uint32_t* positions, const float* values, size_t count,
                    bool bf16) {
    constexpr size_t kSample = 1 << 13;
    std::array<uint32_t, 512> distances{}, octaves{};
    std::array<uint32_t, 256> exponents{};
    size_t sampled = 0;
    for (size_t i = 0; i < count; i += 1 + count / kSample, sampled++) {
        const uint32_t theta = bits_of(shared.theta[positions[i]]);
        const Distance distance = distance_of(theta, shared.rounding);
        distances[distance_octave(theta, distance)]++;
        exponents[(theta >> 23) & 255]++;
        const Sized value = sized(values[i], theta, distance, bf16);
        if (value.octave != Sized::kNone) octaves[size_t(value.octave)]++;
    }
    const int distance = std::clamp((top_of(distances, sampled, 1024) - 14) & ~1, 0, 254);
    head.octaves = shared.classes && std::abs(distance - int(shared.octaves.distance)) <= 2
                       ? shared.octaves
                       : Octaves{uint8_t(distance), shared_octaves(shared.momentum, shared.elements).momentum};
    const int top = std::min(top_of(octaves, sampled, 4096) + (count > kSample), 254);
    head.base = std::max(top - (kMostSizes - 1), 0);
    while (head.base < top && !octaves[size_t(head.base)]) head.base++;
    head.base = std::max(head.base - (count > kSample), std::max(top - (kMostSizes - 1), 0));
    head.sizes = top - head.base + 1;
    head.tables.contexts = count < kFewEntries ? 1 : count < kSomeEntries ? 16 : kMostContexts;
    head.tables.top = top_of(exponents, sampled, 1024);
}

// What is counted while the values are described: entries by class, symbols by context.
struct EntryCounts {
    std::array<uint32_t, kClasses> classes{};
    SymbolCounts symbols{};
};

// Describes the values by the head: their symbols and contexts, and plain bits. A few entries at a time; theta and momentum
// are read alone, so that many of these reads are on their way at once.
template <class DistanceOf>
std::vector<CodedSymbol> describe(const Head& head, const Shared& shared, const uint32_t* positions,
                                  const float* values, size_t count, const ValueKind& kind, DistanceOf&& distance_of,
                                  EntryCounts& counts, BitWriter& bits) {
    constexpr size_t kChunk = 1 << 10;
    const uint8_t* const known = shared.classes_for(head.octaves);
    std::vector<CodedSymbol> coded(count);
    float theta[kChunk], momentum[kChunk];
    uint8_t classes[kChunk];
    for (size_t from = 0; from < count; from += kChunk) {
        const size_t size = std::min(kChunk, count - from);
        for (size_t i = 0; i < size; i++) theta[i] = shared.theta[positions[from + i]];
        if (known) {
            for (size_t i = 0; i < size; i++) classes[i] = known[positions[from + i]];
        } else {
            for (size_t i = 0; i < size; i++) momentum[i] = shared.momentum[positions[from + i]];
            classify(theta, momentum, size, shared.rounding, head.octaves, classes);
        }
        for (size_t i = 0; i < size; i++) {
            const uint32_t t = bits_of(theta[i]);
            const Sized value = sized(values[from + i], t, distance_of(t), kind.bf16);
            const uint32_t symbol = value.symbol(kind);
            const size_t context = head.tables.of(classes[i], t, kind.bf16);
            counts.classes[classes[i]]++;
            counts.symbols[context][symbol]++;
            coded[from + i] = {uint8_t(context), uint8_t(symbol)};
            if (int(symbol >> 1) == kind.escape()) {
                bits.put(value.whole, kind.bf16 ? 15 : 31);
            } else {
                bits.put(value.rest, value.bits);
            }
        }
    }
    return coded;
}

// The classes of a block, a tile at a time; for several octaves, if need be.
class Classes {
public:
    explicit Classes(const Shared& shared) : shared_(shared) {}

    Tile of(Octaves octaves, size_t from) {
        const size_t elements = std::min(kTile, shared_.elements - from);
        if (const uint8_t* known = shared_.classes_for(octaves)) return {known + from, from, elements};
        for (const Known& known : known_) {
            if (known.from == from && known.octaves == octaves) return {known.classes.data(), from, elements};
        }
        if (!known_.empty() && known_.front().from != from) known_.clear();
        known_.push_back({octaves, from, std::vector<uint8_t>(kTile)});
        uint8_t* const classes = known_.back().classes.data();
        classify(shared_.theta + from, shared_.momentum + from, elements, shared_.rounding, octaves, classes);
        return {classes, from, elements};
    }

private:
    struct Known {
        Octaves octaves;
        size_t from;
        std::vector<uint8_t> classes;
    };
    const Shared& shared_;
    std::vector<Known> known_;
};

// One payload, as far as it is decoded.
class Decoder {
public:
    // `data` is the payload past the number of entries.
    Decoder(const Shared& shared, const uint8_t* data, size_t size, size_t count, bool bf16)
        : shared_(shared), count_(count), kind_{shared.rounding, bf16, 0, 0}, bits_(data, 0) {
        size_t at = 0;
        head_.octaves.distance = take_byte(data, size, at);
        head_.octaves.momentum = take_byte(data, size, at);
        head_.first = take_byte(data, size, at);
        head_.count = take_byte(data, size, at) + 1;
        head_.base = take_byte(data, size, at);
        head_.sizes = take_byte(data, size, at);
        const int contexts = head_.tables.contexts = take_byte(data, size, at);
        head_.tables.top = take_byte(data, size, at);
        if (head_.first + head_.count > kClasses || head_.sizes < 1 || head_.sizes > kMostSizes ||
            head_.base + head_.sizes > 255 || (contexts != 1 && contexts != 16 && contexts != kMostContexts)) {
            throw Malformed("the block's head is out of range");
        }
        kind_.base = head_.base, kind_.sizes = head_.sizes;
        const uint64_t coded = take_count(data, size, at);
        if (coded > size - at) throw Malformed("the code ends past the block");
        Reader side{RangeDecoder(data + at, coded)};
        at += coded;
        head_.opens.fill(0);
        code_opens(side, head_);
        code_tables(side, head_.tables, kind_.symbols());
        if (!side.coder.finished()) throw Malformed("the code is longer or shorter than its levels");
        head_.tables.set_lengths(kind_.symbols());
        for (uint32_t& x : coder_.states) {
            const uint64_t above = take_count(data, size, at);
            if (above > UINT32_MAX - kRansLow) throw Malformed("a state is out of range");
            x = kRansLow + uint32_t(above);
        }
        const uint64_t words = take_count(data, size, at);
        if (words > (size - at) / 2) throw Malformed("the code ends past the block");
        words_.resize(2 * words + kWordsPadding);
        std::copy_n(data + at, 2 * words, words_.data());
        coder_.next = words_.data();
        coder_.end = coder_.next + 2 * words;
        bits_ = BitReader(data + at + 2 * words, size - at - 2 * words);
        result_.positions.resize(count + kRansStates);
        classes_.resize(count);
        theta_.resize(count);
    }

    void places(Classes& classes, size_t from) {
        const Tile tile = classes.of(head_.octaves, from);
        const size_t before = found_;
        uint32_t* const positions = result_.positions.data();
        decode_places(coder_, tile, head_.opens, positions, found_, count_);
        for (size_t i = before; i < found_; i++) {
            classes_[i] = tile.classes[positions[i] - from];
            theta_[i] = bits_of(shared_.theta[positions[i]]);
        }
    }

    Entries values() {
        if (found_ != count_) throw Malformed("there are fewer entries than announced");
        result_.positions.resize(count_);
        result_.values.resize(count_);
        decode_values(coder_, bits_, theta_, classes_.data(), result_.values.data(), kind_, head_.tables);
        if (coder_.next != coder_.end || !bits_.finished() ||
            std::any_of(coder_.states, coder_.states + kRansStates, [](uint32_t x) { return x != kRansLow; })) {
            throw Malformed("the code is longer or shorter than its entries");
        }
        return std::move(result_);
    }

private:
    const Shared& shared_;
    size_t count_, found_ = 0;
    ValueKind kind_;
    BitReader bits_;
    Head head_;
    RansReader coder_;
    Entries result_;
    std::vector<uint8_t> words_, classes_;  // the words with their padding; by entry
    std::vector<uint32_t> theta_;           // by entry
};

}  // namespace

std::vector<uint8_t> encode_entries(const Shared& shared, const uint32_t* positions, const float* values, size_t count,
                                    bool bf16) {
    std::vector<uint8_t> payload;
    put_varint(payload, count);
    if (count == 0) return payload;
    const auto head = std::make_unique<Head>();
    choose_octaves(*head, shared, positions, values, count, bf16);
    const ValueKind kind{shared.rounding, bf16, head->base, head->sizes};
    const auto counts = std::make_unique<EntryCounts>();
    BitWriter bits(4 * count);
    const auto described = [&](auto&& distance) {
        return describe(*head, shared, positions, values, count, kind, distance, *counts, bits);
    };
    const std::vector<CodedSymbol> coded =
        shared.rounding.is_bf16() ? described(bf16_distance)
                                  : described([&](uint32_t theta) { return distance_of(theta, shared.rounding); });
    choose_opens(*head, shared, counts->classes);
    set_levels(head->tables, counts->symbols, kind.symbols());
    head->tables.set_lengths(kind.symbols());

    for (int x : {int(head->octaves.distance), int(head->octaves.momentum), head->first, head->count - 1, head->base,
                  head->sizes, head->tables.contexts, head->tables.top}) {
        payload.push_back(uint8_t(x));
    }
    Writer side;
    code_opens(side, *head);
    code_tables(side, head->tables, kind.symbols());
    const std::vector<uint8_t> levels = side.coder.finish();
    put_varint(payload, levels.size());
    payload.insert(payload.end(), levels.begin(), levels.end());

    constexpr size_t kVector = 64;                                // vectors store whole registers in front of the words
    const size_t room = 2 * (shared.elements + count) + kVector;  // a symbol gives a word at most
    const std::unique_ptr<uint8_t[]> code(new uint8_t[room]);
    RansWriter coder{{}, code.get() + room};
    std::fill_n(coder.states, kRansStates, kRansLow);
    encode_values(coder, coded, head->tables);
    Classes classes(shared);
    for (size_t tile = (shared.elements + kTile - 1) / kTile; tile-- > 0;) {
        encode_places(coder, classes.of(head->octaves, tile * kTile), head->opens, positions, count);
    }
    for (uint32_t x : coder.states) put_varint(payload, x - kRansLow);
    put_varint(payload, size_t(code.get() + room - coder.next) / 2);
    payload.insert(payload.end(), coder.next, code.get() + room);
    const std::vector<uint8_t> rest = bits.finish();
    payload.insert(payload.end(), rest.begin(), rest.end());
    return payload;
}

std::vector<Entries> decode_entries(const Shared& shared,
                                    const std::vector<std::pair<const uint8_t*, size_t>>& payloads, bool bf16) {
    std::vector<std::unique_ptr<Decoder>> decoders;
    for (const auto& [data, size] : payloads) {
        size_t at = 0;
        const uint64_t count = take_count(data, size, at);
        if (count > shared.elements) throw Malformed("more entries than parameters");
        if (count == 0 && at != size) throw Malformed("an empty block has a code");
        decoders.push_back(count ? std::make_unique<Decoder>(shared, data + at, size - at, size_t(count), bf16)
                                 : nullptr);
    }
    Classes classes(shared);
    for (size_t from = 0; from < shared.elements; from += kTile) {
        for (const auto& decoder : decoders) {
            if (decoder) decoder->places(classes, from);
        }
    }
    std::vector<Entries> results;
    for (const auto& decoder : decoders) results.push_back(decoder ? decoder->values() : Entries());
    return results;
}

}  // namespace pulse
