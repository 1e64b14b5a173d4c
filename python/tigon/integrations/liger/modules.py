"""The classes of ``liger_kernel.transformers``: their constructors and attribute names, Tigon's ops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import tigon
from tigon.integrations.liger import functional as F
from tigon.integrations.liger.paths import check
from tigon.integrations.transformers.modules import FusedGatedMLP, GatedMLP, activation_of


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


def _initial(init_fn: str, *shape: int) -> nn.Parameter:
    check(init_fn in ("ones", "zeros"), "init_fn must be ones or zeros, got {!r}", init_fn)
    return nn.Parameter(torch.ones(shape) if init_fn == "ones" else torch.zeros(shape))


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
        known = casting_mode in modes
        check(known, "casting_mode must be one of {}, got {!r}", modes, casting_mode)
        weight = _initial(init_fn, hidden_size)
        if elementwise_affine:
            self.weight = weight
        else:
            self.register_parameter("weight", None)
        self.variance_epsilon, self.offset, self.casting_mode = eps, offset, casting_mode
        self.in_place, self.row_mode = in_place, row_mode

    def forward(self, hidden_states):
        """``[..., hidden_size]`` normalised over the last dimension."""
        return F.liger_rms_norm(
            hidden_states, self.weight, self.variance_epsilon, self.offset, self.casting_mode
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


class LigerFusedAddRMSNorm(LigerRMSNorm):
    """Residual addition and RMSNorm: (normalised sum, sum)."""

    def __init__(
        self, hidden_size, eps=1e-6, offset=0.0, casting_mode="llama", init_fn="ones", in_place=False
    ):
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn, in_place)

    def forward(self, hidden_states, residual):
        return F.liger_fused_add_rms_norm(
            hidden_states, residual, self.weight, self.variance_epsilon, self.offset, self.casting_mode
        )


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
        self.elementwise_affine = elementwise_affine

    def forward(self, hidden_states, scale, shift=None):
        """``[..., hidden_size]``; scale and shift a row for as many rows of it each."""
        return F.liger_modulated_rms_norm(
            hidden_states, self.weight, scale, shift, self.variance_epsilon, self.offset, self.casting_mode
        )


class LigerGroupNorm(nn.Module):
    """GroupNorm; without ``bias`` the bias is zero and stays a parameter, as in Liger."""

    def __init__(self, num_channels, num_groups, eps=1e-6, bias=False, init_fn="ones"):
        super().__init__()
        divides = num_groups > 0 and num_channels % num_groups == 0
        check(divides, "num_groups must divide {}, got {}", num_channels, num_groups)
        self.num_channels, self.num_groups, self.eps = num_channels, num_groups, eps
        self.variance_epsilon = eps
        self.weight = _initial(init_fn, num_channels)
        self.bias = nn.Parameter(torch.randn(num_channels) if bias else torch.zeros(num_channels))

    def forward(self, hidden_states):
        """``[N, num_channels, ...]``, each group of channels of a sample by itself."""
        return F.liger_group_norm(
            hidden_states, self.weight, self.bias, self.num_channels, self.num_groups, self.variance_epsilon
        )


class LigerLayerNorm(nn.Module):
    """LayerNorm; without ``bias`` the bias is zero and stays a parameter, as in Liger."""

    def __init__(self, hidden_size, eps=1e-6, bias=False, init_fn="ones", impl=None, mode=None, backend=None):
        super().__init__()
        self.hidden_size, self.eps, self.variance_epsilon = hidden_size, eps, eps
        self.impl, self.mode = backend if impl is None else impl, mode
        self.weight = _initial(init_fn, hidden_size)
        self.bias = nn.Parameter(torch.randn(hidden_size) if bias else torch.zeros(hidden_size))

    def forward(self, hidden_states):
        return F.liger_layer_norm(hidden_states, self.weight, self.bias, self.variance_epsilon)

    # As ``impl`` was called before.
    backend = property(lambda self: self.impl, lambda self, value: setattr(self, "impl", value))


class LigerEmbedding(tigon.nn.Embedding):
    """Rows of a table by token id."""

    def __init__(self, num_embeddings, embedding_dim, padding_idx=None):
        super().__init__(num_embeddings, embedding_dim, padding_idx)


class LigerDyT(nn.Module):
    """``gamma * tanh(alpha * x) + beta``."""

    def __init__(self, hidden_size, beta=True, init_alpha=0.5):
        super().__init__()
        self.hidden_size, self.init_alpha = hidden_size, init_alpha
        self.alpha = nn.Parameter(torch.ones(1) * init_alpha)
        self.gamma = nn.Parameter(torch.ones(hidden_size))
        self.beta = nn.Parameter(torch.zeros(hidden_size)) if beta else None

    def forward(self, x):
        return F.liger_dyt(x, self.alpha, self.gamma, self.beta)


class LigerSoftmax(nn.Module):
    """Softmax over the last dimension."""

    def forward(self, x):
        return F.liger_softmax(x)


class LigerReLUSquared(nn.Module):
    """``relu(x)^2``."""

    def forward(self, x):
        return F.liger_relu_squared(x)


@dataclass(eq=False, repr=False)
class LigerSparsemax(Loss):
    """Sparsemax over one dimension: the same shape, sums of 1 along ``dim``."""

    dim: int = -1

    def forward(self, x):
        return F.liger_sparsemax(x, self.dim)


class LigerPolyNorm(nn.Module):
    """``w[0] n(x^3) + w[1] n(x^2) + w[2] n(x) + b``; the bias has no dimension."""

    def __init__(self, eps=1e-6, in_place=True):
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), 1.0 / 3.0))
        self.bias = nn.Parameter(torch.tensor(1.0))
        self.variance_epsilon, self.in_place = eps, in_place

    def forward(self, hidden_states):
        return F.liger_poly_norm(hidden_states, self.weight, self.bias, self.variance_epsilon, self.in_place)

    def extra_repr(self) -> str:
        size = tuple(self.weight.shape)
        return f"weight_shape={size}, eps={self.variance_epsilon}, in_place={self.in_place}"


class LigerSwiGLUMLP(GatedMLP):
    """The gated MLP of Llama, by the configuration."""

    def __init__(self, config, intermediate_size=None):
        super().__init__(config, intermediate_size)
        self.config = config
        check(self.activation in ("silu", "swish"), "hidden_act must be silu, got {!r}", self.activation)


class LigerQwen3MoeSwiGLUMLP(LigerSwiGLUMLP):
    """One expert of Qwen3-MoE."""


class LigerFalconH1SwiGLUMLP(LigerSwiGLUMLP):
    """The gated MLP of Falcon-H1: one factor before the activation, one behind the MLP."""

    def __init__(self, config):
        super().__init__(config)
        self.gate_multiplier, self.down_multiplier = map(float, config.mlp_multipliers)

    def forward(self, x):
        y = tigon.swiglu(self.gate_proj(x), self.up_proj(x), gate_multiplier=self.gate_multiplier)
        return self.down_proj(y) * self.down_multiplier


LigerMLP, LigerFalconH1MLP = LigerSwiGLUMLP, LigerFalconH1SwiGLUMLP  # one kernel there


class LigerPhi3SwiGLUMLP(FusedGatedMLP):
    """The gated MLP of Phi-3: gate and up in one projection."""

    def __init__(self, config):
        super().__init__(config)
        self.config = config


class LigerGEGLUMLP(GatedMLP):
    """The gated MLP of Gemma: tanh-GELU whatever the configuration says, as in Liger."""

    activation_in = staticmethod(lambda config: "gelu_pytorch_tanh")

    def __init__(self, config):
        super().__init__(config)
        self.config = config


class LigerExperts(nn.Module):
    """Experts whose weights lie in one tensor each, as transformers 5 keeps them."""

    def __init__(self, config):
        super().__init__()
        names = ("num_experts", "num_local_experts", "n_routed_experts")
        self.num_experts = next(n for n in (getattr(config, name, None) for name in names) if n)
        self.hidden_dim = config.hidden_size
        self.intermediate_dim = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
        activation = activation_of(config)
        known = activation in ("silu", "swish")
        check(known, "hidden_act must be silu, got {!r}", activation)
        packed = (self.num_experts, 2 * self.intermediate_dim, self.hidden_dim)
        self.gate_up_proj = nn.Parameter(torch.empty(packed))
        self.down_proj = nn.Parameter(torch.empty(self.num_experts, self.hidden_dim, self.intermediate_dim))

    def forward(self, hidden_states, top_k_index, top_k_weights):
        """Tokens ``[..., H]``, the experts of each and their weights ``[..., K]``."""
        return tigon.experts(hidden_states, self.gate_up_proj, self.down_proj, top_k_index, top_k_weights)


class LigerBlockSparseTop2MLP(nn.Module):
    """One expert of Mixtral: ``w2(silu(w1 x) * (w3 x))``."""

    def __init__(self, config):
        super().__init__()
        self.ffn_dim, self.hidden_dim = config.intermediate_size, config.hidden_size
        self.w1 = nn.Linear(self.hidden_dim, self.ffn_dim, bias=False)
        self.w2 = nn.Linear(self.ffn_dim, self.hidden_dim, bias=False)
        self.w3 = nn.Linear(self.hidden_dim, self.ffn_dim, bias=False)

    def forward(self, x):
        return self.w2(tigon.swiglu(self.w1(x), self.w3(x)))


class _CrossEntropy(Loss):
    def __post_init__(self) -> None:
        reduction, smoothing, softcap = self.reduction, self.label_smoothing, self.softcap
        known = reduction in ("mean", "sum", "none")
        check(known, "reduction must be mean, sum or none, got {!r}", reduction)
        fits = 0 <= smoothing <= 1
        check(fits, "label_smoothing must be in [0, 1], got {}", smoothing)
        check(softcap is None or softcap > 0, "softcap must be > 0 or None, got {}", softcap)


@dataclass(eq=False, repr=False)
class LigerCrossEntropyLoss(_CrossEntropy):
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

    def forward(self, _input, target):
        return F.liger_cross_entropy(_input, target, **self.options())


@dataclass(eq=False, repr=False)
class LigerFusedLinearCrossEntropyLoss(_CrossEntropy):
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

    def forward(self, lin_weight, _input, target, bias=None):
        return F.liger_fused_linear_cross_entropy(_input, lin_weight, target, bias, **self.options())
