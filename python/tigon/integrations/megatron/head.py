"""The loss head: ``output_layer`` returns lazy logits; ``compute_language_model_loss`` does not need them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from tigon import parallel
from tigon.integrations.megatron.classes import is_one_of
from tigon.integrations.megatron.cross_entropy import group_size, tensor_group
from tigon.integrations.transformers.forward import autocast_dtype, blocked, plain
from tigon.integrations.transformers.lazy_logits import LazyLogits, LossRequest, of_tensor
from tigon.integrations.transformers.report import HeadCalls
from tigon.ops.loss_head.linear_cross_entropy import linear_cross_entropy

LAYER = "megatron.core.tensor_parallel.layers.ColumnParallelLinear"


@dataclass
class HeadSpec:
    """State of one patched head."""

    calls: HeadCalls
    keep_mb: float = 0.0


class OwedHead(nn.Module):
    """One deferred call of an output layer: its operands and options."""

    def __init__(self, layer, weight, gather, spec):
        super().__init__()
        self.weight = weight  # the layer's own, or the embedding's
        self.rest = (layer, gather, spec, torch.is_grad_enabled())

    def forward(self, hidden, request):
        return self.answer(self, hidden, request)

    def answer(self, module, hidden, request):
        """Answer a request, as `HeadSpec` of transformers' heads does."""
        del module
        layer, gather, spec, grad = self.rest
        with torch.set_grad_enabled(grad):
            if isinstance(request, LossRequest):
                return _loss(layer, spec, hidden, self.weight, request)
            return type(layer).forward(layer, hidden, self.weight, gather)[0]


def output_forward(layer, spec, input_, weight=None, runtime_gather_output=None):
    """Forward of a patched output layer: lazy logits, and the bias that the caller adds."""
    used = layer.weight if weight is None else weight
    reason = _why_computed(layer, input_, used, runtime_gather_output)
    if reason is not None:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            spec.calls.computed += 1
            spec.calls.reason = reason
        return type(layer).forward(layer, input_, weight, runtime_gather_output)
    spec.calls.lazy += 1
    head = OwedHead(layer, used, runtime_gather_output, spec)
    shares = group_size(layer.tp_group) if getattr(layer, "sequence_parallel", False) else 1
    kind = LazyLogits if shares == 1 else _GatheredLogits
    logits = kind(head, input_, used.shape[0], input_.dtype, spec.calls)
    if shares > 1:
        logits._shares = shares
    return logits, layer.bias if layer.skip_bias_add else None


class _GatheredLogits(LazyLogits):
    """Lazy logits of the rows of all processes, from this process's share of the hidden states."""

    _kept = (*LazyLogits._kept, "_shares")
    _shares = 1

    @property
    def shape(self):
        share, *others = self._hidden.shape[:-1]
        return torch.Size((self._shares * share, *others, self._columns))

    # Rows of the share are not those of the logits.
    view, flatten, __getitem__ = map(of_tensor, ("view", "flatten", "__getitem__"))


def _why_computed(layer, hidden, weight, gather) -> str | None:
    """Why logits are computed at once although they could be deferred, or None."""
    if torch.compiler.is_compiling():
        return "torch.compile traces the output layer"
    if torch.is_inference_mode_enabled():
        return "inference"
    if weight is None or not plain(hidden, weight) or hasattr(weight, "__fsdp_param__"):
        return "the weight is not a plain tensor (Megatron FSDP, quantised)"
    if weight.shape != (layer.output_size_per_partition, layer.input_size):
        return "the weight has another shape than the layer"  # Megatron raises its own error
    if autocast_dtype(hidden.device.type) is not None:
        return "autocast"
    if hidden.dtype != weight.dtype:
        return "hidden states and the head's weight differ in dtype"
    if group_size(layer.tp_group) > 1 and (layer.gather_output if gather is None else gather):
        return "logits are gathered from all processes"
    if layer._forward_hooks:
        return "a forward hook of the output layer expects logits"
    return None


def language_model_loss(model, spec, labels, logits):
    """compute_language_model_loss of a patched model: ``[b, s]`` float32."""
    if isinstance(logits, LazyLogits):
        target = labels.transpose(0, 1).contiguous()
        predict = bool(getattr(model.config, "mtp_num_layers", None)) and model.training
        loss = logits.cross_entropy(target, reduction="none", predict=predict)
        if loss is not None:
            return loss.transpose(0, 1).contiguous()
        logits = logits.materialise()
    return type(model).compute_language_model_loss(model, labels, logits)


def _loss(layer, spec, hidden, weight, request):
    """Per-token losses of ``hidden @ weight.T``; a tensor-parallel group may shard the classes."""
    bias = None if layer.skip_bias_add else layer.bias
    options = request.options
    if spec.keep_mb:
        options = options | {"keep_mb": spec.keep_mb}
    sharded = group_size(layer.tp_group) > 1
    if _adds_to_main_grad(layer, weight):
        into = weight.main_grad
        if into.dtype == torch.float32 and (sharded or not spec.keep_mb):
            hidden, weight = _Announce.apply(hidden, weight), _proxy(weight, into)
        else:
            weight = _AddToMainGrad.apply(weight)
    if sharded:
        group, vocab = tensor_group(layer.tp_group), weight.shape[0] * group_size(layer.tp_group)
        options = options | {"vocab": vocab, "sequence_parallel": bool(layer.sequence_parallel)}
        return parallel.linear_cross_entropy(hidden, weight, request.target, group, bias=bias, **options)
    return linear_cross_entropy(hidden, weight, request.target, bias=bias, **options)


# The weight's gradient in main_grad. Megatron's hooks run when the weight gets a gradient. A flag tells them
# that main_grad already has it, and they start its reduction. So the head adds to main_grad first, and then
# returns a meaningless gradient.


def _adds_to_main_grad(layer, weight) -> bool:
    wanted = layer.gradient_accumulation_fusion and weight.requires_grad and torch.is_grad_enabled()
    return wanted and getattr(weight, "main_grad", None) is not None


def _proxy(weight, into):
    """The weight for the loss head, which adds its gradient to main_grad and returns none."""
    proxy = weight.detach().requires_grad_()
    proxy.tigon_main_grad, proxy.main_grad = True, into
    return proxy


def _announced(weight):
    """Set the flag; return the gradient that makes Megatron's hooks run."""
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    zeros = getattr(weight, "zero_out_wgrad", False)  # others add to it: a tied embedding, further heads
    return torch.zeros_like(weight) if zeros else torch.empty_like(weight)


class _Announce(torch.autograd.Function):
    """Returns hidden. Its backward runs after the head's, when main_grad has the weight's gradient."""

    @staticmethod
    def forward(ctx, hidden, weight):
        ctx.weight = weight
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, dhidden):
        return dhidden if ctx.needs_input_grad[0] else None, _announced(ctx.weight)


class _AddToMainGrad(torch.autograd.Function):
    """Returns weight; its complete gradient is added to main_grad, of any dtype."""

    @staticmethod
    def forward(ctx, weight):
        ctx.weight = weight
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, dweight):
        ctx.weight.main_grad.add_(dweight.detach())
        return _announced(ctx.weight)


def plan_head(model: nn.Module) -> str | tuple:
    """(the model's loss, its name) for the head of a language model, or why it is left."""
    layer = getattr(model, "output_layer", None)
    if layer is None:
        return "this pipeline stage has no output layer"
    if not is_one_of(layer, LAYER):
        return f"the output layer is {type(layer).__name__}, not ColumnParallelLinear"
    size = group_size(layer.tp_group)
    if size > 1 and not isinstance(tensor_group(layer.tp_group), dist.ProcessGroup):
        return f"tensor parallel over {size} processes, which are no torch.distributed group"
    if size > 1 and (
        getattr(layer, "disable_grad_reduce", False) or getattr(layer, "explicit_expert_comm", False)
    ):
        return "the gradient of its input is reduced elsewhere"
    if getattr(model.config, "defer_embedding_wgrad_compute", False):
        return "defer_embedding_wgrad_compute puts the weight's gradient off"
    if getattr(layer, "gtp_remat_size", 1) > 1:
        return "the weight is gathered for every call (gtp_remat)"
    if getattr(model.config, "batch_invariant_mode", False):
        return "batch_invariant_mode asks for Megatron's own matmul"
    if "compute_language_model_loss" in vars(model):
        return "its compute_language_model_loss is bound to the instance by another patch"
    return blocked(layer) or (language_model_loss, "tigon.linear_cross_entropy")
