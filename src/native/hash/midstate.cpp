#include "hash/midstate.h"

#include <algorithm>
#include <cstring>

namespace pulse {

Sha256Midstate sha256_begin() {
    Sha256Midstate midstate{};
    std::memcpy(midstate.state, kSha256Start, sizeof(midstate.state));
    return midstate;
}

void sha256_absorb(const Sha256Kernel& kernel, Sha256Midstate& midstate, const uint8_t* data,
                   size_t bytes) {
    size_t over = size_t(midstate.bytes % kSha256Block);
    midstate.bytes += bytes;
    if (over) {
        const size_t taken = std::min(kSha256Block - over, bytes);
        if (taken) std::memcpy(midstate.rest + over, data, taken);
        if (over + taken < kSha256Block) return;
        const uint8_t* rest = midstate.rest;
        kernel.compress(&midstate.state, &rest, 1);
        data += taken;
        bytes -= taken;
    }
    const size_t blocks = bytes / kSha256Block;
    if (blocks) kernel.compress(&midstate.state, &data, blocks);
    over = bytes % kSha256Block;
    std::memset(midstate.rest, 0, kSha256Block);
    if (over) std::memcpy(midstate.rest, data + blocks * kSha256Block, over);
}

void sha256_digest(const Sha256Kernel& kernel, const Sha256Midstate& midstate, uint8_t* digest) {
    Sha256State state;
    std::memcpy(state, midstate.state, sizeof(state));
    sha256_finish(kernel, state, midstate.rest, midstate.bytes, digest);
}

}  // namespace pulse
