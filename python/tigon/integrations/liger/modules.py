"""The classes of ``liger_kernel.transformers``: their constructors and attribute names, Tigon's ops."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

import tigon
from tigon.integrations.liger import functional as F
from tigon.integrations.liger.names import check
from tigon.integrations.liger.signatures import Loss, by_position, function_class
from tigon.integrations.transformers.modules import FusedGatedMLP, GatedMLP, activation_of
from tigon.ops.experts import _route


def _initial(init_fn: str, *shape: int) -> nn.Parameter:
    check(init_fn in ("ones", "zeros"), "init_fn must be ones or zeros, got {!r}", init_fn)
    return nn.Parameter(torch.ones(shape) if init_fn == "ones" else torch.zeros(shape))


class LigerRMSNorm(nn.Module):
    """RMSNorm; the forward reads its attributes, so a subclass or a patch may change them."""

    def __init__(
        self,
        hidden_size,
        eps=1e-6,
        offset=0.0,
        casting_mode="llama",
        init_fn="ones",
        in_place=True,
        row_mode=None,
        elementwise_affine=True,
    ):
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


_GEMMA = "offset=1.0, casting_mode='gemma', init_fn='zeros'"
# LigerRMSNorm with other parameters of the constructor, by the last part of its name.
_NORMS = {
    "Gemma": f"hidden_size, eps=1e-6, {_GEMMA}, in_place=True, row_mode=None",
    "Gemma2": f"hidden_size, eps=1e-6, {_GEMMA}, in_place=False, row_mode=None",
    "Gemma3": f"dim, eps=1e-6, {_GEMMA}, in_place=False",
    "Olmo2": "hidden_size, eps=1e-6, offset=0.0, casting_mode='llama', init_fn='ones', in_place=False, "
    "row_mode=None",
}
_NORMS |= {
    "Glm4": _NORMS["Olmo2"],
    "Qwen3Next": _NORMS["Gemma2"],
    "MuseGlimmerTextCentered": _NORMS["Gemma2"],
}
for _name, _parameters in _NORMS.items():
    _members = {
        "__doc__": f"RMSNorm as {_name} has it.",
        "__init__": by_position(f"__init__(self, {_parameters})", LigerRMSNorm.__init__),
    }
    globals()[f"LigerRMSNormFor{_name}"] = type(f"LigerRMSNormFor{_name}", (LigerRMSNorm,), _members)


class LigerRMSNormForGemma4(LigerRMSNorm):
    """Gemma 4: the plain weight, or none (``with_scale=False``)."""

    def __init__(
        self, dim, eps=1e-6, offset=0.0, casting_mode="gemma", init_fn="ones", in_place=False, with_scale=True
    ):
        super().__init__(dim, eps, offset, casting_mode, init_fn, in_place, elementwise_affine=with_scale)
        self.with_scale = with_scale


class LigerRMSNormForMuseGlimmer(LigerRMSNormForGemma4):
    """Muse Glimmer."""

    def __init__(
        self,
        dim=None,
        eps=1e-6,
        offset=0,
        casting_mode="gemma",
        init_fn="ones",
        in_place=False,
        with_scale=True,
    ):
        check(dim is not None or not with_scale, "dim must be given with a scale, got None")
        super().__init__(dim or 0, eps, offset, casting_mode, init_fn, in_place, with_scale)


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
    """GroupNorm; without ``bias`` the bias is zero and stays a parameter, as there."""

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
    """LayerNorm; without ``bias`` the bias is zero and stays a parameter, as there."""

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


class LigerSoftmax(Loss, target=F.liger_softmax, operands="x"):
    """Softmax over the last dimension."""


class LigerSparsemax(Loss, target=lambda x, dim=-1: F.liger_sparsemax(x, dim), operands="x"):
    """Sparsemax over one dimension: the same shape, sums of 1 along ``dim``."""

    def extra_repr(self) -> str:
        return f"dim={self.dim}"


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


class LigerReLUSquared(Loss, target=F.liger_relu_squared, operands="x"):
    """``relu(x)^2``."""


class LigerSwiGLUMLP(GatedMLP):
    """The gated MLP of Llama, by the configuration."""

    def __init__(self, config, intermediate_size=None):
        super().__init__(config, intermediate_size)
        self.config = config
        check(self.activation in ("silu", "swish"), "hidden_act must be silu, got {!r}", self.activation)


class LigerQwen3MoeSwiGLUMLP(LigerSwiGLUMLP):
    """One expert of Qwen3-MoE."""


class LigerSwiGLUMLPForMuseGlimmer(LigerSwiGLUMLP):
    """The gated MLP of Muse Glimmer."""


class LigerHunyuanV1SwiGLUMLP(LigerSwiGLUMLP):
    """The gated MLP of HunYuan: the constructor takes more than it needs."""

    def __init__(self, config, layer_idx=None, is_shared_mlp=False):
        super().__init__(config)
        self.layer_idx = layer_idx


class LigerFalconH1SwiGLUMLP(LigerSwiGLUMLP):
    """The gated MLP of Falcon-H1: one factor before the activation, one behind the MLP."""

    def __init__(self, config):
        super().__init__(config)
        self.gate_multiplier, self.down_multiplier = map(float, config.mlp_multipliers)

    def forward(self, x):
        y = silu_mul(self.gate_proj(x), self.up_proj(x), self.gate_multiplier)
        return self.down_proj(y) * self.down_multiplier


LigerMLP, LigerFalconH1MLP = LigerSwiGLUMLP, LigerFalconH1SwiGLUMLP  # one kernel there


class LigerPhi3SwiGLUMLP(FusedGatedMLP):
    """The gated MLP of Phi-3: gate and up in one projection."""

    def __init__(self, config):
        super().__init__(config)
        self.config = config


def _tanh_gelu(config) -> str:
    return "gelu_pytorch_tanh"


class LigerGEGLUMLP(GatedMLP):
    """The gated MLP of Gemma: tanh-GELU whatever the configuration says, as there."""

    activation_in = staticmethod(_tanh_gelu)

    def __init__(self, config):
        super().__init__(config)
        self.config = config


class LigerGEGLUMLPForGemma4(GatedMLP):
    """The gated MLP of Gemma 4: twice as wide in the layers that take another's keys and values."""

    activation_in = staticmethod(_tanh_gelu)

    def __init__(self, config, layer_idx=0):
        first_shared = config.num_hidden_layers - getattr(config, "num_kv_shared_layers", 0)
        wide = getattr(config, "use_double_wide_mlp", False) and layer_idx >= first_shared
        super().__init__(config, config.intermediate_size * (2 if wide else 1))
        self.config = config


def apply_tiled_mlp(fn, mlp_module, x, num_shards=None, compute_params=None):
    """``fn(mlp_module, x)``, the tokens in shards that the backward computes again: one shard's memory.

    Without ``num_shards`` there are as many as hidden_size goes into the tokens.
    """
    tokens, hidden = x.shape[-2:]
    shards = num_shards or -(-tokens // hidden)
    parts = (checkpoint(fn, mlp_module, part, use_reentrant=False) for part in x.chunk(max(1, shards), -2))
    return torch.cat([*parts], -2)


class _Tiled(nn.Module):
    def __init__(self, config, num_shards=None):
        super().__init__(config)
        self.num_shards = num_shards

    def forward(self, x):
        return apply_tiled_mlp(GatedMLP.forward, self, x, self.num_shards)


class LigerTiledSwiGLUMLP(_Tiled, LigerSwiGLUMLP):
    """The gated MLP of Llama, tokens in shards."""


class LigerTiledGEGLUMLP(_Tiled, LigerGEGLUMLP):
    """The gated MLP of Gemma, tokens in shards."""


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


BLOCK_M_TOKEN = 64


def compute_routing_metadata(topk_indices, E, block_m_token=BLOCK_M_TOKEN):
    """Where the slots of the experts ``[T, K]`` chosen of ``E`` go, by the routing of :func:`tigon.experts`.

    Returns int32 vectors: rows of an expert; where each begins (``[E + 1]``); of every sorted row the token
    and the slot ``t * K + j``; of every slot the row; of every tile of ``block_m_token`` rows of one expert
    the first row and the expert. Their number is read on the host.
    """
    order, place, offsets = _route(topk_indices.contiguous(), E)
    counts = offsets.diff()
    tiles = (counts + block_m_token - 1) // block_m_token
    expert = torch.repeat_interleave(tiles)
    before = torch.arange(len(expert), device=expert.device) - (tiles.cumsum(0) - tiles)[expert]
    first = offsets[expert] + before * block_m_token
    return counts, offsets, order // topk_indices.shape[1], order, place, first.int(), expert.int()


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
    def validate(self):
        reduction, smoothing, softcap = self.reduction, self.label_smoothing, self.softcap
        known = reduction in ("mean", "sum", "none")
        check(known, "reduction must be mean, sum or none, got {!r}", reduction)
        fits = 0 <= smoothing <= 1
        check(fits, "label_smoothing must be in [0, 1], got {}", smoothing)
        check(softcap is None or softcap > 0, "softcap must be > 0 or None, got {}", softcap)


class LigerCrossEntropyLoss(
    _CrossEntropy,
    target=F.liger_cross_entropy,
    operands="_input, target",
    first="weight, ignore_index, lse_square_scale, label_smoothing",
    without="size_average, reduce",
):
    """Cross-entropy of logits; the class weight is an attribute, not a buffer, as there."""


class LigerFusedLinearCrossEntropyLoss(
    _CrossEntropy,
    target=F.liger_fused_linear_cross_entropy,
    operands="lin_weight, _input, target, bias=None",
    without="chunk_mem_const",
):
    """The loss head; called with the weight first."""


def silu_mul(a, b, gate_multiplier=1.0, down_multiplier=1.0):
    """``silu(gate_multiplier * a) * b * down_multiplier``, in one pass."""
    return tigon.swiglu(a, b, gate_multiplier=gate_multiplier, down_multiplier=down_multiplier)


def _mlp(input, gate_weight, up_weight, down_weight, gate_multiplier=1.0, down_multiplier=1.0):
    """``silu(gate_multiplier * x gate^T) * (x up^T)``, times ``down^T`` and ``down_multiplier``."""
    product = silu_mul(linear(input, gate_weight), linear(input, up_weight), gate_multiplier)
    return linear(product, down_weight) * down_multiplier


def _scaled_cross_entropy(
    _input,
    weight,
    target,
    temperature=1.0,
    ignore_index=-100,
    m_tiles_per_cluster=1,
    return_entropy=False,
    selected_token_ids=None,
):
    """Per-token loss under a temperature, and the entropy where asked for."""
    check(
        selected_token_ids is None,
        "selected_token_ids must be None in {}, got a tensor",
        "LigerFusedLinearScaledCrossEntropyFunction",
    )
    weight, options = F.whole(weight), {"temperature": temperature, "ignore_index": ignore_index}
    if not return_entropy:
        return -tigon.linear_log_prob(_input, weight, target, **options)
    log_prob, entropy = tigon.linear_log_prob(_input, weight, target, entropy=True, **options)
    return -log_prob, entropy


# The part of a function class's name -> what its ``apply`` runs, and its parameters where there are more.
_FUNCTIONS = {
    "AttnRes": (F.liger_attn_res, "V_stacked, w_query, w_norm, eps"),
    "CrossEntropy": (F.cross_entropy_parts,),
    "DyT": (F.liger_dyt,),
    "Embedding": (lambda embeddings, indices: tigon.embedding(indices, embeddings),),
    "FusedAddRMSNorm": (
        F.liger_fused_add_rms_norm,
        "X, R, W, eps, offset=0.0, casting_mode='llama', in_place=False",
    ),
    "FusedGateUpSiLUMul": (lambda y, in_place=False: tigon.swiglu(y),),
    "FusedLinearCrossEntropy": (F.linear_cross_entropy_parts,),
    "FusedLinearScaledCrossEntropy": (_scaled_cross_entropy,),
    "FusedMoE": (tigon.experts,),
    "GELUMul": (F.liger_geglu,),
    "GroupNorm": (F.liger_group_norm,),
    "LayerNorm": (F.liger_layer_norm,),
    "Llama4Rope": (F.liger_llama4_text_rotary_pos_emb, "q, k, freqs_cis, BLOCK_SIZE=None"),
    "MLP": (_mlp,),
    "ModulatedRMSNorm": (
        F.liger_modulated_rms_norm,
        "X, W, scale, shift, eps, offset=0.0, casting_mode='llama', in_place=True",
    ),
    "PolyNorm": (F.liger_poly_norm,),
    "Qwen2VLMRope": (F.liger_multimodal_rotary_pos_emb,),
    "RMSNorm": (
        F.liger_rms_norm,
        "X, W, eps, offset=0.0, casting_mode='llama', in_place=True, row_mode=None",
    ),
    "ReLUSquared": (F.liger_relu_squared,),
    "Rope": (F.liger_rope,),
    "SiLUMul": (silu_mul,),
    "Softmax": (F.liger_softmax,),
    "Sparsemax": (F.liger_sparsemax,),
    "TiledMLP": (apply_tiled_mlp, "fn, mlp_module, x, shards, compute_params=None"),
}
for _name, _row in _FUNCTIONS.items():
    globals()[f"Liger{_name}Function"] = function_class(f"Liger{_name}Function", *_row)
