// Symbols of 5 bits with adaptive probabilities, and plain bits beside them (docs/loco.md, section 3.3).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "payload.h"

namespace pulse {

constexpr int kSymbols = 32;

// Symbol i has the part [bound(i), bound(i + 1)) of 2^16, never less than kLeast. One array of 16-bit numbers that all move
// at once: a few vector instructions, where a tree of adaptive bits would take five dependent steps.
class AdaptiveSymbol {
public:
    static constexpr uint32_t kLeast = 4, kMost = 65536 - kLeast * kSymbols;

    AdaptiveSymbol() {
        for (uint32_t i = 0; i < kSymbols; i++) below_[i] = uint16_t(kMost * i / kSymbols);
    }

    uint32_t bound(uint32_t i) const { return i == kSymbols ? 65536 : below_[i] + kLeast * i; }

    // The symbol whose part holds `place`, below 2^16.
    uint32_t at(uint32_t place) const {
        const uint16_t target = uint16_t(place);
        uint16_t found = 0;
        for (uint32_t i = 0; i < kSymbols; i++) found = uint16_t(found + (uint16_t(below_[i] + kLeast * i) <= target));
        return found - 1u;
    }

    void adapt(uint32_t symbol) {
        const int rate = kRates[seen_];
        for (uint32_t i = 0; i < kSymbols; i++) {
            const uint16_t up = uint16_t(uint16_t(kMost - below_[i]) >> rate), down = uint16_t(below_[i] >> rate);
            below_[i] = uint16_t(i > symbol ? below_[i] + up : below_[i] - down);
        }
        if (seen_ + 1u < kRates.size()) seen_++;
    }

private:
    static constexpr std::array<uint8_t, 48> kRates = [] {
        std::array<uint8_t, 48> rates{};
        for (size_t n = 0; n < rates.size(); n++)
            rates[n] = uint8_t(n < 1 ? 1 : n < 3 ? 2 : n < 7 ? 3 : n < 15 ? 4 : n < 31 ? 5 : n < 47 ? 6 : 7);
        return rates;
    }();

    std::array<uint16_t, kSymbols> below_;
    uint16_t seen_ = 0;
};

// Plain bits, the first in the lowest bit of the first byte.
class BitWriter {
public:
    void put(uint32_t value, int count) {
        held_ |= uint64_t(value) << filled_;
        filled_ += count;
        while (filled_ >= 8) {
            bytes_.push_back(uint8_t(held_));
            held_ >>= 8;
            filled_ -= 8;
        }
    }
    std::vector<uint8_t> finish() {
        if (filled_) bytes_.push_back(uint8_t(held_));
        return std::move(bytes_);
    }

private:
    std::vector<uint8_t> bytes_;
    uint64_t held_ = 0;
    int filled_ = 0;
};

class BitReader {
public:
    BitReader(const uint8_t* data, size_t size) : data_(data), size_(size) {}

    // At most 31 bits.
    uint32_t take(int count) {
        if (at_ + uint64_t(count) > uint64_t(size_) * 8) throw Malformed("the plain bits end too early");
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
