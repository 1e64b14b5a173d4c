"""CUDA graphs: capture and replay, a record of what a graph depends on, and whole steps as one graph.

A graph holds addresses and the decisions that Python made during capture. `Watch` records what those
decisions read from a tree of modules, so that a graph is dropped if any of it changes.
"""

from tigon.graphs.backend import backends, live
from tigon.graphs.step import GraphStep, graph_step

__all__ = ["GraphStep", "backends", "graph_step", "live"]
