"""A fleet on one machine: two policies trained together by sharded trainers, followed in two regions behind slow links.

`settings` says what there is, `namespaces` makes the regions, `links` are what their processes have of the origin,
`origin` is the origin's side of that, `policies` are the solver and the verifier, `batches` what goes from workers to
trainers, `trainer` is a rank of one of them, `worker` generates with both, `relay` keeps a region's store, `table`
shows it all, and ``python -m examples.fleet`` starts, kills, cuts and compares.
"""
