"""Forwards that ``kernelize`` binds to a model's own modules."""

import torch
from torch import nn

import tigon
from tigon.integrations.kernels import TaggedRMSNorm as RMSNorm

__all__ = ["CrossEntropyLoss", "RMSNorm", "RotaryPosEmb", "SwiGLUMLP"]


class SwiGLUMLP(nn.Module):
    """A gated MLP of three linear layers, as LLaMA's; the activation is silu."""

    can_torch_compile = True
    has_backward = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Products and their order are the module's own."""
        return self.down_proj(tigon.swiglu(self.gate_proj(x), self.up_proj(x)))


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
