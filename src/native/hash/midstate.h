// SHA-256 of a message of which several processes hold a piece each: what one has computed is passed on to the next.
#pragma once

#include <cstddef>
#include <cstdint>

#include "hash/sha256.h"

namespace pulse {

// All of a hash between two pieces of its message. `rest` holds the bytes behind the last whole block, then zeros.
struct Sha256Midstate {
    uint32_t state[8];
    uint64_t bytes;
    uint8_t rest[kSha256Block];
};
static_assert(sizeof(Sha256Midstate) == 104, "it is passed on as it lies in memory");

Sha256Midstate sha256_begin();

// Adds the next bytes of the message.
void sha256_absorb(const Sha256Kernel& kernel, Sha256Midstate& midstate, const uint8_t* data,
                   size_t bytes);

// The digest of what was absorbed.
void sha256_digest(const Sha256Kernel& kernel, const Sha256Midstate& midstate, uint8_t* digest);

}  // namespace pulse
