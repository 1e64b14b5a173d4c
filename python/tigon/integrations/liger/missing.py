"""Names of the ``liger_kernel`` interface that Tigon does not (yet) stand behind."""

from __future__ import annotations

import re

import tigon
from tigon.error import Error

_EXPERTS = "tigon.experts, or tigon.grouped_mlp of rows that expert parallelism has sorted"
_NO_OP = "plain PyTorch: Tigon has no op for it"
# What to use instead, by the part of a name that says what it is; the first that fits is taken.
_INSTEAD = (
    ("lce_forward|causal_forward|multimodal_forward|lce_maybe_trainable_lm_head",
     "apply_liger_kernel_to_*(model=...) or tigon.apply(model), which copy no forward of transformers"),
    ("ORPOTrainer", "trl.experimental's ORPOTrainer with tigon.TigonTrainerCallback"),
    ("GRPO|Grpo|grpo", "tigon.policy_loss of log-probabilities, or triton_grpo_loss"),
    ("(?i)vocab_?parallel", "tigon.parallel.cross_entropy or linear_cross_entropy"),
    ("gemm_swiglu|swiglu_backward_d", "tigon.transformers.GatedMLP"),
    ("FusedMoe|moe_fused", _EXPERTS),
    ("(?i)neighborhood", "torch.nn.attention.flex_attention with a mask of neighbours"),
    ("mhc_(mm|split|pre|post|sinkhorn)", "tigon.hyper_connection_pre and tigon.hyper_connection_post"),
    ("(?i)multi_?token_?attention", _NO_OP),
    ("matmul|pack_weights|autotune", f"torch.matmul, and {_NO_OP}"),
    ("assert_op|test_shapes|pytorch_reference|requires_cuda|sum_based|tolerances",
     "torch.testing.assert_close: Liger's test helpers are not part of the interface"),
    ("IMPL_REGISTRY|ImplInfo|select_impl|declare_op_locations|emit_fallback",
     "liger_kernel.backends.register_impl"),
    ("num_sms|npu_core", "torch.cuda.get_device_properties"),
    ("_(forward|backward|fwd$|bwd$)",
     "the function of the op itself: these are the halves of one autograd function there"),
)  # fmt: skip
_INTERNAL = "the op's public function: this one belongs to how Liger's kernels are made"


def instead_of(name: str) -> str:
    return next((advice for part, advice in _INSTEAD if re.search(part, name)), _INTERNAL)


def missing(name: str) -> type:
    """A class by this name that can be imported and subclassed; using it raises :class:`tigon.Error`.

    Callers import such names behind an availability check long before they know whether they need them,
    so the import must work and the use must say what is the matter.
    """

    def refuse(*args, **kwargs):
        raise Error(refusal(name))

    return type(name, (), {
        "__new__": refuse,
        "apply": staticmethod(refuse),
        "__class_getitem__": refuse,  # kernel[grid]
        "__doc__": f"{name} of the liger_kernel interface: not there in this version of Tigon.",
    })  # fmt: skip


def refusal(name: str) -> str:
    return f"[compat.liger] {name} is not there in tigon {tigon.__version__}: {instead_of(name)}"
