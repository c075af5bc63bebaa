// The classes of parameters by which gated entries are coded, from what both sides know (docs/loco.md, section 3).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "common/rounding.h"

namespace pulse {

// From where the octaves of distance and momentum are counted; both numbers travel in the head of a block.
struct Octaves {
    uint8_t distance, momentum;
    bool operator==(const Octaves& other) const {
        return distance == other.distance && momentum == other.momentum;
    }
};

// The octave of the distance from theta to its nearest rounding boundary: log2 of it, plus 150.
inline uint32_t distance_octave(uint32_t theta, const Distance& distance) {
    return (bits_of(float(distance.nearest())) >> 23) - 127 + ((theta & kMagnitude) >> 23);
}

// The class of one parameter, given by the bits of theta and momentum: see `classify`.
inline uint8_t class_of(uint32_t theta, uint32_t momentum, const Distance& distance,
                        Octaves octaves) {
    const int d = std::clamp(int(distance_octave(theta, distance)) - int(octaves.distance), 0, 15);
    const int field = int((momentum >> 23) & 255);
    const int k = field ? std::clamp(field - int(octaves.momentum), 1, 7) : 0;
    return uint8_t(d << 4 | k << 1 | int(distance.up_is_near() == bool((theta ^ momentum) >> 31)));
}

// classes[i]: 4 bits for the octave of the distance, 3 for the octave of the momentum (0: none), 1 for whether the momentum
// moves theta towards the nearer boundary.
void classify(const float* theta, const float* momentum, size_t count, const Rounding& rounding,
              Octaves octaves, uint8_t* classes);

// The octave of momentum that only 1/128 of the non-zero entries exceed, those of a sample; 0 without any.
uint8_t momentum_octave(const float* momentum, size_t count);

// Octaves that follow from what all trainers share: entries are about as far as the momentum goes in a round or two.
inline Octaves shared_octaves(const float* momentum, size_t count) {
    const int octave = momentum_octave(momentum, count);
    return {uint8_t(octave ? std::min((octave + 10) & ~1, 254) : 0),
            uint8_t(std::max(octave - 7, 0))};
}

}  // namespace pulse
