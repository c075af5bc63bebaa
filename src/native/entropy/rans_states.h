// 64 states of an asymmetric numeral system, and the words of 16 bits that they take and give (docs/format.md, section
// 3.8.3). An encoder walks backwards and writes words in front of those that it has written; a decoder walks forwards.
#pragma once

#include <cstddef>
#include <cstdint>

#include "entropy/payload.h"

namespace pulse {

constexpr size_t kRansStates = 64;

constexpr uint32_t kRansLow = 1u << 16;  // states are at least this between symbols
constexpr int kRansBits = 12;            // the frequencies of a table sum up to 2^12
constexpr uint32_t kRansScale = 1u << kRansBits;

// A symbol's interval [start, start + length) of 2^12.
struct RansWriter {
    alignas(64) uint32_t states[kRansStates];
    uint8_t* next;  // words are put in front of it

    void put(uint32_t word) {
        next -= 2;
        next[0] = uint8_t(word), next[1] = uint8_t(word >> 8);
    }
    // A 1 has the part [0, frequency) of 2^12, a 0 the rest.
    void bit(uint32_t& x, uint32_t frequency, bool one) {
        symbol(x, one ? 0 : frequency, one ? frequency : kRansScale - frequency);
    }
    void symbol(uint32_t& x, uint32_t start, uint32_t length) {
        if (x >> (32 - kRansBits) >= length) {
            put(x);
            x >>= 16;
        }
        const uint32_t quotient = x / length;
        x = (quotient << kRansBits) + (x - quotient * length) + start;
    }
};

struct RansReader {
    alignas(64) uint32_t states[kRansStates];
    const uint8_t *next, *end;

    uint32_t take() {
        if (end - next < 2) throw Malformed("the code ends too early");
        const uint32_t word = uint32_t(next[0]) | uint32_t(next[1]) << 8;
        next += 2;
        return word;
    }
    static uint32_t slot(uint32_t x) { return x & (kRansScale - 1); }
    bool bit(uint32_t& x, uint32_t frequency) {
        const bool one = slot(x) < frequency;
        symbol(x, one ? 0 : frequency, one ? frequency : kRansScale - frequency);
        return one;
    }
    void symbol(uint32_t& x, uint32_t start, uint32_t length) {
        x = length * (x >> kRansBits) + slot(x) - start;
        if (x < kRansLow) x = x << 16 | take();
    }
};

}  // namespace pulse
