// Python bindings of the `groups` codec.
#include "codecs/sparse/sparse.h"
#include "bindings/binding.h"

using namespace binding;

void bind_groups(nb::module_& m) {
    m.def(
        "groups_decode",
        [](Bytes payload, Bytes old, int width, int shift, uint32_t mask, bool floating,
           const std::vector<RunTuple>& runs) {
            const pulse::ElementKind kind{width, shift, mask, floating};
            const auto covered = checked_block(runs, kind, old);
            pulse::Decoded decoded;
            {
                nb::gil_scoped_release release;
                decoded = pulse::decode_groups(payload.data(), payload.size(), old.data(), kind, covered);
            }
            return decoded_tuple(std::move(decoded));
        },
        array("payload"), array("old"), "width"_a, "shift"_a, "mask"_a, "floating"_a, "runs"_a,
        "(uint32 positions, uint8 bytes of the new elements, of the old ones) of one block; raises Malformed.");
}
