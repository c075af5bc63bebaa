// The weight of many elements: the plain loops of weights.h, or vectors that look 64 classes up at once.
#pragma once

#include "common/vectors.h"
#include "entropy/weights.h"

namespace pulse {

// For `narrow` weights, or `wide` ones of elements of one byte. Without the marked elements, where there are marks; `first` is the
// number of `p` in its block.
template <class U>
uint64_t vector_weight_sum(const U* p, size_t count, ClassOf cls, const Weights& weights, bool live,
                           MaskWords marks, size_t first);
template <class U>
size_t vector_weight_skip(const U* p, size_t count, ClassOf cls, const Weights& weights, bool live,
                          uint64_t& waited, uint64_t target, MaskWords marks, size_t first);

template <class U>
inline bool few_classes(const Weights& weights) {
    return sizeof(U) == 1 ? weights.wide : weights.narrow;
}

template <class U>
inline uint64_t weight_sum(const U* p, size_t count, ClassOf cls, const Weights& weights, bool live,
                           MaskWords marks, size_t first) {
    if (vectors && count > 16 && few_classes<U>(weights)) {
        return vector_weight_sum(p, count, cls, weights, live, marks, first);
    }
    return plain_weight_sum(p, count, cls, weights.of[live].data(), marks, first);
}

// The first eights one at a time: where changes are many, the next one is there.
template <class U>
inline size_t weight_skip(const U* p, size_t count, ClassOf cls, const Weights& weights, bool live,
                          uint64_t& waited, uint64_t target, MaskWords marks, size_t first) {
    const uint32_t* of = weights.of[live].data();
    if (vectors && count > 16 && few_classes<U>(weights)) {
        const size_t at = plain_weight_skip(p, 16, cls, of, waited, target, marks, first);
        if (at < 16) return at;
        return at + vector_weight_skip(p + at, count - at, cls, weights, live, waited, target,
                                       marks, first + at);
    }
    return plain_weight_skip(p, count, cls, of, waited, target, marks, first);
}

}  // namespace pulse
