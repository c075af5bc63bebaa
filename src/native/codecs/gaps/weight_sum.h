// The weight of many elements: the plain loops of weights.h, or vectors that look 64 classes up at once.
#pragma once

#include "entropy/weights.h"

namespace pulse {

// Whether this processor has vectors for it (AVX-512 VBMI), and whether they are used.
bool has_weight_vectors();
extern bool weight_vectors;

// For `narrow` weights, or `wide` ones of elements of one byte. Without the marked elements, where there are marks; `first` is the
// number of `p` in its block.
template <class U>
uint64_t vector_weight_sum(const U* p, size_t count, ClassOf cls, const Weights& weights, bool live,
                           MaskWords marks, size_t first);
template <class U>
size_t vector_weight_skip(const U* p, size_t count, ClassOf cls, const Weights& weights, bool live,
                          uint64_t& waited, uint64_t target, MaskWords marks, size_t first);

template <class U>
inline bool use_weight_vectors(const Weights& weights) {
    return weight_vectors && (sizeof(U) == 1 ? weights.wide : weights.narrow);
}

template <class U>
inline uint64_t weight_sum(const U* p, size_t count, ClassOf cls, const Weights& weights, bool live,
                           MaskWords marks, size_t first) {
    if (count > 16 && use_weight_vectors<U>(weights)) {
        return vector_weight_sum(p, count, cls, weights, live, marks, first);
    }
    if (marks) return plain_weight_sum(p, count, cls, weights.of[live].data(), marks, first);
    return plain_weight_sum(p, count, cls, weights.of[live].data());
}

// The first eights one at a time: where changes are many, the next one is there.
template <class U>
inline size_t weight_skip(const U* p, size_t count, ClassOf cls, const Weights& weights, bool live,
                          uint64_t& waited, uint64_t target, MaskWords marks, size_t first) {
    const uint32_t* of = weights.of[live].data();
    const auto plain = [&](size_t most) {
        return marks ? plain_weight_skip(p, most, cls, of, waited, target, marks, first)
                     : plain_weight_skip(p, most, cls, of, waited, target);
    };
    if (count > 16 && use_weight_vectors<U>(weights)) {
        const size_t at = plain(16);
        if (at < 16) return at;
        return at + vector_weight_skip(p + at, count - at, cls, weights, live, waited, target,
                                       marks, first + at);
    }
    return plain(count);
}

}  // namespace pulse
