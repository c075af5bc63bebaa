#include "outer_step.h"

#include "clones.h"

namespace pulse {
namespace {

PULSE_CLONES void nesterov(float* theta, float* momentum, const float* sum, size_t count, float trainers, float lr,
                           float mu) {
    for (size_t i = 0; i < count; i++) {
        const float g = sum[i] / trainers;
        const float m = mu * momentum[i];
        const float next = m + g;
        momentum[i] = next;
        theta[i] = __builtin_fmaf(-lr, __builtin_fmaf(mu, next, g), theta[i]);
    }
}

}  // namespace

void outer_step(float* theta, float* momentum, const float* sum, size_t count, float trainers, float lr, float mu) {
    nesterov(theta, momentum, sum, count, trainers, lr, mu);
}

}  // namespace pulse
