// What stands in front of the states of a payload of entries: octaves, and the levels that stand for frequencies
// (docs/loco.md, section 3.1).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "loco/entries.h"
#include "loco/entry_places.h"
#include "loco/entry_values.h"

namespace pulse {

struct EntryHead {
    Octaves octaves;
    ValueKind kind;
    int first, count;  // classes whose levels are listed
    OpenLevels opens;
    SymbolTables tables;

    void put(std::vector<uint8_t>& out);
    // Throws Malformed. Advances `at`.
    static EntryHead take(const uint8_t* data, size_t size, size_t& at, const Rounding& rounding,
                          int mantissa);
};

// An encoder's head but for the levels, by a sample of the entries: the octaves in use, which few entries lie outside.
EntryHead choose_octaves(const Shared& shared, const uint32_t* positions, const float* values,
                         size_t count, int mantissa);

// What is counted while the values are described: entries by class, symbols by context.
struct EntryCounts {
    std::array<uint32_t, kClasses> classes{};
    SymbolCounts symbols{};
};
void choose_levels(EntryHead& head, const Shared& shared, const EntryCounts& counts);

}  // namespace pulse
