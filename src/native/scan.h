// The two loops over every element: where do old and new differ, and how much weight passes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace pulse {

// Appends base + i for every byte offset i * width at which the two arrays differ. `bytes` is a multiple of width.
void differing(const uint8_t* a, const uint8_t* b, size_t bytes, int width, uint32_t base, std::vector<uint32_t>& out);

// Elements as classes: (x >> shift) & mask, the exponent field where there is one.
struct ClassOf {
    int shift;
    uint32_t mask;
    template <class U>
    uint32_t operator()(U x) const {
        return (uint32_t(x) >> shift) & mask;
    }
};

// The weight of eight elements; fits 32 bits, as no weight exceeds 2^26.
template <class U>
inline uint32_t weight8(const U* p, ClassOf cls, const uint32_t* weights) {
    const auto w = [&](int i) { return weights[cls(p[i])]; };
    return (w(0) + w(1)) + (w(2) + w(3)) + ((w(4) + w(5)) + (w(6) + w(7)));
}

template <class U>
inline uint64_t weight_sum(const U* p, size_t count, ClassOf cls, const uint32_t* weights) {
    uint64_t sum = 0;
    size_t i = 0;
    for (; i + 8 <= count; i += 8) {
        sum += weight8(p + i, cls, weights);
#if defined(__GNUC__)
        __asm__("" : "+r"(sum));  // keeps the look-ups from being vectorised into gathers, which halves the speed
#endif
    }
    for (; i < count; i++) sum += weights[cls(p[i])];
    return sum;
}

}  // namespace pulse
