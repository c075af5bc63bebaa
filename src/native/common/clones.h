// One binary for every x86-64: the loader picks the widest version that the processor has. On arm64 the plain version
// is compiled for NEON, which is always there. Sanitizers and clang before 14 cannot resolve clones.
#pragma once

#if defined(__x86_64__) && !defined(__clang__) && !defined(PULSE_NO_CLONES)
#define PULSE_CLONES __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define PULSE_CLONES
#endif

// Of what is compiled for the instructions of the function that it stands in.
#define PULSE_INLINE inline __attribute__((always_inline))
