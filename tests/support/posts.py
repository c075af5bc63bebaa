"""Posts for rounds over a store that no trainer has written."""

from __future__ import annotations

from hashlib import sha256

import numpy as np

from pulse_rl import Signer
from pulse_rl.loco.messages import Sent
from pulse_rl.loco.round_posts import RoundPosts
from pulse_rl.loco.store_format import HEAD_BYTES, RoundKey, write_head
from pulse_rl.loco.store_rounds import StoreRounds


def post_of(place: RoundKey, message: bytes, signer: Signer | None = None) -> bytes:
    return write_head(place, sha256(message).digest(), signer) + message


def digest_of(data: bytes) -> str:
    """In a post's name."""
    return sha256(data[:HEAD_BYTES]).hexdigest()


def posts_of(meeting: StoreRounds) -> RoundPosts:
    """Those of the round under way."""
    return meeting._round_posts()


def not_finite(meeting: StoreRounds) -> bytes:
    """A message that is whole but for values that are NaN."""
    posts = posts_of(meeting)
    entry = np.zeros(1, np.uint32), np.full(1, np.nan, np.float32)
    return posts.coder.encode(posts.units, Sent([entry for _ in posts.units]))
