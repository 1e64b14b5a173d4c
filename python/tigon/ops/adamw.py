"""AdamW over lists of tensors. Contract: ``csrc/tigon/ops/adamw/adamw.h``."""

from __future__ import annotations

import copy
import math
import operator

import torch

from tigon._op import raw

ROUNDINGS = ("nearest", "stochastic", "split", "master")


# In the order of the operator's arguments.
_TENSORS = ("params", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "extras", "absmaxes", "steps")
_LISTS = (*_TENSORS, "first", "group_sizes", "hyperparameters", "lrs")


class TensorList:
    """The arguments of one call: tensors of one device, those of a group adjacent.

    ``max_exp_avg_sqs`` has one tensor for each parameter of a group with amsgrad, ``extras`` one for each
    16-bit parameter if the rounding is split (int16) or master (float32), ``absmaxes`` two for each
    parameter whose moments are codes (uint8), of exp_avg and of the root of exp_avg_sq; ``steps`` are float32
    scalars on the parameters' device or the CPU, or one tensor of all of them; ``first`` is where a
    parameter's stream of random bits begins, for all or, if no rounding draws any, for no parameter.
    """

    def __init__(self, **lists: list) -> None:
        vars(self).update({name: [] for name in _LISTS} | lists)

    def add_group(self, group: dict, size: int, device: torch.device) -> None:
        """Hyperparameters of the `size` tensors that were added last."""
        lr = group["lr"]
        if isinstance(lr, torch.Tensor) and lr.device.type != "cpu":
            self.lrs.append(lr.to(device, torch.float32))
            lr = math.nan
        self.group_sizes.append(size)
        betas = (float(b) for b in group["betas"])
        flags = (group["decoupled_weight_decay"], group["maximize"], group["amsgrad"])
        self.hyperparameters += [float(lr), *betas, group["eps"], group["weight_decay"], *map(float, flags)]


_lists = operator.attrgetter(*_LISTS)
_adamw = raw("adamw_", lambda *args: None, op="adamw")


def adamw_(
    tensors: TensorList,
    *,
    rounding: str = "nearest",
    moment_rounding: str = "nearest",
    seed: int = 0,
    clip: torch.Tensor | None = None,
    grad_scale: torch.Tensor | None = None,
    found_inf: torch.Tensor | None = None,
) -> None:
    """One update of all parameters, moments, extras and steps of a list, in place.

    Args:
        tensors: the list.
        rounding: of 16-bit parameters: ``nearest``, ``stochastic``, ``split`` or ``master``.
        moment_rounding: of 16-bit moments: ``nearest`` or ``stochastic``.
        seed: of the random bits of ``stochastic``.
        clip, grad_scale: float32 scalars on the parameters' device: factor and divisor of every gradient.
        found_inf: float32 scalar there; nothing is written if it is not 0.

    Raises:
        tigon.Error: tensors that do not fit each other; nothing was modified.
    """
    _call(tensors, rounding, moment_rounding, seed, clip, grad_scale, found_inf)
    torch.autograd.graph.increment_version(tensors.params)


def _call(tensors: TensorList, rounding: str, moment_rounding: str, *rest) -> None:
    _adamw(*_lists(tensors), ROUNDINGS.index(rounding), ROUNDINGS.index(moment_rounding), *rest)


def check_list(tensors: TensorList, rounding: str) -> None:
    """Refuses what :func:`adamw_` refuses, and modifies nothing: a step that is not done."""
    rehearsed = copy.copy(tensors)
    rehearsed.steps = [step.clone() for step in tensors.steps]
    not_done = torch.ones((), device=tensors.params[0].device)
    _call(rehearsed, rounding, "nearest", 0, None, None, not_done)


def reference_(param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq, step, group, clip=None, grad_scale=None):
    """The same formula in plain PyTorch operations, for one tensor: any float dtype, any device."""
    beta1, beta2 = (float(b) for b in group["betas"])
    lr, weight_decay = group["lr"], group["weight_decay"]
    if isinstance(lr, torch.Tensor):
        lr = lr.reshape(())
    wide = torch.promote_types(param.dtype, torch.float32)
    step += 1
    t = step.to(torch.float64) if param.device.type != "mps" else step
    g = grad.to(wide)
    for factor in (clip, None if grad_scale is None else 1 / grad_scale):
        g = g if factor is None else g * factor.to(g.device)
    g = -g if group["maximize"] else g
    p, m, v = (x.to(wide) for x in (param, exp_avg, exp_avg_sq))
    if group["decoupled_weight_decay"]:
        p = p - lr * weight_decay * p
    else:
        g = g + weight_decay * p
    m, v = torch.lerp(m, g, 1 - beta1), torch.lerp(v, g * g, 1 - beta2)
    u = v
    if max_exp_avg_sq is not None:
        u = torch.maximum(max_exp_avg_sq.to(wide), v)
        max_exp_avg_sq.copy_(u)
    denominator = u.sqrt() / (1 - beta2**t).sqrt() + group["eps"]
    param.copy_(p - lr / (1 - beta1**t) * m / denominator)
    exp_avg.copy_(m)
    exp_avg_sq.copy_(v)
