// By what a step of a remembered element is coded: models that adapt, or levels of chances that stand in a head (docs/format.md,
// sections 3.9.5 and 3.9.6).
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>

#include "codecs/history/hit_table.h"
#include "codecs/history/windows.h"
#include "entropy/levels.h"
#include "entropy/models.h"
#include "entropy/rans_states.h"

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
    if (!expected) {
        const uint32_t size = code_long(side, models.further, models.second, cls, value.number);
        return {size, Unlikely::size, uint8_t(plain_bits_of_long(size))};
    }
    const int length = 31 - __builtin_clz(value.number | 1);
    const bool less = side.bit(models.less[cls], value.kind == Unlikely::less);
    int n = 0;
    while (n < kMostLength - 1 && side.bit(models.apart[cls + size_t(n)], length > n)) n++;
    return {1u << n, less ? Unlikely::less : Unlikely::more, uint8_t(n)};
}

// How often a bit is said, and how often it is 1.
struct Tally {
    uint32_t asked = 0, ones = 0;

    int level(int expected) const {
        return asked ? level_near(ones, asked, expected, 3) : expected;
    }
};

// Levels that stand in a head.
struct HitHead {
    HistoryTable table;
    RecallModels<uint8_t> levels;
    int sizes = 0,
        distances = 0;  // how many levels by class and length follow, from the first class on

    HitHead() {
        for (auto* all : {&levels.longer, &levels.differs, &levels.less}) all->fill(kNoChance);
        for (auto* all : {&levels.further, &levels.second, &levels.apart}) all->fill(kNoChance);
        levels.turned.fill(kNoChance);
    }
};

// `there` says which cells have elements, `large` whether a step above 1 is remembered; both sides know it. An encoder chooses by
// `tallies`.
template <class Side, class T>
void code_recall_head(Side& side, HitHead& head, const ByCell<T>& there, bool large, int first,
                      int count, const RecallModels<Tally>& tallies) {
    TableModels models;
    code_table(side, models, there, count, head.table);
    RecallModels<uint8_t>& levels = head.levels;
    const auto code = [&](NearModels& near, auto& of, const auto& tally, size_t k, int expected) {
        of[k] = uint8_t(code_within(side, near, tally[k].level(expected), expected, 0, kNoChance));
        return int(of[k]);
    };
    const auto code_count = [&](int& value) {
        side.next_symbol();
        value = std::min(int(side.plain(uint32_t(value), 9)), count + kMostLength - 1);
    };
    NearModels turned, longer, further, second, differs, less, apart;
    int expected = kEven;
    for (int c = first; c < first + count; c++) {
        for (size_t k : {size_t(c), size_t(kClasses + c)})
            expected = code(turned, levels.turned, tallies.turned, k, expected);
    }
    expected = kNoChance;
    for (int c = first; c < first + count; c++) {
        expected = std::min(code(longer, levels.longer, tallies.longer, size_t(c), expected) + 2,
                            kNoChance);
    }
    code_count(head.sizes);
    expected = kEven;
    for (int u = first, of_second = kEven; u < first + head.sizes; u++) {
        expected = std::min(code(further, levels.further, tallies.further, size_t(u), expected) + 2,
                            kNoChance);
        of_second = code(second, levels.second, tallies.second, size_t(u), of_second);
    }
    expected = kEven;
    for (int c = first, of_less = kEven; large && c < first + count; c++) {
        expected = std::min(code(differs, levels.differs, tallies.differs, size_t(c), expected) + 2,
                            kNoChance);
        if (levels.differs[size_t(c)] != kNoChance)
            of_less = code(less, levels.less, tallies.less, size_t(c), of_less);
    }
    if (large) code_count(head.distances);
    expected = kEven;
    for (int u = first; u < first + head.distances; u++) {
        expected =
            std::min(code(apart, levels.apart, tallies.apart, size_t(u), expected) + 2, kNoChance);
    }
}

}  // namespace pulse
