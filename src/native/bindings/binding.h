// What both sets of Python bindings share.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "common/rounding.h"
#include "common/types.h"
#include "entropy/payload.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace binding {

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using MutableBytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Bits32 = nb::ndarray<const uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Positions = Bits32;
using RoundingTuple = std::tuple<uint32_t, uint32_t, uint32_t, uint32_t>;

// An array as it is: a converted one would be a copy, and what is written into that is lost.
inline auto array(const char* name) { return nb::arg(name).noconvert(); }

inline void check_width(int width) {
    if (width != 1 && width != 2 && width != 4 && width != 8)
        throw nb::value_error("width is out of range");
}

// The kernels load and store whole elements, at addresses that are multiples of their width.
template <class Array>
void check_elements(const Array& array, int width, const char* name) {
    check_width(width);
    const size_t bytes = array.size() * sizeof(typename Array::Scalar), w = size_t(width);
    const auto refuse = [&](const char* what) {
        throw nb::value_error((std::string(name) + what + std::to_string(w) + " bytes").c_str());
    };
    if (bytes % w != 0) refuse(" is no whole number of elements of ");
    if (bytes != 0 && reinterpret_cast<uintptr_t>(array.data()) % w != 0)
        refuse(" is not aligned to ");
}
template <class Array>
void check_elements(const Array& array, const char* name) {
    check_elements(array, int(sizeof(typename Array::Scalar)), name);
}

inline pulse::Rounding checked_rounding(const RoundingTuple& rounding) {
    const auto& [mantissa, least, most, beyond] = rounding;
    if (mantissa < 1 || mantissa > 22 || least < 1 || least > 254 || most >= 0x7f800000u ||
        beyond > 0x7f800000u) {
        throw nb::value_error("the rounding is out of range");
    }
    return {mantissa, least, most, beyond};
}

// What `work`, which touches no Python object, returns.
template <class Work>
auto without_gil(Work&& work) {
    nb::gil_scoped_release release;
    return work();
}

template <class T>
inline nb::ndarray<nb::numpy, T, nb::ndim<1>> to_numpy(std::vector<T>&& values) {
    auto owned = std::make_unique<std::vector<T>>(std::move(values));
    T* data = owned->data();
    const size_t size = owned->size();
    nb::capsule owner(owned.release(),
                      [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
    return nb::ndarray<nb::numpy, T, nb::ndim<1>>(data, {size}, owner);
}

template <class T>
inline nb::ndarray<nb::numpy, T, nb::ndim<1>> to_numpy(pulse::Buffer<T>&& buffer) {
    T* data = buffer.data.release();
    nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<T*>(p); });
    return nb::ndarray<nb::numpy, T, nb::ndim<1>>(data, {buffer.size}, owner);
}

}  // namespace binding

void bind_codecs(nb::module_& m);
void bind_sha256(nb::module_& m);
void bind_loco(nb::module_& m);
