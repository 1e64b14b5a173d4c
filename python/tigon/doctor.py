"""Whether this installation computes what it should: every op, forward and backward, against its reference.

Run as ``python -m tigon doctor``.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

import tigon
from tigon import _op
from tigon.environment import env

# An op may be off by this many times its plain formulation's own error against float64, plus a few units in
# the last place (the tests are stricter and larger; this finds a broken build, not a lost bit).
FACTOR, ULPS = 4.0, 2.0
ROWS, COLUMNS, VOCABULARY = 24, 96, 203


@dataclass(frozen=True)
class Probe:
    """How to call one op. What it should compute is its reference, the formula in plain PyTorch."""

    op: str
    draw: Callable[[], tuple]  # its arguments
    options: dict = field(default_factory=dict)
    fixed: tuple[int, ...] = ()  # float arguments that get no gradient


@dataclass(frozen=True)
class Finding:
    """One op on one device in one dtype: ``problem`` is empty when it is in order."""

    op: str
    device: str
    dtype: str
    error: float  # largest error of results and gradients against float64, relative to their size
    allowed: float
    problem: str = ""

    @property
    def status(self) -> str:
        return "FAILED" if self.problem else "ok"


def _rows(*shape):
    return torch.randn(*(shape or (ROWS, COLUMNS)))


def _labels():
    return torch.randint(0, VOCABULARY, (ROWS,)).masked_fill(torch.arange(ROWS) % 5 == 0, -100)


def _rope():
    half = torch.arange(6.0)[:, None] * torch.rand(8)
    angles = torch.cat((half, half), -1)
    return _rows(2, 4, 6, 16), _rows(2, 2, 6, 16), angles.cos(), angles.sin()


def _qk_norm_rope():
    q, k, cos, sin = _rope()
    return q, k, 1 + 0.1 * _rows(16), 1 + 0.1 * _rows(16), cos, sin


def _two():
    return _rows(), _rows()


def _normed():
    return _rows(), 1 + 0.1 * _rows(COLUMNS)


def _head():
    return _rows(), 0.2 * _rows(VOCABULARY, COLUMNS), _labels()


def _experts():
    gate_up, down = _rows(3, 2 * COLUMNS, COLUMNS) / 8, _rows(3, COLUMNS, COLUMNS) / 8
    return _rows(), gate_up, down, torch.randint(0, 4, (ROWS, 2)), _rows(ROWS, 2)


def _sorted_experts():
    x, gate_up, down, _, weights = _experts()
    return x, gate_up, down, torch.tensor([1, 1, ROWS - 1], dtype=torch.int32), weights[:, 0]


def _two_heads():
    return 3 * _rows(), _rows(VOCABULARY, COLUMNS), 3 * _rows(ROWS, VOCABULARY)


def _drafter():
    return 3 * _rows(), _rows(VOCABULARY, COLUMNS), (3 * _rows(), _rows(VOCABULARY, COLUMNS))


def _answers(rows, *between):
    return -_rows(rows, 17).abs(), *between, torch.rand(rows, 17) < 0.8


def _answers_of_head(answers, *more):
    target = torch.randint(0, VOCABULARY, (answers, 6)).masked_fill(torch.rand(answers, 6) < 0.2, -100)
    return _rows(answers, 6, COLUMNS), 0.2 * _rows(VOCABULARY, COLUMNS), target, *more


def _desirable():
    return torch.arange(7) % 3 == 0


PROBES = (
    Probe("rms_norm", _normed),
    Probe("layer_norm", lambda: (*_normed(), 0.1 * _rows(COLUMNS))),
    Probe("add_rms_norm", lambda: (_rows(), *_normed())),
    Probe("gated_rms_norm", lambda: (_rows(), *_normed())),
    Probe("modulated_rms_norm", lambda: (*_normed(), 0.1 * _rows(COLUMNS), 0.1 * _rows(COLUMNS))),
    Probe("attention_residual", lambda: (_rows(3, ROWS, COLUMNS), 0.2 * _rows(COLUMNS), _normed()[1])),
    Probe("group_norm", lambda: (_rows(4, 8, 12), 2, _rows(8), _rows(8))),
    Probe("dyt", lambda: (_rows(), torch.tensor([0.7]), _rows(COLUMNS), _rows(COLUMNS))),
    Probe("poly_norm", lambda: (_rows(), _rows(3), _rows(1))),
    Probe("embedding", lambda: (torch.randint(0, 9, (ROWS,)), _rows(9, COLUMNS))),
    Probe("swiglu", _two),
    Probe("geglu", _two, {"approximate": "tanh"}),
    Probe("reglu", _two),
    Probe("swiglu_oai", lambda: (_rows(),)),
    Probe(
        "lora_linear", lambda: (_rows(), _rows(40, COLUMNS) / 10, _rows(4, COLUMNS) / 10, _rows(40, 4), 2.0)
    ),
    Probe("experts", _experts),
    Probe("grouped_mlp", _sorted_experts),
    Probe("route", lambda: (torch.rand(ROWS, COLUMNS).argsort(-1) / 16, 3)),  # no ties
    Probe(
        "hyper_connection_pre",
        lambda: (_rows(ROWS, 4, COLUMNS), _rows(24, 4 * COLUMNS) / 16, _rows(24), _rows(3)),
    ),
    Probe(
        "hyper_connection_post", lambda: (_rows(ROWS, 4, COLUMNS), _rows(), _rows(ROWS, 4), _rows(ROWS, 4, 4))
    ),
    Probe("rope", _rope, fixed=(2, 3)),
    Probe("qk_norm_rope", _qk_norm_rope, fixed=(4, 5)),
    *(
        Probe(op, lambda: (2 * _rows(2, ROWS, VOCABULARY)).unbind(), fixed=(1,))
        for op in ("kl_div", "jsd", "tvd")
    ),
    Probe("cross_entropy", lambda: (3 * _rows(ROWS, VOCABULARY), _labels())),
    Probe("linear_cross_entropy", _head),
    Probe("linear_log_prob", _head),
    Probe("preference_loss", lambda: _answers(8)),
    Probe("kto_loss", lambda: _answers(7, _desirable())),
    Probe("policy_loss", lambda: _answers(7, _rows(7)), fixed=(1,)),
    Probe("linear_preference", lambda: _answers_of_head(8)),
    Probe("linear_kto", lambda: _answers_of_head(7, _desirable())),
    Probe("linear_policy", lambda: _answers_of_head(7, _rows(7)), fixed=(3,)),
    *(Probe(op, _two_heads, fixed=(2,)) for op in ("linear_kl_div", "linear_jsd", "linear_tvd")),
    Probe("drafter_loss", _drafter, fixed=(2,)),
    Probe("contrastive_loss", _two, {"symmetric": True, "temperature": 0.5}),
)
# Exported in addition to the ops, as is what ends in _memory. Sums of float8 have too few bits for a probe;
# draws have no gradient.
HELPERS = {
    "clip_grad_norm_",
    "count_labels",
    "dequantize",
    "fp8_linear",
    "linear_loss",
    "linear_sample",
    "lora_linears",
    "multi_token_loss",
    "sample",
}


def ops() -> list[str]:
    """The ops that this version exports."""
    names = [name for name in tigon.__all__ if name not in HELPERS and not name.endswith("_memory")]
    functions = {name: vars(tigon).get(name) for name in names}
    return [n for n, f in functions.items() if (getattr(f, "__module__", "") or "").startswith("tigon.ops.")]


def probes() -> list[Probe]:
    """``PROBES``, and every other op of one tensor ``x``."""
    found = list(PROBES)
    for op in sorted(set(ops()) - {probe.op for probe in PROBES}):
        function = getattr(tigon, op)
        if function.__module__ in sys.modules and list(inspect.signature(function).parameters) == ["x"]:
            found.append(Probe(op, lambda: (_rows(),)))
    return found


@contextlib.contextmanager
def _references():
    """Ops run the references of their modules, whatever tensors they are given."""
    modules = [m for name, m in sys.modules.items() if name.startswith("tigon.ops.")]
    with contextlib.ExitStack() as stack:
        for module in [*modules, _op]:
            for name in ("has_kernel", "has_matmul_kernels"):
                if hasattr(module, name):
                    stack.callback(setattr, module, name, getattr(module, name))
                    setattr(module, name, lambda *tensors, **options: False)
        yield


def examine(devices=None, dtypes=(torch.float32, torch.bfloat16)) -> list[Finding]:
    """Every probed op that this version has, on every device."""
    if devices is None:
        devices = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
    known = ops()
    present = [probe for probe in probes() if probe.op in known]
    return [_examine(probe, device, dtype) for probe in present for device in devices for dtype in dtypes]


def unprobed() -> list[str]:
    return sorted(set(ops()) - {probe.op for probe in probes()})


def _examine(probe: Probe, device: str, dtype: torch.dtype) -> Finding:
    label = str(dtype).removeprefix("torch.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        drawn = [_placed(x, device, dtype) for x in probe.draw()]
    try:
        function = functools.partial(getattr(tigon, probe.op), **probe.options)
        got, again = (_run(function, probe, drawn) for _ in range(2))
        with _references():
            own = getattr(sys.modules[function.func.__module__], probe.op)
            formula = functools.partial(own, **probe.options)
            plain = _run(formula, probe, drawn)
            exact = _run(formula, probe, [_placed(x, device, torch.float64) for x in drawn])
    except Exception as error:
        return Finding(probe.op, device, label, float("nan"), 0.0, f"{type(error).__name__}: {error}")
    worst, allowed = 0.0, 0.0
    for one, two, stock, wanted in zip(got, again, plain, exact, strict=True):
        size = wanted.abs().max().item() or 1.0
        error = (one.double() - wanted).abs().max().item() / size
        bound = FACTOR * (stock.double() - wanted).abs().max().item() / size + ULPS * torch.finfo(dtype).eps
        if not error <= bound:  # NaN too
            return Finding(probe.op, device, label, error, bound, "differs from the reference")
        if not torch.equal(one, two):
            return Finding(probe.op, device, label, error, bound, "two runs differ")
        if error >= worst:
            worst, allowed = error, bound
    return Finding(probe.op, device, label, worst, allowed)


def _placed(x, device, dtype):
    if isinstance(x, tuple):
        return tuple(_placed(one, device, dtype) for one in x)
    if not torch.is_tensor(x):
        return x
    return x.to(device, dtype) if x.is_floating_point() else x.to(device)


def _run(function, probe, drawn) -> list[torch.Tensor]:
    arguments = [
        x.detach().requires_grad_(x.is_floating_point() and i not in probe.fixed) if torch.is_tensor(x) else x
        for i, x in enumerate(drawn)
    ]
    results = function(*arguments)
    results = [y for y in (results if isinstance(results, tuple) else (results,)) if y is not None]
    leaves = [x for x in arguments if torch.is_tensor(x) and x.requires_grad]
    slope = functools.partial(torch.linspace, -0.5, 1.0)  # whose sum is not 0
    slopes = [slope(y.numel(), device=y.device, dtype=y.dtype).view(y.shape) for y in results]
    if results[0].dim() == 0:
        slopes = [torch.ones_like(y) for y in results]
    pairs = [(y, slope) for y, slope in zip(results, slopes, strict=True) if y.requires_grad]
    outputs, upstream = zip(*pairs, strict=True)
    return [*(y.detach() for y in results), *torch.autograd.grad(outputs, leaves, upstream)]


def table(findings: list[Finding]) -> str:
    head = f"{'op':<22} {'device':<7} {'dtype':<9} {'error':>9} {'allowed':>9}  status"
    row = "{0.op:<22} {0.device:<7} {0.dtype:<9} {0.error:>9.1e} {0.allowed:>9.1e}  {0.status}"
    problems = [f"{f.op} on {f.device} in {f.dtype}: {f.problem}" for f in findings if f.problem]
    return "\n".join([head, *map(row.format, findings), *problems])


def main() -> int:
    """Environment, table, verdict; 0 when everything is in order."""
    print(env(), end="\n\n")
    findings = examine()
    print(table(findings))
    if unprobed():
        print(f"without a probe: {', '.join(unprobed())}")
    broken = [f for f in findings if f.problem]
    print(f"\n{len(findings) - len(broken)} of {len(findings)} probes in order")
    if broken:
        print("tigon does not work here as it should: please report this output", file=sys.stderr)
    return int(bool(broken))
