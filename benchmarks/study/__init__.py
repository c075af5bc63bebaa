"""The sparsity study: real reinforcement-learning runs, each state compared with those k before
(docs/study.md).

    python -m benchmarks.study [--json FILE] [--only NAME ...]

`settings` lists the runs, `minilm` and `example` carry them out, `recorder` measures, `tables`
prints. `research` adds what the library's study leaves out, by `theory` (the entropy bound, density
by exponent) and `recurrence` (what earlier changes tell of the next ones).
"""
