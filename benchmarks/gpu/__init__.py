"""Everything that needs a GPU, or many cores, in at most twelve minutes.

- `__main__`: the rows, each a process with a limit of its own; the file of results; the table
- `measures`: what a row measures
- `kit`: ``make gpu-kit``, a folder that brings all of it to a machine without a network
"""
