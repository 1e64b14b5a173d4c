"""The state that a captured graph depends on: it is noted once and compared before each replay."""

from __future__ import annotations

import collections
import functools
import inspect
import itertools
import operator
import types
from collections.abc import Iterable

import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from tigon._deterministic import is_deterministic
from tigon._dtensor import is_dtensor
from tigon._op import saves_through_hooks

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_STANDARD = {*vars(nn.Module())} - {"training"}
# Hooks that do nothing, or the same in every call: transformers' recorder of outputs, and inputs that shall
# have gradients (of gradient checkpointing with frozen embeddings).
_HARMLESS = ("transformers.utils.output_capturing", "make_inputs_require_grads")


def _harmless(hook) -> bool:
    hook = getattr(hook, "func", hook)
    names = getattr(hook, "__module__", None) or "", getattr(hook, "__qualname__", "")
    return names[0].startswith(_HARMLESS[0]) or names[1].endswith(_HARMLESS[1])


class Watch:
    """The state that Python reads in a module and its children: noted once, compared before each replay.

    Modules and parameters by identity; of parameters and buffers where and what they are; attributes, in
    containers and configurations too; the forwards of instances and classes, and the functions that those
    name; hooks.

    Args:
        ignore: attributes of the root that its captured forward does not read.
        containers: more of them, by what to call them.
    """

    def __init__(self, root: nn.Module, ignore: Iterable[str] = (), containers: dict | None = None):
        named = dict(root.named_modules())
        modules = list(named.values())
        self.paths = [path or type(root).__name__ for path in named]
        self._ignored = frozenset(ignore)
        self._children = [m._modules for m in modules]
        self.holders = [m._parameters for m in modules]
        self._buffers = [m._buffers for m in modules]
        self._dicts = [vars(m) for m in modules]
        # The root's hooks run outside of its forward.
        self._hooks = [getattr(m, name) for m in modules if m is not root for name in _HOOKS]
        self._hooked = [path for path in self.paths[1:] for _ in _HOOKS]
        self._modules, self._types = modules, list(map(type, modules))
        self._classes = list(dict.fromkeys(self._types))
        self._tree = self._flat(self._children)
        self._tensors = self._flat(self.holders), self._flat(self._buffers)
        self.parameters = _unique(self._tensors[0])
        self.trained = [p for p in self.parameters if p.requires_grad]
        self.buffers = _unique(self._tensors[1])
        self._all = [*self.parameters, *self.buffers]
        self._addresses, self._kinds = list(map(torch.Tensor.data_ptr, self._all)), self._kinds_now()
        self._attributes = [dict(d) for d in self._attributes_now()]
        self._containers: list[tuple[str, object, object]] = []
        self._slots: list[tuple[str, object, str, object]] = []
        seen: dict[int, int] = {}
        for path, attributes in zip(self.paths, self._attributes, strict=True):
            for name, value in attributes.items():
                if name not in _STANDARD:
                    self._enter(f"{path}.{name}", value, seen, _DEPTH)
        for what, value in (containers or {}).items():
            self._enter(what, value, seen, 1)
        self._methods = self._of_classes()
        bases = dict.fromkeys(base for c in self._classes for base in c.__mro__)
        programs = (base for base in bases if base.__module__.partition(".")[0] not in _NO_PROGRAMS)
        self._class_dicts = [(base.__name__, vars(base), dict(vars(base))) for base in programs]
        read = (place for forward, _ in self._methods for place in _named_by(forward))
        self._names = [(names, name, names.get(name)) for names, name in read]
        for _, name, value in self._names:
            if isinstance(value, dict | list | set):
                self._enter(name, value, seen, 1)

    def _attributes_now(self) -> list[dict]:
        root = {name: value for name, value in self._dicts[0].items() if name not in self._ignored}
        return [root, *self._dicts[1:]]

    def _enter(self, what, value, seen, depth):
        """Note what a container or an object holds."""
        known = seen.get(id(value), 0)
        if known >= depth or (not isinstance(value, _CONTAINERS) and not _is_plain_object(value)):
            return
        seen[id(value)] = depth
        inside = []
        if isinstance(value, _CONTAINERS):
            inside += value.values() if isinstance(value, dict) else value
            if not known and not isinstance(value, tuple):
                self._containers.append((what, value, _plain_kind(value)(value)))
        if _is_plain_object(value):
            own = getattr(value, "__dict__", None)
            slots = [(name, getattr(value, name)) for name in _slots_of(type(value)) if hasattr(value, name)]
            inside += [*(own or {}).values(), *(held for _, held in slots)]
            if not known:
                self._containers += [] if own is None else [(what, own, dict(own))]
                self._slots += [(what, value, name, held) for name, held in slots]
        for one in inside:
            self._enter(what, one, seen, depth - 1)

    @staticmethod
    def _flat(dicts) -> list:
        return list(itertools.chain.from_iterable(map(dict.values, dicts)))

    def _kinds_now(self) -> list:
        every = self._all
        return [
            [t.requires_grad for t in every],
            [t.dtype for t in every],
            list(map(torch.Tensor.size, every)),
            list(map(torch.Tensor.stride, every)),
        ]

    def _of_classes(self) -> list:
        return [(c.forward, c.__call__) for c in self._classes]

    def moved(self) -> str | None:
        """The reason why a replay would read freed memory, or None.

        The watch keeps the tensors themselves.
        """
        if list(map(torch.Tensor.data_ptr, self._all)) != self._addresses:
            return "a parameter or buffer has other memory"
        return None

    def changed(self) -> str | None:
        """The change in what the captured Python has read, or None."""
        if not _same(self._flat(self._children), self._tree):
            return "modules were added, removed or replaced"
        if not _same(self._flat(self.holders), self._tensors[0]):
            return "parameters were added, removed or replaced"
        if not _same(self._flat(self._buffers), self._tensors[1]):
            return "buffers were added, removed or replaced"
        if self._kinds_now() != self._kinds:
            return "a parameter or buffer has another dtype or layout, or another requires_grad"
        try:
            for i, (now, then) in enumerate(zip(self._attributes_now(), self._attributes, strict=True)):
                if now != then:
                    return f"{self.paths[i]}.{_first_other(now, then)} has changed"
            for what, now, then in self._containers:
                if now != then:
                    return f"{what} has changed"
            for what, owner, name, then in self._slots:
                if getattr(owner, name, None) is not then:
                    return f"{what} has changed"
            for what, now, then in self._class_dicts:
                if now != then:
                    return f"{what}.{_first_other(now, then)} of the class has changed"
        except (RuntimeError, ValueError):  # two tensors or arrays, which do not compare
            return "an attribute that holds a tensor has changed"
        if not _same(list(map(type, self._modules)), self._types):
            return "the class of a module was replaced"
        if self._methods != self._of_classes():
            return "the forward of a class was replaced"
        for names, name, value in self._names:
            if names.get(name) is not value:
                return f"{names.get('__name__')}.{name} was replaced"
        return None

    def refused(self) -> str | None:
        """The reason why the modules cannot be captured, or None."""
        if any(self._hooks):
            for path, hooks in zip(self._hooked, self._hooks, strict=True):
                if not all(map(_harmless, hooks.values())):
                    return f"hooks on {path} would run once only"
        everywhere = nn.modules.module
        if any(getattr(everywhere, f"_global{name}", None) for name in _HOOKS):
            return "hooks on all modules would run once only"
        return None

    def held(self, name: str) -> list:
        """The values that modules hold by this name."""
        return [attributes[name] for attributes in self._dicts if name in attributes]

    def unfit(self) -> str | None:
        """The reason why the parameters cannot be captured, or None; looked at once."""
        for p in self.parameters:
            if is_dtensor(p) or getattr(p, "_is_flat_param", False) or getattr(p, "_fsdp_flattened", False):
                return "its parameters are sharded (FSDP): each layer gathers them in its turn"
            if hasattr(p, "ds_id"):
                return "its parameters are partitioned (ZeRO-3)"
            if p.requires_grad and type(p) is not nn.Parameter:
                return f"a trained parameter is a {type(p).__name__}"
            if getattr(p, "tigon_main_grad", False):
                return "gradients go to main_grad"
        devices = {p.device for p in self.parameters}
        if len(devices) > 1:
            return f"it is on several devices, {', '.join(sorted(map(str, devices)))}"
        return None


class StandIns:
    """Parameters of the same memory in the place of a watched module's, for the time of a capture.

    Autograd keeps a node for each parameter as long as any graph leads to it, with the stream that it was
    made on and with the hooks of others (DDP's): a capture must not meet it.
    """

    def __init__(self, watch: Watch):
        made = {}
        for p in watch.trained:
            made[id(p)] = stand_in = nn.Parameter(p.detach())
            vars(stand_in).update(vars(p))
        self.parameters = list(made.values())
        self._places = [
            (held, name, made[id(p)]) for held in watch.holders for name, p in held.items() if id(p) in made
        ]

    def __enter__(self) -> StandIns:
        self._originals = [held[name] for held, name, _ in self._places]
        for held, name, stand_in in self._places:
            held[name] = stand_in
        return self

    def __exit__(self, *_) -> None:
        for (held, name, _), p in zip(self._places, self._originals, strict=True):
            held[name] = p


_DEPTH = 5  # of containers and objects inside of each other
_CONTAINERS = (dict, list, set, tuple, collections.deque)
_NO_PROGRAMS = frozenset(("builtins", "functools", "logging", "tigon", "torch", "weakref"))


def _plain_kind(value) -> type:
    """The container without what a subclass adds."""
    return next(kind for kind in _CONTAINERS if isinstance(value, kind))


def _is_plain_object(value) -> bool:
    """Whether it is one of the program's own objects, such as a configuration."""
    if not hasattr(value, "__dict__") and not _slots_of(type(value)):
        return False
    if isinstance(value, nn.Module | torch.Tensor | type | types.ModuleType):
        return False
    return type(value).__module__.partition(".")[0] not in _NO_PROGRAMS


@functools.cache
def _slots_of(kind: type) -> tuple[str, ...]:
    slots = (vars(base).get("__slots__", ()) for base in kind.__mro__)
    names = itertools.chain.from_iterable((s,) if isinstance(s, str) else s for s in slots)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def _unique(tensors) -> list[torch.Tensor]:
    return list({id(t): t for t in tensors if t is not None}.values())


def _first_other(now: dict, then: dict) -> str:
    absent = object()
    return next((n for n in {**now, **then} if now.get(n, absent) is not then.get(n, absent)), "?")


def _named_by(function, depth: int = 2):
    """(globals, name) of everything that a function and the functions it names look up among its globals."""
    function = inspect.unwrap(function)
    if not isinstance(function, types.FunctionType):
        return
    names = function.__globals__
    for name in function.__code__.co_names:
        if name in names:
            yield names, name
            value = names[name]
            if depth > 1 and getattr(value, "__module__", None) == function.__module__:
                yield from _named_by(value, depth - 1)


def _same(some: list, others: list) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))


def settings(device: str) -> tuple:
    """The switches outside of all modules that decide which kernels run."""
    return (
        torch.is_autocast_enabled(device),
        torch.get_autocast_dtype(device),
        torch.get_default_dtype(),
        is_deterministic(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.is_anomaly_enabled(),
        *[str(mode.device) for mode in _function_modes() if type(mode) is DeviceContext],
        *[_read(switch) for switch in _SWITCHES],
    )


_matmul, _cudnn, _sdp = torch.backends.cuda.matmul, torch.backends.cudnn, torch.backends.cuda
_SWITCHES = (
    torch.get_float32_matmul_precision,
    lambda: _matmul.allow_tf32,
    lambda: _matmul.fp32_precision,
    lambda: _matmul.allow_fp16_reduced_precision_reduction,
    lambda: _matmul.allow_bf16_reduced_precision_reduction,
    lambda: _matmul.allow_fp16_accumulation,
    torch.backends.cuda.preferred_blas_library,
    lambda: _cudnn.enabled,
    lambda: _cudnn.allow_tf32,
    lambda: _cudnn.deterministic,
    lambda: _cudnn.benchmark,
    _sdp.flash_sdp_enabled,
    _sdp.math_sdp_enabled,
    _sdp.mem_efficient_sdp_enabled,
    _sdp.cudnn_sdp_enabled,
)


def _read(switch):
    """PyTorch lets nobody read a precision by one name that was set by another; older ones lack some."""
    try:
        return switch()
    except (RuntimeError, AttributeError):
        return None


def intercepted() -> str | None:
    """The reason why code that looks at each operation would see only those of a capture, or None."""
    if saves_through_hooks():
        return "hooks on saved tensors (offloading) would run once only"
    if torch._C._len_torch_dispatch_stack() or not all(type(m) is DeviceContext for m in _function_modes()):
        return "a mode of PyTorch looks at each operation"
    return None


def _function_modes() -> list:
    """The modes of this thread, of which one of `DeviceContext` only says where new tensors go."""
    return _get_current_function_mode_stack() if torch._C._len_torch_function_stack() else []
