// Python bindings of the codecs of blocks, and of what a history keeps.
#include "bindings/binding.h"
#include "codecs/block.h"
#include "common/apply.h"
#include "common/vectors.h"

using namespace binding;

namespace {

using KindTuple = std::tuple<int, int, uint32_t, bool>;
using RunTuple = std::tuple<uint64_t, uint64_t, uint64_t>;
constexpr uint64_t kMostElements = uint64_t(1) << 24;

pulse::ElementKind checked_kind(const KindTuple& of) {
    const auto& [width, shift, mask, floating] = of;
    if ((width != 1 && width != 2 && width != 4) || shift < 0 || shift > 31 || mask > 255) {
        throw nb::value_error("width, shift or mask is out of range");
    }
    return {width, shift, mask, floating};
}

std::vector<pulse::Window> checked_windows(const std::vector<Bytes>& windows) {
    if (windows.size() > pulse::kMaxWindows) throw nb::value_error("too many windows");
    std::vector<pulse::Window> result;
    for (const Bytes& records : windows) {
        if (records.size() % pulse::kRecordBytes)
            throw nb::value_error("records have four bytes each");
        result.push_back({records.data(), records.size()});
    }
    return result;
}

// What both sides know of a block.
struct Known {
    pulse::ElementKind kind;
    std::vector<pulse::Window> history;
    std::vector<pulse::Run> runs;  // they cover its elements

    Known(const std::vector<Bytes>& windows, const KindTuple& of, const std::vector<RunTuple>& all,
          const Bytes& old)
        : kind(checked_kind(of)), history(checked_windows(windows)) {
        check_elements(old, kind.width, "old");
        uint64_t total = 0;
        for (const auto& [count, row, phase] : all) {
            if (count > kMostElements || row == 0 || row > (uint64_t(1) << 48) || phase >= row) {
                throw nb::value_error("a run is out of range");
            }
            total += count;
            runs.push_back({count, row, phase});
        }
        if (total > kMostElements || total != old.size() / size_t(kind.width)) {
            throw nb::value_error("the runs do not cover the array");
        }
    }
};

nb::tuple decoded_tuple(pulse::Decoded&& decoded) {
    return nb::make_tuple(to_numpy(std::move(decoded.positions)),
                          to_numpy(std::move(decoded.values)), to_numpy(std::move(decoded.before)));
}

}  // namespace

void bind_codecs(nb::module_& m) {
    m.def(
        "encode_block",
        [](const std::vector<Bytes>& history, Bytes old, Bytes now, const KindTuple& kind,
           const std::vector<RunTuple>& runs, bool prove, int only) {
            const Known known(history, kind, runs, old);
            if (now.size() != old.size()) throw nb::value_error("old and new differ in length");
            check_elements(now, known.kind.width, "new");
            pulse::EncodedBlock made = without_gil([&] {
                return pulse::encode_block(known.history, old.data(), now.data(), known.kind,
                                           known.runs, prove, pulse::BlockCodec(only));
            });
            nb::object found = nb::none(), decoded = nb::none();
            if (made.codec != pulse::BlockCodec::table) {
                found = nb::make_tuple(to_numpy(std::move(made.positions)),
                                       to_numpy(std::move(made.values)));
            }
            if (prove && made.codec == pulse::BlockCodec::history)
                decoded = decoded_tuple(std::move(made.decoded));
            return nb::make_tuple(int(made.codec),
                                  nb::bytes(made.payload.data(), made.payload.size()), made.changed,
                                  found, decoded);
        },
        "history"_a, array("old"), array("new"), "kind"_a, "runs"_a, "prove"_a = false,
        "only"_a = 0,
        "(id of the codec, payload, number of changes, (uint32 positions, uint8 bytes of the new elements) as they were "
        "found or None, what decode_block would return or None) of one block.");

    m.def(
        "decode_block",
        [](int codec, const std::vector<Bytes>& history, Bytes payload, Bytes old,
           const KindTuple& kind, const std::vector<RunTuple>& runs) {
            const Known known(history, kind, runs, old);
            return decoded_tuple(without_gil([&] {
                return pulse::decode_block(pulse::BlockCodec(codec), known.history, payload.data(),
                                           payload.size(), old.data(), known.kind, known.runs);
            }));
        },
        "codec"_a, "history"_a, array("payload"), array("old"), "kind"_a, "runs"_a,
        "(uint32 positions, uint8 bytes of the new elements, of the old ones) of one block; raises Malformed.");

    m.def(
        "history_records",
        [](Positions positions, Bytes old, Bytes now, const KindTuple& of) {
            const pulse::ElementKind kind = checked_kind(of);
            check_elements(positions, "positions");
            check_elements(old, kind.width, "old");
            check_elements(now, kind.width, "new");
            if (old.size() != now.size() || old.size() != positions.size() * size_t(kind.width)) {
                throw nb::value_error("old, new and positions differ in length");
            }
            if (!pulse::all_ascending(positions.data(), positions.size(), 0, SIZE_MAX))
                throw nb::value_error("positions do not ascend");
            return to_numpy(without_gil([&] {
                return pulse::records_of(positions.data(), positions.size(), old.data(), now.data(),
                                         kind);
            }));
        },
        array("positions"), array("old"), array("new"), "kind"_a,
        "What changed in one version, as a window keeps it: four bytes for each change.");

    m.def("use_vectors", &pulse::use_vectors, "use"_a,
          "For tests: whether AVX-512 is used where this processor has it.");
}
