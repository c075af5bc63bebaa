// What both directions of the `sparse` codec share: how a block is cut (docs/format.md, section 3.7.2).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <vector>

#include "codecs/sparse/head.h"
#include "codecs/sparse/weights.h"
#include "common/types.h"
#include "entropy/rans_bits.h"

namespace pulse {

constexpr size_t kBatch = kGroup * kRansStates;  // elements whose groups are said together
constexpr size_t kTile = size_t(1) << 18;  // elements of which all is said before the next ones
constexpr size_t kBatchesOfTile = kTile / kBatch;
constexpr size_t kBytesInStates =
    2 * kRansStates;  // of the plain bits: what the states are at the end of a decoder

// Runs that hold a batch's first element: the batches behind the last ones of each.
struct Batches {
    std::vector<size_t> ends;

    explicit Batches(const std::vector<Run>& runs) {
        size_t end = 0, count = 0;
        for (const Run& run : runs) {
            end += run.elements;
            const size_t behind = (end + kBatch - 1) / kBatch;
            if (behind == count) continue;
            count = behind;
            ends.push_back(behind);
        }
    }
    size_t count() const { return ends.empty() ? 0 : ends.back(); }
    // What holds of each run, by batch.
    std::vector<int8_t> by_batch(const std::vector<int8_t>& of_runs) const {
        std::vector<int8_t> found(count());
        size_t batch = 0;
        for (size_t r = 0; r < ends.size(); r++) {
            for (; batch < ends[r]; batch++) found[batch] = of_runs[r];
        }
        return found;
    }
};

inline MaskWords marks_of_batch(MaskWords marks, size_t batch) {
    return marks ? marks + batch * (kBatch / 64) : nullptr;
}

inline size_t majority_of(int balance) {
    return size_t(std::min(std::abs(balance), kMajorities - 1));
}

}  // namespace pulse
