#include "common/quantize.h"

#include <algorithm>

#include "common/clones.h"
#include "common/rounding.h"

namespace pulse {
namespace {

PULSE_INLINE uint32_t bits_at(const uint32_t* elements, size_t i) { return elements[i]; }
PULSE_INLINE uint32_t bits_at(const uint16_t* elements, size_t i) {
    return uint32_t(elements[i]) << 16;
}

template <class U>
PULSE_INLINE uint32_t most_of(const U* elements, size_t count) {
    uint32_t most = 0;  // magnitudes ascend with their bits, and those of NaN are above all
    for (size_t i = 0; i < count; i++) most = std::max(most, bits_at(elements, i) & kMagnitude);
    return most;
}

// Rows that are one block each, of a length that the compiler knows.
template <size_t kLength, class U>
PULSE_INLINE void row_maxima(const U* elements, size_t rows, float* out) {
    for (size_t row = 0; row < rows; row++)
        out[row] = float_of(most_of(elements + row * kLength, kLength));
}

// A row of blocks that are one element wide.
template <class U>
PULSE_INLINE void column_maxima(const U* __restrict elements, size_t columns, bool first,
                                float* __restrict out) {
    for (size_t i = 0; i < columns; i++) {
        const uint32_t most = bits_at(elements, i) & kMagnitude;
        out[i] = float_of(first ? most : std::max(most, bits_of(out[i])));
    }
}

template <class U>
PULSE_CLONES void maxima(const U* elements, size_t rows, const Blocks& blocks, float* out) {
    if (blocks.block_rows == 1 && blocks.block_columns == blocks.columns) {
        if (blocks.columns == 16) return row_maxima<16>(elements, rows, out);
        if (blocks.columns == 32) return row_maxima<32>(elements, rows, out);
    }
    const size_t across = blocks.across();
    if (blocks.block_columns == 1) {
        for (size_t row = 0; row < rows; row++, elements += across) {
            column_maxima(elements, across, row % blocks.block_rows == 0,
                          out + row / blocks.block_rows * across);
        }
        return;
    }
    for (size_t row = 0; row < rows; row++, elements += blocks.columns) {
        float* const of = out + row / blocks.block_rows * across;
        const bool first = row % blocks.block_rows == 0;
        for (size_t b = 0; b < across; b++) {
            const size_t from = b * blocks.block_columns,
                         count = std::min(blocks.block_columns, blocks.columns - from);
            const uint32_t most = most_of(elements + from, count);
            of[b] = float_of(first ? most : std::max(most, bits_of(of[b])));
        }
    }
}

template <class U>
PULSE_INLINE void e4m3_piece(const U* __restrict elements, size_t count, float scale,
                             uint8_t* __restrict out) {
    constexpr uint32_t kLeastNormal = 0x3c800000;  // 2^-6
    constexpr float kShift = 16384;                // its last place is 2^-9, the step below that
    for (size_t i = 0; i < count; i++) {
        const uint32_t bits = bits_of(float_of(bits_at(elements, i)) / scale),
                       magnitude = bits & kMagnitude;
        const uint32_t normal =
            ((magnitude + 0x7ffff + ((magnitude >> 20) & 1)) >> 20) - (120 << 3);
        const uint32_t small = bits_of(float_of(magnitude) + kShift) - 0x46800000;
        const uint32_t finite = std::min<uint32_t>(magnitude < kLeastNormal ? small : normal, 0x7e);
        out[i] = uint8_t(magnitude > kInfinity ? 0x7f : finite | (bits & kSign) >> 24);
    }
}

template <class U>
PULSE_CLONES void e4m3(const U* elements, size_t start, size_t count, const Blocks& blocks,
                       const float* scales, uint8_t* out) {
    if (blocks.block_columns == 32 && start == 0 && blocks.columns == count && count % 32 == 0) {
        for (size_t at = 0; at < count; at += 32)
            e4m3_piece(elements + at, 32, scales[at / 32], out + at);
        return;
    }
    const size_t across = blocks.across();
    for (size_t at = 0; at < count;) {
        const size_t row = (start + at) / blocks.columns, column = (start + at) % blocks.columns;
        const size_t block = column / blocks.block_columns;
        const size_t end = std::min((block + 1) * blocks.block_columns, blocks.columns);
        const size_t here = std::min(end - column, count - at);
        e4m3_piece(elements + at, here, scales[row / blocks.block_rows * across + block], out + at);
        at += here;
    }
}

template <bool kSignedZeros>
PULSE_INLINE uint32_t e2m1_code(uint32_t bits, float scale) {
    const float x = float_of(bits) / scale, m = float_of(bits_of(x) & kMagnitude);
    // Halfway to the even code above counts as that one.
    const uint32_t code = uint32_t(m > 0.25f) + uint32_t(m >= 0.75f) + uint32_t(m > 1.25f) +
                          uint32_t(m >= 1.75f) + uint32_t(m > 2.5f) + uint32_t(m >= 3.5f) +
                          uint32_t(m > 5.0f);
    return code | (kSignedZeros ? bits >> 31 : uint32_t(x < 0)) << 3;
}

// Elements with one scale.
template <class U>
PULSE_INLINE void e2m1_codes(const U* __restrict elements, size_t count, float scale,
                             uint8_t* __restrict codes) {
    for (size_t i = 0; i < count; i++)
        codes[i] = uint8_t(e2m1_code<false>(bits_at(elements, i), scale));
}

// Two rows of which each column has its scale.
template <class U>
PULSE_INLINE void e2m1_pair(const U* __restrict elements, size_t columns,
                            const float* __restrict scales, uint8_t* __restrict out) {
    for (size_t i = 0; i < columns; i++) {
        const uint32_t low = e2m1_code<true>(bits_at(elements, i), scales[i]);
        out[i] = uint8_t(low | e2m1_code<true>(bits_at(elements, columns + i), scales[i]) << 4);
    }
}

template <size_t kGroup, class U>
PULSE_INLINE void e2m1_groups(const U* elements, size_t count, const float* scales,
                              uint8_t* __restrict out) {
    for (size_t at = 0; at < count; at += kGroup) {
        uint8_t codes[kGroup];
        e2m1_codes(elements + at, kGroup, scales[at / kGroup], codes);
        for (size_t i = 0; i < kGroup / 2; i++)
            out[at / 2 + i] = uint8_t(codes[2 * i] | codes[2 * i + 1] << 4);
    }
}

template <class U>
PULSE_CLONES void e2m1(const U* elements, size_t rows, const Blocks& blocks, const float* scales,
                       uint8_t* out) {
    const size_t columns = blocks.columns;
    if (blocks.block_columns == 16) return e2m1_groups<16>(elements, rows * columns, scales, out);
    if (blocks.block_columns == 32) return e2m1_groups<32>(elements, rows * columns, scales, out);
    for (size_t row = 0; row < rows; row += 2, elements += 2 * columns, out += columns) {
        e2m1_pair(elements, columns, scales + row / blocks.block_rows * columns, out);
    }
}

const uint32_t* as_f32(const void* elements) { return static_cast<const uint32_t*>(elements); }
const uint16_t* as_bf16(const void* elements) { return static_cast<const uint16_t*>(elements); }

}  // namespace

void block_maxima(const void* elements, int width, size_t rows, const Blocks& blocks, float* out) {
    if (width == 4) return maxima(as_f32(elements), rows, blocks, out);
    maxima(as_bf16(elements), rows, blocks, out);
}

void to_e4m3(const void* elements, int width, size_t start, size_t count, const Blocks& blocks,
             const float* scales, uint8_t* out) {
    if (width == 4) return e4m3(as_f32(elements), start, count, blocks, scales, out);
    e4m3(as_bf16(elements), start, count, blocks, scales, out);
}

void to_e2m1(const void* elements, int width, size_t rows, const Blocks& blocks,
             const float* scales, uint8_t* out) {
    if (width == 4) return e2m1(as_f32(elements), rows, blocks, scales, out);
    e2m1(as_bf16(elements), rows, blocks, scales, out);
}

}  // namespace pulse
