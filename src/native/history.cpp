#include "history.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <memory>

#include "block_statistics.h"
#include "clones.h"
#include "history_table.h"
#include "payload.h"
#include "step.h"

namespace pulse {
namespace {

constexpr int kRemembered = 64;  // a place in the plane is a listed class, or this and a level
constexpr uint8_t kUnlisted = 63;
constexpr size_t kMostRemembered = 3;  // elements for each change: more cost time and save little
constexpr double kWorthwhile = 0.05;   // of the changes: elements that changed before, too

// Steps of elements whose last step had a size above 1: by how much they differ from that.
struct LikeLastModels {
    std::array<AdaptiveBit, kClasses> same, less;
    std::array<AdaptiveBit, kClasses + kMostLength + 1> longer;
};

struct Models {
    LevelModels levels;
    TableModels table;
    std::array<AdaptiveBit, 4> against;
    std::array<AdaptiveBit, kGroups> turned;
    std::array<AdaptiveBit, kClasses> turned_class;
    LikeLastModels like_last;
    SizeModels sizes[2];
};

// A step that is expected to be `last`, |last| > 1; the sign of both is that of `last`.
template <class Side>
PULSE_INLINE int64_t code_like_last(Side& side, LikeLastModels& models, size_t cls, int64_t step, int64_t last) {
    if (side.bit(models.same[cls], step == last)) return last;
    const bool less = side.bit(models.less[cls], step < last);
    const uint32_t away = uint32_t(std::abs(step - last));
    const int length = 31 - __builtin_clz(away | 1);
    int n = 0;
    while (n < kMostLength - 1 && !side.bit(models.longer[cls + size_t(n)], length == n)) n++;
    uint32_t read = 1;
    for (int rest = n; rest > 0;) {
        const int bits = std::min(rest, 16);
        rest -= bits;
        read = read << bits | side.plain((away >> rest) & ((1u << bits) - 1), bits);
    }
    return less ? last - int64_t(read) : last + int64_t(read);
}

// Whether a step of size 1 was followed by one in the other direction: the mean of what group and class say.
template <class Side>
PULSE_INLINE bool code_turned(Side& side, AdaptiveBit& group, AdaptiveBit& cls, bool turned) {
    AdaptiveBit both;
    both.p = uint16_t((group.p + cls.p) >> 1);
    const bool read = side.bit(both, turned);
    group.adapt(read);
    cls.adapt(read);
    return read;
}

// The step of an element in `state` (group 0: not remembered), and the majority of the row.
template <class U, class Side>
PULSE_INLINE U code_step(Side& side, Models& models, State state, size_t cls, int& balance, U step) {
    const bool down = step >> (8 * sizeof(U) - 1);
    const uint32_t size = down ? U(-step) : step;
    const int last = state.last;
    if (state.group && std::abs(last) > 1) {
        const int64_t turn = last < 0 ? -1 : 1, value = down ? -int64_t(size) : int64_t(size);
        const int64_t read = turn * code_like_last(side, models.like_last, cls, turn * value, std::abs(last));
        balance += read < 0 ? -1 : 1;
        return U(uint64_t(read));
    }
    bool read;
    if (state.group) {
        read =
            code_turned(side, models.turned[state.group], models.turned_class[cls], down != (last < 0)) != (last < 0);
    } else {
        read = side.bit(models.against[size_t(std::min(std::abs(balance), 3))], down != (balance < 0)) != (balance < 0);
    }
    balance += read ? -1 : 1;
    const U length = U(code_size(side, models.sizes[state.group != 0], int(cls), size));
    return read ? U(-length) : length;
}

// The place in the plane of each element, as if none were remembered.
template <class U>
PULSE_CLONES void fill_plane(const U* elements, size_t count, int shift, uint32_t mask, uint32_t first,
                             uint8_t* plane) {
    for (size_t i = 0; i < count; i++) {
        const uint8_t cls = uint8_t(uint8_t(elements[i] >> shift) & uint8_t(mask)),
                      place = uint8_t(cls - uint8_t(first));
        plane[i] = place < kUnlisted ? place : kUnlisted;
    }
}

// How many of the last stretches are worth their time: those that remember at most `kMostRemembered` elements for each
// change. Looks at the start of the block.
size_t worthwhile(const std::vector<Stretch>& history, const std::vector<uint32_t>& changes, uint64_t elements) {
    uint64_t end = std::min(std::max<uint64_t>(elements / 16, 1 << 16), elements);
    size_t changed = size_t(std::lower_bound(changes.begin(), changes.end(), end) - changes.begin());
    if (changed < 64) end = elements, changed = changes.size();
    const std::vector<size_t> counts = count_remembered(history, end);
    size_t used = history.size();
    while (used > 1 && counts[used] > kMostRemembered * changed) used--;
    return used;
}

// A block's elements as places: of their class in the list, or, where they are remembered, of their level.
template <class U>
struct Block {
    const U* old;
    ClassOf cls;
    const std::vector<Run>& runs;
    uint64_t elements = 0;
    Remembered remembered;
    std::unique_ptr<uint8_t[]> plane, places;

    Block(const U* old_elements, const ElementKind& kind, const std::vector<Run>& all)
        : old(old_elements), cls{kind.shift, kind.mask}, runs(all) {
        for (const Run& run : runs) elements += run.elements;
    }

    // By the last `used` stretches.
    void remember_last(const std::vector<Stretch>& history, size_t used) {
        remembered = remember({history.end() - std::ptrdiff_t(used), history.end()}, elements);
    }

    // The places of remembered elements in the list of `count` classes from `first` on, and how many each cell has.
    void find_places(int first, int count, ByGroup<uint32_t>& there) {
        plane.reset(new uint8_t[elements]);
        places.reset(new uint8_t[remembered.count]);
        fill_plane(old, elements, cls.shift, cls.mask, uint32_t(first), plane.get());
        for (size_t i = 0; i < remembered.count; i++) {
            places[i] = plane[remembered.positions[i]];
            there[remembered.states[i].group][places[i]]++;
        }
        for (auto& group : there) std::fill(group.begin() + count, group.end(), 0);
    }

    void set_levels(const HistoryTable& table) {
        for (size_t i = 0; i < remembered.count; i++) {
            plane[remembered.positions[i]] = uint8_t(kRemembered + table.levels[remembered.states[i].group][places[i]]);
        }
    }
};

// The weights of places: of listed classes, which a row's first change makes more likely, and of remembered elements.
Weights place_weights(const std::array<uint8_t, kClasses>& levels, int first, int count, int boost) {
    std::array<uint8_t, kClasses> of_places;
    of_places.fill(kAbsent);
    for (int k = 0; k < count; k++) of_places[size_t(k)] = levels[size_t(first + k)];
    for (int level = 0; level <= kMostLevel; level++) of_places[size_t(kRemembered + level)] = uint8_t(level);
    return Weights(of_places, boost, kRemembered);
}

// Finds positions that ascend among those that are remembered.
class Search {
public:
    explicit Search(const Remembered& remembered) : remembered_(remembered) {}
    // The place in the list; its end where the position is not there.
    size_t find(uint32_t position) {
        while (next_ < remembered_.count && remembered_.positions[next_] < position) next_++;
        return next_ < remembered_.count && remembered_.positions[next_] == position ? next_ : remembered_.count;
    }

private:
    const Remembered& remembered_;
    size_t next_ = 0;
};

template <class U>
std::optional<Encoded> encode(const std::vector<Stretch>& history, const U* old, const U* now, const ElementKind& kind,
                              const std::vector<Run>& runs) {
    Block<U> block(old, kind, runs);
    const ClassOf cls = block.cls;
    const BlockChanges<U> changes = compare_block(old, now, block.elements, runs, cls);
    const std::vector<uint32_t>& positions = changes.positions;
    const size_t used = worthwhile(history, positions, block.elements);
    block.remember_last(history, used);
    struct Change {
        U step;
        uint8_t cls;
        State state;
    };
    std::vector<Change> coming(positions.size());  // here, where one look into the memory need not wait for another
    Search search(block.remembered);
    size_t known = 0;
    for (size_t i = 0; i < positions.size(); i++) {
        const U before = old[positions[i]];
        const size_t found = search.find(positions[i]);
        const State state = found < block.remembered.count ? block.remembered.states[found] : State{0, 0};
        const U step = U(to_ordered(changes.values[i], kind.floating) - to_ordered(before, kind.floating));
        coming[i] = {step, uint8_t(cls(before)), state};
        known += state.group != 0;
    }
    CodePlan plan;
    if (!positions.empty()) plan = plan_code(changes.statistics);
    if (plan.count > kMostClasses || double(known) <= kWorthwhile * double(positions.size())) {
        return std::nullopt;
    }

    const auto there = std::make_unique<ByGroup<uint32_t>>(), changed = std::make_unique<ByGroup<uint32_t>>();
    block.find_places(plan.first, plan.count, *there);
    for (const Change& change : coming) (*changed)[change.state.group][size_t(change.cls - plan.first)]++;
    // What is not remembered changes less often than the statistics say, which count all.
    const BlockStatistics& s = changes.statistics;
    const double per_sample = double(s.elements) / double(std::max<uint64_t>(s.sampled, 1));
    const double live = double(s.live_elements) / double(s.elements), scale = 1 - live + live * double(1 << plan.boost);
    for (int k = 0; k < plan.count; k++) {
        const size_t c = size_t(plan.first + k);
        const double hits = (*changed)[0][size_t(k)];
        double others = double(s.seen[0][c] + s.seen[1][c]) * per_sample;
        for (size_t g = 1; g < kGroups; g++) others -= (*there)[g][size_t(k)];
        const double nats = -std::log(1 - std::min(hits / std::max(others, hits), 0.98)) / scale;
        plan.levels[c] = hits ? uint8_t(std::clamp(int(2 * (2 - std::log2(nats)) + 0.5), 0, kMostLevel)) : kAbsent;
    }
    const auto table = std::make_unique<HistoryTable>();
    plan_table(*there, *changed, plan.count, *table);

    Encoded result{{}, positions.size()};
    std::vector<uint8_t>& payload = result.payload;
    put_varint(payload, positions.size());
    for (int x : {int(used), plan.boost, plan.first, plan.count - 1}) payload.push_back(uint8_t(x));
    Writer side;
    const auto models = std::make_unique<Models>();
    code_levels(side, models->levels, plan.levels, plan.first, plan.count);
    code_table(side, models->table, *there, plan.count, *table);
    for (SizeModels& sizes : models->sizes) sizes.expect(plan.levels);
    const Weights weights = place_weights(plan.levels, plan.first, plan.count, plan.boost);
    block.set_levels(*table);

    Writer coded = std::move(side);  // unlike `side` seen by nobody else, so that it is kept in registers
    PositionWriter<uint8_t> writer(block.plane.get(), ClassOf{0, 255}, weights, runs);
    int balance = 0;  // steps up less steps down in this row so far
    for (size_t i = 0; i < positions.size(); i++) {
        if (writer.write(coded.coder, positions[i])) balance = 0;
        code_step<U>(coded, *models, coming[i].state, coming[i].cls, balance, coming[i].step);
    }
    const std::vector<uint8_t> code = coded.coder.finish();
    payload.insert(payload.end(), code.begin(), code.end());
    return result;
}

template <class U>
Decoded decode(const std::vector<Stretch>& history, const uint8_t* data, size_t size, const U* old,
               const ElementKind& kind, const std::vector<Run>& runs) {
    size_t at_byte = 0;
    const uint64_t changed = take_count(data, size, at_byte);
    const size_t used = take_byte(data, size, at_byte);
    const int boost = take_byte(data, size, at_byte), first = take_byte(data, size, at_byte);
    const int count = take_byte(data, size, at_byte) + 1;
    if (used > history.size() || boost > kMostBoost || count > kMostClasses ||
        uint32_t(first + count - 1) > kind.mask) {
        throw Malformed("the block's head is out of range");
    }
    Block<U> block(old, kind, runs);
    if (changed == 0 || changed > block.elements) throw Malformed("the number of changes is 0 or exceeds the elements");
    block.remember_last(history, used);
    const auto there = std::make_unique<ByGroup<uint32_t>>();
    block.find_places(first, count, *there);
    Reader side{RangeDecoder(data + at_byte, size - at_byte)};
    const auto models = std::make_unique<Models>();
    std::array<uint8_t, kClasses> levels;
    levels.fill(kAbsent);
    code_levels(side, models->levels, levels, first, count);
    const auto table = std::make_unique<HistoryTable>();
    code_table(side, models->table, *there, count, *table);
    for (SizeModels& sizes : models->sizes) sizes.expect(levels);
    const Weights weights = place_weights(levels, first, count, boost);
    block.set_levels(*table);

    Decoded result;
    result.positions.resize(changed);
    result.values.resize(changed * sizeof(U));
    result.before.resize(changed * sizeof(U));
    U* const replaced = reinterpret_cast<U*>(result.before.data());
    U* const values = reinterpret_cast<U*>(result.values.data());  // memory of its own, aligned for every type
    Reader coded = side;  // unlike `side` seen by nobody else, so that it is kept in registers
    PositionReader<uint8_t> reader(block.plane.get(), ClassOf{0, 255}, weights, runs);
    Search search(block.remembered);
    int balance = 0;  // steps up less steps down in this row so far
    for (size_t i = 0; i < changed; i++) {
        if (reader.read(coded)) balance = 0;
        const uint32_t position = uint32_t(reader.position());
        uint8_t place = block.plane[position];
        State state{0, 0};
        if (place >= kRemembered) {
            const size_t found = search.find(position);
            place = block.places[found], state = block.remembered.states[found];
        }
        const U step = code_step<U>(coded, *models, state, size_t(first + place), balance, 0);
        if (step == 0) throw Malformed("a change by nothing");
        values[i] = step;
        result.positions[i] = position;
    }
    for (size_t i = 0; i < changed; i++) {  // here, where one look into the memory need not wait for another
        replaced[i] = old[result.positions[i]];
        values[i] = from_ordered(U(to_ordered(replaced[i], kind.floating) + values[i]), kind.floating);
    }
    if (!coded.coder.finished()) throw Malformed("the code is longer or shorter than its changes");
    return result;
}

}  // namespace

std::optional<Encoded> encode_with_history(const std::vector<Stretch>& history, const void* old, const void* now,
                                           const ElementKind& kind, const std::vector<Run>& runs) {
    switch (kind.width) {
        case 1: return encode(history, static_cast<const uint8_t*>(old), static_cast<const uint8_t*>(now), kind, runs);
        case 2:
            return encode(history, static_cast<const uint16_t*>(old), static_cast<const uint16_t*>(now), kind, runs);
        default:
            return encode(history, static_cast<const uint32_t*>(old), static_cast<const uint32_t*>(now), kind, runs);
    }
}

Decoded decode_with_history(const std::vector<Stretch>& history, const uint8_t* payload, size_t size, const void* old,
                            const ElementKind& kind, const std::vector<Run>& runs) {
    switch (kind.width) {
        case 1: return decode(history, payload, size, static_cast<const uint8_t*>(old), kind, runs);
        case 2: return decode(history, payload, size, static_cast<const uint16_t*>(old), kind, runs);
        default: return decode(history, payload, size, static_cast<const uint32_t*>(old), kind, runs);
    }
}

}  // namespace pulse
