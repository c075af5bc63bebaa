"""A small state, and patch files for it that say what one likes."""

from __future__ import annotations

import struct
from hashlib import sha256

import numpy as np

from pulse_rl import Bits, State
from pulse_rl.codec import compress
from pulse_rl.ops import diff
from pulse_rl.patch.header import BlockEntry, PatchHeader, all_of, check_of
from pulse_rl.state.digest import state_digest

_RAMP = np.arange(2000, dtype=np.uint16)
#: The state that the patches say they are for.
BASE: dict[str, Bits] = {
    "a": Bits(_RAMP.reshape(20, 100) * 33, "BF16"),
    "b": Bits(_RAMP[:64].astype(np.uint64), "U64"),
}


def base() -> State:
    return State.of(BASE)


def changed() -> State:
    """What an honest patch leads to."""
    a, b = BASE["a"].array.copy(), BASE["b"].array.copy()
    a[::3, ::7] ^= 1
    b[5] ^= 1
    return State.of({"a": Bits(a, "BF16"), "b": Bits(b, "U64")})


def varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def framed(
    plain: bytes, body: bytes = b"", *, stored: bytes | None = None, claim: int | None = None
) -> bytes:
    """A patch file around a plain header; ``claim`` is the plain length it speaks of."""
    stored = compress(plain, 9) if stored is None else stored
    claim = len(plain) if claim is None else claim
    check = sha256(stored).digest()[:8]
    return struct.pack("<8sIII8s", b"\x89PULSE\r\n", 1, len(stored), claim, check) + stored + body


#: The slices of a file that holds all of BASE.
ALL = varint(1) + varint(0) + varint(2064)


def plain_header(
    blocks: bytes, *, history: bytes = b"\0", slices: bytes = ALL, root: str = ""
) -> bytes:
    both = bytes.fromhex(root or state_digest(base()).root)
    return both + both + history + slices + blocks


def header_of_many_blocks(root: str = "") -> bytes:
    """A patch file of some hundred bytes for 2^40 elements, in 2^20 blocks that are as they
    were."""
    slices = varint(1) + varint(0) + varint(1 << 40)
    return framed(plain_header(varint(1 << 20) + bytes(1 << 20), slices=slices, root=root))


def with_block(payload: bytes, codec_id: int, count: int, index: int = 0) -> bytes:
    """A well-formed patch for BASE one of whose blocks holds ``payload``. Block 0 is "a" and block
    1 is "b"."""
    digest = state_digest(base())
    entries = [BlockEntry(0, 0, 0), BlockEntry(0, 0, 0)]
    entries[index] = BlockEntry(codec_id, count, len(payload), check_of(payload))
    header = PatchHeader(digest.root, "0" * 64, all_of(base().specs), tuple(entries))
    return header.to_bytes() + payload


def honest() -> bytes:
    return diff.build_patch(base(), changed(), state_digest(base()), threads=1).to_bytes()
