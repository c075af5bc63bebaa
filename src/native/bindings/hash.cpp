// Python bindings of the leaves' digests.
#include <cstring>

#include "bindings/binding.h"
#include "common/apply.h"
#include "hash/leaves.h"

using namespace binding;

namespace {

const pulse::Sha256Plan& checked_plan(const std::string& path) {
    const pulse::Sha256Plan* plan = pulse::sha256_plan(path);
    if (!plan) throw nb::value_error(("this processor has no path " + path).c_str());
    return *plan;
}

std::vector<pulse::Piece> pieces_of(const std::vector<Bytes>& arrays) {
    std::vector<pulse::Piece> pieces;
    for (const Bytes& array : arrays) pieces.push_back({array.data(), array.size()});
    return pieces;
}

void check_leaf(size_t leaf_bytes) {
    if (leaf_bytes == 0 || leaf_bytes % pulse::kSha256Block != 0)
        throw nb::value_error("leaf_bytes is out of range");
}

std::vector<pulse::Sha256Midstate> midstates_of(const Bytes& data) {
    if (data.size() % sizeof(pulse::Sha256Midstate) != 0)
        throw nb::value_error("midstates have 104 bytes each");
    std::vector<pulse::Sha256Midstate> midstates(data.size() / sizeof(pulse::Sha256Midstate));
    if (!midstates.empty()) std::memcpy(midstates.data(), data.data(), data.size());
    return midstates;
}

nb::bytes to_bytes(const std::vector<uint8_t>& digests) {
    return nb::bytes(digests.data(), digests.size());
}

}  // namespace

void bind_sha256(nb::module_& m) {
    m.def(
        "sha256_paths", &pulse::sha256_paths,
        "The instruction sets with which this processor can hash; the kernels choose among them by speed.");

    m.def(
        "sha256_leaves",
        [](const std::vector<Bytes>& arrays, size_t leaf_bytes, const std::string& path) {
            check_leaf(leaf_bytes);
            const auto pieces = pieces_of(arrays);
            return to_bytes(without_gil(
                [&] { return pulse::leaf_digests(pieces, leaf_bytes, checked_plan(path)); }));
        },
        "arrays"_a, "leaf_bytes"_a, "path"_a = "",
        "SHA-256 of every leaf_bytes of each array, a rest included; 32 bytes each. path: for tests, \"\" is the fastest.");

    m.def(
        "sha256_messages",
        [](const std::vector<std::vector<Bytes>>& messages, const std::string& path) {
            std::vector<std::vector<pulse::Piece>> pieces;
            for (const auto& arrays : messages) pieces.push_back(pieces_of(arrays));
            return to_bytes(
                without_gil([&] { return pulse::message_digests(pieces, checked_plan(path)); }));
        },
        "messages"_a, "path"_a = "",
        "SHA-256 of messages that are given in pieces; 32 bytes each.");

    m.def(
        "sha256_changed_leaves",
        [](const std::vector<std::tuple<Bytes, Positions, uint32_t, Bytes>>& changed,
           size_t leaf_bytes, int width, const std::string& path) {
            check_leaf(leaf_bytes);
            check_width(width);
            std::vector<pulse::Patched> pieces;
            for (const auto& [array, positions, base, values] : changed) {
                if (array.size() % size_t(width))
                    throw nb::value_error("an array is no whole number of elements");
                check_elements(positions, "positions");
                if (values.size() != positions.size() * size_t(width)) {
                    throw nb::value_error("values and positions differ");
                }
                pieces.push_back({{array.data(), array.size()},
                                  positions.data(),
                                  base,
                                  values.data(),
                                  positions.size()});
            }
            return to_bytes(without_gil([&] {
                for (const pulse::Patched& p : pieces) {
                    if (!pulse::all_ascending(p.positions, p.count, p.base,
                                              p.piece.bytes / size_t(width))) {
                        throw nb::index_error(
                            "the positions are not ascending or not inside the array");
                    }
                }
                return pulse::changed_leaf_digests(pieces, leaf_bytes, width, checked_plan(path));
            }));
        },
        "changed"_a, "leaf_bytes"_a, "width"_a, "path"_a = "",
        "The same of each (array, positions, base, values), with the values at positions - base, which ascend.");

    m.def(
        "sha256_begin",
        [](size_t count) {
            const std::vector<pulse::Sha256Midstate> midstates(count, pulse::sha256_begin());
            return nb::bytes(midstates.data(), count * sizeof(pulse::Sha256Midstate));
        },
        "count"_a, "The midstates of hashes that have absorbed nothing, 104 bytes each.");

    m.def(
        "sha256_absorb",
        [](const Bytes& midstates, const std::vector<Bytes>& arrays, const std::string& path) {
            auto states = midstates_of(midstates);
            if (states.size() != arrays.size())
                throw nb::value_error("midstates and arrays differ in number");
            const auto pieces = pieces_of(arrays);
            without_gil([&] {
                const pulse::Sha256Kernel& kernel = checked_plan(path).single;
                for (size_t k = 0; k < states.size(); k++)
                    pulse::sha256_absorb(kernel, states[k], pieces[k].data, pieces[k].bytes);
            });
            return nb::bytes(states.data(), states.size() * sizeof(pulse::Sha256Midstate));
        },
        array("midstates"), "arrays"_a, "path"_a = "",
        "The midstates once each has absorbed the array in its place.");

    m.def(
        "sha256_digests",
        [](const Bytes& midstates, const std::string& path) {
            const auto states = midstates_of(midstates);
            return to_bytes(without_gil([&] {
                const pulse::Sha256Kernel& kernel = checked_plan(path).single;
                std::vector<uint8_t> digests(states.size() * pulse::kSha256Digest);
                for (size_t k = 0; k < states.size(); k++)
                    pulse::sha256_digest(kernel, states[k], &digests[pulse::kSha256Digest * k]);
                return digests;
            }));
        },
        array("midstates"), "path"_a = "",
        "The digests of what the midstates have absorbed, 32 bytes each.");
}
