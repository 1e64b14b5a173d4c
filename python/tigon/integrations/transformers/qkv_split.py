"""Parts of one projection (q, k and v) that a forward cuts out by slices: by `torch.split` instead.

    qkv = self.qkv_proj(x)
    q = qkv[..., :a]
    k = qkv[..., a : a + b]             ->      q, k, v = qkv.split((a, b, qkv.shape[-1] - (a + b)), -1)
    v = qkv[..., a + b :]

The values are the same views. In the backward a slice fills a gradient of all of qkv with zeros, copies its
part in, and autograd adds those up; split writes them side by side. The forward's own source is compiled
with these statements replaced.
"""

from __future__ import annotations

import ast
import functools
import types

from torch import nn

from tigon.integrations.transformers.forward import blocked
from tigon.integrations.transformers.rewriting import (
    Rewritten,
    producer,
    rewrite_innermost,
    same_form,
    statement_at,
)

(PART,) = ast.parse("name = cut[..., lower:upper]").body
BOUND = (ast.Name, ast.Attribute, ast.Constant, ast.BinOp, ast.Add, ast.Mult, ast.Load)  # sums and products


def plan_slices(module: nn.Module) -> tuple[Rewritten, str] | str | None:
    """Plan a forward that slices q, k and v: (rewritten forward, op), why it is left, or None."""
    rewritten = rewrite(type(module).forward)
    if rewritten is None or not isinstance(getattr(module, rewritten[0], None), nn.Module):
        return None
    return blocked(module) or (Rewritten(rewrite, type(module)), f"torch.split (parts of {rewritten[0]})")


@functools.cache
def rewrite(forward) -> tuple[str, types.FunctionType] | None:
    """The attribute whose result is cut up, and the forward that splits it; None if there is none."""
    return rewrite_innermost(forward, _split)


def _split(node: ast.FunctionDef) -> str | None:
    for first, statement in enumerate(node.body):
        names, whole, sizes = _partition(node.body[first:]) or ((), "", ())
        source = producer(node.body[:first], whole) if names else None
        if source:
            text = f"{', '.join(names)} = {whole}.split(({', '.join(sizes)}), -1)"
            node.body[first : first + len(names)] = [statement_at(text, statement)]
            return source
    return None


def _partition(body: list[ast.stmt]) -> tuple[list[str], str, list[str]] | None:
    """(names, variable, sizes) of statements that cut all of its last axis into parts, from the first on."""
    names, sizes, end, whole = [], [], "", None
    for statement in body:
        holes = dict.fromkeys(("name", "cut", "lower", "upper"))
        if not same_form(PART, statement, holes):
            return None
        name, cut, lower, upper = holes.values()
        if not (name.isidentifier() and cut.isidentifier()):
            return None
        whole = whole or cut
        if cut != whole or lower != end or (name == whole and upper):
            return None
        names.append(name)
        if not upper:
            return (names, whole, [*sizes, f"{whole}.shape[-1] - ({lower})"]) if sizes else None
        plain = all(isinstance(part, BOUND) for part in ast.walk(ast.parse(upper, mode="eval").body))
        if not plain or not upper.startswith(f"{lower} + " if lower else ""):
            return None  # its size is known if it is a sum of the last end and more
        sizes.append(upper.removeprefix(f"{lower} + "))
        end = upper
    return None
