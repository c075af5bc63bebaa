// SHA-256 (FIPS 180-4) of many messages at once: one message is a chain of dependent steps that leaves most of a core idle,
// several fill it. notes/design/0015 has what was rejected.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace pulse {

constexpr size_t kSha256Block = 64, kSha256Digest = 32;
constexpr int kMostLanes = 16;

using Sha256State = uint32_t[8];
extern const uint32_t kSha256Start[8], kSha256Round[64];

// Advances `lanes` states, each by `blocks` blocks of data of its own.
using Sha256Compress = void (*)(Sha256State* states, const uint8_t* const* data, size_t blocks);

// A way to do it, for processors with the instructions that `path` names.
struct Sha256Kernel {
    const char* path;
    int lanes;
    Sha256Compress compress;
};

// Of the fastest for one lane, two, …: found by timing them once, since this differs between processors.
struct Sha256Plan {
    std::array<Sha256Kernel, kMostLanes + 1>
        of;               // of[n]: for n messages that are left; of[0] is not used
    Sha256Kernel single;  // the last blocks of a message, one message at a time
};

// The paths of this processor, the plain one ("portable") last.
std::vector<std::string> sha256_paths();

// The plan with the kernels of one path, or, for "", with all of them. Null where the processor lacks the path.
const Sha256Plan* sha256_plan(const std::string& path);

// Those that this processor can run of the kernels of x86-64 and arm64.
void add_processor_kernels(std::vector<Sha256Kernel>& kernels);

// What is left of a message of `size` bytes behind its last whole block, and the digest.
void sha256_finish(const Sha256Kernel& kernel, Sha256State& state, const uint8_t* rest,
                   uint64_t size, uint8_t* digest);

// All of a hash between two pieces of its message, where several processes hold a piece each: what one has computed is passed
// on to the next. `rest` holds the bytes behind the last whole block, then zeros.
struct Sha256Midstate {
    Sha256State state;
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

// Hashes messages of sizes[0 .. count - 1] bytes into 32 bytes each. fetch(message, offset, bytes, lane) returns the
// message's bytes, at most `tile` of them, valid until the lane is fetched again; a message is fetched once, in order.
template <class Fetch>
void sha256_messages(const Sha256Plan& plan, const size_t* sizes, size_t count, size_t tile,
                     uint8_t* digests, Fetch&& fetch) {
    struct Lane {
        size_t message, at;
        int slot;
    };
    std::array<Lane, kMostLanes> lanes;
    Sha256State states[kMostLanes];
    const uint8_t* data[kMostLanes];
    size_t next = 0;
    int active = 0;
    bool busy[kMostLanes] = {};
    for (;;) {
        while (next < count) {
            const size_t left = count - next + size_t(active);
            if (active >= plan.of[left < kMostLanes ? left : kMostLanes].lanes) break;
            const int slot = int(std::find(busy, busy + kMostLanes, false) - busy);
            busy[slot] = true;
            lanes[size_t(active)] = {next++, 0, slot};
            std::memcpy(states[active++], kSha256Start, sizeof(Sha256State));
        }
        if (!active) return;
        const Sha256Kernel& kernel = plan.of[size_t(active)];
        const int used = active < kernel.lanes ? active : kernel.lanes;
        size_t bytes = tile;
        for (int i = 0; i < used; i++) {
            const size_t whole =
                (sizes[lanes[size_t(i)].message] - lanes[size_t(i)].at) & ~(kSha256Block - 1);
            bytes = whole < bytes ? whole : bytes;
        }
        if (bytes) {
            for (int i = 0; i < used; i++) {
                const Lane& lane = lanes[size_t(i)];
                data[i] = fetch(lane.message, lane.at, bytes, lane.slot);
            }
            if (used < kernel.lanes) {  // the lanes without a message repeat the first one's
                Sha256State all[kMostLanes];
                std::memcpy(all, states, sizeof(Sha256State) * size_t(used));
                for (int i = used; i < kernel.lanes; i++) {
                    std::memcpy(all[i], states[0], sizeof(Sha256State));
                    data[i] = data[0];
                }
                kernel.compress(all, data, bytes / kSha256Block);
                std::memcpy(states, all, sizeof(Sha256State) * size_t(used));
            } else {
                kernel.compress(states, data, bytes / kSha256Block);
            }
        }
        for (int i = 0; i < used; i++) lanes[size_t(i)].at += bytes;
        for (int i = used - 1; i >= 0; i--) {
            const Lane lane = lanes[size_t(i)];
            const size_t size = sizes[lane.message], rest = size - lane.at;
            if (rest >= kSha256Block) continue;
            const uint8_t* last = rest ? fetch(lane.message, lane.at, rest, lane.slot) : nullptr;
            sha256_finish(plan.single, states[i], last, size,
                          digests + kSha256Digest * lane.message);
            busy[lane.slot] = false;
            active--;
            lanes[size_t(i)] = lanes[size_t(active)];
            std::memmove(states[i], states[active], sizeof(Sha256State));
        }
    }
}

}  // namespace pulse
