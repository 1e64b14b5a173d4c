"""`apply` and `undo` for Megatron's models, module by module; no class and no function is replaced."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

from torch import nn

from tigon.error import check
from tigon.integrations.megatron import head
from tigon.integrations.megatron.activation import changed, plan_mlp
from tigon.integrations.megatron.norm import plan_norm
from tigon.integrations.megatron.rope import plan_rope
from tigon.integrations.transformers.forward import bind, bound, unbind
from tigon.integrations.transformers.report import Entry, Report
from tigon.ops.arguments import check_numbers, kind_of

STATE = "_tigon_megatron"


@dataclass(eq=False)
class State:
    """The state that undo needs, kept in the model's own dictionary."""

    report: Report
    bound: list[nn.Module] = field(default_factory=list)
    before: list[tuple[nn.Module, dict]] = field(default_factory=list)  # attributes before

    configs: dict = field(default_factory=dict)  # changed ones

    def bind(self, module, function, spec=None, name="forward") -> None:
        bind(function, module, spec, name)
        self.bound.append(module)

    def set(self, module, values, **attributes) -> None:
        """Give a module these attributes, and a copy of its config with these values."""
        attributes["config"] = changed(module.config, self.configs, **values)
        self.before.append((module, {name: getattr(module, name) for name in attributes}))
        for name, value in attributes.items():
            setattr(module, name, value)

    def activation(self, module, function) -> None:
        """Put an activation into the slot that the value turns on."""
        self.set(module, {"use_te_activation_func": True}, activation_func=function)

    def head(self, spec, owner, loss) -> None:
        """Patch the head; models may share an output layer."""
        if bound(owner.output_layer) is None:
            self.bind(owner.output_layer, head.output_forward, spec)
            self.bind(owner, loss, spec, "compute_language_model_loss")


def apply(
    model: nn.Module,
    norm: bool = True,
    mlp: bool = True,
    rope: bool = True,
    loss: bool = True,
    *,
    keep_mb: float = 0.0,
) -> Report:
    """Make a Megatron model use Tigon's kernels: ``GPTModel``, ``HybridModel``, ``MambaModel``.

    Each replaced module gets new methods, and a copy of its config with one value changed. Classes, functions
    and other models do not change. Parameters, their names and their attributes do not change either, so you
    may call this before or after Megatron's DDP and optimizer are made.

    Args:
        model: a model, or a wrapper of one (``Float16Module``, ``DistributedDataParallel``).
        norm: ``nn.RMSNorm``, ``nn.LayerNorm``, Apex's ``FusedLayerNorm``, ``L2Norm``.
        mlp: gated activations (SwiGLU, GeGLU) and squared ReLU of MLPs, shared experts and ``SequentialMLP``.
        rope: rotary embedding of self-attention. This fills Megatron's slots for fused functions, which are
            ``None`` without Transformer Engine; undo leaves them filled (:func:`install_rope_fusion`).
        loss: the output layer and the loss in one; logits are computed only if some code reads them.
        keep_mb: as in :func:`tigon.linear_cross_entropy`: the head takes three matmuls instead of four while
            the logits' gradients take no more than this many MiB.

    Returns:
        A report that says what was replaced, and what was left and why. Call ``report.check()`` after the
        first step.

    Raises:
        tigon.Error: the model is not a Megatron model, or it is already patched.
    """
    op = "megatron.apply"
    check(op, isinstance(model, nn.Module), "model must be an nn.Module, got {}", kind_of(model))
    check_numbers(op, keep_mb=keep_mb)
    check(op, keep_mb >= 0, "keep_mb must be >= 0, got {}", keep_mb)
    owners = {path: module for path, module in model.named_modules() if _is_language_model(module)}
    check(op, owners, "model must hold a Megatron language model, got {}", type(model).__name__)
    patched = any(STATE in vars(module) for module in model.modules())
    check(op, not patched, "model must be without Tigon (undo() first), got a patched one")
    state = vars(model)[STATE] = State(Report(type(model).__name__))
    try:
        if norm:
            _look(state, "norm", model.named_modules(), plan_norm, state.bind)
        if mlp:
            _look(state, "mlp", model.named_modules(), plan_mlp, state.activation)
        if rope:
            for path, owner in owners.items():
                plan = functools.partial(plan_rope, kind=getattr(owner, "position_embedding_type", None))
                _look(state, "rope", owner.named_modules(prefix=path), plan, state.set)
        if loss:
            spec = head.HeadSpec(state.report.head_calls, keep_mb)
            _look(state, "loss", owners.items(), head.plan_head, functools.partial(state.head, spec))
    except BaseException:
        undo(model)
        raise
    return state.report


def undo(model: nn.Module) -> None:
    """Undo :func:`apply`: every module has its class's methods and its own config again.

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


def _look(state, slot, modules, plan, replace) -> None:
    """Plan these modules, report the result, and replace those that the plan accepts."""
    for path, module in modules:
        verdict = plan(module)
        if verdict is None:
            continue
        place = module
        if slot == "loss" and getattr(module, "output_layer", None) is not None:
            path, place = f"{path}.output_layer".lstrip("."), module.output_layer
        state.report.entries.append(Entry.of(slot, path, type(place).__name__, verdict))
        if isinstance(verdict, tuple) and verdict[0] is not None:
            replace(module, verdict[0])
