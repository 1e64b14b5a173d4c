"""Parts of one projection (q, k and v) that a forward cuts out by slices: by `torch.split` instead.

    qkv = self.qkv_proj(x)
    q = qkv[..., :a]
    k = qkv[..., a : a + b]             ->      q, k, v = qkv.split((a, b, qkv.shape[-1] - (a + b)), -1)
    v = qkv[..., a + b :]

The values are the same views. In the backward a slice fills a gradient of all of qkv with zeros and copies
its part in, and autograd adds those up: 33 times a part's bytes for three of them, where split writes them
side by side in 6 (Phi-3 mini, 16 x 512 tokens, H200: 344 -> 333 ms a step). The forward's own source is
compiled with these statements replaced.
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
    recompiled,
    rewritable,
    statement_at,
)

BOUND = (ast.Name, ast.Attribute, ast.Constant, ast.BinOp, ast.Add, ast.Mult, ast.Load)


def plan_slices(module: nn.Module) -> tuple[Rewritten, str] | str | None:
    found = rewrite(type(module).forward)
    if found is None or not isinstance(getattr(module, found[0], None), nn.Module):
        return None
    return blocked(module) or (Rewritten(rewrite, type(module)), f"torch.split (parts of {found[0]})")


@functools.cache
def rewrite(forward) -> tuple[str, types.FunctionType] | None:
    """The attribute whose result is cut up, and the forward that splits it; None where there is none."""
    node = rewritable(forward)
    if node is None:
        return None
    source = None
    for first in range(len(node.body)):
        parts = _partition(node.body[first:])
        if parts and (attribute := producer(node.body[:first], parts[0].value.value.id)):
            node.body[first : first + len(parts)] = [_split(parts)]
            source = attribute
            break
    if source is None:
        return None
    return source, recompiled(forward, node)


def _partition(body: list[ast.stmt]) -> list[ast.Assign] | None:
    """Statements that cut all of one variable's last axis into parts, from the first on, or None."""
    parts: list[ast.Assign] = []
    end = None
    for statement in body:
        match statement:
            case ast.Assign(
                targets=[ast.Name(id=name)],
                value=ast.Subscript(
                    value=ast.Name(id=cut),
                    slice=ast.Tuple(elts=[ast.Constant(value=inner), ast.Slice(lower, upper, None)]),
                ),
            ) if inner is ...:
                same = not parts or cut == parts[0].value.value.id
                if not same or not _equal(lower, end) or (name == cut and upper is not None):
                    return None
                if upper is not None and _size(upper, end) is None:
                    return None
                parts.append(statement)
                if upper is None:
                    return parts if len(parts) > 1 else None
                end = upper
            case _:
                return None
    return None


def _equal(one: ast.expr | None, other: ast.expr | None) -> bool:
    return (one is None) == (other is None) and (one is None or ast.dump(one) == ast.dump(other))


def _size(upper: ast.expr, lower: ast.expr | None) -> ast.expr | None:
    """upper - lower where that is plain to see: a sum or product, to which the next one adds."""
    if not all(isinstance(part, BOUND) for part in ast.walk(upper)):
        return None
    if lower is None:
        return upper
    match upper:
        case ast.BinOp(left=left, op=ast.Add(), right=right) if _equal(left, lower):
            return right
    return None


def _split(parts: list[ast.Assign]) -> ast.stmt:
    whole = parts[0].value.value.id
    bounds = [part.value.slice.elts[1] for part in parts]
    sizes = [ast.unparse(_size(b.upper, b.lower)) for b in bounds[:-1]]
    sizes.append(f"{whole}.shape[-1] - ({ast.unparse(bounds[-1].lower)})")
    names = ", ".join(part.targets[0].id for part in parts)
    return statement_at(f"{names} = {whole}.split(({', '.join(sizes)}), -1)", parts[0])
