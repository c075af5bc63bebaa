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
constexpr double kWorthwhile = 0.05;  // of the changes: elements that changed before, too

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
        read = code_turned(side, models.turned[state.group], models.turned_class[cls], down != (last < 0)) != (last < 0);
    } else {
        read = side.bit(models.against[size_t(std::min(std::abs(balance), 3))], down != (balance < 0)) != (balance < 0);
    }
    balance += read ? -1 : 1;
    const U length = U(code_size(side, models.sizes[state.group != 0], int(cls), size));
    return read ? U(-length) : length;
}

// The place in the plane of each element, as if none were remembered.
template <class U>
PULSE_CLONES void fill_plane(const U* elements, size_t count, int shift, uint32_t mask, uint32_t first, uint8_t* plane) {
    for (size_t i = 0; i < count; i++) {
        const uint8_t cls = uint8_t(uint8_t(elements[i] >> shift) & uint8_t(mask)), place = uint8_t(cls - uint8_t(first));
        plane[i] = place < kUnlisted ? place : kUnlisted;
    }
}

template <class U>
struct Block {
    const U* old;
    ClassOf cls;
    const std::vector<Run>& runs;
    uint64_t elements;
    Remembered remembered;
    std::vector<uint8_t> places;

    Block(const std::vector<Stretch>& history, const U* old_elements, const ElementKind& kind, const std::vector<Run>& all)
        : old(old_elements), cls{kind.shift, kind.mask}, runs(all), elements(0) {
        for (const Run& run : runs) elements += run.elements;
        remembered = remember(history, elements);
    }

    // The places of remembered elements in the list of `count` classes from `first` on, and how many each cell has.
    void find_places(int first, int count, ByGroup<uint32_t>& there) {
        places.resize(remembered.positions.size());
        for (size_t i = 0; i < places.size(); i++) {
            const uint32_t place = cls(old[remembered.positions[i]]) - uint32_t(first);
            places[i] = uint8_t(std::min(place, uint32_t(kUnlisted)));
            there[remembered.states[i].group][places[i]]++;
        }
        for (size_t g = 0; g < kGroups; g++) std::fill(there[g].begin() + count, there[g].end(), 0);
    }

    std::vector<uint8_t> plane(int first, const HistoryTable& table) const {
        std::vector<uint8_t> plane(elements);
        fill_plane(old, elements, cls.shift, cls.mask, uint32_t(first), plane.data());
        for (size_t i = 0; i < places.size(); i++) {
            plane[remembered.positions[i]] = uint8_t(kRemembered + table.levels[remembered.states[i].group][places[i]]);
        }
        return plane;
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

// Finds the state of positions that ascend.
class StateOf {
public:
    explicit StateOf(const Remembered& remembered) : remembered_(remembered) {}
    State at(uint32_t position) {
        while (next_ < remembered_.positions.size() && remembered_.positions[next_] < position) next_++;
        const bool found = next_ < remembered_.positions.size() && remembered_.positions[next_] == position;
        return found ? remembered_.states[next_] : State{0, 0};
    }

private:
    const Remembered& remembered_;
    size_t next_ = 0;
};

template <class U>
std::optional<Encoded> encode(const std::vector<Stretch>& history, const U* old, const U* now, const ElementKind& kind,
                          const std::vector<Run>& runs) {
    Block<U> block(history, old, kind, runs);
    const ClassOf cls = block.cls;
    BlockChanges<U> changes = compare_block(old, now, block.elements, runs, cls);
    const std::vector<uint32_t>& positions = changes.positions;
    std::vector<State> states(positions.size());
    StateOf state_of(block.remembered);
    size_t known = 0;
    for (size_t i = 0; i < positions.size(); i++) {
        states[i] = state_of.at(positions[i]);
        known += states[i].group != 0;
    }
    CodePlan plan;
    if (!positions.empty()) plan = plan_code(changes.statistics);
    if (plan.count > kMostClasses || double(known) <= kWorthwhile * double(positions.size())) {
        return std::nullopt;
    }

    const auto there = std::make_unique<ByGroup<uint32_t>>(), changed = std::make_unique<ByGroup<uint32_t>>();
    block.find_places(plan.first, plan.count, *there);
    for (size_t i = 0; i < positions.size(); i++) {
        (*changed)[states[i].group][cls(old[positions[i]]) - uint32_t(plan.first)]++;
    }
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
    for (int x : {plan.boost, plan.first, plan.count - 1}) payload.push_back(uint8_t(x));
    Writer side;
    const auto models = std::make_unique<Models>();
    code_levels(side, models->levels, plan.levels, plan.first, plan.count);
    code_table(side, models->table, *there, plan.count, *table);
    for (SizeModels& sizes : models->sizes) sizes.expect(plan.levels);
    const Weights weights = place_weights(plan.levels, plan.first, plan.count, plan.boost);
    const std::vector<uint8_t> plane = block.plane(plan.first, *table);

    Writer coded = std::move(side);  // unlike `side` seen by nobody else, so that it is kept in registers
    PositionWriter<uint8_t> writer(plane.data(), ClassOf{0, 255}, weights, runs);
    int balance = 0;  // steps up less steps down in this row so far
    for (size_t i = 0; i < positions.size(); i++) {
        const U before = old[positions[i]];
        if (writer.write(coded.coder, positions[i])) balance = 0;
        const U step = U(to_ordered(changes.values[i], kind.floating) - to_ordered(before, kind.floating));
        code_step<U>(coded, *models, states[i], cls(before), balance, step);
    }
    const std::vector<uint8_t> code = coded.coder.finish();
    payload.insert(payload.end(), code.begin(), code.end());
    return result;
}

template <class U>
Decoded decode(const std::vector<Stretch>& history, const uint8_t* data, size_t size, const U* old, const ElementKind& kind,
               const std::vector<Run>& runs) {
    size_t at_byte = 0;
    const uint64_t changed = take_count(data, size, at_byte);
    const int boost = take_byte(data, size, at_byte), first = take_byte(data, size, at_byte);
    const int count = take_byte(data, size, at_byte) + 1;
    if (boost > kMostBoost || count > kMostClasses || uint32_t(first + count - 1) > kind.mask) {
        throw Malformed("the block's head is out of range");
    }
    Block<U> block(history, old, kind, runs);
    if (changed == 0 || changed > block.elements) throw Malformed("the number of changes is 0 or exceeds the elements");
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
    const std::vector<uint8_t> plane = block.plane(first, *table);

    Decoded result;
    result.positions.resize(changed);
    result.values.resize(changed * sizeof(U));
    U* const values = reinterpret_cast<U*>(result.values.data());  // memory of its own, aligned for every type
    Reader coded = side;  // unlike `side` seen by nobody else, so that it is kept in registers
    PositionReader<uint8_t> reader(plane.data(), ClassOf{0, 255}, weights, runs);
    StateOf state_of(block.remembered);
    int balance = 0;  // steps up less steps down in this row so far
    for (size_t i = 0; i < changed; i++) {
        if (reader.read(coded)) balance = 0;
        const uint32_t position = uint32_t(reader.position());
        const U before = old[position];
        const State state = plane[position] >= kRemembered ? state_of.at(position) : State{0, 0};
        const U step = code_step<U>(coded, *models, state, block.cls(before), balance, 0);
        if (step == 0) throw Malformed("a change by nothing");
        values[i] = from_ordered(U(to_ordered(before, kind.floating) + step), kind.floating);
        result.positions[i] = position;
    }
    if (!coded.coder.finished()) throw Malformed("the code is longer or shorter than its changes");
    return result;
}

}  // namespace

std::optional<Encoded> encode_with_history(const std::vector<Stretch>& history, const void* old, const void* now,
                                       const ElementKind& kind, const std::vector<Run>& runs) {
    switch (kind.width) {
        case 1: return encode(history, static_cast<const uint8_t*>(old), static_cast<const uint8_t*>(now), kind, runs);
        case 2: return encode(history, static_cast<const uint16_t*>(old), static_cast<const uint16_t*>(now), kind, runs);
        default: return encode(history, static_cast<const uint32_t*>(old), static_cast<const uint32_t*>(now), kind, runs);
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
