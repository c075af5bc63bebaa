"""Benchmarks of pulse-rl: a recorded real trace, synthetic states, peers' layouts, entropy
bounds."""
