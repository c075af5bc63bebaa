"""The evidence for PULSELoCo: traffic, convergence and cost of four trainers, beside DDP, DiLoCo and three variants.

    python -m benchmarks.loco [--only traffic convergence cost scaling] [--quick] [--json FILE] [--plot FILE.png]

Four trainers are four processes on gloo. With root, those of traffic and cost are in network namespaces of their own,
behind links of 1 Gbit/s. Read the files in this order:

- `jobs`: what a trainer is asked to do, and what it answers
- `methods`: the methods by name
- `tasks`: what is trained: real pretrained weights, or the policy of examples/grpo
- `trainer`: the process of one trainer; `processes` starts four and sends them jobs
- `traffic`, `convergence`, `cost`, `scaling`: the four parts, each with its tables; `speed`: one core's GB/s by phase
- commands of their own: `ablation`, what each setting does; `heldout`, what is learnt on pretrained weights;
  `torchft_diloco`, DiLoCo as torchft has it
"""
