// The parts of the `sparse` codec that vectors do, where the processor has them: each says whether it did.
#pragma once

#include "codecs/sparse/weights.h"

namespace pulse {

template <class U>
bool vector_group_frequencies(const U* first, ClassOf cls, const GroupWeights& weights, int shift,
                              MaskWords marks, uint16_t* frequencies);
// Of 64 whole groups.
template <class U>
bool vector_open(OpenGroups& open, const U* block, ClassOf cls, const GroupWeights& weights,
                 MaskWords marks, const uint32_t* groups);
bool vector_open_frequencies(const OpenGroups& open, size_t k, const GroupWeights& weights,
                             uint16_t* out);

}  // namespace pulse
