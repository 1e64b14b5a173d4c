"""Log-probabilities with the roundings of a sampler: ``match`` of :func:`tigon.linear_log_prob`."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tigon._deterministic import is_deterministic
from tigon._op import define
from tigon.error import check
from tigon.ops.loss_head.matmuls import compute_logits
from tigon.ops.loss_head.options import HeadOptions
from tigon.ops.loss_head.plan import check_unbounded, padded

_CHUNK_LOGITS = 1 << 27
_GREEDY = 1e-5  # a temperature below it does not change the logits


def check_match(op, match, head: HeadOptions) -> None:
    """Check that `match` is known and supports the options."""
    known = match is None or (isinstance(match, str) and match == "vllm")
    check(op, known, "match must be 'vllm' (or None), got {!r}", match)
    if match is None:
        return
    check_unbounded(op, head.max_peak_mb, "with match")
    check(op, head.lora is None, "lora must be merged into weight with match, got it apart")
    alone = head.softcap is None or head.logit_scale == 1.0
    check(op, alone, "softcap and logit_scale must not be given both with match: vLLM scales afterwards")


def vllm_logits(hidden, weight, bias=None, softcap=None, logit_scale=1.0, wide=False):
    """``[rows, V]`` logits as in vLLM's ``LogitsProcessor``: every step is rounded to hidden's dtype.

    Args:
        wide: float32 logits of 16-bit operands, as with vLLM's ``head_dtype="float32"``.
    """
    if is_deterministic():
        dtype = torch.float32 if wide or bias is not None else hidden.dtype
        logits = hidden.new_empty(hidden.shape[0], padded(weight.shape[0]), dtype=dtype)[:, : weight.shape[0]]
        compute_logits(logits, hidden, weight)
        if bias is not None:
            logits = logits.add_(bias).to(torch.float32 if wide else hidden.dtype)
    elif not wide:
        logits = F.linear(hidden, weight, bias)
    elif hidden.is_cuda:
        logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
        logits = logits if bias is None else logits + bias.float()
    else:
        logits = F.linear(hidden.float(), weight.float(), None if bias is None else bias.float())
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    return logits if logit_scale == 1.0 else logits * logit_scale


def vllm_log_softmax(logits, temperature=1.0):
    """float32 log-probabilities of all classes as vLLM's ``Sampler`` computes them."""
    z = logits.float()
    if temperature >= _GREEDY and temperature != 1.0:  # a number would multiply by its reciprocal
        z = z / torch.full((1, 1), temperature, dtype=torch.float64, device=z.device).float()
    short = -z.shape[-1] % 4
    if short and z.is_cuda and is_deterministic():  # PyTorch's sum depends on where a row begins
        z = F.pad(z, (0, short), value=-torch.inf)
    return z.log_softmax(-1)


def _label_log_prob(
    hidden, weight, labels, bias, softcap, logit_scale, temperature, ignore_index, chunk_rows, wide
):
    """Compute the log-probabilities of ``[rows, K]`` labels, 0 of ignored ones."""
    counts = labels != ignore_index
    places = torch.where(counts, labels, 0)
    size = chunk_rows or max(4, _CHUNK_LOGITS // weight.shape[0] // 4 * 4)
    log_probs = []
    for part, place in zip(hidden.split(size), places.split(size), strict=True):
        logits = vllm_logits(part, weight, bias, softcap, logit_scale, wide)
        log_probs.append(vllm_log_softmax(logits, temperature).gather(-1, place))
    log_probs = torch.cat(log_probs) if log_probs else hidden.new_empty(labels.shape, dtype=torch.float32)
    return torch.where(counts, log_probs, 0.0)


# For compilers, which must not read the switch when they trace.
define(
    "vllm_log_prob",
    "(Tensor hidden, Tensor weight, Tensor labels, Tensor? bias, float? softcap, float logit_scale, "
    "float temperature, int ignore_index, SymInt chunk_rows, bool wide) -> Tensor",
    _label_log_prob,
)
torch.library.register_fake(
    "tigon::vllm_log_prob",
    lambda hidden, weight, labels, *_: labels.new_empty(labels.shape, dtype=torch.float32),
)


def vllm_log_prob(hidden, weight, target, head: HeadOptions, wide):
    """The log-probabilities of labels in place, ``[...]`` or ``[..., K]``; 0 of ignored ones."""
    with torch.no_grad():
        rows = hidden.reshape(-1, hidden.shape[-1])
        columns = target.shape[-1] if target.dim() == hidden.dim() else 1
        labels = target.to(hidden.device).long().reshape(rows.shape[0], columns)
        weight = weight.to(hidden.dtype)
        bias = None if head.bias is None else head.bias.to(hidden.dtype)
        call = torch.ops.tigon.vllm_log_prob if torch.compiler.is_compiling() else _label_log_prob
        names = ("softcap", "logit_scale", "temperature", "ignore_index")
        numbers = {name: getattr(head, name) for name in names} | {"chunk_rows": head.chunk_rows or 0}
        return call(rows, weight, labels, bias, **numbers, wide=wide).view(target.shape)


class WithValue(torch.autograd.Function):
    """Replaces the value of x and keeps its gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, value):
        return value.view_as(value)

    @staticmethod
    def setup_context(ctx, inputs, output):
        """Nothing is kept."""

    @staticmethod
    def backward(ctx, dx):
        return dx, None
