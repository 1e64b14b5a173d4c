"""The gated MLPs save the memory that the loss head takes.

A step needs most memory while the head runs, since all layers keep their tensors for the backward. The head
records in the ledger how much it takes without the gradients that it returns (a chunk's logits, a float32
sum). In the next forward pass just enough MLPs to offset this do not keep `act(gate) * up` for the projection
after it. They keep gate and up anyway, and the backward computes it again from them, bitwise equal.
Two runs of six models on an H200, without it and with it, differ by 0.7 to 3.2 GB a step (1 to 6 %).
"""

from __future__ import annotations

import torch
from torch import nn

from tigon.integrations.transformers.forward import bound, plain
from tigon.integrations.transformers.head_operands import is_linear, is_lora
from tigon.ops import glu
from tigon.ops.loss_head.plan import linear_cross_entropy_memory


class Ledger:
    """The bytes that a model's head took last time, and those that this forward still has to save."""

    def __init__(self, taken: int = 0):
        self.taken = taken
        self.owed = 0

    def __deepcopy__(self, memo):
        return self  # as HeadSpec: a copied head and copied MLPs go on with this one

    def __reduce__(self):
        return Ledger, (self.taken,)

    def open(self) -> None:
        if not torch.compiler.is_compiling():
            self.owed = self.taken

    def note(self, hidden: torch.Tensor, weight: torch.Tensor, max_peak_mb: float | None = None) -> None:
        """Record that the head computes a loss of these operands."""
        if torch.compiler.is_compiling() or hidden.device.type not in ("cpu", "cuda"):
            return
        (vocab, size), trained = weight.shape, weight.requires_grad
        needs = linear_cross_entropy_memory(
            hidden.numel() // size,
            size,
            vocab,
            hidden.dtype,
            device=hidden.device.type,
            weight_dtype=weight.dtype,
            train_weight=trained,
            train_hidden=hidden.requires_grad,
            main_grad=trained and bool(getattr(weight, "tigon_main_grad", False)),
        )
        peak = needs.peak if max_peak_mb is None else min(needs.peak, int(max_peak_mb * 2**20))
        self.taken = max(peak - needs.results, 0)

    def project(self, down: nn.Module, inner: torch.Tensor) -> torch.Tensor:
        """``down(inner)``, which does not keep inner while bytes are left to save."""
        if torch.compiler.is_compiling() or self.owed <= 0 or not _spares(down, inner):
            return down(inner)
        self.owed -= inner.nbytes
        with _Forgetting(inner):
            return down(inner)


def _spares(down: nn.Module, inner: torch.Tensor) -> bool:
    """Whether inner can be computed again, and hooks may handle the other tensors that down keeps."""
    if not glu.can_repeat(inner) or bound(down) is not None:  # the slot `lora` does not keep it anyway
        return False
    if torch._C._autograd._top_saved_tensors_default_hooks(True) or torch._C._current_graph_task_id() != -1:
        return False  # offloading, checkpointing: they manage saved tensors
    weight = down.base_layer.weight if is_lora(down) else down.weight if is_linear(down) else None
    return plain(weight) and not hasattr(weight, "ds_id")  # ZeRO-3 replaces the data of saved tensors


class _Forgetting(torch.autograd.graph.saved_tensors_hooks):
    """Inside it, the graph keeps the node that made `inner` instead of inner; other tensors as usual."""

    def __init__(self, inner: torch.Tensor):
        node, storage, numel = inner.grad_fn, inner.untyped_storage().data_ptr(), inner.numel()

        def pack(kept):
            if kept.untyped_storage().data_ptr() == storage and kept.numel() == numel:
                return kept.shape, kept.stride()
            return kept, kept._version

        def unpack(packed):
            kept, version = packed
            if not isinstance(kept, torch.Tensor):
                return glu.repeat(node).as_strided(*packed)
            if kept._version != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace "
                    f"operation: a {kept.dtype} of {tuple(kept.shape)}, kept for a gated MLP's last product"
                )
            return kept

        super().__init__(pack, unpack)
