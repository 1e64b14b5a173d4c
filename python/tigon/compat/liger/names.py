"""Which names live in which module of ``liger_kernel`` 0.8.5, and what stands behind them here."""

from __future__ import annotations

import functools
import importlib

VERSION = "0.8.5"  # of the interface
PACKAGE = "liger_kernel"

_PREFERENCE = "DPO KTO ORPO CPO SimPO"
_CHUNKED = f"{_PREFERENCE} GRPO JSD CosineSimilarity".split()
_MLPS = (
    "LigerSwiGLUMLP LigerSwiGLUMLPForMuseGlimmer LigerBlockSparseTop2MLP LigerExperts LigerPhi3SwiGLUMLP "
    "LigerQwen3MoeSwiGLUMLP LigerFalconH1SwiGLUMLP"
)
_EAGER = (
    f"{_MLPS} LigerCrossEntropyLoss LigerDyT LigerFusedAddRMSNorm LigerFusedCETVDLoss "
    "LigerFusedLinearCrossEntropyLoss LigerFusedLinearJSD LigerFusedLinearKLDivLoss LigerGEGLUMLP LigerJSD "
    "LigerKLDIVLoss LigerLayerNorm liger_llama4_text_rotary_pos_emb liger_llama4_vision_rotary_pos_emb "
    "LigerMHC LigerFalconH1MLP LigerMLP LigerModulatedRMSNorm LigerMultiTokenAttention LigerPolyNorm "
    "LigerReLUSquared LigerRMSNorm LigerRMSNormForMuseGlimmer LigerRMSNormForMuseGlimmerTextCentered "
    "liger_rotary_pos_emb LigerSoftmax LigerSparsemax LigerTiledGEGLUMLP LigerTiledSwiGLUMLP LigerTVDLoss "
    "LigerVocabParallelCrossEntropy"
)
_PATCHING = (
    "_apply_liger_kernel _apply_liger_kernel_to_instance MODEL_TYPE_TO_APPLY_LIGER_FN "
    "_bind_method_to_module _patch_rms_norm_module _patch_layer_norm_module _patch_swiglu_module "
    "_patch_geglu_module"
)
_FUNCTIONAL = (
    "CrossEntropyOutput liger_cross_entropy liger_fused_linear_cross_entropy "
    "liger_fused_linear_scaled_cross_entropy_tp liger_fused_linear_jsd liger_fused_linear_kl_div liger_geglu "
    "liger_group_norm liger_jsd liger_kl_div liger_sparsemax liger_multi_token_attention "
    "liger_fused_neighborhood_attention liger_tvd liger_layer_norm liger_qwen2vl_mrope liger_relu_squared "
    "liger_rms_norm liger_modulated_rms_norm liger_poly_norm liger_fused_add_rms_norm liger_rope "
    "liger_swiglu liger_softmax liger_dyt liger_mhc_coeffs liger_mhc_pre liger_mhc_post_res liger_mhc_apply "
    "liger_attn_res liger_mhc_forward"
)
_UTILS = (
    "PEFT_AVAILABLE is_peft_available infer_comm_backend infer_device is_npu_available "
    "transformers_version_dispatch get_total_gpu_memory"
)
# Operators: module -> its Function classes; the forward and backward functions beside them follow the name.
_OPS = {
    "attn_res": "LigerAttnResFunction",
    "cross_entropy": "LigerCrossEntropyFunction",
    "dyt": "LigerDyTFunction",
    "fused_add_rms_norm": "LigerFusedAddRMSNormFunction",
    "fused_ce_tvd": "LigerFusedCETVDFunction",
    "fused_linear_cross_entropy": "LigerFusedLinearCrossEntropyFunction",
    "fused_linear_jsd": "LigerFusedLinearJSDFunction",
    "fused_linear_kl_div": "LigerFusedLinearKLDivFunction",
    "fused_linear_scaled_cross_entropy": "LigerFusedLinearScaledCrossEntropyFunction "
    "LigerFusedLinearScaledCrossEntropyTPFunction",
    "fused_moe": "LigerFusedMoEFunction",
    "geglu": "LigerGELUMulFunction",
    "group_norm": "LigerGroupNormFunction",
    "grpo_loss": "GrpoLossFunction fused_selective_log_softmax",
    "jsd": "LigerJSDFunction",
    "kl_div": "LigerKLDivLossFunction",
    "layer_norm": "LigerLayerNormFunction",
    "llama4_rope": "LigerLlama4RopeFunction",
    "modulated_rms_norm": "LigerModulatedRMSNormFunction",
    "poly_norm": "LigerPolyNormFunction",
    "qwen2vl_mrope": "LigerQwen2VLMRopeFunction",
    "relu_squared": "LigerReLUSquaredFunction",
    "rms_norm": "LigerRMSNormFunction",
    "rope": "LigerRopeFunction",
    "softmax": "LigerSoftmaxFunction",
    "sparsemax": "LigerSparsemaxFunction",
    "swiglu": "LigerSiLUMulFunction LigerFusedGateUpSiLUMulFunction",
    "tiled_mlp": "LigerTiledMLPFunction apply_tiled_mlp",
    "tvd": "LigerTVDLossFunction",
    "vocab_parallel_cross_entropy": "LigerVocabParallelCEFunction",
}
_LOSS_MODULES = {"CosineSimilarity": "cosine_similarity_loss"}
_DISTILL = "LigerFusedLinearDistillationBase"


def _apply_names() -> str:
    from tigon.compat.liger.patching import APPLY

    return " ".join(APPLY)


@functools.cache
def table() -> dict[str, tuple[str, ...]]:
    """Module path below ``liger_kernel`` -> the names in it."""
    rows = {
        "": "functional",
        "functional": "rms_norm layer_norm jsd softmax swiglu rope cross_entropy fused_add_rms_norm geglu "
        "kl_div fused_linear_jsd fused_linear_cross_entropy",
        "utils": _UTILS,
        "triton": "apply_liger_triton_cache_manager",
        "triton.monkey_patch": "apply_liger_triton_cache_manager",
        "megatron": "LigerMegatronCrossEntropy LigerMegatronRMSNorm LigerMegatronSwiGLU "
        "apply_liger_kernel_to_megatron",
        "ops": " ".join(_OPS.values()),
        "ops.configure": "FusedLinearCrossEntropyConfig configure",
        "ops.utils": "is_hip ensure_contiguous calculate_settings compare_version torch_to_triton_dtype",
        "transformers": f"{_EAGER} {_PATCHING} {_apply_names()} AutoLigerKernelForCausalLM "
        "is_transformers_available",
        "transformers.auto_model": "AutoLigerKernelForCausalLM",
        "transformers.cross_entropy": "LigerCrossEntropyLoss LigerCrossEntropyFunction",
        "transformers.dyt": "LigerDyT",
        "transformers.experimental": "",
        "transformers.experimental.embedding": "LigerEmbedding",
        "transformers.fsdp": "_FSDPForwardRedirection",
        "transformers.functional": _FUNCTIONAL,
        "transformers.fused_add_rms_norm": "LigerFusedAddRMSNorm",
        "transformers.fused_linear_cross_entropy": "LigerFusedLinearCrossEntropyLoss",
        "transformers.fused_linear_jsd": "LigerFusedLinearJSD",
        "transformers.geglu": "LigerGEGLUMLP LigerGEGLUMLPForGemma4",
        "transformers.group_norm": "LigerGroupNorm",
        "transformers.grpo_loss": "triton_grpo_loss",
        "transformers.jsd": "LigerJSD",
        "transformers.kl_div": "LigerKLDIVLoss",
        "transformers.layer_norm": "LigerLayerNorm",
        "transformers.llama4_rope": "liger_llama4_text_rotary_pos_emb liger_llama4_vision_rotary_pos_emb",
        "transformers.model": "",
        "transformers.model.loss_utils": "LigerForCausalLMLoss fixed_fused_linear_cross_entropy "
        "unpack_cross_entropy_result CrossEntropyOutput",
        "transformers.model.output_classes": "LigerCausalLMOutputWithPast LigerMoeCausalLMOutputWithPast",
        "transformers.monkey_patch": f"{_PATCHING} {_apply_names()}",
        "transformers.qwen2vl_mrope": "liger_multimodal_rotary_pos_emb",
        "transformers.relu_squared": "LigerReLUSquared",
        "transformers.rms_norm": "LigerRMSNorm LigerRMSNormForGemma LigerRMSNormForGemma2 "
        "LigerRMSNormForGemma3 LigerRMSNormForGemma4 LigerRMSNormForMuseGlimmer "
        "LigerRMSNormForMuseGlimmerTextCentered LigerRMSNormForOlmo2 LigerRMSNormForGlm4 "
        "LigerRMSNormForQwen3Next",
        "transformers.rope": "liger_rotary_pos_emb liger_rotary_pos_emb_gpt_oss liger_rotary_pos_emb_vision",
        "transformers.softmax": "LigerSoftmax",
        "transformers.swiglu": f"{_MLPS} LigerHunyuanV1SwiGLUMLP",
        "transformers.tiled_mlp": "LigerTiledGEGLUMLP LigerTiledSwiGLUMLP",
        "transformers.trainer": "LigerORPOTrainer",
        "transformers.trainer.orpo_trainer": "LigerORPOTrainer _FSDPForwardRedirection",
        "transformers.trainer_integration": "_apply_liger_kernel",
        "transformers.tvd": "LigerTVDLoss",
        "transformers.vocab_parallel_cross_entropy": "LigerVocabParallelCrossEntropy",
        "chunked_loss": " ".join(f"LigerFusedLinear{loss}Loss" for loss in _CHUNKED),
        "chunked_loss.functional": " ".join(
            f"liger_fused_linear_{loss}"
            for loss in ["orpo", "dpo", "jsd", "cosine", "cpo", "simpo", "kto", "grpo"]
        ),
        "chunked_loss.fused_linear_distillation": _DISTILL,
        "chunked_loss.fused_linear_preference": "LigerFusedLinearPreferenceBase",
        "chunked_loss.fused_linear_unpaired_preference": "LigerFusedLinearUnpairedPreferenceBase",
        "chunked_loss.fused_linear_ppo": "LigerFusedLinearPPOBase",
    }
    for op, names in _OPS.items():
        rows[f"ops.{op}"] = f"{names} {op}_forward {op}_backward"
    for loss in _CHUNKED:
        module = _LOSS_MODULES.get(loss, f"{loss.lower()}_loss")
        rows[f"chunked_loss.{module}"] = f"LigerFusedLinear{loss}Function LigerFusedLinear{loss}Loss"
    return {module: tuple(names.split()) for module, names in rows.items()}


@functools.cache
def _implementations() -> dict[str, object]:
    found = {}
    for name in ("divergences", "functional", "modules", "outputs", "patching", "utils", "dispatched"):
        found |= vars(importlib.import_module(f"tigon.compat.liger.{name}"))
    return found | found["APPLY"]


@functools.cache
def resolve(name: str) -> object:
    """What stands behind a name: an implementation, or a class that refuses to be used."""
    from tigon.compat.liger.missing import missing

    found = _implementations().get(name)
    return missing(name) if found is None else found


def implemented() -> dict[str, bool]:
    """Every name of the interface, and whether something stands behind it."""
    names = {name for row in table().values() for name in row if name != "functional"}
    return {name: name in _implementations() for name in sorted(names)}
