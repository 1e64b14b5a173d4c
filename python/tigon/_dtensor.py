"""DTensors in ops whose rows are independent: each process works on its rows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch

from tigon.error import refuse

F = TypeVar("F", bound=Callable[..., Any])
# The types of tensors without a subclass. While code is traced, the type of a buffer is nn.Buffer.
PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
# The dtypes that kernels take, in the order of tigon::DType.
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def is_dtensor(t: object) -> bool:
    """Whether t is sharded or replicated over a device mesh."""
    if type(t) in PLAIN or not isinstance(t, torch.Tensor):
        return False
    from torch.distributed.tensor import DTensor  # loaded when it is needed, since that takes time

    return isinstance(t, DTensor)


class Layout(NamedTuple):
    """An op's leading arguments: so many tensors of rows, then so many vectors by column."""

    rows: int
    columns: int = 0
    elementwise: bool = False  # if all tensors of rows are given, their last dimension may be sharded too


def fault(layout: Layout, names: list[str], args: tuple) -> str | None:
    """Why a call whose first argument is a DTensor cannot stay local, or None.

    A tensor in the place of an absent one counts as it is; a plain tensor next to a DTensor is not looked at
    here: the kernel refuses the mixture.
    """
    x, mesh = args[0], args[0].device_mesh
    whole = layout.elementwise and None not in args[: layout.rows]
    for dim, placement in enumerate(x.placements):
        at = getattr(placement, "dim", None)
        if at is None and not placement.is_replicate():
            return f"{names[0]} must be sharded or replicated, got {placement} in mesh dimension {dim}"
        if at is not None and at % x.dim() == x.dim() - 1 and not whole:
            return (
                f"{names[0]} must be sharded in another dimension than its last, got {placement} in mesh "
                f"dimension {dim} (redistribute it: nothing is gathered here)"
            )
    for name, a in zip(names[1 : layout.rows], args[1 : layout.rows], strict=True):
        if a is not None and (a.device_mesh != mesh or a.placements != x.placements):
            return f"{name} must be placed as {names[0]}, {list(x.placements)}, got {list(a.placements)}"
    end = layout.rows + layout.columns
    for name, a in zip(names[layout.rows : end], args[layout.rows : end], strict=True):
        if a is not None and (a.device_mesh != mesh or not all(p.is_replicate() for p in a.placements)):
            return f"{name} must be replicated on the mesh of {names[0]}, got {list(a.placements)}"
    return None


def takes_dtensors(layout: Layout | None, args: tuple) -> bool:
    """Whether the tensors of a call are all DTensors, and the op has a rule for them."""
    if layout is None or not is_dtensor(args[0]):
        return False
    return all(a is None or is_dtensor(a) for a in args[1 : layout.rows + layout.columns])


def call_local(op: str, function: Callable[..., Any], layout: Layout, names: list[str], args: tuple) -> Any:
    """``function`` of this process's rows; its results are DTensors placed as the first argument.

    The gradient of a vector by column is partial over the mesh dimensions that shard rows: each process has
    that of its rows.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate

    why = fault(layout, names, args)
    if why is not None:
        refuse(op, "{}", why)
    x, end = args[0], layout.rows + layout.columns
    partial = tuple(Replicate() if p.is_replicate() else Partial() for p in x.placements)
    local = [
        a if a is None else a.to_local(grad_placements=x.placements if i < layout.rows else partial)
        for i, a in enumerate(args[:end])
    ]
    results = function(*local, *args[end:])

    def back(result):
        narrow = result.shape[-1] != local[0].shape[-1]  # gate and up were halves of one tensor
        shape = torch.Size((*x.shape[:-1], result.shape[-1])) if narrow else x.shape
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            result, x.device_mesh, x.placements, run_check=False, shape=shape, stride=stride
        )

    return back(results) if isinstance(results, torch.Tensor) else tuple(map(back, results))


def sharded_loss(op: str, function: Callable[..., Any], args: tuple, options: dict, vocab: int | None = None):
    """:func:`tigon.parallel.dtensor.loss`, loaded when it is needed."""
    from tigon.parallel.dtensor import loss

    return loss(op, function, args, options, vocab)


def rows_stay_local(x: torch.Tensor, *vectors: torch.Tensor | None) -> bool:
    """Whether a norm of DTensors stays local: rows of a kernel's dtype are sharded, vectors replicated."""
    if not (is_dtensor(x) and all(v is None or is_dtensor(v) for v in vectors)):
        return False
    if x.dtype not in KERNEL_DTYPES:
        return False
    names = ["x", *("vector" for _ in vectors)]
    return fault(Layout(1, len(vectors)), names, (x, *vectors)) is None


def of_vocabulary(op: str, at: int, name: str) -> Callable[[F], F]:
    """Decorate a public loss: :mod:`tigon.parallel.dtensor` runs if argument ``at``, `name`, is a DTensor."""

    def wrap(function: F) -> F:
        @functools.wraps(function)
        def call(*args, **options):
            t = args[at] if len(args) > at else options.get(name)
            if type(t) not in PLAIN and is_dtensor(t):
                return sharded_loss(op, function, args, options)
            return function(*args, **options)

        return call  # type: ignore[return-value]

    return wrap
