"""Results of norms and activations that are formed again in the backward, from what their own backward keeps.

Who reads such a result need not keep it: it keeps the node that made it. The forward's operator runs again on
the same numbers, so that the bits are the same, once in a backward pass for all readers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tigon import _fp8_bytes, _op

NORMS, GATED_UNITS = "norms", "products"  # the values stand in pickles of models
# Their backward keeps all tensors that the forward takes, in this order.
_KINDS = {
    "rms_norm": NORMS,
    "layer_norm": NORMS,
    "gated_rms_norm": NORMS,
    "glu": GATED_UNITS,
    "relu_squared": GATED_UNITS,
}


class Again:
    """Forms the result of a node again, and holds it until all readers of a backward pass have it."""

    watched: list | None = None  # records the results that are not kept, while a layer is measured

    def __init__(self, op: _op.Op, saved: tuple):
        self.op, self.readers, self.left, self.value, self.held_for = op, 0, 0, None, None
        # FSDP may have freed the parameters when the readers' backward runs.
        columns = saved[op.layout.rows : op.tensors]
        self.columns = [None if t is None else t.detach().clone() for t in columns]

    def __call__(self, node) -> torch.Tensor:
        rows = node.saved_tensors[: self.op.layout.rows]
        now = torch._C._current_graph_task_id(), _fp8_bytes.stream_of(rows[0])
        if self.value is None or now != self.held_for:
            with torch.no_grad():
                self.value = self.op.visible(self.op.forward(*rows, *self.columns, *node.options))
            self.held_for, self.left = now, self.readers
        value, self.left = self.value, self.left - 1
        if self.left <= 0:
            self.value = None
        return value


def again(x: torch.Tensor, kinds: Iterable[str] = (NORMS, GATED_UNITS)) -> Callable[[], torch.Tensor] | None:
    """A function that computes x again for one reader, if x is an unchanged result of these kinds of ops."""
    node = x.grad_fn
    op = _op.Op.of_node.get(type(node))
    if op is None or _KINDS.get(op.name) not in kinds or x._version != 0:
        return None
    if _op.saves_through_hooks() or torch._C._current_graph_task_id() != -1:
        return None  # offloading, checkpointing: they manage saved tensors
    if x.is_cuda and x.shape[-1] * x.element_size() % 16:
        return None  # tigon.deterministic, on in one of the passes only, changes the bits of such rows
    known = getattr(node, "again", None)
    if known is None:
        known = node.again = Again(op, node.saved_tensors)
        if Again.watched is not None:
            Again.watched.append((StorageWeakRef(x.untyped_storage()), x.nbytes))
    known.readers += 1
    return functools.partial(known, node)


class forgetting(torch.autograd.graph.saved_tensors_hooks):
    """Inside it, the graph keeps `form`, which makes x again, instead of x; other tensors as usual."""

    def __init__(self, x: torch.Tensor, form: Callable[[], torch.Tensor]):
        storage, numel = x.untyped_storage()._cdata, x.numel()

        def pack(kept):
            if kept.untyped_storage()._cdata == storage and kept.numel() == numel:
                return kept.shape, kept.stride()
            return kept, kept._version

        def unpack(packed):
            kept, version = packed
            if not isinstance(kept, torch.Tensor):
                return form().as_strided(*packed)
            if kept._version != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace "
                    f"operation: a {kept.dtype} of {tuple(kept.shape)}, kept beside one that is formed again"
                )
            return kept

        super().__init__(pack, unpack)
