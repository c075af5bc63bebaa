#include "common/vectors.h"

#if defined(__x86_64__)
namespace pulse {
namespace {

bool has_scan_vectors() {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("bmi") && __builtin_cpu_supports("popcnt");
}

bool has_vectors() {
    return has_scan_vectors() && __builtin_cpu_supports("avx512cd") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vbmi");
}

}  // namespace

bool scan_vectors = has_scan_vectors(), vectors = has_vectors();

void use_vectors(bool use) {
    scan_vectors = use && has_scan_vectors();
    vectors = use && has_vectors();
}

}  // namespace pulse
#endif
