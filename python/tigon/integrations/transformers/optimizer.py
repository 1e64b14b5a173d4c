"""``tigon.optim.AdamW`` in a ``Trainer`` whose arguments choose PyTorch's, with clipping inside its step."""

from __future__ import annotations

import functools

import torch

from tigon.error import check
from tigon.optim import AdamW

_MARK = "_tigon_optimizer"  # of TrainingArguments: options of AdamW
_MAKES = "get_optimizer_cls_and_kwargs"


def use(args, options: dict) -> None:
    """Make the trainer of these arguments create a :class:`tigon.optim.AdamW`."""
    from accelerate import Accelerator
    from transformers import Trainer

    names = ("adamw_torch", "adamw_torch_fused")
    optim = getattr(args.optim, "value", args.optim)
    check("TigonTrainerCallback", optim in names, "optimizer needs args.optim of {}, got {!r}", names, optim)
    setattr(args, _MARK, options)
    for owner, name, around in ((Trainer, _MAKES, _making), (Accelerator, "clip_grad_norm_", _clipping)):
        original = getattr(owner, name)
        if not hasattr(original, _MARK):
            ours = functools.wraps(original)(around(original))
            setattr(ours, _MARK, True)
            setattr(owner, name, staticmethod(ours) if name == _MAKES else ours)


def _making(original):
    def get_optimizer_cls_and_kwargs(args, model=None):
        cls, kwargs = original(args, model)
        options = getattr(args, _MARK, None)
        if options is None or cls is not torch.optim.AdamW:
            return cls, kwargs
        return AdamW, kwargs | options

    return get_optimizer_cls_and_kwargs


def _clipping(original):
    def clip_grad_norm_(self, parameters, max_norm, norm_type=2):
        parameters = list(parameters)
        optimizer = _only_optimizer(self)
        if optimizer is not None and norm_type == 2:
            self.unscale_gradients()
            if optimizer.has_all_gradients_of(parameters):
                return optimizer.clip_grad_norm_(max_norm)
        return original(self, parameters, max_norm, norm_type)

    return clip_grad_norm_


def _only_optimizer(accelerator) -> AdamW | None:
    """The only optimizer, if it is Tigon's and every process has whole gradients; else None."""
    kinds = ("NO", "MULTI_GPU", "MULTI_CPU")
    if accelerator.distributed_type not in kinds or len(accelerator._optimizers) != 1:
        return None
    optimizer = accelerator._optimizers[0]
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer if isinstance(optimizer, AdamW) and optimizer.max_grad_norm is None else None
