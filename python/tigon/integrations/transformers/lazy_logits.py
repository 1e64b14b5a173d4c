"""Logits that are owed: hidden states and a head, multiplied only when somebody looks.

`LazyLogits` is what a patched head returns while training. A loss takes the hidden states and
never forms logits; anything else that touches the object gets the tensor stock code would have.
It is a plain Python object and not a tensor subclass, so that torch.compile traces through it.
"""

from __future__ import annotations

import copy
import functools
import math
import operator
from contextlib import nullcontext

import torch
import torch.nn.functional as F

from tigon.error import Error
from tigon.integrations.transformers.forward import plain
from tigon.integrations.transformers.report import reader
from tigon.integrations.transformers.sharding import in_a_group, present


class LossRequest:
    """Handed to the head by a loss: its forward then returns the loss, not logits."""

    def __init__(self, target, dtype=None, columns=None, **options):
        self.target = target
        self.dtype = dtype  # autocast dtype at the time the logits were owed
        self.columns = columns  # leading rows of the weight that take part
        self.options = options


class LogitsRequest:
    """Handed to the head to get real logits."""


def _while_owed(method):
    """A method of owed logits; where it returns None, and of logits that are there, the tensor's."""

    @functools.wraps(method)
    def call(self, *args, **kwargs):
        found = method(self, *args, **kwargs) if self._real is None else None
        return getattr(self.materialise(), method.__name__)(*args, **kwargs) if found is None else found

    return call


_KEPT = (
    "_head", "_hidden", "_columns", "dtype", "_calls", "_autocast", "_limit", "_detached", "_seen",
)  # fmt: skip


class LazyLogits:
    """`head(hidden)` and a chain of cheap operations on it, computed when touched.

    Known without computing: shape, size, dim, ndim, numel, device, dtype, requires_grad. Stay
    lazy: float/to(dtype), * and / by a number, tanh, contiguous, view and reshape that keep the
    last axis, row indexing, and [..., :n]. Everything else computes the logits, once.

    Each is computed on its own: a view of logits that are then changed in place through another
    one refuses to be read.
    """

    def __init__(self, head, hidden, columns, dtype, calls, autocast=None):
        self._head = head
        self._hidden = hidden
        self._columns = columns  # vocabulary entries still wanted
        self.dtype = dtype
        self._calls = calls
        self._autocast = autocast
        self._chain = ()  # ("mul", s) | ("div", s) | ("tanh",) | ("to", dtype)
        self._limit = None  # columns when fewer than the head has
        self._detached = False
        self._real = None
        self._predicted = None  # first argmax of every row, where a loss was asked for it
        self._writes = [0]  # changes in place, shared as tensors share memory
        self._written = 0  # those that it has
        self._sliced = False  # where rows or columns were left out
        self._seen = ()  # parameters and their versions, to notice an optimizer step in between
        if not torch.compiler.is_compiling():
            self._seen = [(name, p, p._version) for name, p in head.named_parameters()]

    # --- what is known ---------------------------------------------------------------------

    @property
    def shape(self):
        return torch.Size((*self._hidden.shape[:-1], self._columns))

    @property
    def requires_grad(self):
        owed = self._hidden.requires_grad or any(p.requires_grad for p in self._head.parameters())
        return owed and not self._detached

    def size(self, dim=None):
        return self.shape if dim is None else self.shape[dim]

    def numel(self):
        return math.prod(self.shape)

    def is_floating_point(self):
        return True

    def __len__(self):
        return self.shape[0]

    # --- what stays lazy -------------------------------------------------------------------

    def _with(self, *links, view=False, sliced=False, **changes):
        """The same after more links of the chain, with changed attributes; a view shares memory."""
        self._check_views()
        twin = object.__new__(type(self))
        for name in _KEPT:  # not by __dict__, which torch.compile of PyTorch 2.11 cannot trace
            setattr(twin, name, changes[name] if name in changes else getattr(self, name))
        twin._chain = (*self._chain, *links)
        twin._real = twin._predicted = None
        twin._writes = self._writes if view else [0]
        twin._written = twin._writes[0]
        twin._sliced = view and (self._sliced or sliced)
        return twin

    def _check_views(self):
        if self._writes[0] != self._written:
            raise Error(
                "[lazy_logits] logits must be read before a view of them changes in place, got one "
                "changed since (change logits before views are taken, or a copy: logits.clone())"
            )

    def _write(self):
        """These change in place: what else shares their memory does not learn the new values."""
        self._check_views()
        self._predicted = None
        self._writes[0] += 1
        self._written = self._writes[0]

    @_while_owed
    def to(self, *args, **kwargs):
        """As Tensor.to; a change of dtype, or the device it is on, stays lazy."""
        dtype = kwargs.get("dtype", args[0] if args else None)
        if len(args) + len(kwargs) == 1 and _is_float(dtype):
            return self if dtype == self.dtype else self._with(("to", dtype), dtype=dtype)
        if torch.compiler.is_compiling() or "copy" in kwargs:
            return None
        device, dtype, _, layout = torch._C._nn._parse_to(*args, **kwargs)
        here = device is None or (
            device.type == self.device.type and device.index in (None, self.device.index)
        )
        if layout is not None or not here or not (dtype is None or _is_float(dtype)):
            return None
        return self if dtype is None else self.to(dtype)  # accelerate moves all outputs

    def type_as(self, other):
        return self.to(other.dtype) if other.device == self.device else self.to(other)

    def contiguous(self, *_, **__):
        """Owed logits are contiguous; where stock's were not, they are another tensor."""
        return self if self._dense() else self._with()

    def _dense(self):
        return not self._sliced or (self._limit is None and self._hidden.is_contiguous())

    def is_contiguous(self, *_, **__):
        return True

    @_while_owed
    def detach(self):
        return self._with(view=True, _detached=True)

    @_while_owed
    def tanh(self):
        return self._with(("tanh",))

    def _scaled(self, name, other):
        if self._real is None and _is_scalar(other):
            return self._with((name, other))
        return _replay(self.materialise(), (name, other))

    def mul(self, other):
        return self._scaled("mul", other)

    __mul__ = __rmul__ = mul

    def div(self, other, **kwargs):
        return self.materialise().div(other, **kwargs) if kwargs else self._scaled("div", other)

    __truediv__ = div

    def _scale_in_place(self, name, other):
        self._write()
        if self._real is None and _is_scalar(other):
            self._chain = (*self._chain, (name, other))
            return self
        return getattr(self.materialise(), f"{name}_")(other)

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
        return self._with(view=self._dense(), _hidden=hidden)

    @_while_owed
    def reshape(self, *sizes, shape=None):
        return self.view(*(sizes if shape is None else (shape,)))

    @_while_owed
    def flatten(self, start_dim=0, end_dim=-1):
        if 0 <= start_dim <= end_dim < self.ndim - 1:
            return self._with(view=self._dense(), _hidden=self._hidden.flatten(start_dim, end_dim))
        return None

    @_while_owed
    def __getitem__(self, key):
        keys = key if isinstance(key, tuple) else (key,)
        rows, last = _split_index(keys, self.ndim)
        if rows is None:
            return None
        basic = not any(isinstance(key, torch.Tensor | list) for key in rows)
        hidden = self._hidden if rows == () else self._hidden[(*rows, slice(None))]
        picked = self._with(view=basic, sliced=rows != (), _hidden=hidden)
        if last is None or last == slice(None):
            return picked
        limit = _prefix(last, self._columns)
        if limit is not None:
            return picked._with(view=True, sliced=True, _columns=limit, _limit=limit)
        return picked.materialise()[..., last]  # few rows first, then the product

    # --- what computes ---------------------------------------------------------------------

    def materialise(self) -> torch.Tensor:
        """The logits as a tensor; computed once and kept."""
        self._check_views()
        if self._real is not None:
            return self._real
        if not torch.compiler.is_compiling():
            self._check_fresh()
            if not self._calls.materialised:
                self._calls.say(f"{reader()} reads output.logits, one product of the head a step")
            self._calls.materialised += 1
        if torch.is_grad_enabled():
            value = self._compute()
        else:  # stock logits carry the graph of the forward pass wherever they are read later
            with torch.inference_mode(False), torch.enable_grad():
                value = self._compute()
        self._real = value.detach() if self._detached else value
        return self._real

    def _compute(self):
        kind, cast = self.device.type, self._autocast
        with nullcontext() if cast is None else torch.autocast(kind, dtype=cast):
            value = self._call_head(LogitsRequest())
        if self._limit is not None:
            value = value[..., : self._limit]
        for link in self._chain:
            value = _replay(value, link)
        return value

    def _call_head(self, request):
        """The head's forward; by a call of the module, whose hooks gather the weight, where it is away.

        Where it is here no hook may run: FSDP2 would open the head's group once more, and free the weights of
        the other modules in it before their backward.
        """
        held = self._replaced()
        if held is not None:
            return torch.func.functional_call(self._head, held, (self._hidden, request))
        if present(self._head):
            return self._head.forward(self._hidden, request)
        if in_a_group(self._head):
            raise Error(
                "[lazy_logits] logits must be read before backward() frees the head's weight, which FSDP2 "
                "holds in one group with other modules, got it sharded"
            )
        return self._head(self._hidden, request)

    def _replaced(self):
        """The parameters of the forward pass where others are in their place (functional_call), or None."""
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

    def cross_entropy(self, target, *, weight=None, ignore_index=-100, reduction="mean",
                      label_smoothing=0.0, denominator=None, shift=False, predict=False, z_loss=0.0,
                      token_scaling=False):  # fmt: skip
        """Cross-entropy of these logits without forming them; None when it cannot be done.

        With `token_scaling` each row counts by the probability of its label.

        With `predict` the same pass finds what a later argmax over the vocabulary is answered with.
        """
        self._check_views()
        folded = None if self._real is not None or self._detached else _fold(self._chain)
        if folded is None:
            return None
        scale, softcap = folded
        if torch.compiler.is_compiling():
            self._calls.traced = True
        else:
            self._check_fresh()
            self._calls.fused += 1
        request = LossRequest(
            target, dtype=self._autocast, columns=self._limit, class_weight=weight, ignore_index=ignore_index,
            reduction=reduction, label_smoothing=label_smoothing, denominator=denominator, shift=shift,
            logit_scale=scale, softcap=softcap, z_loss=z_loss,
            outputs=("loss", "predicted") if predict else None,
            **({"token_scaling": True} if token_scaling else {}),
        )  # fmt: skip
        result = self._call_head(request)
        if not predict:
            return result
        self._predicted = result.predicted
        return result.loss

    def argmax(self, dim=None, keepdim=False):
        """As Tensor.argmax; over the vocabulary it is known where a loss was asked for it."""
        self._check_views()
        if self._predicted is not None and dim in (-1, self.ndim - 1) and not keepdim:
            return self._predicted
        return self.materialise().argmax(dim, keepdim)

    def __setitem__(self, key, value):
        self._write()
        self.materialise()[key] = _real(value)

    def __getattr__(self, name):
        # Called for names not found; only what tensors have is worth a product.
        if name in _OF_HIDDEN:
            return getattr(self._hidden, name)
        if name in _CASTS:
            return functools.partial(self.to, _CASTS[name])
        if name.startswith("__") or not hasattr(torch.Tensor, name):
            raise AttributeError(f"LazyLogits has no attribute {name!r}")
        if name.endswith("_") and name != "requires_grad_":
            self._write()
        return getattr(self.materialise(), name)

    def __repr__(self):
        if self._real is not None:
            return repr(self._real)
        return f"LazyLogits(shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}')"

    def __deepcopy__(self, memo):
        return copy.deepcopy(self.materialise(), memo)

    def __reduce_ex__(self, protocol):
        return _identity, (self.materialise().detach(),)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.cross_entropy:
            return _functional_cross_entropy(*args, **kwargs)
        if args and isinstance(args[0], cls) and func in _LAZY_FUNCTIONS:
            return getattr(args[0], _LAZY_FUNCTIONS[func])(*args[1:], **kwargs)
        for written in _written_by(func, args, kwargs):
            written._write()
        return func(*_real_all(args), **{key: _real(value) for key, value in kwargs.items()})


_OF_HIDDEN = ("ndim", "dim", "device", "is_cuda")
_CASTS = {
    "float": torch.float32,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "double": torch.float64,
}
_LAZY_FUNCTIONS = {
    getattr(torch, name): name for name in ("tanh", "mul", "div", "reshape", "flatten", "argmax")
}
_LAZY_FUNCTIONS[torch.true_divide] = "div"


def _written_by(func, args, kwargs) -> list:
    """The lazy logits that a function changes in place."""
    into = [kwargs.get("out")]
    if args and (func.__name__.endswith("_") or kwargs.get("inplace")):
        into.append(args[0])
    flat = [t for values in into for t in (values if isinstance(values, tuple | list) else (values,))]
    return [t for t in flat if isinstance(t, LazyLogits)]


def of_tensor(name, in_place=False):
    """A method that computes the logits and calls theirs."""

    def method(self, *args, **kwargs):
        if in_place:
            self._write()
        return getattr(self.materialise(), name)(*_real_all(args), **kwargs)

    method.__name__ = name
    return method


_TENSOR_OPERATORS = """
    add radd sub rsub rtruediv floordiv rfloordiv mod rmod pow rpow matmul rmatmul neg pos abs
    invert eq ne lt le gt ge and or xor bool float int contains array iter format
"""
_IN_PLACE_OPERATORS = ("iadd", "isub", "ifloordiv", "imod", "ipow")
for _name in (*_TENSOR_OPERATORS.split(), *_IN_PLACE_OPERATORS):
    setattr(LazyLogits, f"__{_name}__", of_tensor(f"__{_name}__", _name in _IN_PLACE_OPERATORS))
LazyLogits.__hash__ = object.__hash__


def _identity(value):
    return value


def _real(value):
    if isinstance(value, LazyLogits):
        return value.materialise()
    return _real_all(value) if type(value) in (tuple, list) else value


def _real_all(values):
    return type(values)(_real(value) for value in values)


def _is_float(dtype) -> bool:
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point


def _is_scalar(value) -> bool:
    if isinstance(value, torch.Tensor):
        return value.ndim == 0 and value.is_floating_point() and not value.requires_grad
    return isinstance(value, int | float) and not isinstance(value, bool)


def _replay(value, link):
    name, *operands = link
    return _REPLAYED[name](value, *operands)


_REPLAYED = {"mul": operator.mul, "div": operator.truediv, "to": torch.Tensor.to, "tanh": torch.Tensor.tanh}


def _fold(chain) -> tuple[float, float | None] | None:
    """(logit_scale, softcap) of a chain cap * tanh(scale * z / cap), or None if it is another.

    Casts are dropped: the loss is computed in fp32 from the start.
    """
    sides = [[1.0, 1.0]]  # products and divisors, before the tanh and after
    for name, *operands in chain:
        if name == "tanh":
            sides.append([1.0, 1.0])
        elif name != "to":
            (scalar,) = operands
            if isinstance(scalar, torch.Tensor):
                if scalar.device.type != "cpu":  # reading it would make the host wait
                    return None
                scalar = scalar.item()
            sides[-1][1 if name == "div" else 0] *= scalar
    if len(sides) > 2 or any(divisor == 0 for _, divisor in sides):
        return None
    scale, *caps = (product / divisor for product, divisor in sides)
    if not caps:
        return scale, None
    (cap,) = caps
    return (sides[0][0] * cap / sides[0][1], cap) if 0 < cap < math.inf else None


def _split_index(keys, ndim):
    """Index split at the vocabulary axis: (row part, last part); (None, None) where it mixes."""
    used = sum(_axes(key) for key in keys)
    dots = [i for i, key in enumerate(keys) if key is Ellipsis]
    if len(dots) > 1 or used > ndim or any(_axes(key) < 0 for key in keys):
        return None, None
    fill = (slice(None),) * (ndim - used)
    at = dots[0] if dots else len(keys)
    keys = (*keys[:at], *fill, *keys[at + 1 :])
    last, rows = keys[-1], keys[:-1]
    if last is None or _axes(last) != 1:
        return None, None
    if not isinstance(last, slice) and not all(isinstance(key, slice | int) for key in rows):
        return None, None  # indices on both sides broadcast together
    if all(isinstance(key, slice) and key == slice(None) for key in rows):
        rows = ()
    return rows, last


def _axes(key) -> int:
    """Axes that one part of an index takes; -1 where this file does not know."""
    if key is None or key is Ellipsis:
        return 0
    if isinstance(key, bool):
        return -1
    if isinstance(key, torch.Tensor):
        return key.ndim if key.dtype == torch.bool else 1
    return 1 if isinstance(key, slice | int | list) else -1


def _prefix(last, columns) -> int | None:
    """n of a slice [:n] of the vocabulary, or None."""
    if not isinstance(last, slice) or last.step not in (None, 1) or last.start not in (None, 0):
        return None
    stop = columns if last.stop is None else last.stop
    return min(stop, columns) if isinstance(stop, int) and stop > 0 else None


def _functional_cross_entropy(input, target, weight=None, size_average=None, ignore_index=-100,
                              reduce=None, reduction="mean", label_smoothing=0.0):  # fmt: skip
    """torch.nn.functional.cross_entropy on lazy logits."""
    usual = isinstance(input, LazyLogits) and size_average is None and reduce is None
    if usual and input.ndim == 2 and not target.is_floating_point():
        options = {"reduction": reduction, "label_smoothing": label_smoothing}
        loss = input.cross_entropy(target, weight=weight, ignore_index=ignore_index, **options)
        if loss is not None:
            return loss
    return F.cross_entropy(
        _real(input), _real(target), weight, size_average, ignore_index, reduce, reduction, label_smoothing
    )
