#include "loco/entries.h"

#include <algorithm>
#include <memory>

#include "entropy/plain_bits.h"
#include "loco/entry_head.h"

namespace pulse {
namespace {

constexpr size_t kTile = 1 << 13;

// Describes the values by the head: their symbols and contexts, and plain bits. A few entries at a time; theta and momentum
// are read alone, so that many of these reads are on their way at once.
template <class DistanceOf>
std::vector<CodedSymbol> describe(const EntryHead& head, const Shared& shared,
                                  const uint32_t* positions, const float* values, size_t count,
                                  DistanceOf&& distance_of, EntryCounts& counts, BitWriter& bits) {
    constexpr size_t kChunk = 1 << 10;
    const ValueKind& kind = head.kind;
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
            const Sized value = sized(values[from + i], t, distance_of(t), kind.mantissa);
            const uint32_t symbol = value.symbol(kind);
            const size_t context = head.tables.of(classes[i], t, kind.exact());
            counts.classes[classes[i]]++;
            counts.symbols[context][symbol]++;
            coded[from + i] = {uint8_t(context), uint8_t(symbol)};
            if (int(symbol >> 1) == kind.escape()) {
                bits.put(value.whole, kind.whole_bits());
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
        if (const uint8_t* known = shared_.classes_for(octaves))
            return {known + from, from, elements};
        for (const Known& known : known_) {
            if (known.from == from && known.octaves == octaves)
                return {known.classes.data(), from, elements};
        }
        if (!known_.empty() && known_.front().from != from) known_.clear();
        known_.push_back({octaves, from, std::vector<uint8_t>(kTile)});
        uint8_t* const classes = known_.back().classes.data();
        classify(shared_.theta + from, shared_.momentum + from, elements, shared_.rounding, octaves,
                 classes);
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
    Decoder(const Shared& shared, const uint8_t* data, size_t size, size_t count, int mantissa)
        : shared_(shared), count_(count), bits_(data, 0) {
        size_t at = 0;
        head_ = EntryHead::take(data, size, at, shared.rounding, mantissa);
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
        decode_values(coder_, bits_, theta_, classes_.data(), result_.values.data(), head_.kind,
                      head_.tables);
        if (coder_.next != coder_.end || !bits_.finished() ||
            std::any_of(coder_.states, coder_.states + kRansStates,
                        [](uint32_t x) { return x != kRansLow; })) {
            throw Malformed("the code is longer or shorter than its entries");
        }
        return std::move(result_);
    }

private:
    const Shared& shared_;
    size_t count_, found_ = 0;
    BitReader bits_;
    EntryHead head_;
    RansReader coder_;
    Entries result_;
    std::vector<uint8_t> words_, classes_;  // the words with their padding; by entry
    std::vector<uint32_t> theta_;           // by entry
};

}  // namespace

std::vector<uint8_t> encode_entries(const Shared& shared, const uint32_t* positions,
                                    const float* values, size_t count, int mantissa) {
    std::vector<uint8_t> payload;
    put_varint(payload, count);
    if (count == 0) return payload;
    const auto head =
        std::make_unique<EntryHead>(choose_octaves(shared, positions, values, count, mantissa));
    const auto counts = std::make_unique<EntryCounts>();
    BitWriter bits(4 * count);
    const auto described = [&](auto&& distance) {
        return describe(*head, shared, positions, values, count, distance, *counts, bits);
    };
    const std::vector<CodedSymbol> coded =
        shared.rounding.is_bf16()
            ? described(bf16_distance)
            : described([&](uint32_t theta) { return distance_of(theta, shared.rounding); });
    choose_levels(*head, shared, *counts);
    head->put(payload);

    constexpr size_t kVector = 64;  // vectors store whole registers in front of the words
    const size_t room = 2 * (shared.elements + count) + kVector;  // a symbol gives a word at most
    const std::unique_ptr<uint8_t[]> code(new uint8_t[room]);
    RansWriter coder{{}, code.get() + room};
    std::fill_n(coder.states, kRansStates, kRansLow);
    encode_values(coder, coded, head->tables);
    Classes classes(shared);
    for (size_t tile = (shared.elements + kTile - 1) / kTile; tile-- > 0;) {
        encode_places(coder, classes.of(head->octaves, tile * kTile), head->opens, positions,
                      count);
    }
    for (uint32_t x : coder.states) put_varint(payload, x - kRansLow);
    put_varint(payload, size_t(code.get() + room - coder.next) / 2);
    payload.insert(payload.end(), coder.next, code.get() + room);
    const std::vector<uint8_t> rest = bits.finish();
    payload.insert(payload.end(), rest.begin(), rest.end());
    return payload;
}

std::vector<Entries> decode_entries(const Shared& shared,
                                    const std::vector<std::pair<const uint8_t*, size_t>>& payloads,
                                    int mantissa) {
    std::vector<std::unique_ptr<Decoder>> decoders;
    for (const auto& [data, size] : payloads) {
        size_t at = 0;
        const uint64_t count = take_count(data, size, at);
        if (count > shared.elements) throw Malformed("more entries than parameters");
        if (count == 0 && at != size) throw Malformed("an empty block has a code");
        decoders.push_back(
            count ? std::make_unique<Decoder>(shared, data + at, size - at, size_t(count), mantissa)
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
