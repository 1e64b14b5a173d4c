"""transformers' ``use_kernels``, with Tigon instead of a kernel from the Hub.

After :func:`install`, ``from_pretrained(..., use_kernels=True)`` and ``model.set_use_kernels(True)`` give
every norm that transformers tags ``RMSNorm``, ``RMSNormZeroCentered`` or ``RMSNormGated`` Tigon's forward,
and every MLP tagged ``SwiGLUMLP`` or ``GeGLUMLP``, on CPU and CUDA, in training and inference. Nothing is
downloaded for them. A tag does not say where a norm rounds, so the module's own source decides, as in
:func:`tigon.apply`; one that is not recognised keeps its own forward. Rotary functions share one tag for
several formulas and are left to ``tigon.apply``.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

from torch import nn

from tigon.error import check
from tigon.integrations.transformers.mlp import mlp_forward, plan_mlp
from tigon.integrations.transformers.norms import norm_forward, plan_norm

DEVICES = ("cpu", "cuda")

SPEC = "_tigon_tagged"  # kept with the module: the result of recognition, or None


class TaggedRMSNorm(nn.Module):
    """The forward that ``kernels`` binds to a tagged norm; the rest of the class is not used."""

    can_torch_compile = True
    has_backward = True

    def forward(self, hidden_states):
        """``self`` is the model's own norm."""
        return _run(self, plan_norm, norm_forward, hidden_states)


class TaggedGatedRMSNorm(nn.Module):
    """The forward that ``kernels`` binds to a tagged norm with a gate."""

    can_torch_compile = True
    has_backward = True

    def forward(self, hidden_states, gate=None):
        """``self`` is the model's own norm."""
        return _run(self, plan_norm, norm_forward, hidden_states, gate)


class TaggedGatedMLP(nn.Module):
    """The forward that ``kernels`` binds to a tagged MLP: ``down(act(gate(x)) * up(x))``."""

    can_torch_compile = True
    has_backward = True

    def forward(self, x):
        """``self`` is the model's own MLP; its projections are called."""
        return _run(self, plan_mlp, mlp_forward, x)


LAYERS = {
    "RMSNorm": TaggedRMSNorm,
    "RMSNormZeroCentered": TaggedRMSNorm,
    "RMSNormGated": TaggedGatedRMSNorm,
    "SwiGLUMLP": TaggedGatedMLP,
    "GeGLUMLP": TaggedGatedMLP,
}
for _layer in LAYERS.values():
    _layer.forward.runs_tigon = True  # tigon.apply tells this from other forwards


def _run(module: nn.Module, plan, forward, *args):
    if SPEC not in module.__dict__:
        bare = copy.copy(module)
        bare.__dict__.pop("forward", None)  # recognition reads the class's forward
        planned = plan(bare)
        module.__dict__[SPEC] = planned[0] if isinstance(planned, tuple) else None
    spec = module.__dict__[SPEC]
    return type(module).forward(module, *args) if spec is None else forward(module, spec, *args)


@dataclass(frozen=True)
class Repository:
    """The repository that ``kernels`` asks for a layer; this one holds it in memory."""

    layer_name: str

    def load(self) -> type[nn.Module]:
        return LAYERS[self.layer_name]

    def __str__(self) -> str:
        return f"tigon, layer `{self.layer_name}`"


def mapping() -> dict:
    """The kernel mapping, also for ``KernelConfig(kernel_mapping=...)`` and ``use_kernel_mapping``."""
    from kernels import Mode

    plain = (Mode.TRAINING, Mode.INFERENCE)
    modes = (*(mode | Mode.TORCH_COMPILE for mode in plain), *plain)
    return {tag: {device: dict.fromkeys(modes, Repository(tag)) for device in DEVICES} for tag in LAYERS}


def install() -> None:
    """Make transformers use :func:`mapping` before its own kernel mapping, in this process.

    Raises:
        tigon.Error: the package ``kernels`` is missing, or this transformers does not support its version.
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
