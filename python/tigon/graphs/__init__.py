"""CUDA graphs: what captures and replays, what a captured graph was made of, and whole steps as one.

A graph holds addresses and whatever Python decided while it was captured. `Watch` notes what those decisions
read of a tree of modules, so that a graph is dropped when any of it changes.
"""

from tigon.graphs.backend import backends, live
from tigon.graphs.step import GraphStep, graph_step

__all__ = ["GraphStep", "backends", "graph_step", "live"]
