// Bits one at a time, by single states of the 64: sizes that are rare (docs/format.md, section 3.7.3).
#pragma once

#include <cstdint>
#include <vector>

#include "entropy/rans_states.h"

namespace pulse {

// An interval of a single state.
struct StatePiece {
    uint32_t state, start, length;
};

// Keeps what a decoder reads first in front; `state` is the one to use next.
struct PieceWriter {
    std::vector<StatePiece>& out;
    uint32_t state = 0;

    bool bit(uint32_t frequency, bool value) {
        out.push_back({state, value ? 0 : frequency, value ? frequency : kRansScale - frequency});
        return value;
    }
    void next_state() { state = (state + 1) % kRansStates; }
};

inline void put_pieces(RansWriter& coder, const std::vector<StatePiece>& pieces) {
    for (size_t i = pieces.size(); i-- > 0;) {
        coder.symbol(coder.states[pieces[i].state], pieces[i].start, pieces[i].length);
    }
}

struct PieceReader {
    RansReader& coder;
    uint32_t state = 0;

    bool bit(uint32_t frequency, bool) {
        uint32_t& x = coder.states[state];
        const bool value = RansReader::slot(x) < frequency;
        coder.symbol(x, value ? 0 : frequency, value ? frequency : kRansScale - frequency);
        return value;
    }
    void next_state() { state = (state + 1) % kRansStates; }
};

}  // namespace pulse
