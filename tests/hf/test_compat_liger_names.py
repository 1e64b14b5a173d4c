"""The names of liger_kernel that packages of the registry import: each is there, and does what it shall."""

import importlib
import operator

import pytest
import torch

import tigon

APPLY = (
    "gemma gemma2 gemma3 gemma3_text glm4 glm4v glm4v_moe granite internvl llama llama4 llava mistral "
    "mixtral mllama olmo2 paligemma phi3 qwen2 qwen2_vl qwen2_5_vl qwen3 qwen3_moe qwen3_next qwen3_5"
)
# Axolotl, TRL, ms-swift, verl, LLaMA-Factory, OpenRLHF, oumi, InstructLab, NeMo AutoModel, xtuner, VeOmni.
NAMES = {
    "transformers": "_apply_liger_kernel_to_instance AutoLigerKernelForCausalLM "
    "LigerFusedLinearCrossEntropyLoss functional "
    + " ".join(f"apply_liger_kernel_to_{name}" for name in APPLY.split()),
    "transformers.monkey_patch": "MODEL_TYPE_TO_APPLY_LIGER_FN _apply_liger_kernel_to_instance",
    "transformers.cross_entropy": "LigerCrossEntropyLoss",
    "transformers.fused_linear_cross_entropy": "LigerFusedLinearCrossEntropyLoss",
    "transformers.functional": "liger_cross_entropy liger_fused_linear_cross_entropy",
    "transformers.geglu": "LigerGEGLUMLP",
    "transformers.swiglu": "LigerSwiGLUMLP",
    "transformers.layer_norm": "LigerLayerNorm",
    "transformers.rms_norm": "LigerRMSNorm LigerRMSNormForGemma2 LigerRMSNormForGemma4",
    "transformers.rope": "liger_rotary_pos_emb",
    "transformers.model.loss_utils": "LigerForCausalLMLoss",
    "transformers.trainer.orpo_trainer": "_FSDPForwardRedirection",
    "chunked_loss": "LigerFusedLinearDPOLoss LigerFusedLinearGRPOLoss LigerFusedLinearJSDLoss "
    "LigerFusedLinearKTOLoss",
    "chunked_loss.fused_linear_distillation": "LigerFusedLinearDistillationBase",
    "ops": "LigerFusedLinearScaledCrossEntropyFunction rms_norm rope swiglu grpo_loss "
    "fused_linear_cross_entropy utils backends",
    "ops.rms_norm": "LigerRMSNormFunction rms_norm_forward rms_norm_backward",
    "ops.rope": "rope_forward rope_backward",
    "ops.swiglu": "LigerSiLUMulFunction",
    "ops.grpo_loss": "fused_selective_log_softmax",
    "ops.utils": "calculate_settings compare_version ensure_contiguous torch_to_triton_dtype",
    "ops.backends.registry": "IMPL_REGISTRY",
    "utils": "PEFT_AVAILABLE is_npu_available",
}


def found(path, name):
    return getattr(importlib.import_module(f"liger_kernel.{path}"), name)


def test_each_is_there(facade):
    """As an attribute too, where the name is a module's: there a package imports its modules."""
    for path, names in NAMES.items():
        for name in names.split():
            found(path, name)


def test_helpers(facade):
    """What Axolotl's own Triton kernels take, and its look at who has replaced Liger's."""
    assert [*found("ops.backends.registry", "IMPL_REGISTRY").items()] == []
    assert found("ops.utils", "calculate_settings")(4096) == (4096, 8)
    assert found("ops.utils", "compare_version")("torch", operator.ge, "2.0.0")
    contiguous = found("ops.utils", "ensure_contiguous")(lambda ctx, x: x.is_contiguous())
    assert contiguous(None, torch.zeros(3, 2).T)
    try:
        import triton.language as tl
    except ImportError:
        with pytest.raises(ImportError, match="triton"):
            found("ops.utils", "torch_to_triton_dtype")[torch.float32]
    else:
        assert found("ops.utils", "torch_to_triton_dtype")[torch.float32] is tl.float32


@pytest.mark.parametrize("mode", ["llama", "gemma", "none"])
@pytest.mark.parametrize(
    "dtypes", [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32"), None]
)
def test_passes_of_rms_norm(facade, mode, dtypes):
    """The same bits as the function's forward and backward, in x's dtype as there; numbers of modes too."""
    forward, backward = found("ops.rms_norm", "rms_norm_forward"), found("ops.rms_norm", "rms_norm_backward")
    torch.manual_seed(0)
    of_x, of_w = (getattr(torch, name) for name in dtypes or ("float32", "float32"))
    x = torch.randn(2, 3, 48).to(of_x).requires_grad_()
    weight = torch.randn(48).to(of_w).requires_grad_() if dtypes else None
    dy = torch.randn(2, 3, 48).to(of_x)
    y = tigon.rms_norm(x, weight, 1e-5, offset=1.0, rounding=mode).to(of_x)
    y.backward(dy)
    out, rows, rstd, block, warps, code = forward(x, weight, 1e-5, 1.0, mode, None)
    assert not out.requires_grad and rows.shape == (6, 48)
    torch.testing.assert_close(out, y.detach(), rtol=0, atol=0)
    dx, dw = backward(dy, rows, weight, rstd, 1.0, code, block, warps, False, None)
    torch.testing.assert_close(dx, x.grad, rtol=0, atol=0)
    if dtypes is None:
        assert dw is None
        return
    torch.testing.assert_close(dw, weight.grad, rtol=0, atol=0)
    assert backward(dy, rows, weight, rstd, 1.0, code, block, warps, False, None, needs_dw=False)[1] is None
    with pytest.raises(tigon.Error, match="casting_mode must be one of .*, got 'mistral'"):
        forward(x, weight, 1e-5, 1.0, "mistral", None)


@pytest.mark.parametrize("shape", [(7, 16), (1, 7, 16), (2, 7, 16), (2, 1, 7, 16), (2, 7, 1, 16)])
def test_passes_of_rope(facade, shape):
    """As autograd of the plain formula, for tables of two to four dimensions; partial heads stay."""
    forward, backward = found("ops.rope", "rope_forward"), found("ops.rope", "rope_backward")
    torch.manual_seed(0)
    q, k = (torch.randn(2, heads, 7, 24, requires_grad=True) for heads in (4, 2))
    half = torch.randn(*shape[:-1], 8)
    cos, sin = (torch.cat((table, table), -1) for table in (half.cos(), half.sin()))
    axis = 2 if shape[2:3] == (1,) else 1

    def plain(x):
        c, s = (t.squeeze(axis) if t.dim() == 4 else t for t in (cos, sin))
        c, s = ((t if t.dim() == 3 else t[None])[:, None] for t in (c, s))
        turned = torch.cat((-x[..., 8:16], x[..., :8]), -1)
        return torch.cat((x[..., :16] * c + turned * s, x[..., 16:]), -1)

    wanted, upstream = (plain(q), plain(k)), [torch.randn_like(x) for x in (q, k)]
    torch.autograd.backward(wanted, upstream)
    *got, cos_out, sin_out = forward(q, k, cos, sin, unsqueeze_dim=axis)
    assert cos_out.dim() == sin_out.dim() == 3
    gradients = backward(*upstream, cos_out, sin_out)
    torch.testing.assert_close((*got, *gradients), (*wanted, q.grad, k.grad))
