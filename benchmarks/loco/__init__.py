"""The evidence for PULSELoCo: what is learnt, what is sent and how long it takes, beside DDP,
DiLoCo and SparseLoCo.

    python -m benchmarks.loco [--only PART ...] [--quick] [--json FILE]

Rounds are timed on links among four processes: with root, in network namespaces of their own, at
10, 100 and 1,000 Mbit/s. Learning is measured among threads of one process. Read the files in this
order:

- `methods`: the methods by name; `baselines`: those that the library does not have
- `tasks`: what is trained: real pretrained weights, or the policy of examples/grpo
- `threads`: any number of trainers in one process; `learning`: the runs, `tables`: what they say
  together
- `recorded`: the inner steps that are replayed where rounds are timed; `links`: bytes and seconds
  by method and link
- `jobs`: what a trainer process is asked to do, and what it answers; `trainer`: that process;
  `processes` starts four
- `absent`: trainers that are late or away; `many`: rounds over a store among many; `processor`: a
  folder beside gloo
"""
