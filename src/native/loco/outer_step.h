// PULSELoCo's outer optimizer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "loco/entry_classes.h"

namespace pulse {

// Nesterov SGD as torch.optim.SGD computes it where the processor fuses multiplication and addition:
// g = sum / trainers, m = mu m + g, theta = theta - lr (g + mu m). The same bits on every processor.
struct Nesterov {
    float trainers, lr, mu;
};
void outer_step(float* theta, float* momentum, const float* sum, size_t count,
                const Nesterov& nesterov);

// Entries by ascending positions.
struct Summand {
    const uint32_t* positions;
    const float* values;
    size_t count;
};

// Sums of several summands, in their order, for ascending windows of positions: a tile at a time, so that no dense sum is
// ever in memory.
class TileSums {
public:
    static constexpr size_t kTile = 1 << 12;

    // Windows follow each other, the first one begins at `from`.
    TileSums(const std::vector<Summand>& summands, size_t from);

    // The sums of positions [from, from + count), count at most kTile; `any` says whether there are entries.
    const float* of(size_t from, size_t count);
    bool any() const { return !clean_; }

private:
    const std::vector<Summand>& summands_;
    std::vector<size_t> at_;
    bool clean_ = true;
    alignas(64) float sums_[kTile] = {};
};

// Where the classes go that the next round's messages are coded by, and for which octaves.
struct Classified {
    Rounding rounding;
    Octaves octaves;
    uint8_t* classes;
};

// The outer step of the parameters at positions [from, from + count), their classes after it, and what the next inner
// steps start from: start = theta - lookahead * residual, theta if `lookahead` is 0. Adds to counts[(offset + i) / granule]
// the sums that are not 0.
void outer_step(float* theta, float* momentum, const float* residual, float lookahead, float* start,
                size_t from, size_t count, const std::vector<Summand>& summands,
                const Nesterov& nesterov, size_t offset, size_t granule, int64_t* counts,
                const Classified& classified);

// The positions below `elements` whose sum is not 0, and the sums.
void sum_entries(const std::vector<Summand>& summands, size_t elements,
                 std::vector<uint32_t>& positions, std::vector<float>& sums);

}  // namespace pulse
