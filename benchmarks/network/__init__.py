"""Weight sync over a long way on one machine: patches, the paper's codec, full syncs and rsync,
beside the planner.

    sudo python -m benchmarks.network [--quick] [--save] [--congestion bbr]

Read the files in this order:

- `regions`: two regions, and what the logs say
- `shape`: network namespaces, and how they are taken down again
- `carrier`: links that delay and lose packets; `benchmarks.loco` has its links from here, too
- `run`: starting the programs, what they share, their logs
- `methods`: full syncs, patches and rsync behind one face
- `replay`: a recorded run in real time
"""
