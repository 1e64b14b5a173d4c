"""Cross-entropy of given logits as a module."""

from __future__ import annotations

import torch
from torch import nn

from tigon.ops.cross_entropy import cross_entropy


class CrossEntropyLoss(nn.Module):
    """:func:`tigon.cross_entropy` with its options fixed; torch's names, and ours.

    Args:
        weight: ``[V]`` weight of each class or ``None``; a buffer.
        ignore_index, reduction, label_smoothing: as :class:`torch.nn.CrossEntropyLoss`.
        softcap, z_loss, inplace: as :func:`tigon.cross_entropy`.

    Shape: logits ``[..., V]``, target ``[...]`` -> scalar, or ``[...]`` with ``reduction="none"``.
    """

    def __init__(
        self,
        weight: torch.Tensor | None = None,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        softcap: float | None = None,
        z_loss: float = 0.0,
        inplace: bool = False,
    ) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.options = {
            "ignore_index": ignore_index,
            "reduction": reduction,
            "label_smoothing": label_smoothing,
            "softcap": softcap,
            "z_loss": z_loss,
            "inplace": inplace,
        }

    def forward(
        self, logits: torch.Tensor, target: torch.Tensor, denominator: float | torch.Tensor | None = None
    ) -> torch.Tensor:
        """The loss; ``denominator`` replaces the reduction's own."""
        return cross_entropy(logits, target, weight=self.weight, denominator=denominator, **self.options)

    def extra_repr(self) -> str:
        """The options, for ``print(model)``."""
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())
