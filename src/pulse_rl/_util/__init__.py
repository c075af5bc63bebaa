"""What every layer may use: threads, files, zstd, units. Knows nothing of weights."""
