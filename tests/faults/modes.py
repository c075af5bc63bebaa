"""What worlds can be made with."""

#: Spans of folds, small enough for short streams.
FOLDS = (2, 4, 8)

#: How a world's objects run: on the calling thread; on their threads, handed over to in a fixed
#: order; as they are.
INLINE, STEADY, CONCURRENT = "inline", "steady", "concurrent"
