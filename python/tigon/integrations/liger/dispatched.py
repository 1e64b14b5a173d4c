"""``liger_kernel.functional``: a function an op, whose implementation callers may choose; here it is Tigon's.

``impl``, ``mode`` and ``backend`` are accepted and choose nothing. Defaults differ from those of
``liger_kernel.transformers.functional``, as there.
"""

from __future__ import annotations

from tigon.integrations.liger import distillation, divergences, functional, modules


def rms_norm(x, weight, eps=1e-6, *, offset=0, casting_mode="llama", in_place=False, row_mode=None, impl=None,
             mode=None, backend=None):  # fmt: skip
    """RMSNorm."""
    return functional.liger_rms_norm(x, weight, eps, offset, casting_mode)


def layer_norm(x, weight, bias=None, eps=1e-6, *, impl=None, mode=None, backend=None):
    """LayerNorm."""
    return functional.liger_layer_norm(x, weight, bias, eps)


def softmax(x, *, impl=None, mode=None, backend=None):
    """Softmax over the last dimension."""
    return functional.liger_softmax(x)


def swiglu(a, b, gate_multiplier=1.0, down_multiplier=1.0, *, impl=None, mode=None, backend=None):
    """``silu(gate_multiplier * a) * b * down_multiplier``."""
    return modules.silu_mul(a, b, gate_multiplier, down_multiplier)


def geglu(a, b, *, impl=None, mode=None, backend=None):
    """``gelu_tanh(a) * b``."""
    return functional.liger_geglu(a, b)


def rope(q, k, cos, sin, position_ids=None, unsqueeze_dim=1, *, impl=None, mode=None, backend=None):
    """Rotary embedding of q and k."""
    return functional.liger_rope(q, k, cos, sin, position_ids, unsqueeze_dim)


def fused_add_rms_norm(X, R, W, eps=1e-6, offset=0, casting_mode="llama", in_place=False, *, impl=None,
                       mode=None, backend=None):  # fmt: skip
    """(normalised sum, sum)."""
    return functional.liger_fused_add_rms_norm(X, R, W, eps, offset, casting_mode)


def fused_linear_jsd(student_input, student_weight, teacher_input, teacher_weight, shift_labels=None,
                     jsd_beta=0.5, ignore_index=-100, temperature=1.0, *, impl=None, mode=None,
                     backend=None):  # fmt: skip
    """Jensen-Shannon divergence of two heads."""
    return distillation.liger_fused_linear_jsd(
        student_input, student_weight, teacher_input, teacher_weight, shift_labels, jsd_beta, ignore_index,
        temperature,
    )  # fmt: skip


def jsd(_input, target, shift_labels=None, beta=0.5, ignore_index=-100, *, impl=None, mode=None,
        backend=None):  # fmt: skip
    """Jensen-Shannon divergence of log-probabilities."""
    return divergences.liger_jsd(_input, target, shift_labels, beta, ignore_index)


def kl_div(y_pred, y_true, reduction="batchmean", log_target=False, eps=1e-10, *, impl=None, mode=None,
           backend=None):  # fmt: skip
    """Kullback-Leibler divergence."""
    return divergences.kl_div(y_pred, y_true, reduction, log_target, eps)


def cross_entropy(input, target, weight=None, ignore_index=-100, lse_square_scale=0.0, label_smoothing=0.0,
                  reduction="mean", softcap=None, return_z_loss=False, return_token_accuracy=False,
                  return_predicted_tokens=False, *, impl=None, mode=None, backend=None):  # fmt: skip
    """(loss, z_loss, token_accuracy, predicted_tokens), None where not asked for."""
    return functional.cross_entropy_parts(
        input, target, weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap,
        return_z_loss, return_token_accuracy, return_predicted_tokens,
    )  # fmt: skip


def fused_linear_cross_entropy(input, weight, target, bias=None, ce_weight=None, ignore_index=-100,
                               lse_square_scale=0.0, label_smoothing=0.0, reduction="mean", softcap=None,
                               return_z_loss=False, accum_dtype=None, use_token_scaling=False,
                               return_token_accuracy=False, return_predicted_tokens=False, *, impl=None,
                               mode=None, backend=None):  # fmt: skip
    """(loss, z_loss, token_accuracy, predicted_tokens), None where not asked for."""
    return functional.linear_cross_entropy_parts(
        input, weight, target, bias, ce_weight, ignore_index, lse_square_scale, label_smoothing, reduction,
        softcap, return_z_loss, accum_dtype, use_token_scaling, return_token_accuracy,
        return_predicted_tokens,
    )  # fmt: skip
