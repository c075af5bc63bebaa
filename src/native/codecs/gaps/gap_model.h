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

#include "entropy/range_coder.h"
#include "entropy/weights.h"

namespace pulse {

// The waiting time H since the last change: P(waiting > H) = (1 + H / beta)^-16, up to H = beta / 2. A longer wait is
// coded in pieces ("escapes"). beta / 16 follows the mean of the last 16 waiting times or so.
class GapModel {
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

    // No more than the smallest h with survival(h) <= place, and seldom less, for place >= escape_top(). No divisions: a
    // decoder's time is a chain of these steps, and it looks at the survival of what it finds anyway.
    uint64_t reach(uint64_t place) const {
        const Tables& t = tables();
        size_t i = t.start[size_t(place >> kStartShift)];
        while (t.survival[i + 1] > place) i++;
        const uint64_t missing = t.survival[i] - place,
                       rest = (missing * t.inverse[i]) >> kInverseShift;
        return std::min(half(), (((uint64_t(i) << kRestBits) + rest) * beta_) >> (kRestBits + 10));
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

    // missing is below 2^34, the longest step, so that its product with an inverse fits.
    static constexpr int kInverseShift = 29, kStartShift = 28,
                         kStarts = 1 << (kScaleBits - kStartShift);
    struct Tables {
        uint64_t survival[kSteps + 1];  // of H = beta i / 1024
        uint32_t inverse[kSteps];       // 2^(18 + 29) / the step to the next, rounded down
        uint16_t start[kStarts];        // where to look for a place, by its top 12 bits
        constexpr Tables() : survival(), inverse(), start() {
            for (uint64_t i = 0; i <= kSteps; i++) {
                uint64_t s = kScale;
                for (int k = 0; k < kAlpha; k++) s = s * 1024 / (1024 + i);
                survival[i] = s;
            }
            for (int i = 0; i < kSteps; i++) {
                inverse[i] = uint32_t((uint64_t(1) << (kRestBits + kInverseShift)) /
                                      (survival[i] - survival[i + 1]));
            }
            int i = kSteps - 1;
            for (int g = 0; g < kStarts; g++) {
                const uint64_t top = (uint64_t(g + 1) << kStartShift) - 1;
                while (i > 0 && survival[i] <= top) i--;
                start[g] = uint16_t(i);
            }
        }
    };
    static const Tables& tables() {
        static constexpr Tables t;
        return t;
    }

    uint64_t beta_ = kFirstBeta, inverse_ = kInverseOf / kFirstBeta;
};

}  // namespace pulse
