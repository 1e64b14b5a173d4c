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


def twin(module: nn.Module, attributes: dict, parameters: dict, **modules: nn.Module) -> nn.Module:
    """A copy with other numbers, parameters and children, without a forward of the instance."""
    made = copy.copy(module)
    made.__dict__ = {name: value for name, value in vars(module).items() if name != "forward"} | attributes
    new = {name: nn.Parameter(value) for name, value in parameters.items()}
    made.__dict__ |= {"_parameters": module._parameters | new, "_modules": module._modules | modules}
    return made


@torch.no_grad()
@on_cpu()
def equals(module: nn.Module, found: Match) -> bool:
    """Whether a norm's forward is that of a structure in numbers, its attributes in these roles."""
    roles, reference = found.roles, found.structure.reference
    parameters = {role: name for role, name in roles.items() if module._parameters.get(name) is not None}
    size = next((module._parameters[name].shape[0] for name in parameters.values()), 24)
    for dtype, weight_dtype in PROBE_DTYPES:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(5, size, generator=generator).to(dtype)
        drawn = {role: torch.randn(size, generator=generator).to(weight_dtype) for role in parameters}
        known = {role: getattr(module, name) for role, name in roles.items()}
        role = SimpleNamespace(**{**known, "eps": PROBE_EPS, **drawn})
        named = {name: drawn[role] for role, name in parameters.items()}
        probed = twin(module, {roles["eps"]: PROBE_EPS}, named)
        if not same_results((type(module).forward, probed, x), (reference, role, x)):
            return False
    return True


@torch.no_grad()
@on_cpu()
def probe_rotary(function) -> Match | None:
    """The rotary structure that equals this function of (q, k, cos, sin), or None."""

    def is_of(structure, dtype) -> bool:
        tables = (2, 5, structure.options["probe"])
        generator = torch.Generator().manual_seed(1)
        shapes = ((2, 3, 5, 16), (2, 1, 5, 16), tables, tables)
        given = [torch.randn(*shape, generator=generator).to(dtype) for shape in shapes]
        return same_results((function, *given), (structure.reference, *given))

    for structure in ROTARY:
        if "probe" in structure.options and all(is_of(structure, d) for d in (torch.float32, torch.bfloat16)):
            return Match(structure, {})
    return None


def same_results(call: tuple, known: tuple, same=torch.equal) -> bool:
    """Whether two calls, (function, arguments...), return the same tensors."""
    try:
        (got, wanted) = (function(*arguments) for function, *arguments in (call, known))
    except Exception:  # any failure of foreign code on made-up input: it is not this structure
        return False
    got, wanted = (value if isinstance(value, tuple) else (value,) for value in (got, wanted))
    return len(got) == len(wanted) and all(
        isinstance(a, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape and same(a, b)
        for a, b in zip(got, wanted, strict=True)
    )
