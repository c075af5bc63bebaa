"""What worlds can be made with."""

FOLDS = (2, 4, 8)
"""Spans of folds, small enough for short streams."""

INLINE, STEADY, CONCURRENT = "inline", "steady", "concurrent"
"""How a world's objects run: on the calling thread; on their threads, handed over to in a fixed
order; as they are."""
