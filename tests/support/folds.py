"""The links of folds as anybody can write them (docs/format.md, section 6)."""

from __future__ import annotations

from hashlib import sha256


def fold_link(
    stream: str, base: int, version: int, *files: tuple[str, int], nbytes: int = 0
) -> tuple[str, bytes]:
    """The name and the content of an unsigned link that lists ``files``, (SHA-256, bytes) each;
    ``nbytes`` more than these are in its name."""
    listed = "".join(f"{digest} {length}\n" for digest, length in files).encode()
    total = sum(length for _, length in files) + nbytes
    return (
        f"{stream}/links/{version:012d}-{base:012d}-{total:015d}-{sha256(listed).hexdigest()}",
        listed,
    )
