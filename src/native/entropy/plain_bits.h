// Plain bits beside a code, the first in the lowest bit of the first byte (docs/loco.md, section 3.4).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "entropy/payload.h"

namespace pulse {

class BitWriter {
public:
    // Room for so many bytes, which are not exceeded.
    explicit BitWriter(size_t most) : bytes_(most + 8) {}

    // At most 31 bits.
    void put(uint32_t value, int count) {
        held_ |= uint64_t(value) << filled_;
        filled_ += count;
        std::memcpy(&bytes_[at_], &held_, 8);
        at_ += size_t(filled_) >> 3;
        held_ >>= filled_ & ~7;
        filled_ &= 7;
    }
    std::vector<uint8_t> finish() {
        bytes_.resize(at_ + (filled_ > 0));
        return std::move(bytes_);
    }

private:
    std::vector<uint8_t> bytes_;
    size_t at_ = 0;
    uint64_t held_ = 0;
    int filled_ = 0;
};

class BitReader {
public:
    BitReader(const uint8_t* data, size_t size) : data_(data), size_(size) {}

    // At most 31 bits.
    uint32_t take(int count) {
        if (at_ + uint64_t(count) > uint64_t(size_) * 8)
            throw Malformed("the plain bits end too early");
        uint64_t window = 0;
        const size_t byte = size_t(at_ >> 3);
        if (byte + 8 <= size_) {
            std::memcpy(&window, data_ + byte, 8);
        } else {
            for (size_t i = byte; i < size_; i++) window |= uint64_t(data_[i]) << (8 * (i - byte));
        }
        const uint32_t value = uint32_t((window >> (at_ & 7)) & ((uint64_t(1) << count) - 1));
        at_ += uint64_t(count);
        return value;
    }

    uint64_t taken() const { return at_; }

    // Whether all bytes were used, and the bits past the last one are 0.
    bool finished() const {
        if (at_ > uint64_t(size_) * 8 || uint64_t(size_) * 8 - at_ >= 8) return false;
        return (at_ & 7) == 0 || data_[size_ - 1] >> (at_ & 7) == 0;
    }

private:
    const uint8_t* data_;
    size_t size_;
    uint64_t at_ = 0;
};

}  // namespace pulse
