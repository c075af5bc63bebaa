"""Deliberate faults in the library, one at a time: each of them must break a promise that `tests.faults` checks."""
