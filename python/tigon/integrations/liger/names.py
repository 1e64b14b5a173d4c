"""Which names live in which module of ``liger_kernel`` 0.8.5, and what stands behind them here."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from importlib import resources

import tigon
from tigon import error

VERSION = "0.8.5"  # of the interface
PACKAGE = "liger_kernel"
_BEHIND = (
    "bases",
    "chunked_loss",
    "divergences",
    "functional",
    "modules",
    "hyper_connections",
    "outputs",
    "patching",
    "policies",
    "preferences",
    "megatron",
    "utils",
    "backends",
    "passes",
)
_APART = {"chunked_loss"}  # packages whose names mean something else outside of them

check = functools.partial(error.check, "compat.liger")


@functools.cache
def table() -> dict[str, tuple[str, ...]]:
    """Module path below ``liger_kernel`` -> the names in it: interface.txt, one module a paragraph."""
    text = resources.files(__package__).joinpath("interface.txt").read_text(encoding="utf-8")
    paragraphs = (line.split(":") for line in text.replace("\n  ", " ").splitlines())
    return {module[len(PACKAGE) + 1 :]: tuple(names.split()) for module, names in paragraphs}


@functools.cache
def _places() -> dict[str, object]:
    """Name -> the module that it stands in; of a name that two define, the last one."""
    modules = [importlib.import_module(f"tigon.integrations.liger.{name}") for name in _BEHIND]
    return {
        name: module
        for module in modules
        for name in dir(module)
        if not inspect.ismodule(vars(module).get(name))
    }


@functools.cache
def resolve(name: str, below: str = "") -> object:
    """What stands behind a name of module ``below``: an implementation, or a class that refuses its use."""
    package = below.partition(".")[0]
    if package in _APART:
        own = importlib.import_module(f"tigon.integrations.liger.{package}")
        if name in vars(own):
            return vars(own)[name]
    found = getattr(_places()[name], name) if name in _places() else None
    return missing(name) if found is None else found


def public(below: str, name: str, default: object) -> object:
    """What stands at a public path now: callers exchange attributes there, and expect it to count."""
    try:
        module = importlib.import_module(f"{PACKAGE}.{below}")
    except ImportError:
        return default
    return getattr(module, name)


def implemented() -> dict[str, bool]:
    """Every name of the interface, and whether something stands behind it."""
    names = {name for row in table().values() for name in row}
    return {name: name in _places() for name in sorted(names - {"functional"})}


# Names that Tigon does not (yet) stand behind.
_EXPERTS = "tigon.experts, or tigon.grouped_mlp of rows that expert parallelism has sorted"
_NO_OP = "plain PyTorch: Tigon has no op for it"
# What to use instead, by the part of a name that says what it is; the first that fits is taken.
_INSTEAD = (
    (
        "lce_forward|causal_forward|multimodal_forward|lce_maybe_trainable_lm_head",
        "apply_liger_kernel_to_*(model=...) or tigon.apply(model), which copy no forward of transformers",
    ),
    ("ORPOTrainer", "trl.experimental's ORPOTrainer with tigon.TigonTrainerCallback"),
    ("GRPO|Grpo|grpo", "tigon.policy_loss of log-probabilities, or triton_grpo_loss"),
    ("(?i)vocab_?parallel", "tigon.parallel.cross_entropy or linear_cross_entropy"),
    ("gemm_swiglu|swiglu_backward_d", "tigon.transformers.GatedMLP"),
    ("FusedMoe|moe_fused", _EXPERTS),
    ("(?i)neighborhood", "torch.nn.attention.flex_attention with a mask of neighbours"),
    ("mhc_(mm|split|pre|post|sinkhorn)", "tigon.hyper_connection_pre and tigon.hyper_connection_post"),
    ("(?i)multi_?token_?attention", _NO_OP),
    ("matmul|pack_weights|autotune", f"torch.matmul, and {_NO_OP}"),
    (
        "assert_op|test_shapes|pytorch_reference|requires_cuda|sum_based|tolerances",
        "torch.testing.assert_close: Liger's test helpers are not part of the interface",
    ),
    (
        "IMPL_REGISTRY|ImplInfo|select_impl|declare_op_locations|emit_fallback",
        "liger_kernel.backends.register_impl",
    ),
    ("num_sms|npu_core", "torch.cuda.get_device_properties"),
)
# Words of names of kernels and passes there -> the function here, where it has another name.
_OTHERWISE = {
    "attn_res": "attention_residual",
    "kldiv": "kl_div",
    "tv_distance": "tvd",
    "ce_tvd": "linear_tvd",
    "mrope": "rope",
}
_INTERNAL = "the op's public function: this one belongs to how Liger's kernels are made"


def _of_op(name: str) -> str:
    """The function of the op that a kernel or a pass by this name belongs to."""
    words = {**{op: op for op in tigon.__all__}, **_OTHERWISE}
    named = [word for word in words if re.search(rf"(^|_){word}(_|$)", name)]
    return f"tigon.{words[max(named, key=len)]}" if named else _INTERNAL


def missing(name: str) -> type:
    """A class by this name that can be imported and subclassed; using it raises :class:`tigon.Error`.

    Callers import such names behind an availability check long before they know whether they need them,
    so the import must work and the use must say what is the matter.
    """

    instead = next((advice for part, advice in _INSTEAD if re.search(part, name)), _of_op(name))

    def refuse(*args, **kwargs):
        words = f"[compat.liger] {name} is not there in tigon {tigon.__version__}: {instead}"
        raise error.Error(words)

    return type(
        name,
        (),
        {
            "__new__": refuse,
            "apply": staticmethod(refuse),
            "__class_getitem__": refuse,  # kernel[grid]
            "__doc__": f"{name} of the liger_kernel interface: not there in this version of Tigon.",
        },
    )
