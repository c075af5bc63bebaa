#include <algorithm>
#include <cmath>

#include "codecs/codecs.h"
#include "codecs/history/hits.h"
#include "codecs/sparse/code.h"
#include "codecs/sparse/row_balance.h"
#include "common/step.h"
#include "entropy/plain_bits.h"

namespace pulse {
namespace {

constexpr size_t kFewChanges = 4096,
                 kManyOf = 16;  // at least so many, and at most one of so many elements
constexpr size_t kFewRows = 16;

// The steps of a block's changes.
template <class U>
struct Steps {
    std::vector<U> sizes;
    std::vector<uint8_t> majorities, against;

    Steps(const BlockChanges<U>& changes, const ElementKind& kind, const std::vector<Run>& runs) {
        const size_t n = changes.positions.size();
        sizes.resize(n), majorities.resize(n), against.resize(n);
        RowBalance balance(runs);
        for (size_t i = 0; i < n; i++) {
            const U step = U(to_ordered(changes.values[i], kind.floating) -
                             to_ordered(changes.before[i], kind.floating));
            const bool down = step >> (8 * sizeof(U) - 1);
            const int majority = balance.at(changes.positions[i]);
            balance.step(down);
            sizes[i] =
                std::max<U>(down ? U(-step) : step, 1);  // 0 if the element was written meanwhile
            majorities[i] = uint8_t(majority_of(majority));
            against[i] = down != (majority < 0);
        }
    }
};

template <class U>
void choose_chances(SparseHead& head, const BlockChanges<U>& changes, const Steps<U>& steps,
                    ClassOf cls) {
    std::array<uint32_t, kClasses> longer{};
    std::array<uint32_t, kClasses + kMostLength> asked{}, went_on{}, ended{}, set{};
    uint32_t all[kMajorities] = {}, against[kMajorities] = {};
    for (size_t i = 0; i < steps.sizes.size(); i++) {
        all[steps.majorities[i]]++;
        against[steps.majorities[i]] += steps.against[i];
        const uint32_t size = steps.sizes[i];
        if (size == 1) continue;
        const size_t c = cls(changes.before[i]), length = size_t(31 - __builtin_clz(size));
        longer[c]++;
        for (size_t k = 1; k <= length; k++) asked[c + k]++, went_on[c + k] += k < length;
        ended[c + length]++;
        set[c + length] += (size >> (length - 1)) & 1;
    }
    for (int c = 0; c < kClasses; c++) {
        const uint32_t of = changes.statistics.changes[size_t(c)];
        if (of) head.longer[size_t(c)] = uint8_t(level_of(longer[size_t(c)], of));
    }
    for (int u = 0; u < int(asked.size()); u++) {
        const size_t k = size_t(u);
        if (!asked[k]) continue;
        head.lengths = u - head.first;
        head.further[k] = uint8_t(level_of(went_on[k], asked[k]));
        if (ended[k])
            head.second[k] =
                uint8_t(std::min(level_of(set[k] + 0.25, ended[k] + 0.5), kNoChance - 1));
    }
    for (size_t m = 0; m < kMajorities; m++) {
        head.against[m] = uint8_t(std::min(level_of(against[m] + 0.5, all[m] + 1), kNoChance - 1));
    }
}

void choose_rarities(SparseHead& head, const BlockStatistics& s) {
    int last = 0;
    for (int c = kClasses - 1; c >= 0; c--) {
        const double changes = s.changes[size_t(c)];
        if (changes == 0) continue;
        last = std::max(last, c);
        head.first = c;
        const double nats = -std::log(1 - std::min(changes / s.elements_of(size_t(c)), 0.98));
        head.rarities[size_t(c)] =
            uint8_t(std::clamp(int(std::lround(4 * (2 - std::log2(nats)))), 0, kMostRarity));
    }
    head.count = last - head.first + 1;
}

// How much more often each run changes than its weights say, by a sample of its batches.
template <class U>
void choose_shifts(SparseHead& head, const Batches& batches, const U* old, size_t elements,
                   ClassOf cls, MaskWords marks, const std::vector<uint32_t>& positions) {
    constexpr size_t kStride = 8, kFewHits = 8;
    const GroupWeights weights(head.rarities);
    size_t batch = 0, i = 0;
    uint16_t frequencies[kRansStates];
    for (size_t end : batches.ends) {
        size_t hits = 0, last = ~size_t(0);
        for (; i < positions.size() && positions[i] < end * kBatch; i++) {
            hits += positions[i] / kGroup != last;
            last = positions[i] / kGroup;
        }
        const size_t stride = end - batch > 8 * kStride ? kStride : 1;
        size_t sampled = 0;
        uint64_t expected = 0;
        for (size_t b = batch; b < end; b += stride, sampled++) {
            group_frequencies(old + b * kBatch, elements - b * kBatch, cls, weights, 0,
                              marks_of_batch(marks, b), frequencies);
            for (uint16_t f : frequencies) expected += f;
        }
        int shift = 0;
        if (hits >= kFewHits) {
            const double all =
                double(expected) / kRansScale * double(end - batch) / double(sampled);
            shift = std::clamp(int(std::lround(4 * std::log2(double(hits) / (all + 0.01)))),
                               -kMostShift, kMostShift);
        }
        head.shifts.push_back(int8_t(shift));
        batch = end;
    }
}

// Codes a block's tiles, the last one first. What is kept of one is in the order of a decoder.
template <class U>
class TileEncoder {
public:
    TileEncoder(const U* old, size_t elements, ClassOf cls, const BlockChanges<U>& changes,
                const Steps<U>& steps, const SparseHead& head, const std::vector<int8_t>& shifts,
                MaskWords marks)
        : old_(old),
          elements_(elements),
          cls_(cls),
          positions_(changes.positions),
          before_(changes.before),
          steps_(steps),
          head_(head),
          shifts_(shifts),
          marks_(marks),
          weights_(head.rarities) {
        for (size_t c = 0; c < kClasses; c++) longer_[c] = chance(head.longer[c]);
    }

    // The changes [from, to) are those of the tile.
    void write(RansWriter& coder, size_t tile, size_t from, size_t to) {
        signs(coder, from, to);
        sizes(coder, from, to);
        groups(tile, from, to);
        elements(coder, from, to);
        put_bits(coder, of_groups_.data(), hits_.data(), hits_.size());
    }

private:
    void signs(RansWriter& coder, size_t from, size_t to) {
        start(to - from);
        for (size_t i = 0; i < to - from; i++) {
            frequencies_[i] = chance(head_.against[steps_.majorities[from + i]]);
            bits_[i / kRansStates] |= uint64_t(steps_.against[from + i]) << (i % kRansStates);
        }
        put_bits(coder, frequencies_.data(), bits_.data(), bits_.size());
    }

    void sizes(RansWriter& coder, size_t from, size_t to) {
        start(to - from);
        PieceWriter side;
        for (size_t i = 0; i < to - from; i++) {
            const uint32_t c = cls_(before_[from + i]);
            frequencies_[i] = longer_[c];
            if (steps_.sizes[from + i] == 1) continue;
            bits_[i / kRansStates] |= uint64_t(1) << (i % kRansStates);
            code_long(side, head_.further, head_.second, c, steps_.sizes[from + i]);
            side.next_state();
        }
        side.put(coder);
        put_bits(coder, frequencies_.data(), bits_.data(), bits_.size());
    }

    void groups(size_t tile, size_t from, size_t to) {
        const size_t first = tile * kBatchesOfTile,
                     end = std::min(first + kBatchesOfTile, shifts_.size());
        of_groups_.resize((end - first) * kRansStates);
        for (size_t b = first; b < end; b++) {
            group_frequencies(old_ + b * kBatch, elements_ - b * kBatch, cls_, weights_, shifts_[b],
                              marks_of_batch(marks_, b), &of_groups_[(b - first) * kRansStates]);
        }
        hits_.assign(end - first, 0);
        groups_.clear();
        uint32_t last = ~0u;
        for (size_t i = from; i < to; i++) {
            const uint32_t group = positions_[i] / uint32_t(kGroup);
            if (group == last) continue;
            last = group;
            groups_.push_back(group);
            hits_[group / kRansStates - first] |= uint64_t(1) << (group % kRansStates);
        }
    }

    void elements(RansWriter& coder, size_t from, size_t to) {
        const size_t batches = batches_of(groups_.size());
        frequencies_.resize(batches * kGroup * kRansStates);
        bits_.assign(batches * kGroup, 0);
        size_t at = from;
        for (size_t b = 0; b < batches; b++) {
            const uint32_t* const groups = &groups_[b * kRansStates];
            const size_t here = std::min(kRansStates, groups_.size() - b * kRansStates);
            for (size_t g = 0; g < here; g++) {
                for (; at < to && positions_[at] / kGroup == groups[g]; at++) {
                    bits_[b * kGroup + positions_[at] % kGroup] |= uint64_t(1) << g;
                }
            }
            open_.open(old_, elements_, cls_, weights_, marks_, groups, here);
            for (size_t k = 0; k < kGroup; k++) {
                open_.frequencies(k, weights_, &frequencies_[(b * kGroup + k) * kRansStates]);
                open_.passed(k, bits_[b * kGroup + k]);
            }
        }
        put_bits(coder, frequencies_.data(), bits_.data(), bits_.size());
    }

    // One bit for each of `count`.
    void start(size_t count) {
        frequencies_.assign(batches_of(count) * kRansStates, 0);
        bits_.assign(batches_of(count), 0);
    }

    const U* old_;
    const size_t elements_;
    const ClassOf cls_;
    const std::vector<uint32_t>& positions_;
    const std::vector<U>& before_;
    const Steps<U>& steps_;
    const SparseHead& head_;
    const std::vector<int8_t>& shifts_;
    const MaskWords marks_;
    const GroupWeights weights_;
    std::array<uint16_t, kClasses> longer_;
    std::vector<uint32_t> groups_;
    std::vector<uint16_t> of_groups_, frequencies_;
    std::vector<uint64_t> hits_, bits_;
    OpenGroups open_;
};

// The bits of sizes below the two top ones.
template <class U>
std::vector<uint8_t> plain_bits_of(const HistoryEncoder* recall, const std::vector<U>& sizes) {
    size_t most = recall ? recall->most_plain() : 0;
    for (U size : sizes) most += size > 3 ? sizeof(U) : 0;
    BitWriter bits(most + 1);
    if (recall) recall->put_plain(bits);
    for (U size : sizes) {
        if (size <= 3) continue;
        const int n = plain_bits_of_long(size);
        bits.put(uint32_t(size) & ((1u << n) - 1), n);
    }
    std::vector<uint8_t> bytes = bits.finish();
    if (bytes.size() < kBytesInStates) bytes.resize(kBytesInStates);
    return bytes;
}

}  // namespace

bool suits_gaps(const BlockStatistics& s) {
    if (s.changed < kFewChanges || s.changed > s.elements / kManyOf) return true;
    const uint64_t rows =
        s.changed - s.live_changes;  // with a change: too few say nothing of how rows differ
    return rows >= kFewRows && plan_code(s).boost > 0;
}

template <class U>
std::vector<uint8_t> encode_sparse(const U* old, const BlockChanges<U>& changes,
                                   const ElementKind& kind, const std::vector<Run>& runs,
                                   HistoryEncoder* recall) {
    const MaskWords marks = recall ? recall->marks() : nullptr;
    const ClassOf cls{kind.shift, kind.mask};
    const uint64_t total = changes.statistics.elements;
    const std::vector<uint32_t>& positions = changes.positions;
    const size_t n = positions.size();
    SparseHead head;
    choose_rarities(head, changes.statistics);
    const Steps<U> steps(changes, kind, runs);
    choose_chances(head, changes, steps, cls);
    const Batches batches(runs);
    choose_shifts(head, batches, old, total, cls, marks, positions);
    std::vector<uint8_t> payload;
    if (recall) recall->put_head(payload);
    put_varint(payload, n);
    head.put(payload);
    const std::vector<int8_t> shifts = batches.by_batch(head.shifts);
    const std::vector<uint8_t> plain = plain_bits_of(recall, steps.sizes);

    // Bits take 2 bytes at most: one for each group, eight more for those with a change, one for size and sign, and up to 32
    // for a large size.
    size_t most =
        2 * kRansStates * (batches.count() + (kGroup + 2) * (total / kTile + 1)) + kInFront;
    for (U size : steps.sizes) most += 2 * (kGroup + 2 + (size > 1 ? 32 : 0));
    if (recall) most += recall->most_bytes();
    const Buffer<uint8_t> code(most);
    uint8_t* const end = code.data.get() + code.size;
    RansWriter coder;
    coder.next = end;
    for (size_t i = 0; i < kRansStates; i++)
        coder.states[i] = kRansLow | plain[2 * i] | uint32_t(plain[2 * i + 1]) << 8;
    TileEncoder<U> encoder(old, total, cls, changes, steps, head, shifts, marks);
    size_t to = n;
    for (size_t tile = (total + kTile - 1) / kTile; tile-- > 0;) {
        const auto first = std::lower_bound(positions.begin(),
                                            positions.begin() + std::ptrdiff_t(to), tile * kTile);
        const size_t from = size_t(first - positions.begin());
        encoder.write(coder, tile, from, to);
        to = from;
    }
    if (recall) recall->put(coder);

    put_varint(payload, plain.size() - kBytesInStates);
    payload.insert(payload.end(), plain.begin() + kBytesInStates, plain.end());
    BitWriter states(5 * kRansStates);  // at most 35 bits each
    for (uint32_t x : coder.states) {
        const int further = 15 - __builtin_clz(x);
        states.put(uint32_t(further), 4);
        states.put(x & ((1u << (16 + further)) - 1), 16 + further);
    }
    const std::vector<uint8_t> of_states = states.finish();
    payload.insert(payload.end(), of_states.begin(), of_states.end());
    payload.insert(payload.end(), coder.next, end);
    return payload;
}

#define PULSE_FOR(U)                                                                         \
    template std::vector<uint8_t> encode_sparse(const U*, const BlockChanges<U>&,            \
                                                const ElementKind&, const std::vector<Run>&, \
                                                HistoryEncoder*);
PULSE_FOR_WIDTHS(PULSE_FOR)

}  // namespace pulse
