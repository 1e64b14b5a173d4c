"""A replacement method bound to one module instance."""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import types
from dataclasses import dataclass

import torch
from torch import nn

from tigon._dtensor import PLAIN


class Forward:
    """`function(module, spec, *args, **kwargs)`; its method `call` is stored as `module.forward` or another.

    An object and not a closure: copying or pickling the module carries it along, bound to the copy. A bound
    method of it and not itself: `torch.compile` tells objects apart by identity, and methods by their code,
    so that layers compiled one by one share what is compiled.
    """

    kind = None  # the class whose method was replaced; that and those it calls are kept too
    seen = None  # the module's class at the last call that had those methods: of kind, or made of it

    def __init__(self, function, module: nn.Module, spec, name: str = "forward"):
        self.function = function
        self.module = module
        self.spec = spec
        self.name = name  # of the class's method

    def call(self, *args, **kwargs):
        kind = type(self.module)
        same = kind is self.seen and not self.helpers and getattr(kind, self.name, None) is self.method
        if same or self.replaces_own():
            return self.function(self.module, self.spec, *args, **kwargs)
        in_place = _ours(self.module.__dict__.get(_place(self.module, self.name))) is self
        # A wrapper keeps the method that it found, as one around a bound method of the class does.
        method = getattr(kind, self.name) if in_place or self.method is None else self.method
        return method(self.module, *args, **kwargs)

    def replaces_own(self) -> bool:
        """Whether the class still has the replaced method and the methods that it calls."""
        kind = type(self.module)
        if self.kind is None:
            self._know(_origin(kind))
        if kind is not self.seen:
            if not (_same_methods(kind, self.kind) or _same_methods(self.kind, kind)):  # given back
                return False
            self.seen = kind
        return getattr(kind, self.name, None) is self.method and (not self.helpers or self._helped())

    def _know(self, kind: type) -> None:
        self.kind, self.method = kind, getattr(kind, self.name, None)
        self.helpers = _helpers(kind, self.method)

    def _helped(self) -> bool:
        """Whether the class still has the methods that the replaced one calls."""
        if torch.compiler.is_compiling():
            return True
        own = self.module.__dict__
        return all(name not in own and getattr(self.seen, name) is f for name, f in self.helpers)

    def __deepcopy__(self, memo):
        """Keep what was found in the class: the copy's class may be another one than that by now."""
        made = memo[id(self)] = object.__new__(type(self))
        vars(made).update((name, copy.deepcopy(value, memo)) for name, value in vars(self).items())
        return made

    def __getstate__(self):
        """Keep the class if pickle finds it with the replaced method; else copies look at their own class."""
        found = ("seen", "method", "helpers")
        state = {name: value for name, value in vars(self).items() if name not in found}
        same = self.kind and _is_named(self.kind) and getattr(self.kind, self.name, None) is self.method
        return state | {"kind": self.kind if same else None}

    def __setstate__(self, state):
        vars(self).update(state)
        if self.kind is not None:
            self._know(self.kind)

    def __repr__(self):
        return f"<tigon method of {type(self.module).__name__}>"


class Following(Forward):
    """A forward whose function looks at the module's class itself."""

    def call(self, *args, **kwargs):
        return self.function(self.module, self.spec, *args, **kwargs)


def _helpers(kind: type, method) -> tuple:
    """The methods of a class that one of its methods names, by name."""
    names = getattr(getattr(inspect.unwrap(method), "__code__", None), "co_names", ()) if method else ()
    members = ((name, getattr(kind, name, None)) for name in names if name not in vars(nn.Module))
    return tuple((name, f) for name, f in members if isinstance(f, types.FunctionType))


def _is_named(kind: type) -> bool:
    """Whether the class's module has it under its name."""
    return getattr(sys.modules.get(kind.__module__), kind.__qualname__, None) is kind


def _origin(kind: type) -> type:
    """The class with these methods that a class was made of: parametrisations make another in each call."""
    bases = (base for base in kind.__mro__ if issubclass(base, nn.Module))
    return next((base for base in bases if _is_named(base) and _same_methods(kind, base)), kind)


def _same_methods(kind: type, known: type) -> bool:
    """Whether a class made of another one (by FSDP2, for a parametrisation) has its methods."""
    bases = known.__mro__[: known.__mro__.index(nn.Module)] if issubclass(kind, known) else ()
    methods = {
        name
        for base in bases
        for name, value in vars(base).items()
        if isinstance(value, types.FunctionType) and not name.startswith("__")
    }
    return bool(bases) and all(getattr(kind, name) is getattr(known, name) for name in methods)


class ModelForward(Following):
    """The forward of a whole model. Other libraries inspect it, wrap it, keep it and bind it again.

    So this object itself stands in `module.forward`, with the signature of what it replaces, and is kept in
    the module besides: whatever wraps it, there is one.
    """

    @property
    def __signature__(self):
        return inspect.signature(self._replaced)

    @property
    def __code__(self):  # torch.export names its place
        return self._replaced.__code__

    @property
    def _replaced(self):
        below = self.module.__dict__.get(BELOW)
        return types.MethodType(type(self.module).forward, self.module) if below is None else below

    def __call__(self, *args, **kwargs):
        if args and args[0] is self.module:  # accelerate binds what it takes out of its wrappers
            args = args[1:]
        return self.call(*args, **kwargs)


def follows(function):
    """Mark a replacement that looks at the class of its module itself."""
    function.follows = True
    return function


def bind(function, module: nn.Module, spec, name: str = "forward", above: bool = False, of=None) -> None:
    """Make `function` a method of this instance; its class stays as it is.

    `above`: a forward that transformers' tensor parallelism gave the instance becomes `stock`. `of`: the
    method of the class that it replaces, if that has another name.
    """
    if above and foreign(module):
        module.__dict__[BELOW] = module.__dict__[_place(module, name)]
    kind = Following if getattr(function, "follows", False) else Forward
    made = kind(function, module, spec, of or name)
    module.__dict__[_place(module, name)] = made.call
    made.replaces_own()


def bound(module: nn.Module, name: str = "forward") -> Forward | None:
    """The `Forward` that is bound to a method of an instance, or None."""
    return _ours(module.__dict__.get(_place(module, name)))


def _ours(method) -> Forward | None:
    if isinstance(method, Forward):
        return method
    if not isinstance(method, types.MethodType):
        return None
    owner = method.__self__  # not by getattr with a default: tracing, torch 2.11 answers with the default
    return owner if isinstance(owner, Forward) else None


def bind_model(function, module: nn.Module, spec) -> None:
    """Bind a function to a whole model as `bind` does to a part; `model_forward` finds it."""
    bind(function, module, spec, above=True)
    made = ModelForward(function, module, spec)
    module.__dict__[_place(module, "forward")] = module.__dict__[MODEL] = made


def model_forward(module: nn.Module) -> ModelForward | None:
    """The forward that `bind_model` bound, even if others have wrapped it since."""
    return module.__dict__.get(MODEL)


def unbind(module: nn.Module) -> None:
    """Restore the methods that the instance had."""
    below = module.__dict__.pop(BELOW, None)
    if MODEL in vars(module):
        vars(module)[MODEL].function = functools.partial(_released, below)  # others may hold it
    for name in [name for name, value in vars(module).items() if _ours(value)]:
        if name == HOOKED:
            module.__dict__[name] = types.MethodType(type(module).forward, module)
        else:
            del module.__dict__[name]
    if below is not None:
        module.__dict__[_place(module, "forward")] = below


def _released(below, module, spec, *args, **kwargs):
    """Call what was replaced, and not the present forward, which may call this."""
    del spec
    return type(module).forward(module, *args, **kwargs) if below is None else below(*args, **kwargs)


STATE = "_tigon_state"  # attribute of a patched model with the state that undo needs
ARRIVALS = "_tigon_arrivals"  # and what sees adapters that come later
MODEL = "_tigon_forward"  # attribute of a model with its `ModelForward`
BELOW = "_tigon_below"  # attribute of a module with the forward that was the instance's own

# accelerate keeps the forward of a module here if it moves tensors for it (device_map, offloading).
HOOKED = "_old_forward"

CALL = "_call_impl"  # of every module: what its call does
_CALLED, _IMPL = nn.Module.__call__, nn.Module._call_impl

# The forward that ms-swift gives the parts of an adapter, and the attribute for the one before.
_MOVES_INPUT, INNER = ["swift.tuners.peft", "keep_device_forward"], "forward_origin"


def _place(module: nn.Module, name: str) -> str:
    return HOOKED if name == "forward" and HOOKED in vars(module) and hasattr(module, "_hf_hook") else name


def stock(module: nn.Module, *args, **kwargs):
    """Call the forward of the class, or the one that transformers' tensor parallelism gave the instance."""
    below = module.__dict__.get(BELOW)
    return type(module).forward(module, *args, **kwargs) if below is None else below(*args, **kwargs)


def plain(*tensors) -> bool:
    """Whether all are ordinary tensors: kernels take no DTensor, quantised or other subclass."""
    return all(type(tensor) in PLAIN for tensor in tensors)


def read(module: nn.Module, *names) -> list:
    """The attributes of these names; other values are returned. torch looks for parameters last."""
    own, values = module._parameters, []
    for name in names:
        if isinstance(name, str):
            value = own.get(name)
            name = getattr(module, name) if value is None else value
        values.append(name)
    return values


def autocast_dtype(device: str) -> torch.dtype | None:
    """The dtype of autocast on a kind of device; None if it is off or Tigon has no kernel for that dtype."""
    on = device in ("cpu", "cuda") and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if on else None


LINEAR = nn.Linear.forward
_written: dict[type, object] = {}  # class -> its forward; None if its source has another one


def intact(part: nn.Module, forward) -> bool:
    """Whether a call of this part is one of this forward of its class, and nothing else.

    Every fused path asks it of every part whose call it leaves out.
    """
    return type(part).forward is forward and not has_hooks(part) and not foreign(part) and calls_forward(part)


def written(kind: type):
    """The forward that a class was written with; None if it has another one when it is first seen."""
    if kind not in _written:
        owner = next(base for base in kind.__mro__ if "forward" in vars(base))
        forward, name = kind.forward, f"{owner.__qualname__}.forward"
        attributes = ("__module__", "__qualname__", "__wrapped__")
        places = [getattr(forward, attribute, None) for attribute in attributes]
        _written[kind] = forward if places == [owner.__module__, name, None] else None
    return _written[kind]


def is_as_written(part: nn.Module) -> bool:
    """Whether neither the instance nor the class has another forward than the class was written with."""
    return type(part).forward is written(type(part)) and not foreign(part) and calls_forward(part)


for _kind in (nn.Linear, nn.Dropout, nn.Identity):
    written(_kind)


@dataclass(frozen=True)
class Part:
    """A child or function whose call is fused away: its attribute's name, and its class or the function."""

    name: str
    kind: object
    forward: object = None  # of the class
    numbers: tuple = ()  # names and values of a child's own attributes

    @classmethod
    def named(cls, module: nn.Module, name: str) -> Part:
        part = getattr(module, name)
        if not isinstance(part, nn.Module):
            return cls(name, part)
        own = ((key, value) for key, value in vars(part).items() if key not in ("training", "forward"))
        numbers = tuple((key, value) for key, value in own if not key.startswith("_"))
        return cls(name, type(part), type(part).forward, numbers)

    def is_in(self, module: nn.Module) -> bool:
        """Whether the part is unchanged and has no hooks."""
        part = getattr(module, self.name)
        if not isinstance(part, nn.Module):
            return part is self.kind
        if type(part) is not self.kind or not intact(part, self.forward):
            return False
        if torch.compiler.is_compiling():  # where bound methods and partial functions have no identity
            return True
        return all(_alike(part.__dict__.get(key), value) for key, value in self.numbers)


def _alike(some, other) -> bool:
    """Whether an attribute has kept its value; numbers are other objects after pickling."""
    if some is other or type(some) is not type(other):
        return some is other
    return isinstance(other, int | float | str) and some == other


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has forward or backward hooks."""
    own = module.__dict__
    forward = own["_forward_hooks"] or own["_forward_pre_hooks"]
    return bool(forward or own["_backward_hooks"] or own["_backward_pre_hooks"])


def calls_forward(module: nn.Module) -> bool:
    """Whether a call of the module is PyTorch's, which calls its forward."""
    kind = type(module)
    return kind.__call__ is _CALLED and kind._call_impl is _IMPL and CALL not in module.__dict__


def foreign(module: nn.Module) -> bool:
    """Whether the instance carries a forward that is neither ours nor its class's own.

    transformers' kernels and accelerate rebind the class's own forward to modules they do not change.
    ms-swift's moves x to the weight's device and calls the one that was there: callers compare devices.
    """
    forward = module.__dict__.get(_place(module, "forward"))
    if forward is None:
        return False
    method = isinstance(forward, types.MethodType)
    if method and [getattr(forward, name, "") for name in ("__module__", "__name__")] == _MOVES_INPUT:
        forward = module.__dict__.get(INNER, forward)
        method = isinstance(forward, types.MethodType)
    own = method and forward.__func__ is type(module).forward and forward.__self__ is module
    return not own and not _ours(forward)


def tensor_parallel(module: nn.Module) -> bool:
    """Whether a Linear has the forward of transformers' column-wise plan, with logits for all processes."""
    forward = module.__dict__.get(BELOW) or module.__dict__.get(_place(module, "forward"))
    if getattr(forward, "__module__", None) != "transformers.distributed.tensor_parallel":
        return False
    styles = [cell.cell_contents for cell in getattr(forward, "__closure__", None) or ()]
    return any(
        type(style).__name__ == "ColwiseParallel"
        and style.output_layouts.is_replicate()
        and style.use_local_output
        for style in styles
    )


def blocked(module: nn.Module) -> str | None:
    """Why this instance must keep the forward it has, or None."""
    if not foreign(module):
        return None
    if getattr(module.forward, "runs_tigon", False):
        return "runs tigon already, through transformers' kernels"
    return "its forward is bound to the instance (tensor parallel, kernels or another patch)"
