"""Recognises a function of a model: it is the row of a table that has the same canonical expression.

A function without source (compiled modules, remote code without files) is recognised by its numbers: a copy
on the CPU with random parameters must be bitwise equal to a row, in fp32 and bf16.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import nn

from tigon.integrations.transformers.canonical import Canonical, Unrecognised, canonical


@dataclass(frozen=True)
class Structure:
    """One recognised form: its function and what the replacement needs to know."""

    name: str
    reference: Callable
    options: dict

    @functools.cached_property
    def expression(self) -> Canonical:
        """The canonical expression of the function, which is a method if its first parameter is self."""
        method = self.reference.__code__.co_varnames[0] == "self"
        return canonical(self.reference, object if method else None)


def form(name: str, reference: Callable, **options) -> Structure:
    """Make a row of a table."""
    return Structure(name, reference, options)


@dataclass(frozen=True)
class Match:
    """A structure, the attributes that play its roles, and the order in which it calls some."""

    structure: Structure
    roles: dict
    calls: tuple[str, ...] = ()


def match(found: Canonical, table: tuple[Structure, ...]) -> Match | None:
    """The row of `table` whose reference has the expression `found`, or None."""
    for structure in table:
        wanted = structure.expression
        if wanted.text == found.text:
            roles = dict(zip(wanted.attributes, found.attributes, strict=True))
            return Match(structure, roles, found.calls)
    return None


def recognise(module, table: tuple[Structure, ...], method: str = "forward") -> Match | str | None:
    """The row of `table` that equals a method of a module's class; or why it has no expression; or None."""
    try:
        return match(canonical(getattr(type(module), method), type(module)), table)
    except Unrecognised as error:
        return str(error)


# --- by numbers ----------------------------------------------------------------------------------

PROBE_EPS = 0.37  # large, so that a norm that ignores its eps attribute is recognised

# The dtypes of x and weight. A weight wider than x shows at which step the result is rounded.
PROBE_DTYPES = (
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
)


@contextlib.contextmanager
def on_cpu():
    """Make tensors on the CPU inside. While a model is loaded, the default device is meta."""
    with torch.device("cpu"):
        yield


@torch.no_grad()
def probe_norm(module: nn.Module, table: tuple[Structure, ...]) -> Match | None:
    """The row of eps and at most a weight that equals this module's forward, or None."""
    parameters = dict(module.named_parameters(recurse=False))
    if len(parameters) > 1 or any(p.ndim != 1 for p in parameters.values()):
        return None
    weights = dict(zip(["weight"], parameters, strict=False))
    for eps in [name for name, value in vars(module).items() if isinstance(value, float)]:
        for structure in table:
            row = Match(structure, {"eps": eps, **weights})
            if row.roles.keys() == {*structure.expression.attributes} and equals(module, row):
                return row
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
    """Whether a norm's forward computes the numbers of a structure, with its attributes in these roles."""
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
def probe_rotary(function, table: tuple[Structure, ...]) -> Match | None:
    """The rotary row that equals this function of (q, k, cos, sin), or None."""

    def is_of(structure, dtype) -> bool:
        tables = (2, 5, structure.options["probe"])
        generator = torch.Generator().manual_seed(1)
        shapes = ((2, 3, 5, 16), (2, 1, 5, 16), tables, tables)
        given = [torch.randn(*shape, generator=generator).to(dtype) for shape in shapes]
        return same_results((function, *given), (structure.reference, *given))

    for structure in table:
        tried = structure.options["probe"] is not None
        if tried and all(is_of(structure, dtype) for dtype in (torch.float32, torch.bfloat16)):
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
