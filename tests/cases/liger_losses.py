"""liger-kernel's losses of linear heads as peers: its own classes, defaults but for the case's options.

``chunked_loss`` runs compiled on CUDA, as it does by default, and as plain PyTorch on a CPU. Results are the
loss alone: what else the classes return are metrics of their own.
"""

import torch

from .case import Case, Inputs

LACKING = "bias softcap lora_a nll_target nll denominator importance delta teacher_bias token_weight"
ALTERED = tuple(LACKING.split())


def _plain(kwargs: dict) -> bool:
    """Whether the head has nothing that Liger's classes lack."""
    scaled = any(kwargs.get(name, 1.0) != 1.0 for name in ("temperature", "logit_scale"))
    return not scaled and not kwargs.get("shift") and all(kwargs.get(name) is None for name in ALTERED)


def preference(case: Case, inputs: Inputs):
    """DPO and its kinds, CPO, SimPO, ORPO and KTO."""
    from liger_kernel import chunked_loss as liger

    kwargs = inputs.kwargs
    if not _plain(kwargs) or kwargs.get("ref") is not None:
        return None
    kind, compiled = kwargs["kind"], inputs.args[0].is_cuda
    chosen = {name: kwargs[name] for name in ("label_smoothing", "gamma") if name in kwargs}
    reference = "ref_hidden" in kwargs
    if kind == "kto":
        loss = liger.LigerFusedLinearKTOLoss(compiled=compiled, use_ref_model=reference)

        def kto(hidden, weight, target, *, desirable, ref_hidden=None, ref_weight=None, **_):
            return loss(
                hidden,
                weight,
                target,
                preference_labels=desirable,
                ref_input=ref_hidden,
                ref_weight=ref_weight,
            )[0]

        return kto
    own = {"cpo": liger.LigerFusedLinearCPOLoss, "orpo": liger.LigerFusedLinearORPOLoss}
    if kind in own:
        loss = own[kind](compiled=compiled, **chosen)
    elif kind == "simpo":
        loss = liger.LigerFusedLinearSimPOLoss(compiled=compiled, compute_nll_loss=False, **chosen)
    elif kind in liger.LigerFusedLinearDPOLoss._SUPPORTED_LOSS_TYPES and not chosen.get("gamma"):
        chosen.pop("gamma", None)
        loss = liger.LigerFusedLinearDPOLoss(
            compiled=compiled, loss_type=kind, use_ref_model=reference, **chosen
        )
    else:
        return None

    def pairs(hidden, weight, target, *, ref_hidden=None, ref_weight=None, **_):
        more = {"ref_input": ref_hidden, "ref_weight": ref_weight} if reference else {}
        return loss(weight, hidden, target, **more)[0]

    return pairs


def policy(case: Case, inputs: Inputs):
    """GRPO with clipped ratios."""
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    kwargs = inputs.kwargs
    types = {("token", "token"): "bnpo", ("token", "sequence"): "grpo", ("sequence", "sequence"): "grpo"}
    level = kwargs.get("level", "token")
    loss_type = types.get((level, kwargs.get("normalise", "token")))
    clipped = kwargs.get("kind", "clip") == "clip" and not kwargs.get("entropy") and "clip" not in kwargs
    if not _plain(kwargs) or not clipped or loss_type is None or inputs.args[3].dim() > 1:
        return None
    factor = kwargs.get("kl", 0.0) if kwargs.get("ref") is not None else 0.0
    loss = LigerFusedLinearGRPOLoss(
        beta=factor,
        compiled=inputs.args[0].is_cuda,
        use_ref_model=factor != 0.0,
        loss_type=loss_type,
        importance_sampling_level=level,
        use_bias_correction_kl=kwargs.get("kl_corrected", False),
    )

    def fn(hidden, weight, target, advantage, *, old=None, ref=None, **_):
        return loss(
            hidden,
            weight,
            target.clamp(min=0),
            target != -100,
            advantage,
            old_per_token_logps=old,
            ref_per_token_logps=ref if factor else None,
        )[0]

    return fn


def _divergence(inputs: Inputs) -> float | None:
    """The class' beta of a mean of rows against another head, if it is one."""
    kwargs, labels = inputs.kwargs, inputs.args[4]
    if not _plain(kwargs) or kwargs["op"] == "linear_tvd" or kwargs.get("soft", 1.0) != 1.0:
        return None
    others = ("teacher_softcap", "outputs", "teacher_logit_scale")
    if any(name in kwargs for name in others) or kwargs.get("reduction", "batchmean") != "batchmean":
        return None
    if kwargs.get("hard") and labels is None:
        return None
    return kwargs.get("beta", 0.5) if kwargs["op"] == "linear_jsd" else float(kwargs.get("reverse", False))


def _classes(inputs: Inputs) -> int:
    """Of the teacher."""
    teacher, teacher_weight = inputs.args[2:4]
    return teacher.shape[-1] if teacher_weight is None else len(teacher_weight)


def divergence(case: Case, inputs: Inputs):
    """The chunked JSD of two heads, and the KL divergence from probabilities that are given."""
    beta = _divergence(inputs)
    if beta is None or _classes(inputs) != len(inputs.args[1]):
        return None
    hard = inputs.kwargs.get("hard", 0.0)
    if inputs.args[3] is None:
        return _from_probabilities(inputs) if beta == 0 and not hard else None
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    loss = LigerFusedLinearJSDLoss(
        weight_hard_loss=hard, weight_soft_loss=1.0, beta=beta, compiled=inputs.args[0].is_cuda
    )

    def fn(hidden, weight, teacher, teacher_weight, labels, **_):
        rows = hidden.flatten(0, -2)
        labels = rows.new_zeros(len(rows), dtype=torch.int64) if labels is None else labels.flatten()
        return loss(rows, weight, teacher.flatten(0, -2), teacher_weight, labels)

    return fn


def _from_probabilities(inputs: Inputs):
    from liger_kernel.transformers import LigerFusedLinearKLDivLoss

    loss = LigerFusedLinearKLDivLoss()
    probabilities = inputs.args[2].flatten(0, -2).softmax(dim=-1)  # its format; their making is not timed

    def fn(hidden, weight, teacher, teacher_weight, labels, **_):
        labels = None if labels is None else labels.flatten()
        return loss(hidden.flatten(0, -2), weight, probabilities, labels)

    return fn


def fused_divergence(case: Case, inputs: Inputs):
    """The Triton kernel's JSD of two heads."""
    from liger_kernel.transformers import LigerFusedLinearJSD

    beta = _divergence(inputs)
    same = inputs.args[3] is not None and _classes(inputs) == len(inputs.args[1])
    if beta is None or not same or inputs.kwargs.get("hard"):
        return None
    loss = LigerFusedLinearJSD(jsd_beta=beta)

    def fn(hidden, weight, teacher, teacher_weight, labels, **_):
        labels = None if labels is None else labels.flatten()
        return loss(hidden.flatten(0, -2), weight, teacher.flatten(0, -2), teacher_weight, labels)

    return fn
