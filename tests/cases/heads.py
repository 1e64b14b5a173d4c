"""What the case modules of loss heads share: adapters, logits, traffic, operations, bare matmuls, peers."""

import math

import torch
import torch.nn.functional as F

from .case import Case, Maker, itemsize, params, upcast

LORA_SCALE = 0.5
LLAMA = {"H": 4096, "V": 128256}


def adapter(draw: Maker, rank: int, size: int, vocab: int) -> dict[str, torch.Tensor | None]:
    """The two matrices of a head's adapter; of rank 0 none."""
    if not rank:
        return {"lora_a": None, "lora_b": None}
    return {"lora_a": draw.randn(rank, size, scale=1 / math.sqrt(size)), "lora_b": draw.randn(vocab, rank)}


def trained(p: dict) -> tuple[str, ...]:
    """The names of a head's other operands that get gradients."""
    return (("bias",) if p["bias"] else ()) + (("lora_a", "lora_b") if p["lora"] else ())


def as_tigon(options: dict) -> dict:
    """A case's options as Tigon's heads take them: both matrices of an adapter and its scale in one."""
    a, b = options.pop("lora_a", None), options.pop("lora_b", None)
    return options if a is None else options | {"lora": (a, b, LORA_SCALE)}


def linear(hidden, weight, bias=None, lora_a=None, lora_b=None):
    """The head and its adapter in the model's dtype."""
    z = F.linear(hidden, weight, bias)
    return z if lora_a is None else z + LORA_SCALE * F.linear(F.linear(hidden, lora_a), lora_b)


def altered(logits, softcap=None, logit_scale=1.0, temperature=1.0):
    """Logits upcast, scaled, capped and divided by the temperature."""
    z = upcast(logits) * logit_scale
    return (z if softcap is None else softcap * torch.tanh(z / softcap)) / temperature


def shifted(target):
    """The label of position t + 1 at t."""
    return F.pad(target[..., 1:], (0, 1), value=-100)


def matmul_of(defaults: dict):
    """The one matmul of a head, for :func:`costs`: rows, hidden size and classes of a case."""

    def matmuls(case: Case) -> list[tuple[int, int, int]]:
        p = params(case, defaults)
        return [(math.prod(p["lead"]), p["H"], p["V"])]

    return matmuls


def costs(matmuls):
    """`bytes_fwd, bytes_bwd, flops_fwd, flops_bwd` of the matmuls of a forward, of which the first gets
    gradients: operands read, and read again for both gradients.

    Recomputing the logits is a choice, not counted.
    """

    def bytes_of(found, dtype: torch.dtype) -> int:
        return sum((rows + vocab) * size for rows, size, vocab in found) * itemsize(dtype)

    def flops_of(found) -> int:
        return sum(2 * math.prod(sizes) for sizes in found)

    return (
        lambda case, dtype: bytes_of(matmuls(case), dtype),
        lambda case, dtype: 2 * bytes_of(matmuls(case)[:1], dtype),
        lambda case: flops_of(matmuls(case)),
        lambda case: 2 * flops_of(matmuls(case)[:1]),
    )


def loss_gradient(hidden, weight, target):
    """The gradient a loss really has: its values, mostly tiny, decide what power the matmuls draw."""
    grad = torch.softmax(hidden @ weight.t(), dim=-1)
    grad[torch.arange(len(grad), device=grad.device), target.reshape(-1).clamp(min=0)] -= 1
    return grad.div_(len(grad))


def gradient_matmuls(grad, hidden, weight, grads: tuple[int, ...]) -> list:
    """The matmuls of the gradients that are wanted, of hidden (0) and weight (1)."""
    matmuls = (lambda: grad @ weight, lambda: grad.t() @ hidden)
    return [matmuls[i] for i in grads]


def liger_head(hidden, weight, target, options: dict, accumulate):
    """Liger's fused loss head, which takes its options by position."""
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    names = ("bias", "class_weight", "ignore_index", "z_loss", "label_smoothing", "reduction", "softcap")
    form = [options.get(name, -100 if name == "ignore_index" else None) for name in names]
    return LigerFusedLinearCrossEntropyFunction.apply(hidden, weight, target, *form, False, accumulate)[0]
