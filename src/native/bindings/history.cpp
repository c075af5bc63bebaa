// Python bindings of the `history` codec, and of what it knows of the versions before.
#include "codecs/history/history.h"
#include "bindings/binding.h"

using namespace binding;

namespace {

using StretchTuple = std::tuple<Bytes, uint32_t>;
constexpr uint32_t kMostSpan = 1 << 20;

std::vector<pulse::Stretch> checked_stretches(const std::vector<StretchTuple>& stretches) {
    if (stretches.size() > pulse::kMostStretches) throw nb::value_error("too many stretches");
    std::vector<pulse::Stretch> result;
    for (const auto& [records, span] : stretches) {
        if (span == 0 || span > kMostSpan) throw nb::value_error("a span is out of range");
        if (records.size() % pulse::kRecordBytes) throw nb::value_error("records have four bytes each");
        result.push_back({records.data(), records.size(), span});
    }
    return result;
}

}  // namespace

void bind_history(nb::module_& m) {
    m.def(
        "history_records",
        [](Positions positions, Bytes old, Bytes now, int width, int shift, uint32_t mask, bool floating) {
            const pulse::ElementKind kind{width, shift, mask, floating};
            check_kind(kind);
            check_elements(positions, "positions");
            check_elements(old, width, "old");
            check_elements(now, width, "new");
            if (old.size() != now.size() || old.size() != positions.size() * size_t(width)) {
                throw nb::value_error("old, new and positions differ in length");
            }
            for (size_t i = 1; i < positions.size(); i++) {
                if (positions.data()[i] <= positions.data()[i - 1]) throw nb::value_error("positions do not ascend");
            }
            std::vector<uint8_t> records;
            {
                nb::gil_scoped_release release;
                records = pulse::records_of(positions.data(), positions.size(), old.data(), now.data(), kind);
            }
            return to_numpy(std::move(records));
        },
        array("positions"), array("old"), array("new"), "width"_a, "shift"_a, "mask"_a, "floating"_a,
        "What changed in one version, as a stretch keeps it: four bytes for each change.");

    m.def(
        "history_merged",
        [](const std::vector<StretchTuple>& stretches, uint64_t elements) {
            const auto checked = checked_stretches(stretches);
            if (elements > kMostElements) throw nb::value_error("too many elements");
            std::vector<uint8_t> records;
            {
                nb::gil_scoped_release release;
                records = pulse::merged_records(checked, elements);
            }
            return to_numpy(std::move(records));
        },
        "stretches"_a, "elements"_a, "The records of one stretch in place of several (records, span), oldest first.");

    m.def(
        "history_encode",
        [](const std::vector<StretchTuple>& history, Bytes old, Bytes now, int width, int shift, uint32_t mask,
           bool floating, const std::vector<RunTuple>& runs, bool prove) {
            const pulse::ElementKind kind{width, shift, mask, floating};
            const auto stretches = checked_stretches(history);
            const auto covered = checked_block(runs, kind, old);
            if (now.size() != old.size()) throw nb::value_error("old and new differ in length");
            check_elements(now, width, "new");
            pulse::EncodedByAny found;
            {
                nb::gil_scoped_release release;
                found = pulse::encode_with_history(stretches, old.data(), now.data(), kind, covered, prove);
            }
            constexpr const char* kNames[] = {"context", "groups", "history"};
            const std::vector<uint8_t>& payload = found.encoded.payload;
            nb::object decoded = nb::none();
            if (prove && found.codec == pulse::BlockCodec::history) decoded = decoded_tuple(std::move(found.decoded));
            return nb::make_tuple(nb::bytes(payload.data(), payload.size()), kNames[size_t(found.codec)],
                                  to_numpy(std::move(found.positions)), to_numpy(std::move(found.values)), decoded);
        },
        "history"_a, array("old"), array("new"), "width"_a, "shift"_a, "mask"_a, "floating"_a, "runs"_a,
        "prove"_a = false,
        "(payload, the name of its codec, uint32 positions and uint8 bytes of the new elements, as they were found) of one "
        "block: of the codecs context, groups or, where it saves enough, history. To prove a payload of that one, it is "
        "decoded: the last item is what history_decode would return; else None.");

    m.def(
        "history_decode",
        [](const std::vector<StretchTuple>& history, Bytes payload, Bytes old, int width, int shift, uint32_t mask,
           bool floating, const std::vector<RunTuple>& runs) {
            const pulse::ElementKind kind{width, shift, mask, floating};
            const auto stretches = checked_stretches(history);
            const auto covered = checked_block(runs, kind, old);
            pulse::Decoded decoded;
            {
                nb::gil_scoped_release release;
                decoded =
                    pulse::decode_with_history(stretches, payload.data(), payload.size(), old.data(), kind, covered);
            }
            return decoded_tuple(std::move(decoded));
        },
        "history"_a, array("payload"), array("old"), "width"_a, "shift"_a, "mask"_a, "floating"_a, "runs"_a,
        "(uint32 positions, uint8 bytes of the new elements, of the old ones) of one block; raises Malformed.");
}
