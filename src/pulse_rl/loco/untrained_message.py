"""What a trainer says of its buffers and frozen parameters in a round (docs/loco.md, section 4.1)."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from ..errors import CorruptMessage

MAGIC = b"PLSU"
_HEADER = struct.Struct("<4sI")
_FIELDS: dict[str, type] = {"common": str, "frozen": dict, "buffers": list, "problem": str}


@dataclass(frozen=True, slots=True)
class UntrainedMessage:
    """``common``: the digest of the common buffers. ``frozen``: the digests of the frozen parameters that have changed
    since the trainers agreed on them (both hexadecimal). ``buffers``: the bits of those that are not the common ones.
    ``problem``: why the trainer cannot go on, or "".
    """

    common: str
    frozen: Mapping[str, str]
    buffers: Mapping[str, bytes]
    problem: str

    def to_bytes(self) -> bytes:
        fields = {
            "common": self.common,
            "frozen": dict(self.frozen),
            "buffers": list(self.buffers),
            "problem": self.problem[:500],
        }
        head = json.dumps(fields).encode()
        return b"".join([_HEADER.pack(MAGIC, len(head)), head, *self.buffers.values()])

    @classmethod
    def parse(cls, data: bytes, lengths: tuple[frozenset[str], Mapping[str, int]]) -> Self:
        """``lengths``: the names of the frozen parameters, and the bytes of each buffer. Raises CorruptMessage."""
        frozen, sizes = lengths
        magic, length = _HEADER.unpack_from(data) if len(data) >= _HEADER.size else (b"", 0)
        if magic != MAGIC or _HEADER.size + length > len(data):
            raise CorruptMessage("not a message about buffers and frozen parameters")
        try:
            fields: Any = json.loads(data[_HEADER.size : _HEADER.size + length])
        except ValueError as error:
            raise CorruptMessage(f"a message about buffers is not JSON: {error}") from None
        if not isinstance(fields, dict) or any(not isinstance(fields.get(k), t) for k, t in _FIELDS.items()):
            raise CorruptMessage(f"a message about buffers lacks one of {', '.join(_FIELDS)}")
        names, at = fields["buffers"], _HEADER.size + length
        known = all(isinstance(name, str) and name in sizes for name in names) and len(set(names)) == len(names)
        digests = all(name in frozen and isinstance(digest, str) for name, digest in fields["frozen"].items())
        if not (known and digests) or at + sum(sizes[name] for name in names) != len(data):
            raise CorruptMessage("a message about buffers does not fit the model")
        buffers = {}
        for name in names:
            buffers[name] = data[at : at + sizes[name]]
            at += sizes[name]
        return cls(fields["common"], fields["frozen"], buffers, fields["problem"])
