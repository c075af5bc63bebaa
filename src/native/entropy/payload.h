// What the payloads of the codecs are made of: a head of bytes and varints, and a code of adaptive and plain bits.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "entropy/range_coder.h"

namespace pulse {

struct Malformed : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// One description of each symbol serves both directions: `value` is what an encoder writes, the result what is read.
struct Writer {
    RangeEncoder coder;
    bool bit(AdaptiveBit& model, bool value) {
        coder.bit(model, value);
        return value;
    }
    uint32_t plain(uint32_t value, int count) {
        coder.plain(value, count);
        return value;
    }
    void next_symbol() { coder.make_room(); }
};
struct Reader {
    RangeDecoder coder;
    bool bit(AdaptiveBit& model, bool) { return coder.bit(model); }
    uint32_t plain(uint32_t, int count) { return coder.plain(count); }
    void next_symbol() {
        if (!coder.within()) throw Malformed("the code ends too early");
    }
};

// The lowest `count` bits of a number, plain, from the top, in pieces of 16 and a last shorter one.
template <class Side>
uint32_t code_plain(Side& side, uint32_t number, int count) {
    uint32_t read = 0;
    for (int rest = count; rest > 0;) {
        const int bits = std::min(rest, 16);
        rest -= bits;
        read = read << bits | side.plain((number >> rest) & ((1u << bits) - 1), bits);
    }
    return read;
}

inline void put_varint(std::vector<uint8_t>& out, uint64_t x) {
    for (; x >= 128; x >>= 7) out.push_back(uint8_t(x | 128));
    out.push_back(uint8_t(x));
}

// The head of a payload; both advance `at`.
inline uint8_t take_byte(const uint8_t* data, size_t size, size_t& at) {
    if (at == size) throw Malformed("the block ends inside its head");
    return data[at++];
}

inline uint64_t take_count(const uint8_t* data, size_t size, size_t& at) {
    uint64_t count = 0;
    for (int shift = 0;; shift += 7) {
        const uint8_t byte = take_byte(data, size, at);
        if (shift > 28) throw Malformed("a number in the head is too long");
        count |= uint64_t(byte & 127) << shift;
        if (byte == 0 && shift > 0) throw Malformed("a number in the head is padded");
        if (byte < 128) return count;
    }
}

// A code of adaptive bits in a head, its length in front: what `code` puts by a Writer, and takes by a Reader.
template <class Code>
void put_code(std::vector<uint8_t>& out, Code&& code) {
    Writer side;
    code(side);
    const std::vector<uint8_t> bytes = side.coder.finish();
    put_varint(out, bytes.size());
    out.insert(out.end(), bytes.begin(), bytes.end());
}
template <class Code>
void take_code(const uint8_t* data, size_t size, size_t& at, Code&& code) {
    const uint64_t length = take_count(data, size, at);
    if (length > size - at) throw Malformed("the block ends inside its head");
    Reader side{RangeDecoder(data + at, size_t(length))};
    code(side);
    if (!side.coder.finished()) throw Malformed("the head is longer or shorter than announced");
    at += size_t(length);
}

}  // namespace pulse
