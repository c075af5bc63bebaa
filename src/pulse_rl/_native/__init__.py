"""The C++17 kernels (src/native), which release the GIL while they work. Everything else imports them from here."""

from __future__ import annotations

from ._kernels import (
    Malformed,
    add_entries,
    context_decode,
    context_encode,
    decode_entries,
    encode_entries,
    gate,
    gather,
    outer_step,
    round_values,
    scan,
    scatter,
    sha256_changed_leaves,
    sha256_leaves,
    sha256_messages,
    sha256_paths,
    use_vectors,
)

__all__ = [
    "Malformed",
    "add_entries",
    "context_decode",
    "context_encode",
    "decode_entries",
    "encode_entries",
    "gate",
    "gather",
    "outer_step",
    "round_values",
    "scan",
    "scatter",
    "sha256_changed_leaves",
    "sha256_leaves",
    "sha256_messages",
    "sha256_paths",
    "use_vectors",
]
