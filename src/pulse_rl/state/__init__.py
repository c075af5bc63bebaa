"""A state and what proves it: names, dtypes, bits, the SHA-256 tree, checkpoints (docs/format.md, sections 1 and 2)."""
