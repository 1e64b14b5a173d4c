"""transformers' ``use_kernels``, with Tigon instead of a kernel from the Hub.

After :func:`install`, ``from_pretrained(..., use_kernels=True)`` and ``model.set_use_kernels(True)`` give
every norm that transformers tags ``RMSNorm`` or ``RMSNormZeroCentered`` Tigon's forward, on CPU and CUDA, in
training and inference; nothing is downloaded for them. The tag does not say where a norm rounds, so the
norm's own source decides, as in :func:`tigon.apply`; one that is not recognised keeps its own forward. Rotary
functions share one tag for several formulas and are left to ``tigon.apply``.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

from torch import nn

from tigon.error import check
from tigon.integrations.transformers.norms import norm_forward, plan_norm

TAGS = ("RMSNorm", "RMSNormZeroCentered")
DEVICES = ("cpu", "cuda")

SPEC = "_tigon_norm"  # kept with the norm: what its source says, None if it is not recognised


class TaggedRMSNorm(nn.Module):
    """The forward that ``kernels`` binds to a tagged norm; nothing else of it is used."""

    can_torch_compile = True
    has_backward = True

    def forward(self, hidden_states):
        """``self`` is the model's own norm."""
        if SPEC not in self.__dict__:
            _recognise(self)
        spec = self.__dict__[SPEC]
        if spec is None:
            return type(self).forward(self, hidden_states)
        return norm_forward(self, spec, hidden_states)


TaggedRMSNorm.forward.runs_tigon = True  # tigon.apply tells this from a stranger's forward


def _recognise(norm: nn.Module) -> None:
    bare = copy.copy(norm)
    bare.__dict__.pop("forward", None)  # recognition is about the class's own
    planned = plan_norm(bare)
    norm.__dict__[SPEC] = planned[0] if isinstance(planned, tuple) else None


@dataclass(frozen=True)
class Repository:
    """What ``kernels`` asks for a layer; this one has it in memory."""

    layer_name: str = "TaggedRMSNorm"

    def load(self) -> type[nn.Module]:
        return TaggedRMSNorm

    def __str__(self) -> str:
        return "tigon, layer `TaggedRMSNorm`"


def mapping() -> dict:
    """The kernel mapping, also for ``KernelConfig(kernel_mapping=...)`` and ``use_kernel_mapping``."""
    from kernels import Mode

    modes = (
        Mode.TRAINING | Mode.TORCH_COMPILE,
        Mode.INFERENCE | Mode.TORCH_COMPILE,
        Mode.TRAINING,
        Mode.INFERENCE,
    )
    return {tag: {device: dict.fromkeys(modes, Repository()) for device in DEVICES} for tag in TAGS}


def install() -> None:
    """Put :func:`mapping` in front of transformers' own, in this process.

    Raises:
        tigon.Error: the package ``kernels`` is missing, or not of the versions this transformers takes.
    """
    from transformers.utils import import_utils

    low, high = (getattr(import_utils, f"KERNELS_{end}_VERSION", "?") for end in ("MIN", "MAX"))
    words = "kernels must be installed, >= {} and < {} for this transformers, got {}"
    check("compat.kernels", import_utils.is_kernels_available(), words, low, high, _installed())
    from kernels import register_kernel_mapping
    from transformers.integrations import hub_kernels

    ours = mapping()
    stock = getattr(hub_kernels, "get_kernel_mapping_transformers", None)
    if stock is not None:  # transformers registers it again at every set_use_kernels
        for tag, devices in ours.items():
            stock().setdefault(tag, {}).update(devices)
    register_kernel_mapping(ours)


def _installed() -> str:
    import importlib.metadata

    try:
        return importlib.metadata.version("kernels")
    except importlib.metadata.PackageNotFoundError:
        return "none"
