#include "codecs/block.h"

#include "codecs/codecs.h"
#include "entropy/payload.h"

namespace pulse {
namespace {

// From this density on `table` takes the place of `sparse`, where the changes are so evenly spread that it costs few more
// bytes (notes/design/0023), and in blocks so large that its states do not show.
constexpr double kMany = 0.0625, kEven = 0.8;
constexpr size_t kLarge = size_t(1) << 19;

// The choice between the codecs: the only place where it is made.
template <class U>
EncodedBlock encode(const std::vector<Window>& history, const U* old, const U* now,
                    const ElementKind& kind, const std::vector<Run>& runs, bool prove,
                    BlockCodec only) {
    const size_t elements = size_t(elements_of(runs));
    EncodedBlock result{};
    const auto by_table = [&] {
        const Spread spread = sampled_spread(old, now, elements, int(sizeof(U)));
        return spread.density >= kMany && spread.evenness >= kEven;
    };
    if (only == BlockCodec::table ||
        (only == BlockCodec::any && elements >= kLarge && by_table())) {
        Encoded encoded = encode_steps(old, now, elements, kind);
        result.codec = BlockCodec::table;
        result.payload = std::move(encoded.payload);
        result.changed = encoded.changed;
        return result;
    }
    BlockChanges<U> changes =
        compare_block(old, now, elements, runs, ClassOf{kind.shift, kind.mask});
    result.changed = changes.positions.size();
    if (changes.positions.empty()) return result;
    const bool few =
        only == BlockCodec::gaps || (only != BlockCodec::sparse && suits_gaps(changes.statistics));
    result.codec = few ? BlockCodec::gaps : BlockCodec::sparse;
    if (!history.empty() && (only == BlockCodec::any || only == BlockCodec::history) &&
        encode_history(history, old, changes, kind, runs, few, result.payload,
                       prove ? &result.decoded : nullptr)) {
        result.codec = BlockCodec::history;
    } else if (few) {
        result.payload = encode_gaps(old, changes, kind, runs);
    } else {
        result.payload = encode_sparse(old, changes, kind, runs);
    }
    if constexpr (sizeof(U) != 2) {
        const bool asked = only == BlockCodec::nibbles;
        if (may_be_nibbles(kind) && (asked || only == BlockCodec::any)) {
            std::vector<uint8_t> payload = encode_nibbles(old, now, changes, runs, asked);
            if (!payload.empty() && (asked || payload.size() < result.payload.size())) {
                result.codec = BlockCodec::nibbles;
                result.payload = std::move(payload);
                result.decoded = {};
            }
        }
    }
    const auto* const values = reinterpret_cast<const uint8_t*>(changes.values.data());
    result.values.assign(values, values + changes.values.size() * sizeof(U));
    result.positions = std::move(changes.positions);
    return result;
}

}  // namespace

EncodedBlock encode_block(const std::vector<Window>& history, const void* old, const void* now,
                          const ElementKind& kind, const std::vector<Run>& runs, bool prove,
                          BlockCodec only) {
    return for_width(kind.width, [&](auto zero) {
        using U = decltype(zero);
        return encode(history, static_cast<const U*>(old), static_cast<const U*>(now), kind, runs,
                      prove, only);
    });
}

Decoded decode_block(BlockCodec codec, const std::vector<Window>& history, const uint8_t* payload,
                     size_t size, const void* old, const ElementKind& kind,
                     const std::vector<Run>& runs) {
    switch (codec) {
        case BlockCodec::gaps: return decode_gaps(payload, size, old, kind, runs);
        case BlockCodec::table:
            return decode_steps(payload, size, old, size_t(elements_of(runs)), kind);
        case BlockCodec::sparse: return decode_sparse(payload, size, old, kind, runs);
        case BlockCodec::nibbles: return decode_nibbles(payload, size, old, kind, runs);
        case BlockCodec::history: return decode_history(history, payload, size, old, kind, runs);
        default: throw Malformed("the codec is unknown");
    }
}

}  // namespace pulse
