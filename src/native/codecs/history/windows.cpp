#include "codecs/history/windows.h"

#include <algorithm>
#include <array>
#include <cstdlib>

#include "common/clones.h"
#include "common/step.h"
#include "entropy/range_coder.h"
#include "entropy/weights.h"

namespace pulse {
namespace {

constexpr uint32_t kLongestGap = 65535;
constexpr size_t kAtOnce = 1 << 16;  // elements whose marks stay in the first-level cache

class RecordWriter {
public:
    // Room for so many changes of a block of so many elements.
    RecordWriter(size_t changes, uint64_t elements)
        : records_((changes + size_t(elements / kLongestGap) + 1) * kRecordBytes),
          at_(records_.data()) {}

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

struct Record {
    uint32_t bits;

    static PULSE_INLINE Record at(const uint8_t* p) {
        return {uint32_t(p[0]) | uint32_t(p[1]) << 8 | uint32_t(p[2]) << 16 | uint32_t(p[3]) << 24};
    }
    uint32_t gap() const { return bits & kLongestGap; }
    uint8_t step() const { return uint8_t(bits >> 16); }
    uint8_t cls() const { return uint8_t(bits >> 24); }
    Record at_place(uint32_t place) const { return {(bits & 0xffff0000) | place}; }
    // One that says nothing of an element, but leads on to the next ones.
    bool leads_on() const { return (bits & 0xffffff) == kLongestGap; }
};

// Walks over records. Those without a step say what class an element has, of which nothing else is to be remembered.
class RecordReader {
public:
    explicit RecordReader(const Window& window)
        : at_(window.records), end_(at_ + window.bytes / kRecordBytes * kRecordBytes) {}

    // Calls `found(position, record)` for those below `limit` that are left.
    template <class Found>
    PULSE_INLINE void read(uint64_t limit, Found found) {
        const uint8_t* at = at_;
        uint64_t next = next_;
        for (; at != end_; at += kRecordBytes) {
            const Record record = Record::at(at);
            const uint64_t position = next + record.gap();
            if (position >= limit) break;
            const bool leads_on = record.leads_on();
            next = position + !leads_on;
            if (!leads_on) found(size_t(position), record);
        }
        at_ = at;
        next_ = next;
    }

private:
    const uint8_t *at_, *end_;
    uint64_t next_ = 0;
};

// Goes through a block by tiles: marks the elements of a tile of which records speak, so that each has a number, and has what they say
// at hand once more.
class TileWalk {
public:
    size_t first = 0, behind = 0;  // the numbers of the elements of the tile that are marked

    TileWalk(const std::vector<Window>& windows, uint64_t elements, ElementMask& marks)
        : elements_(elements), marks_(marks), ends_(windows.size()) {
        size_t most = 0;
        for (const Window& window : windows) {
            ahead_.emplace_back(window);
            most += std::min(window.bytes / kRecordBytes, kAtOnce);
        }
        records_.reset(new Record[most + 1]);
    }
    // The next tile, marked where any record of an element has a step; false behind the last one.
    PULSE_INLINE bool next() {
        if (end_ == elements_) return false;
        begin_ = end_;
        end_ = std::min(begin_ + kAtOnce, elements_);
        Record* to = records_.get();
        for (size_t k = 0; k < ahead_.size(); k++) {
            ahead_[k].read(end_, [&](size_t element, Record record) {
                marks_.add(element, record.step() != 0);
                *to++ = record.at_place(uint32_t(element - begin_));
            });
            ends_[k] = to;
        }
        first = behind;
        behind = marks_.count(size_t(begin_), size_t(end_), first);
        return true;
    }
    // Calls `found(element, record)` for those of a window in the tile.
    template <class Found>
    PULSE_INLINE void each(size_t window, Found found) const {
        const Record* const end = ends_[window];
        for (const Record* at = window ? ends_[window - 1] : records_.get(); at != end; at++) {
            found(size_t(begin_) + at->gap(), *at);
        }
    }

private:
    const uint64_t elements_;
    uint64_t begin_ = 0, end_ = 0;  // of the tile
    ElementMask& marks_;
    std::vector<RecordReader> ahead_;
    std::unique_ptr<Record[]> records_;  // of the tile, with their places in it in place of gaps
    std::vector<const Record*> ends_;    // behind those of each window
};

// How many elements the windows remember at most.
size_t most_remembered(const std::vector<Window>& windows, uint64_t elements) {
    size_t most = 0;
    for (const Window& window : windows) most += window.bytes / kRecordBytes;
    return size_t(std::min<uint64_t>(most, elements));
}

constexpr int kLarge =
    5;  // the activity of an element whose last step had a size above 1, at least

int group_of(int age, int activity, bool turned) {
    return 1 + (age * kVigours + activity) * 2 + turned;
}

// The value of a State, but for its class.
uint32_t known(int group, int last) {
    return uint32_t(group | (last < 0) << 7 | uint8_t(last) << 8);
}

// What a record of a window makes of a State.
class Transition {
public:
    // `later`: the versions after the window.
    explicit Transition(int later) {
        const int since = later + 1, age = std::min(since, kAges) - 1;
        for (int before = 0; before < kGroups; before++) {
            int activity = 0;
            if (before) {
                const int was = (before - 1) / 2, rest = was / kVigours + 1 - since;
                activity = std::clamp(was % kVigours + (rest <= 2) - (rest > 4), 0, kVigours - 1);
            }
            for (int k = 0; k < 8; k++) {
                const bool large = k & 4, down = k & 2, was_down = k & 1;
                const int group = group_of(age, large ? std::max(activity, kLarge) : activity,
                                           before && down != was_down);
                next_[2 * large + down][before + 128 * was_down] =
                    uint8_t(known(group, down ? -1 : 1));
            }
        }
    }
    PULSE_INLINE uint32_t of(uint32_t before, Record record) const {
        const size_t large = uint8_t(record.step() + 1) > 2, down = record.step() >> 7;
        return next_[2 * large + down][before & 255] | (record.bits >> 8 & 0xffff00);
    }

private:
    std::array<std::array<uint8_t, 256>, 4>
        next_{};  // of step and state, the lowest byte of the next one
};

// What is known of the elements that are marked, in their order.
struct Places {
    const ElementMask& marks;
    uint32_t* positions;
    State* states;

    // Takes in what a window says of a tile.
    PULSE_INLINE void take(const TileWalk& walk, size_t window, const Transition& says) const {
        walk.each(window, [&](size_t element, Record record) {
            if (record.step() == 0) return take_class(element, record.cls());
            const size_t at = marks.before(element);
            positions[at] = uint32_t(element);
            states[at].value = says.of(states[at].value, record);
        });
    }

private:
    void take_class(size_t element, uint8_t cls) const {
        if (!marks.has(element)) return;
        uint32_t& value = states[marks.before(element)].value;
        value = (value & 0xffff) | uint32_t(cls) << 16;
    }
};

template <class U>
std::vector<uint8_t> records(const uint32_t* positions, size_t count, const U* old, const U* now,
                             const ElementKind& kind) {
    const ClassOf cls{kind.shift, kind.mask};
    RecordWriter writer(count, count ? positions[count - 1] : 0);
    for (size_t i = 0; i < count; i++) {
        const uint8_t step =
            uint8_t(to_ordered(now[i], kind.floating) - to_ordered(old[i], kind.floating));
        writer.put(positions[i], step, uint8_t(cls(now[i])));
    }
    return writer.finish();
}

}  // namespace

std::vector<uint8_t> records_of(const uint32_t* positions, size_t count, const void* old,
                                const void* now, const ElementKind& kind) {
    return for_width(kind.width, [&](auto zero) {
        using U = decltype(zero);
        return records(positions, count, static_cast<const U*>(old), static_cast<const U*>(now),
                       kind);
    });
}

RememberedCount count_remembered(const std::vector<Window>& windows, uint64_t end,
                                 const uint32_t* positions, size_t changed) {
    std::vector<uint64_t> seen(size_t(end / 64 + 1));
    RememberedCount found{{0}};
    std::vector<size_t>& counts = found.by_last;
    for (size_t k = windows.size(); k-- > 0;) {
        size_t count = counts.back();
        RecordReader(windows[k]).read(end, [&](size_t element, Record record) {
            uint64_t& word = seen[element / 64];
            const uint64_t bit = uint64_t(record.step() != 0) << (element % 64);
            count += (word & bit) < bit;
            word |= bit;
        });
        counts.push_back(count);
    }
    for (size_t i = 0; i < changed; i++)
        found.of_changed += seen[positions[i] / 64] >> (positions[i] % 64) & 1;
    return found;
}

PULSE_CLONES Remembered remember(const std::vector<Window>& windows, uint64_t elements) {
    const size_t most = most_remembered(windows, elements);
    Remembered remembered;
    remembered.marks = ElementMask(elements);
    remembered.positions.reset(new uint32_t[most]);
    remembered.states.reset(new State[most]);
    Places places{remembered.marks, remembered.positions.get(), remembered.states.get()};
    TileWalk walk(windows, elements, remembered.marks);
    std::vector<Transition> transitions;
    for (size_t later = windows.size(); later-- > 0;) transitions.emplace_back(int(later));
    while (walk.next()) {
        std::fill(places.states + walk.first, places.states + walk.behind, State{0});
        for (size_t k = 0; k < windows.size(); k++) places.take(walk, k, transitions[k]);
    }
    remembered.count = walk.behind;
    return remembered;
}

}  // namespace pulse
