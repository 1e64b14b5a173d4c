"""A residual addition and the RMSNorm of its sum in a decoder layer -> tigon.add_rms_norm.

    hidden = residual + hidden
    residual = hidden                     ->      hidden, residual = added_norm(self.norm, residual, hidden)
    hidden = self.norm(hidden)

One pass in the forward, and one in the backward, where the gradient that the sum has from elsewhere is added.
The layer's own source is compiled with these statements replaced. What is added are variables, or attributes
of self called on one (dropout), which are called as before.
"""

from __future__ import annotations

import ast
import functools
import types
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from tigon.integrations.transformers.forward import HOOKED, blocked, bound, plain
from tigon.integrations.transformers.norms import NormSpec, called_norm, norm_forward
from tigon.integrations.transformers.rewriting import (
    Rewritten,
    attribute_of_self,
    innermost,
    producer,
    recompiled,
    rewritable,
    statement_at,
    wrapped_again,
)
from tigon.ops.add_rms_norm import add_rms_norm


def added_norm(norm: nn.Module, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm of the sum, the sum). Where the module must be called, as it is: both one after the other."""
    forward = bound(norm)
    if (
        forward is None
        or forward.function is not norm_forward
        or HOOKED in norm.__dict__
        or norm._forward_hooks
        or norm._forward_pre_hooks
        or norm._backward_hooks
        or norm._backward_pre_hooks
        or _has_any_global_hook()
    ):
        return _one_by_one(norm, a, b)
    spec = forward.spec
    weight = None if spec.weight is None else getattr(norm, spec.weight)
    fits = plain(a, b) and a.dtype == b.dtype and a.shape == b.shape and (weight is None or plain(weight))
    if (
        not fits
        or not _arithmetic(spec)
        or (spec.autocast and a.is_cuda and torch.is_autocast_enabled("cuda"))
    ):
        return _one_by_one(norm, a, b)
    eps = getattr(norm, spec.eps)
    return add_rms_norm(b, a, weight, eps, offset=spec.offset, rounding=spec.rounding)


def _one_by_one(norm, a, b):
    total = a + b
    return norm(total), total


def _arithmetic(spec: NormSpec) -> bool:
    """Whether a norm's is that of `add_rms_norm`."""
    return spec.op == "rms_norm" and spec.rounding != "t5" and not spec.shift and spec.group_size is None


def plan_residual(module: nn.Module, specs: dict[int, NormSpec]) -> tuple[Rewritten, str] | str | None:
    """(spec, what it is), why a layer is left, or None where nothing is added and normalised.

    Args:
        specs: of the norms that are about to be bound, by id.
    """
    found = rewrite(type(module).forward)
    if found is None:
        return None

    def spec_of(name):
        norm = getattr(module, name, None)
        forward = bound(norm) if isinstance(norm, nn.Module) else None
        spec = specs.get(id(norm)) or (None if forward is None else forward.spec)
        return spec if isinstance(spec, NormSpec) else None

    reasons = {
        name: _unfit(name, spec_of(name), map(spec_of, added))
        for name, added in found[0].items()
        if spec_of(name) or called_norm(getattr(module, name, None))
    }
    taken = tuple(name for name, reason in reasons.items() if reason is None)
    if not taken:
        return "; ".join(reasons.values()) or None
    by = f"tigon.add_rms_norm ({', '.join(taken)})"
    return blocked(module) or (Rewritten(rewrite, type(module), taken), by)


def _unfit(name: str, spec: NormSpec | None, added) -> str | None:
    """Why a place stays as it is, or None."""
    if spec is None:
        return f"{name} is no norm that Tigon runs"
    if not _arithmetic(spec):
        return f"{name} has not the arithmetic of add_rms_norm"
    return f"what is added before {name} comes from a norm (sandwich)" if any(added) else None


@dataclass(frozen=True)
class _Place:
    """Statements `first` to `last` of a body: an addition, perhaps a second name of the sum, and the norm."""

    first: int
    last: int
    norm: str
    operands: tuple[ast.expr, ast.expr]
    results: tuple[str, str]  # of the norm and of the sum
    alias: list[ast.stmt]  # what is left of a second name

    def replacement(self, body: list[ast.stmt]) -> list[ast.stmt]:
        a, b = map(ast.unparse, self.operands)
        text = f"{', '.join(self.results)} = _tigon_added_norm(self.{self.norm}, {a}, {b})"
        return [statement_at(text, body[self.first]), *self.alias]

    def producers(self, body: list[ast.stmt]) -> set[str]:
        """Attributes of self whose results are added, as far as that is plain to see."""
        names = {
            o.func.attr if isinstance(o, ast.Call) else producer(body[: self.first], o.id)
            for o in self.operands
        }
        return names - {None}


@functools.cache
def rewrite(forward, norms: tuple[str, ...] | None = None) -> tuple[dict, types.FunctionType] | None:
    """What is there ({norm: attributes whose results are added}), and the forward with this replaced.

    Args:
        norms: only these; None: all.

    Returns:
        None where nothing is there.
    """
    inner = innermost(forward)
    node = rewritable(inner)
    found: dict[str, set[str]] = {}
    for body in [] if node is None else _bodies(node):
        for first in reversed(range(len(body))):
            place = _place(body, first)
            if place is not None and (norms is None or place.norm in norms):
                found.setdefault(place.norm, set()).update(place.producers(body))
                body[first : place.last] = place.replacement(body)
    if not found:
        return None
    made = wrapped_again(forward, recompiled(inner, node, _tigon_added_norm=added_norm))
    return None if made is None else (found, made)


def _bodies(node: ast.AST):
    """Every list of statements of a function."""
    lists = [getattr(part, name, None) for part in ast.walk(node) for name in ("body", "orelse")]
    return [body for body in lists if isinstance(body, list)]


def _place(body: list[ast.stmt], first: int) -> _Place | None:
    """The place that begins with this statement, if one does."""
    match body[first : first + 3]:
        case [ast.Assign(targets=[ast.Name(id=total)], value=ast.BinOp(a, ast.Add(), b)), *rest]:
            pass
        case _:
            return None
    alias = None
    match rest:
        case [ast.Assign(targets=[ast.Name(id=name)], value=ast.Name(id=source)), _] if source == total:
            alias, rest = name, rest[1:]
    match rest:
        case [
            ast.Assign(targets=[ast.Name(id=result)], value=ast.Call(func=function, args=[x], keywords=[])),
            *_,
        ]:
            pass
        case _:
            return None
    norm = attribute_of_self(function)
    if norm is None or not (_operand(a) and _operand(b)) or not (isinstance(x, ast.Name) and x.id == total):
        return None
    if alias in (result, total) or (result == total and alias is None):
        return None
    last = first + (2 if alias is None else 3)
    if result == total:  # the sum goes on under its second name
        return _Place(first, last, norm, (a, b), (result, alias), [])
    return _Place(first, last, norm, (a, b), (result, total), body[first + 1 : last - 1])


def _operand(node: ast.expr) -> bool:
    """A variable, or an attribute of self called on one."""
    match node:
        case ast.Call(func=function, args=[ast.Name()], keywords=[]):
            return attribute_of_self(function) is not None
    return isinstance(node, ast.Name)
