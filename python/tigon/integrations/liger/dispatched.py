"""``liger_kernel.functional``: a function an op, whose implementation callers may choose; here it is Tigon's.

``impl``, ``mode`` and ``backend`` are accepted and choose nothing. Defaults differ from those of
``liger_kernel.transformers.functional``, as there.
"""

from __future__ import annotations

from tigon.integrations.liger import distillation, divergences, functional, modules
from tigon.integrations.liger.signatures import by_position

_CHOICE = "impl=None, mode=None, backend=None"
_FUNCTIONS = {
    "rms_norm(x, weight, eps=1e-6, *, offset=0, casting_mode='llama', in_place=False, row_mode=None": (
        functional.liger_rms_norm
    ),
    "layer_norm(x, weight, bias=None, eps=1e-6, *": functional.liger_layer_norm,
    "softmax(x, *": functional.liger_softmax,
    "swiglu(a, b, gate_multiplier=1.0, down_multiplier=1.0, *": modules.silu_mul,
    "geglu(a, b, *": functional.liger_geglu,
    "rope(q, k, cos, sin, position_ids=None, unsqueeze_dim=1, *": functional.liger_rope,
    "fused_add_rms_norm(X, R, W, eps=1e-6, offset=0, casting_mode='llama', in_place=False, *": (
        functional.liger_fused_add_rms_norm
    ),
    "fused_linear_jsd(student_input, student_weight, teacher_input, teacher_weight, shift_labels=None, "
    "jsd_beta=0.5, ignore_index=-100, temperature=1.0, *": distillation.liger_fused_linear_jsd,
    "jsd(_input, target, shift_labels=None, beta=0.5, ignore_index=-100, *": divergences.liger_jsd,
    "kl_div(y_pred, y_true, reduction='batchmean', log_target=False, eps=1e-10, *": divergences.kl_div,
    "cross_entropy(input, target, weight=None, ignore_index=-100, lse_square_scale=0.0, label_smoothing=0.0, "
    "reduction='mean', softcap=None, return_z_loss=False, return_token_accuracy=False, "
    "return_predicted_tokens=False, *": functional.cross_entropy_parts,
    "fused_linear_cross_entropy(input, weight, target, bias=None, ce_weight=None, ignore_index=-100, "
    "lse_square_scale=0.0, label_smoothing=0.0, reduction='mean', softcap=None, return_z_loss=False, "
    "accum_dtype=None, use_token_scaling=False, return_token_accuracy=False, return_predicted_tokens=False, "
    "*": functional.linear_cross_entropy_parts,
}
globals().update(
    (signature.partition("(")[0], by_position(f"{signature}, {_CHOICE})", target))
    for signature, target in _FUNCTIONS.items()
)
