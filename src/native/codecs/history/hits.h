// What is said of the elements that changed lately, before all others: which of them change again, and by how much
// (docs/format.md, section 3.9.5).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "codecs/history/hit_models.h"
#include "codecs/history/windows.h"
#include "entropy/plain_bits.h"
#include "entropy/rans_states.h"

namespace pulse {

// The remembered elements of a block, and their cells: group and place in the list of classes.
struct HistoryHits {
    Remembered remembered;
    std::vector<uint16_t> cells;
    bool large = false;  // whether the last step of any had a size above 1
    int first = 0, count = 1;

    size_t size() const { return remembered.count; }
    const State& state(size_t i) const { return remembered.states[i]; }
    MaskWords marks() const { return remembered.marks.words(); }
    // Lists so many classes from the first one on. Elements of others are forgotten, and are no longer marked.
    void list(int first_class, int classes_listed);
    // Makes `marks.before` an element its number.
    void number();
};

// The steps of those that change: their numbers, ascending, the size of each step, and whether it is down.
struct HitSteps {
    std::vector<uint32_t> which, sizes;
    std::vector<uint8_t> downs;
};

class HistoryEncoder {
public:
    // The classes of all that change are listed.
    HistoryEncoder(const HistoryHits& known, const HitSteps& steps);

    MaskWords marks() const { return known_.marks(); }
    // How many elements of each class are remembered.
    std::array<uint32_t, kClasses> marked() const;
    // All of it, by adaptive bits.
    void put(Writer& side);
    // By 64 states and the chances of a head, which is put first; and how many bytes the code takes at most.
    void put_head(std::vector<uint8_t>& out);
    void put(RansWriter& coder);
    size_t most_bytes() const;
    // Behind the head: bits of steps that stand beside that code; and how many bytes they take at most.
    void put_plain(BitWriter& bits) const;
    size_t most_plain() const;

private:
    // What is said of a step by two bits.
    struct StepBits {
        uint16_t turn;
        bool expected, turned, unlikely;
    };
    struct UnlikelyStep {
        uint8_t cls;
        uint32_t expected;
        Unlikely value;
    };
    const HistoryHits& known_;
    const HitSteps& steps_;
    ByCell<uint32_t> there_{};  // so many elements of each cell
    HitHead head_;
    std::vector<StepBits> bits_;
    std::vector<UnlikelyStep> unlikely_;
};

class HistoryDecoder {
public:
    explicit HistoryDecoder(const HistoryHits& known);

    MaskWords marks() const { return known_.marks(); }
    // What `HistoryEncoder` puts. These throw Malformed.
    void take(Reader& side);
    void take_head(const uint8_t* data, size_t size, size_t& at);
    void take(RansReader& coder);
    void take_plain(BitReader& bits);

    HitSteps steps;

private:
    const HistoryHits& known_;
    ByCell<uint8_t> there_{};
    HitHead head_;
    struct UnlikelyStep {
        uint32_t which, expected;
        Unlikely value;
    };
    std::vector<UnlikelyStep> unlikely_;  // whose plain bits are still to come
};

}  // namespace pulse
