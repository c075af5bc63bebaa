#include "stretches.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>

#include "clones.h"
#include "range_coder.h"
#include "step.h"

namespace pulse {
namespace {

constexpr uint32_t kLongestGap = 65535;
constexpr size_t kTile = 1 << 13;  // elements that are worked on in the first-level cache

class RecordWriter {
public:
    // Room for so many changes of a block of so many elements.
    RecordWriter(size_t changes, uint64_t elements)
        : records_((changes + size_t(elements / kLongestGap) + 1) * kRecordBytes), at_(records_.data()) {}

    void put(uint32_t position, uint8_t step, uint8_t cls) {
        for (; position - next_ >= kLongestGap; next_ += kLongestGap) write(kLongestGap, 0, 0);
        write(position - next_, step, cls);
        next_ = position + 1;
    }
    std::vector<uint8_t> finish() {
        records_.resize(size_t(at_ - records_.data()));
        records_.shrink_to_fit();
        return std::move(records_);
    }

private:
    void write(uint32_t gap, uint8_t step, uint8_t cls) {
        at_[0] = uint8_t(gap), at_[1] = uint8_t(gap >> 8), at_[2] = step, at_[3] = cls;
        at_ += kRecordBytes;
    }
    std::vector<uint8_t> records_;
    uint8_t* at_;
    uint32_t next_ = 0;
};

// Walks over records, which have positions below `elements`. A record of the longest gap and no step only leads on; any other without
// a step says what class an element has, of which nothing else is to be remembered.
class RecordReader {
public:
    RecordReader(const Stretch& stretch, uint64_t elements)
        : at_(stretch.records), end_(at_ + stretch.bytes / kRecordBytes * kRecordBytes), elements_(elements) {}

    // Calls `found(position, step, class)` for those below `limit` that are left.
    template <class Found>
    PULSE_INLINE void read(uint64_t limit, Found found) {
        const uint64_t behind = std::min(limit, elements_);
        const uint8_t* at = at_;
        uint64_t next = next_;
        for (; at != end_; at += kRecordBytes) {
            const uint64_t gap = uint64_t(at[0]) | uint64_t(at[1]) << 8, position = next + gap;
            if (position >= behind) break;
            const uint8_t step = at[2];
            const bool leads_on = gap == kLongestGap && step == 0;
            next = position + !leads_on;
            if (!leads_on) found(position, step, at[3]);
        }
        at_ = at;
        next_ = next;
    }
    size_t left() const { return size_t(end_ - at_) / kRecordBytes; }

private:
    const uint8_t *at_, *const end_;
    const uint64_t elements_;
    uint64_t next_ = 0;
};

// What the stretches say of the elements of a tile, and which ones they are: others have any value.
struct Tile {
    alignas(64) uint32_t values[kTile];
    alignas(64) uint64_t touched[kTile / 64];

    // The value of an element, 0 at first.
    PULSE_INLINE uint32_t& at(size_t place) {
        uint64_t& word = touched[place / 64];
        values[place] &= 0u - uint32_t(word >> (place % 64) & 1);
        word |= uint64_t(1) << (place % 64);
        return values[place];
    }
    // Of the value of a State, where there is one.
    void set_class(size_t place, uint8_t cls) {
        if (touched[place / 64] >> (place % 64) & 1) values[place] = (values[place] & 0xffff) | uint32_t(cls) << 16;
    }
};

// Goes through the block by tiles: `read(reader, stretch, first, tile)` for each stretch, which is to note the records of the tile, then
// `found(first, tile, records)`, how many these were.
template <class Read, class Found>
PULSE_INLINE void walk(const std::vector<Stretch>& stretches, uint64_t elements, Read read, Found found) {
    std::vector<RecordReader> readers;
    for (const Stretch& stretch : stretches) readers.emplace_back(stretch, elements);
    const auto tile = std::make_unique<Tile>();
    for (uint64_t begin = 0; begin < elements; begin += kTile) {
        std::memset(tile->touched, 0, sizeof tile->touched);
        size_t records = 0;
        for (size_t k = 0; k < readers.size(); k++) {
            const size_t left = readers[k].left();
            read(readers[k], k, begin, *tile);
            records += left - readers[k].left();
        }
        found(uint32_t(begin), *tile, records);
    }
}

// Calls `found(number, place)` for each bit in order, for the first two, whether they are set or not, without branches, which nobody
// could foresee; what is found for a bit that is not set is to be overwritten. How many are set.
template <class Found>
PULSE_INLINE size_t ones_of(uint64_t bits, Found found) {
    const size_t count = size_t(__builtin_popcountll(bits));
    const auto place = [](uint64_t left) { return size_t(__builtin_ctzll(left | uint64_t(1) << 63)); };
    found(0, place(bits));
    bits &= bits - 1;
    found(1, place(bits));
    for (size_t k = 2; k < count; k++) {
        bits &= bits - 1;
        found(k, size_t(__builtin_ctzll(bits)));
    }
    return count;
}

constexpr int kLarge = 5;  // the vigour of an element whose last step had a size above 1, at least

int group_of(int age, int vigour, bool turned) { return 1 + (age * kVigours + vigour) * 2 + turned; }

// What a step of a stretch of one version makes of the group of an element.
class Transition {
public:
    // `later`: the versions after the stretch; `longer`: those since the middle of the last stretch of several versions.
    Transition(int later, int longer) {
        const int since = later + 1, age = std::min(since, kAges - 1) - 1;
        for (int large = 0; large < 2; large++) {
            for (int turned = 0; turned < 2; turned++) {
                for (int before = 0; before < kGroups; before++) {
                    int vigour = 0;
                    if (before) {
                        const int was = (before - 1) / 2, last = was / kVigours;
                        const int rest = (last == kAges - 1 ? longer : last + 1) - since;
                        vigour = std::clamp(was % kVigours + (rest <= 2) - (rest > 4), 0, kVigours - 1);
                    }
                    if (large) vigour = std::max(vigour, kLarge);
                    next_[size_t(2 * large + turned)][size_t(before)] =
                        uint8_t(group_of(age, vigour, before && turned));
                }
            }
        }
    }

    // As the value of a State; 0 where nothing is known.
    PULSE_INLINE uint32_t of(uint32_t before, uint8_t step, uint8_t cls) const {
        const size_t large = uint8_t(step + 1) > 2, turned = ((before >> 15) ^ (step >> 7)) & 1;
        return next_[2 * large + turned][before & 255] | uint32_t(step) << 8 | uint32_t(cls) << 16;
    }

private:
    std::array<std::array<uint8_t, 256>, 4> next_{};  // by whether it is large, whether it turned, and the group before
};

// What the net step of a stretch of several versions says of an element, whatever was known of it.
std::array<uint16_t, 256> given_by(uint32_t span) {
    std::array<uint16_t, 256> given{};
    for (int step = 0; step < 256; step++) {
        const int net = int8_t(step), size = std::abs(net), n = int(span), each = std::max(1, (2 * size + n) / (2 * n));
        const int vigour = size < 2 ? 0 : size < 4 ? 1 : size < 8 ? 2 : size < 16 ? 3 : 4;
        const int last = net < 0 ? -each : each;
        given[size_t(step)] = uint16_t(group_of(kAges - 1, vigour, false) | uint8_t(last) << 8);
    }
    return given;
}

template <class U>
std::vector<uint8_t> records(const uint32_t* positions, size_t count, const U* old, const U* now,
                             const ElementKind& kind) {
    const ClassOf cls{kind.shift, kind.mask};
    RecordWriter writer(count, count ? positions[count - 1] : 0);
    for (size_t i = 0; i < count; i++) {
        const uint8_t step = uint8_t(to_ordered(now[i], kind.floating) - to_ordered(old[i], kind.floating));
        writer.put(positions[i], step, uint8_t(cls(now[i])));
    }
    return writer.finish();
}

}  // namespace

std::vector<uint8_t> records_of(const uint32_t* positions, size_t count, const void* old, const void* now,
                                const ElementKind& kind) {
    const auto of = [&](auto zero) {
        using U = decltype(zero);
        return records(positions, count, static_cast<const U*>(old), static_cast<const U*>(now), kind);
    };
    return kind.width == 1 ? of(uint8_t()) : kind.width == 2 ? of(uint16_t()) : of(uint32_t());
}

std::vector<uint8_t> merged_records(const std::vector<Stretch>& stretches, uint64_t elements) {
    size_t most = 0;
    for (const Stretch& stretch : stretches) most += stretch.bytes / kRecordBytes;
    RecordWriter writer(size_t(std::min<uint64_t>(most, elements)), elements);
    walk(
        stretches, elements,
        [](RecordReader& reader, size_t, uint64_t first, Tile& tile) {
            reader.read(first + kTile, [&](uint64_t position, uint8_t step, uint8_t cls) {
                uint32_t& value = tile.at(size_t(position - first));
                value = uint8_t(value + step) | uint32_t(cls) << 8;
            });
        },
        [&](uint32_t first, const Tile& tile, size_t records) {
            for (uint32_t word = 0; records && word < kTile / 64; word++) {
                for (uint64_t bits = tile.touched[word]; bits; bits &= bits - 1) {
                    const uint32_t at = 64 * word + uint32_t(__builtin_ctzll(bits)), value = tile.values[at];
                    writer.put(first + at, uint8_t(value), uint8_t(value >> 8));
                }
            }
        });
    return writer.finish();
}

RememberedCount count_remembered(const std::vector<Stretch>& stretches, uint64_t end, const uint32_t* positions,
                                 size_t changed) {
    std::vector<uint64_t> seen(size_t(end / 64 + 1));
    RememberedCount found{{0}};
    std::vector<size_t>& counts = found.by_last;
    for (size_t k = stretches.size(); k-- > 0;) {
        size_t count = counts.back();
        RecordReader(stretches[k], end).read(end, [&](uint64_t position, uint8_t step, uint8_t) {
            uint64_t& word = seen[size_t(position / 64)];
            const uint64_t bit = uint64_t(step != 0) << (position & 63);
            count += (word & bit) < bit;
            word |= bit;
        });
        counts.push_back(count);
    }
    for (size_t i = 0; i < changed; i++) found.of_changed += seen[positions[i] / 64] >> (positions[i] % 64) & 1;
    return found;
}

PULSE_CLONES Remembered remember(const std::vector<Stretch>& stretches, uint64_t elements) {
    std::vector<Transition> transitions;
    std::vector<std::array<uint16_t, 256>> given;
    size_t most = 0;
    int later = 0, longer = 0;
    for (const Stretch& stretch : stretches) {
        later += int(stretch.span);
        most += stretch.bytes / kRecordBytes;
    }
    for (const Stretch& stretch : stretches) {
        later -= int(stretch.span);
        if (stretch.span > 1) longer = later + int(stretch.span) / 2;
        transitions.emplace_back(later, longer);
        given.push_back(given_by(stretch.span));
    }
    most = size_t(std::min<uint64_t>(most, elements)) + 2;  // two more, which `ones_of` may write
    const size_t words = size_t((elements + kTile - 1) / kTile * (kTile / 64));
    Remembered remembered;
    remembered.positions.reset(new uint32_t[most]);
    remembered.states.reset(new State[most]);
    remembered.marks = Marks(words);
    remembered.before.reset(new uint32_t[words]());
    uint32_t *const positions = remembered.positions.get(), *const before = remembered.before.get();
    State* const states = remembered.states.get();
    uint64_t* const marks = remembered.marks.words();
    size_t count = 0;
    walk(
        stretches, elements,
        [&](RecordReader& reader, size_t k, uint64_t first, Tile& tile) {
            if (stretches[k].span > 1) {
                reader.read(first + kTile, [&](uint64_t position, uint8_t step, uint8_t cls) {
                    if (step == 0) return tile.set_class(size_t(position - first), cls);
                    tile.at(size_t(position - first)) = given[k][step] | uint32_t(cls) << 16;
                });
            } else {
                const Transition& transition = transitions[k];
                reader.read(first + kTile, [&](uint64_t position, uint8_t step, uint8_t cls) {
                    if (step == 0) return tile.set_class(size_t(position - first), cls);
                    uint32_t& value = tile.at(size_t(position - first));
                    value = transition.of(value, step, cls);
                });
            }
        },
        [&](uint32_t first, const Tile& tile, size_t records) {
            std::copy_n(tile.touched, kTile / 64, marks + first / 64);
            if (!records) return;
            size_t n = count;
            const bool few = records < kTile / 256;  // then most words are empty, and a branch can be foreseen
            for (uint32_t word = 0; word < kTile / 64; word++) {
                if (few && !tile.touched[word]) continue;
                const uint32_t *const values = tile.values + 64 * word, from = first + 64 * word;
                before[first / 64 + word] = uint32_t(n);
                n += ones_of(tile.touched[word], [=](size_t k, size_t place) {
                    positions[n + k] = from + uint32_t(place);
                    states[n + k] = {values[place]};
                });
            }
            count = n;
        });
    remembered.count = count;
    return remembered;
}

}  // namespace pulse
