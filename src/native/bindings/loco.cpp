// Python bindings of PULSELoCo's kernels: flat FP32 arrays, the GIL released while they work.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>

#include <optional>

#include "bindings/binding.h"
#include "common/apply.h"
#include "loco/entries.h"
#include "loco/entry_values.h"
#include "loco/gate.h"
#include "loco/outer_step.h"

using namespace binding;

namespace {

using MutableFloats = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Arrays of `count` numbers each.
template <class... Arrays>
void check_arrays(size_t count, const Arrays&... arrays) {
    if (((arrays.size() != count) || ...)) throw nb::value_error("the arrays differ in length");
    (check_elements(arrays, "an array"), ...);
}

using OctavesTuple = std::tuple<uint8_t, uint8_t>;
using Known = std::optional<std::pair<Bytes, OctavesTuple>>;

pulse::Octaves octaves_of(const OctavesTuple& octaves) {
    return {std::get<0>(octaves), std::get<1>(octaves)};
}

// What is known of a block. `known`: its classes, and the octaves that they are for.
pulse::Shared shared_of(const Floats& theta, const Floats& momentum,
                        const pulse::Rounding& rounding, const Known& known) {
    check_arrays(theta.size(), theta, momentum);
    pulse::Shared shared{theta.data(), momentum.data(), theta.size(), rounding};
    if (known) {
        if (known->first.size() != theta.size())
            throw nb::value_error("the arrays differ in length");
        shared.classes = known->first.data();
        shared.octaves = octaves_of(known->second);
    }
    return shared;
}

void check_mantissa(int mantissa) {
    if (mantissa < 0 || mantissa > pulse::kExact)
        throw nb::value_error("a mantissa has 0 to 23 explicit bits");
}

using MutableCounts = nb::ndarray<int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Summand = std::pair<Positions, Floats>;

std::vector<pulse::Summand> checked_summands(const std::vector<Summand>& summands,
                                             size_t elements) {
    if (elements > UINT32_MAX) throw nb::value_error("the array is too long");
    std::vector<pulse::Summand> checked;
    for (const auto& [positions, values] : summands) {
        check_arrays(positions.size(), positions, values);
        checked.push_back({positions.data(), values.data(), positions.size()});
    }
    return checked;
}

void require_ascending(const std::vector<pulse::Summand>& summands, size_t elements) {
    for (const pulse::Summand& summand : summands) {
        if (!pulse::all_ascending(summand.positions, summand.count, 0, elements))
            throw nb::index_error("the positions do not ascend within the block");
    }
}

}  // namespace

void bind_loco(nb::module_& m) {
    m.def(
        "gate",
        [](Floats theta, Floats now, Floats residual, float lookahead, bool bf16_start,
           MutableFloats s, const RoundingTuple& rounding,
           uint32_t base) -> std::optional<nb::ndarray<nb::numpy, uint32_t, nb::ndim<1>>> {
            const auto checked = checked_rounding(rounding);
            const size_t count = theta.size();
            check_arrays(count, theta, now, residual, s);
            if (uint64_t(base) + count > UINT32_MAX) throw nb::value_error("the array is too long");
            std::vector<uint32_t> open;
            bool finite;
            {
                nb::gil_scoped_release release;
                const pulse::Local local{theta.data(), now.data(), residual.data(), lookahead,
                                         bf16_start};
                finite = pulse::gate(local, s.data(), count, checked, base, open);
            }
            if (!finite) return std::nullopt;
            return to_numpy(std::move(open));
        },
        array("theta"), array("now"), array("residual"), "lookahead"_a, "bf16_start"_a, array("s"),
        "rounding"_a, "base"_a,
        "s = (start - now) + residual with start = theta - lookahead * residual; the positions, plus base, where theta and "
        "theta - s round differently; None if a pseudo-gradient is not finite, or 2^64 or more.");

    m.def(
        "encode_entries",
        [](Floats theta, Floats momentum, const RoundingTuple& rounding, Positions positions,
           Floats values, int mantissa, const Known& known) {
            check_mantissa(mantissa);
            const auto shared = shared_of(theta, momentum, checked_rounding(rounding), known);
            check_arrays(positions.size(), positions, values);
            const auto payload = without_gil([&] {
                require_ascending({{positions.data(), values.data(), positions.size()}},
                                  theta.size());
                return pulse::encode_entries(shared, positions.data(), values.data(),
                                             positions.size(), mantissa);
            });
            return nb::bytes(payload.data(), payload.size());
        },
        array("theta"), array("momentum"), "rounding"_a, array("positions"), array("values"),
        "mantissa"_a, array("known") = nb::none(),
        "The payload of one block, of values with so many explicit bits of mantissa; known: its (classes, octaves).");

    m.def(
        "decode_entries",
        [](const std::vector<Bytes>& payloads, Floats theta, Floats momentum,
           const RoundingTuple& rounding, int mantissa, const Known& known) {
            check_mantissa(mantissa);
            const auto shared = shared_of(theta, momentum, checked_rounding(rounding), known);
            std::vector<std::pair<const uint8_t*, size_t>> views;
            for (const Bytes& payload : payloads)
                views.emplace_back(payload.data(), payload.size());
            nb::list results;
            for (pulse::Entries& entries :
                 without_gil([&] { return pulse::decode_entries(shared, views, mantissa); })) {
                results.append(nb::make_tuple(to_numpy(std::move(entries.positions)),
                                              to_numpy(std::move(entries.values))));
            }
            return results;
        },
        array("payloads"), array("theta"), array("momentum"), "rounding"_a, "mantissa"_a,
        array("known") = nb::none(),
        "(uint32 positions, FP32 values) of one block for each payload; raises Malformed.");

    m.def(
        "sum_entries",
        [](const std::vector<Summand>& summands, size_t elements) {
            const auto checked = checked_summands(summands, elements);
            std::vector<uint32_t> positions;
            std::vector<float> sums;
            {
                nb::gil_scoped_release release;
                require_ascending(checked, elements);
                pulse::sum_entries(checked, elements, positions, sums);
            }
            return nb::make_tuple(to_numpy(std::move(positions)), to_numpy(std::move(sums)));
        },
        array("summands"), "elements"_a,
        "(positions, sums) of what is not 0 in the sum of (positions, values), added in order.");

    m.def(
        "outer_step",
        [](MutableFloats theta, MutableFloats momentum, Floats total, float trainers, float lr,
           float mu) {
            check_arrays(theta.size(), theta, momentum, total);
            nb::gil_scoped_release release;
            pulse::outer_step(theta.data(), momentum.data(), total.data(), theta.size(),
                              {trainers, lr, mu});
        },
        array("theta"), array("momentum"), array("total"), "trainers"_a, "lr"_a, "mu"_a,
        "Nesterov SGD on total / trainers, in place.");

    m.def(
        "sparse_outer_step",
        [](MutableFloats theta, MutableFloats momentum, Floats residual, float lookahead,
           MutableFloats start, size_t from, const std::vector<Summand>& summands, float trainers,
           float lr, float mu, size_t offset, size_t granule, MutableCounts counts,
           const RoundingTuple& rounding, const OctavesTuple& octaves, MutableBytes classes) {
            const auto rounded = checked_rounding(rounding);
            const size_t count = theta.size();
            check_arrays(count, theta, momentum, residual, start, classes);
            const auto checked = checked_summands(summands, UINT32_MAX);
            check_elements(counts, "an array");
            if (count > UINT32_MAX || from > UINT32_MAX || offset > UINT32_MAX || granule == 0 ||
                granule > UINT32_MAX || counts.size() < (offset + count + granule - 1) / granule) {
                throw nb::value_error("the counts are too few");
            }
            nb::gil_scoped_release release;
            pulse::outer_step(theta.data(), momentum.data(), residual.data(), lookahead,
                              start.data(), from, count, checked, {trainers, lr, mu}, offset,
                              granule, counts.data(),
                              {rounded, octaves_of(octaves), classes.data()});
        },
        array("theta"), array("momentum"), array("residual"), "lookahead"_a, array("start"),
        "from_"_a, array("summands"), "trainers"_a, "lr"_a, "mu"_a, "offset"_a, "granule"_a,
        array("counts"), "rounding"_a, "octaves"_a, array("classes"),
        "Nesterov SGD on the sum of those of the summands (positions, values) that lie in the parameters, which begin at "
        "`from`, by ascending positions, / trainers, in place; start = theta - lookahead * residual; counts[(offset + i) // granule] grow by the sums "
        "that are not 0; classes get the parameters' for the octaves.");

    m.def(
        "shared_octaves",
        [](Floats momentum) {
            check_elements(momentum, "momentum");
            nb::gil_scoped_release release;
            const pulse::Octaves octaves = pulse::shared_octaves(momentum.data(), momentum.size());
            return OctavesTuple(octaves.distance, octaves.momentum);
        },
        array("momentum"),
        "The octaves (of distance, of momentum) that a block's momentum suggests for its classes.");
}
