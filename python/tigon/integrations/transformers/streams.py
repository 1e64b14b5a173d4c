"""The streams of hyper-connections after attention or MLP -> tigon.hyper_connection_post.

The forward of a decoder layer is compiled with these expressions of its own source replaced.
"""

from __future__ import annotations

import ast
import functools
import types

import torch
from torch import nn

from tigon.integrations.transformers.forward import blocked, plain
from tigon.integrations.transformers.rewriting import (
    Rewritten,
    innermost,
    recompiled,
    rewritable,
    wrapped_again,
)
from tigon.ops.hyper_connection import MAX_STREAMS, hyper_connection_post


def _fits(x, f, post, dtype) -> bool:
    return (
        plain(x, f, post)
        and x.dtype == f.dtype == dtype != torch.float64
        and x.shape[:-2] == f.shape[:-1]
        and x.shape[-2] <= MAX_STREAMS
    )


def mixed(x, f, post, comb, dtype):
    """DeepSeek-V4, GLM-5: streams mixed by comb, transposed."""
    if _fits(x, f, post, dtype) and plain(comb):
        return hyper_connection_post(x, f, post, comb, transposed=True)
    rest = torch.matmul(comb.to(dtype).transpose(-1, -2), x)
    return post.to(dtype).unsqueeze(-1) * f.unsqueeze(-2) + rest


def kept(x, f, post, dtype):
    """Hunyuan V4: streams as they are."""
    if _fits(x, f, post, dtype):
        return hyper_connection_post(x, f, post)
    return (post.float().unsqueeze(-1) * f.float().unsqueeze(-2) + x.float()).to(dtype)


# What is replaced, by which function of the names in it: their order is that of its parameters.
_MIXED = "post.to(dtype).unsqueeze(-1) * f.unsqueeze(-2) + torch.matmul(comb.to(dtype).transpose(-1, -2), x)"
_KEPT = "(post.float().unsqueeze(-1) * f.float().unsqueeze(-2) + x.float()).to(dtype)"
_FORMS = {
    "_tigon_mixed": (ast.parse(_MIXED, mode="eval").body, mixed),
    "_tigon_kept": (ast.parse(_KEPT, mode="eval").body, kept),
}


def plan_streams(module: nn.Module) -> tuple[Rewritten, str] | str | None:
    found = rewrite(type(module).forward)
    if found is None:
        return None
    by = f"tigon.hyper_connection_post ({found[0]} places)"
    return blocked(module) or (Rewritten(rewrite, type(module)), by)


@functools.cache
def rewrite(forward) -> tuple[int, types.FunctionType] | None:
    """How many places were replaced, and the new forward; None where there are none."""
    inner = innermost(forward)
    names = getattr(getattr(inner, "__code__", None), "co_names", ())
    node = rewritable(inner) if "unsqueeze" in names else None
    if node is None:
        return None
    replace = _Replace()
    node = replace.visit(node)
    if not replace.places:
        return None
    own = {name: function for name, (_, function) in _FORMS.items()}
    made = wrapped_again(forward, recompiled(inner, node, **own))
    return None if made is None else (replace.places, made)


class _Replace(ast.NodeTransformer):
    """Expressions of `_FORMS` become calls."""

    def __init__(self):
        self.places = 0

    def generic_visit(self, node):
        node = super().generic_visit(node)
        for name, (wanted, function) in _FORMS.items():
            found: dict[str, ast.Name] = {}
            if _same(wanted, node, found):
                parameters = function.__code__.co_varnames[: function.__code__.co_argcount]
                self.places += 1
                call = ast.Call(ast.Name(name, ast.Load()), [found[p] for p in parameters], [])
                return ast.fix_missing_locations(ast.copy_location(call, node))
        return node


def _same(wanted: ast.AST, node: ast.AST, found: dict) -> bool:
    """Whether two expressions are equal but for the names of variables, one for one; `torch` is itself."""
    if type(wanted) is not type(node):
        return False
    if isinstance(wanted, ast.Name):
        if wanted.id == "torch":
            return node.id == "torch"
        return found.setdefault(wanted.id, node).id == node.id
    for key in wanted._fields:
        one, other = getattr(wanted, key), getattr(node, key)
        if isinstance(one, ast.AST):
            if not (isinstance(other, ast.AST) and _same(one, other, found)):
                return False
        elif isinstance(one, list):
            if len(one) != len(other) or not all(_same(a, b, found) for a, b in zip(one, other, strict=True)):
                return False
        elif one != other:
            return False
    return True
