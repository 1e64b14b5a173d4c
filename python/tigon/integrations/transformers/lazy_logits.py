"""Lazy logits: hidden states and a head, multiplied only when some code reads them.

A patched head returns `LazyLogits` in training. A loss takes the hidden states and never computes logits. Any
other use of the object gets the tensor that the original code would have. It is a plain Python object and not
a tensor subclass, so that torch.compile traces through it.
"""

from __future__ import annotations

import copy
import functools
import math
from contextlib import contextmanager, nullcontext

import torch
import torch.nn.functional as F

from tigon.error import Error
from tigon.integrations.transformers.forward import bound, plain
from tigon.integrations.transformers.head_operands import adapter_state
from tigon.integrations.transformers.lazy_operations import (
    FRESH,
    as_it_is,
    fold,
    is_float,
    is_scalar,
    prefix,
    replay,
    split_index,
)
from tigon.integrations.transformers.report import reader
from tigon.integrations.transformers.sharding import in_a_group, present


class LossRequest:
    """Passed to the head by a loss: the head's forward then returns the loss instead of logits."""

    def __init__(self, target, dtype=None, columns=None, added=None, **options):
        self.target = target
        self.dtype = dtype  # autocast dtype when the head was called
        self.columns = columns  # leading rows of the weight that are used
        self.added = added  # to the head's bias
        self.options = options


class LogitsRequest:
    """Passed to the head to get real logits."""


def _while_owed(method):
    """A method of lazy logits; if it returns None, or the logits are computed, the tensor's method."""

    @functools.wraps(method)
    def call(self, *args, **kwargs):
        result = method(self, *args, **kwargs) if self._owed else None
        return getattr(self.materialise(), method.__name__)(*args, **kwargs) if result is None else result

    return call


class LazyLogits:
    """`head(hidden)` and a chain of cheap operations on it, computed when touched.

    Known without computing: shape, size, dim, ndim, numel, device, dtype, requires_grad. Stay
    lazy: float/to(dtype), * and / by a number, + a row, tanh, contiguous, view and reshape that keep the
    last axis, row indexing, and [..., :n]. Everything else computes the logits, once.

    Objects that would share memory as tensors have one owner here. Some rows are computed by themselves for
    results that share no memory with them. Any other read of a view gets a view of the tensor that its owner
    computes. So an in-place change is visible wherever it is visible without Tigon.
    """

    _kept = ("_head", "_hidden", "_columns", "dtype", "_calls", "_autocast", "_rows")
    _kept += ("_limit", "_detached", "_sources", "_seen", "_adapter", "_differentiated")

    def __init__(self, head, hidden, columns, dtype, calls, autocast=None, rows=False):
        self._head = head
        self._hidden = hidden.contiguous()  # a part of it lies as the same part of the logits
        self._columns = columns  # vocabulary entries still wanted
        self.dtype = dtype
        self._calls = calls
        self._autocast = autocast
        self._rows = rows  # whether the head's loss takes rows that are added
        self._base = None  # what it is a view of
        self._views = ()  # (method, arguments) that make the view of it
        self._chain = ()  # ("mul", s) | ("div", s) | ("tanh",) | ("to", dtype) | ("add", row), of the owner
        self._limit = None  # columns when fewer than the head has
        self._detached = not torch.is_grad_enabled()
        self._real = None
        self._part = None  # (length of the chain, these rows multiplied by themselves)
        self._predicted = None  # (that, first argmax of every row), if a loss was asked for it
        self._sliced = False  # whether rows or columns of the owner were left out
        self._sources = ()  # what is multiplied and added, and versions, to notice changes in between
        self._seen = ()  # parameters and their versions, to notice an optimizer step
        self._differentiated = None  # called when a loss of them is computed after the model's forward
        self._adapter = ()  # what PEFT's layer multiplied with
        if not torch.compiler.is_compiling():
            self._sources = _versions(hidden)
            self._seen = [(name, p, p._version) for name, p in head.named_parameters()]
            self._adapter = adapter_state(head)

    # --- what is known ---------------------------------------------------------------------

    @property
    def shape(self):
        return torch.Size((*self._hidden.shape[:-1], self._columns))

    @property
    def requires_grad(self):
        if self._detached:
            return False
        rows = [link[1] for link in self._owner._chain if link[0] == "add"]
        return any(t.requires_grad for t in (self._hidden, *self._head.parameters(), *rows))

    def size(self, dim=None):
        return self.shape if dim is None else self.shape[dim]

    def numel(self):
        return math.prod(self.shape)

    def is_floating_point(self):
        return True

    def __len__(self):
        return self.shape[0]

    # --- what stays lazy -------------------------------------------------------------------

    @property
    def _owner(self):
        return self if self._base is None else self._base

    @property
    def _owed(self):
        return self._owner._real is None

    def _with(self, *links, view=None, sliced=False, **changes):
        """Lazy logits with more links of the chain, or a view by a method, and changed attributes."""
        twin = object.__new__(type(self))
        for name in self._kept:  # not by __dict__, which torch.compile of PyTorch 2.11 cannot trace
            setattr(twin, name, changes[name] if name in changes else getattr(self, name))
        twin._real = twin._part = twin._predicted = twin._base = None
        twin._views, twin._chain, twin._sliced = (), (*self._owner._chain, *links), False
        if view is not None:
            twin._base, twin._chain = self._owner, ()
            twin._views, twin._sliced = (*self._views, view), self._sliced or sliced
        if not torch.is_grad_enabled() and not twin._detached:
            twin._detached = True
            twin._views += (("detach", ()),) if view is not None else ()
        return twin

    @_while_owed
    def to(self, *args, **kwargs):
        """Do what Tensor.to does; a change of dtype, or a move to the same device, stays lazy."""
        dtype = kwargs.get("dtype", args[0] if args else None)
        if len(args) + len(kwargs) == 1 and is_float(dtype):
            return self if dtype == self.dtype else self._with(("to", dtype), dtype=dtype)
        if torch.compiler.is_compiling() or "copy" in kwargs:
            return None
        device, dtype, _, layout = torch._C._nn._parse_to(*args, **kwargs)
        here = device is None or (
            device.type == self.device.type and device.index in (None, self.device.index)
        )
        if layout is not None or not here or not (dtype is None or is_float(dtype)):
            return None
        return self if dtype is None else self.to(dtype)  # accelerate moves all outputs

    def type_as(self, other):
        return self.to(other.dtype) if other.device == self.device else self.to(other)

    def contiguous(self, *_, **__):
        """Lazy logits are contiguous; if the original ones would not be, the result is a new tensor."""
        return self if self._dense() else self._with()

    def _dense(self):
        return not self._sliced or (self._limit is None and self._hidden.is_contiguous())

    def is_contiguous(self, *_, **__):
        return True

    @_while_owed
    def detach(self):
        return self._with(view=("detach", ()), _detached=True)

    @_while_owed
    def tanh(self):
        return self._with(("tanh",))

    def _scaled(self, name, other):
        if self._owed and is_scalar(other):
            return self._with((name, as_it_is(other)))
        return replay(self._value(), (name, _real(other)))

    def mul(self, other):
        return self._scaled("mul", other)

    __mul__ = __rmul__ = mul

    def div(self, other, **kwargs):
        return self._value().div(other, **kwargs) if kwargs else self._scaled("div", other)

    __truediv__ = div

    def add(self, other, **kwargs):
        """Do what Tensor.add does; a row added to all rows stays lazy: it is added to the head's bias."""
        if not kwargs and self._owed and self._is_row(other):
            sources = self._sources if torch.compiler.is_compiling() else (*self._sources, *_versions(other))
            dtype = torch.promote_types(self.dtype, other.dtype)
            return self._with(("add", other.flatten()), dtype=dtype, _sources=sources)
        return self._value().add(_real(other), **kwargs)

    __add__ = __radd__ = add

    def _is_row(self, other) -> bool:
        known = isinstance(other, torch.Tensor) and plain(other) and other.is_floating_point()
        fits = known and self._rows and other.device == self.device and 1 <= other.ndim <= self.ndim
        fits = fits and other.numel() == other.shape[-1] == self._columns
        return fits and all(name in ("to", "add") for name, *_ in self._owner._chain)

    def _scale_in_place(self, name, other):
        whole = self._owed and not self._sliced and not self._detached and torch.is_grad_enabled()
        if whole and is_scalar(other):
            self._owner._chain = (*self._owner._chain, (name, as_it_is(other)))
            return self
        return getattr(self.materialise(), f"{name}_")(_real(other))

    def __imul__(self, other):
        return self._scale_in_place("mul", other)

    def __itruediv__(self, other):
        return self._scale_in_place("div", other)

    @_while_owed
    def view(self, *shape, size=None):
        sizes = shape if size is None else (size,)
        sizes = tuple(sizes[0]) if sizes and isinstance(sizes[0], tuple | list) else sizes
        if not sizes or sizes[-1] != self._columns:
            return None
        hidden = self._hidden.reshape(*sizes[:-1], self._hidden.shape[-1])
        return self._with(view=("view", sizes) if self._dense() else None, _hidden=hidden)

    @_while_owed
    def reshape(self, *sizes, shape=None):
        return self.view(*(sizes if shape is None else (shape,)))

    @_while_owed
    def flatten(self, start_dim=0, end_dim=-1):
        if 0 <= start_dim <= end_dim < self.ndim - 1:
            view = ("flatten", (start_dim, end_dim)) if self._dense() else None
            return self._with(view=view, _hidden=self._hidden.flatten(start_dim, end_dim))
        return None

    @_while_owed
    def __getitem__(self, key):
        keys = key if isinstance(key, tuple) else (key,)
        rows, last = split_index(keys, self.ndim)
        if rows is None:
            return None
        basic = not any(isinstance(key, torch.Tensor | list) for key in rows)
        taken = (*rows, slice(None)) if rows else ...
        hidden = self._hidden[taken]
        view = ("__getitem__", (taken,)) if basic else None
        picked = self._with(view=view, sliced=rows != (), _hidden=hidden)
        if last is None or last == slice(None):
            return picked
        limit = prefix(last, self._columns)
        if limit is not None:
            first = ("__getitem__", ((..., slice(limit)),))
            return picked._with(view=first, sliced=True, _columns=limit, _limit=limit)
        if basic and isinstance(last, slice | int):
            return None  # a view
        return picked._value()[..., last]  # few rows first, then the matmul

    # --- what computes ---------------------------------------------------------------------

    def materialise(self) -> torch.Tensor:
        """The logits as a tensor; computed once and kept. A view shares the memory of all of them."""
        if self._real is None:
            self._real = self._matmul() if self._base is None else self._shown()
        return self._real

    def _value(self) -> torch.Tensor:
        """The logits for a result that shares no memory with them: all rows, or only those of this part."""
        if not self._sliced or not self._owed:
            return self.materialise()
        done = len(self._owner._chain)
        if self._part is None or self._part[0] != done:
            self._part = (done, self._matmul())
        return self._part[1]

    def _shown(self) -> torch.Tensor:
        value = self._base.materialise()
        with self._graph():
            for method, args in self._views:
                value = getattr(value, method)(*args)
        return value

    def _graph(self):
        """The grad mode in which the logits get the graph of the forward, wherever they are read."""
        return nullcontext() if torch.is_grad_enabled() else _graph_anywhere()

    def _matmul(self) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            self._check_fresh()
            if not self._calls.materialised:
                self._calls.say(f"{reader()} reads output.logits, one matmul of the head a step")
            self._calls.materialised += 1
        with torch.no_grad() if self._detached else self._graph():
            value = self._compute()
        if self._differentiated is not None and value.requires_grad:
            value.register_hook(self._differentiated)
        return value

    def _compute(self):
        kind, cast = self.device.type, self._autocast
        with nullcontext() if cast is None else torch.autocast(kind, dtype=cast):
            value = self._call_head(LogitsRequest())
        if self._limit is not None:
            value = value[..., : self._limit]
        for link in self._owner._chain:
            value = replay(value, link)
        return value.contiguous()

    def _call_head(self, request):
        """Ask the patched head. If its weight is not in memory, a call lets hooks gather it.

        If it is in memory, no hook may run: FSDP2 would gather the head's group again, and free the weights
        of the other modules in it before their backward.
        """
        own = bound(self._head)
        answers = getattr(self._head, "answer", None) if own is None else own.spec.answer
        if answers is None:
            raise Error(
                "[lazy_logits] logits must be read before the head gets another forward, got one put there "
                "since the forward pass (or tigon.undo)"
            )
        held = self._replaced()
        if held is not None:
            return torch.func.functional_call(self._head, held, (self._hidden, request))
        if present(self._head):
            return answers(self._head, self._hidden, request)
        if in_a_group(self._head):
            raise Error(
                "[lazy_logits] logits must be read before backward() frees the head's weight, which FSDP2 "
                "holds in one group with other modules, got it sharded"
            )
        return self._head(self._hidden, request)

    def _replaced(self):
        """The parameters of the forward pass if others replaced them (functional_call), or None."""
        now = dict(self._head.named_parameters()) if self._seen else {}
        others = ((p, now[name]) for name, p, _ in self._seen if now.get(name, p) is not p)
        # Not what is sharded, or offloaded: that is the same parameter in another form.
        if any(plain(*pair) and not pair[1].is_meta for pair in others):
            return {name: p for name, p, _ in self._seen}
        return None

    def _check_fresh(self):
        now = dict(self._head.named_parameters())  # sharded by now: they are in another form
        if any(p._version != version and plain(now.get(name, p)) for name, p, version in self._seen):
            raise Error(
                "[lazy_logits] logits must be read before the head's weight changes, got a weight "
                "changed since the forward pass (read output.logits before optimizer.step())"
            )
        if any(tensor._version != version for tensor, version in self._sources):
            raise Error(
                "[lazy_logits] logits must be read before the hidden states change in place, got some that "
                "changed since the forward pass (read output.logits before, or change a copy)"
            )
        if self._adapter != adapter_state(self._head):
            raise Error(
                "[lazy_logits] logits must be read before the head's adapter changes, got another "
                "one active, merged or scaled since (read output.logits inside disable_adapter())"
            )

    def cross_entropy(
        self,
        target,
        *,
        weight=None,
        ignore_index=-100,
        reduction="mean",
        label_smoothing=0.0,
        denominator=None,
        shift=False,
        predict=False,
        z_loss=0.0,
        token_scaling=False,
    ):
        """Cross-entropy of these logits without computing them; None if that is not possible.

        With `token_scaling` each row is weighted by the probability of its label. With `predict` the same
        pass finds the result of a later argmax over the vocabulary.
        """
        folded = fold(self._owner._chain) if self._owed else None
        if folded is None:
            return None
        scale, softcap, added = folded
        if torch.compiler.is_compiling():
            self._calls.traced = True
        else:
            self._check_fresh()
            self._calls.fused += 1
            if self._differentiated is not None:
                self._differentiated(None)
        request = LossRequest(
            target,
            dtype=self._autocast,
            columns=self._limit,
            added=added,
            class_weight=weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
            denominator=denominator,
            shift=shift,
            logit_scale=scale,
            softcap=softcap,
            z_loss=z_loss,
            outputs=("loss", "predicted") if predict else None,
            **({"token_scaling": True} if token_scaling else {}),
        )
        with torch.no_grad() if self._detached else nullcontext():
            result = self._call_head(request)
        if not predict:
            return result
        self._predicted = len(self._owner._chain), result.predicted
        return result.loss

    def argmax(self, dim=None, keepdim=False):
        """Do what Tensor.argmax does; over the vocabulary the result is known if a loss was asked for it."""
        known = self._predicted is not None and self._owed and self._predicted[0] == len(self._owner._chain)
        if known and dim in (-1, self.ndim - 1) and not keepdim:
            return self._predicted[1]
        return self._value().argmax(dim, keepdim)

    def __setitem__(self, key, value):
        self.materialise()[_real(key)] = _real(value)

    def __getattr__(self, name):
        # Called for names not found; only attributes of tensors are worth a matmul.
        if name in _OF_HIDDEN:
            return getattr(self._hidden, name)
        if name in _CASTS:
            return functools.partial(self.to, _CASTS[name])
        if name.startswith("__") or not hasattr(torch.Tensor, name):
            raise AttributeError(f"LazyLogits has no attribute {name!r}")
        return getattr(self._value() if name in FRESH else self.materialise(), name)

    def __repr__(self):
        if not self._owed:
            return repr(self.materialise())
        return f"LazyLogits(shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}')"

    def __deepcopy__(self, memo):
        return copy.deepcopy(self.materialise(), memo)

    def __reduce_ex__(self, protocol):
        return self.materialise().detach().__reduce_ex__(protocol)  # what torch.load takes by itself

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.cross_entropy:
            loss = _owed_loss(*args, **kwargs)
            if loss is not None:
                return loss
        if args and isinstance(args[0], cls) and func in _LAZY_FUNCTIONS and "out" not in kwargs:
            return getattr(args[0], _LAZY_FUNCTIONS[func])(*args[1:], **kwargs)
        if func in _COMMUTING and len(args) == 2 and isinstance(args[1], cls) and not kwargs:
            return getattr(args[1], func.__name__)(args[0])
        fresh = func.__name__ in FRESH and not {"out", "inplace"} & kwargs.keys()
        kwargs = {key: _real(value, fresh) for key, value in kwargs.items()}
        return func(*_real_all(args, fresh), **kwargs)


_OF_HIDDEN = ("ndim", "dim", "device", "is_cuda")
_CASTS = {"float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16, "double": torch.float64}
_LAZY_FUNCTIONS = {
    getattr(torch, name): name for name in ("tanh", "mul", "div", "add", "reshape", "flatten", "argmax")
}
_LAZY_FUNCTIONS[torch.true_divide] = "div"
_COMMUTING = (torch.mul, torch.add, torch.Tensor.mul, torch.Tensor.add)  # of a tensor and lazy logits


def of_tensor(name, fresh=False):
    """A method that computes the logits and calls theirs; fresh: its result shares no memory with them."""

    def method(self, *args, **kwargs):
        value = self._value() if fresh else self.materialise()
        return getattr(value, name)(*_real_all(args, fresh), **kwargs)

    method.__name__ = name
    return method


_FRESH_OPERATORS = """
    sub rsub rtruediv floordiv rfloordiv mod rmod pow rpow matmul rmatmul neg abs
    invert eq ne lt le gt ge and or xor bool float int contains format
"""
_OTHER_OPERATORS = "pos array iter iadd isub ifloordiv imod ipow"
for _names, _fresh in ((_FRESH_OPERATORS, True), (_OTHER_OPERATORS, False)):
    for _name in _names.split():
        setattr(LazyLogits, f"__{_name}__", of_tensor(f"__{_name}__", _fresh))
LazyLogits.__hash__ = object.__hash__
LazyLogits.__array_priority__ = torch.Tensor.__array_priority__  # NumPy's numbers leave arithmetic to it


def _versions(tensor) -> tuple:
    return () if tensor.is_inference() else ((tensor, tensor._version),)


@contextmanager
def _graph_anywhere():
    with torch.inference_mode(False), torch.enable_grad():
        yield


def _real(value, fresh=False):
    if isinstance(value, LazyLogits):
        return value._value() if fresh else value.materialise()
    return _real_all(value, fresh) if type(value) in (tuple, list) else value


def _real_all(values, fresh=False):
    return type(values)(_real(value, fresh) for value in values)


def _owed_loss(
    input,
    target,
    weight=None,
    size_average=None,
    ignore_index=-100,
    reduce=None,
    reduction="mean",
    label_smoothing=0.0,
):
    """torch.nn.functional.cross_entropy of lazy logits, or None if they must be computed."""
    usual = isinstance(input, LazyLogits) and size_average is None and reduce is None
    if not usual or input.ndim != 2 or target.is_floating_point():
        return None
    options = {"reduction": reduction, "label_smoothing": label_smoothing}
    return input.cross_entropy(target, weight=weight, ignore_index=ignore_index, **options)
