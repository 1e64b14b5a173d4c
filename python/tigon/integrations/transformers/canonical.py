"""Reduce the source of a small forward function to one canonical expression.

Two functions that compute the same thing in different words (other names for locals, parameters
and attributes, helpers, `pow(2)` or `square()`, `.float()` or `.to(torch.float32)`, operands of
`+` and `*` in another order) reduce to the same text. What this file does not understand raises
`Unrecognised`: a wrong match would train a wrong model, a missed one only leaves stock code.
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import linecache
import re
import textwrap
import types
from collections import Counter
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers.activations import ACT2FN

MAX_INLINING = 4

# Functions and tensor methods that have one spelling in the canonical form.
_TORCH = """
    rsqrt sqrt pow square mean tanh sigmoid cat chunk bmm stack repeat_interleave view_as_complex view_as_real
    topk softmax gather zeros_like
"""
_FUNCTIONAL = "silu gelu relu dropout group_norm layer_norm rms_norm linear sigmoid softmax"
FUNCTIONS = {getattr(torch, name): name for name in _TORCH.split()}
FUNCTIONS |= {getattr(F, name): name for name in _FUNCTIONAL.split()}
FUNCTIONS |= {isinstance: "isinstance", float: "number"}
_METHODS = """
    rsqrt sqrt pow square mean tanh sigmoid chunk unsqueeze float to type type_as contiguous size dim view
    permute clamp flatten reshape repeat_interleave unbind topk softmax gather sum max masked_fill expand bool
"""
METHODS = frozenset(_METHODS.split())
# Names under which the arguments of these functions may be given, and of all others.
PLACES = {
    "chunk": {"chunks": 1, "dim": 2},
    "repeat_interleave": {"repeats": 1, "dim": 2},
    "flatten": {"start_dim": 1},
    "topk": {"k": 1, "dim": 2},
    "softmax": {"dim": 1, "dtype": 2},
    "gather": {"dim": 1, "index": 2},
    "silu": {},
    "relu": {},
}
KEYWORDS = {"dim": 1, "keepdim": 2, "dtype": 1, "exponent": 1, "chunks": 1, "other": 1}
# Functions whose arguments after the first may be left out, in order.
DEFAULTS = {
    "group_norm": {"num_groups": None, "weight": None, "bias": None, "eps": 1e-5},
    "layer_norm": {"normalized_shape": None, "weight": None, "bias": None, "eps": 1e-5},
    "rms_norm": {"normalized_shape": None, "weight": None, "eps": None},
    "clamp": {"min": None, "max": None},
    "gelu": {"approximate": "none"},
    "dropout": {"p": 0.5, "training": True, "inplace": False},
}
OPERATORS = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.Div: "div",
    ast.FloorDiv: "floordiv",
    ast.Pow: "pow",
}


class Unrecognised(Exception):
    """The source uses something that has no canonical form; the text says what."""


class NoSource(Unrecognised):
    """There is no source to read."""


@dataclass(frozen=True)
class Canonical:
    """A canonical expression; `@1`, `@2` in its text are the attributes of self it reads."""

    text: str
    attributes: tuple[str, ...]
    calls: tuple[str, ...]  # those that are called, in the order of the first calls


def canonical(function, cls: type | None = None) -> Canonical:
    """The canonical expression of a function, or of a method of `cls`, with helper methods of `cls`."""
    expression, reads = _evaluated(function, cls)
    if all(_now(place, name) is value for place, name, value in reads):
        return expression
    return _evaluated.__wrapped__(function, cls)[0]  # a name means something else by now


def _now(place, name):
    try:
        return place.get(name) if isinstance(place, dict) else getattr(place, name, None)
    except ValueError:  # an empty cell
        return None


@functools.lru_cache(maxsize=4096)
def _evaluated(function, cls) -> tuple[Canonical, list]:
    """The expression, and the values read for it in addition to the source: (where, name, value)."""
    if hasattr(function, "__wrapped__"):
        raise Unrecognised("decorated function")
    node = function_node(function)
    names, defaults = _parameters(node)
    env, reads = {}, []
    if cls is not None:
        self_name, *names = names or [""]
        env[self_name] = ("self",)
    env |= {name: ("arg", i) for i, name in enumerate(names)}
    evaluator = _Evaluator(function, cls, 0, reads, {})
    value = evaluator.run(node, env)
    attributes: dict[str, str] = {}

    def rename(match):
        return attributes.setdefault(match[1], f"@{len(attributes) + 1}")

    text = re.sub(r"@<(\w+)>", rename, f"{len(names)}{defaults} {_render(value)}")
    return Canonical(text, tuple(attributes), tuple(evaluator.calls)), reads


def source_tree(function) -> ast.AST:
    """The syntax tree of a function's source; raises `NoSource` if it has no source."""
    try:
        module, name = getattr(function, "__module__", None) or "", getattr(function, "__name__", "")
        if name == "<lambda>" or module.startswith(f"{__package__}.patterns."):  # one file has many
            path, first = function.__code__.co_filename, function.__code__.co_firstlineno
            linecache.checkcache(path)
            return _functions("".join(linecache.getlines(path)))[first]
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError, KeyError) as error:
        raise NoSource("no Python source") from error


@functools.lru_cache(maxsize=8)
def _functions(text: str) -> dict[int, ast.FunctionDef | ast.Lambda]:
    """The functions of a file by their first line, without lines that several functions share."""
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.Lambda)]
    lines = Counter(node.lineno for node in nodes)
    return {node.lineno: node for node in nodes if lines[node.lineno] == 1}


def function_node(function) -> ast.FunctionDef | ast.Lambda:
    """The syntax node of a function; raises `NoSource` or `Unrecognised` if there is none."""
    if not isinstance(function, types.FunctionType):
        raise NoSource("no Python source")
    tree = source_tree(function)
    if isinstance(tree, ast.Module):
        (tree,) = tree.body if len(tree.body) == 1 else (None,)
    if not isinstance(tree, ast.FunctionDef | ast.Lambda):
        raise Unrecognised("not a plain function")
    return tree


def _parameters(node: ast.FunctionDef | ast.Lambda) -> tuple[list[str], list[str]]:
    """The names of a function's parameters, and their defaults."""
    arguments = node.args
    if arguments.vararg or arguments.kwarg or arguments.kwonlyargs or arguments.posonlyargs:
        raise Unrecognised("a signature with *, ** or /")
    return [argument.arg for argument in arguments.args], [ast.unparse(value) for value in arguments.defaults]


class _Evaluator:
    """Evaluate the body of one function symbolically; expressions are nested tuples."""

    def __init__(self, function, cls, depth, reads, calls):
        self.function = function
        self.reads, self.calls = reads, calls
        self.globals = function.__globals__
        self.cls = cls
        self.depth = depth

    def run(self, node: ast.FunctionDef | ast.Lambda, env: dict):
        if isinstance(node, ast.Lambda):
            return self.expression(node.body, env)
        return self.block(node.body, env)

    def block(self, statements: list, env: dict):
        for index, statement in enumerate(statements):
            rest = statements[index + 1 :]
            match statement:
                case ast.Expr(value=ast.Constant()):  # docstring
                    pass
                case ast.Assign(targets=[target], value=value):
                    env = self.assign(target, self.expression(value, env), env)
                case ast.AnnAssign(target=target, value=value) if value is not None:
                    env = self.assign(target, self.expression(value, env), env)
                case ast.Expr(
                    value=ast.Call(
                        func=ast.Attribute(value=ast.Name(id=name), attr="scatter_"), args=arguments
                    )
                ) if env.get(name, ("",))[0] == "zeros_like" and not statement.value.keywords:
                    env = {**env, name: ("scatter", env[name], *(self.expression(a, env) for a in arguments))}
                case ast.AugAssign(target=ast.Name(id=name), op=op, value=value):
                    new = self.binary(op, env.get(name), self.expression(value, env))
                    env = {**env, name: new}
                case ast.If(body=body, orelse=[]) if all(isinstance(s, ast.Raise) for s in body):
                    pass  # a check: what it refuses, the replacement refuses or computes
                case ast.If(test=test, body=body, orelse=orelse):
                    then, otherwise = self.block(body + rest, env), self.block(orelse + rest, env)
                    return _cond(self.expression(test, env), then, otherwise)
                case ast.Return(value=value) if value is not None:
                    return self.expression(value, env)
                case _:
                    raise Unrecognised(f"statement `{ast.unparse(statement).splitlines()[0]}`")
        raise Unrecognised("a path that returns nothing")

    def assign(self, target, value, env):
        match target:
            case ast.Name(id=name):
                return {**env, name: value}
            case ast.Tuple(elts=[ast.Starred(value=ast.Name(id=name)), *rest]) if value[0] == "shape":
                env = {**env, name: ("leading", value[1], _const(len(rest)))}
                for i, element in enumerate(rest):
                    env = self.assign(element, ("size", value[1], _const(i - len(rest))), env)
                return env
            case ast.Tuple(elts=targets):
                if value[0] == "tuple" and len(value) - 1 != len(targets):
                    raise Unrecognised(f"assignment to `{ast.unparse(target)}`")
                for i, element in enumerate(targets):
                    env = self.assign(element, _part(value, i), env)
                return env
        raise Unrecognised(f"assignment to `{ast.unparse(target)}`")

    def expression(self, node, env):
        match node:
            case ast.Constant(value=value):
                return _const(value)
            case ast.Name(id=name):
                return self.name(name, env)
            case ast.Attribute(value=value, attr=attr):
                return self.attribute(self.expression(value, env), attr)
            case ast.BinOp(left=left, op=op, right=right):
                return self.binary(op, self.expression(left, env), self.expression(right, env))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                value = self.expression(operand, env)
                return _const(-value[1]) if value[0] == "const" else ("neg", value)
            case ast.UnaryOp(op=ast.Invert(), operand=operand):
                return ("invert", self.expression(operand, env))
            case ast.Tuple(elts=elements) | ast.List(elts=elements):
                return ("tuple", *(self.expression(element, env) for element in elements))
            case ast.Subscript(value=value, slice=index):
                return _index(self.expression(value, env), self.index(index, env))
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return _cond(*(self.expression(part, env) for part in (test, body, orelse)))
            case ast.BoolOp(op=op, values=values):
                return (type(op).__name__.lower(), *(self.expression(value, env) for value in values))
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                return (type(op).__name__.lower(), self.expression(left, env), self.expression(right, env))
            case ast.Call():
                return self.call(node, env)
        raise Unrecognised(f"expression `{ast.unparse(node)}`")

    def name(self, name, env):
        if name in env:
            return env[name]
        code = self.function.__code__
        if name in code.co_freevars:
            cell = self.function.__closure__[code.co_freevars.index(name)]
            return ("object", self.read(cell, "cell_contents"))
        if name in self.globals:
            return ("object", self.read(self.globals, name))
        if name in ("isinstance", "float"):
            return ("object", getattr(builtins, name))
        if name in code.co_varnames:  # a path on which it is not assigned fails
            return ("unbound",)
        raise Unrecognised(f"name `{name}`")

    def attribute(self, base, attr):
        if base == ("self",):
            return ("attr", attr)
        if base[0] == "object":  # torch.float32, nn.functional.silu
            if not isinstance(base[1], types.ModuleType) or not hasattr(base[1], attr):
                raise Unrecognised(f"attribute `{attr}`")
            return ("object", self.read(base[1], attr))
        if attr == "dtype":
            return base[2] if base[0] == "cast" else ("dtype", base)
        if attr in ("values", "indices") and base[0] in ("topk", "max"):
            return _part(base, ("values", "indices").index(attr))
        if attr in ("shape", "device") or (attr == "weight" and base[0] == "attr"):
            return (attr, base)
        if base[0] == "attr":  # self.config.gelu_approximate
            return ("member", base, ("const", attr))
        raise Unrecognised(f"attribute `{attr}`")

    def index(self, node, env):
        match node:
            case ast.Tuple(elts=elements):
                return ("tuple", *(self.index(element, env) for element in elements))
            case ast.Slice(lower=lower, upper=upper, step=step):
                ends = [_const(None) if end is None else self.expression(end, env) for end in (lower, upper)]
                ends[0] = _const(None) if ends[0] == _const(0) else ends[0]
                return ("slice", *ends, *(() if step is None else (self.expression(step, env),)))
        return self.expression(node, env)

    def binary(self, op, left, right):
        name = OPERATORS.get(type(op))
        if name is None or left is None:
            raise Unrecognised(f"operator {type(op).__name__}")
        return _build(name, [left, right])

    def call(self, node, env):
        arguments = [self.argument(argument, env) for argument in node.args]
        keywords = {word.arg: self.expression(word.value, env) for word in node.keywords}
        match node.func:
            case ast.Attribute(value=ast.Call(func=ast.Name(id="super"), args=[]), attr=attr):
                return self.inline(self.parent(attr), [("self",), *arguments], keywords)
            case ast.Attribute(value=value, attr=attr):
                base = self.expression(value, env)
                if base == ("self",):
                    return self.call_self(attr, arguments, keywords)
                if base[0] != "object":
                    if attr not in METHODS:
                        raise Unrecognised(f"method `{attr}`")
                    return _build(attr, _positional(attr, [base, *arguments], keywords))
        function = self.expression(node.func, env)
        if function[0] == "activation" and not keywords:  # ACT2FN[name](x)
            return ("call", function, *arguments)
        if function[0] != "object":
            raise Unrecognised(f"call `{ast.unparse(node)}`")
        name = _known(function[1])
        if name is not None:
            return _build(name, _positional(name, arguments, keywords))
        return self.inline(function[1], arguments, keywords)

    def argument(self, node, env):
        if not isinstance(node, ast.Starred):
            return self.expression(node, env)
        value = self.expression(node.value, env)
        return value if value[0] == "leading" else ("spread", value)  # leading sizes are handed on

    def call_self(self, attr, arguments, keywords):
        method = self.read(self.cls, attr)
        if method is None:  # a child module
            if keywords:
                raise Unrecognised(f"keywords in a call of `{attr}`")
            self.calls.setdefault(attr)
            return ("call", ("attr", attr), *arguments)
        try:
            return self.inline(method, [("self",), *arguments], keywords)
        except Unrecognised:  # a method like a child: something to call with these arguments
            if keywords or not arguments:
                raise
            self.calls.setdefault(attr)
            return ("call", ("attr", attr), *arguments)

    def parent(self, attr):
        """The method that `super()` finds."""
        mro = self.cls.__mro__ if self.cls is not None else ()
        name = self.function.__name__
        owner = next((i for i, base in enumerate(mro) if vars(base).get(name) is self.function), None)
        after = () if owner is None else mro[owner + 1 :]
        base = next((base for base in after if attr in vars(base)), None)
        if base is None:
            raise Unrecognised(f"super().{attr}")
        return self.read(base, attr)

    def read(self, place, name):
        """The present value of a name. It is compared when the expression is asked for again."""
        self.reads.append((place, name, _now(place, name)))
        return self.reads[-1][2]

    def inline(self, function, arguments, keywords):
        if self.depth >= MAX_INLINING or keywords or hasattr(function, "__wrapped__"):
            raise Unrecognised(f"call of `{getattr(function, '__name__', function)}`")
        node = function_node(function)
        names, defaults = _parameters(node)
        if defaults or len(names) != len(arguments):
            raise Unrecognised(f"call of `{getattr(node, 'name', 'lambda')}`")
        env = dict(zip(names, arguments, strict=True))
        return _Evaluator(function, self.cls, self.depth + 1, self.reads, self.calls).run(node, env)


def _known(function) -> str | None:
    try:
        return FUNCTIONS.get(function)
    except TypeError:  # not hashable
        return None


def _positional(name, arguments, keywords):
    """Arguments with the keywords this file knows in their places."""
    places = PLACES.get(name, KEYWORDS)
    if name == "topk":  # in which order is its caller's matter
        keywords = {word: value for word, value in keywords.items() if word != "sorted"}
    elif name in ("silu", "relu") and keywords.get("inplace") in (_const(False), None):
        keywords = {}
    elif name in DEFAULTS:
        missing = list(DEFAULTS[name].items())[len(arguments) - 1 :]
        keywords = {word: _const(default) for word, default in missing} | keywords
        places = {word: place for place, word in enumerate(DEFAULTS[name], 1)}
    for word in sorted(keywords, key=lambda word: places.get(word, 99)):
        if places.get(word) != len(arguments):
            raise Unrecognised(f"keyword `{word}` of `{name}`")
        arguments = [*arguments, keywords[word]]
    return arguments


def _const(value):
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return ("const", float(value) if number else value)


def _part(value, i):
    return value[i + 1] if value[0] == "tuple" else ("part", value, _const(i))


def _cond(test, then, otherwise):
    return then if then == otherwise else ("cond", test, then, otherwise)


def _index(base, index):
    if base == ("object", ACT2FN):
        return ("activation", index)
    match base, index:
        case ("shape", tensor), ("const", float()):
            return ("size", tensor, index)
        case (("tuple" | "chunk" | "topk"), *_), ("const", float(i)) if i >= 0:
            return _part(base, int(i))
        case ("shape", tensor), ("slice", ("const", None), ("const", float(n))) if n < 0:
            return ("leading", tensor, _const(-n))
    return ("index", base, index)


def _cast(value, dtype):
    if dtype == ("object", torch.float):
        dtype = ("object", torch.float32)
    return value if dtype == ("dtype", value) else ("cast", value, dtype)


def _build(name, arguments):
    match name, arguments:
        case "float", [value]:
            return _cast(value, ("object", torch.float32))
        case "to" | "type", [value, dtype] if _is_dtype(dtype):
            return _cast(value, dtype)
        case "to", [value, ("device", _)]:
            return ("to_device", *arguments)
        case "type_as", [value, other]:
            return _cast(value, other[2] if other[0] == "cast" else ("dtype", other))
        case "pow", [value, ("const", 2.0)]:
            return ("square", value)
        case "pow", [value, ("const", -0.5)]:
            return ("rsqrt", value)
        case "mul", [left, right] if left == right:
            return ("square", left)
        case "add" | "mul", [left, right] if not (_is_sequence(left) or _is_sequence(right)):
            return (name, *sorted((left, right), key=_order))
        case "mean", [value, ("const", -1.0), ("const", True)]:
            return ("mean", value)
        case "softmax", [value, dim, dtype]:
            return ("softmax", _cast(value, dtype), dim)
        case "number", [("const", str(text))]:
            return _const(float(text))
        case "contiguous", [value]:
            return value
    if name in ("to", "type", "float") or (name == "mean" and len(arguments) == 1):
        raise Unrecognised(f"this use of `{name}`")
    return (name, *arguments)


def _is_sequence(value) -> bool:
    """Whether a value is a sequence of sizes: `+` joins these, so the order of its operands matters."""
    match value:
        case (("tuple" | "shape" | "leading"), *_):
            return True
        case ("index", base, ("slice", *_)):
            return _is_sequence(base)
        case (("add" | "mul"), *parts):
            return any(map(_is_sequence, parts))
    return False


def _is_dtype(value) -> bool:
    return value[0] == "dtype" or (value[0] == "object" and isinstance(value[1], torch.dtype))


def _order(value) -> str:
    # Attribute names must not decide the order: they differ between classes.
    return re.sub(r"@<\w+>", "@", _render(value))


def _render(value) -> str:
    match value:
        case ("arg", index):
            return f"${index}"
        case ("attr", name):
            return f"@<{name}>"
        case ("const", constant):
            return repr(constant)
        case ("object", thing):
            return getattr(thing, "__name__", None) or repr(thing)
        case (name, *arguments):
            return f"{name}({', '.join(_render(argument) for argument in arguments)})"
    raise Unrecognised(f"value {value!r}")
