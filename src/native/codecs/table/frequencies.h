// The frequency tables of a block of the `table` codec: what stands at the head of its payload, and how an encoder chooses
// them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/step.h"
#include "common/types.h"
#include "entropy/rans_states.h"
#include "entropy/weights.h"

namespace pulse {

constexpr int kRansTables = 16;    // at most
constexpr int kRansAlphabet = 34;  // at most: that of elements of 4 bytes

// Entries say where a symbol's interval starts and how long it is, in one word, so that entries of one table are in the
// order of their intervals: start (12 bits), 2 free bits, length - 1 (12 bits), symbol (6 bits).
constexpr uint32_t kLowOfSlot =
    0x7ffff;  // slot << 20 | this is at least any entry that starts at the slot
inline uint32_t rans_entry(uint32_t start, uint32_t length, int symbol) {
    return start << 20 | (length - 1) << 6 | uint32_t(symbol);
}
inline uint32_t entry_start(uint32_t entry) { return entry >> 20; }
inline uint32_t entry_length(uint32_t entry) { return ((entry >> 6) & (kRansScale - 1)) + 1; }
inline int entry_symbol(uint32_t entry) { return int(entry & 63); }

struct RansTables {
    int alphabet = 0, count = 0;  // symbols; tables
    std::array<uint8_t, kRansTables>
        first{};  // the first class of each table; the first table's is 0
    uint16_t lengths[kRansTables]
                    [kRansAlphabet]{};  // frequencies; the sum of each table is kRansScale

    std::array<uint8_t, kClasses> by_class() const;
    void put(std::vector<uint8_t>& out) const;
    static RansTables take(const uint8_t* data, size_t size, size_t& at, const ElementKind& kind);
};

// The entries of all tables, symbol by symbol, for the coder of one direction.
struct RansEntries {
    alignas(64) uint32_t of[kRansAlphabet][kRansTables];
    std::array<uint8_t, kClasses> table;
    int alphabet, escape;

    // For a decoder: ascending with the symbol, so that the last one that is not above a slot is the slot's.
    static RansEntries for_decoding(const RansTables& tables);
    // For an encoder: a symbol that a table lacks has the entry of the escape.
    static RansEntries for_encoding(const RansTables& tables);
};

// Steps in a sample of a block's elements, by class.
struct StepCounts {
    uint32_t of[kClasses][kRansAlphabet]{};
    uint64_t elements = 0, sampled = 0;
};

RansTables choose_tables(const StepCounts& counts, int width);

}  // namespace pulse
