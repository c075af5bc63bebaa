#include "loco/outer_step.h"

#include <algorithm>
#include <cstring>

#include "common/clones.h"
#include "common/flags.h"
#include "loco/gate.h"

namespace pulse {
namespace {

PULSE_CLONES void step(float* theta, float* momentum, const float* sum, size_t count,
                       float trainers, float lr, float mu) {
    for (size_t i = 0; i < count; i++) {
        const float g = sum[i] / trainers;
        const float m = mu * momentum[i];
        const float next = m + g;
        momentum[i] = next;
        theta[i] = __builtin_fmaf(-lr, __builtin_fmaf(mu, next, g), theta[i]);
    }
}

PULSE_CLONES uint32_t count_nonzero(const float* sums, size_t count) {
    uint32_t found = 0;
    for (size_t i = 0; i < count; i++) found += sums[i] != 0;
    return found;
}

PULSE_CLONES void flag_nonzero(const float* sums, size_t count, uint8_t* flags) {
    for (size_t i = 0; i < count; i++) flags[i] = sums[i] != 0;
}

}  // namespace

void outer_step(float* theta, float* momentum, const float* sum, size_t count, const Nesterov& n) {
    step(theta, momentum, sum, count, n.trainers, n.lr, n.mu);
}

TileSums::TileSums(const std::vector<Summand>& summands, size_t from) : summands_(summands) {
    for (const Summand& summand : summands) {
        const uint32_t* const end = summand.positions + summand.count;
        at_.push_back(size_t(std::lower_bound(summand.positions, end, from) - summand.positions));
    }
}

const float* TileSums::of(size_t from, size_t count) {
    if (!clean_) std::fill_n(sums_, kTile, 0.0f);
    clean_ = true;
    for (size_t k = 0; k < summands_.size(); k++) {
        const Summand& summand = summands_[k];
        size_t& at = at_[k];
        for (; at < summand.count && summand.positions[at] - from < count; at++) {
            sums_[summand.positions[at] - from] += summand.values[at];
            clean_ = false;
        }
    }
    return sums_;
}

void outer_step(float* theta, float* momentum, const float* residual, float lookahead, float* start,
                size_t from, size_t count, const std::vector<Summand>& summands, const Nesterov& n,
                size_t offset, size_t granule, int64_t* counts, const Classified& classified) {
    TileSums tiles(summands, from);
    for (size_t at = 0; at < count; at += TileSums::kTile) {
        const size_t size = std::min(TileSums::kTile, count - at);
        const float* const sums = tiles.of(from + at, size);
        step(theta + at, momentum + at, sums, size, n.trainers, n.lr, n.mu);
        if (lookahead != 0) {
            look_ahead(theta + at, residual + at, lookahead, size, start + at);
        } else {
            std::memcpy(start + at, theta + at, size * sizeof(float));
        }
        classify(theta + at, momentum + at, size, classified.rounding, classified.octaves,
                 classified.classes + at);
        for (size_t i = 0; tiles.any() && i < size;) {
            const size_t place = offset + at + i,
                         end = std::min(size, i + granule - place % granule);
            counts[place / granule] += count_nonzero(sums + i, end - i);
            i = end;
        }
    }
}

void sum_entries(const std::vector<Summand>& summands, size_t elements,
                 std::vector<uint32_t>& positions, std::vector<float>& sums) {
    TileSums tiles(summands, 0);
    uint8_t flags[TileSums::kTile];
    for (size_t from = 0; from < elements; from += TileSums::kTile) {
        const size_t size = std::min(TileSums::kTile, elements - from);
        const float* const found = tiles.of(from, size);
        if (!tiles.any()) continue;
        flag_nonzero(found, size, flags);
        each_set(flags, size, [&](size_t i) {
            positions.push_back(uint32_t(from + i));
            sums.push_back(found[i]);
        });
    }
}

}  // namespace pulse
