"""``liger_kernel.backends`` and ``liger_kernel.functional``: names choose among implementations of an op.

Of each op there is Tigon's. It answers to ``nvidia-triton``, the name callers know of the one that runs
everywhere. Liger's other names choose nothing. Callers may register implementations of their own and choose
those.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tigon.integrations.liger import divergences, modules
from tigon.integrations.liger.signatures import by_position

logger = logging.getLogger("tigon")

OURS = "nvidia-triton"
_NAMES = (OURS, "nvidia-cutedsl", "nvidia-cutile", "ascend-triton")
_SHORT = {"triton": OURS, "cutedsl": "nvidia-cutedsl", "cutile": "nvidia-cutile"}


class ImplNotAvailableError(RuntimeError):
    """The implementation that was asked for is not there or cannot run here."""


class NoImplAvailableError(RuntimeError):
    """No implementation of the op can run here."""


class LigerImplFallbackWarning(UserWarning):
    """One implementation took another's place."""


BackendNotAvailableError = ImplNotAvailableError
NoBackendAvailableError = NoImplAvailableError
LigerBackendFallbackWarning = LigerImplFallbackWarning


def _sm(cc: tuple[int, int]) -> str:
    return "sm_{}{}".format(*cc)


@dataclass(frozen=True)
class Capability:
    """What an implementation needs: compute capability, modules, a GPU, a condition of its own."""

    min_cc: tuple[int, int] | None = None
    max_cc: tuple[int, int] | None = None
    modules: list[str] = field(default_factory=list)
    requires_cuda: bool = False
    predicate: Callable[[], bool] | None = None

    def reason_if_unsatisfied(self, device=None) -> str | None:
        """Why it cannot run on ``device`` (the current one without it), or None."""
        for module in self.modules:
            if importlib.util.find_spec(module) is None:
                return f"module '{module}' not importable"
        if self.requires_cuda or self.min_cc or self.max_cc:
            if not torch.cuda.is_available():
                return "CUDA device not available"
            cc = torch.cuda.get_device_capability(device)
            if cc < (self.min_cc or cc):
                return f"{_sm(cc)} is below {_sm(self.min_cc)}"
            if cc > (self.max_cc or cc):
                return f"{_sm(cc)} is above {_sm(self.max_cc)}"
        return None if self.predicate is None or self.predicate() else "custom predicate returned False"


@dataclass(frozen=True)
class OpImpl:
    """One implementation of one op: a function, or a class with ``apply`` for positional arguments."""

    op_name: str
    impl_name: str
    call: Callable[..., Any]
    capability: Capability = Capability()
    preference_rank: int = 100
    tolerances: Mapping[torch.dtype, Mapping[str, float]] = field(default_factory=dict)


def _bounds(f32, f16=(5e-3, 5e-2), bf16=(2e-2, 1e-1)) -> dict:
    """dtype -> the tolerances that the interface promises for an op, forward and backward."""
    relative = {torch.float16: (1e-3, 1e-2), torch.bfloat16: (1e-2, 2e-2), torch.float32: f32}
    absolute = {torch.float16: f16, torch.bfloat16: bf16, torch.float32: f32}
    return {
        dtype: {"atol_fwd": a, "atol_bwd": b, "rtol_fwd": relative[dtype][0], "rtol_bwd": relative[dtype][1]}
        for dtype, (a, b) in absolute.items()
    }


_USUAL = _bounds((1e-5, 1e-4))
_TOLERANCES = {"layer_norm": _bounds((5e-4, 1e-3)), "jsd": _bounds((1e-5, 1e-5), (5e-3, 5e-3), (2e-2, 2e-2))}
_REGISTRY: dict[tuple[str, str], OpImpl] = {}
IMPL_REGISTRY: dict = {}  # of liger_kernel.ops.backends: kernels for other hardware, which nobody has here
LIGER_KERNEL_IMPL_ENV = "LIGER_KERNEL_IMPL"
_chosen: str | None = None


def register_impl(
    op_name,
    *,
    impl_name=None,
    capability=None,
    modes=(),
    default_mode=None,
    preference_rank=100,
    tolerances=None,
    notes="",
    backend=None,
):
    """Decorator of a function, or of a class with ``apply``: an implementation of ``op_name``."""
    name = _full(impl_name or backend)
    if name is None:
        raise TypeError("register_impl requires impl_name=")

    def decorate(value):
        call = (lambda *args, mode=None: value.apply(*args)) if isinstance(value, type) else value
        _REGISTRY[op_name, name] = OpImpl(
            op_name, name, call, capability or Capability(), preference_rank, tolerances or {}
        )
        return value

    return decorate


def _full(name: str | None) -> str | None:
    return _SHORT.get(name, name)


def set_impl(name: str | None) -> None:
    """Choose an implementation for the process; None leaves the choice to the ranks."""
    global _chosen
    _chosen = _full(name)


def get_impl() -> str | None:
    return _chosen


def _registered(op_name: str) -> list[OpImpl]:
    found = [value for (op, _), value in _REGISTRY.items() if op == op_name]
    return sorted(found, key=lambda value: (value.preference_rank, value.impl_name))


def get_registered(op_name: str, backend: str) -> OpImpl | None:
    """One implementation of an op, or None."""
    return _REGISTRY.get((op_name, _full(backend)))


def available_impls(op_name: str, device=None) -> list[str]:
    """Names of those that can run on ``device``, best rank first."""
    usable = (v for v in _registered(op_name) if v.capability.reason_if_unsatisfied(device) is None)
    return [value.impl_name for value in usable]


def clear_available_cache() -> None:
    """Nothing to do: availability is not remembered."""


def resolve_impl(op_name: str, requested: str | None = None, device=None) -> OpImpl:
    """The implementation that runs: the requested, the environment's, :func:`set_impl`'s, the best rank.

    Raises:
        ImplNotAvailableError: the requested one is unknown or cannot run on ``device``.
        NoImplAvailableError: the op has none that can.
    """
    variables = [
        f"LIGER_KERNEL_{word}{part}" for part in (f"_{op_name.upper()}", "") for word in ("IMPL", "BACKEND")
    ]
    name = _full(requested or next(filter(None, map(os.environ.get, variables)), None) or _chosen)
    if name is None:
        usable = available_impls(op_name, device)
        if not usable:
            raise NoImplAvailableError(
                f"No implementation available for op '{op_name}': it is not there in tigon's interface"
            )
        return _REGISTRY[op_name, usable[0]]
    wanted = get_registered(op_name, name) or (get_registered(op_name, OURS) if name in _NAMES else None)
    if wanted is None:
        names = [value.impl_name for value in _registered(op_name)] or "<none>"
        raise ImplNotAvailableError(
            f"No '{name}' implementation registered for op '{op_name}'. Registered: {names}."
        )
    reason = wanted.capability.reason_if_unsatisfied(device)
    if reason is not None:
        raise ImplNotAvailableError(f"Implementation '{name}' for op '{op_name}' is not available: {reason}.")
    return wanted


def dispatch(op_name: str, *args, impl: str | None = None, backend: str | None = None, **kwargs):
    """Run an op by the implementation that :func:`resolve_impl` finds for the first CUDA tensor's device."""
    device = next((a.device for a in args if isinstance(a, torch.Tensor) and a.is_cuda), None)
    found = resolve_impl(op_name, impl or backend, device)
    if found.impl_name == OURS:
        kwargs.pop("mode", None)
    return found.call(*args, **kwargs)


register_op, resolve_backend = register_impl, resolve_impl
set_backend, get_backend, available_backends = set_impl, get_impl, available_impls
# Functions of ``liger_kernel.functional``: what the registry runs for each, and the last of its parameters
# that the function has. ``impl``, ``mode`` and ``backend`` choose nothing.
_FUNCTIONS = {
    "rms_norm": (modules.LigerRMSNormFunction,),
    "layer_norm": (modules.LigerLayerNormFunction,),
    "softmax": (modules.LigerSoftmaxFunction, "x"),
    "swiglu": (modules.LigerSiLUMulFunction, "down_multiplier"),
    "geglu": (modules.LigerGELUMulFunction, "b"),
    "rope": (modules.LigerRopeFunction, "unsqueeze_dim"),
    "fused_add_rms_norm": (modules.LigerFusedAddRMSNormFunction,),
    "fused_linear_jsd": (divergences.LigerFusedLinearJSDFunction, "temperature"),
    "jsd": (divergences.LigerJSDFunction, "ignore_index"),
    "kl_div": (divergences.LigerKLDivLossFunction, "eps"),
    "cross_entropy": (modules.LigerCrossEntropyFunction, "return_predicted_tokens"),
    "fused_linear_cross_entropy": (modules.LigerFusedLinearCrossEntropyFunction, "return_predicted_tokens"),
}
# Those whose defaults are others than in ``liger_kernel.transformers.functional``, as there.
_NORM = "offset=0, casting_mode='llama', in_place=False"
_PARAMETERS = {
    "rms_norm": f"x, weight, eps=1e-6, *, {_NORM}, row_mode=None",
    "layer_norm": "x, weight, bias=None, eps=1e-6, *",
    "fused_add_rms_norm": f"X, R, W, eps=1e-6, {_NORM}, *",
}


def _add(name: str, target: Callable, last: str = "") -> None:
    """The function of this name, and what it runs in the registry."""
    options = {"preference_rank": 50, "tolerances": _TOLERANCES.get(name, _USUAL)}
    register_impl(name, impl_name=OURS, **options)(target)
    known = inspect.signature(target).parameters
    until = [*known].index(last) + 1 if last else 0
    parameters = _PARAMETERS.get(name) or ", ".join([*map(str, [*known.values()][:until]), "*"])
    globals()[name] = by_position(f"{name}({parameters}, impl=None, mode=None, backend=None)", target)


for _name, (_class, *_last) in _FUNCTIONS.items():
    _add(_name, _class.apply, *_last)
for _function in (divergences.jsd_loss_and_grad, divergences.kl_loss_and_grad):
    register_impl(_function.__name__, impl_name=OURS, preference_rank=50, tolerances=_USUAL)(_function)
