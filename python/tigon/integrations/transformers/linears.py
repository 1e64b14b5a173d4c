"""Linears of one input as one autograd node: q, k and v of an attention, gate and up of an MLP.

The matmuls and their order are those of single calls, and so are the bits, unless the input has other users
too: their gradients are then added in another order. The host saves calls of modules and nodes of views. Only
small inputs take this way: large ones hide the host's time, and the gradients that one node takes together
would live longer.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad

from tigon._op import direct_apply, is_batched
from tigon.integrations.transformers.forward import LINEAR, PLAIN, calls_forward, has_hooks
from tigon.integrations.transformers.rewriting import replace_expressions, rewrite_innermost, statement_at

CALL, RESULTS = "_tigon_linears", "_tigon_of_"
_LARGE = 1 << 22  # elements


class _Linears(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, *parameters):
        weights, needs = parameters[::2], ctx.needs_input_grad
        ys = [F.linear(x, w, b) for w, b in zip(weights, parameters[1::2], strict=True)]
        trained = [w or b for w, b in zip(needs[1::2], needs[2::2], strict=True)]
        if not needs[0] and not all(trained):
            ctx.mark_non_differentiable(*(y for y, need in zip(ys, trained, strict=True) if not need))
        ctx.save_for_backward(x if any(needs[1::2]) else None, *(weights if needs[0] else ()))
        ctx.shape = x.shape
        ctx.set_materialize_grads(False)
        return tuple(ys)

    @staticmethod
    def backward(ctx, *dys):
        x, *weights = ctx.saved_tensors
        needs, dx, gradients = ctx.needs_input_grad, None, []
        x = None if x is None else x.reshape(-1, x.shape[-1])
        for i in reversed(range(len(dys))):  # as autograd comes to them
            dy, dw, db = dys[i], None, None
            if dy is not None:
                dy = dy.reshape(-1, dy.shape[-1])
                if needs[0]:
                    part = dy.mm(weights[i])
                    dx = part if dx is None else dx.add_(part)
                dw = dy.t().mm(x) if needs[1 + 2 * i] else None
                db = dy.sum(0) if needs[2 + 2 * i] else None
            gradients += db, dw
        return None if dx is None else dx.view(ctx.shape), *reversed(gradients)


_apply = direct_apply(_Linears)


def linears(parent: nn.Module, names: tuple[str, ...], x) -> tuple:
    """What these children make of x, called in this order."""
    parts = read_parts(parent, names)
    parameters = _parameters(parts, x) if type(x) in PLAIN and len(parts) > 1 else None
    return tuple(part(x) for part in parts) if parameters is None else _apply(x, *parameters)


def read_parts(parent: nn.Module, names) -> list:
    """The children of these names."""
    own = parent._modules
    return [own.get(name) or getattr(parent, name) for name in names]


def _parameters(parts: list, x: torch.Tensor) -> list | None:
    """Weight and bias of each in an eager, differentiable call of plain Linears; None of another call."""
    if torch.compiler.is_compiling() or is_batched() or forward_ad._current_level >= 0:
        return None
    if torch._C._len_torch_function_stack() or nn.Linear.forward is not LINEAR:  # both may change the product
        return None
    if not torch.is_grad_enabled() or x.numel() > _LARGE or x.dim() < 2 or not (x.is_cuda or x.is_cpu):
        return None
    if x.is_complex():  # its gradients are conjugates
        return None
    if torch.is_autocast_enabled("cuda" if x.is_cuda else "cpu"):
        return None
    parameters, dtype = [], x.dtype
    for part in parts:
        own = part.__dict__
        if type(part) is not nn.Linear or "forward" in own or has_hooks(part):
            return None
        if not calls_forward(part):
            return None
        weight, bias = own["_parameters"].get("weight"), own["_parameters"].get("bias")
        if type(weight) not in PLAIN or weight.dtype is not dtype or hasattr(weight, "ds_id"):
            return None
        if not (bias is None or type(bias) in PLAIN):
            return None
        parameters += weight, bias
    return parameters


class Shared(NamedTuple):
    """Attributes that are called with one variable, in the statements from `first` to `last`."""

    x: str = ""
    names: tuple[str, ...] = ()
    first: int = 0
    last: int = 0


def shared_calls(body: list[ast.stmt], names: frozenset[str]) -> Shared:
    """The most of these attributes that are called with one variable, whatever the branches, and with nothing
    in between that changes it or returns."""
    best, called = Shared(), {}
    for index, statement in enumerate(body):
        for node in _always(statement):
            match node:
                case ast.Call(
                    func=ast.Attribute(value=ast.Name(id="self"), attr=name),
                    args=[ast.Name(id=x)],
                    keywords=[],
                ) if name in names:
                    before = called.get(x, Shared(x, (), index))
                    all_names = tuple(dict.fromkeys((*before.names, name)))
                    called[x] = before._replace(names=all_names, last=index)
                    best = max(best, called[x], key=lambda found: len(found.names))
        for node in ast.walk(statement):
            match node:
                case ast.Return():
                    called.clear()
                case ast.Name(id=x, ctx=ast.Store()) | ast.Subscript(value=ast.Name(id=x), ctx=ast.Store()):
                    called.pop(x, None)
                case ast.Call(func=ast.Attribute(value=ast.Name(id=x), attr=name)) if name.endswith("_"):
                    called.pop(x, None)
    return best


_SOMETIMES = (
    *(ast.If, ast.Match, ast.For, ast.While, ast.Try, ast.With, ast.FunctionDef),
    *(ast.IfExp, ast.BoolOp, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp),
)


def _always(node: ast.AST) -> Iterator[ast.AST]:
    """Of a statement the expressions that are computed once, in every case."""
    if not isinstance(node, _SOMETIMES):
        yield node
        for child in ast.iter_child_nodes(node):
            yield from _always(child)


def linears_of(module: nn.Module) -> frozenset[str]:
    """Names of the children that are Linears."""
    return frozenset(name for name, child in module._modules.items() if isinstance(child, nn.Linear))


@functools.cache
def rewrite(forward, names: frozenset[str]) -> tuple | None:
    """The attributes, and a forward that calls them together; None without two of one input."""

    def change(node):
        x, shared, first, last = shared_calls(node.body, names)
        if len(shared) < 2:
            return None
        results = {f"self.{name}({x})": f"{RESULTS}{name}" for name in shared}

        def turn(part):
            return results.get(ast.unparse(part)) if isinstance(part, ast.Call) else None

        for statement in node.body[first : last + 1]:
            replace_expressions(statement, turn)
        call = f"{', '.join(results.values())} = {CALL}(self, {shared}, {x})"
        node.body.insert(first, statement_at(call, node.body[first]))
        return shared

    return rewrite_innermost(forward, change, **{CALL: linears})
