"""A whole function as one graph."""

from __future__ import annotations

import contextlib
import functools
import itertools
import types
from collections.abc import Callable, Sequence

import torch
from torch import nn

from tigon.error import Error, check
from tigon.graphs.backend import (
    LASTING,
    RECAPTURES,
    WARMUP,
    Loan,
    Said,
    backends,
    live,
    log,
    undisturbed,
    why,
)
from tigon.graphs.watch import Watch, intercepted, settings


class GraphStep:
    """A function of tensors as one graph; see :func:`graph_step`."""

    def __init__(self, fn: Callable, example: tuple | dict, watch: Sequence = ()):
        check("graph_step", callable(fn), "fn must be callable, got {}", type(fn).__name__)
        words = "example must be a tuple of arguments or a dictionary of keywords, got {}"
        check("graph_step", isinstance(example, tuple | dict), words, type(example).__name__)
        self.fn = fn
        self._layout = _layout(*_arguments(example))
        devices = {t.device for t in _tensors(_arguments(example))}
        names = sorted(map(str, devices))
        check("graph_step", len(devices) <= 1, "example must be on one device, got {}", names)
        self.said = Said(getattr(fn, "__qualname__", type(fn).__name__))
        self.device = next(iter(devices), torch.device("cpu"))
        self.replays = 0
        self._found = _reached([fn, *watch])
        self._backend = None
        self._calls = self._captures = 0
        self._again = self._renewed = 0  # changes in quick succession; number of replays at the last one
        self._graph = None
        live.add(self)

    def __call__(self, *args, **kwargs):
        kwargs = dict(sorted(kwargs.items()))
        reason = self._why_not(args, kwargs)
        if reason is not None:
            self.said.say(reason)
            return self._eager(args, kwargs)
        kind = backends.get(self.device.type)
        if kind is None or torch.compiler.is_compiling() or kind.capturing():
            return self._eager(args, kwargs)
        if self._graph is not None and (changed := self._changed()) is not None:
            self.reset()
            log.info("[graphs] %s is captured again: %s", self.said.who, changed)
            self._again = self._again + 1 if self.replays - self._renewed < LASTING else 1
            self._renewed = self.replays
            if self._again > RECAPTURES:
                self._stop = f"{changed}, again and again (a number that changes must be a tensor)"
                return self(*args, **kwargs)
        self._calls += 1
        waits = self._calls <= 2 * WARMUP and any(p.grad is not None for p in self._found.trained())
        if self._calls <= WARMUP or (
            self._graph is None and waits
        ):  # for a call that starts without gradients
            return self._eager(args, kwargs)
        try:
            if self._graph is None:
                self._capture(kind, args, kwargs)
        except Exception as error:
            self.reset()
            self._stop = why(error)
            return self(*args, **kwargs)
        return self._replay(args, kwargs)

    _stop: str | None = None

    def _eager(self, args, kwargs):
        results = self.fn(*args, **kwargs)
        return _with_tensors(results, iter([t.detach() for t in _tensors(results)]))

    def _why_not(self, args, kwargs) -> str | None:
        if self._stop is not None:
            return self._stop
        if _layout(args, kwargs) != self._layout:
            return "its arguments are not like the example"
        for watch in self._found.watches:
            if (reason := watch.refused() or watch.unfit()) is not None:
                return reason
        return intercepted()

    def _changed(self) -> str | None:
        for watch in self._found.watches:
            if (reason := watch.moved() or watch.changed()) is not None:
                return reason
        if self._settings != settings(self.device.type):
            return "a switch of PyTorch or Tigon has changed"
        if self._numbers != self._found.numbers():
            return "an optimizer's option or state has changed"
        if self._in_place is not None and [_place(p.grad) for p in self._params] != self._in_place:
            return "gradients have other memory"
        return None

    def _capture(self, kind, args, kwargs) -> None:
        self._captures += 1
        self._found = _reached(self._found.roots)
        self._backend = self._backend or kind(self.device)
        self._params = self._found.trained()
        before = [p.grad for p in self._params]
        self._inputs = [t.detach().clone().requires_grad_(t.requires_grad) for t in _tensors((args, kwargs))]
        args, kwargs = _with_tensors((args, kwargs), iter(self._inputs))
        held = {}

        def whole():
            held["results"] = self.fn(*args, **kwargs)
            held["left"] = [p for p in self._params if p.grad is not None]
            results = (*_tensors(held["results"]), *(p.grad for p in held["left"]))
            return [t.detach() for t in results]

        try:
            with undisturbed(self.device):
                self._graph, self._results = self._backend.capture(whole)
            after = [p.grad for p in self._params]
        except BaseException:
            for p, grad in zip(self._params, before, strict=True):
                p.grad = grad
            raise
        results = held.pop("results")
        count = len([*_tensors(results)])
        self._results, gradients = self._results[:count], self._results[count:]
        self._made = _with_tensors(results, itertools.repeat(_SLOT))
        self._settings, self._numbers = settings(self.device.type), self._found.numbers()
        self._in_place, self._left, self._loan = None, [], None
        if any(b is not None and a is b for a, b in zip(after, before, strict=True)):
            self._in_place = [_place(grad) for grad in after]
        elif all(b is None for b in before) and any(a is not None for a in after):
            # The function sets gradients and reads none: each call sets them again.
            self._left = held["left"]
            self._loan = Loan(gradients, self._left)
            for p in self._left:
                p.grad = None

    def _replay(self, args, kwargs):
        if self._loan is not None:
            taken = any(p.grad is not None for p in self._params)
            if self._loan.call_in() or taken:
                self.said.say("gradients of a call before are still held, or wait to be added to")
                return self._eager(args, kwargs)
        given = list(_tensors((args, kwargs)))
        if self._inputs:
            torch._foreach_copy_([t.detach() for t in self._inputs], [t.detach() for t in given])
        self._backend.replay(self._graph)
        self.replays += 1
        if self._loan is not None:
            for p, grad in zip(self._left, self._loan.lend(), strict=True):
                p.grad = grad
        return _with_tensors(self._made, iter([t.clone() for t in self._results]))

    def reset(self) -> None:
        """Drop the graph; the next call captures again."""
        if self._graph is not None and self._backend is not None:
            self._backend.settle()
        self._graph = self._results = self._inputs = self._loan = None

    def lines(self):
        """The lines of `tigon.env` about this step."""
        state = "captured" if self._graph is not None else "not captured"
        reasons = "".join(f"; {n} eager: {reason}" for reason, n in self.said.counts.items())
        yield f"step {self.said.who}: {state}, {self.replays} replays{reasons}"

    def __deepcopy__(self, memo):
        raise Error("[graph_step] a step must not be copied (make one of the copy's function)")


def graph_step(fn: Callable, example: tuple | dict, *, watch: Sequence = ()) -> GraphStep:
    """Run a function of tensors as one CUDA graph: its kernels are replayed, and its Python does not run.

    The function may be a whole step: forward, backward and optimizer. The first two calls run eagerly, and
    the third one captures. A call runs eagerly, with a warning that says why, if its arguments do not match
    the example or if it cannot be captured. Tigon watches the modules and optimizers that the function
    reaches: those of its closure, of the object that it is a method of, and of the globals that it names. If
    a parameter's memory, an attribute, a hook or an optimizer's number changes, the step is captured again.

    Args:
        fn: takes tensors and plain values, returns tensors in tuples, lists or dictionaries. Optimizers in it
            must be capturable. Values that a scheduler changes, such as the learning rate, must be tensors.
        example: its arguments as a tuple, or its keywords as a dictionary. All replayed calls have these
            shapes, dtypes and plain values.
        watch: more modules and optimizers to watch.

    Returns:
        a callable with the arguments of `fn`. It returns copies without an autograd graph.

    Raises:
        tigon.Error: fn is not callable, or example is not a tuple or dictionary of tensors on one device.
    """
    return GraphStep(fn, example, watch)


class _Reached:
    """Modules and optimizers that a function reaches, watched."""

    def __init__(self, roots, modules, optimizers):
        self.roots = roots
        self.watches = [Watch(module) for module in modules]
        self.optimizers = optimizers

    def trained(self) -> list[torch.Tensor]:
        return [p for watch in self.watches for p in watch.trained]

    def numbers(self) -> list:
        found: list = []
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                found += (
                    _place(v) if isinstance(v, torch.Tensor) else v for k, v in group.items() if k != "params"
                )
                found += map(id, group["params"])
            for state in optimizer.state.values():
                found += map(_place, state.values())
        return found


def _place(value):
    return (value.data_ptr(), value.dtype, value.shape) if isinstance(value, torch.Tensor) else value


def _reached(roots) -> _Reached:
    modules: dict[int, nn.Module] = {}
    optimizers: dict[int, torch.optim.Optimizer] = {}
    seen: set[int] = set()

    def look(value, depth):
        if id(value) in seen or depth == 0:
            return
        seen.add(id(value))
        if isinstance(value, nn.Module):
            modules[id(value)] = value
        elif isinstance(value, torch.optim.Optimizer):
            optimizers[id(value)] = value
        elif isinstance(value, functools.partial):
            for inner in (value.func, *value.args, *value.keywords.values()):
                look(inner, depth)
        elif isinstance(value, types.MethodType):
            look(value.__func__, depth)
            look(value.__self__, depth)
        elif isinstance(value, types.FunctionType):
            for cell in value.__closure__ or ():
                with contextlib.suppress(ValueError):  # an empty cell
                    look(cell.cell_contents, depth - 1)
            for inner in (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()):
                look(inner, depth - 1)
            for name in value.__code__.co_names:
                if name in value.__globals__:
                    look(value.__globals__[name], depth - 1)
        elif isinstance(value, list | tuple | dict):
            for inner in value.values() if isinstance(value, dict) else value:
                look(inner, depth - 1)
        elif hasattr(value, "__dict__") and not isinstance(value, type | types.ModuleType | torch.Tensor):
            for inner in vars(value).values():
                look(inner, depth - 1)

    for root in roots:
        look(root, 4)
    return _Reached(roots, modules.values(), list(optimizers.values()))


def _arguments(example) -> tuple[tuple, dict]:
    return ((), example) if isinstance(example, dict) else (example, {})


def _tensors(tree):
    """All tensors of nested tuples, lists and dictionaries, in order."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from _tensors(value)
    elif isinstance(tree, tuple | list):
        for value in tree:
            yield from _tensors(value)


_SLOT = object()  # where a tensor was


def _with_tensors(tree, tensors):
    """The tree with each tensor replaced by the next of `tensors`."""
    if isinstance(tree, torch.Tensor) or tree is _SLOT:
        return next(tensors)
    if isinstance(tree, dict):
        made = {name: _with_tensors(value, tensors) for name, value in tree.items()}
        return made if type(tree) is dict else type(tree)(**made)
    if isinstance(tree, tuple | list):
        made = [_with_tensors(value, tensors) for value in tree]
        return type(tree)(*made) if hasattr(tree, "_fields") else type(tree)(made)
    return tree


def _layout(args, kwargs) -> list:
    """Shapes and dtypes of the tensors and all plain values."""
    return _laid_out((args, dict(sorted(kwargs.items()))))


def _laid_out(tree):
    if isinstance(tree, torch.Tensor):
        return "tensor", tuple(tree.shape), tree.dtype, tree.device, tree.requires_grad
    if isinstance(tree, dict):
        return [(name, _laid_out(value)) for name, value in tree.items()]
    if isinstance(tree, tuple | list):
        return [_laid_out(value) for value in tree]
    return tree
