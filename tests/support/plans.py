"""What plans predict, and what they are given."""

from typing import Any

METHODS = ("full", "zstd", "auto", "history")

#: The least that a plan needs of a study; k = 1 is not the first row.
STUDY: dict[str, Any] = {
    "parameters": 1_000_000,
    "dense_bytes": 2_000_000,
    "rows": [
        {"k": 8, "sparsity": 0.98, "bytes_per_changed": 0.7, "bytes_per_changed_zstd": 2.5},
        {"k": 1, "sparsity": 0.99, "bytes_per_changed": 0.5, "bytes_per_changed_zstd": None},
    ],
}
