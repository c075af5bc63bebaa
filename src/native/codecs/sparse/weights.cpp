#include "codecs/sparse/weights.h"

#include "common/vectors.h"

namespace pulse {

template <class U>
void group_frequencies(const U* first, size_t elements, ClassOf cls, const GroupWeights& weights,
                       int shift, MaskWords marks, uint16_t* frequencies) {
    if (vectors && elements >= kGroup * kRansStates)
        return vector_group_frequencies(first, cls, weights, shift, marks, frequencies);
    for (size_t g = 0; g < kRansStates; g++) {
        __builtin_prefetch(first + kGroup * (kRansStates + g));  // the next 64
        const uint32_t marked = marks ? marks_of_eight(marks, g) : 0;
        uint32_t sum = 0;
        for (size_t i = g * kGroup; i < std::min((g + 1) * kGroup, elements); i++) {
            sum += marked >> (i % kGroup) & 1 ? 0 : weights.of[cls(first[i])];
        }
        frequencies[g] = weights.frequency(sum, shift);
    }
}

template <class U>
void OpenGroups::open(const U* block, size_t elements, ClassOf cls, const GroupWeights& of,
                      MaskWords marks, const uint32_t* groups, size_t count) {
    seen = 0;
    if (vectors && count == kRansStates && (groups[count - 1] + 1) * kGroup <= elements)
        return vector_open(*this, block, cls, of, marks, groups);
    for (size_t g = 0; g < kRansStates; g++) {
        const uint32_t marked = marks && g < count ? marks_of_eight(marks, groups[g]) : 0;
        rest[g] = 0;
        for (size_t k = 0; k < kGroup; k++) {
            const size_t at = g < count ? groups[g] * kGroup + k : elements;
            weights[k][g] = at < elements && !(marked >> k & 1) ? of.of[cls(block[at])] : 0;
            rest[g] += weights[k][g];
        }
    }
}

void OpenGroups::frequencies(size_t k, const GroupWeights& of, uint16_t* out) const {
    if (vectors) return vector_open_frequencies(*this, k, of, out);
    for (size_t g = 0; g < kRansStates; g++) {
        const uint32_t weight = weights[k][g];
        if (seen >> g & 1) {
            out[g] = of.frequency(weight, 0);
        } else if (weight == 0) {
            out[g] = 0;
        } else if (weight == rest[g]) {
            out[g] = kCertain;
        } else {
            const float more = std::min(float(rest[g] - weight) * of.excess(), kMostExcess);
            const float share = float(weight) / float(rest[g]) * (1 + more);
            out[g] = uint16_t(std::clamp(int(share * float(kRansScale)), 1, int(kRansScale) - 1));
        }
    }
}

void OpenGroups::passed(size_t k, uint64_t changed) {
    for (size_t g = 0; g < kRansStates; g++) rest[g] -= weights[k][g];
    seen |= changed;
}

#define PULSE_FOR(U)                                                                          \
    template void group_frequencies(const U*, size_t, ClassOf, const GroupWeights&, int,      \
                                    MaskWords, uint16_t*);                                    \
    template void OpenGroups::open(const U*, size_t, ClassOf, const GroupWeights&, MaskWords, \
                                   const uint32_t*, size_t);
PULSE_FOR_WIDTHS(PULSE_FOR)

}  // namespace pulse
