"""A night of incidents: real processes around an S3-compatible store, and a count of what a person
had to do. See ``python -m benchmarks.night --help``."""
