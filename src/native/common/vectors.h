// The vectors of AVX-512, for which the hottest loops are written a second time, and whether they are used.
#pragma once

namespace pulse {

#if defined(__x86_64__)
extern bool scan_vectors;    // of what compares (AVX-512 BW)
extern bool vectors;         // of all else (with VBMI)
void use_vectors(bool use);  // for tests: those that this processor has, or none
#else
// Constant, so that nothing calls functions that are compiled for x86-64 alone.
constexpr bool scan_vectors = false, vectors = false;
inline void use_vectors(bool) {}
#endif

}  // namespace pulse
