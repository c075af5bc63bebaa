// A binary range coder with 64-bit state: adaptive bits, intervals of a 2^40 scale, and plain bits.
// docs/format.md, section 3.6.1, specifies every operation; tests/support/gaps_oracle.py is the same in plain Python.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "common/clones.h"

namespace pulse {

constexpr int kScaleBits = 40;
constexpr uint64_t kScale = uint64_t(1) << kScaleBits;
constexpr uint16_t kLeastP = 32, kMostP = 65504;
constexpr int kMostSeen = 126;

struct Rates {
    uint32_t of[kMostSeen + 1];
    constexpr Rates() : of() {
        for (int n = 0; n <= kMostSeen; n++) of[n] = uint32_t(65536 * 2 / (2 * n + 3));
    }
    constexpr uint32_t operator[](size_t n) const { return of[n]; }
};
inline constexpr Rates kRates;

// P(bit = 1) = p / 2^16, moved by 2 / (2 seen + 3) of the error: fast at first, then by 1/128.
struct AdaptiveBit {
    uint16_t p = 32768;
    uint16_t seen = 0;

    // Without branches: the bits of a code are hard to foresee.
    PULSE_INLINE void adapt(bool bit) {
        const uint32_t miss = bit ? 65535u - p : p, step = (miss * kRates[seen]) >> 16;
        const uint32_t moved = bit ? p + step : p - step;
        p = uint16_t(moved < kLeastP ? kLeastP : moved > kMostP ? kMostP : moved);
        seen = uint16_t(seen + (seen < kMostSeen));
    }
};

inline uint64_t big_endian(uint64_t x) { return __builtin_bswap64(x); }

// Bits of `range` that are settled, in whole bytes: 0 to 56, as range is never 0.
inline int settled_bits(uint64_t range) { return __builtin_clzll(range) & 56; }

class RangeEncoder {
public:
    // No symbol takes more than this many bytes, nor any group of symbols between two calls of `make_room`.
    static constexpr size_t kRoom = 256;

    RangeEncoder()
        : begin_(grown(nullptr, 0, 1 << 12)), at_(begin_ + 1), end_(begin_ + (1 << 12)) {}
    RangeEncoder(RangeEncoder&& other) noexcept
        : begin_(other.begin_),
          at_(other.at_),
          end_(other.end_),
          low_(other.low_),
          range_(other.range_) {
        other.begin_ = nullptr;
    }
    RangeEncoder& operator=(RangeEncoder&&) = delete;
    ~RangeEncoder() { delete[] begin_; }

    void make_room() {
        if (size_t(end_ - at_) < kRoom) {
            const size_t used = size_t(at_ - begin_), size = 2 * size_t(end_ - begin_);
            begin_ = grown(begin_, used, size);
            at_ = begin_ + used;
            end_ = begin_ + size;
        }
    }

    PULSE_INLINE void bit(AdaptiveBit& model, bool value) {
        bit(model.p, 16, value);
        model.adapt(value);
    }

    // P(value = 1) = chance / 2^scale, neither 0 nor 1.
    PULSE_INLINE void bit(uint32_t chance, int scale, bool value) {
        const uint64_t one = (range_ >> scale) * chance;
        const uint64_t zero = uint64_t(value) - 1;  // all bits for a 0
        add(one & zero);
        range_ = one + ((range_ - 2 * one) & zero);
        settle();
    }

    // The part [low, high) of 2^40, low < high.
    void interval(uint64_t low, uint64_t high) {
        const uint64_t unit = range_ >> kScaleBits;
        add(unit * low);
        range_ = unit * (high - low);
        settle();
    }

    // `count` bits of equal probability, at most 16.
    void plain(uint32_t value, int count) {
        range_ >>= count;
        add(range_ * value);
        settle();
    }

    // The shortest bytes that lead a decoder to this place: 1 to 8 more than are settled.
    std::vector<uint8_t> finish() {
        make_room();
        for (int bytes = 1; bytes <= 8; bytes++) {
            const uint64_t below = bytes == 8 ? 0 : ~uint64_t(0) >> (8 * bytes);
            const uint64_t value = (low_ + below) & ~below;  // may wrap: then a carry is due
            if (value - low_ < range_) {
                if (value < low_) carry();
                const uint64_t stored = big_endian(value);
                std::memcpy(at_, &stored, 8);
                at_ += bytes;
                break;
            }
        }
        return std::vector<uint8_t>(begin_ + 1, at_);
    }

private:
    void add(uint64_t x) {
        low_ += x;
        if (low_ < x) carry();
    }

    void carry() {
        uint8_t* last = at_ - 1;
        while (++*last == 0) last--;
    }

    void settle() {
        const int bits = settled_bits(range_);
        const uint64_t stored = big_endian(low_);
        std::memcpy(at_, &stored, 8);
        at_ += size_t(bits) >> 3;
        low_ <<= bits;
        range_ <<= bits;
    }

    // A larger buffer with the `used` bytes of the one before, which is freed.
    static uint8_t* grown(uint8_t* before, size_t used, size_t size) {
        uint8_t* after = new uint8_t[size];
        if (used) std::memcpy(after, before, used);
        delete[] before;
        return after;
    }

    uint8_t *begin_, *at_, *end_;  // one byte in front takes a carry
    uint64_t low_ = 0, range_ = ~uint64_t(0);
};

class RangeDecoder {
public:
    RangeDecoder(const uint8_t* data, size_t size) : data_(data), size_(size) {
        code_ = next();
        at_ = 8;
    }

    PULSE_INLINE bool bit(AdaptiveBit& model) {
        const bool value = bit(model.p, 16);
        model.adapt(value);
        return value;
    }

    PULSE_INLINE bool bit(uint32_t chance, int scale) {
        const uint64_t one = (range_ >> scale) * chance;
        const bool value = code_ < one;
        const uint64_t zero = uint64_t(value) - 1;  // all bits for a 0
        code_ -= one & zero;
        range_ = one + ((range_ - 2 * one) & zero);
        settle();
        return value;
    }

    // The place in 2^40 that the code points to.
    uint64_t place() const {
        const uint64_t v = code_ / (range_ >> kScaleBits);
        return v < kScale ? v : kScale - 1;
    }

    // Accepts [low, high), which must hold `place()`.
    void take(uint64_t low, uint64_t high) {
        const uint64_t unit = range_ >> kScaleBits;
        code_ -= unit * low;
        range_ = unit * (high - low);
        settle();
    }

    uint32_t plain(int count) {
        range_ >>= count;
        const uint64_t most = (uint64_t(1) << count) - 1, v = code_ / range_,
                       value = v < most ? v : most;
        code_ -= value * range_;
        settle();
        return uint32_t(value);
    }

    // Whether the data are as long as an encoder would have made them: 1 to 8 bytes past what is settled.
    bool finished() const { return size_ + 8 > at_ && size_ <= at_; }

    // False once more was read than any encoder's output holds; a hostile stream could otherwise go on for ever.
    bool within() const { return at_ < size_ + 8; }

private:
    // Eight bytes from `at_`; zeros follow the last one.
    uint64_t next() const {
        uint64_t x = 0;
        if (at_ + 8 <= size_) {
            std::memcpy(&x, data_ + at_, 8);
            return big_endian(x);
        }
        for (size_t i = at_; i < at_ + 8; i++) x = x << 8 | (i < size_ ? data_[i] : 0);
        return x;
    }

    void settle() {
        const int bits = settled_bits(range_);
        code_ = code_ << bits | next() >> 1 >> (63 - bits);
        at_ += size_t(bits) >> 3;
        range_ <<= bits;
    }

    const uint8_t* data_;
    size_t size_, at_ = 0;
    uint64_t code_, range_ = ~uint64_t(0);
};

}  // namespace pulse
