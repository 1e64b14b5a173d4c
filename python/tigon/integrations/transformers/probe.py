"""Recognise functions that have no source by their numbers, accepting only equality.

Compiled modules and remote code without files end here. A copy on the CPU with random parameters
is compared bit for bit, in fp32 and bf16, with every reference of the table.
"""

from __future__ import annotations

import contextlib
import copy
from types import SimpleNamespace

import torch
from torch import nn

from tigon.integrations.transformers.patterns.modules import NORMS, Match
from tigon.integrations.transformers.patterns.rope import ROTARY

PROBE_EPS = 0.37  # large, so that a norm that ignores its eps attribute is told apart

# Dtypes of x and weight; a weight wider than x tells where the result is rounded.
PROBE_DTYPES = (
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
)


@contextlib.contextmanager
def on_cpu():
    """Tensors made inside live on the CPU whatever the default device is: while a model is loaded, meta."""
    with torch.device("cpu"):
        yield


@torch.no_grad()
def probe_norm(module: nn.Module) -> Match | None:
    """The norm structure that equals this module's forward, or None."""
    parameters = dict(module.named_parameters(recurse=False))
    if len(parameters) > 1 or any(p.ndim != 1 for p in parameters.values()):
        return None
    weight = next(iter(parameters), None)
    for eps in [name for name, value in vars(module).items() if isinstance(value, float)]:
        for structure in NORMS:
            names = structure.reference.__code__.co_names
            if {"with_weight", "shape", "group_size"} & {*names}:
                continue
            needs_weight = "weight" in names
            found = Match(structure, {"eps": eps} | ({"weight": weight} if needs_weight else {}))
            if needs_weight == (weight is not None) and equals(module, found):
                return found
    return None


@torch.no_grad()
@on_cpu()
def equals(module: nn.Module, found: Match) -> bool:
    """Whether a norm's forward is that of a structure in numbers, its attributes in these roles."""
    roles = found.roles
    parameters = {role: name for role, name in roles.items() if module._parameters.get(name) is not None}
    size = next((module._parameters[name].shape[0] for name in parameters.values()), 24)
    for dtype, weight_dtype in PROBE_DTYPES:
        twin = copy.copy(module)
        twin.__dict__ = {**module.__dict__, roles["eps"]: PROBE_EPS}
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(5, size, generator=generator).to(dtype)
        drawn = {role: torch.randn(size, generator=generator).to(weight_dtype) for role in parameters}
        known = {role: getattr(module, name) for role, name in roles.items()}
        if drawn:
            new = {name: nn.Parameter(drawn[role]) for role, name in parameters.items()}
            twin.__dict__["_parameters"] = new
        role = SimpleNamespace(**{**known, "eps": PROBE_EPS, **drawn})
        if not _equal(type(module).forward, (twin, x), found.structure.reference(role, x)):
            return False
    return True


@torch.no_grad()
def probe_rotary(function) -> Match | None:
    """The rotary structure that equals this function of (q, k, cos, sin), or None."""
    for structure in ROTARY:
        if "probe" not in structure.options:
            continue
        columns = structure.options["probe"]
        if all(_rotary_equal(function, structure.reference, columns, dtype) for dtype in
               (torch.float32, torch.bfloat16)):  # fmt: skip
            return Match(structure, {})
    return None


@on_cpu()
def _rotary_equal(function, reference, columns, dtype) -> bool:
    generator = torch.Generator().manual_seed(1)
    shapes = ((2, 3, 5, 16), (2, 1, 5, 16), (2, 5, columns), (2, 5, columns))
    arguments = [torch.randn(*shape, generator=generator).to(dtype) for shape in shapes]
    return _equal(function, arguments, reference(*arguments))


def _equal(function, arguments, wanted) -> bool:
    try:
        value = function(*arguments)
    except Exception:  # any failure of foreign code on made-up input: it is not this structure
        return False
    values = value if isinstance(value, tuple) else (value,)
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    return len(values) == len(wanted) and all(
        isinstance(a, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
        for a, b in zip(values, wanted, strict=True)
    )
