#include "hash/sha256.h"

#include <algorithm>
#include <chrono>

#include "hash/sha256_vector.h"

namespace pulse {

const uint32_t kSha256Start[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                  0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

const uint32_t kSha256Round[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

namespace {

constexpr const char* kPortable = "portable";
constexpr int kRuns = 16;  // a millisecond, once a process

void portable(Sha256State* states, const uint8_t* const* data, size_t blocks) {
    sha256_rounds<1>(states, data, blocks);
}

struct Timed {
    Sha256Kernel kernel;
    double seconds;  // of one step of all its lanes
};

// One run over 4 KiB a lane.
double seconds_of(const Sha256Kernel& kernel) {
    using Clock = std::chrono::steady_clock;
    static const std::vector<uint8_t> zeros(4096);
    Sha256State states[kMostLanes] = {};
    const uint8_t* data[kMostLanes];
    std::fill(data, data + kMostLanes, zeros.data());
    const auto began = Clock::now();
    kernel.compress(states, data, zeros.size() / kSha256Block);
    return std::chrono::duration<double>(Clock::now() - began).count();
}

const std::vector<Timed>& kernels() {
    static const std::vector<Timed> known = [] {
        std::vector<Sha256Kernel> found;
#if defined(__x86_64__) || defined(__aarch64__)
        add_processor_kernels(found);
#endif
        found.push_back({kPortable, 1, portable});
        std::vector<Timed> timed;
        for (const Sha256Kernel& kernel : found) timed.push_back({kernel, 1});
        // The best of some runs, by turns: a processor that wakes up, or is taken away for a moment, is slow for all.
        for (int run = 0; run < kRuns; run++) {
            for (Timed& each : timed)
                each.seconds = std::min(each.seconds, seconds_of(each.kernel));
        }
        return timed;
    }();
    return known;
}

Sha256Plan plan_of(const std::string& path) {
    Sha256Plan plan;
    for (int n = 1; n <= kMostLanes; n++) {
        double most = -1;
        for (const Timed& timed : kernels()) {
            if (!path.empty() && path != timed.kernel.path) continue;
            const double speed = std::min(n, timed.kernel.lanes) / timed.seconds;
            if (speed > most) {
                most = speed;
                plan.of[size_t(n)] = timed.kernel;
            }
        }
    }
    plan.of[0] = plan.of[1];
    plan.single = {kPortable, 1, portable};
    for (const Timed& timed : kernels()) {
        if (timed.kernel.lanes == 1 && (path.empty() || path == timed.kernel.path)) {
            plan.single = timed.kernel;
            break;
        }
    }
    return plan;
}

}  // namespace

std::vector<std::string> sha256_paths() {
    std::vector<std::string> paths;
    for (const Timed& timed : kernels()) {
        if (paths.empty() || paths.back() != timed.kernel.path) paths.push_back(timed.kernel.path);
    }
    return paths;
}

const Sha256Plan* sha256_plan(const std::string& path) {
    static const auto plans = [] {
        std::vector<std::pair<std::string, Sha256Plan>> all;
        all.emplace_back("", plan_of(""));
        for (const std::string& name : sha256_paths()) all.emplace_back(name, plan_of(name));
        return all;
    }();
    for (const auto& [name, plan] : plans) {
        if (name == path) return &plan;
    }
    return nullptr;
}

void sha256_finish(const Sha256Kernel& kernel, Sha256State& state, const uint8_t* rest,
                   uint64_t size, uint8_t* digest) {
    uint8_t last[2 * kSha256Block] = {};
    const size_t over = size_t(size % kSha256Block), blocks = over + 9 > kSha256Block ? 2 : 1;
    if (over) std::memcpy(last, rest, over);
    last[over] = 0x80;
    for (int i = 0; i < 8; i++)
        last[blocks * kSha256Block - 1 - size_t(i)] = uint8_t(size * 8 >> (8 * i));
    const uint8_t* data = last;
    kernel.compress(&state, &data, blocks);
    for (int i = 0; i < 8; i++) {
        for (int k = 0; k < 4; k++) digest[4 * i + k] = uint8_t(state[i] >> (24 - 8 * k));
    }
}

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
