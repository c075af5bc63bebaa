// The values of entries against theta: a symbol for the boundary that is crossed and for the size, and plain bits
// (docs/loco.md, section 3.3).
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "entropy/plain_bits.h"
#include "entropy/range_coder.h"
#include "entropy/rans_states.h"
#include "entropy/weights.h"
#include "loco/entry_classes.h"

namespace pulse {

constexpr int kMostSizes = 30;  // and the escape
constexpr int kMostEntrySymbols = 2 * (kMostSizes + 1), kMostContexts = 128;

constexpr int kExact = 23;  // explicit bits of mantissa: FP32

// How the values of a block are described: sizes are the octaves from `base` on.
struct ValueKind {
    Rounding rounding;
    int mantissa;
    int base, sizes;
    bool exact() const { return mantissa == kExact; }
    int whole_bits() const { return 8 + mantissa; }
    int symbols() const { return 2 * (sizes + 1); }
    int escape() const { return sizes; }
};

// A value: the octave of what is left to say of it, or none; `rest` are the octave's plain bits, `whole` the magnitude's.
struct Sized {
    static constexpr int16_t kNone = -1;
    int16_t octave;
    uint8_t bits;
    bool near;
    uint32_t rest, whole;

    uint32_t symbol(const ValueKind& kind) const {
        const int size = octave - kind.base;
        return uint32_t(
            2 * (octave != kNone && size >= 0 && size < kind.sizes ? size : kind.escape()) + near);
    }
};

// The exponent field that theta's unit in the last place has, plus 23.
inline int unit_exponent(uint32_t theta) { return int(std::max((theta & kMagnitude) >> 23, 1u)); }

inline Sized sized(float value, uint32_t theta, const Distance& distance, int mantissa) {
    const uint32_t bits = bits_of(value), magnitude = bits & kMagnitude;
    const bool is_up = (bits ^ theta) >> 31, near = is_up == distance.up_is_near();
    if (mantissa < kExact) {
        const uint32_t whole = magnitude >> (kExact - mantissa);
        return {int16_t(magnitude >> 23), uint8_t(mantissa), near, whole & ((1u << mantissa) - 1),
                whole};
    }
    // |value| in theta's units, exactly: a power of two scales without loss.
    const int exponent = unit_exponent(theta);
    const double units =
        double(float_of(magnitude)) * double_of(uint64_t(1023 + 150 - exponent) << 52);
    const uint32_t need = is_up ? distance.up : distance.down;
    constexpr double kMost = 2147483648.0;
    const int64_t multiple = int64_t(units < 2 * kMost ? units : 0);
    const int64_t excess = multiple - int64_t(need) + 1;
    if (double(multiple) != units || multiple == 0 || excess <= 0 || excess >> 31) {
        return {Sized::kNone, 0, near, 0, magnitude};
    }
    const int length = 31 - __builtin_clz(uint32_t(excess));
    return {int16_t(length + exponent), uint8_t(length), near,
            uint32_t(excess) & ((1u << length) - 1), magnitude};
}

// By context: how often each symbol occurs, of 2^12, from the levels that travel.
struct SymbolTables {
    int contexts = 1;  // 1, 16 or 128
    int top = 0;       // the exponent field of large parameters
    std::array<std::array<uint8_t, kMostEntrySymbols>, kMostContexts> levels;
    std::array<std::array<uint16_t, kMostEntrySymbols>, kMostContexts> start,
        length;  // of a context with a symbol

    // What is left of an exact value hardly depends on the distance. All of a rounded one has to reach it.
    size_t of(uint8_t cls, uint32_t theta, bool exact) const {
        const size_t own = cls & 15;
        if (contexts < kMostContexts) return contexts == 1 ? 0 : own;
        const int band = std::clamp((top - int((theta >> 23) & 255)) >> 1, 0, 3);
        if (!exact)
            return size_t(std::max(cls >> 4, 8) - 8) << 4 | (cls & 12) | size_t(cls & 1) << 1 |
                   (band > 1);
        return own | size_t(cls >= 12 * 16) << 4 | size_t(band) << 5;
    }
    bool empty(int context, int symbols) const;
    void set_lengths(int symbols);
};

using SymbolCounts = std::array<std::array<uint32_t, kMostEntrySymbols>, kMostContexts>;
// The levels that stand for counts.
void set_levels(SymbolTables& tables, const SymbolCounts& counts, int symbols);

struct CodedSymbol {
    uint8_t context, symbol;
};
void encode_values(RansWriter& coder, const std::vector<CodedSymbol>& coded,
                   const SymbolTables& tables);
// `theta` and `classes` are those of the entries. Throws Malformed, for values that are not finite as well.
void decode_values(RansReader& coder, BitReader& bits, const std::vector<uint32_t>& theta,
                   const uint8_t* classes, float* values, const ValueKind& kind,
                   const SymbolTables& tables);

}  // namespace pulse
