"""Forwards compiled again from their own source, some statements or expressions replaced."""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import types
import weakref

import torch
from torch import nn

from tigon.integrations.transformers.canonical import Unrecognised, function_node
from tigon.integrations.transformers.forward import follows

_sources = weakref.WeakKeyDictionary()  # of the functions made here, what they were made of


class Rewritten:
    """A method of a class after a sequence of steps ``rewrite(method, *options)``.

    `rewrite` returns what it found, and the new method; None if it found nothing. Copies and pickles take
    the steps again.
    """

    def __init__(self, rewrite, cls: type, *options, name: str = "forward"):
        self.steps = {rewrite: options}
        self.name = name
        self.follow(cls)

    def add(self, rewrite, *options) -> None:
        """Append a step; it replaces an earlier one of the same function."""
        self.steps.pop(rewrite, None)
        self.steps[rewrite] = options
        self.follow(self.cls)

    def follow(self, cls: type) -> None:
        """Rewrite the method of this class from now on."""
        self.cls, self.stock = cls, getattr(cls, self.name)
        self.rewritten = self.stock
        for rewrite, options in self.steps.items():
            _, self.rewritten = rewrite(self.rewritten, *options) or (None, self.rewritten)

    def __reduce__(self):
        return _again, (self.cls, self.name, self.steps)


def _again(cls: type, name: str, steps: dict) -> Rewritten:
    (first, options), *others = steps.items()
    made = Rewritten(first, cls, *options, name=name)
    for rewrite, options in others:
        made.add(rewrite, *options)
    return made


@follows
def rewritten_forward(module: nn.Module, spec: Rewritten, *args, **kwargs):
    """Call the class's method, rewritten.

    FSDP2 gives a module a class of its own, in whose forward transformers wraps the former one again: only
    the outermost wrapper checkpoints. Others give the class another forward.
    """
    now = getattr(type(module), spec.name)
    if now is not spec.stock:
        if torch.compiler.is_compiling():  # no source is read while tracing
            return now(module, *args, **kwargs)
        spec.follow(type(module))
    return spec.rewritten(module, *args, **kwargs)


def rewrite_innermost(forward, change, **names) -> tuple | None:
    """(what `change` found, the new forward): `change` modifies the source of the innermost function.

    Wrappers stand around the new function as around the old one, so that what they do is done: deprecated
    keywords get their new names, layers are checkpointed. None if `change` finds nothing, or if it is
    unclear how a wrapper holds its function. `names` are the names that the change refers to.
    """
    inner, node, held = rewritten_source(inspect.unwrap(forward))
    found = None if node is None else change(node)
    made = wrapped_again(forward, recompiled(inner, node, **held, **names)) if found else None
    return None if made is None else (found, made)


def wrapped_again(forward, made: types.FunctionType) -> types.FunctionType | None:
    """Put `made` inside the wrappers of `forward`, which include decorators."""
    if not hasattr(forward, "__wrapped__"):
        return made
    if not isinstance(forward, types.FunctionType):
        return None
    wrapped = forward.__wrapped__
    made = wrapped_again(wrapped, made)
    cells = forward.__closure__ or ()
    mine = [cell for cell in cells if _holds(cell, wrapped)]
    if made is None or len(mine) != 1:
        return None
    cells = tuple(types.CellType(made) if cell is mine[0] else cell for cell in cells)
    code, names = forward.__code__, forward.__globals__
    wrapper = types.FunctionType(code, names, forward.__name__, forward.__defaults__, cells)
    wrapper.__kwdefaults__ = forward.__kwdefaults__
    functools.update_wrapper(wrapper, forward)
    wrapper.__dict__ = {name: made if value is wrapped else value for name, value in vars(forward).items()}
    return wrapper


def _holds(cell: types.CellType, function) -> bool:
    try:
        return cell.cell_contents is function
    except ValueError:  # empty
        return False


def rewritable(function) -> ast.FunctionDef | None:
    """The source of a function whose statements may be replaced.

    Without its decorators: what they made of it stands around it, or in its dictionary.
    """
    try:
        node = function_node(function)
    except Unrecognised:
        return None
    if function.__closure__ or hasattr(function, "__wrapped__") or isinstance(node, ast.Lambda):
        return None
    node.decorator_list = []
    return None if any(map(_private, ast.walk(node))) else node


def rewritten_source(function) -> tuple[types.FunctionType, ast.FunctionDef | None, dict]:
    """(the original function, its present source, the names added to its closure)."""
    if function not in _sources:
        return function, rewritable(function), {}
    first, node, names = _sources[function]
    return first, copy.deepcopy(node), names


def _private(node: ast.AST) -> bool:
    """Whether the compiler mangles a name inside its class."""
    name = getattr(node, "attr", getattr(node, "id", ""))
    return isinstance(name, str) and name.startswith("__") and not name.endswith("__")


def recompiled(forward, node: ast.FunctionDef, **names) -> types.FunctionType:
    """A function like `forward` with this source, in its namespace; `names` are added to its closure.

    The namespace is not a copy: torch.compile looks globals up in the module that their dictionary names.
    """
    tree = ast.parse(f"def outer({', '.join(names)}): ...")
    tree.body[0].body = [copy.deepcopy(node)]
    ast.increment_lineno(tree, forward.__code__.co_firstlineno - 1)
    code = compile(ast.fix_missing_locations(tree), forward.__code__.co_filename, "exec", dont_inherit=True)
    for name in ("outer", node.name):
        code = next(c for c in code.co_consts if isinstance(c, types.CodeType) and c.co_name == name)
    cells = tuple(types.CellType(names[name]) for name in code.co_freevars)
    made = types.FunctionType(code, forward.__globals__, forward.__name__, forward.__defaults__, cells)
    made.__kwdefaults__, made.__qualname__ = forward.__kwdefaults__, forward.__qualname__
    vars(made).update(vars(forward))
    _sources[made] = forward, node, names
    return made


def statement_at(text: str, where: ast.stmt | ast.expr) -> ast.stmt:
    """Parse one statement, with the line of another one."""
    (made,) = ast.parse(text).body
    for child in ast.walk(made):
        ast.copy_location(child, where)
    return made


def replace_expressions(node: ast.AST, change) -> int:
    """Replace expressions by the text that `change` gives, inner ones first; returns how many."""

    class Each(ast.NodeTransformer):
        places = 0

        def visit(self, part):
            part = self.generic_visit(part)
            text = change(part) if isinstance(part, ast.expr) else None
            if text is None:
                return part
            self.places += 1
            return statement_at(text, part).value

    each = Each()
    each.visit(node)
    return each.places


def same_form(form, node, holes: dict[str, str | None]) -> bool:
    """Whether a piece of source is `form`; `holes` match any text and receive it."""
    if isinstance(form, ast.Name) and form.id in holes:
        text = "" if node is None else ast.unparse(node)
        holes[form.id] = text if holes[form.id] is None else holes[form.id]
        return holes[form.id] == text
    if isinstance(form, list):
        return len(form) == len(node) and all(
            same_form(*pair, holes) for pair in zip(form, node, strict=True)
        )
    if not isinstance(form, ast.AST):
        return form == node
    return type(form) is type(node) and all(
        same_form(getattr(form, field), getattr(node, field), holes) for field in form._fields
    )


def producer(before: list[ast.stmt], name: str) -> str | None:
    """The attribute of self whose call `name` was last assigned from, if the statements show it."""
    for done in reversed(before):
        if any(
            isinstance(part, ast.Name) and part.id == name and isinstance(part.ctx, ast.Store)
            for part in ast.walk(done)
        ):
            match done:
                case ast.Assign(targets=[ast.Name()], value=ast.Call(func=function)):
                    return attribute_of_self(function)
            return None
    return None


def attribute_of_self(node: ast.expr) -> str | None:
    """The name of the attribute if a node is `self.name`, or None."""
    match node:
        case ast.Attribute(value=ast.Name(id="self"), attr=name):
            return name
    return None
