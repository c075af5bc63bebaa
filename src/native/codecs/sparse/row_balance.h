// Steps up less steps down in a row so far (docs/format.md, section 3.6.2).
#pragma once

#include <cstddef>
#include <vector>

#include "common/clones.h"
#include "common/types.h"

namespace pulse {

class RowBalance {
public:
    explicit RowBalance(const std::vector<Run>& runs) : run_(runs.data()) {}

    // The balance of the row of `position`, which ascends from call to call.
    PULSE_INLINE int at(size_t position) {
        while (position - base_ >= run_->elements) {
            base_ += (run_++)->elements;
            row_end_ = 0;
        }
        const size_t p = position - base_;
        if (p >= row_end_) {
            row_end_ = run_->end_after(p);
            balance_ = 0;
        }
        return balance_;
    }
    PULSE_INLINE void step(bool down) { balance_ += down ? -1 : 1; }

private:
    const Run* run_;
    size_t base_ = 0, row_end_ = 0;
    int balance_ = 0;
};

}  // namespace pulse
