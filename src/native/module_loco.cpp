// Python bindings of PULSELoCo's kernels: flat FP32 arrays, the GIL released while they work.
#include <nanobind/stl/optional.h>

#include <optional>

#include "apply.h"
#include "binding.h"
#include "entries.h"
#include "gate.h"
#include "outer_step.h"

using namespace binding;

namespace {

using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using MutableFloats = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Arrays of `count` numbers each.
template <class... Arrays>
void check_arrays(size_t count, const Arrays&... arrays) {
    if (((arrays.size() != count) || ...)) throw nb::value_error("the arrays differ in length");
    (check_elements(arrays, "an array"), ...);
}

}  // namespace

void bind_loco(nb::module_& m) {
    m.def(
        "gate",
        [](Floats theta, Floats start, Floats now, Floats residual, MutableFloats s, const RoundingTuple& rounding,
           uint32_t base) -> std::optional<nb::ndarray<nb::numpy, uint32_t, nb::ndim<1>>> {
            const auto checked = checked_rounding(rounding);
            const size_t count = theta.size();
            check_arrays(count, theta, start, now, residual, s);
            if (uint64_t(base) + count > UINT32_MAX) throw nb::value_error("the array is too long");
            std::vector<uint32_t> open;
            bool finite;
            {
                nb::gil_scoped_release release;
                finite = pulse::gate(theta.data(), start.data(), now.data(), residual.data(), s.data(), count, checked,
                                     base, open);
            }
            if (!finite) return std::nullopt;
            return to_numpy(std::move(open));
        },
        array("theta"), array("start"), array("now"), array("residual"), array("s"), "rounding"_a, "base"_a,
        "s = (start - now) + residual; the positions, plus base, where theta and theta - s round differently; None if a "
        "pseudo-gradient is not finite, or 2^64 or more.");

    m.def(
        "encode_entries",
        [](Floats theta, Floats momentum, const RoundingTuple& rounding, const std::vector<RunTuple>& runs,
           Positions positions, Floats values, bool bf16) {
            const auto covered = checked_runs(runs, theta.size());
            const auto checked = checked_rounding(rounding);
            check_arrays(theta.size(), theta, momentum);
            check_arrays(positions.size(), positions, values);
            std::vector<uint8_t> payload;
            {
                nb::gil_scoped_release release;
                for (size_t i = 0; i < positions.size(); i++) {
                    if (positions.data()[i] >= theta.size() || (i && positions.data()[i] <= positions.data()[i - 1])) {
                        throw nb::index_error("the positions do not ascend within the block");
                    }
                }
                payload = pulse::encode_entries({theta.data(), momentum.data(), checked, covered}, positions.data(),
                                                values.data(), positions.size(), bf16);
            }
            return nb::bytes(payload.data(), payload.size());
        },
        array("theta"), array("momentum"), "rounding"_a, "runs"_a, array("positions"), array("values"), "bf16"_a,
        "The payload of one block; runs are (elements, row, phase).");

    m.def(
        "decode_entries",
        [](const std::vector<Bytes>& payloads, Floats theta, Floats momentum, const RoundingTuple& rounding,
           const std::vector<RunTuple>& runs, bool bf16) {
            const auto covered = checked_runs(runs, theta.size());
            const auto checked = checked_rounding(rounding);
            check_arrays(theta.size(), theta, momentum);
            std::vector<std::pair<const uint8_t*, size_t>> views;
            for (const Bytes& payload : payloads) views.emplace_back(payload.data(), payload.size());
            std::vector<pulse::Entries> decoded;
            {
                nb::gil_scoped_release release;
                decoded = pulse::decode_entries({theta.data(), momentum.data(), checked, covered}, views, bf16);
            }
            nb::list results;
            for (pulse::Entries& entries : decoded) {
                results.append(
                    nb::make_tuple(to_numpy(std::move(entries.positions)), to_numpy(std::move(entries.values))));
            }
            return results;
        },
        array("payloads"), array("theta"), array("momentum"), "rounding"_a, "runs"_a, "bf16"_a,
        "(uint32 positions, FP32 values) of one block for each payload; raises Malformed.");

    m.def(
        "add_entries",
        [](MutableFloats total, Positions positions, Floats values) {
            check_arrays(positions.size(), positions, values);
            check_elements(total, "total");
            nb::gil_scoped_release release;
            if (!pulse::all_within(positions.data(), positions.size(), 0, total.size())) {
                throw nb::index_error("a position is outside the block");
            }
            for (size_t i = 0; i < positions.size(); i++) total.data()[positions.data()[i]] += values.data()[i];
        },
        array("total"), array("positions"), array("values"),
        "total[positions] += values, in place; the positions are unique.");

    m.def(
        "outer_step",
        [](MutableFloats theta, MutableFloats momentum, Floats total, float trainers, float lr, float mu) {
            check_arrays(theta.size(), theta, momentum, total);
            nb::gil_scoped_release release;
            pulse::outer_step(theta.data(), momentum.data(), total.data(), theta.size(), trainers, lr, mu);
        },
        array("theta"), array("momentum"), array("total"), "trainers"_a, "lr"_a, "mu"_a,
        "Nesterov SGD on total / trainers, in place.");
}
