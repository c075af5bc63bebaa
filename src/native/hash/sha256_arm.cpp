// Kernels for arm64 with the SHA-2 instructions, on several messages by turns.
#include "hash/sha256.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#if defined(__linux__)
#include <sys/auxv.h>
#endif

#if defined(__clang__)
#define PULSE_SHA2 __attribute__((target("sha2")))
#else
#define PULSE_SHA2 __attribute__((target("+crypto")))
#endif

namespace pulse {
namespace {

template <int kLanes>
PULSE_SHA2 void neon(Sha256State* states, const uint8_t* const* data, size_t blocks) {
    uint32x4_t abcd[kLanes], efgh[kLanes];
    for (int l = 0; l < kLanes; l++) {
        abcd[l] = vld1q_u32(&states[l][0]);
        efgh[l] = vld1q_u32(&states[l][4]);
    }
    for (size_t k = 0; k < blocks; k++) {
        uint32x4_t x[kLanes], y[kLanes], w[kLanes][4];
        for (int l = 0; l < kLanes; l++) {
            x[l] = abcd[l], y[l] = efgh[l];
            for (int i = 0; i < 4; i++) {
                const uint8x16_t raw = vld1q_u8(data[l] + kSha256Block * k + 16 * size_t(i));
                w[l][i] = vreinterpretq_u32_u8(vrev32q_u8(raw));
            }
        }
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) {
            const uint32x4_t constants = vld1q_u32(&kSha256Round[4 * i]);
#pragma GCC unroll 4
            for (int l = 0; l < kLanes; l++) {
                uint32x4_t(&words)[4] = w[l];
                const uint32x4_t sum = vaddq_u32(words[i & 3], constants), before = x[l];
                if (i < 12) {
                    const uint32x4_t part = vsha256su0q_u32(words[i & 3], words[(i + 1) & 3]);
                    words[i & 3] = vsha256su1q_u32(part, words[(i + 2) & 3], words[(i + 3) & 3]);
                }
                x[l] = vsha256hq_u32(x[l], y[l], sum);
                y[l] = vsha256h2q_u32(y[l], before, sum);
            }
        }
        for (int l = 0; l < kLanes; l++) {
            abcd[l] = vaddq_u32(abcd[l], x[l]);
            efgh[l] = vaddq_u32(efgh[l], y[l]);
        }
    }
    for (int l = 0; l < kLanes; l++) {
        vst1q_u32(&states[l][0], abcd[l]);
        vst1q_u32(&states[l][4], efgh[l]);
    }
}

bool has_sha2() {
#if defined(__APPLE__)
    return true;
#elif defined(__linux__)
    return getauxval(AT_HWCAP) >> 6 & 1;  // HWCAP_SHA2
#else
    return false;
#endif
}

}  // namespace

void add_processor_kernels(std::vector<Sha256Kernel>& kernels) {
    if (!has_sha2()) return;
    kernels.push_back({"neon", 1, neon<1>});
    kernels.push_back({"neon", 2, neon<2>});
    kernels.push_back({"neon", 3, neon<3>});
    kernels.push_back({"neon", 4, neon<4>});
}

}  // namespace pulse
#endif
