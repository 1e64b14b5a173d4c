"""Who computes: turns a provider's name and a case into calls that can be timed."""

from __future__ import annotations

import math
import types

import torch
import torch._functorch.config

from cases.case import Case, Inputs

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ROTATE_BYTES = 180e6  # three times the 60 MB of an H100's L2: smaller inputs are rotated
MOST_SETS = 32


class Unavailable(Exception):
    """The provider cannot run this case here; the message says why."""


def find(module: types.ModuleType, provider: str, case: Case, inputs: Inputs):
    """The provider's function of (*args, **kwargs)."""
    if provider == "eager":
        return module.eager_fn
    if provider == "compile":
        torch._dynamo.reset()
        # Backward is timed by calling it again and again on one graph.
        torch._functorch.config.donated_buffer = False
        return torch.compile(module.eager_fn, dynamic=False)
    if provider == "tigon":
        return module.tigon_fn
    if provider not in module.PEERS:
        raise Unavailable(f"no such peer of {module.NAME}")
    try:
        fn = module.PEERS[provider](case, inputs)
    except ImportError as error:
        raise Unavailable(f"not installed: {error}") from error
    if fn is None:
        raise Unavailable("does not support this case")
    return fn


def _clone(value):
    if not torch.is_tensor(value):
        return value
    return value.detach().clone(memory_format=torch.preserve_format)


class Runner:
    """One provider on one case, on its own copies of the data: some peers overwrite theirs."""

    def __init__(self, fn, inputs: Inputs, device: torch.device):
        self.fn = fn
        tensors = [value for value in inputs.args if torch.is_tensor(value)]
        size = sum(value.numel() * value.element_size() for value in tensors)
        rotate = device.type == "cuda" and size < ROTATE_BYTES
        self.sets = min(MOST_SETS, int(ROTATE_BYTES // max(size, 1)) + 1) if rotate else 1
        self.args, self.kwargs, self.leaves = [], [], []
        for _ in range(self.sets):
            args = [_clone(value) for value in inputs.args]
            kwargs = {name: _clone(value) for name, value in inputs.kwargs.items()}
            leaves = [args[i].requires_grad_() for i in inputs.grads]
            leaves += [kwargs[name].requires_grad_() for name in inputs.grad_kwargs]
            self.args.append(args)
            self.kwargs.append(kwargs)
            self.leaves.append(leaves)
        self.upstream = inputs.grad_outputs
        if self.upstream is not None:
            self.upstream = [_clone(value) for value in self.upstream]
        self.graphs: list[tuple] = []

    def outputs(self, i: int) -> tuple:
        i %= self.sets
        value = self.fn(*self.args[i], **self.kwargs[i])
        return value if isinstance(value, tuple) else (value,)

    def _gradients(self, outputs: tuple, i: int, retain: bool) -> tuple:
        given = self.upstream or [None] * len(outputs)
        pairs = [
            (out, g if g is None else g.to(out.dtype))
            for out, g in zip(outputs, given, strict=True)
            if out.requires_grad  # beside a loss there may be metrics
        ]
        if not pairs:  # an op without a gradient
            return ()
        outputs, upstream = zip(*pairs, strict=True)
        return torch.autograd.grad(outputs, self.leaves[i], upstream, retain_graph=retain)

    def forward(self, i: int) -> tuple:
        """A forward that keeps what its backward needs."""
        return self.outputs(i)

    def inference(self, i: int) -> tuple:
        with torch.no_grad():
            return self.outputs(i)

    def backward(self, i: int) -> tuple:
        """The backward alone, again and again on one graph for each input set."""
        i %= self.sets
        if not self.graphs:
            self.graphs = [self.outputs(k) for k in range(self.sets)]
        return self._gradients(self.graphs[i], i, retain=True)

    def step(self, i: int) -> tuple:
        i %= self.sets
        return self._gradients(self.outputs(i), i, retain=False)

    def everything(self) -> list[torch.Tensor]:
        """Outputs, gradients, and last the metrics beside a loss, for comparison with another provider."""
        outputs = self.outputs(0)
        kept = [out.detach().clone() for out in outputs if out.requires_grad]
        metrics = [out.detach().clone() for out in outputs if not out.requires_grad]
        return [*kept, *self._gradients(outputs, 0, retain=False), *metrics]


def difference(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """The largest ||a - b|| / ||b|| of outputs and gradients; NaN where any is.

    `ours` may end before the other's metrics.
    """
    worst = 0.0
    for a, b in zip(ours, theirs[: len(ours)], strict=True):
        total = wrong = 0.0
        rows = max(1, 2**26 // max(1, a[0].numel() if a.dim() else 1))
        blocks = ((x.split(rows) if x.dim() else (x,)) for x in (a, b))
        for x, y in zip(*blocks, strict=True):  # in blocks: the largest gradients fill gigabytes
            total += y.float().square().sum(dtype=torch.float64).item()
            wrong += (x.float() - y.float()).square().sum(dtype=torch.float64).item()
        error = (wrong / total) ** 0.5 if total else wrong**0.5
        if math.isnan(error):
            return error
        worst = max(worst, error)
    return worst
