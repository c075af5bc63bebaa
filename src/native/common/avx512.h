// For sources, or parts of them, that are compiled for x86-64 alone.
#pragma once

#pragma GCC diagnostic ignored "-Wuninitialized"  // GCC 12 says so of its own header
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

// Of what `vectors` (vectors.h) stands for.
#define PULSE_TARGET target("avx512f,avx512bw,avx512cd,avx512dq,avx512vl,avx512vbmi,popcnt")
#define PULSE_AVX512 __attribute__((PULSE_TARGET))
#define PULSE_AVX512_INLINE inline __attribute__((always_inline, PULSE_TARGET))
