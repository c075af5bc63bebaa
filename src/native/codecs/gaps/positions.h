// The positions of the changes of a block, one after another: how long until the next one? Counted in weight that passes,
// not in elements (docs/format.md, section 3.6.2).
//
// Each element has a weight that stands for its chance to change. The weight that passes between two changes has nearly
// the same distribution everywhere, whatever the mix of elements: exponential, with a rate that drifts. One adaptive
// parameter describes it, and a change costs one interval of the range coder; an unchanged element costs an addition.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "codecs/gaps/weight_sum.h"
#include "common/types.h"
#include "entropy/payload.h"

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

// Writes positions in ascending order.
template <class U>
class PositionWriter {
public:
    PositionWriter(const U* elements, ClassOf cls, const Weights& weights,
                   const std::vector<Run>& runs, MaskWords marks = nullptr)
        : elements_(elements), cls_(cls), weights_(weights), run_(runs.data()), marks_(marks) {}

    // True where `position` is the first one of its row.
    PULSE_INLINE bool write(RangeEncoder& coder, size_t position) {
        while (position >= base_ + run_->elements) {
            if (live_) pass(row_end_, true);
            pass(run_->elements, false);
            base_ += run_->elements;
            run_++;
            at_ = row_end_ = 0;
            live_ = false;
        }
        const size_t p = position - base_;
        const bool first = p >= row_end_;
        if (first) {
            if (live_) pass(row_end_, true);
            live_ = false;
            row_end_ = run_->end_after(p);
        }
        pass(p, live_);
        at_ = p + 1;
        const uint64_t weight = weights_.of[live_][cls_(elements_[position])];
        for (uint64_t half; waited_ >= (half = waiting_.half());) {
            coder.make_room();
            coder.interval(0, GapModel::escape_top());
            waited_ -= half;
            waiting_.escaped();
        }
        coder.make_room();
        coder.interval(waiting_.survival(waited_ + weight), waiting_.survival(waited_));
        waiting_.changed(waited_, weight);
        waited_ = 0;
        live_ = true;
        return first;
    }

private:
    void pass(size_t to, bool live) {
        waited_ += weight_sum(elements_ + base_ + at_, to - at_, cls_, weights_, live, marks_,
                              base_ + at_);
        at_ = to;
    }

    const U* elements_;
    const ClassOf cls_;
    const Weights& weights_;
    const Run* run_;
    MaskWords marks_;
    GapModel waiting_;
    uint64_t waited_ = 0;
    size_t base_ = 0, at_ = 0, row_end_ = 0;
    bool live_ = false;
};

// Reads them back.
template <class U>
class PositionReader {
public:
    PositionReader(const U* elements, ClassOf cls, const Weights& weights,
                   const std::vector<Run>& runs, MaskWords marks = nullptr)
        : elements_(elements),
          cls_(cls),
          weights_(weights),
          run_(runs.data()),
          end_(run_ + runs.size()),
          marks_(marks) {
        for (const Run& run : runs) most_ += run.elements * kMostWeight;
    }

    size_t position() const { return position_; }

    // Finds the next position; true where it is the first of its row.
    PULSE_INLINE bool read(Reader& side) {
        uint64_t place, escaped = 0;
        while ((place = side.coder.place()) < GapModel::escape_top()) {
            side.next_symbol();
            if (escaped > most_) throw Malformed("a change lies past the block's end");
            side.coder.take(0, GapModel::escape_top());
            escaped += waiting_.half();
            waiting_.escaped();
        }
        uint64_t target = escaped + std::max<uint64_t>(waiting_.reach(place), 1);
        uint64_t waited = 0, weight = 0, low = 0;
        // The first element at which the survival of the weight that passed, its own included, is no more than the place.
        for (;;) {
            if (run_ == end_) throw Malformed("the block has fewer changes than it claims");
            const U* elements = elements_ + base_;
            const size_t limit = live_ ? row_end_ : size_t(run_->elements);
            const uint32_t* weight_of = weights_.of[live_].data();
            size_t at = at_ + weight_skip(elements + at_, limit - at_, cls_, weights_, live_,
                                          waited, target, marks_, base_ + at_);
            const uint64_t marked =
                marks_ ? marks_from(marks_, base_ + at) : 0;  // those that are looked at below
            const auto weight_at = [&](size_t k) {
                return marked >> k & 1 ? 0 : weight_of[cls_(elements[at + k])];
            };
            if (at + 8 <=
                limit) {  // in these eight; counted without branches, which could not be predicted
                const uint64_t rest = target - waited;
                uint64_t sum = 0, passed = 0;
                size_t before = 0;
                for (size_t k = 0; k < 7; k++) {
                    sum += weight_at(k);
                    const bool past = sum < rest;
                    before += past;
                    passed = past ? sum : passed;
                }
                weight = weight_at(before);
                at += before;
                waited += passed;
            } else {  // fewer than eight are left
                size_t k = 0;
                for (; at + k < limit; k++) {
                    weight = weight_at(k);
                    if (waited + weight >= target) break;
                    waited += weight;
                }
                at += k;
            }
            at_ = at;
            if (at < limit) {
                low = waiting_.survival(waited + weight - escaped);
                if (low <= place) break;
                waited += weight;  // the target was a little low
                target = waited + 1;
                at_++;
                if (at_ < limit) continue;
            }
            live_ = false;
            if (at_ == run_->elements) {
                base_ += run_->elements;
                run_++;
                at_ = row_end_ = 0;
            }
        }
        if (waited < escaped || weight == 0)
            throw Malformed("a change at an element that cannot change");
        const uint64_t high = waiting_.survival(waited - escaped);
        if (place >= high) throw Malformed("a change outside its interval");
        side.next_symbol();
        side.coder.take(low, high);
        waiting_.changed(waited - escaped, weight);
        const bool first = at_ >= row_end_;
        if (first) row_end_ = run_->end_after(at_);
        position_ = base_ + at_;
        at_++;
        live_ = true;
        return first;
    }

private:
    const U* elements_;
    const ClassOf cls_;
    const Weights& weights_;
    const Run *run_, *end_;
    MaskWords marks_;
    GapModel waiting_;
    uint64_t most_ = 0;
    size_t base_ = 0, at_ = 0, row_end_ = 0, position_ = 0;
    bool live_ = false;
};

}  // namespace pulse
