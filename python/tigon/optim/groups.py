"""The keys that a group of parameters may hold, and the groups of LoRA+."""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from tigon.error import check, refuse
from tigon.ops.arguments import check_booleans, check_numbers, check_positive, kind_of

# These are options of AdamW's groups.
ADAMW = (
    "lr",
    "betas",
    "eps",
    "weight_decay",
    "amsgrad",
    "maximize",
    "foreach",
    "capturable",
    "differentiable",
    "fused",
    "decoupled_weight_decay",
)
# These are options of tigon.optim.AdamW as a whole.
ADAMW_WHOLE = ("rounding", "moment_dtype", "moment_rounding", "max_grad_norm", "seed")
_OTHER_NAMES = {
    "learning_rate": "lr",
    "wd": "weight_decay",
    "beta1": "betas",
    "beta2": "betas",
    "epsilon": "eps",
}
_LORA_B = re.compile("lora_[Bb](?![A-Za-z])")  # of PEFT's layers and tigon.nn.LoRALinear


def check_keys(op: str, keys: Iterable[object], options: Iterable[str]) -> None:
    """Each key of a group must be one of these options, or a note of its maker's: no option of any optimizer,
    and not an option that is spelled wrong."""
    for key in keys:
        if key in options or key in ("params", "param_names") or not isinstance(key, str):
            continue
        if key in ADAMW_WHOLE:
            refuse(op, "a group must not have {!r}: it is an option of tigon.optim.AdamW as a whole", key)
        others = _options_of_all()
        if key in others:
            words = "a group must not have {!r}, an option of other optimizers: it may have {}"
            refuse(op, words, key, (*sorted(options),))
        close = difflib.get_close_matches(key, {*options, *others}, 1, 0.8)
        near = _OTHER_NAMES.get(key) or next(iter(close), None)
        # max_momentum and initial_lr are schedulers' notes.
        if near is not None and not (key.startswith(near + "_") or key.endswith("_" + near)):
            refuse(op, "a group must not have {!r}, which is no option: is {!r} meant?", key, near)


@functools.cache
def _options_of_all() -> frozenset[str]:
    """The arguments of all optimizers of PyTorch's, and the mark of Muon's groups."""
    classes = [c for c in vars(torch.optim).values() if inspect.isclass(c) and c is not torch.optim.Optimizer]
    signatures = [inspect.signature(c) for c in classes if issubclass(c, torch.optim.Optimizer)]
    return frozenset(name for s in signatures for name in s.parameters) - {"params"} | {"use_muon"}


def check_lr(op: str, lr: float | torch.Tensor) -> None:
    """A number or a tensor of one element, not negative if the host knows it."""
    is_tensor = isinstance(lr, torch.Tensor)
    check(op, not is_tensor or lr.numel() == 1, "lr must be a number or a tensor of one element, got {}", lr)
    check_constants(op, lr=lr)
    check(op, (is_tensor and not lr.is_cpu) or float(lr) >= 0, "lr must be >= 0, got {}", lr)


def check_constants(op: str, **values: object) -> None:
    """Each must be a number that wants no gradient."""
    check_numbers(op, **values)
    for name, value in values.items():
        wanted = isinstance(value, torch.Tensor) and value.requires_grad
        check(op, not wanted, name + " must not require a gradient: no derivatives run through an update")


def check_adamw(op: str, group: dict[str, Any]) -> None:
    """The options of one of AdamW's groups, all of which must be given."""
    check_lr(op, group["lr"])
    betas, eps, decay = (group[name] for name in ("betas", "eps", "weight_decay"))
    two = isinstance(betas, (tuple, list)) and len(betas) == 2
    check(op, two, "betas must be two numbers, got {}", betas)
    check_constants(op, **{"betas[0]": betas[0], "betas[1]": betas[1]}, eps=eps, weight_decay=decay)
    check(op, all(0 <= float(b) < 1 for b in betas), "betas must be in [0, 1), got {}", betas)
    check(op, eps >= 0, "eps must be >= 0, got {}", eps)
    check(op, decay >= 0, "weight_decay must be >= 0, got {}", decay)
    flags = ("amsgrad", "maximize", "capturable", "decoupled_weight_decay")
    check_booleans(op, **{name: group[name] for name in flags})
    for name in ("foreach", "fused"):
        value = group[name]
        known = value is None or isinstance(value, bool)
        check(op, known, name + " must be True, False or None, got {}", kind_of(value))
    words = "differentiable must be False: no derivatives run through an update"
    check(op, not group["differentiable"], words)


def lora_plus_groups(
    model: nn.Module, *, lr: float, ratio: float, embedding_lr: float = 1e-6, weight_decay: float = 0.0
) -> list[dict[str, Any]]:
    """The trainable parameters of `model` in groups for LoRA+: every lora_B learns `ratio` times faster.

    The groups are those of PEFT's ``create_loraplus_optimizer``, in its order, for any optimizer. The first
    holds lora_A and all parameters of no other group, the second adapters of embeddings, the third lora_B and
    all vectors. The fourth holds the biases and the parameters of ``nn.LayerNorm`` of the third, without
    weight decay. Empty groups are left out.

    Args:
        model: any module, such as a PEFT model or one with :class:`tigon.nn.LoRALinear`.
        lr: learning rate of the first group.
        ratio: ratio of lora_B's learning rate to `lr`; PEFT's ``loraplus_lr_ratio``. The paper uses 16, and
            an `lr` smaller than that of plain LoRA.
        embedding_lr: learning rate of adapters of embeddings; PEFT's ``loraplus_lr_embedding``.
        weight_decay: PEFT's ``loraplus_weight_decay``.

    Raises:
        tigon.Error: no lora_B is trainable, or an argument is not a valid number.

    Source: Hayou et al. 2024, "LoRA+: Efficient Low Rank Adaptation of Large Models", arXiv:2402.12354.
    """
    op = "lora_plus_groups"
    check_lr(op, lr)
    check_lr(op, embedding_lr)
    check_positive(op, "ratio", ratio)
    check_constants(op, weight_decay=weight_decay)
    modules = dict(model.named_modules())
    norms = [module for module in modules.values() if isinstance(module, nn.LayerNorm)]
    kept = {p for norm in norms for p in norm.parameters()}
    names = ("rest", "embeddings", "fast", "fast_kept")
    found: dict[str, list[nn.Parameter]] = {name: [] for name in names}
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    some = any(_LORA_B.search(name) or "lora_embedding_B" in name for name, _ in trained)
    words = "model must have a lora_B that trains, got {} parameters that train and none of this name"
    check(op, some, words, len(trained))
    for name, p in trained:
        owner = modules.get(name.rsplit(".", 2)[0]) if name.count(".") > 1 else None
        if len(getattr(owner, "lora_embedding_A", ())):
            found["embeddings"].append(p)
        elif _LORA_B.search(name) or p.ndim == 1:
            found["fast_kept" if p in kept or "bias" in name else "fast"].append(p)
        else:
            found["rest"].append(p)
    rates = dict(zip(names, (lr, embedding_lr, lr * ratio, lr * ratio), strict=True))
    return [
        {"params": params, "lr": rates[name], "weight_decay": 0.0 if name == "fast_kept" else weight_decay}
        for name, params in found.items()
        if params
    ]
