"""A stand-in for CUDA graphs: replays by running the captured function again on the same tensors.

Memory that graphs of one pool share is poisoned where a replay on a GPU might write: whoever reads a stale
gradient reads NaN.
"""

import contextlib

import torch

from tigon import graphs


class Graph:
    def __init__(self, fn, results, owned):
        self.fn, self.results, self.owned = fn, results, owned


class Recorder:
    """`tigon.graphs.CudaBackend` of tests."""

    made: list["Recorder"] = []
    fail: BaseException | None = None
    inside = False
    times = None  # what the clock shows, an iterator
    left = False  # whether a warm-up leaves something
    keep: list[torch.Tensor] = []  # what captured functions write, and a capture does not

    def __init__(self, device):
        self.device, self.lent, self.captures, self.replays = device, [], 0, 0
        Recorder.made.append(self)

    @staticmethod
    def capturing():
        return Recorder.inside

    @staticmethod
    def mark(device):
        return next(Recorder.times) if Recorder.times is not None else None

    @staticmethod
    def between(some, later):
        return later - some

    @contextlib.contextmanager
    def in_pool(self):
        yield

    def warm(self, fn):
        return fn()

    def capture(self, fn, weak=False):
        if Recorder.fail is not None:
            raise Recorder.fail
        self.captures += 1
        kept = [t.detach().clone() for t in Recorder.keep]
        with self._inside():
            results = [t.clone() for t in fn()]
        with torch.no_grad():
            for t, value in zip(Recorder.keep, kept, strict=True):
                t.copy_(value)
        for t in results:
            if t.is_floating_point():
                t.fill_(float("nan"))  # a capture computes nothing
        graph = Graph(fn, results, weak)
        if weak:
            self.lent.append(results)
        return graph, [t.detach() for t in results] if weak else results

    def replay(self, graph):
        self.replays += 1
        for results in self.lent:
            for t in results:
                t.fill_(float("nan"))
        with self._inside(), torch.enable_grad():
            try:
                found = graph.fn()
            except Exception:  # of what has changed since: a GPU would compute something
                found = [torch.full_like(t, float("nan")) for t in graph.results]
        with torch.no_grad():
            for static, t in zip(graph.results, found, strict=True):
                static.copy_(t)

    def size(self):
        return 0

    def settle(self):
        pass

    def close(self):
        pass

    @contextlib.contextmanager
    def _inside(self):
        Recorder.inside = True
        try:
            yield
        finally:
            Recorder.inside = False


@contextlib.contextmanager
def recording():
    """Graphs on the CPU, by the recorder."""
    Recorder.times = None
    Recorder.made, Recorder.fail, Recorder.inside, Recorder.keep, Recorder.left = [], None, False, [], False
    graphs.backends["cpu"] = Recorder
    try:
        yield Recorder
    finally:
        del graphs.backends["cpu"]
