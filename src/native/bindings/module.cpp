// Python bindings of the codec's kernels. Every function takes flat, contiguous arrays and releases the GIL while it works.
#include <algorithm>

#include "bindings/binding.h"
#include "common/apply.h"
#include "common/quantize.h"
#include "common/rounding.h"
#include "common/scan.h"

using namespace binding;

namespace {

// What `work`, which touches no Python object, returns, given a zero of the elements' type. The positions, less `base`,
// are inside the elements.
template <class Work>
auto at_positions(const Positions& positions, uint32_t base, size_t bytes, int width, Work&& work) {
    nb::gil_scoped_release release;
    if (!pulse::all_within(positions.data(), positions.size(), base, bytes / size_t(width))) {
        throw nb::index_error("a position is outside the tensor");
    }
    return pulse::for_any_width(width, work);
}

// An array of elements, and values for some of them.
template <class Array>
void check_values(const Array& elements, int width, const Positions& positions,
                  const Bytes& values) {
    check_elements(elements, width, "elements");
    check_elements(values, width, "values");
    check_elements(positions, "positions");
    if (values.size() != positions.size() * size_t(width))
        throw nb::value_error("values and positions differ");
}

using BlocksTuple = std::tuple<uint64_t, uint64_t, uint64_t>;

// Blocks of (columns, rows of a block, columns of a block), of elements of FP32 or BF16.
pulse::Blocks checked_blocks(const BlocksTuple& of, const Bytes& elements, int width) {
    if (width != 2 && width != 4) throw nb::value_error("width is out of range");
    check_elements(elements, width, "elements");
    const auto& [columns, block_rows, block_columns] = of;
    if (std::min({columns, block_rows, block_columns}) == 0)
        throw nb::value_error("blocks without elements");
    return {size_t(columns), size_t(block_rows), size_t(block_columns)};
}

}  // namespace

NB_MODULE(_kernels, m) {
    nb::exception<pulse::Malformed>(m, "Malformed", PyExc_ValueError);

    m.def(
        "scan",
        [](Bytes old, Bytes now, int width) {
            check_elements(old, width, "old");
            check_elements(now, width, "new");
            if (now.size() != old.size()) throw nb::value_error("old and new differ in length");
            if (old.size() / size_t(width) > UINT32_MAX)
                throw nb::value_error("the array is too long");
            return to_numpy(without_gil([&] {
                std::vector<uint32_t> positions;
                pulse::differing(old.data(), now.data(), old.size(), width, 0, positions);
                return positions;
            }));
        },
        array("old"), array("new"), "width"_a,
        "The uint32 positions at which the elements of two arrays differ.");

    m.def(
        "gather",
        [](Bytes elements, int width, Positions positions, uint32_t base) {
            check_elements(elements, width, "elements");
            check_elements(positions, "positions");
            return to_numpy(at_positions(positions, base, elements.size(), width, [&](auto zero) {
                using U = decltype(zero);
                std::vector<uint8_t> out(positions.size() * sizeof(U));
                pulse::gather(reinterpret_cast<const U*>(elements.data()), positions.data(),
                              positions.size(), base, reinterpret_cast<U*>(out.data()));
                return out;
            }));
        },
        array("elements"), "width"_a, array("positions"), "base"_a,
        "The bytes of the elements at positions - base.");

    m.def(
        "holds",
        [](Bytes elements, int width, Positions positions, uint32_t base, Bytes values) {
            check_values(elements, width, positions, values);
            return at_positions(positions, base, elements.size(), width, [&](auto zero) {
                using U = decltype(zero);
                return pulse::holds(reinterpret_cast<const U*>(elements.data()), positions.data(),
                                    positions.size(), base,
                                    reinterpret_cast<const U*>(values.data()));
            });
        },
        array("elements"), "width"_a, array("positions"), "base"_a, array("values"),
        "Whether the elements at positions - base are the values.");

    m.def(
        "scatter",
        [](MutableBytes elements, int width, Positions positions, uint32_t base, Bytes values) {
            check_values(elements, width, positions, values);
            at_positions(positions, base, elements.size(), width, [&](auto zero) {
                using U = decltype(zero);
                pulse::scatter(reinterpret_cast<U*>(elements.data()), positions.data(),
                               positions.size(), base, reinterpret_cast<const U*>(values.data()));
            });
        },
        array("elements"), "width"_a, array("positions"), "base"_a, array("values"),
        "Writes values at positions - base, in place.");

    m.def(
        "round_values",
        [](Bits32 bits, const RoundingTuple& rounding, uint32_t nan, int width, MutableBytes out) {
            const auto checked = checked_rounding(rounding);
            if (width != 1 && width != 2) throw nb::value_error("width is out of range");
            if (std::max(pulse::Rounder(checked).beyond(), nan) >> (8 * width - 1)) {
                throw nb::value_error("the numbers do not fit the width");
            }
            check_elements(bits, "bits");
            check_elements(out, width, "out");
            if (out.size() != bits.size() * size_t(width))
                throw nb::value_error("bits and out differ in length");
            nb::gil_scoped_release release;
            pulse::round_values(bits.data(), bits.size(), checked, nan, width, out.data());
        },
        array("bits"), "rounding"_a, "nan"_a, "width"_a, array("out"),
        "FP32 numbers, given by their bits, rounded to a narrower float; a NaN gets the bits `nan` besides its own.");

    m.def(
        "block_maxima",
        [](Bytes elements, int width, const BlocksTuple& of) {
            const pulse::Blocks blocks = checked_blocks(of, elements, width);
            const size_t rows = elements.size() / size_t(width) / blocks.columns;
            if (rows * blocks.columns * size_t(width) != elements.size())
                throw nb::value_error("a row is cut");
            return to_numpy(without_gil([&] {
                std::vector<float> found((rows + blocks.block_rows - 1) / blocks.block_rows *
                                         blocks.across());
                pulse::block_maxima(elements.data(), width, rows, blocks, found.data());
                return found;
            }));
        },
        array("elements"), "width"_a, "blocks"_a,
        "The largest magnitudes of the blocks of whole rows.");

    m.def(
        "to_e4m3",
        [](Bytes elements, int width, uint64_t start, const BlocksTuple& of, Floats scales,
           MutableBytes out) {
            const pulse::Blocks blocks = checked_blocks(of, elements, width);
            const size_t count = elements.size() / size_t(width);
            if (out.size() != count) throw nb::value_error("elements and out differ in length");
            if (start > uint64_t(1) << 50) throw nb::value_error("start is out of range");
            const size_t rows = (size_t(start) + count + blocks.columns - 1) / blocks.columns;
            if (scales.size() <
                (rows + blocks.block_rows - 1) / blocks.block_rows * blocks.across()) {
                throw nb::value_error("there are too few scales");
            }
            nb::gil_scoped_release release;
            pulse::to_e4m3(elements.data(), width, size_t(start), count, blocks, scales.data(),
                           out.data());
        },
        array("elements"), "width"_a, "start"_a, "blocks"_a, array("scales"), array("out"),
        "Elements from `start` on, divided by the scales of their blocks, as E4M3.");

    m.def(
        "to_e2m1",
        [](Bytes elements, int width, const BlocksTuple& of, Floats scales, MutableBytes out) {
            const pulse::Blocks blocks = checked_blocks(of, elements, width);
            const bool along = blocks.block_columns == 16 || blocks.block_columns == 32;
            if (along ? blocks.block_rows != 1 || blocks.columns != blocks.block_columns
                      : blocks.block_rows % 2 || blocks.block_columns != 1) {
                throw nb::value_error("the blocks are neither groups of a row nor of a column");
            }
            const size_t count = elements.size() / size_t(width),
                         band = blocks.columns * blocks.block_rows;
            if (count % band) throw nb::value_error("a block is cut");
            if (2 * out.size() != count) throw nb::value_error("elements and out differ in length");
            if (scales.size() < count / band * blocks.across())
                throw nb::value_error("there are too few scales");
            nb::gil_scoped_release release;
            pulse::to_e2m1(elements.data(), width, count / blocks.columns, blocks, scales.data(),
                           out.data());
        },
        array("elements"), "width"_a, "blocks"_a, array("scales"), array("out"),
        "Elements divided by the scales of their blocks, as E2M1, two a byte.");

    bind_codecs(m);
    bind_sha256(m);
    bind_loco(m);
}
