"""Asynchronous GRPO on a language model that somebody trained: SmolLM2-135M-Instruct learns to add.

``make demo-llm`` starts a trainer and two rollout workers that are joined by nothing but a store,
kills and restarts each, and ends with held-out rewards and equal bits. The processes are those of
`examples.grpo`; read these files in this order:

- `settings`: what can be set
- `model`: the checkpoint, its sampling and the log-probabilities that a loss needs
- `task`: additions, of which some are held out
- `trainer`, `worker`: what differs from those of `examples.grpo`
- `__main__`: progress, the table and the picture at the end
"""
