#include "codecs/codecs.h"

#include <array>

#include "common/clones.h"
#include "entropy/payload.h"

namespace pulse {
namespace {

constexpr uint8_t kSigned = 1, kBySparse = 2;  // bits of the payload's first byte
constexpr ElementKind kNibble = {1, 0, 15, false};

template <class U>
constexpr size_t kNibbles = 2 * sizeof(U);

// Codes in the order of their numbers, and back: of a sign and a magnitude, as of E2M1, or as they are.
constexpr uint8_t ordered(uint8_t code, bool is_signed) {
    return !is_signed ? code : code & 8 ? uint8_t(15 - code) : uint8_t(code | 8);
}
constexpr uint8_t from_ordered_nibble(uint8_t code, bool is_signed) {
    return !is_signed ? code : code & 8 ? uint8_t(code & 7) : uint8_t(15 - code);
}

// All codes of an array, the lowest of each element first.
template <class U>
PULSE_CLONES Buffer<uint8_t> unpacked(const U* elements, size_t count, bool is_signed) {
    Buffer<uint8_t> codes(kNibbles<U> * count);
    uint8_t* const out = codes.data.get();
    // Without a table: of a sign bit set all others turn, and the sign turns always.
    const uint8_t turn = is_signed ? 8 : 0, others = is_signed ? 7 : 0;
    for (size_t i = 0; i < count; i++) {
        for (size_t k = 0; k < kNibbles<U>; k++) {
            const uint8_t code = uint8_t(elements[i] >> (4 * k)) & 15;
            out[kNibbles<U> * i + k] = uint8_t(code ^ turn ^ (uint8_t(0 - (code >> 3)) & others));
        }
    }
    return codes;
}

template <class U>
std::vector<Run> runs_of_nibbles(const std::vector<Run>& runs) {
    std::vector<Run> found;
    for (const Run& run : runs) {
        found.push_back(
            {kNibbles<U> * run.elements, kNibbles<U> * run.row, kNibbles<U> * run.phase});
    }
    return found;
}

// How many nibbles changed, and how many by one step: of plain codes, and of those with a sign.
struct NibbleSteps {
    size_t changed = 0, single[2] = {};
};
template <class U>
NibbleSteps steps_of(const BlockChanges<U>& changes) {
    NibbleSteps found;
    for (size_t i = 0; i < changes.positions.size(); i++) {
        for (U left = changes.before[i] ^ changes.values[i], k = 0; left; left >>= 4, k++) {
            if (!(left & 15)) continue;
            const uint8_t from = uint8_t(changes.before[i] >> (4 * k)) & 15;
            const uint8_t to = uint8_t(changes.values[i] >> (4 * k)) & 15;
            found.changed++;
            for (bool s : {false, true}) {
                const int step = ordered(to, s) - ordered(from, s);
                found.single[s] += step == 1 || step == -1;
            }
        }
    }
    return found;
}

}  // namespace

template <class U>
std::vector<uint8_t> encode_nibbles(const U* old, const U* now, const BlockChanges<U>& changes,
                                    const std::vector<Run>& runs, bool asked) {
    const NibbleSteps steps = steps_of(changes);
    // Of an integer that is one number nearly all of its low nibble and some of the next change.
    if (!asked && 2 * steps.changed > 3 * changes.positions.size() * (sizeof(U) == 1 ? 1 : 2))
        return {};
    const bool is_signed = steps.single[true] > steps.single[false];
    const size_t count = changes.statistics.elements;
    const Buffer<uint8_t> before = unpacked(old, count, is_signed),
                          after = unpacked(now, count, is_signed);
    const std::vector<Run> of_nibbles = runs_of_nibbles<U>(runs);
    const BlockChanges<uint8_t> found =
        compare_block(before.data.get(), after.data.get(), before.size, of_nibbles,
                      ClassOf{kNibble.shift, kNibble.mask});
    if (found.positions.empty()) return {};
    const bool few = suits_gaps(found.statistics);
    const std::vector<uint8_t> rest =
        few ? encode_gaps(before.data.get(), found, kNibble, of_nibbles)
            : encode_sparse(before.data.get(), found, kNibble, of_nibbles);
    std::vector<uint8_t> payload = {uint8_t((is_signed ? kSigned : 0) | (few ? 0 : kBySparse))};
    payload.insert(payload.end(), rest.begin(), rest.end());
    return payload;
}

template std::vector<uint8_t> encode_nibbles(const uint8_t*, const uint8_t*,
                                             const BlockChanges<uint8_t>&, const std::vector<Run>&,
                                             bool);
template std::vector<uint8_t> encode_nibbles(const uint32_t*, const uint32_t*,
                                             const BlockChanges<uint32_t>&, const std::vector<Run>&,
                                             bool);

namespace {

template <class U>
Decoded decode(const uint8_t* data, size_t size, const U* old, const std::vector<Run>& runs) {
    size_t at = 0;
    const uint8_t mode = take_byte(data, size, at);
    if (mode > (kSigned | kBySparse)) throw Malformed("the block's head is out of range");
    const bool is_signed = mode & kSigned;
    const Buffer<uint8_t> before = unpacked(old, elements_of(runs), is_signed);
    const std::vector<Run> of_nibbles = runs_of_nibbles<U>(runs);
    const Decoded codes =
        mode & kBySparse
            ? decode_sparse(data + at, size - at, before.data.get(), kNibble, of_nibbles)
            : decode_gaps(data + at, size - at, before.data.get(), kNibble, of_nibbles);
    // Codes of one element are one change.
    Decoded result(codes.positions.size, sizeof(U));
    uint32_t* const positions = result.positions.data.get();
    U* const was = reinterpret_cast<U*>(result.before.data.get());
    U* const becomes = reinterpret_cast<U*>(result.values.data.get());
    size_t found = 0;
    for (size_t i = 0; i < codes.positions.size; i++) {
        if (codes.values.data[i] > 15) throw Malformed("a code is out of range");
        const uint32_t place = codes.positions.data[i], element = uint32_t(place / kNibbles<U>);
        if (found == 0 || positions[found - 1] != element) {
            positions[found] = element;
            was[found] = becomes[found] = old[element];
            found++;
        }
        const int shift = int(4 * (place % kNibbles<U>));
        const U code = from_ordered_nibble(codes.values.data[i], is_signed);
        becomes[found - 1] = U((becomes[found - 1] & ~(U(15) << shift)) | U(code << shift));
    }
    result.shorten(found, sizeof(U));
    return result;
}

}  // namespace

Decoded decode_nibbles(const uint8_t* payload, size_t size, const void* old,
                       const ElementKind& kind, const std::vector<Run>& runs) {
    if (!may_be_nibbles(kind)) throw Malformed("the elements are no packed codes");
    if (kind.width == 1) return decode(payload, size, static_cast<const uint8_t*>(old), runs);
    return decode(payload, size, static_cast<const uint32_t*>(old), runs);
}

}  // namespace pulse
