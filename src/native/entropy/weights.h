// Elements have a class, classes a level, levels a weight (docs/format.md, section 3.6.2): the weight stands for the chance
// that the element changes.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "common/element_mask.h"

namespace pulse {

constexpr int kClasses = 256;
constexpr uint64_t kNat = uint64_t(1)
                          << 24;  // weight of an element that changes with probability 1 - 1/e
constexpr int kMostLevel = 44;    // level h stands for the weight 2^(26 - h/2)
constexpr uint8_t kAbsent = 63;   // no element of the class changes: weight 0
constexpr uint64_t kMostWeight = uint64_t(1) << 26;
constexpr int kMostBoost = 7;  // a row with a change weighs up to 2^7 times as much

inline uint32_t weight_of_level(int level) {
    if (level > kMostLevel) return 0;
    const uint32_t base = (level & 1) ? 47453133u : 67108864u;  // 2^25.5, 2^26
    return base >> (level / 2);
}

// Elements as classes: (x >> shift) & mask, the exponent field where there is one.
struct ClassOf {
    int shift;
    uint32_t mask;
    template <class U>
    uint32_t operator()(U x) const {
        return (uint32_t(x) >> shift) & mask;
    }
};

// The weights of the classes, in a row without and with a change so far.
struct Weights {
    std::array<uint32_t, kClasses> of[2];
    // The same for vectors, where all classes with a weight are among the 64 (`narrow`) or 128 (`wide`) from `first` on: byte
    // k of each.
    bool narrow, wide;
    uint8_t first = 0;
    uint8_t planes[2][4][128] = {};

    Weights(const std::array<uint8_t, kClasses>& levels, int boost) {
        int last = 0;
        for (int c = kClasses - 1; c >= 0; c--) {
            of[0][c] = weight_of_level(levels[c]);
            of[1][c] = uint32_t(std::min(uint64_t(of[0][c]) << boost, kMostWeight));
            if (of[0][c]) last = std::max(last, c), first = uint8_t(c);
        }
        narrow = last - first < 64;
        wide = last - first < 128;
        for (int c = first; wide && c <= last; c++) {
            for (int live = 0; live < 2; live++) {
                for (int k = 0; k < 4; k++)
                    planes[live][k][c - first] = uint8_t(of[live][c] >> (8 * k));
            }
        }
    }
};

// The weight of eight elements; fits 32 bits, as no weight exceeds 2^26.
template <class U>
inline uint32_t weight8(const U* p, ClassOf cls, const uint32_t* weights) {
    const auto w = [&](int i) { return weights[cls(p[i])]; };
    return (w(0) + w(1)) + (w(2) + w(3)) + ((w(4) + w(5)) + (w(6) + w(7)));
}

// The weight of `count` elements.
template <class U>
inline uint64_t plain_weight_sum(const U* p, size_t count, ClassOf cls, const uint32_t* weights) {
    uint64_t sum = 0;
    size_t i = 0;
    for (; i + 8 <= count; i += 8) {
        sum += weight8(p + i, cls, weights);
        // Keeps the compiler from vectorizing the look-ups into gathers, which halves the speed.
        __asm__("" : "+r"(sum));
    }
    for (; i < count; i++) sum += weights[cls(p[i])];
    return sum;
}

// The same without the elements that are marked, where there are marks; `first` is the number of `p` in its block.
template <class U>
inline uint64_t plain_weight_sum(const U* p, size_t count, ClassOf cls, const uint32_t* weights,
                                 MaskWords marks, size_t first) {
    if (!marks) return plain_weight_sum(p, count, cls, weights);
    uint64_t sum = 0;
    for (size_t i = 0; i < count; i += 64) {
        const uint64_t marked = marks_from(marks, first + i);
        const size_t here = std::min<size_t>(64, count - i);
        sum += plain_weight_sum(p + i, here, cls, weights);
        for (uint64_t left = here < 64 ? marked & ((uint64_t(1) << here) - 1) : marked; left;
             left &= left - 1) {
            sum -= weights[cls(p[i + size_t(__builtin_ctzll(left))])];
        }
    }
    return sum;
}

// Passes whole eights of elements as long as `waited` and their weight stay below `target`; how many elements were passed.
template <class U>
inline size_t plain_weight_skip(const U* p, size_t count, ClassOf cls, const uint32_t* weights,
                                uint64_t& waited, uint64_t target, MaskWords marks, size_t first) {
    constexpr size_t kAhead = 256;  // elements that are fetched before they are needed
    size_t at = 0;
    for (; at + 8 <= count; at += 8) {
        __builtin_prefetch(p + at + kAhead);
        uint64_t next = waited + weight8(p + at, cls, weights);
        for (uint64_t left = marks ? marks_from(marks, first + at) & 255 : 0; left;
             left &= left - 1) {
            next -= weights[cls(p[at + size_t(__builtin_ctzll(left))])];
        }
        if (next >= target) break;
        waited = next;
    }
    return at;
}

}  // namespace pulse
