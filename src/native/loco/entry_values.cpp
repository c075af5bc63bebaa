#include "loco/entry_values.h"

#include <algorithm>
#include <cmath>

#include "loco/gate.h"

namespace pulse {
namespace {

constexpr size_t kMask = kRansStates - 1;

// The inverse of `sized`.
float value_of(uint32_t theta, const Distance& distance, uint32_t symbol, BitReader& bits,
               const ValueKind& kind) {
    const bool is_up = bool(symbol & 1) == distance.up_is_near();
    const uint32_t sign = (is_up ? ~theta : theta) & kSign;
    const int size = int(symbol >> 1);
    const int shift = kExact - kind.mantissa;
    if (size == kind.escape()) return float_of(sign | bits.take(kind.whole_bits()) << shift);
    if (!kind.exact())
        return float_of(sign | uint32_t(kind.base + size) << 23 |
                        bits.take(kind.mantissa) << shift);
    const int exponent = unit_exponent(theta), length = kind.base + size - exponent;
    if (length < 0 || length > 30) throw Malformed("a size is out of range");
    const uint64_t multiple =
        uint64_t((1u << length) | bits.take(length)) - 1 + (is_up ? distance.up : distance.down);
    // multiple * 2^(exponent - 150); a power of two below the normal numbers scales exactly in two steps.
    const uint32_t e = uint32_t(exponent);
    const float unit = e > 23 ? float_of((e - 23) << 23) : float_of(1u << (e - 1));
    return float_of((bits_of(float(int64_t(multiple)) * unit) & kMagnitude) | sign);
}

}  // namespace

bool SymbolTables::empty(int context, int symbols) const {
    const auto& of = levels[size_t(context)];
    return std::all_of(of.begin(), of.begin() + symbols,
                       [](uint8_t level) { return level == kAbsent; });
}

void SymbolTables::set_lengths(int symbols) {
    for (int c = 0; c < contexts; c++) {
        if (empty(c, symbols)) continue;
        const auto& of = levels[size_t(c)];
        auto &starts = start[size_t(c)], &lengths = length[size_t(c)];
        uint64_t sum = 0;
        for (int s = 0; s < symbols; s++) sum += weight_of_level(of[size_t(s)]);
        uint32_t given = 0;
        size_t largest = 0;
        for (size_t s = 0; s < size_t(symbols); s++) {
            const uint32_t share = uint32_t(uint64_t(weight_of_level(of[s])) * kRansScale / sum);
            lengths[s] = of[s] == kAbsent ? 0 : uint16_t(std::max(share, 1u));
            given += lengths[s];
            if (lengths[s] > lengths[largest]) largest = s;
        }
        lengths[largest] = uint16_t(lengths[largest] + kRansScale - given);
        uint32_t at = 0;
        for (size_t s = 0; s < size_t(symbols); s++) {
            starts[s] = uint16_t(at);
            at += lengths[s];
        }
    }
}

void set_levels(SymbolTables& tables, const SymbolCounts& counts, int symbols) {
    constexpr int kRarest = 2 * kRansBits;
    for (size_t c = 0; c < size_t(tables.contexts); c++) {
        double total = 0;
        for (int s = 0; s < symbols; s++) total += counts[c][size_t(s)];
        tables.levels[c].fill(kAbsent);
        for (size_t s = 0; s < size_t(symbols); s++) {
            if (!counts[c][s]) continue;
            tables.levels[c][s] =
                uint8_t(std::min(int(2 * std::log2(total / counts[c][s]) + 0.5), kRarest));
        }
    }
}

void encode_values(RansWriter& coder, const std::vector<CodedSymbol>& coded,
                   const SymbolTables& tables) {
    for (size_t i = coded.size(); i-- > 0;) {
        const auto [context, symbol] = coded[i];
        coder.symbol(coder.states[i & kMask], tables.start[context][symbol],
                     tables.length[context][symbol]);
    }
}

void decode_values(RansReader& coder, BitReader& bits, const std::vector<uint32_t>& theta,
                   const uint8_t* classes, float* values, const ValueKind& kind,
                   const SymbolTables& tables) {
    constexpr uint8_t kNoSymbol = 63;
    const int symbols = kind.symbols();
    std::vector<uint8_t> slots(size_t(tables.contexts) * kRansScale, kNoSymbol);
    for (size_t c = 0; c < size_t(tables.contexts); c++) {
        if (tables.empty(int(c), symbols)) continue;
        for (size_t s = 0; s < size_t(symbols); s++) {
            const uint32_t start = tables.start[c][s], length = tables.length[c][s];
            if (length) std::fill_n(&slots[c * kRansScale + start], length, uint8_t(s));
        }
    }
    const bool bf16_gate = kind.rounding.is_bf16();
    for (size_t i = 0; i < theta.size(); i++) {
        uint32_t& x = coder.states[i & kMask];
        const size_t context = tables.of(classes[i], theta[i], kind.exact());
        const uint8_t symbol = slots[context * kRansScale + RansReader::slot(x)];
        if (symbol == kNoSymbol) throw Malformed("a value in a context that has none");
        coder.symbol(x, tables.start[context][symbol], tables.length[context][symbol]);
        values[i] = value_of(
            theta[i], bf16_gate ? bf16_distance(theta[i]) : distance_of(theta[i], kind.rounding),
            symbol, bits, kind);
        if ((bits_of(values[i]) & kMagnitude) >= kHuge)
            throw Malformed("a value that is not finite");
    }
}

}  // namespace pulse
