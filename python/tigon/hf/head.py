"""The loss head: `lm_head` owes its logits while training, and the loss never forms them."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.utils import ModelOutput

from tigon.error import check
from tigon.hf.forward import blocked, bound, plain, stock
from tigon.hf.head_operands import head_operands, is_linear, is_lora
from tigon.hf.lazy_logits import LazyLogits, LogitsRequest, LossRequest
from tigon.hf.ledger import Ledger
from tigon.hf.report import HeadCalls
from tigon.ops.labels import count_labels
from tigon.ops.linear_cross_entropy import linear_cross_entropy

# Hooks of these packages gather weights or move tensors; they do not look at the logits.
INFRASTRUCTURE = ("torch.distributed", "deepspeed", "accelerate")


@dataclass
class HeadSpec:
    """State of one patched head."""

    calls: HeadCalls
    ledger: Ledger
    compiled: bool = False  # its model's loss_function is ours, so tracing meets no torch function
    skip: bool | None = None  # what the forward under way was told of its logits (skip_logits)

    def __deepcopy__(self, memo):
        return self  # PEFT copies heads out of a patched model: they count into the same report


def head_forward(module: nn.Module, spec: HeadSpec, hidden, request=None):
    """Forward of a patched head: lazy logits while training, logits or a loss on request."""
    if isinstance(request, LossRequest):
        return _loss(module, spec, hidden, request)
    if isinstance(request, LogitsRequest) or not _lazy(module, spec, hidden):
        return stock(module, hidden)
    dtype, autocast = hidden.dtype, None
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = autocast = torch.get_autocast_dtype(hidden.device.type)
    if not torch.compiler.is_compiling():
        spec.calls.lazy += 1
    return LazyLogits(module, hidden, module.weight.shape[0], dtype, spec.calls, autocast)


def _lazy(module, spec, hidden) -> bool:
    """Whether logits may be owed; evaluation, generation and observers get real ones."""
    wanted = module.training and torch.is_grad_enabled() if spec.skip is None else spec.skip
    if not (wanted and plain(hidden, module.weight)):
        return False
    if is_lora(module) and head_operands(module) is None:
        return False
    if torch.compiler.is_compiling() and not spec.compiled:
        return False
    if torch.jit.is_tracing():
        return False
    mixed = hidden.dtype != module.weight.dtype
    if mixed and not torch.is_autocast_enabled(hidden.device.type):
        return False  # an error in stock, and it shall stay one
    if module._backward_hooks or module._backward_pre_hooks:
        return False
    return not any(map(_foreign, (*module._forward_hooks.values(), *module._forward_pre_hooks.values())))


def _foreign(hook) -> bool:
    """Whether a hook belongs to somebody who expects one call with logits."""
    hook = getattr(hook, "func", hook)  # functools.partial
    return not (getattr(hook, "__module__", None) or "").startswith(INFRASTRUCTURE)


def _loss(module, spec, hidden, request):
    weight, bias, lora = head_operands(module)
    columns, dtype = request.columns, request.dtype
    if columns is not None:
        weight, bias = weight[:columns], None if bias is None else bias[:columns]
        lora = None if lora is None else (lora[0], lora[1][:columns], lora[2])
    if dtype is not None:
        hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    target = request.target  # on the CPU: counted there, then moved
    target = target if target.device.type == "cpu" else target.to(hidden.device)
    spec.ledger.note(hidden, weight)
    device = hidden.device.type
    if torch.is_autocast_enabled(device):  # the casts are made; autocast must not add its own
        with torch.autocast(device, enabled=False):
            return linear_cross_entropy(hidden, weight, target, bias=bias, lora=lora, **request.options)
    return linear_cross_entropy(hidden, weight, target, bias=bias, lora=lora, **request.options)


def before_forward(module: nn.Module, args, kwargs):
    """Forward pre-hook of a patched model: counts the labels, and takes ``skip_logits`` off the keywords.

    Counted while the layers run, the labels' number is known to the host by the time of the loss, without
    waiting, and rows that do not count are left out. ``skip_logits`` (Liger's word, which TRL passes) decides
    about logits where training or not would: True owes them to the loss in evaluation too.
    """
    kwargs = dict(kwargs)
    skip = kwargs.pop("skip_logits", None)
    if skip:
        names = [*inspect.signature(module.forward).parameters][: len(args)] if len(args) > 1 else []
        given = {*kwargs, *names}
        some = given & {"labels", "shift_labels"}
        check("apply", some, "labels must be given with skip_logits=True, got {}", sorted(given))
    for spec in _specs(module):
        spec.skip = skip
        spec.ledger.open()
    if not torch.compiler.is_compiling() and (module.training or skip):
        shifted = kwargs.get("shift_labels")
        labels = kwargs.get("labels") if shifted is None else shifted
        if isinstance(labels, torch.Tensor) and labels.is_cuda and labels.ndim:
            count_labels(labels, kwargs.get("ignore_index", -100), shift=shifted is None)
    return args, kwargs


def after_forward(module: nn.Module, args, output):
    """Forward hook of a patched model: logits that were to be skipped are not in its output."""
    del args
    skipped = [spec for spec in _specs(module) if spec.skip]
    for spec in skipped:
        spec.skip = None
    if skipped and isinstance(output, ModelOutput):
        output = type(output)(**{name: value for name, value in output.items() if name != "logits"})
    return output


def _specs(owner: nn.Module) -> list[HeadSpec]:
    """The state of a model's patched head, wherever PEFT has put it."""
    head = owner.get_output_embeddings()
    forwards = [bound(linear) for linear in _behind(head)] if head is not None else ()
    return [forward.spec for forward in forwards if forward is not None]


def _behind(head: nn.Module) -> list[nn.Module]:
    """The modules of an output head: itself, or those in PEFT's wrapper."""
    if hasattr(head, "modules_to_save") and hasattr(head, "original_module"):
        return [*head.modules_to_save.values(), head.original_module]
    return [head]


def _fused(logits, target, **options):
    return logits.cross_entropy(target, **options) if isinstance(logits, LazyLogits) else None


def causal_lm_loss(logits, labels, vocab_size, num_items_in_batch=None, ignore_index=-100,
                   shift_labels=None, **kwargs):  # fmt: skip
    """transformers' ForCausalLMLoss that computes lazy logits' loss from the hidden states."""
    if isinstance(logits, LazyLogits) and logits.shape[-1] == vocab_size:
        options = {"ignore_index": ignore_index, "denominator": num_items_in_batch}
        if shift_labels is not None:
            flat = logits.view(-1, vocab_size)
            loss = _fused(flat, shift_labels.reshape(-1), **options)
        elif logits.shape[:-1] == labels.shape:
            loss = _fused(logits, labels, shift=True, **options)  # the tensor that was counted
        else:
            target = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
            loss = _fused(logits.view(-1, vocab_size), target.reshape(-1), **options)
        if loss is not None:
            return loss
    if isinstance(logits, LazyLogits):
        logits = logits.materialise()
    return ForCausalLMLoss(logits, labels, vocab_size, num_items_in_batch, ignore_index,
                           shift_labels, **kwargs)  # fmt: skip


def plan_head(head: nn.Module) -> list[nn.Linear] | str:
    """The Linear modules behind an output head, or why it is left."""
    linears = _behind(head)
    for linear in linears:
        reason = _unfit(linear)
        if reason is not None:
            return reason
    return linears


def _unfit(head: nn.Module) -> str | None:
    if hasattr(head, "base_layer") and not is_lora(head):
        return f"{type(head).__name__} adds an adapter to the head; its logits must be computed"
    if not is_linear(head) and not is_lora(head):
        return f"the head is {type(head).__name__}, not nn.Linear"
    shape = tuple(getattr(head.weight, "ds_shape", head.weight.shape))  # ZeRO-3 keeps it there
    if not head.weight.is_floating_point() or len(shape) != 2:
        return f"the head's weight is {head.weight.dtype} of {shape}: quantised or flattened"
    return blocked(head)
