"""Forwards that ``kernelize`` binds to a model's own modules."""

import torch
from torch import nn

import tigon
from tigon.integrations.kernels import TaggedGatedMLP as GeGLUMLP
from tigon.integrations.kernels import TaggedGatedMLP as SwiGLUMLP
from tigon.integrations.kernels import TaggedGatedRMSNorm as RMSNormGated
from tigon.integrations.kernels import TaggedRMSNorm as RMSNorm

__all__ = [
    "CrossEntropyLoss",
    "ForCausalLMLoss",
    "GeGLUMLP",
    "RMSNorm",
    "RMSNormGated",
    "RotaryPosEmb",
    "SiLU",
    "SwiGLUMLP",
]


class SiLU(nn.Module):
    """The activation ``x sigmoid(x)``."""

    can_torch_compile = True
    has_backward = True

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[...] -> [...]"""
        return tigon.silu(input)


class ForCausalLMLoss(nn.Module):
    """transformers' loss of that name: of logits, against the labels one token ahead."""

    can_torch_compile = True
    has_backward = True

    def forward(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        vocab_size: int,
        num_items_in_batch: torch.Tensor | None = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **kwargs,
    ) -> torch.Tensor:
        """The mean over the labels that count, or the sum over num_items_in_batch."""
        if shift_labels is None:
            shift_labels = torch.nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        return tigon.cross_entropy(
            logits.view(-1, vocab_size),
            shift_labels.reshape(-1).to(logits.device),
            ignore_index=ignore_index,
            denominator=num_items_in_batch,
        )


class RotaryPosEmb(nn.Module):
    """``apply_rotary_pos_emb`` of LLaMA: the pairs of a head are columns i and i + D/2."""

    can_torch_compile = True
    has_backward = True

    def forward(self, q, k, cos, sin, unsqueeze_dim=1):
        """The rotated q and k."""
        return tigon.rope(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)


class CrossEntropyLoss(nn.Module):
    """:class:`torch.nn.CrossEntropyLoss`: rows of logits and class indices; other calls stay PyTorch's."""

    can_torch_compile = True
    has_backward = True

    def forward(self, input, target):
        """The loss, with the module's own options."""
        if input.dim() != 2 or target.is_floating_point():
            return type(self).forward(self, input, target)
        return tigon.cross_entropy(
            input,
            target,
            weight=self.weight,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            reduction=self.reduction,
        )
