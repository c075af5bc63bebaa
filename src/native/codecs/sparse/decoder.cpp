#include <algorithm>
#include <cstring>

#include "codecs/codecs.h"
#include "codecs/history/hits.h"
#include "codecs/sparse/code.h"
#include "codecs/sparse/row_balance.h"
#include "common/step.h"
#include "entropy/plain_bits.h"

namespace pulse {
namespace {

// Decodes a block's tiles, one after another.
template <class U>
class TileDecoder {
public:
    TileDecoder(RansReader& coder, const U* old, size_t elements, const ElementKind& kind,
                const std::vector<Run>& runs, const SparseHead& head,
                const std::vector<int8_t>& shifts, MaskWords marks, size_t changes)
        : coder_(coder),
          old_(old),
          elements_(elements),
          cls_{kind.shift, kind.mask},
          head_(head),
          shifts_(shifts),
          marks_(marks),
          weights_(head.rarities),
          balance_(runs) {
        for (size_t c = 0; c < kClasses; c++) longer_[c] = chance(head.longer[c]);
        positions.resize(changes), before.resize(changes), sizes.resize(changes),
            downs.resize(changes);
    }

    std::vector<uint32_t> positions,
        large;  // of changes; the numbers of those whose sizes lack plain bits
    std::vector<U> before, sizes;
    std::vector<uint8_t> downs;
    size_t found = 0;

    void read(size_t tile) {
        read_groups(tile);
        const size_t from = found;
        for (size_t g = 0; g < groups_.size(); g += kRansStates) read_elements(g);
        read_sizes(from);
        read_signs(from);
    }

private:
    void read_groups(size_t tile) {
        const size_t first = tile * kBatchesOfTile,
                     end = std::min(first + kBatchesOfTile, shifts_.size());
        groups_.resize((end - first + 1) * kRansStates);
        size_t count = 0;
        for (size_t b = first; b < end; b++) {
            group_frequencies(old_ + b * kBatch, elements_ - b * kBatch, cls_, weights_, shifts_[b],
                              marks_of_batch(marks_, b), frequencies_);
            count += put_ones(take_bits(coder_, frequencies_), uint32_t(b * kRansStates),
                              &groups_[count]);
        }
        groups_.resize(count);
    }

    void read_elements(size_t from) {
        const uint32_t* const groups = &groups_[from];
        const size_t here = std::min(kRansStates, groups_.size() - from);
        open_.open(old_, elements_, cls_, weights_, marks_, groups, here);
        uint64_t changed[kGroup];
        for (size_t k = 0; k < kGroup; k++) {
            open_.frequencies(k, weights_, frequencies_);
            changed[k] = take_bits(coder_, frequencies_);
            open_.passed(k, changed[k]);
        }
        uint8_t places[kRansStates];
        turn_bits(changed, places);
        for (size_t g = 0; g < here; g++) {
            for (uint32_t left = places[g]; left; left &= left - 1) {
                if (found == positions.size())
                    throw Malformed("there are more changes than announced");
                const uint32_t at = groups[g] * uint32_t(kGroup) + uint32_t(__builtin_ctz(left));
                before[found] = old_[at];
                positions[found++] = at;
            }
        }
    }

    void read_sizes(size_t from) {
        large_.clear();
        for (size_t i = from; i < found; i += kRansStates) {
            const size_t here = std::min(kRansStates, found - i);
            std::fill_n(&sizes[i], here, U(1));
            uint64_t longer =
                take_bits(coder_, here, [&](size_t k) { return longer_[cls_(before[i + k])]; });
            for (; longer; longer &= longer - 1)
                large_.push_back(uint32_t(i + size_t(__builtin_ctzll(longer))));
        }
        PieceReader side{coder_};
        for (uint32_t i : large_) {
            const uint32_t size = code_long(side, head_.further, head_.second, cls_(before[i]), 0);
            sizes[i] = U(size);
            if (size != sizes[i]) throw Malformed("a step is too large");
            if (size > 3) large.push_back(i);
            side.next_state();
        }
    }

    void read_signs(size_t from) {
        uint32_t of[kMajorities];
        for (size_t m = 0; m < kMajorities; m++) of[m] = chance(head_.against[m]);
        for (size_t i = from; i < found; i++) {
            const int majority = balance_.at(positions[i]);
            const uint32_t f = of[majority_of(majority)];
            const bool against = coder_.bit(coder_.states[(i - from) % kRansStates], f);
            const bool down = against != (majority < 0);
            balance_.step(down);
            downs[i] = down;
        }
    }

    RansReader& coder_;
    const U* old_;
    const size_t elements_;
    const ClassOf cls_;
    const SparseHead& head_;
    const std::vector<int8_t>& shifts_;
    const MaskWords marks_;
    const GroupWeights weights_;
    std::array<uint16_t, kClasses> longer_;
    RowBalance balance_;
    std::vector<uint32_t> groups_, large_;
    uint16_t frequencies_[kRansStates];
    OpenGroups open_;
};

// The plain bits of the sizes: the first bytes are what is left in the states.
template <class U>
void add_plain_bits(std::vector<U>& sizes, const std::vector<uint32_t>& large,
                    const RansReader& coder, const uint8_t* behind, size_t size,
                    HistoryDecoder* recall) {
    std::vector<uint8_t> bytes(kBytesInStates + size);
    for (size_t i = 0; i < kRansStates; i++) {
        if (coder.states[i] >> 16 != 1)
            throw Malformed("the code is longer or shorter than its elements");
        bytes[2 * i] = uint8_t(coder.states[i]);
        bytes[2 * i + 1] = uint8_t(coder.states[i] >> 8);
    }
    std::copy_n(behind, size, bytes.begin() + kBytesInStates);
    BitReader bits(bytes.data(), bytes.size());
    if (recall) recall->take_plain(bits);
    for (uint32_t i : large) sizes[i] = U(sizes[i] | bits.take(plain_bits_of_long(sizes[i])));
    uint64_t used = bits.taken();
    if (size && (used + 7) / 8 != bytes.size())
        throw Malformed("the plain bits are longer than the sizes");
    for (; used < 8 * uint64_t(bytes.size()); used += 8 - used % 8) {
        if (bytes[used / 8] >> used % 8) throw Malformed("bits behind the last size are not 0");
    }
}

// The states at the start; how many bytes they take.
size_t take_states(RansReader& coder, const uint8_t* data, size_t size) {
    BitReader bits(data, size);
    size_t used = 0;
    for (uint32_t& x : coder.states) {
        const int further = int(bits.take(4));
        x = kRansLow << further | bits.take(16 + further);
        used += size_t(20 + further);
    }
    if (used % 8 && bits.take(int(8 - used % 8)))
        throw Malformed("bits behind the last state are not 0");
    return (used + 7) / 8;
}

template <class U>
Decoded decode(const uint8_t* data, size_t size, const U* old, const ElementKind& kind,
               const std::vector<Run>& runs, HistoryDecoder* recall) {
    const uint64_t total = elements_of(runs);
    size_t at = 0;
    if (recall) recall->take_head(data, size, at);
    const uint64_t changed = take_count(data, size, at);
    if ((changed == 0 && !recall) || changed > total) {
        throw Malformed("the number of changes is 0 or exceeds the elements");
    }
    const Batches batches(runs);
    const SparseHead head = SparseHead::take(data, size, at, kind, batches.ends.size());
    const uint64_t behind = take_count(data, size, at);
    if (behind > size - at) throw Malformed("the block ends inside its plain bits");
    const uint8_t* const plain = data + at;
    at += size_t(behind);
    RansReader coder;
    at += take_states(coder, data + at, size - at);
    std::vector<uint8_t> words(size - at + kBehind);
    std::memcpy(words.data(), data + at, size - at);
    coder.next = words.data();
    coder.end = words.data() + (size - at);
    const std::vector<int8_t> shifts = batches.by_batch(head.shifts);
    if (recall) recall->take(coder);
    TileDecoder<U> tiles(coder, old, total, kind, runs, head, shifts,
                         recall ? recall->marks() : nullptr, changed);
    for (size_t tile = 0; tile * kTile < total; tile++) tiles.read(tile);
    if (tiles.found != changed) throw Malformed("there are fewer changes than announced");
    if (coder.next != coder.end) throw Malformed("the code is longer or shorter than its elements");
    add_plain_bits(tiles.sizes, tiles.large, coder, plain, size_t(behind), recall);

    Decoded result(changed, sizeof(U));
    U* const values = reinterpret_cast<U*>(result.values.data.get());
    std::copy_n(tiles.positions.data(), changed, result.positions.data.get());
    std::copy_n(tiles.before.data(), changed, reinterpret_cast<U*>(result.before.data.get()));
    for (size_t i = 0; i < changed; i++) {
        const U step = tiles.downs[i] ? U(-tiles.sizes[i]) : tiles.sizes[i];
        values[i] =
            from_ordered(U(to_ordered(tiles.before[i], kind.floating) + step), kind.floating);
    }
    return result;
}

}  // namespace

Decoded decode_sparse(const uint8_t* payload, size_t size, const void* old, const ElementKind& kind,
                      const std::vector<Run>& runs, HistoryDecoder* recall) {
    return for_width(kind.width, [&](auto zero) {
        return decode(payload, size, static_cast<const decltype(zero)*>(old), kind, runs, recall);
    });
}

}  // namespace pulse
