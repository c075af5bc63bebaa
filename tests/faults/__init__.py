"""Random sequences of faults against an exact model: nothing committed is lost, nothing wrong is
ever exposed."""
