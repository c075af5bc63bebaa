"""What plans predict."""

METHODS = ("full", "zstd", "auto", "history")
