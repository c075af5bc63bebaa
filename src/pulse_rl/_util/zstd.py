"""zstd with a bound on every decode: a 13-byte frame that claims terabytes must not allocate
them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from ..errors import FormatError

if TYPE_CHECKING or sys.version_info < (3, 14):
    from backports import zstd
else:
    from compression import zstd


def compress(data: bytes | memoryview, level: int) -> bytes:
    """One zstd frame without a checksum: every caller covers its bytes with SHA-256."""
    return zstd.compress(data, level)


def decompress(data: bytes | memoryview, size: int) -> bytes:
    """The content of exactly one zstd frame, which must have ``size`` bytes; raises FormatError."""
    decoder = zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: 27})
    try:
        content = decoder.decompress(data, size + 1)
    except zstd.ZstdError as error:
        raise FormatError(f"not a zstd frame: {error}") from None
    if len(content) != size or not decoder.eof or decoder.unused_data:
        raise FormatError(f"the zstd frame does not hold the {size} bytes it should")
    return content
