"""The classes of ``liger_kernel.transformers``: their constructors and attribute names, Tigon's ops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import tigon
from tigon.integrations.liger import functional as F
from tigon.integrations.liger.paths import check
from tigon.integrations.transformers.modules import GatedMLP


class Loss(nn.Module):
    """A module without parameters whose options are its attributes: subclasses are dataclasses of them."""

    def __new__(cls, *args, **kwargs):
        self = super().__new__(cls)
        nn.Module.__init__(self)  # before the fields are assigned
        return self

    def options(self) -> dict[str, Any]:
        """Every option by name."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def extra_repr(self) -> str:
        plain = {name: value for name, value in self.options().items() if not isinstance(value, Tensor)}
        return ", ".join(f"{name}={value!r}" for name, value in plain.items())


def _initial(init_fn: str, size: int) -> nn.Parameter:
    check(init_fn in ("ones", "zeros"), "init_fn must be ones or zeros, got {!r}", init_fn)
    return nn.Parameter(torch.ones(size) if init_fn == "ones" else torch.zeros(size))


class LigerRMSNorm(nn.Module):
    """RMSNorm; the forward reads its attributes, so a subclass or a patch may change them."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "llama",
        init_fn: str = "ones",
        in_place: bool = True,
        row_mode: bool | None = None,
        elementwise_affine: bool = True,
    ) -> None:
        super().__init__()
        modes = ("llama", "gemma", "none")
        check(casting_mode in modes, "casting_mode must be one of {}, got {!r}", modes, casting_mode)
        weight = _initial(init_fn, hidden_size)
        self.register_parameter("weight", weight if elementwise_affine else None)
        self.variance_epsilon, self.offset, self.casting_mode = eps, offset, casting_mode
        self.in_place, self.row_mode = in_place, row_mode

    def forward(self, hidden_states: Tensor) -> Tensor:
        """``[..., hidden_size]`` normalised over the last dimension."""
        return tigon.rms_norm(
            hidden_states, self.weight, self.variance_epsilon, offset=self.offset, rounding=self.casting_mode
        )

    def extra_repr(self) -> str:
        size = None if self.weight is None else tuple(self.weight.shape)
        return f"{size}, eps={self.variance_epsilon}, offset={self.offset}, casting_mode={self.casting_mode}"


class LigerRMSNormForGemma2(LigerRMSNorm):
    """Gemma 2: ``1 + weight``, rounded once."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 1.0,
        casting_mode: str = "gemma",
        init_fn: str = "zeros",
        in_place: bool = False,
        row_mode: bool | None = None,
    ) -> None:
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn, in_place, row_mode)


class LigerRMSNormForGemma4(LigerRMSNorm):
    """Gemma 4: the plain weight, or none (``with_scale=False``)."""

    def __init__(
        self, dim, eps=1e-6, offset=0.0, casting_mode="gemma", init_fn="ones", in_place=False, with_scale=True
    ):
        super().__init__(dim, eps, offset, casting_mode, init_fn, in_place, elementwise_affine=with_scale)
        self.with_scale = with_scale


class LigerModulatedRMSNorm(LigerRMSNorm):
    """RMSNorm, scale and shift; these come with each call."""

    def __init__(
        self,
        hidden_size,
        eps=1e-6,
        offset=0.0,
        casting_mode="llama",
        init_fn="ones",
        in_place=True,
        elementwise_affine=True,
    ):
        super().__init__(
            hidden_size, eps, offset, casting_mode, init_fn, in_place, elementwise_affine=elementwise_affine
        )

    def forward(self, hidden_states: Tensor, scale: Tensor, shift: Tensor | None = None) -> Tensor:
        """``[..., hidden_size]``; scale and shift a row for as many rows of it each."""
        return F.liger_modulated_rms_norm(
            hidden_states, self.weight, scale, shift, self.variance_epsilon, self.offset, self.casting_mode
        )


class LigerLayerNorm(nn.Module):
    """LayerNorm; without ``bias`` the bias is zero and stays a parameter, as in Liger."""

    def __init__(self, hidden_size, eps=1e-6, bias=False, init_fn="ones", impl=None, mode=None, backend=None):
        super().__init__()
        self.hidden_size, self.eps, self.variance_epsilon = hidden_size, eps, eps
        self.weight = _initial(init_fn, hidden_size)
        self.bias = nn.Parameter(torch.randn(hidden_size) if bias else torch.zeros(hidden_size))

    def forward(self, hidden_states: Tensor) -> Tensor:
        return tigon.layer_norm(hidden_states, self.weight, self.bias, self.variance_epsilon)


class LigerEmbedding(tigon.nn.Embedding):
    """Rows of a table by token id."""


class LigerSoftmax(nn.Module):
    """Softmax over the last dimension."""

    def forward(self, x: Tensor) -> Tensor:
        return tigon.softmax(x)


@dataclass(eq=False, repr=False)
class LigerSparsemax(Loss):
    """Sparsemax over one dimension: the same shape, sums of 1 along ``dim``."""

    dim: int = -1

    def forward(self, x: Tensor) -> Tensor:
        return tigon.sparsemax(x.movedim(self.dim, -1)).movedim(-1, self.dim)


class LigerSwiGLUMLP(GatedMLP):
    """The gated MLP of Llama, by the configuration."""

    def __init__(self, config, intermediate_size=None):
        super().__init__(config, intermediate_size)
        self.config = config
        check(self.activation in ("silu", "swish"), "hidden_act must be silu, got {!r}", self.activation)


class LigerGEGLUMLP(GatedMLP):
    """The gated MLP of Gemma: tanh-GELU whatever the configuration says, as in Liger."""

    activation_in = staticmethod(lambda config: "gelu_pytorch_tanh")

    def __init__(self, config):
        super().__init__(config)
        self.config = config


@dataclass(eq=False, repr=False)
class LigerCrossEntropyLoss(Loss):
    """Cross-entropy of logits; the class weight is an attribute, not a buffer, as in Liger."""

    weight: Tensor | None = None
    ignore_index: int = -100
    lse_square_scale: float = 0.0
    label_smoothing: float = 0.0
    reduction: str = "mean"
    softcap: float | None = None
    return_z_loss: bool = False
    return_token_accuracy: bool = False
    return_predicted_tokens: bool = False

    def forward(self, _input: Tensor, target: Tensor) -> Tensor | F.CrossEntropyOutput:
        return F.liger_cross_entropy(_input, target, **self.options())


@dataclass(eq=False, repr=False)
class LigerFusedLinearCrossEntropyLoss(Loss):
    """The loss head; called with the weight first."""

    ce_weight: Tensor | None = None
    ignore_index: int = -100
    lse_square_scale: float = 0.0
    label_smoothing: float = 0.0
    reduction: str = "mean"
    softcap: float | None = None
    return_z_loss: bool = False
    accum_dtype: torch.dtype | None = None
    use_token_scaling: bool = False
    return_token_accuracy: bool = False
    return_predicted_tokens: bool = False

    def forward(
        self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None
    ) -> Tensor | F.CrossEntropyOutput:
        return F.liger_fused_linear_cross_entropy(_input, lin_weight, target, bias, **self.options())
