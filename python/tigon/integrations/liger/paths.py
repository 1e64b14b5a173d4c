"""The names of ``liger_kernel`` 0.8.5 that exist, by module, and replacements for those that do not."""

from __future__ import annotations

import functools
import importlib
import re

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
_SCALED = "LigerFusedLinearScaledCrossEntropyFunction"

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
    "megatron.cross_entropy": {"megatron": "LigerMegatronCrossEntropy"},
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
    "ops.utils": {"utils": "calculate_settings compare_version ensure_contiguous torch_to_triton_dtype"},
    "transformers": {
        "patching": f"AutoLigerKernelForCausalLM {_APPLY}",
        "modules": "LigerCrossEntropyLoss LigerFusedLinearCrossEntropyLoss LigerGEGLUMLP LigerLayerNorm "
        "LigerModulatedRMSNorm LigerRMSNorm LigerSoftmax LigerSparsemax LigerSwiGLUMLP",
        "divergences": "LigerFusedLinearJSD LigerJSD LigerKLDIVLoss LigerTVDLoss",
        "functional": "liger_rotary_pos_emb",
        "hyper_connections": "LigerMHC",
    },
    "transformers.auto_model": {
        "patching": "AutoLigerKernelForCausalLM MODEL_TYPE_TO_APPLY_LIGER_FN _apply_liger_kernel"
    },
    "transformers.cross_entropy": {"functional": "CrossEntropyOutput", "modules": "LigerCrossEntropyLoss"},
    "transformers.experimental": {"modules": "LigerEmbedding"},
    "transformers.experimental.embedding": {"modules": "LigerEmbedding"},
    "transformers.fsdp": {"outputs": "_FSDPForwardRedirection"},
    "transformers.functional": {
        "functional": "CrossEntropyOutput liger_cross_entropy liger_fused_linear_cross_entropy "
        "liger_modulated_rms_norm liger_rope",
        "hyper_connections": f"{_MHC} liger_mhc_apply liger_mhc_forward",
    },
    "transformers.fused_linear_cross_entropy": {
        "functional": "CrossEntropyOutput",
        "modules": "LigerFusedLinearCrossEntropyLoss",
    },
    "transformers.fused_linear_jsd": {"divergences": "LigerFusedLinearJSD"},
    "transformers.geglu": {"modules": "LigerGEGLUMLP"},
    "transformers.jsd": {"divergences": "LigerJSD"},
    "transformers.kl_div": {"divergences": "LigerKLDIVLoss"},
    "transformers.layer_norm": {"modules": "LigerLayerNorm"},
    "transformers.mhc": {"hyper_connections": f"LigerMHC {_MHC}"},
    "transformers.model": {},
    "transformers.model.loss_utils": {"functional": "CrossEntropyOutput LigerForCausalLMLoss"},
    "transformers.modulated_rms_norm": {"modules": "LigerModulatedRMSNorm"},
    "transformers.monkey_patch": {"patching": f"MODEL_TYPE_TO_APPLY_LIGER_FN {_APPLY}"},
    "transformers.rms_norm": {"modules": "LigerRMSNorm LigerRMSNormForGemma2 LigerRMSNormForGemma4"},
    "transformers.rope": {"functional": "liger_rotary_pos_emb"},
    "transformers.softmax": {"modules": "LigerSoftmax"},
    "transformers.sparsemax": {"modules": "LigerSparsemax"},
    "transformers.swiglu": {"modules": "LigerSwiGLUMLP"},
    "transformers.trainer": {},
    "transformers.trainer.orpo_trainer": {"outputs": "_FSDPForwardRedirection"},
    "transformers.trainer_integration": {"patching": "_apply_liger_kernel"},
    "transformers.tvd": {"divergences": "LigerTVDLoss"},
    "utils": {"utils": "PEFT_AVAILABLE infer_device is_npu_available"},
}

# What a dropped path looks like -> what to use; the first that fits counts. docs/integrations.md lists them.
_INSTEAD = {
    r"^transformers\.model|lce_forward|_patch_\w+_module|_bind_method|rope_full": (
        "tigon.apply(model), or apply_liger_kernel_to_*(model=model)"
    ),
    r"neighborhood": "torch.nn.attention.flex_attention with a mask of neighbours",
    r"multi_?token_?attention": "PyTorch, for Tigon has no op for it",
    r"LigerRMSNormFor": "LigerRMSNorm with offset, casting_mode and init_fn, or tigon.nn.RMSNorm",
    r"tiled": "torch.utils.checkpoint around the MLP, for some of the tokens at a time",
    r"Phi3SwiGLUMLP": "tigon.transformers.FusedGatedMLP",
    r"FalconH1": "LigerSwiGLUMLP, or tigon.swiglu with gate_multiplier and down_multiplier",
    r"SwiGLUMLP|LigerMLP|transformers\.mlp": "LigerSwiGLUMLP",
    r"linear_?kl_?div": "tigon.linear_kl_div, with the logarithms of the probabilities as the teacher",
    r"ce_?tvd": "tigon.cross_entropy and tigon.tvd",
    r"env_report": "tigon.env()",
    r"LigerGEGLUMLPFor": "LigerGEGLUMLP, of a configuration with the layer's intermediate_size",
    r"mrope|multimodal_rotary": "tigon.rope with mrope_section",
    r"llama4": "tigon.rope with interleaved=True",
    r"rotary_pos_emb": "liger_rotary_pos_emb, or tigon.rope",
    r"cosine": "torch.nn.functional.cosine_similarity of logits",
    r"^(backends|functional)\b|(get|set|available)_(impl|backend)s?$|\bdispatch$|^ops\.(backends|conf|cu)": (
        "tigon's function of the op, for each op has one implementation"
    ),
    r"^testing": "torch.testing.assert_close",
    r"Base$|fused_linear_(ppo|preference|unpaired)": "tigon.linear_loss, which takes a loss of your own",
    r"^chunked_loss": "the loss's class in liger_kernel.chunked_loss",
    r"ORPOTrainer": "TRL's ORPOTrainer with tigon.TigonTrainerCallback",
    r"grpo|gamma_weights": "tigon.policy_loss, or LigerFusedLinearGRPOLoss of hidden states",
    r"vocab_?parallel": "tigon.parallel.cross_entropy",
    r"cross_?entropy_?tp": "tigon.parallel.linear_log_prob, whose negative is the loss of a token",
    r"Experts|BlockSparse": "tigon.experts, or tigon.nn.Experts",
    r"moe|routing": "tigon.experts, or tigon.grouped_mlp of rows that expert parallelism has sorted",
    r"int8int2|matmul": "torch.matmul",
    r"fused_?add_?rms_?norm": "tigon.add_rms_norm, or tigon.nn.AddRMSNorm",
    r"attn_?res": "tigon.attention_residual",
    r"relu_?squared": "tigon.relu_squared",
    r"dyt|group_?norm|poly_?norm": "tigon's function or class: tigon.dyt, tigon.nn.DyT and so on",
    r"^(ops\.)?utils\b|^triton\b|transformers\.(monkey_patch|is_)": (
        "torch's own: it is a helper of Liger's kernels"
    ),
    r"^ops\b|Function$|functional\.liger_": (
        "tigon's function (tigon.rms_norm for liger_rms_norm), or the op's class in liger_kernel.transformers"
    ),
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
