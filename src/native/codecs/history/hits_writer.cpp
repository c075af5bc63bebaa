#include <memory>

#include "codecs/history/hits.h"
#include "entropy/rans_bits.h"

namespace pulse {
namespace {

constexpr size_t kBatchesAtOnce = 64;  // whose chances stay in the first-level cache

// Counts bits in place of coding them.
struct TallySide {
    bool bit(Tally& tally, bool value) {
        tally.asked++;
        tally.ones += value;
        return value;
    }
};

template <class T>
int behind_last(const T& tallies, int first) {
    int behind = 0;
    for (size_t u = size_t(first); u < tallies.size(); u++)
        behind = tallies[u].asked ? int(u) + 1 - first : behind;
    return behind;
}

// What is known of a change.
struct Step {
    size_t cls, turn;
    bool turned, is_unlikely;
    uint32_t expected;
    Unlikely value;
};

Step step_at(const HistoryHits& known, const HitSteps& steps, size_t i) {
    const State state = known.state(steps.which[i]);
    const bool turned = bool(steps.downs[i]) != (state.last() < 0);
    const uint32_t expected = expected_size(state, turned), size = steps.sizes[i];
    return {state.cls(), turn_of(state),
            turned,      size != std::max(expected, 1u),
            expected,    Unlikely::of(expected, size)};
}

}  // namespace

HistoryEncoder::HistoryEncoder(const HistoryHits& known, const HitSteps& steps)
    : known_(known), steps_(steps) {
    const auto changed = std::make_unique<ByCell<uint32_t>>();
    for (uint16_t cell : known.cells) there_[cell]++;
    for (uint32_t i : steps.which) (*changed)[known.cells[i]]++;
    plan_table(there_, *changed, known.count, head_.table);
}

std::array<uint32_t, kClasses> HistoryEncoder::marked() const {
    std::array<uint32_t, kClasses> of_class{};
    for (size_t g = 1; g < kGroups; g++) {
        for (size_t k = 0; k < size_t(known_.count); k++)
            of_class[size_t(known_.first) + k] += there_[cell_of(g, k)];
    }
    return of_class;
}

void HistoryEncoder::put(Writer& side) {
    TableModels table;
    code_table(side, table, there_, known_.count, head_.table);
    const auto frequencies = head_.table.frequencies();
    for (size_t i = 0, next = 0; i < known_.size(); i++) {
        const uint16_t frequency = frequencies[known_.cells[i]];
        const bool changes = next < steps_.which.size() && steps_.which[next] == i;
        next += changes;
        if (i % 64 == 0) side.next_symbol();
        if (frequency) side.coder.bit(frequency, kRansBits, changes);
    }
    const auto models = std::make_unique<RecallModels<AdaptiveBit>>();
    for (size_t i = 0; i < steps_.which.size(); i++) {
        const Step step = step_at(known_, steps_, i);
        side.next_symbol();
        side.bit(models->turned[step.turn], step.turned);
        side.bit(unlikely_model(*models, step.cls, step.expected), step.is_unlikely);
        if (!step.is_unlikely) continue;
        code_unlikely(side, *models, step.cls, step.expected, step.value);
        code_plain(side, step.value.plain_bits(), step.value.plain);
    }
}

void HistoryEncoder::put_head(std::vector<uint8_t>& out) {
    const auto tallies = std::make_unique<RecallModels<Tally>>();
    TallySide tally;
    bits_.resize(steps_.which.size());
    for (size_t i = 0; i < steps_.which.size(); i++) {
        const Step step = step_at(known_, steps_, i);
        bits_[i] = {uint16_t(step.turn), step.expected > 0, step.turned, step.is_unlikely};
        tally.bit(tallies->turned[step.turn], step.turned);
        tally.bit(unlikely_model(*tallies, step.cls, step.expected), step.is_unlikely);
        if (!step.is_unlikely) continue;
        code_unlikely(tally, *tallies, step.cls, step.expected, step.value);
        unlikely_.push_back({uint8_t(step.cls), step.expected, step.value});
    }
    head_.sizes = std::max(behind_last(tallies->further, known_.first),
                           behind_last(tallies->second, known_.first));
    head_.distances = behind_last(tallies->apart, known_.first);
    put_code(out, [&](Writer& side) {
        code_recall_head(side, head_, there_, known_.large, known_.first, known_.count, *tallies);
    });
}

void HistoryEncoder::put(RansWriter& coder) {
    const size_t n = bits_.size(), batches = batches_of(n);
    PieceWriter side;
    for (const UnlikelyStep& step : unlikely_) {
        code_unlikely(side, head_.levels, step.cls, step.expected, step.value);
        side.next_state();
    }
    side.put(coder);
    std::vector<uint16_t> turned_of(batches * kRansStates), unlikely_of(batches * kRansStates);
    std::vector<uint64_t> turned(batches), unlikely(batches);
    for (size_t i = 0; i < n; i++) {
        const StepBits step = bits_[i];
        turned_of[i] = chance(head_.levels.turned[step.turn]);
        unlikely_of[i] = chance(unlikely_model(head_.levels, step.turn % kClasses, step.expected));
        turned[i / kRansStates] |= uint64_t(step.turned) << (i % kRansStates);
        unlikely[i / kRansStates] |= uint64_t(step.unlikely) << (i % kRansStates);
    }
    put_bits(coder, unlikely_of.data(), unlikely.data(), batches);
    put_bits(coder, turned_of.data(), turned.data(), batches);

    const auto of_cells = head_.table.frequencies();
    std::array<uint16_t, kBatchesAtOnce * kRansStates> frequencies;
    for (size_t end = known_.size(), next = n; end > 0;) {
        const size_t begin = (end - 1) / frequencies.size() * frequencies.size();
        std::array<uint64_t, kBatchesAtOnce> changes{};
        for (; next > 0 && steps_.which[next - 1] >= begin; next--) {
            const size_t i = steps_.which[next - 1] - begin;
            changes[i / kRansStates] |= uint64_t(1) << (i % kRansStates);
        }
        for (size_t i = begin; i < end; i++) frequencies[i - begin] = of_cells[known_.cells[i]];
        const size_t batches = batches_of(end - begin);
        std::fill(frequencies.data() + (end - begin), frequencies.data() + batches * kRansStates,
                  uint16_t(0));
        put_bits(coder, frequencies.data(), changes.data(), batches);
        end = begin;
    }
}

void HistoryEncoder::put_plain(BitWriter& bits) const {
    for (const UnlikelyStep& step : unlikely_) bits.put(step.value.plain_bits(), step.value.plain);
}

size_t HistoryEncoder::most_plain() const { return sizeof(uint32_t) * steps_.which.size(); }

// Bits take 2 bytes at most. A size of 1 where another was expected, at most 128, has up to 8 bits, others up to 2 for each of theirs.
size_t HistoryEncoder::most_bytes() const {
    size_t bits = known_.size() + 2 * steps_.which.size() + 3 * kRansStates;
    for (uint32_t size : steps_.sizes) bits += size > 1 ? 2 * kMostLength + 2 : 8;
    return 2 * bits;
}

}  // namespace pulse
