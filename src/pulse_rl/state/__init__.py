"""A state and what proves it: names, dtypes, bits, casts, the SHA-256 tree, checkpoints (docs/format.md, 1 and 2)."""
