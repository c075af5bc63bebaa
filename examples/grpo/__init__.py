"""Asynchronous GRPO on arithmetic: one trainer, two rollout workers, joined by nothing but a store.

``python -m examples.grpo`` trains a small Qwen2 from random weights, first supervised, then by
reinforcement learning, while its workers follow through verified sparse patches. Read the files in
this order:

- `settings`: what can be set
- `task`, `policy`, `grpo`: the arithmetic, the model with its FP32 masters, the two losses
- `rollouts`: what a worker sends to the trainer, and when the trainer refuses it
- `trainer`, `worker`: the two programs that meet in the store
- `__main__`: starting the three processes, and showing what they do
- `run`: settings, places, journals and processes of a run, also of `examples.loco` and
  `examples.fleet`
"""
