// Python bindings of the `groups` codec.
#include "binding.h"
#include "groups.h"

using namespace binding;

void bind_groups(nb::module_& m) {
    m.def(
        "groups_encode",
        [](Bytes old, Bytes now, int width, int shift, uint32_t mask, bool floating,
           const std::vector<RunTuple>& runs) {
            const pulse::ElementKind kind{width, shift, mask, floating};
            const auto covered = checked_block(runs, kind, old);
            if (now.size() != old.size()) throw nb::value_error("old and new differ in length");
            check_elements(now, width, "new");
            pulse::EncodedEither found;
            {
                nb::gil_scoped_release release;
                found = pulse::encode_groups(old.data(), now.data(), kind, covered);
            }
            const std::vector<uint8_t>& payload = found.encoded.payload;
            return nb::make_tuple(nb::bytes(payload.data(), payload.size()), found.by_groups,
                                  to_numpy(std::move(found.positions)), to_numpy(std::move(found.values)));
        },
        array("old"), array("new"), "width"_a, "shift"_a, "mask"_a, "floating"_a, "runs"_a,
        "(payload, whether it is of the groups codec, else of the context codec, uint32 positions and uint8 bytes of the new "
        "elements, as they were found) of one block.");

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
