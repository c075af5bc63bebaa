#include "entropy/rans_states.h"

namespace pulse {

#if defined(__x86_64__) && defined(__GNUC__)
bool has_rans_vectors() {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vbmi") &&
           __builtin_cpu_supports("popcnt");
}
#else
bool has_rans_vectors() { return false; }
#endif

bool rans_vectors = has_rans_vectors();

}  // namespace pulse
