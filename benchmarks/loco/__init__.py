"""The evidence for PULSELoCo: traffic, convergence and cost of four trainers, beside DDP, DiLoCo and three variants.

    python -m benchmarks.loco [--only traffic cost convergence scaling sites] [--quick] [--json FILE]

Four trainers are four processes on gloo. With root, those of traffic and cost are in network namespaces of their own,
behind links of 1 Gbit/s. Read the files in this order:

- `jobs`: what a trainer is asked to do, and what it answers
- `methods`: the methods by name; `baselines`: those that the library does not have
- `tasks`: what is trained: real pretrained weights, or the policy of examples/grpo
- `trainer`: the process of one trainer; `processes` starts four and sends them jobs
- `traffic`, `convergence`: what is measured among processes, each with its tables
- `threads`: any number of trainers in one process; `ablation`: what is measured among these
"""
