#include "codecs/codecs.h"

#include <algorithm>
#include <array>

#include "codecs/history/hits.h"
#include "common/clones.h"
#include "common/step.h"

namespace pulse {
namespace {

constexpr size_t kMostRemembered = 3;  // elements for each change: more cost time and save little
constexpr double kWorthwhile = 0.05;   // of the changes: elements that changed before, too
constexpr size_t kAhead = 24;          // elements that are fetched before they are needed
constexpr uint8_t kBySparse = 128;     // added to the number of windows

// Below so many changes, 64 states and a head of chances cost more than `gaps`, which learns.
constexpr size_t kFewForSparse = 8192;

// How many of the last windows are worth their time: those that remember at most `kMostRemembered` elements for each
// change, and none where few of the changes are remembered. Looks at the start of the block.
size_t worthwhile(const std::vector<Window>& history, const std::vector<uint32_t>& changes,
                  uint64_t elements) {
    uint64_t end = std::min(std::max<uint64_t>(elements / 16, 1 << 16), elements);
    size_t changed =
        size_t(std::lower_bound(changes.begin(), changes.end(), end) - changes.begin());
    if (changed < 64) end = elements, changed = changes.size();
    const RememberedCount counts = count_remembered(history, end, changes.data(), changed);
    if (double(counts.of_changed) <= kWorthwhile * double(changed)) return 0;
    size_t used = history.size();
    while (used > 1 && counts.by_last[used] > kMostRemembered * changed) used--;
    return used;
}

// By the last `used` windows.
HistoryHits recollect(const std::vector<Window>& history, size_t used, uint64_t elements) {
    HistoryHits known;
    known.remembered = remember({history.end() - std::ptrdiff_t(used), history.end()}, elements);
    return known;
}

// The changes of a block: those of remembered elements, `count` of them, and all others.
template <class U>
struct Parted {
    HitSteps recalled;
    BlockChanges<U> others;
};

template <class U>
PULSE_CLONES void part(const BlockChanges<U>& all, const Remembered& remembered, size_t count,
                       bool floating, Parted<U>& parts) {
    const size_t n = all.positions.size();
    HitSteps& recalled = parts.recalled;
    BlockChanges<U>& others = parts.others;
    const auto resize = [&](size_t of_mine, size_t of_theirs) {
        recalled.which.resize(of_mine), recalled.sizes.resize(of_mine),
            recalled.downs.resize(of_mine);
        others.positions.resize(of_theirs), others.before.resize(of_theirs),
            others.values.resize(of_theirs);
    };
    resize(count + 1, n - count + 1);
    const ElementMask& marks = remembered.marks;
    size_t mine = 0, theirs = 0;  // both are written, without branches, which nobody could foresee
    for (size_t i = 0; i < n; i++) {
        const uint32_t at = all.positions[i];
        const U step = U(to_ordered(all.values[i], floating) - to_ordered(all.before[i], floating));
        const bool down = step >> (8 * sizeof(U) - 1);
        recalled.which[mine] = uint32_t(marks.before(at));
        recalled.sizes[mine] =
            std::max<U>(down ? U(-step) : step, 1);  // 0 if the element was written meanwhile
        recalled.downs[mine] = down;
        others.positions[theirs] = at;
        others.before[theirs] = all.before[i];
        others.values[theirs] = all.values[i];
        const size_t is_mine = marks.has(at);
        mine += is_mine, theirs += 1 - is_mine;
    }
    resize(mine, theirs);
}

// What is known of the others. What is remembered has no weight there.
template <class U>
void count_others(const BlockStatistics& all, const HistoryEncoder& recall, ClassOf cls,
                  const std::vector<Run>& runs, BlockChanges<U>& others) {
    others.statistics = all;
    others.statistics.changes.fill(0);
    others.statistics.live_elements = others.statistics.live_changes = 0;
    for (U x : others.before) others.statistics.changes[cls(x)]++;
    others.statistics.marked = recall.marked();
    others.statistics.count_live(others.positions, runs);
}

// Lists the classes of the remembered elements that change: so many next to each other that most changes are listed.
template <class U>
void list_classes(HistoryHits& known, const BlockChanges<U>& changes, ClassOf cls) {
    std::array<uint32_t, kClasses> of_class{};
    for (size_t i = 0; i < changes.positions.size(); i++) {
        of_class[cls(changes.before[i])] += known.remembered.marks.has(changes.positions[i]);
    }
    uint32_t within = 0, most = 0;
    int best = 0;
    for (int c = 0; c < kClasses; c++) {
        within += of_class[size_t(c)] - (c < kMostClasses ? 0 : of_class[size_t(c - kMostClasses)]);
        if (within > most) most = within, best = c;
    }
    int first = std::max(best - kMostClasses + 1, 0), last = best;
    while (first < last && !of_class[size_t(first)]) first++;
    known.list(first, last - first + 1);
}

// Changes as they are read or written one by one.
template <class U>
struct ChangeLists {
    uint32_t* positions;
    U *values, *before;  // in memory of its own, aligned for every type

    explicit ChangeLists(Decoded& of)
        : positions(of.positions.data.get()),
          values(reinterpret_cast<U*>(of.values.data.get())),
          before(reinterpret_cast<U*>(of.before.data.get())) {}

    void copy(const ChangeLists& from, size_t begin, size_t end, size_t to) const {
        std::copy(from.positions + begin, from.positions + end, positions + to);
        std::copy(from.values + begin, from.values + end, values + to);
        std::copy(from.before + begin, from.before + end, before + to);
    }
};

// Two lists of changes of different elements as one. Both values are read and one is kept by a mask: nobody could foresee whose
// turn it is, and of a choice a compiler makes a branch.
template <class U>
PULSE_CLONES Decoded merged(Decoded first, Decoded second) {
    const size_t n_first = first.positions.size, n_second = second.positions.size;
    Decoded result(n_first + n_second, sizeof(U));
    const ChangeLists<U> a(first), b(second), to(result);
    size_t i = 0, j = 0;
    while (i < n_first && j < n_second) {
        const uint32_t at = a.positions[i], other = b.positions[j];
        const size_t is_first = at < other;
        const U mask = U(0 - is_first);
        to.positions[i + j] = std::min(at, other);
        to.values[i + j] = U(b.values[j] ^ ((a.values[i] ^ b.values[j]) & mask));
        to.before[i + j] = U(b.before[j] ^ ((a.before[i] ^ b.before[j]) & mask));
        i += is_first, j += 1 - is_first;
    }
    to.copy(a, i, n_first, i + j);
    to.copy(b, j, n_second, n_first + j);
    return result;
}

// The changes that are the steps of remembered elements.
template <class U>
PULSE_CLONES Decoded changes_of(const HistoryHits& known, const HitSteps& steps, const U* old,
                                bool floating) {
    const size_t n = steps.which.size();
    Decoded result(n, sizeof(U));
    const ChangeLists<U> to(result);
    const uint32_t* const positions = known.remembered.positions.get();
    bool sane = true;
    for (size_t i = 0; i < n; i++) {
        __builtin_prefetch(old + positions[steps.which[std::min(i + kAhead, n - 1)]]);
        const uint32_t place = positions[steps.which[i]];
        const U by = U(steps.sizes[i]), step = steps.downs[i] ? U(-by) : by;
        sane &= step != 0 && by == steps.sizes[i];
        to.positions[i] = place;
        to.before[i] = old[place];
        to.values[i] = from_ordered(U(to_ordered(old[place], floating) + step), floating);
    }
    if (!sane) throw Malformed("a step is out of range");
    return result;
}

// The changes that a payload behind its first three bytes says, by what is known of the elements that changed lately.
template <class U>
Decoded decode_known(const HistoryHits& known, bool by_sparse, const uint8_t* payload, size_t size,
                     const U* old, const ElementKind& kind, const std::vector<Run>& runs) {
    HistoryDecoder recall(known);
    Decoded others = by_sparse ? decode_sparse(payload, size, old, kind, runs, &recall)
                               : decode_gaps(payload, size, old, kind, runs, &recall);
    const HitSteps& steps = recall.steps;
    if (steps.which.empty()) throw Malformed("no element that is remembered changes");

    return merged<U>(changes_of(known, steps, old, kind.floating), std::move(others));
}

}  // namespace

template <class U>
bool encode_history(const std::vector<Window>& history, const U* old,
                    const BlockChanges<U>& changes, const ElementKind& kind,
                    const std::vector<Run>& runs, bool few, std::vector<uint8_t>& payload,
                    Decoded* proved) {
    const uint64_t elements = changes.statistics.elements;
    const ClassOf cls{kind.shift, kind.mask};
    const size_t used = worthwhile(history, changes.positions, elements);
    if (used == 0) return false;
    HistoryHits known = recollect(history, used, elements);
    list_classes(known, changes, cls);
    const size_t recalled = known.remembered.marks.count_of(changes.positions);
    if (double(recalled) <= kWorthwhile * double(changes.positions.size())) return false;
    known.number();
    Parted<U> parts;
    part(changes, known.remembered, recalled, kind.floating, parts);
    const bool by_gaps = few || changes.positions.size() < kFewForSparse;
    const int windows = int(used) | (by_gaps ? 0 : kBySparse);
    for (int x : {windows, known.first, known.count - 1}) payload.push_back(uint8_t(x));
    HistoryEncoder recall(known, parts.recalled);
    count_others(changes.statistics, recall, cls, runs, parts.others);
    const std::vector<uint8_t> rest = by_gaps
                                          ? encode_gaps(old, parts.others, kind, runs, &recall)
                                          : encode_sparse(old, parts.others, kind, runs, &recall);
    payload.insert(payload.end(), rest.begin(), rest.end());
    if (proved)
        *proved =
            decode_known(known, !by_gaps, payload.data() + 3, payload.size() - 3, old, kind, runs);
    return true;
}

#define PULSE_FOR(U)                                                                           \
    template bool encode_history(const std::vector<Window>&, const U*, const BlockChanges<U>&, \
                                 const ElementKind&, const std::vector<Run>&, bool,            \
                                 std::vector<uint8_t>&, Decoded*);
PULSE_FOR_WIDTHS(PULSE_FOR)

namespace {

template <class U>
Decoded decode(const std::vector<Window>& history, const uint8_t* data, size_t size, const U* old,
               const ElementKind& kind, const std::vector<Run>& runs) {
    const uint64_t elements = elements_of(runs);
    size_t at = 0;
    const uint8_t windows = take_byte(data, size, at);
    const size_t used = windows & (kBySparse - 1);
    const int first = take_byte(data, size, at), count = take_byte(data, size, at) + 1;
    if (used == 0 || used > history.size() || count > kMostClasses || first + count > kClasses) {
        throw Malformed("the block's head is out of range");
    }
    HistoryHits known = recollect(history, used, elements);
    known.list(first, count);
    return decode_known(known, windows & kBySparse, data + at, size - at, old, kind, runs);
}

}  // namespace

Decoded decode_history(const std::vector<Window>& history, const uint8_t* payload, size_t size,
                       const void* old, const ElementKind& kind, const std::vector<Run>& runs) {
    return for_width(kind.width, [&](auto zero) {
        return decode(history, payload, size, static_cast<const decltype(zero)*>(old), kind, runs);
    });
}

}  // namespace pulse
