// Quantizing by blocks: how large a block's numbers are, and its codes once they are divided by its scale. FP32, one
// operation at a time, so that the bits are those of the libraries that define the checkpoints.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pulse {

// A matrix of rows and columns in blocks, the last of which may be smaller.
struct Blocks {
    size_t columns, block_rows, block_columns;
    size_t across() const { return (columns + block_columns - 1) / block_columns; }
};

// The largest magnitude of each block of `rows` rows, NaN where there is one. Elements are FP32 (`width` 4) or BF16 (2).
void block_maxima(const void* elements, int width, size_t rows, const Blocks& blocks, float* out);

// Elements [start, start + count) of a matrix, of which `elements` is the first, divided by the scale of their block
// and rounded to E4M3 (nearest, ties to even; beyond the range the largest number, NaN 0x7f). `scales` are those of all blocks.
void to_e4m3(const void* elements, int width, size_t start, size_t count, const Blocks& blocks,
             const float* scales, uint8_t* out);

// The same of whole blocks to E2M1, two codes a byte, the first in the lower half. A block is a row of 16 or 32 elements, and
// a sign goes with what is below zero; or it is one column of an even number of rows: then the codes in a byte are those of two
// rows, and what is negative keeps its sign, zeros too.
void to_e2m1(const void* elements, int width, size_t rows, const Blocks& blocks,
             const float* scales, uint8_t* out);

}  // namespace pulse
