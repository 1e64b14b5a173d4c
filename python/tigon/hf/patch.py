"""`apply` and `undo`: plan what can be replaced, then replace it, and take it all back."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace

from torch import nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from tigon.error import Error
from tigon.hf.experts import GATE, plan_experts
from tigon.hf.forward import bind, bound, unbind
from tigon.hf.head import (
    HeadSpec,
    after_forward,
    before_forward,
    causal_lm_loss,
    head_forward,
    plan_head,
)
from tigon.hf.ledger import Ledger
from tigon.hf.mlp import MlpSpec, mlp_forward, plan_mlp
from tigon.hf.norms import norm_forward, plan_norm
from tigon.hf.report import Entry, Report
from tigon.hf.rope import Key, find_rotary, plan_rotary, rebind, release
from tigon.hf.slices import plan_slices, split_forward

STATE = "_tigon_state"
ABSENT = "absent"  # the model had no loss function of its own


@dataclass(eq=False)
class State:
    """What undo needs, kept in the model's own dictionary so that copies carry it."""

    report: Report
    rotary: dict[Key, str] = field(default_factory=dict)
    losses: dict[str, object] = field(default_factory=dict)  # module path -> what was there
    ledger: Ledger = field(default_factory=Ledger)

    def __deepcopy__(self, memo):
        report = Report(self.report.model, list(self.report.entries), self.report.head_calls)
        return _restore(report, dict(self.rotary), dict(self.losses), self.ledger)

    def __reduce__(self):
        return _restore, (self.report, dict(self.rotary), dict(self.losses), self.ledger)


def _restore(report, rotary, losses, ledger):
    """A copied or unpickled model owns its own share of the rotary functions."""
    state = State(report, rotary, losses, ledger)
    for key, label in rotary.items():
        __import__(key[0])
        if plan_rotary(key, vars(sys.modules[key[0]]).get(key[1])) == (label,):
            rebind(key, state, label)
    return state


class _Plan:
    """Everything apply would do; nothing is modified before `commit`."""

    def __init__(self, model: nn.Module, known: set):
        self.model = model
        self.known = known  # (slot, path) of what an earlier apply replaced
        self.entries: list[Entry] = []
        self.binds: list = []
        self.rotary: dict[Key, str] = {}
        self.losses: list[str] = []
        self.heads: list = []

    def modules(self, slot, plan, function):
        for path, module in self.model.named_modules():
            if (slot, path) in self.known or bound(module) is not None:
                continue
            verdict = plan(module)
            if verdict is None:
                continue
            if isinstance(verdict, tuple):
                self.binds.append((function, module, verdict[0], "forward"))
            self.add(slot, path, type(module).__name__, verdict)

    def experts(self):
        for path, module in self.model.named_modules():
            if ("experts", path) in self.known or bound(module, GATE) is not None:
                continue
            verdict = plan_experts(module)
            if isinstance(verdict, tuple):
                function, target, name, spec, _ = verdict
                self.binds.append((function, target, spec, name))
            if verdict is not None:
                self.add("experts", path, type(module).__name__, verdict)

    def add(self, slot, path, kind, verdict):
        left = isinstance(verdict, str)
        by = None if left else verdict[-1]
        self.entries.append(Entry(slot, path, kind, by, verdict if left else None))

    def rope(self):
        for key, function in sorted(find_rotary(self.model).items(), key=lambda item: item[0]):
            path = ".".join(key)
            if ("rope", path) in self.known:
                continue
            verdict = plan_rotary(key, function)
            if isinstance(verdict, tuple):
                self.rotary[key] = verdict[0]
            self.add("rope", path, key[1], verdict)

    def loss(self):
        paths = {id(module): path for path, module in self.model.named_modules()}
        seen = set()
        for path, owner in self.model.named_modules():
            if not isinstance(owner, PreTrainedModel):
                continue
            head = owner.get_output_embeddings()
            if head is None:
                continue
            ours = owner.loss_function is ForCausalLMLoss
            if ours:
                self.losses.append(path)
            if id(head) not in seen and id(head) in paths:
                seen.add(id(head))
                self.head(paths[id(head)], head, ours)

    def head(self, path, head, compiled):
        if ("loss", path) in self.known:
            return
        linears = plan_head(head)
        if isinstance(linears, str):
            verdict = linears
        else:
            verdict = ("tigon.linear_cross_entropy, lazy logits",)
            self.heads += [(linear, compiled) for linear in linears if bound(linear) is None]
        self.add("loss", path, type(head).__name__, verdict)

    def commit(self, state: State):
        for function, module, spec, name in self.binds:
            if isinstance(spec, MlpSpec):
                spec = replace(spec, ledger=state.ledger)
            bind(function, module, spec, name)
        for key, label in self.rotary.items():
            rebind(key, state, label)
            state.rotary[key] = label
        for linear, compiled in self.heads:
            bind(head_forward, linear, HeadSpec(state.report.head_calls, state.ledger, compiled))
        if state.report.count("loss"):
            for path in self.losses:
                owner = self.model.get_submodule(path)
                state.losses.setdefault(path, owner.__dict__.get("_loss_function", ABSENT))
                owner.__dict__["_loss_function"] = causal_lm_loss
                if before_forward not in owner._forward_pre_hooks.values():
                    owner.register_forward_pre_hook(before_forward, with_kwargs=True)
                    owner.register_forward_hook(after_forward)


def apply(model: nn.Module, *, norm: bool = True, mlp: bool = True, rope: bool = True, loss: bool = True,
          experts: bool = True, qkv: bool = True, strict: bool = False) -> Report:  # fmt: skip
    """Replace the norms, MLPs, rotary functions, loss head and experts' gates of a model by Tigon's.

    Where q, k and v are slices of one projection they become parts of one split.

    Args:
        model: a Hugging Face model, or any module built from such parts; PEFT, DDP and
            `torch.compile` wrappers are looked through. Modified in place.
        norm, mlp, rope, loss, experts, qkv: which slots to look at.
        strict: raise instead of leaving anything of these slots stock.

    Returns:
        a `Report`: what was replaced, by what, what was left and why. Applying again adds what is
        new in the model and returns the same report.

    Raises:
        tigon.Error: nothing was recognised, or strict and something was left. Nothing is modified.

    Parts are recognised by the structure of their source, not by names; see docs/huggingface.md.
    """
    if not isinstance(model, nn.Module):
        raise Error(f"[apply] model must be a torch.nn.Module, got {type(model).__name__}")
    root = _root(model)
    state = root.__dict__.get(STATE)
    report = state.report if state else Report(type(root).__name__)
    plan = _Plan(root, {(entry.slot, entry.path) for entry in report.replaced})
    if norm:
        plan.modules("norm", plan_norm, norm_forward)
    if mlp:
        plan.modules("mlp", plan_mlp, mlp_forward)
    if experts:
        plan.experts()
    if qkv:
        plan.modules("qkv", plan_slices, split_forward)
    if rope:
        plan.rope()
    if loss:
        plan.loss()
    _check(plan, report, strict)
    slots = {"norm": norm, "mlp": mlp, "experts": experts, "qkv": qkv, "rope": rope, "loss": loss}
    kept = [entry for entry in report.entries if entry.replaced or not slots[entry.slot]]
    report.entries[:] = kept + plan.entries
    if state is None:
        state = root.__dict__[STATE] = State(report)
    plan.commit(state)
    return report


def _check(plan: _Plan, report: Report, strict: bool) -> None:
    left = [entry for entry in plan.entries if not entry.replaced]
    reasons = "; ".join(sorted({f"{entry.kind}: {entry.reason}" for entry in left}))
    if not report.replaced and len(left) == len(plan.entries):
        raise Error(
            "[apply] model must hold a norm, gated MLP, rotary function or loss head that Tigon "
            f"knows, got {type(plan.model).__name__} ({reasons or 'none found'})"
        )
    if strict and left:
        raise Error(f"[apply] model must be replaced entirely (strict), got left: {reasons}")


def undo(model: nn.Module) -> None:
    """Restore everything that `apply` changed in this model; harmless where nothing was applied.

    A rotary function is shared by all models of its package: it returns to stock when the last
    patched model of the package is undone or dropped.
    """
    root = _root(model)
    for module in root.modules():
        unbind(module)
    state = root.__dict__.pop(STATE, None)
    if state is None:
        return
    for path, previous in state.losses.items():
        owner = root.get_submodule(path)
        for key in [key for key, hook in owner._forward_pre_hooks.items() if hook is before_forward]:
            del owner._forward_pre_hooks[key], owner._forward_pre_hooks_with_kwargs[key]
        for key in [key for key, hook in owner._forward_hooks.items() if hook is after_forward]:
            del owner._forward_hooks[key]
        if owner.__dict__.get("_loss_function") is not causal_lm_loss:
            continue  # somebody set another one since: not ours to remove
        if previous == ABSENT:
            del owner.__dict__["_loss_function"]
        else:
            owner.__dict__["_loss_function"] = previous
    for key in state.rotary:
        release(key, state)


def _root(model: nn.Module) -> nn.Module:
    """The model inside wrappers of PEFT, torch.compile, DDP and FSDP1."""
    while True:
        if isinstance(model, PreTrainedModel):
            return model
        if callable(getattr(model, "get_base_model", None)):
            inner = model.get_base_model()
        else:
            inner = model._modules.get("_orig_mod") or model._modules.get("module")
        if inner is None or inner is model:
            return model
        model = inner
