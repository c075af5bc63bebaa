// The entries of a pseudo-gradient that passed the gate, coded against theta and the outer momentum, which all trainers
// share (docs/loco.md, section 3).
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "common/rounding.h"
#include "entropy/payload.h"
#include "loco/entry_classes.h"

namespace pulse {

// What all trainers know of a block of at most 2^24 parameters.
struct Shared {
    const float* theta;
    const float* momentum;
    size_t elements;
    Rounding rounding;
    // The classes for these octaves, if they are known already.
    const uint8_t* classes = nullptr;
    Octaves octaves{};

    const uint8_t* classes_for(Octaves wanted) const {
        return classes && wanted == octaves ? classes : nullptr;
    }
};

struct Entries {
    std::vector<uint32_t> positions;  // ascending
    std::vector<float> values;
};

// `positions` ascend and are below the number of parameters. The values have `mantissa` explicit bits of mantissa: below
// kExact only these, and the exponent, are coded.
std::vector<uint8_t> encode_entries(const Shared& shared, const uint32_t* positions,
                                    const float* values, size_t count, int mantissa);

// One result a payload. Throws Malformed; reads nothing out of bounds, in time linear in parameters and payloads.
std::vector<Entries> decode_entries(const Shared& shared,
                                    const std::vector<std::pair<const uint8_t*, size_t>>& payloads,
                                    int mantissa);

}  // namespace pulse
