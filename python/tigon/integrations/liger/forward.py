"""What Liger's forwards add to a patched model's: settings of the loss, and the output."""

from __future__ import annotations

from torch import nn
from transformers.utils import ModelOutput

from tigon.integrations.liger.functional import loss_settings
from tigon.integrations.liger.names import check
from tigon.integrations.liger.outputs import with_counts
from tigon.integrations.transformers.forward import model_forward
from tigon.integrations.transformers.head import forward_of_model

_SETTINGS = "_tigon_liger_settings"  # on the model: options that its program adds to Liger's loss


def attach(model: nn.Module) -> None:
    """Give the patched ``model`` the settings and the output; again does nothing."""
    forward = model_forward(model)
    if forward is not None:
        forward.function = _forward
        model.__dict__[_SETTINGS] = loss_settings()


def _forward(model, head, *args, **kwargs):
    """The patched model's forward, with the settings and the output."""
    labels = any(kwargs.get(name) is not None for name in ("labels", "shift_labels")) or len(args) > 1
    check(labels or not kwargs.get("skip_logits"),
          "labels or shift_labels must be given where skip_logits is True, got {}",
          sorted(kwargs))  # fmt: skip
    if labels and kwargs.get("skip_logits", model.training):
        kwargs = {**model.__dict__[_SETTINGS], **kwargs}
    output = forward_of_model(model, head, *args, **kwargs)
    return with_counts(output) if isinstance(output, ModelOutput) else output
