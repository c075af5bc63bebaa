#include "codecs/sparse/head.h"

#include <cmath>

namespace pulse {
namespace {

template <class Side>
void code_head(Side& side, SparseHead& head) {
    AdaptiveBit never;
    NearModels rarities, longer, further, second, against, shifts;
    int expected = 44;
    for (int c = head.first; c < head.first + head.count; c++) {
        uint8_t& rarity = head.rarities[size_t(c)];
        side.next_symbol();
        if (side.bit(never, rarity == kNever)) {
            rarity = kNever;
            continue;
        }
        rarity = uint8_t(code_within(side, rarities, rarity, expected, 0, kMostRarity));
        expected = std::min(rarity + 4, kMostRarity);
    }
    expected = kNoChance;
    for (int c = head.first; c < head.first + head.count; c++) {
        if (head.rarities[size_t(c)] == kNever) continue;
        uint8_t& level = head.longer[size_t(c)];
        level = uint8_t(code_within(side, longer, level, expected, 0, kNoChance));
        expected = std::min(level + 2, kNoChance);
    }
    side.next_symbol();
    head.lengths =
        std::min(int(side.plain(uint32_t(head.lengths), 9)), head.count + kMostLength - 2);
    expected = kEven;
    int expected_second = kEven;
    for (int u = head.first + 1; u <= head.first + head.lengths; u++) {
        uint8_t &more = head.further[size_t(u)], &set = head.second[size_t(u)];
        more = uint8_t(code_within(side, further, more, expected, 0, kNoChance));
        set = uint8_t(code_within(side, second, set, expected_second, 0, kNoChance - 1));
        expected = std::min(more + 2, kNoChance);
        expected_second = set;
    }
    expected = kEven;
    for (uint8_t& level : head.against) {
        level = uint8_t(code_within(side, against, level, expected, 0, kNoChance - 1));
        expected = level;
    }
    for (int8_t& shift : head.shifts)
        shift = int8_t(code_within(side, shifts, shift, 0, -kMostShift, kMostShift));
}

}  // namespace

void SparseHead::put(std::vector<uint8_t>& out) {
    out.push_back(uint8_t(first));
    out.push_back(uint8_t(count - 1));
    put_code(out, [&](Writer& side) { code_head(side, *this); });
}

SparseHead SparseHead::take(const uint8_t* data, size_t size, size_t& at, const ElementKind& kind,
                            size_t runs) {
    SparseHead head;
    head.first = take_byte(data, size, at);
    head.count = take_byte(data, size, at) + 1;
    if (uint32_t(head.first + head.count - 1) > kind.mask)
        throw Malformed("the block's head is out of range");
    head.shifts.resize(runs);
    take_code(data, size, at, [&](Reader& side) { code_head(side, head); });
    return head;
}

}  // namespace pulse
