// The rounds of SHA-256 on vectors, a message in each lane: the same source for every width. It is compiled where it is
// inlined, for the instructions of the function around it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "common/clones.h"
#include "hash/sha256.h"

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector) && defined(__x86_64__)
#define PULSE_SHA256_VECTORS 1
#endif
#endif

namespace pulse {

// V: a word of each lane. load: the 16 words of the block at `at` of each. keep: the compiler computes a sum as it is
// written, and not in an order of its own.
template <int kLanes>
struct Sha256Words;

template <>
struct Sha256Words<1> {
    using V = uint32_t;
    static PULSE_INLINE void keep(V&) {}
    static PULSE_INLINE void load(V* w, const uint8_t* const* data, size_t at) {
        for (int i = 0; i < 16; i++) {
            const uint8_t* p = data[0] + at + 4 * i;
            w[i] = uint32_t(p[0]) << 24 | uint32_t(p[1]) << 16 | uint32_t(p[2]) << 8 | p[3];
        }
    }
};

#ifdef PULSE_SHA256_VECTORS
#ifdef __clang__  // has no such operands where the vectors are not those of the target
#define PULSE_KEEP(sum)
#else
#define PULSE_KEEP(sum) __asm__("" : "+v"(sum))
#endif
// Of a register with one word of each of eight (or sixteen) lanes; each is loaded with words of one lane, and the square
// is transposed.
template <>
struct Sha256Words<8> {
    typedef uint32_t V __attribute__((vector_size(32)));
    typedef uint8_t Raw __attribute__((vector_size(32)));
    static PULSE_INLINE void keep(V& sum) { PULSE_KEEP(sum); }
    static PULSE_INLINE void load(V* w, const uint8_t* const* data, size_t at) {
        for (int half = 0; half < 2; half++) {
            V a[8], b[8];
            for (int i = 0; i < 8; i++) std::memcpy(&a[i], data[i] + at + 32 * half, 32);
            for (int i = 0; i < 8; i += 2) {
                b[i] = __builtin_shufflevector(a[i], a[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
                b[i + 1] = __builtin_shufflevector(a[i], a[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
            }
            for (int i = 0; i < 8; i += 4) {
                for (int j = 0; j < 2; j++) {
                    const V low = b[i + j], high = b[i + j + 2];
                    a[i + 2 * j] = __builtin_shufflevector(low, high, 0, 1, 8, 9, 4, 5, 12, 13);
                    a[i + 2 * j + 1] =
                        __builtin_shufflevector(low, high, 2, 3, 10, 11, 6, 7, 14, 15);
                }
            }
            for (int i = 0; i < 4; i++) {
                b[i] = __builtin_shufflevector(a[i], a[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
                b[i + 4] = __builtin_shufflevector(a[i], a[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
            }
            for (int i = 0; i < 8; i++) {
                const Raw x = (Raw)b[i];
                w[8 * half + i] = (V)__builtin_shufflevector(
                    x, x, 3, 2, 1, 0, 7, 6, 5, 4, 11, 10, 9, 8, 15, 14, 13, 12, 19, 18, 17, 16, 23,
                    22, 21, 20, 27, 26, 25, 24, 31, 30, 29, 28);
            }
        }
    }
};

template <>
struct Sha256Words<16> {
    typedef uint32_t V __attribute__((vector_size(64)));
    typedef uint8_t Raw __attribute__((vector_size(64)));
    static constexpr size_t kAhead = 512;
    static PULSE_INLINE void keep(V& sum) { PULSE_KEEP(sum); }
    // Interleaving the first half of the registers with the second, four times, transposes.
    static PULSE_INLINE void interleave(const V* from, V* to) {
        for (int i = 0; i < 8; i++) {
            to[2 * i] = __builtin_shufflevector(from[i], from[i + 8], 0, 16, 1, 17, 2, 18, 3, 19, 4,
                                                20, 5, 21, 6, 22, 7, 23);
            to[2 * i + 1] = __builtin_shufflevector(from[i], from[i + 8], 8, 24, 9, 25, 10, 26, 11,
                                                    27, 12, 28, 13, 29, 14, 30, 15, 31);
        }
    }
    static PULSE_INLINE void load(V* w, const uint8_t* const* data, size_t at) {
        V a[16], b[16];
        for (int i = 0; i < 16; i++) {
            std::memcpy(&a[i], data[i] + at, 64);
            __builtin_prefetch(data[i] + at +
                               kAhead);  // so many streams are more than processors foresee
        }
        interleave(a, b);
        interleave(b, a);
        interleave(a, b);
        interleave(b, a);
        for (int i = 0; i < 16; i++) {
            const Raw x = (Raw)a[i];
            w[i] = (V)__builtin_shufflevector(
                x, x, 3, 2, 1, 0, 7, 6, 5, 4, 11, 10, 9, 8, 15, 14, 13, 12, 19, 18, 17, 16, 23, 22,
                21, 20, 27, 26, 25, 24, 31, 30, 29, 28, 35, 34, 33, 32, 39, 38, 37, 36, 43, 42, 41,
                40, 47, 46, 45, 44, 51, 50, 49, 48, 55, 54, 53, 52, 59, 58, 57, 56, 63, 62, 61, 60);
        }
    }
};
#endif

// Names as in FIPS 180-4, section 4.1.2. Macros, because vectors that functions return change the ABI with the target.
#define PULSE_ROTR(x, n) ((x) >> (n) | (x) << (32 - (n)))
#define PULSE_SCHEDULE(i)                                                                      \
    (w[(i) & 15] += (PULSE_ROTR(w[((i) + 14) & 15], 17) ^ PULSE_ROTR(w[((i) + 14) & 15], 19) ^ \
                     (w[((i) + 14) & 15] >> 10)) +                                             \
                    w[((i) + 9) & 15] +                                                        \
                    (PULSE_ROTR(w[((i) + 1) & 15], 7) ^ PULSE_ROTR(w[((i) + 1) & 15], 18) ^    \
                     (w[((i) + 1) & 15] >> 3)))
// What waits for e is added last, so that the next e waits for no more than four steps.
#define PULSE_ROUND(a, b, c, d, e, f, g, h, word, i)                           \
    {                                                                          \
        V sum = h + ((word) + kSha256Round[i]);                                \
        Words::keep(sum);                                                      \
        const V s1 = PULSE_ROTR(e, 6) ^ PULSE_ROTR(e, 11) ^ PULSE_ROTR(e, 25), \
                ch = (e & f) ^ (~e & g);                                       \
        const V maj = (a & b) | (c & (a | b)),                                 \
                s0 = PULSE_ROTR(a, 2) ^ PULSE_ROTR(a, 13) ^ PULSE_ROTR(a, 22); \
        sum += ch;                                                             \
        Words::keep(sum);                                                      \
        sum += s1;                                                             \
        Words::keep(sum);                                                      \
        V rest = maj + s0;                                                     \
        Words::keep(rest);                                                     \
        d += sum;                                                              \
        h = sum + rest;                                                        \
    }
#define PULSE_EIGHT_ROUNDS(WORD, i)                           \
    PULSE_ROUND(a, b, c, d, e, f, g, h, WORD(i), i)           \
    PULSE_ROUND(h, a, b, c, d, e, f, g, WORD(i + 1), (i) + 1) \
    PULSE_ROUND(g, h, a, b, c, d, e, f, WORD(i + 2), (i) + 2) \
    PULSE_ROUND(f, g, h, a, b, c, d, e, WORD(i + 3), (i) + 3) \
    PULSE_ROUND(e, f, g, h, a, b, c, d, WORD(i + 4), (i) + 4) \
    PULSE_ROUND(d, e, f, g, h, a, b, c, WORD(i + 5), (i) + 5) \
    PULSE_ROUND(c, d, e, f, g, h, a, b, WORD(i + 6), (i) + 6) \
    PULSE_ROUND(b, c, d, e, f, g, h, a, WORD(i + 7), (i) + 7)
#define PULSE_WORD(i) w[(i) & 15]

template <int kLanes>
PULSE_INLINE void sha256_rounds(Sha256State* states, const uint8_t* const* data, size_t blocks) {
    using Words = Sha256Words<kLanes>;
    using V = typename Words::V;
    uint32_t columns[8][kLanes];
    V s[8];
    for (int i = 0; i < 8; i++) {
        for (int l = 0; l < kLanes; l++) columns[i][l] = states[l][i];
        std::memcpy(&s[i], columns[i], sizeof(V));
    }
    for (size_t k = 0; k < blocks; k++) {
        V w[16];
        Words::load(w, data, kSha256Block * k);
        V a = s[0], b = s[1], c = s[2], d = s[3], e = s[4], f = s[5], g = s[6], h = s[7];
        PULSE_EIGHT_ROUNDS(PULSE_WORD, 0)
        PULSE_EIGHT_ROUNDS(PULSE_WORD, 8)
        for (int r = 16; r < 64; r += 16) {
            PULSE_EIGHT_ROUNDS(PULSE_SCHEDULE, r)
            PULSE_EIGHT_ROUNDS(PULSE_SCHEDULE, r + 8)
        }
        s[0] += a, s[1] += b, s[2] += c, s[3] += d, s[4] += e, s[5] += f, s[6] += g, s[7] += h;
    }
    for (int i = 0; i < 8; i++) {
        std::memcpy(columns[i], &s[i], sizeof(V));
        for (int l = 0; l < kLanes; l++) states[l][i] = columns[i][l];
    }
}

}  // namespace pulse
