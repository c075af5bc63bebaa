// PULSELoCo's gate: which entries of a pseudo-gradient would change the next forward pass (docs/loco.md, section 2).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/rounding.h"

namespace pulse {

// An entry of 2^64 or more is as good as infinite: with a few of them, a sum or theta would be.
constexpr uint32_t kHuge = (127u + 64) << 23;

// The parameters of one trainer after its inner steps. They started from theta - lookahead * residual, as BF16 if
// `bf16_start`: that is how the model keeps them.
struct Local {
    const float *theta, *now, *residual;
    float lookahead;
    bool bf16_start;
};

// start = theta - lookahead * residual, for `count` parameters.
void look_ahead(const float* theta, const float* residual, float lookahead, size_t count,
                float* start);

// s = (start - now) + residual for `count` parameters. Returns false if one of them is NaN, infinite or huge. Otherwise
// appends base + i to `open` wherever theta and theta - s round differently.
bool gate(const Local& local, float* s, size_t count, const Rounding& rounding, uint32_t base,
          std::vector<uint32_t>& open);

}  // namespace pulse
