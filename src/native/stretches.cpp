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
constexpr size_t kRecordBytes = 3;
constexpr size_t kTile = 1 << 13;  // elements that are worked on in the first-level cache

class RecordWriter {
public:
    void put(uint32_t position, uint8_t step) {
        while (position - next_ > kLongestGap) {
            write(kLongestGap, 0);
            next_ += kLongestGap;
        }
        write(position - next_, step);
        next_ = position + 1;
    }
    std::vector<uint8_t> records;

private:
    void write(uint32_t gap, uint8_t step) {
        const uint8_t record[kRecordBytes] = {uint8_t(gap), uint8_t(gap >> 8), step};
        records.insert(records.end(), record, record + kRecordBytes);
    }
    uint32_t next_ = 0;
};

// Walks over records, which have positions below `elements`.
class RecordReader {
public:
    RecordReader(const Stretch& stretch, uint64_t elements)
        : at_(stretch.records), end_(at_ + stretch.bytes / kRecordBytes * kRecordBytes), elements_(elements) {}

    // Calls `found(position, step)` for those below `limit` that are left.
    template <class Found>
    PULSE_INLINE void read(uint64_t limit, Found found) {
        const uint64_t behind = std::min(limit, elements_);
        const uint8_t* at = at_;
        uint64_t next = next_;
        for (; at != end_; at += kRecordBytes) {
            const uint64_t position = next + (uint64_t(at[0]) | uint64_t(at[1]) << 8);
            if (position >= behind) break;
            const uint8_t step = at[2];
            next = position + (step != 0);
            if (step) found(position, step);
        }
        at_ = at;
        next_ = next;
    }

private:
    const uint8_t *at_, *const end_;
    const uint64_t elements_;
    uint64_t next_ = 0;
};

// What the stretches say of the elements of a tile: 16 bits of each, and which ones they are.
struct Tile {
    alignas(64) uint16_t values[kTile] = {};
    alignas(64) uint64_t touched[kTile / 64] = {};

    PULSE_INLINE void touch(size_t at) { touched[at / 64] |= uint64_t(1) << (at % 64); }
    void clear() {
        std::memset(values, 0, sizeof values);
        std::memset(touched, 0, sizeof touched);
    }
};

// Goes through the block by tiles: `note(tile value, stretch, step)` for what the stretches hold, then `found(first, tile)`.
template <class Note, class Found>
PULSE_INLINE void walk(const std::vector<Stretch>& stretches, uint64_t elements, Note note, Found found) {
    std::vector<RecordReader> readers;
    for (const Stretch& stretch : stretches) readers.emplace_back(stretch, elements);
    const auto tile = std::make_unique<Tile>();
    for (uint64_t begin = 0; begin < elements; begin += kTile) {
        size_t records = 0;
        for (size_t k = 0; k < readers.size(); k++) {
            readers[k].read(begin + kTile, [&](uint64_t position, uint8_t step) {
                const size_t at = size_t(position - begin);
                note(tile->values[at], k, step);
                tile->touch(at);
                records++;
            });
        }
        found(uint32_t(begin), *tile);
        if (records) tile->clear();
    }
}

// Calls `found(place)` for each bit in order, for the first two, whether they are set or not, without branches, which nobody
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

// What a step of a stretch makes of what was known of an element.
class Transition {
public:
    // `later`: the versions after the stretch; `longer`: those since the middle of the last stretch of several versions.
    Transition(int span, int later, int longer) {
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
        for (int step = 0; step < 256; step++) {
            const int net = int8_t(step), size = std::abs(net), each = std::max(1, (2 * size + span) / (2 * span));
            const int vigour = size < 2 ? 0 : size < 4 ? 1 : size < 8 ? 2 : size < 16 ? 3 : 4;
            const int group = span > 1 ? group_of(kAges - 1, vigour, false) : 0;
            given_[size_t(step)] = uint16_t(group | uint8_t(net < 0 ? -each : each) << 8);
            row_[size_t(step)] = uint8_t(size > 1 ? 2 : 0);
        }
    }

    // Group and last step, the step in the high byte.
    uint16_t of(uint16_t before, uint8_t step) const {
        const uint16_t given = given_[step], group = next_[row_[step] + ((before >> 15) ^ (step >> 7))][before & 255];
        return uint16_t(given & 255 ? given : given | group);
    }

private:
    std::array<std::array<uint8_t, 256>, 4> next_{};  // by whether it is large, whether it turned, and the group before
    std::array<uint16_t, 256> given_{};
    std::array<uint8_t, 256> row_{};
};

template <class U>
std::vector<uint8_t> records(const uint32_t* positions, size_t count, const U* old, const U* now, bool floating) {
    RecordWriter writer;
    writer.records.reserve(count * kRecordBytes);
    for (size_t i = 0; i < count; i++) {
        const uint8_t step = uint8_t(to_ordered(now[i], floating) - to_ordered(old[i], floating));
        if (step) writer.put(positions[i], step);
    }
    return std::move(writer.records);
}

}  // namespace

std::vector<uint8_t> records_of(const uint32_t* positions, size_t count, const void* old, const void* now, int width,
                                bool floating) {
    switch (width) {
        case 1:
            return records(positions, count, static_cast<const uint8_t*>(old), static_cast<const uint8_t*>(now),
                           floating);
        case 2:
            return records(positions, count, static_cast<const uint16_t*>(old), static_cast<const uint16_t*>(now),
                           floating);
        default:
            return records(positions, count, static_cast<const uint32_t*>(old), static_cast<const uint32_t*>(now),
                           floating);
    }
}

std::vector<uint8_t> merged_records(const std::vector<Stretch>& stretches, uint64_t elements) {
    RecordWriter writer;
    walk(
        stretches, elements, [](uint16_t& net, size_t, uint8_t step) { net = uint8_t(net + step); },
        [&](uint32_t first, const Tile& tile) {
            for (uint32_t word = 0; word < kTile / 64; word++) {
                for (uint64_t bits = tile.touched[word]; bits; bits &= bits - 1) {
                    const uint32_t at = 64 * word + uint32_t(__builtin_ctzll(bits));
                    if (tile.values[at]) writer.put(first + at, uint8_t(tile.values[at]));
                }
            }
        });
    return std::move(writer.records);
}

std::vector<size_t> count_remembered(const std::vector<Stretch>& stretches, uint64_t end) {
    std::vector<uint64_t> seen(size_t(end / 64 + 1));
    std::vector<size_t> counts = {0};
    for (size_t k = stretches.size(); k-- > 0;) {
        size_t count = counts.back();
        RecordReader(stretches[k], end).read(end, [&](uint64_t position, uint8_t) {
            uint64_t& word = seen[size_t(position / 64)];
            const uint64_t bit = uint64_t(1) << (position & 63);
            count += (word & bit) == 0;
            word |= bit;
        });
        counts.push_back(count);
    }
    return counts;
}

PULSE_CLONES Remembered remember(const std::vector<Stretch>& stretches, uint64_t elements) {
    std::vector<Transition> transitions;
    size_t most = 0;
    int later = 0, longer = 0;
    for (const Stretch& stretch : stretches) {
        later += int(stretch.span);
        most += stretch.bytes / kRecordBytes;
    }
    for (const Stretch& stretch : stretches) {
        later -= int(stretch.span);
        if (stretch.span > 1) longer = later + int(stretch.span) / 2;
        transitions.emplace_back(int(stretch.span), later, longer);
    }
    most = size_t(std::min<uint64_t>(most, elements)) + 2;
    Remembered remembered;
    remembered.positions.reset(new uint32_t[most]);
    remembered.states.reset(new State[most]);
    uint32_t* const positions = remembered.positions.get();
    State* const states = remembered.states.get();
    const size_t words = size_t((elements + kTile - 1) / kTile * (kTile / 64));
    remembered.marks = Marks(words);
    remembered.before.reset(new uint32_t[words]);
    uint64_t* const marks = remembered.marks.words();
    uint32_t* const before = remembered.before.get();
    size_t count = 0;
    walk(
        stretches, elements, [&](uint16_t& state, size_t k, uint8_t step) { state = transitions[k].of(state, step); },
        [&](uint32_t first, const Tile& tile) {
            std::copy_n(tile.touched, kTile / 64, marks + first / 64);
            for (uint32_t word = 0; word < kTile / 64; word++) {
                const uint16_t* const values = tile.values + 64 * word;
                before[first / 64 + word] = uint32_t(count);
                count += ones_of(tile.touched[word], [&](size_t k, size_t place) {
                    positions[count + k] = first + 64 * word + uint32_t(place);
                    states[count + k] = {uint8_t(values[place]), int8_t(values[place] >> 8)};
                });
            }
        });
    remembered.count = count;
    return remembered;
}

}  // namespace pulse
