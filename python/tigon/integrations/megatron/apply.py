"""`apply` and `undo` for Megatron's models, module by module; no class and no function is replaced."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from tigon.error import check
from tigon.integrations.megatron import activation, head, norm, rope
from tigon.integrations.transformers.forward import bind, bound, unbind
from tigon.integrations.transformers.report import Entry, Report
from tigon.ops.arguments import check_numbers, kind_of

STATE = "_tigon_megatron"


@dataclass(eq=False)
class State:
    """What undo needs, kept in the model's own dictionary."""

    report: Report
    bound: list[nn.Module] = field(default_factory=list)
    before: list[tuple[nn.Module, dict]] = field(default_factory=list)  # attributes that were there


def apply(
    model: nn.Module, norm: bool = True, mlp: bool = True, rope: bool = True, loss: bool = True,
    *, keep_mb: float = 0.0,
) -> Report:  # fmt: skip
    """Put Tigon's kernels into a Megatron model: ``GPTModel``, ``HybridModel``, ``MambaModel``.

    Modules get methods of their own, and copies of their config with one value changed; classes, functions
    and other models stay as they are. Parameters, their names and their attributes do not change, so that it
    may be called before or after Megatron's DDP and optimizer are made.

    Args:
        model: a model, or a wrapper of one (``Float16Module``, ``DistributedDataParallel``).
        norm: ``nn.RMSNorm``, ``nn.LayerNorm``, Apex's ``FusedLayerNorm``, ``L2Norm``.
        mlp: gated activations (SwiGLU, GeGLU) and squared ReLU of MLPs, shared experts and ``SequentialMLP``.
        rope: rotary embedding of self-attention; fills Megatron's slots for fused functions, which are
            ``None`` without Transformer Engine, and leaves them filled (:func:`install_rope_fusion`).
        loss: the output layer and the loss in one; logits are formed only if something reads them.
        keep_mb: as in :func:`tigon.linear_cross_entropy`: three products of the head instead of four while
            the logits' gradients take no more than this many MiB.

    Returns:
        A report of what was replaced, and what was left and why. ``report.check()`` after the first step.

    Raises:
        tigon.Error: no Megatron model, or one with Tigon in it already.
    """
    op = "megatron.apply"
    check(op, isinstance(model, nn.Module), "model must be an nn.Module, got {}", kind_of(model))
    check_numbers(op, keep_mb=keep_mb)
    check(op, keep_mb >= 0, "keep_mb must be >= 0, got {}", keep_mb)
    owners = {path: module for path, module in model.named_modules() if _is_language_model(module)}
    check(op, owners, "model must hold a Megatron language model, got {}", type(model).__name__)
    patched = any(STATE in vars(module) for module in model.modules())
    check(op, not patched, "model must be without Tigon (undo() first), got a patched one")
    state = State(Report(type(model).__name__))
    vars(model)[STATE] = state
    try:
        if norm:
            _norms(model, state)
        if mlp:
            _mlps(model, state)
        if rope:
            _rotary(model, owners, state)
        if loss:
            for path, owner in owners.items():
                _head(path, owner, state, keep_mb)
    except BaseException:
        undo(model)
        raise
    return state.report


def undo(model: nn.Module) -> None:
    """Take :func:`apply` back: every module has its class's methods and its own config again.

    Raises:
        tigon.Error: the model is not patched.
    """
    state = vars(model).pop(STATE, None) if isinstance(model, nn.Module) else None
    check("megatron.undo", state is not None, "model must be what apply() was given, got {}", kind_of(model))
    for module in state.bound:
        unbind(module)
    for module, attributes in reversed(state.before):
        for name, value in attributes.items():
            setattr(module, name, value)


def _is_language_model(module) -> bool:
    return callable(getattr(module, "compute_language_model_loss", None)) and hasattr(module, "config")


def _add(state, slot, path, module, verdict) -> None:
    left = isinstance(verdict, str)
    entry = Entry(slot, path, type(module).__name__, None if left else verdict[1], verdict if left else None)
    state.report.entries.append(entry)


def _norms(model, state):
    for path, module in model.named_modules():
        verdict = norm.plan_norm(module)
        if verdict is not None:
            _add(state, "norm", path, module, verdict)
        if isinstance(verdict, tuple) and verdict[0] is not None:
            bind(verdict[0], module, None)
            state.bound.append(module)


def _mlps(model, state):
    configs = {}
    for path, module in model.named_modules():
        verdict = activation.plan_mlp(module)
        if verdict is not None:
            _add(state, "mlp", path, module, verdict)
        if isinstance(verdict, tuple) and verdict[0] is not None:
            state.before.append((module, activation.install(module, verdict[0], configs)))


def _rotary(model, owners, state):
    configs = {}
    for owner_path, owner in owners.items():
        kind = getattr(owner, "position_embedding_type", None)
        for path, module in owner.named_modules(prefix=owner_path):
            verdict = rope.plan_rope(module, kind)
            if verdict is not None:
                _add(state, "rope", path, module, verdict)
            if isinstance(verdict, tuple):
                state.before.append((module, rope.install(module, verdict[0], configs)))


def _head(path, owner, state, keep_mb):
    if getattr(owner, "output_layer", None) is None:
        state.report.entries.append(
            Entry("loss", path, type(owner).__name__, None, "this pipeline stage has no output layer")
        )
        return
    reason = head.plan_head(owner)
    layer_path = f"{path}.output_layer".lstrip(".")
    _add(state, "loss", layer_path, owner.output_layer, (None, head.NAME) if reason is None else reason)
    if reason is None and bound(owner.output_layer) is None:
        spec = head.HeadSpec(state.report.head_calls, keep_mb)
        bind(head.output_forward, owner.output_layer, spec)
        bind(head.language_model_loss, owner, spec, "compute_language_model_loss")
        state.bound += [owner.output_layer, owner]
