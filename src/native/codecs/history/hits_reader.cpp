#include <memory>

#include "codecs/history/hits.h"
#include "entropy/rans_bits.h"

namespace pulse {

HistoryDecoder::HistoryDecoder(const HistoryHits& known) : known_(known) {
    for (uint16_t cell : known.cells) there_[cell] = 1;
}

void HistoryDecoder::take(Reader& side) {
    TableModels table;
    code_table(side, table, there_, known_.count, head_.table);
    const auto of_cells = head_.table.frequencies();
    steps.which.resize(known_.size() + 1);
    size_t n = 0;
    for (size_t i = 0; i < known_.size(); i++) {
        const uint16_t frequency = of_cells[known_.cells[i]];
        if (i % 64 == 0) side.next_symbol();
        steps.which[n] = uint32_t(i);
        if (frequency) n += side.coder.bit(frequency, kRansBits);
    }
    steps.which.resize(n);
    steps.sizes.resize(n), steps.downs.resize(n);
    const auto models = std::make_unique<RecallModels<AdaptiveBit>>();
    for (size_t i = 0; i < n; i++) {
        const State state = known_.state(steps.which[i]);
        const size_t cls = state.cls();
        side.next_symbol();
        const bool turned = side.bit(models->turned[turn_of(state)], false);
        const uint32_t expected = expected_size(state, turned);
        const bool unlikely = side.bit(unlikely_model(*models, cls, expected), false);
        steps.downs[i] = turned != (state.last() < 0);
        steps.sizes[i] = std::max(expected, 1u);
        if (!unlikely) continue;
        Unlikely value = code_unlikely(side, *models, cls, expected, {});
        value.number |= code_plain(side, 0, value.plain);
        steps.sizes[i] = value.size_near(expected);
    }
}

void HistoryDecoder::take_head(const uint8_t* data, size_t size, size_t& at) {
    take_code(data, size, at, [&](Reader& side) {
        code_recall_head(side, head_, there_, known_.large, known_.first, known_.count, {});
    });
}

void HistoryDecoder::take(RansReader& coder) {
    const auto of_cells = head_.table.frequencies();
    std::vector<uint64_t> changes(batches_of(known_.size()));
    size_t n = 0;
    for (size_t batch = 0; batch < changes.size(); batch++) {
        const size_t i = batch * kRansStates, here = std::min(kRansStates, known_.size() - i);
        changes[batch] =
            take_bits(coder, here, [&](size_t k) { return of_cells[known_.cells[i + k]]; });
        n += size_t(__builtin_popcountll(changes[batch]));
    }
    steps.which.resize(n + kRansStates);
    n = 0;
    for (size_t batch = 0; batch < changes.size(); batch++) {
        n += put_ones(changes[batch], uint32_t(batch * kRansStates), &steps.which[n]);
    }
    steps.which.resize(n);
    steps.sizes.resize(n), steps.downs.resize(n);
    for (size_t i = 0; i < n; i += kRansStates) {
        const size_t here = std::min(kRansStates, n - i);
        const uint64_t turned = take_bits(coder, here, [&](size_t k) {
            return chance(head_.levels.turned[turn_of(known_.state(steps.which[i + k]))]);
        });
        for (size_t k = 0; k < here; k++) steps.downs[i + k] = turned >> k & 1;
    }
    for (size_t i = 0; i < n; i += kRansStates) {
        const size_t here = std::min(kRansStates, n - i);
        uint64_t unlikely = take_bits(coder, here, [&](size_t k) {
            const State state = known_.state(steps.which[i + k]);
            const uint32_t expected = expected_size(state, steps.downs[i + k]);
            steps.sizes[i + k] = std::max(expected, 1u);
            steps.downs[i + k] ^= state.last() < 0;
            return chance(unlikely_model(head_.levels, state.cls(), expected));
        });
        for (; unlikely; unlikely &= unlikely - 1) {
            const size_t k = i + size_t(__builtin_ctzll(unlikely));
            unlikely_.push_back({uint32_t(k), steps.sizes[k] > 1 ? steps.sizes[k] : 0, {}});
        }
    }
    PieceReader side{coder};
    for (auto& [i, expected, value] : unlikely_) {
        value = code_unlikely(side, head_.levels, known_.state(steps.which[i]).cls(), expected, {});
        side.next_state();
    }
}

void HistoryDecoder::take_plain(BitReader& bits) {
    for (auto& [i, expected, value] : unlikely_) {
        value.number |= bits.take(value.plain);
        steps.sizes[i] = value.size_near(expected);
    }
}

}  // namespace pulse
