"""Norms of q and k by head before the rotary embedding -> tigon.qk_norm_rope.

The attention's forward is compiled from its own source with the norms moved into the rotary call behind them.
That call fuses what it is given, or runs the norms and the rotary function as they are.
"""

from __future__ import annotations

import ast
import functools
import inspect
import types

from torch import nn

from tigon.integrations.transformers.forward import blocked, bound, calls_forward, has_hooks, plain
from tigon.integrations.transformers.norms import eps_of, norm_forward, plan_norm
from tigon.integrations.transformers.rewriting import (
    Rewritten,
    attribute_of_self,
    rewrite_innermost,
    statement_at,
)
from tigon.integrations.transformers.rope import rotary_form, rotary_names
from tigon.ops.qk_norm_rope import MAX_HEAD_DIM, qk_norm_rope

CALL = "_tigon_norm_rope"


def norm_rope(norms, swapped, rotary, *args, **dims):
    """Compute ``rotary`` of the normalised heads, fused if norms and tensors allow it.

    A norm is None if the forward skips it; rotary is None if nothing is rotated. Heads and tokens are swapped
    between norm and rotary call where ``swapped`` says so.
    """
    heads, tables = args[: len(norms)], args[len(norms) :]
    options = _options(norms, heads, swapped) if hasattr(rotary, "with_op") else None
    if options is None or not _fits(rotary.form, heads[0], options):
        heads = [x if norm is None else norm(x) for norm, x in zip(norms, heads, strict=True)]
        heads = [_turned(x, swap) for x, swap in zip(heads, swapped, strict=True)]
        if rotary is None:
            return heads[0] if len(heads) == 1 else heads
        return rotary(*heads, *tables, **dims)

    def fused(q, k, cos, sin, **form):
        return qk_norm_rope(q, k, cos=cos, sin=sin, **options, **form)

    def apart(*given, **dims):
        heads = [norm(x) for norm, x in zip(norms, given, strict=False)]
        return rotary(*heads, *given[len(norms) :], **dims)

    heads = [_turned(x, swap) for x, swap in zip(heads, swapped, strict=True)]
    return rotary.with_op(apart, fused)(*heads, *tables, **dims)


def _turned(x, swap):
    return x.transpose(1, 2) if swap else x


def _fits(form: dict, x, options: dict) -> bool:
    """Whether the op does this rotation and returns the dtype that norm and rotary function return."""
    weight = options["q_weight"]
    same = weight is None or weight.dtype == x.dtype or options["rounding"] == "gemma"
    return not form.get("deinterleave") and (same or not form.get("keep_dtype"))


def _options(norms, heads, swapped) -> dict | None:
    """The op's arguments for norms that it computes bitwise equal, or None."""
    weights, forms = [], []
    for norm, x, swap in zip(norms, heads, swapped, strict=True):
        method = None if norm is None else bound(norm)
        if method is None or method.function is not norm_forward or "_hf_hook" in vars(norm):
            return None
        if not method.replaces_own():
            return None
        spec = method.spec
        watched = has_hooks(norm) or not calls_forward(norm)
        if watched or not spec.simple or x.ndim - swap < 3 or x.shape[-1] > MAX_HEAD_DIM:
            return None
        weight = None if spec.weight is None else getattr(norm, spec.weight)
        if weight is not None and not (plain(weight) and weight.shape == x.shape[-1:]):
            return None
        numbers = {"eps": eps_of(norm, spec, x), "offset": spec.offset, "rounding": spec.rounding}
        weights.append(weight)
        forms.append((numbers, None if weight is None else weight.dtype))
    if any(one != forms[0] for one in forms):
        return None
    return {"q_weight": weights[0], "k_weight": (*weights, None)[1], **forms[0][0]}


def plan_qk_norm(module: nn.Module) -> tuple[Rewritten, str] | str | None:
    """Plan an attention with norms of q and k: (rewritten forward, op), why it is left, or None."""
    rewritten = rewrite(type(module).forward)
    if rewritten is None:
        return None
    rounding = None
    for name, attributes in rewritten[0]:
        norms = [getattr(module, attribute, None) for attribute in attributes]
        if not any(norms):  # a call that this instance does not come to
            continue
        verdicts = [plan_norm(norm) if isinstance(norm, nn.Module) else None for norm in norms]
        form = rotary_form((inspect.unwrap(type(module).forward).__module__, name))
        if not all(isinstance(verdict, tuple) and verdict[0].simple for verdict in verdicts):
            return None
        if form is None or form.get("deinterleave"):
            return None
        rounding = verdicts[0][0].rounding
    if rounding is None:
        return None
    return blocked(module) or (Rewritten(rewrite, type(module)), f"tigon.qk_norm_rope ({rounding})")


@functools.cache
def rewrite(forward) -> tuple[tuple, types.FunctionType] | None:
    """((rotary function, attributes of its norms) of each call, the new forward), or None without any."""
    inner = inspect.unwrap(forward)
    names = rotary_names(inner) if isinstance(inner, types.FunctionType) else {}
    if not names:
        return None
    rotary = {name for _, name in names}

    def change(node):
        return tuple(call for body in _bodies(node) for call in _fuse(body, rotary))

    return rewrite_innermost(forward, change, **{CALL: norm_rope})


def _bodies(node: ast.AST) -> list[list[ast.stmt]]:
    """The lists of statements of a function, inner ones first."""
    lists = [getattr(child, field, None) for child in ast.walk(node) for field in ("body", "orelse")]
    return [body for body in reversed(lists) if isinstance(body, list)]


def _fuse(body: list[ast.stmt], rotary: set[str]) -> list[tuple[str, tuple[str, ...]]]:
    """Fuse the rotary calls among these statements, or right inside an `if` among them."""
    calls = []
    for index, branch in enumerate(body):
        skipped = isinstance(branch, ast.If) and not branch.orelse
        inside = branch.body if skipped else [branch]
        call = _rotation(inside[-1], rotary)
        if call is None:
            continue
        heads = [_normed(body, index, name) for name in call]
        tested = [branch.test] if skipped else []
        if None in heads or any(_uses(s, name) for s in (*tested, *inside[:-1]) for name in call):
            continue
        statement, names = inside[-1], call
        rotate = statement.value
        first = f"({''.join(head.norm + ', ' for head in heads)})"
        swaps = f"({''.join(f'{head.swapped}, ' for head in heads)})"
        added = ast.parse(f"{CALL}({first}, {swaps}, {rotate.func.id})", mode="eval").body.args
        calls.append((rotate.func.id, tuple(head.attribute for head in heads)))
        rotate.func, rotate.args = ast.Name(CALL, ast.Load()), [*added, *rotate.args]
        if skipped:
            targets = ", ".join(names)
            text = f"{targets} = {CALL}({first}, {swaps}, None, {targets})"
            branch.orelse = [statement_at(text, statement)]
        for head in heads:
            head.remove()
        ast.fix_missing_locations(statement)
    return calls


def _rotation(statement: ast.stmt, rotary: set[str]) -> list[str] | None:
    """The names of heads that `q, k = rotary(q, k, ...)` or `x = rotary(x, ...)` rotates, or None."""
    match statement:
        case ast.Assign(targets=[target], value=ast.Call(func=ast.Name(id=f), args=args)) if f in rotary:
            targets = target.elts if isinstance(target, ast.Tuple) else [target]
            given = args[: len(targets)]
            names = [part.id for part in targets if isinstance(part, ast.Name)]
            same = [part.id for part in given if isinstance(part, ast.Name)] == names
            others = [*args[len(targets) :], *(keyword.value for keyword in statement.value.keywords)]
            apart = not any(_uses(part, name) for part in others for name in names)
            if same and len(names) == len(targets) == len({*names}) and apart:
                return names
    return None


class _Head:
    """The statements that normalise and transpose one tensor before its rotary call."""

    def __init__(self, norm: str, attribute: str, swapped: bool, gone: list):
        self.norm, self.attribute, self.swapped, self.gone = norm, attribute, swapped, gone

    def remove(self) -> None:
        """Replace the normalised tensor by its input, neither normalised nor transposed."""
        for body, statement, rest in self.gone:
            if isinstance(rest, ast.Name) and rest.id == statement.targets[0].id:
                body[body.index(statement)] = ast.copy_location(ast.Pass(), statement)
            else:
                statement.value = rest


def _normed(before: list[ast.stmt], index: int, name: str) -> _Head | None:
    """The norm that makes a tensor before a statement, with only transposes between them."""
    swapped, gone = False, []
    for statement in reversed(before[:index]):
        if not _uses(statement, name):
            continue
        test, body = None, before
        if isinstance(statement, ast.If) and not statement.orelse and attribute_of_self(statement.test):
            test, body = statement.test, statement.body
            inside = [s for s in body if _uses(s, name)]
            if len(inside) != 1:
                return None
            (statement,) = inside
        match statement:
            case ast.Assign(targets=[ast.Name(id=target)], value=value) if target == name:
                value, turns = _stripped(value)
            case _:
                return None
        swapped ^= turns % 2 == 1
        match value:
            case ast.Call(func=function, args=[inner], keywords=[]) if attribute_of_self(function):
                norm = ast.unparse(function)
                if test is not None:
                    if turns or not (isinstance(inner, ast.Name) and inner.id == name):
                        return None
                    norm = f"{norm} if {ast.unparse(test)} else None"
                return _Head(norm, function.attr, swapped, [*gone, (body, statement, inner)])
            case ast.Name(id=same) if same == name and test is None:
                gone.append((body, statement, value))
            case _:
                return None
    return None


def _stripped(value: ast.expr) -> tuple[ast.expr, int]:
    """An expression without the `.transpose(1, 2)` at its end, and how many there were."""
    match value:
        case ast.Call(
            func=ast.Attribute(value=inner, attr="transpose"),
            args=[ast.Constant(value=1), ast.Constant(value=2)],
            keywords=[],
        ):
            inner, turns = _stripped(inner)
            return inner, turns + 1
    return value, 0


def _uses(node: ast.AST, name: str) -> bool:
    return any(isinstance(part, ast.Name) and part.id == name for part in ast.walk(node))
