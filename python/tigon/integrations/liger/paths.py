"""The names of ``liger_kernel`` 0.8.5 that exist, by module, and replacements for those that do not."""

from __future__ import annotations

import functools
import importlib
import re
import sys

from tigon import error

VERSION = "0.8.5"  # of the interface
PACKAGE = "liger_kernel"

check = functools.partial(error.check, "compat.liger")

_MODELS = (
    "deepseek_v2 deepseek_v3 deepseek_v4 exaone4 falcon_h1 gemma gemma2 gemma3 gemma3_text gemma4 "
    "gemma4_text glm4 glm4v glm4v_moe gpt_oss granite hunyuan_v1_dense hunyuan_v1_moe internvl llama llama4 "
    "llava ministral mistral mixtral mllama muse_glimmer nemotron olmo2 olmo3 paligemma phi3 pixtral qwen2 "
    "qwen2_5_vl qwen2_vl qwen3 qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next "
    "qwen3_vl qwen3_vl_moe smollm3 smolvlm"
)
_APPLY = "_apply_liger_kernel _apply_liger_kernel_to_instance " + " ".join(
    f"apply_liger_kernel_to_{name}" for name in _MODELS.split()
)
_MHC = "liger_mhc_coeffs liger_mhc_pre liger_mhc_post_res"
_LLAMA4 = "liger_llama4_text_rotary_pos_emb liger_llama4_vision_rotary_pos_emb"
_SCALED = "LigerFusedLinearScaledCrossEntropyFunction"
_UTILS = "calculate_settings compare_version ensure_contiguous infer_device is_hip torch_to_triton_dtype"

# Module of liger_kernel -> file of this folder -> the names of that file which the module has.
PATHS: dict[str, dict[str, str]] = {
    "": {},
    "chunked_loss": {
        "chunked_loss": "LigerFusedLinearCPOLoss LigerFusedLinearDPOLoss LigerFusedLinearGRPOLoss "
        "LigerFusedLinearJSDLoss LigerFusedLinearKTOLoss LigerFusedLinearORPOLoss LigerFusedLinearSimPOLoss"
    },
    "chunked_loss.cpo_loss": {"chunked_loss": "LigerFusedLinearCPOLoss"},
    "chunked_loss.dpo_loss": {"chunked_loss": "LigerFusedLinearDPOLoss"},
    "chunked_loss.fused_linear_distillation": {"chunked_loss": "LigerFusedLinearDistillationBase"},
    "chunked_loss.grpo_loss": {"chunked_loss": "LigerFusedLinearGRPOLoss"},
    "chunked_loss.jsd_loss": {"chunked_loss": "LigerFusedLinearJSDLoss"},
    "chunked_loss.kto_loss": {"chunked_loss": "LigerFusedLinearKTOLoss"},
    "chunked_loss.orpo_loss": {"chunked_loss": "LigerFusedLinearORPOLoss"},
    "chunked_loss.simpo_loss": {"chunked_loss": "LigerFusedLinearSimPOLoss"},
    "megatron": {
        "megatron": "apply_liger_kernel_to_megatron LigerMegatronCrossEntropy LigerMegatronRMSNorm "
        "LigerMegatronSwiGLU"
    },
    "megatron.cross_entropy": {"megatron": "LigerMegatronCrossEntropy LigerVocabParallelCrossEntropy"},
    "megatron.monkey_patch": {"megatron": "apply_liger_kernel_to_megatron"},
    "megatron.rms_norm": {"megatron": "LigerMegatronRMSNorm"},
    "megatron.swiglu": {"megatron": "LigerMegatronSwiGLU"},
    "ops": {"ops": f"{_SCALED} LigerRMSNormFunction LigerSiLUMulFunction"},
    "ops.backends": {"ops": "IMPL_REGISTRY"},
    "ops.backends.registry": {"ops": "IMPL_REGISTRY"},
    "ops.fused_linear_cross_entropy": {
        "ops": "fused_linear_cross_entropy_forward fused_linear_cross_entropy_backward"
    },
    "ops.fused_linear_scaled_cross_entropy": {"ops": _SCALED},
    "ops.grpo_loss": {"ops": "fused_selective_log_softmax"},
    "ops.rms_norm": {"ops": "LigerRMSNormFunction rms_norm_forward rms_norm_backward"},
    "ops.rope": {"ops": "rope_forward rope_backward"},
    "ops.swiglu": {"ops": "LigerSiLUMulFunction"},
    "ops.utils": {"utils": _UTILS},
    "transformers": {
        "patching": f"AutoLigerKernelForCausalLM {_APPLY}",
        "modules": "LigerBlockSparseTop2MLP LigerCrossEntropyLoss LigerDyT LigerExperts LigerFalconH1MLP "
        "LigerFalconH1SwiGLUMLP LigerFusedAddRMSNorm LigerFusedLinearCrossEntropyLoss LigerGEGLUMLP "
        "LigerLayerNorm LigerMLP LigerModulatedRMSNorm LigerPhi3SwiGLUMLP LigerPolyNorm "
        "LigerQwen3MoeSwiGLUMLP LigerRMSNorm LigerReLUSquared LigerSoftmax LigerSparsemax LigerSwiGLUMLP",
        "divergences": "LigerFusedLinearJSD LigerJSD LigerKLDIVLoss LigerTVDLoss",
        "functional": f"liger_rotary_pos_emb {_LLAMA4}",
        "hyper_connections": "LigerMHC",
        "megatron": "LigerVocabParallelCrossEntropy",
    },
    "transformers.auto_model": {
        "patching": "AutoLigerKernelForCausalLM MODEL_TYPE_TO_APPLY_LIGER_FN _apply_liger_kernel"
    },
    "transformers.cross_entropy": {"functional": "CrossEntropyOutput", "modules": "LigerCrossEntropyLoss"},
    "transformers.dyt": {"modules": "LigerDyT"},
    "transformers.experimental": {"modules": "LigerEmbedding"},
    "transformers.experimental.embedding": {"modules": "LigerEmbedding"},
    "transformers.fsdp": {"outputs": "_FSDPForwardRedirection"},
    "transformers.functional": {
        "functional": "CrossEntropyOutput liger_attn_res liger_cross_entropy liger_dyt "
        "liger_fused_add_rms_norm liger_fused_linear_cross_entropy liger_geglu liger_group_norm "
        "liger_layer_norm liger_modulated_rms_norm liger_poly_norm liger_qwen2vl_mrope liger_relu_squared "
        "liger_rms_norm liger_rope liger_softmax liger_sparsemax liger_swiglu",
        "divergences": "liger_fused_linear_jsd liger_jsd liger_kl_div liger_tvd",
        "hyper_connections": f"{_MHC} liger_mhc_apply liger_mhc_forward",
        "megatron": "liger_fused_linear_scaled_cross_entropy_tp",
    },
    "transformers.fused_add_rms_norm": {"modules": "LigerFusedAddRMSNorm"},
    "transformers.fused_linear_cross_entropy": {
        "functional": "CrossEntropyOutput",
        "modules": "LigerFusedLinearCrossEntropyLoss",
    },
    "transformers.fused_linear_jsd": {"divergences": "LigerFusedLinearJSD"},
    "transformers.geglu": {"modules": "LigerGEGLUMLP"},
    "transformers.group_norm": {"modules": "LigerGroupNorm"},
    "transformers.jsd": {"divergences": "LigerJSD"},
    "transformers.kl_div": {"divergences": "LigerKLDIVLoss"},
    "transformers.layer_norm": {"modules": "LigerLayerNorm"},
    "transformers.llama4_rope": {"functional": _LLAMA4},
    "transformers.mhc": {"hyper_connections": f"LigerMHC {_MHC}"},
    "transformers.mlp": {"modules": "LigerFalconH1MLP LigerMLP"},
    "transformers.model": {},
    "transformers.model.loss_utils": {"functional": "CrossEntropyOutput LigerForCausalLMLoss"},
    "transformers.modulated_rms_norm": {"modules": "LigerModulatedRMSNorm"},
    "transformers.monkey_patch": {"patching": f"MODEL_TYPE_TO_APPLY_LIGER_FN {_APPLY}"},
    "transformers.poly_norm": {"modules": "LigerPolyNorm"},
    "transformers.qwen2vl_mrope": {"functional": "liger_multimodal_rotary_pos_emb"},
    "transformers.relu_squared": {"modules": "LigerReLUSquared"},
    "transformers.rms_norm": {"modules": "LigerRMSNorm LigerRMSNormForGemma2 LigerRMSNormForGemma4"},
    "transformers.rope": {"functional": "liger_rotary_pos_emb"},
    "transformers.softmax": {"modules": "LigerSoftmax"},
    "transformers.sparsemax": {"modules": "LigerSparsemax"},
    "transformers.swiglu": {
        "modules": "LigerBlockSparseTop2MLP LigerExperts LigerFalconH1SwiGLUMLP LigerPhi3SwiGLUMLP "
        "LigerQwen3MoeSwiGLUMLP LigerSwiGLUMLP"
    },
    "transformers.trainer": {},
    "transformers.trainer.orpo_trainer": {"outputs": "_FSDPForwardRedirection"},
    "transformers.trainer_integration": {"patching": "_apply_liger_kernel"},
    "transformers.tvd": {"divergences": "LigerTVDLoss"},
    "transformers.vocab_parallel_cross_entropy": {"megatron": "LigerVocabParallelCrossEntropy"},
    "utils": {
        "utils": "PEFT_AVAILABLE infer_comm_backend infer_device is_npu_available "
        "transformers_version_dispatch"
    },
}

# What a dropped path looks like -> what to use; the first that fits counts. docs/integrations.md lists them.
_INSTEAD = {
    r"^transformers\.model|lce_forward|_patch_\w+_module|_bind_method|rope_full": (
        "tigon.apply(model), or apply_liger_kernel_to_*(model=model)"
    ),
    r"neighborhood": "torch.nn.attention.flex_attention with a mask of neighbours",
    r"multi_?token_?attention": "PyTorch, for Tigon has no op for it",
    r"LigerRMSNormFor": "LigerRMSNorm with offset, casting_mode and init_fn, or tigon.nn.RMSNorm",
    r"SwiGLUMLPFor|LigerHunyuanV1SwiGLUMLP": "LigerSwiGLUMLP",
    r"tiled": "torch.utils.checkpoint around the MLP, for some of the tokens at a time",
    r"linear_?kl_?div": "tigon.linear_kl_div, with the logarithms of the probabilities as the teacher",
    r"ce_?tvd": "tigon.cross_entropy and tigon.tvd",
    r"env_report": "tigon.env()",
    r"LigerGEGLUMLPFor": "LigerGEGLUMLP, of a configuration with the layer's intermediate_size",
    r"rotary_pos_emb": "liger_rotary_pos_emb, or tigon.rope",
    r"cosine": "torch.nn.functional.cosine_similarity of logits",
    r"^(backends|functional)\b|(get|set|available)_(impl|backend)s?$|dispatch$|^ops\.(backends|conf|cu)": (
        "liger_kernel.transformers.functional, for each op has one implementation"
    ),
    r"^testing": "torch.testing.assert_close",
    r"Base$|fused_linear_(ppo|preference|unpaired)": "tigon.linear_loss, which takes a loss of your own",
    r"^chunked_loss": "the loss's class in liger_kernel.chunked_loss",
    r"ORPOTrainer": "TRL's ORPOTrainer with tigon.TigonTrainerCallback",
    r"grpo|gamma_weights": "tigon.policy_loss, or LigerFusedLinearGRPOLoss of hidden states",
    r"moe|routing": "tigon.experts, or tigon.grouped_mlp of rows that expert parallelism has sorted",
    r"int8int2|matmul": "torch.matmul",
    r"^ops\b|Function$": "the op's function in liger_kernel.transformers.functional, or tigon's own",
    r"^(utils|triton)\b|transformers\.(monkey_patch|is_)": "torch's own: it is a helper of Liger's kernels",
}


def is_module(path: str) -> bool:
    """Modules of the table, and the package itself."""
    return path in PATHS


def names_of(path: str) -> list[str]:
    """The names of a module of the table."""
    return [name for names in PATHS[path].values() for name in names.split()]


def resolve(path: str, name: str) -> object:
    """The object behind a name of a module.

    Raises:
        AttributeError: the interface has none; if Liger has one, the text says what to use.
    """
    for file, names in PATHS[path].items():
        if name in names.split():
            return getattr(importlib.import_module(f"tigon.integrations.liger.{file}"), name)
    whole = f"{path}.{name}".lstrip(".")
    raise AttributeError(dropped(whole) or f"[compat.liger] {PACKAGE}.{path} {VERSION} has no {name}")


def dropped(path: str) -> str | None:
    """The advice for a path of Liger's that the interface leaves out; None if Liger has no such path."""
    for looks, instead in _INSTEAD.items():
        if re.search(looks, path, re.IGNORECASE):
            return f"[compat.liger] {PACKAGE}.{path} is not part of Tigon's interface: use {instead}"
    return None


def public(path: str, name: str, default: object) -> object:
    """The present object at a public path: programs replace attributes there, and expect an effect."""
    return getattr(sys.modules.get(f"{PACKAGE}.{path}"), name, default)
