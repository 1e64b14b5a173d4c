"""Modules around the functions of :mod:`tigon`."""

from tigon.nn.activations import GeGLU, ReGLU, SiLU, Sparsemax, SwiGLU, SwiGLUOAI
from tigon.nn.embedding import Embedding
from tigon.nn.experts import Experts, Router
from tigon.nn.hyper_connections import HyperConnections
from tigon.nn.lora_linear import LoRALinear
from tigon.nn.losses import (
    CrossEntropyLoss,
    LinearCrossEntropyLoss,
    LinearJSDLoss,
    LinearKLDivLoss,
    LinearKTOLoss,
    LinearPolicyLoss,
    LinearPreferenceLoss,
    LinearTVDLoss,
)
from tigon.nn.medusa import MedusaHeads
from tigon.nn.norms import (
    AddRMSNorm,
    DyT,
    GatedRMSNorm,
    GroupNorm,
    LayerNorm,
    ModulatedRMSNorm,
    PolyNorm,
    RMSNorm,
)
from tigon.nn.rope import QKNormRotaryEmbedding, RotaryEmbedding

__all__ = [
    "AddRMSNorm",
    "CrossEntropyLoss",
    "DyT",
    "Embedding",
    "Experts",
    "GatedRMSNorm",
    "GeGLU",
    "GroupNorm",
    "HyperConnections",
    "LayerNorm",
    "LinearCrossEntropyLoss",
    "LinearJSDLoss",
    "LinearKLDivLoss",
    "LinearKTOLoss",
    "LinearPolicyLoss",
    "LinearPreferenceLoss",
    "LinearTVDLoss",
    "LoRALinear",
    "MedusaHeads",
    "ModulatedRMSNorm",
    "PolyNorm",
    "QKNormRotaryEmbedding",
    "RMSNorm",
    "ReGLU",
    "RotaryEmbedding",
    "Router",
    "SiLU",
    "Sparsemax",
    "SwiGLU",
    "SwiGLUOAI",
]
