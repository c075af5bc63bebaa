#include "codecs/codecs.h"

#include <algorithm>
#include <array>

#include "codecs/gaps/positions.h"
#include "codecs/history/hits.h"
#include "common/step.h"
#include "entropy/models.h"
#include "entropy/payload.h"

namespace pulse {
namespace {

// The adaptive models of a block; the same on both sides.
struct Models {
    std::array<AdaptiveBit, 4>
        against;  // is the sign against the majority of the row's changes so far?
    LevelModels levels;
    SizeModels sizes;
};

}  // namespace

template <class U>
std::vector<uint8_t> encode_gaps(const U* old, const BlockChanges<U>& changes,
                                 const ElementKind& kind, const std::vector<Run>& runs,
                                 HistoryEncoder* recall) {
    const ClassOf cls{kind.shift, kind.mask};
    const std::vector<uint32_t>& positions = changes.positions;
    std::vector<uint8_t> payload;
    put_varint(payload, positions.size());
    if (positions.empty() && !recall) return payload;

    CodePlan plan;
    plan.levels.fill(kAbsent);
    if (!positions.empty()) {
        plan = plan_code(changes.statistics);
        for (int x : {plan.boost, plan.first, plan.count - 1}) payload.push_back(uint8_t(x));
    }
    Writer side;
    if (recall) recall->put(side);
    Models models;
    code_levels(side, models.levels, plan.levels, plan.first, plan.count);
    models.sizes.expect(plan.levels);
    const Weights weights(plan.levels, plan.boost);

    Writer coded =
        std::move(side);  // unlike `side` seen by nobody else, so that it is kept in registers
    PositionWriter<U> writer(old, cls, weights, runs, recall ? recall->marks() : nullptr);
    int balance = 0;  // steps up less steps down in this row so far
    for (size_t i = 0; i < positions.size(); i++) {
        const U before = changes.before[i];
        if (writer.write(coded.coder, positions[i])) balance = 0;
        const U step =
            U(to_ordered(changes.values[i], kind.floating) - to_ordered(before, kind.floating));
        const bool down = step >> (8 * sizeof(U) - 1);
        coded.bit(models.against[std::min(std::abs(balance), 3)], down != (balance < 0));
        balance += down ? -1 : 1;
        code_size(coded, models.sizes, int(cls(before)), down ? U(-step) : step);
    }
    const std::vector<uint8_t> code = coded.coder.finish();
    payload.insert(payload.end(), code.begin(), code.end());
    return payload;
}

#define PULSE_FOR(U)                                                                       \
    template std::vector<uint8_t> encode_gaps(const U*, const BlockChanges<U>&,            \
                                              const ElementKind&, const std::vector<Run>&, \
                                              HistoryEncoder*);
PULSE_FOR_WIDTHS(PULSE_FOR)

namespace {

template <class U>
Decoded decode(const uint8_t* data, size_t size, const U* old, const ElementKind& kind,
               const std::vector<Run>& runs, HistoryDecoder* recall) {
    const ClassOf cls{kind.shift, kind.mask};
    const uint64_t total = elements_of(runs);
    size_t at_byte = 0;
    const uint64_t changed = take_count(data, size, at_byte);
    if ((changed == 0 && !recall) || changed > total) {
        throw Malformed("the number of changes is 0 or exceeds the elements");
    }
    CodePlan plan;
    if (changed) {
        plan.boost = take_byte(data, size, at_byte);
        plan.first = take_byte(data, size, at_byte);
        plan.count = take_byte(data, size, at_byte) + 1;
    }
    if (plan.boost > kMostBoost || (changed && uint32_t(plan.first + plan.count - 1) > kind.mask)) {
        throw Malformed("the block's head is out of range");
    }
    plan.levels.fill(kAbsent);
    Reader side{RangeDecoder(data + at_byte, size - at_byte)};
    if (recall) recall->take(side);
    Models models;
    code_levels(side, models.levels, plan.levels, plan.first, plan.count);
    models.sizes.expect(plan.levels);
    const Weights weights(plan.levels, plan.boost);

    Decoded result(changed, sizeof(U));
    uint32_t* const found = result.positions.data.get();
    U* const values = reinterpret_cast<U*>(result.values.data.get());
    U* const replaced = reinterpret_cast<U*>(result.before.data.get());
    Reader coded = side;  // unlike `side` seen by nobody else, so that it is kept in registers
    PositionReader<U> reader(old, cls, weights, runs, recall ? recall->marks() : nullptr);
    int balance = 0;  // steps up less steps down in this row so far
    for (size_t i = 0; i < changed; i++) {
        if (reader.read(coded)) balance = 0;
        const U before = old[reader.position()];
        const bool down =
            coded.bit(models.against[std::min(std::abs(balance), 3)], false) != (balance < 0);
        balance += down ? -1 : 1;
        const U length = U(code_size(coded, models.sizes, int(cls(before)), 0)),
                step = down ? U(-length) : length;
        if (length == 0) throw Malformed("a change by nothing");
        values[i] = from_ordered(U(to_ordered(before, kind.floating) + step), kind.floating);
        found[i] = uint32_t(reader.position());
        replaced[i] = before;
    }
    if (!coded.coder.finished()) throw Malformed("the code is longer or shorter than its changes");
    return result;
}

}  // namespace

Decoded decode_gaps(const uint8_t* payload, size_t size, const void* old, const ElementKind& kind,
                    const std::vector<Run>& runs, HistoryDecoder* recall) {
    return for_width(kind.width, [&](auto zero) {
        return decode(payload, size, static_cast<const decltype(zero)*>(old), kind, runs, recall);
    });
}

}  // namespace pulse
