"""TRL's fused heads with Tigon.

TRL's SFT, DPO, KTO, GRPO and RLOO trainers (1.15 and 1.16) compute per-token log-probabilities with one TRL
function; its distillation trainer computes the divergence of two heads with another. Tigon replaces both in
models that :func:`tigon.apply` or :class:`tigon.TigonTrainerCallback` has patched, and in all models after
:func:`install`. The first then runs :func:`tigon.linear_cross_entropy` or :func:`tigon.linear_log_prob`, the
second :func:`tigon.linear_jsd`. TRL's own function runs for each call that these do not support: the
collision entropy, mean logits under a softcap, DTensors, and heads that ZeRO-3 has not gathered.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
from collections.abc import Callable, Iterator

import torch
from torch import nn

import tigon
from tigon._dtensor import PLAIN
from tigon._op import graph_is_kept, once
from tigon.error import Error, refuse
from tigon.integrations import replacing
from tigon.integrations.replacing import ForeignReplacement, parameters_of
from tigon.integrations.transformers.forward import BELOW
from tigon.ops.loss_head.operands import TrainedCalls, autocast

log = logging.getLogger("tigon")
_OURS: list = []  # the interface of Liger, if install() brought it

NAME = "_ChunkedLogProbFunction"
PARAMETERS = [
    "hidden",
    "weight",
    "bias",
    "targets",
    "temperature",
    "chunk_size",
    "final_logit_softcapping",
    "logit_scale",
    "outputs",
]
DIVERGENCE = "ChunkedDivergenceFunction"
DIVERGENCE_PARAMETERS = [
    "student_hidden",
    "student_weight",
    "student_bias",
    "teacher_hidden",
    "teacher_weight",
    "teacher_bias",
    "beta",
    "temperature",
    "student_logit_scale",
    "student_final_logit_softcapping",
    "teacher_logit_scale",
    "teacher_final_logit_softcapping",
]
# The module of each function by release: 1.15 imports the divergence when called, 1.16 with the trainer.
PLACES = {
    NAME: ("trl.trainer.utils",),
    DIVERGENCE: ("trl.kernels.chunked_divergence", "trl.trainer.distillation_trainer"),
}


def _gathered(*weights):
    """The heads as whole tensors; None if one is a DTensor or a ZeRO-3 partition.

    When the forward ends, ZeRO-3 frees a gathered parameter by giving it other data. A view keeps the
    gathered values while the backward needs them.
    """
    if not all(w is None or type(w) in PLAIN for w in weights):
        return None
    if any(hasattr(w, "ds_id") and w.numel() != w.ds_numel for w in weights):
        return None
    return [w.view_as(w) if hasattr(w, "ds_id") else w for w in weights]


class _Head:
    """Replaces an autograd function of TRL: it is called in the same way and falls back to it."""

    def __init__(self, original, patched: Callable[[object], bool] | None = None):
        self.original = original
        self.patched = patched  # whether Tigon takes the calls of a model; None: of all models
        self.calls = 0  # calls that Tigon computed

    def gathered(self, *weights):
        """The heads if Tigon takes this call, else None; `apply`, which TRL calls, calls this."""
        if torch.compiler.is_compiling():  # there are no frames to inspect
            _note_traced()
            return _gathered(*weights)
        ours = self.patched is None or any(map(self.patched, _models(sys._getframe(1))))
        heads = _gathered(*weights) if ours else None
        self.calls += heads is not None
        return heads


@torch.compiler.assume_constant_result
def _note_traced() -> None:
    TrainedCalls.number += 1


def _models(frame) -> tuple:
    """The object whose method calls TRL's head, a model or a trainer, and its model attributes."""
    while frame is not None and isinstance(frame.f_locals.get("self"), _Head | None):
        frame = frame.f_back
    owner = None if frame is None else frame.f_locals["self"]
    return owner, getattr(owner, "model", None)


class LogProbHead(_Head):
    """The log-probabilities of one head."""

    def apply(
        self,
        hidden,
        weight,
        bias,
        targets,
        temperature,
        chunk_size,
        softcap=None,
        logit_scale=1.0,
        outputs=("entropy", "log_sum_sq_probs", "mean_logits", "is_top1"),
    ):
        """(log_probs, entropy, log_sum_sq_probs, mean_logits, is_top1), None if not requested."""
        ours = "log_sum_sq_probs" not in outputs and not (softcap and "mean_logits" in outputs)
        heads = self.gathered(weight, bias) if ours else None
        if heads is None:
            return self.original.apply(
                hidden, weight, bias, targets, temperature, chunk_size, softcap, logit_scale, outputs
            )
        weight, bias = heads
        head = {"bias": bias, "temperature": temperature, "softcap": softcap, "logit_scale": logit_scale}
        entropy = top = None
        if "is_top1" in outputs:  # SFT, DPO: the entropy is a metric
            names = ("loss", "correct", *(("entropy",) if "entropy" in outputs else ()))
            got = tigon.linear_cross_entropy(hidden, weight, targets, reduction="none", outputs=names, **head)
            log_probs, top, entropy = -got.loss, got.correct, getattr(got, "entropy", None)
        elif "entropy" in outputs:  # GRPO, RLOO: it may be part of the loss
            log_probs, entropy = tigon.linear_log_prob(hidden, weight, targets, entropy=True, **head)
        else:
            log_probs = tigon.linear_log_prob(hidden, weight, targets, **head)
        means = _mean_logits(hidden, weight, **head) if "mean_logits" in outputs else None
        return log_probs, entropy, None, means, top


class DivergenceHead(_Head):
    """The divergence of two heads."""

    def apply(
        self,
        hidden,
        weight,
        bias,
        teacher_hidden,
        teacher_weight,
        teacher_bias,
        beta,
        temperature=1.0,
        logit_scale=1.0,
        softcap=None,
        teacher_logit_scale=1.0,
        teacher_softcap=None,
    ):
        """(divergence, entropy of the student) of rows; only the student gets a gradient."""
        heads = self.gathered(weight, bias, teacher_weight, teacher_bias)
        if heads is None:
            heads = (hidden, weight, bias, teacher_hidden, teacher_weight, teacher_bias)
            scales = (logit_scale, softcap, teacher_logit_scale, teacher_softcap)
            return self.original.apply(*heads, beta, temperature, *scales)
        weight, bias, teacher_weight, teacher_bias = heads
        hidden, teacher_hidden = autocast(hidden), autocast(teacher_hidden)
        teacher = (teacher_hidden, teacher_weight, *(() if teacher_bias is None else (teacher_bias,)))
        options = {
            "beta": beta,
            "temperature": temperature,
            "softcap": softcap,
            "logit_scale": logit_scale,
            "teacher_softcap": teacher_softcap,
            "teacher_logit_scale": teacher_logit_scale,
        }
        if hidden.is_cuda and torch.is_grad_enabled():  # then the trainer drops masked rows, and sums
            return _SummedRows.apply(options, teacher, hidden, weight, bias)
        got = tigon.linear_jsd(
            hidden, weight, teacher, bias=bias, reduction="none", outputs=("loss", "entropy"), **options
        )
        return got.loss, got.entropy


class _SummedRows(torch.autograd.Function):
    """Losses of rows that the caller will sum, so that all rows have the same upstream gradient.

    The gradients of the sum are computed with the losses, and the backward multiplies them by this number. If
    the upstream gradient differs by row, the backward computes the logits again.
    """

    @staticmethod
    def forward(ctx, options, teacher, *parameters):
        ctx.options, ctx.teacher = options, teacher
        ctx.save_for_backward(*parameters)
        leaves, got = _SummedRows._run(ctx, parameters, "sum", ("loss", "soft", "entropy"))
        ctx.leaves, ctx.total = leaves, got.loss
        ctx.mark_non_differentiable(got.entropy)
        ctx.set_materialize_grads(False)
        return got.soft, got.entropy

    @staticmethod
    def _run(ctx, parameters, reduction, outputs):
        leaves = [
            t if t is None else t.detach().requires_grad_(needed)
            for t, needed in zip(parameters, ctx.needs_input_grad[2:], strict=True)
        ]
        with torch.enable_grad():
            hidden, weight, bias = leaves
            return leaves, tigon.linear_jsd(
                hidden, weight, ctx.teacher, bias=bias, reduction=reduction, outputs=outputs, **ctx.options
            )

    @staticmethod
    @once("linear_jsd")
    def backward(ctx, dloss, _):
        if dloss is None:
            return (None,) * 5
        leaves, losses, kept = ctx.leaves, ctx.total, graph_is_kept()
        if dloss.numel() == 0 or dloss.stride() == (0,):
            dloss = dloss[:1].sum()
        else:
            leaves, losses = _SummedRows._run(ctx, ctx.saved_tensors, "none", ("loss",))
            kept = False
        wanted = [t for t in leaves if t is not None and t.requires_grad]
        gradients = iter(torch.autograd.grad(losses, wanted, dloss, retain_graph=kept))
        dleaves = (next(gradients) if t is not None and t.requires_grad else None for t in leaves)
        return None, None, *dleaves


@torch.no_grad()
def _mean_logits(hidden, weight, bias, temperature, softcap, logit_scale):
    """Mean logits: the mean over the vocabulary is linear, so one mean row of the weight is enough."""
    del softcap
    mean = hidden.float() @ weight.mean(0, dtype=torch.float32)
    if bias is not None:
        mean = mean + bias.mean(dtype=torch.float32)
    return mean * (logit_scale / temperature)


HEADS = {NAME: (LogProbHead, PARAMETERS), DIVERGENCE: (DivergenceHead, DIVERGENCE_PARAMETERS)}


def install() -> None:
    """Make TRL's fused heads and the switches of its configurations use Tigon in this process.

    The heads of all models are replaced. ``use_liger_kernel=True`` finds the interface of
    :func:`tigon.compat.liger.install`, and ``model_init_kwargs={"use_kernels": True}`` the mapping of
    :func:`tigon.compat.kernels.install`. An installed Liger is not replaced; the logger ``tigon`` says so. A
    ``kernels`` package that this transformers does not support is not changed either.

    Raises:
        tigon.Error: this TRL has no such function, or calls it in another way. Nothing is modified.
    """
    replacements = [*_replacements()]
    if NAME not in {r.name for r in replacements}:
        refuse("compat.trl", _words(), PARAMETERS, None)
    replacing.install("compat.trl", replacements)
    for r in replacements:
        r.ours.patched = None
    from tigon.integrations import kernels, liger

    try:
        _OURS.extend([] if liger.installed() else [liger])
        liger.install()
    except Error as error:
        _OURS.clear()
        log.warning("%s", error)
    with contextlib.suppress(Error):  # transformers reports which kernels it needs
        kernels.install()


def take(patched: Callable[[object], bool]) -> str | None:
    """Do the same for ``patched`` models, if TRL is imported; return why not, if TRL has another version."""
    replacements = [*_replacements(patched, loaded=True)]
    try:
        replacing.install("compat.trl", replacements if NAME in {r.name for r in replacements} else [])
    except Error as error:
        return str(error)
    return None


def uninstall() -> None:
    """Restore TRL's own functions, and remove the interface of Liger if :func:`install` brought it."""
    while _OURS:
        _OURS.pop().uninstall()
    replacing.uninstall(_replacements())


def fuses(model: nn.Module) -> bool:
    """Whether TRL's own forward computes the losses of this model, so that its head is not called."""
    for forward in (vars(model).get("forward"), vars(model).get(BELOW)):
        while forward is not None:  # accelerate wraps it
            forward = getattr(forward, "__func__", forward)
            if getattr(forward, "__globals__", {}).get("__name__") == PLACES[NAME][0]:
                return True
            forward = getattr(forward, "__wrapped__", None)
    return False


def _replacements(patched=None, loaded: bool = False) -> Iterator[ForeignReplacement]:
    """Those of the places of this release, or of the imported ones."""
    for name, (kind, parameters) in HEADS.items():
        for place in PLACES[name]:
            with contextlib.suppress(ModuleNotFoundError):
                module = sys.modules.get(place) if loaded else importlib.import_module(place)
                present = getattr(module, name, None)
                if present is not None:
                    ours = present if isinstance(present, kind) else kind(present, patched)
                    names = parameters_of(ours.original.forward)[1:]
                    yield ForeignReplacement(module, name, ours, names, parameters, _words())


def _words() -> str:
    import trl

    return f"trl must be one whose fused head takes {{}} (1.15, 1.16), got trl {trl.__version__} with {{}}"
