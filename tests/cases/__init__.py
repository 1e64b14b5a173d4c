"""The cases of every op: one list per op feeds its tests and its benchmarks."""
