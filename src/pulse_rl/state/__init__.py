"""A state and its digest: names, dtypes, bits, casts, the SHA-256 tree, checkpoints
(docs/format.md, 1 and 2)."""
