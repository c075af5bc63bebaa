"""A fleet on one machine: two policies trained together by sharded trainers, followed in two
regions behind slow links.

`settings` says what there is, `links` are what a region's processes have of the origin, `policies`
are the solver and the verifier, `trainer` is a rank of one of them, `worker` generates with both,
`relay` keeps a region's store, and ``python -m examples.fleet`` starts, kills, cuts, compares and
shows it all. The model, the task and what the programs share are those of `examples.grpo`.
"""
