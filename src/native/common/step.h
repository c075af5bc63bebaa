// The step of a change, and the symbol that stands for it (docs/format.md, sections 3.6.2 and 3.8.1).
#pragma once

#include <cstdint>

namespace pulse {

// A bijection of the bit patterns of a float, ascending with the value: neighbors differ by one step.
template <class U>
U to_ordered(U x, bool floating) {
    constexpr U sign = U(U(1) << (8 * sizeof(U) - 1));
    if (!floating) return x;
    return U(x & sign ? ~x : x | sign);
}
template <class U>
U from_ordered(U y, bool floating) {
    constexpr U sign = U(U(1) << (8 * sizeof(U) - 1));
    if (!floating) return y;
    return U(y & sign ? y & ~sign : ~y);
}

constexpr int kFirstLong =
    3;  // 0, 1, 2: a step of 0, +1, -1; from here on by the size's bit length

// An alphabet has this many symbols at most; the last one is the escape.
constexpr int most_alphabet(int width) { return 8 * width + 2; }

// The symbol of a step where the alphabet is large enough.
template <class U>
inline int symbol_of(U step) {
    const bool down = step >> (8 * sizeof(U) - 1);
    const U size = down ? U(-step) : step;
    if (size < 2) return size ? 1 + down : 0;
    return 33 - __builtin_clz(uint32_t(size));
}

// Plain bits that follow a symbol: the sign and the bits of the size below its top one, or the step itself.
inline int plain_bits(int symbol, int escape, int width) {
    if (symbol < kFirstLong) return 0;
    return symbol == escape ? 8 * width : symbol - 1;
}

}  // namespace pulse
