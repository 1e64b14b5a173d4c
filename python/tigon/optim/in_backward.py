"""The update of a parameter as soon as its gradient is complete."""

from __future__ import annotations

import contextlib
import itertools
import weakref

import torch

from tigon.error import check, refuse
from tigon.ops.grad_norm import is_dtensor
from tigon.optim.adamw import AdamW

_OP = "step_in_backward"


class StepInBackward:
    """The handle that :func:`step_in_backward` returns."""

    def __init__(self, optimizer: AdamW) -> None:
        self.optimizer = optimizer
        self._accumulating = 0  # open contexts
        self._handles = []
        self._group_of = {}  # by number: load_state_dict makes new groups
        for i in range(len(optimizer.param_groups)):
            self.cover(i)
        optimizer.updates_in_backward = self

    def cover(self, number: int) -> None:
        """Update the parameters of one of the optimizer's groups in the backward too."""
        this, kept = weakref.ref(self), _Kept(self)

        def update(p: torch.Tensor) -> None:
            this()._update(p)

        for p in self.optimizer.param_groups[number]["params"]:
            self._group_of[p] = number
            if p.requires_grad:
                p._tigon_step_in_backward = kept
                self._handles.append(p.register_post_accumulate_grad_hook(update))

    def _update(self, p: torch.Tensor) -> None:
        if self._accumulating or p.grad is None:
            return
        optimizer = self.optimizer
        _refuse_what_needs_all(optimizer)
        together = torch.distributed.is_available() and torch.distributed.is_initialized()
        if together and torch.distributed.get_world_size() > 1 and not is_dtensor(p):
            refuse(
                _OP,
                "parameters of several processes must be DTensors (FSDP2), got a plain one: its "
                "gradient would be that of one process (DDP adds them later)",
            )
        optimizer.update_one(optimizer.param_groups[self._group_of[p]], p)
        p.grad = None

    def accumulate(self) -> Accumulation:
        """A context in which backward passes only accumulate gradients; the next one outside updates.

        It is reentrant, several may be open, and it also works as a decorator.
        """
        return Accumulation(self)

    def undo(self) -> None:
        """Let ``optimizer.step()`` do the updates again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for p in self._group_of:
            vars(p).pop("_tigon_step_in_backward", None)
        self.optimizer.updates_in_backward = None


class _Kept:
    """Keeps a handle and its optimizer alive as an attribute of their parameters.

    Python's garbage collector sees attributes of a tensor, so that a model which is let go is freed; it does
    not see hooks. A pickled parameter leaves it behind.
    """

    def __init__(self, handle: StepInBackward) -> None:
        self._handle = handle

    def __reduce__(self):
        return object, ()


class Accumulation(contextlib.ContextDecorator):
    """The context that :meth:`StepInBackward.accumulate` returns."""

    def __init__(self, handle: StepInBackward) -> None:
        self._handle = handle

    def __enter__(self) -> None:
        self._handle._accumulating += 1

    def __exit__(self, *_) -> None:
        self._handle._accumulating -= 1


def step_in_backward(optimizer: AdamW) -> StepInBackward:
    """Update every parameter inside the backward, as soon as its gradient is complete, and free the gradient.

    The gradients of a model then never exist all at once, which saves two bytes a parameter in bfloat16. The
    updates are bitwise equal to those of ``optimizer.step()``. You may still call that method, since learning
    rate schedulers expect it; it does nothing. A new learning rate takes effect in the next backward.

    Args:
        optimizer: a :class:`tigon.optim.AdamW`. Groups added later are updated in the same way.

    Returns:
        A handle with ``accumulate()`` and ``undo()``. Use the context ``accumulate()`` for all but the last
        backward of gradient accumulation: it keeps the gradients.

    Raises:
        tigon.Error: the optimizer is of another kind or already updates in the backward; it has
            ``max_grad_norm``, which needs all gradients before the first update; in the backward: a
            GradScaler is used, for the same reason, or parameters of several processes are not DTensors (DDP
            reduces gradients after this hook).
    """
    ours = isinstance(optimizer, AdamW)
    check(_OP, ours, "optimizer must be a tigon.optim.AdamW, got {}", type(optimizer).__name__)
    again = optimizer.updates_in_backward is not None
    check(_OP, not again, "optimizer must not step in the backward already: undo() first")
    _refuse_what_needs_all(optimizer)
    params = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for p in params:
        check(_OP, p.is_leaf, "params must be leaves, got one that is a result")
    return StepInBackward(optimizer)


def _refuse_what_needs_all(optimizer: AdamW) -> None:
    check(
        _OP,
        optimizer.max_grad_norm is None,
        "max_grad_norm must be None, got {}: the norm of all "
        "gradients is known only when the first of them are gone",
        optimizer.max_grad_norm,
    )
