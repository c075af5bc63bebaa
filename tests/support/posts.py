"""Posts for rounds over a store that no trainer has written."""

from __future__ import annotations

from hashlib import sha256

import numpy as np

from pulse_rl import Signer
from pulse_rl.loco.round_posts import RoundPosts
from pulse_rl.loco.store_format import Part, RoundKey, head_bytes, write_head
from pulse_rl.loco.store_rounds import StoreRounds


def post_of(
    place: RoundKey,
    messages: list[bytes],
    signer: Signer | None = None,
    *,
    entries: int = 1,
    squares: float = 1.0,
) -> bytes:
    """With a head that says so of each of them."""
    parts = [Part(len(message), entries, squares, sha256(message).digest()) for message in messages]
    return b"".join([write_head(place, parts, signer), *messages])


def digest_of(data: bytes, shares: int = 1) -> str:
    """In a post's name."""
    return sha256(data[: head_bytes(shares)]).hexdigest()


def posts_of(meeting: StoreRounds) -> RoundPosts:
    """Those of the round under way."""
    return meeting._round_posts()


def not_finite(meeting: StoreRounds) -> list[bytes]:
    """Messages that are whole but for values that are NaN."""
    posts = posts_of(meeting)
    entry = np.zeros(1, np.uint32), np.full(1, np.nan, np.float32)
    return posts.coder.encode_each(posts.shares, [[entry for _ in units] for units in posts.shares])
