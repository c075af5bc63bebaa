// By what a step of a remembered element is coded: models that adapt, or levels of chances that stand in a head (docs/format.md,
// section 3.9.5).
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>

#include "codecs/history/windows.h"
#include "entropy/models.h"

namespace pulse {

// What a bit depends on; the class is that of the old element. The last three also by the length of a number.
template <class T>
struct RecallModels {
    std::array<T, 2 * kClasses>
        turned;  // does it change in the other direction? By whether it changed in the last version
    std::array<T, kClasses> longer;         // is a size above 1?
    std::array<T, kClasses> differs, less;  // is it other than the last one; is it less?
    std::array<T, kClasses + kMostLength> further, second, apart;
};

inline size_t turn_of(State state) {
    return state.cls() + (state.group() > kLastVersion ? size_t(kClasses) : 0);
}

// The size that is expected of a step, above 1, or 0 where only 1 is likely.
inline uint32_t expected_size(State state, bool turned) {
    const uint32_t size = uint32_t(std::abs(int(state.last())));
    return turned || size < 2 ? 0 : size;
}

// The model of the bit whether a size is other than what is likely.
template <class T>
T& unlikely_model(RecallModels<T>& models, size_t cls, uint32_t expected) {
    return expected ? models.differs[cls] : models.longer[cls];
}

// A size that is other than what is likely: a number, of which the lowest bits are plain.
struct Unlikely {
    enum Kind : uint8_t {
        size,
        less,
        more
    };  // it is the size, or how far this is from the expected one
    uint32_t number;
    Kind kind;
    uint8_t plain;  // so many bits

    static Unlikely of(uint32_t expected, uint32_t size) {
        const Kind kind = !expected ? Unlikely::size : size < expected ? less : more;
        const uint32_t number = kind == less ? expected - size : size - expected;
        return {number, kind, uint8_t(31 - __builtin_clz(number | 1) - (kind == Unlikely::size))};
    }
    uint32_t plain_bits() const { return number & ((1u << plain) - 1); }
    // Throws Malformed.
    uint32_t size_near(uint32_t expected) const {
        if (kind == less && number >= expected) throw Malformed("a change by nothing");
        if (kind == more && number > UINT32_MAX - expected)
            throw Malformed("a step is out of range");
        return kind == less ? expected - number : expected + number;
    }
};

// All but its plain bits, which are 0 in what is returned. `side` takes models of this kind.
template <class Side, class T>
Unlikely code_unlikely(Side& side, RecallModels<T>& models, size_t cls, uint32_t expected,
                       Unlikely value) {
    const int length = 31 - __builtin_clz(value.number | 1);
    if (!expected) {
        int n = 1;
        while (n < kMostLength - 1 && side.bit(models.further[cls + size_t(n)], length > n)) n++;
        const bool second = side.bit(models.second[cls + size_t(n)], (value.number >> (n - 1)) & 1);
        return {(2 | uint32_t(second)) << (n - 1), Unlikely::size, uint8_t(n - 1)};
    }
    const bool less = side.bit(models.less[cls], value.kind == Unlikely::less);
    int n = 0;
    while (n < kMostLength - 1 && side.bit(models.apart[cls + size_t(n)], length > n)) n++;
    return {1u << n, less ? Unlikely::less : Unlikely::more, uint8_t(n)};
}

}  // namespace pulse
