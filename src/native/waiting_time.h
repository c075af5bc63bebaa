// How long until the next change? Counted in weight that passes, not in elements (docs/format.md, section 3.6.2).
//
// Each element has a weight that stands for its chance to change. The weight that passes between two changes has nearly
// the same distribution everywhere, whatever the mix of elements: exponential, with a rate that drifts. One adaptive
// parameter describes it, and a change costs one interval of the range coder; an unchanged element costs an addition.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "range_coder.h"
#include "weights.h"

namespace pulse {

// The waiting time H since the last change: P(waiting > H) = (1 + H / beta)^-16, up to H = beta / 2. A longer wait is
// coded in pieces ("escapes"). beta / 16 follows the mean of the last 16 waiting times or so.
class WaitingTime {
public:
    uint64_t half() const { return (beta_ + 1) >> 1; }
    static uint64_t escape_top() { return tables().survival[kSteps]; }

    // P(waiting > h) in units of 2^-40: falls strictly from one reachable weight to the next, up to half().
    uint64_t survival(uint64_t h) const {
        const Tables& t = tables();
        if (h >= half()) return t.survival[kSteps];
        const uint64_t share = (h * inverse_) >> kShareShift;
        const size_t i = size_t(share >> kRestBits);
        const uint64_t rest = share & ((uint64_t(1) << kRestBits) - 1);
        return t.survival[i] - (((t.survival[i] - t.survival[i + 1]) * rest) >> kRestBits);
    }

    // The smallest h with survival(h) <= place, for place >= escape_top().
    uint64_t reach(uint64_t place) const {
        const Tables& t = tables();
        size_t i = t.start[size_t(place >> 30)];
        while (t.survival[i + 1] > place) i++;
        const uint64_t missing = t.survival[i] - place, step = t.survival[i] - t.survival[i + 1];
        const uint64_t rest = ((missing << kRestBits) + step - 1) / step;
        const uint64_t share = (uint64_t(i) << kRestBits) + rest;
        return std::min(half(), ((share << kShareShift) + inverse_ - 1) / inverse_);
    }

    void escaped() { set(beta_ + (beta_ >> 1)); }

    // After a change of an element of `weight` that came `h` past the last escape.
    void changed(uint64_t h, uint64_t weight) { set(beta_ - (beta_ >> 4) + h + (weight >> 2)); }

private:
    // h / beta is a share in units of 2^-28; the table has a step every 2^-10, straight lines between.
    static constexpr int kRestBits = 18, kShareShift = 29, kSteps = 512, kAlpha = 16;
    static constexpr uint64_t kFirstBeta = kNat * kAlpha, kLeastBeta = kFirstBeta >> 3;
    static constexpr uint64_t kMostBeta = uint64_t(1) << 31, kInverseOf = uint64_t(1) << 57;

    void set(uint64_t beta) {
        beta_ = std::clamp(beta, kLeastBeta, kMostBeta);
        inverse_ = kInverseOf / beta_;
    }

    struct Tables {
        std::array<uint64_t, kSteps + 1> survival;  // of H = beta i / 1024
        std::array<uint16_t, 1024> start;           // where to look for a place, by its top 10 bits
        Tables() {
            for (uint64_t i = 0; i <= kSteps; i++) {
                uint64_t s = kScale;
                for (int k = 0; k < kAlpha; k++) s = s * 1024 / (1024 + i);
                survival[i] = s;
            }
            for (uint64_t g = 0; g < 1024; g++) {
                const uint64_t top = ((g + 1) << 30) - 1;
                uint16_t i = 0;
                while (i < kSteps - 1 && survival[i + 1] > top) i++;
                start[g] = i;
            }
        }
    };
    static const Tables& tables() {
        static const Tables t;
        return t;
    }

    uint64_t beta_ = kFirstBeta, inverse_ = kInverseOf / kFirstBeta;
};

}  // namespace pulse
