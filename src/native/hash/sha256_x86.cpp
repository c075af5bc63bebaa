// Kernels for x86-64: SHA instructions on several messages by turns, and lanes of AVX2 and AVX-512.
#include "hash/sha256_vector.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>

namespace pulse {
namespace {

#ifdef PULSE_SHA256_VECTORS
__attribute__((target("avx2"))) void avx2(Sha256State* states, const uint8_t* const* data,
                                          size_t blocks) {
    sha256_rounds<8>(states, data, blocks);
}
__attribute__((target("avx512f,avx512bw,avx512vl"))) void avx512_8(Sha256State* states,
                                                                   const uint8_t* const* data,
                                                                   size_t blocks) {
    sha256_rounds<8>(states, data, blocks);
}
__attribute__((target("avx512f,avx512bw,avx512vl"))) void avx512_16(Sha256State* states,
                                                                    const uint8_t* const* data,
                                                                    size_t blocks) {
    sha256_rounds<16>(states, data, blocks);
}
#endif

// `sha256rnds2` does two rounds in four cycles and can begin one in every two or less: messages take turns.
template <int kLanes>
__attribute__((target("sha,sse4.1,ssse3"))) void sha(Sha256State* states,
                                                     const uint8_t* const* data, size_t blocks) {
    const __m128i big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0bLL, 0x0405060700010203LL);
    __m128i abef[kLanes], cdgh[kLanes];  // the order in which the instruction has the state's words
    for (int l = 0; l < kLanes; l++) {
        const __m128i dcba = _mm_loadu_si128(reinterpret_cast<const __m128i*>(&states[l][0]));
        const __m128i hgfe = _mm_loadu_si128(reinterpret_cast<const __m128i*>(&states[l][4]));
        const __m128i cdab = _mm_shuffle_epi32(dcba, 0xb1), efgh = _mm_shuffle_epi32(hgfe, 0x1b);
        abef[l] = _mm_alignr_epi8(cdab, efgh, 8);
        cdgh[l] = _mm_blend_epi16(efgh, cdab, 0xf0);
    }
    for (size_t k = 0; k < blocks; k++) {
        __m128i x[kLanes], y[kLanes], w[kLanes][4];
        for (int l = 0; l < kLanes; l++) x[l] = abef[l], y[l] = cdgh[l];
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) {
            const __m128i constants =
                _mm_loadu_si128(reinterpret_cast<const __m128i*>(&kSha256Round[4 * i]));
#pragma GCC unroll 4
            for (int l = 0; l < kLanes; l++) {
                __m128i word;
                if (i < 4) {
                    const auto* at = reinterpret_cast<const __m128i*>(data[l] + kSha256Block * k +
                                                                      16 * size_t(i));
                    word = _mm_shuffle_epi8(_mm_loadu_si128(at), big_endian);
                } else {
                    const __m128i seventh =
                        _mm_alignr_epi8(w[l][(i + 3) & 3], w[l][(i + 2) & 3], 4);
                    word = _mm_add_epi32(_mm_sha256msg1_epu32(w[l][i & 3], w[l][(i + 1) & 3]),
                                         seventh);
                    word = _mm_sha256msg2_epu32(word, w[l][(i + 3) & 3]);
                }
                w[l][i & 3] = word;
                const __m128i sum = _mm_add_epi32(word, constants);
                y[l] = _mm_sha256rnds2_epu32(y[l], x[l], sum);
                x[l] = _mm_sha256rnds2_epu32(x[l], y[l], _mm_shuffle_epi32(sum, 0x0e));
            }
        }
        for (int l = 0; l < kLanes; l++) {
            abef[l] = _mm_add_epi32(abef[l], x[l]);
            cdgh[l] = _mm_add_epi32(cdgh[l], y[l]);
        }
    }
    for (int l = 0; l < kLanes; l++) {
        const __m128i feba = _mm_shuffle_epi32(abef[l], 0x1b),
                      dchg = _mm_shuffle_epi32(cdgh[l], 0xb1);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(&states[l][0]),
                         _mm_blend_epi16(feba, dchg, 0xf0));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(&states[l][4]), _mm_alignr_epi8(dchg, feba, 8));
    }
}

bool has_sha() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b >> 29 & 1) &&
           __builtin_cpu_supports("sse4.1") && __builtin_cpu_supports("ssse3");
}

}  // namespace

void add_processor_kernels(std::vector<Sha256Kernel>& kernels) {
    __builtin_cpu_init();
    if (has_sha()) {
        kernels.push_back({"sha", 1, sha<1>});
        kernels.push_back({"sha", 2, sha<2>});
        kernels.push_back({"sha", 3, sha<3>});
        kernels.push_back({"sha", 4, sha<4>});
    }
#ifdef PULSE_SHA256_VECTORS
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl")) {
        kernels.push_back({"avx512", 8, avx512_8});
        kernels.push_back({"avx512", 16, avx512_16});
    }
    if (__builtin_cpu_supports("avx2")) kernels.push_back({"avx2", 8, avx2});
#endif
}

}  // namespace pulse
#endif
