// PULSELoCo's dense passes over the parameters: the gate, the classes that both sides see, the outer step.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "rounding.h"

namespace pulse {

// An entry of 2^64 or more is as good as infinite: with a few of them, a sum or theta would be.
constexpr uint32_t kHuge = (127u + 64) << 23;

// s = (start - now) + residual for `count` parameters. Returns false if one of them is NaN, infinite or huge. Otherwise
// appends base + i to `open` wherever theta and theta - s round differently.
bool gate(const float* theta, const float* start, const float* now, const float* residual, float* s, size_t count,
          const Rounding& rounding, uint32_t base, std::vector<uint32_t>& open);

// The places from which the octaves of distance and momentum are counted; they travel in the head of a block.
struct Octaves {
    uint8_t distance, momentum;
};

// The octave of the distance from theta to its nearest rounding boundary: log2 of it, plus 150.
inline uint32_t distance_octave(uint32_t theta, const Distance& distance) {
    return (bits_of(float(distance.nearest())) >> 23) - 127 + ((theta & kMagnitude) >> 23);
}

// classes[i]: 4 bits for the octave of the distance, 3 for the octave of the momentum (0: none), 1 for whether the momentum
// moves theta towards the nearer boundary.
void classify(const float* theta, const float* momentum, size_t count, const Rounding& rounding, Octaves octaves,
              uint8_t* classes);

// The octave of momentum that only 1/128 of the non-zero entries exceed; 0 without any.
uint8_t momentum_octave(const float* momentum, size_t count);

// Nesterov SGD as torch.optim.SGD computes it where the processor fuses multiplication and addition:
// g = sum / trainers, m = mu m + g, theta = theta - lr (g + mu m). The same bits on every processor.
void outer_step(float* theta, float* momentum, const float* sum, size_t count, float trainers, float lr, float mu);

}  // namespace pulse
