// The positions of what happened in a block, one after another, by the weight that passes between them (docs/format.md,
// section 3.6.2). Both codecs use this: `gaps` for changes, `entries` for gated pseudo-gradients.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "codecs/gaps/gap_model.h"
#include "codecs/gaps/weight_sum.h"
#include "common/types.h"
#include "entropy/payload.h"

namespace pulse {

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
