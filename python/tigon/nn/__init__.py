"""Modules around the functions of :mod:`tigon`."""

from tigon.nn.add_rms_norm import AddRMSNorm
from tigon.nn.cross_entropy import CrossEntropyLoss
from tigon.nn.dyt import DyT
from tigon.nn.embedding import Embedding
from tigon.nn.experts import Experts
from tigon.nn.gated_rms_norm import GatedRMSNorm
from tigon.nn.glu import GeGLU, ReGLU, SwiGLU, SwiGLUOAI
from tigon.nn.group_norm import GroupNorm
from tigon.nn.hyper_connections import HyperConnections
from tigon.nn.layer_norm import LayerNorm
from tigon.nn.linear_cross_entropy import LinearCrossEntropyLoss
from tigon.nn.linear_divergence import LinearJSDLoss, LinearKLDivLoss, LinearTVDLoss
from tigon.nn.linear_preference import LinearKTOLoss, LinearPolicyLoss, LinearPreferenceLoss
from tigon.nn.lora_linear import LoRALinear
from tigon.nn.medusa import MedusaHeads
from tigon.nn.modulated_rms_norm import ModulatedRMSNorm
from tigon.nn.poly_norm import PolyNorm
from tigon.nn.rms_norm import RMSNorm
from tigon.nn.rope import QKNormRotaryEmbedding, RotaryEmbedding
from tigon.nn.router import Router
from tigon.nn.silu import SiLU
from tigon.nn.sparsemax import Sparsemax

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
