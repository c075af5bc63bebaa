"""The codecs of blocks one by one, which the library chooses between by itself."""

from __future__ import annotations

from dataclasses import dataclass

from pulse_rl import codec
from pulse_rl.codec import Changes, Layout, Run
from pulse_rl.state.bits import UIntArray
from pulse_rl.state.tensors import DType


def flat_layout(dtype: DType, elements: int) -> Layout:
    """The layout of a block that is one 1-D tensor."""
    return Layout(dtype, (Run(elements, max(elements, 1), 0),))


@dataclass(frozen=True)
class BlockCodec:
    name: str
    id: int

    def supports(self, dtype: DType) -> bool:
        return dtype.width <= 4 or self.id in (codec.RAW, codec.PAPER)

    def encode(self, old: UIntArray, new: UIntArray, layout: Layout) -> tuple[bytes, int]:
        """(payload, number of changes), whether or not another codec is smaller. ``HISTORY``
        asserts that it helps."""
        if self.id == codec.RAW:
            return codec._encode_raw(new), int((old != new).sum())
        if self.id == codec.PAPER:
            return codec._encode_paper(old, new)
        made = codec.encode_block(old, new, layout, only=self.id)
        assert made.codec_id in (self.id, codec.SAME)
        return made.payload, made.changed

    def decode(self, payload: memoryview, old: UIntArray, layout: Layout) -> Changes:
        return codec.decode_block(self.id, payload, old, layout)


RAW, ZSTD, SPARSE, TABLE, HISTORY, GAPS = ALL = tuple(
    BlockCodec(name, codec_id)
    for name, codec_id in (
        ("raw", codec.RAW),
        ("zstd", codec.PAPER),
        ("sparse", codec.SPARSE),
        ("table", codec.TABLE),
        ("history", codec.HISTORY),
        ("gaps", codec.GAPS),
    )
)
BY_NAME = {chosen.name: chosen for chosen in ALL}


def history_encode(old: UIntArray, new: UIntArray, layout: Layout) -> tuple[bytes, int] | None:
    """None where the past does not help."""
    made = codec.encode_block(old, new, layout, only=codec.HISTORY)
    return (made.payload, made.changed) if made.codec_id == codec.HISTORY else None
