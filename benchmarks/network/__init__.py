"""Weight sync over a shaped network on one machine: full syncs, the paper's codec and ours, beside the planner.

    sudo python -m benchmarks.network [--quick] [--json FILE]

A trainer, an S3-compatible store and four workers, each in a network namespace of its own; the workers are behind links
of 10, 50, 200 and 1000 Mbit/s, the trainer behind one of 1 Gbit/s. Read the files in this order:

- `shape`: the namespaces, the links, and how they are taken down again
- `run`: starting the programs, what they share, their logs
- `methods`: full syncs and patches behind one face
- `replay`: a recorded run in real time, where nothing but the links differs
- `table`: what the logs say, and the plan beside it
"""
