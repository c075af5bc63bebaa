// Python bindings of the `rans` codec.
#include "codecs/table/table.h"
#include "bindings/binding.h"
#include "entropy/rans_states.h"

using namespace binding;

namespace {

pulse::ElementKind checked(int width, int shift, uint32_t mask, bool floating, const Bytes& old) {
    if ((width != 1 && width != 2 && width != 4) || shift < 0 || shift > 31 || mask > 255) {
        throw nb::value_error("width, shift or mask is out of range");
    }
    check_elements(old, width, "old");
    if (old.size() / size_t(width) > kMostElements) throw nb::value_error("the array is too long");
    return {width, shift, mask, floating};
}

void check_pair(const Bytes& old, const Bytes& now, int width) {
    if (now.size() != old.size()) throw nb::value_error("old and new differ in length");
    check_elements(now, width, "new");
}

template <class T>
nb::ndarray<nb::numpy, T, nb::ndim<1>> to_array(pulse::Buffer<T>&& buffer) {
    T* data = buffer.data.release();
    nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<T*>(p); });
    return nb::ndarray<nb::numpy, T, nb::ndim<1>>(data, {buffer.size}, owner);
}

}  // namespace

void bind_rans(nb::module_& m) {
    m.def(
        "rans_encode",
        [](Bytes old, Bytes now, int width, int shift, uint32_t mask, bool floating) {
            const pulse::ElementKind kind = checked(width, shift, mask, floating, old);
            check_pair(old, now, width);
            pulse::Encoded encoded;
            {
                nb::gil_scoped_release release;
                encoded = pulse::encode_steps(old.data(), now.data(), old.size() / size_t(width), kind);
            }
            return nb::make_tuple(nb::bytes(encoded.payload.data(), encoded.payload.size()), encoded.changed);
        },
        array("old"), array("new"), "width"_a, "shift"_a, "mask"_a, "floating"_a,
        "(payload, number of changes) of one block; the payload is empty where nothing changed.");

    m.def(
        "rans_decode",
        [](Bytes payload, Bytes old, int width, int shift, uint32_t mask, bool floating) {
            const pulse::ElementKind kind = checked(width, shift, mask, floating, old);
            pulse::DecodedSteps decoded;
            {
                nb::gil_scoped_release release;
                decoded =
                    pulse::decode_steps(payload.data(), payload.size(), old.data(), old.size() / size_t(width), kind);
            }
            return nb::make_tuple(to_array(std::move(decoded.positions)), to_array(std::move(decoded.values)),
                                  to_array(std::move(decoded.before)));
        },
        array("payload"), array("old"), "width"_a, "shift"_a, "mask"_a, "floating"_a,
        "(uint32 positions, uint8 bytes of the new elements, of the old ones) of one block; raises Malformed.");

    m.def(
        "sampled_spread",
        [](Bytes old, Bytes now, int width) {
            checked(width, 0, 0, false, old);
            check_pair(old, now, width);
            pulse::Spread spread;
            {
                nb::gil_scoped_release release;
                spread = pulse::sampled_spread(old.data(), now.data(), old.size() / size_t(width), width);
            }
            return nb::make_tuple(spread.density, spread.evenness);
        },
        array("old"), array("new"), "width"_a,
        "(density, evenness) of the changes in a sample of at most 2^14 elements; evenness: the share of the bits of their "
        "positions that remains if the density of every 64 elements is known.");

    m.def(
        "use_rans_vectors",
        [](bool use) {
            pulse::rans_vectors = use && pulse::has_rans_vectors();
            return pulse::has_rans_vectors();
        },
        "use"_a, "For tests: whether the rans codec uses AVX-512; whether this processor can.");
}
