"""What Liger's forwards take and give beside transformers': token accuracy and predicted tokens.

Around a patched model's forward: its keywords ``return_token_accuracy`` and ``return_predicted_tokens``
ask for them, and they come from the pass that computes the loss. Asked for in training, there are no logits
in the output, as there.
"""

from __future__ import annotations

from torch import nn
from transformers.utils import ModelOutput

from tigon.error import check
from tigon.integrations.liger.functional import loss_settings
from tigon.integrations.liger.outputs import with_counts
from tigon.integrations.transformers.forward import Forward, bound, model_forward
from tigon.integrations.transformers.head import forward_of_model, head_forward
from tigon.integrations.transformers.lazy_logits import LossRequest

FIELDS = {"return_token_accuracy": "token_accuracy", "return_predicted_tokens": "predicted_tokens"}
_ASKED = (
    "_tigon_liger_asked"  # on the head's module, during a forward: field -> value, None until it is known
)
_SETTINGS = "_tigon_liger_settings"  # on the model: options that its program adds to Liger's loss


def attach(model: nn.Module) -> None:
    """Give the patched ``model`` the keywords and the output; again does nothing."""
    forward = model_forward(model)
    if forward is not None and _heads(model):
        forward.function = _forward
        model.__dict__[_SETTINGS] = loss_settings()


def _heads(model: nn.Module) -> list[Forward]:
    """The patched forwards behind the output head."""
    find = getattr(model, "get_output_embeddings", None)
    head = find() if find is not None else None
    found = [bound(module) for module in head.modules()] if head is not None else []
    return [forward for forward in found if forward is not None]


def _forward(model, told, *args, **kwargs):
    """The patched model's forward, with the keywords and the output."""
    heads = _heads(model)
    asked = {field: None for name, field in FIELDS.items() if kwargs.pop(name, None)}
    labels = any(kwargs.get(name) is not None for name in ("labels", "shift_labels")) or len(args) > 1
    check("compat.liger", labels or not kwargs.get("skip_logits"),
          "labels or shift_labels must be given where skip_logits is True, got {}",
          sorted(kwargs))  # fmt: skip
    if asked and model.training and labels:
        kwargs.setdefault("skip_logits", True)
    if labels and kwargs.get("skip_logits", model.training):
        kwargs = {**model.__dict__[_SETTINGS], **kwargs}
    for forward in heads:
        forward.function = _head
        forward.module.__dict__[_ASKED] = asked
    try:
        output = forward_of_model(model, told, *args, **kwargs)
    finally:
        for forward in heads:
            del forward.module.__dict__[_ASKED]
    if isinstance(output, ModelOutput):
        output = with_counts(output)
        for field, value in asked.items():
            if value is not None:
                output[field] = value
    return output


def _head(module, spec, hidden, request=None):
    """The patched head's forward, whose loss gives what was asked for, too."""
    asked = module.__dict__.get(_ASKED)
    if not asked or not isinstance(request, LossRequest):
        return head_forward(module, spec, hidden, request)
    request.options["outputs"] = ("loss", "predicted", "correct")
    result = head_forward(module, spec, hidden, request)
    rows = (result.predicted >= 0).sum()
    values = {"token_accuracy": result.correct.sum() / rows, "predicted_tokens": result.predicted.reshape(-1)}
    asked.update({field: values[field] for field in asked})
    return result.loss
