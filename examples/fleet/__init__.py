"""A fleet on one machine: two policies trained together by sharded trainers, followed in two regions behind slow links.

`settings` says what there is, `links` makes the links slow and cuts them, `policies` are the solver and the verifier,
`trainer` is a rank of one of them, `worker` generates with both, `relay` keeps a region's store, `table` shows it all,
and ``python -m examples.fleet`` starts, kills, cuts and compares.
"""
