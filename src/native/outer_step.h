// PULSELoCo's outer optimizer.
#pragma once

#include <cstddef>

namespace pulse {

// Nesterov SGD as torch.optim.SGD computes it where the processor fuses multiplication and addition:
// g = sum / trainers, m = mu m + g, theta = theta - lr (g + mu m). The same bits on every processor.
void outer_step(float* theta, float* momentum, const float* sum, size_t count, float trainers, float lr, float mu);

}  // namespace pulse
