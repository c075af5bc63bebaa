"""GRPO by four trainers and two rollout workers: PULSELoCo between the trainers, PULSESync to the
workers.

``python -m examples.loco`` (``make demo-loco``) starts four trainers with ``torchrun``. Each trains
an FP32 model on rollouts of its own with its own Adam; every ``sync_every`` inner steps one outer
round inside ``optimizer.step()`` brings them to the same global weights. Only then rank 0
publishes them, in BF16, to a store that is a folder. Two workers follow it, and put rollouts for
the trainers into the same store. At the end the roots of all six models are compared.

What PULSELoCo changes in a training loop is one line, ``with PulseLoCo(...)``, in `trainer`. A
trainer that is killed (``--kill trainer-2@5``) does no harm: ``torchrun`` starts the trainers
again, each takes up its own checkpoint, and the meeting at the start of ``with`` finds the latest
round that they have in common.

Read the files in this order; task, policy, losses, rollouts, workers and processes are those of
`examples.grpo`:

- `settings`: what can be set
- `trainer`, `worker`: the two programs
- `__main__`: starting the processes, and showing what they do
- `anywhere` (``make demo-loco-anywhere``): trainers of a small network that meet in a store in
  place of a process group
"""
