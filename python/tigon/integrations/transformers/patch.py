"""`apply` and `undo`: replace what `plan` found, and restore it."""

from __future__ import annotations

import copy
import itertools
import logging
import operator
import types
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from tigon.error import Error, check
from tigon.integrations.transformers.causal_loss import causal_lm_loss
from tigon.integrations.transformers.experts import GATE, LAYER, switch, switch_back
from tigon.integrations.transformers.forward import (
    ARRIVALS,
    STATE,
    bind,
    bind_model,
    bound,
    model_forward,
    unbind,
)
from tigon.integrations.transformers.fp8 import Options, check_recipe, pack, unpack
from tigon.integrations.transformers.fp8_gather import forget_gather
from tigon.integrations.transformers.graphs import GRAPHS, drop_graphs, use_graphs
from tigon.integrations.transformers.head import (
    WATCHED,
    HeadSpec,
    attach,
    bind_head,
    calls_head,
    tie,
    watched_forward,
)
from tigon.integrations.transformers.mlp import MlpSpec
from tigon.integrations.transformers.plan import NEEDS_NORM_AND_ROPE, NO_QK_NORM, SLOTS, Plan, unwrapped
from tigon.integrations.transformers.recompute import Ledger, check_recompute, give_back, linear_forward, take
from tigon.integrations.transformers.report import Report
from tigon.integrations.transformers.rewriting import Rewritten
from tigon.integrations.transformers.rope import rewrite, rotary_forward
from tigon.ops.arguments import check_booleans
from tigon.ops.fp8_linear import forget_weights
from tigon.ops.loss_head.plan import check_cap

log = logging.getLogger("tigon")
ABSENT = "absent"  # the model had no loss function of its own


@dataclass(eq=False)
class State:
    """The state that undo needs, kept in the model's own dictionary so that copies of the model have it."""

    report: Report
    losses: dict[str, object] = field(default_factory=dict)  # module path -> loss function before
    ledger: Ledger = field(default_factory=Ledger)
    experts: dict[str, str | None] = field(default_factory=dict)  # path -> implementation before
    fp8: Options | None = None

    def __deepcopy__(self, memo):
        report = replace(self.report, entries=[*self.report.entries], notes=[*self.report.notes], graphs=None)
        report.recompute = copy.deepcopy(report.recompute, memo)
        return State(report, dict(self.losses), self.ledger, dict(self.experts), self.fp8)


class Arrivals:
    """Notices PEFT adapters that are added or removed after `apply`, and then plans the slot `lora` again."""

    numbers = itertools.count()

    def __init__(self):
        self.number = next(self.numbers)  # of the model, while it is traced
        self.owners, self.known = None, []

    def __deepcopy__(self, memo):
        return Arrivals()

    def __reduce__(self):
        return Arrivals, ()

    def changed(self, root: nn.Module) -> bool:
        """Whether adapters changed since the last call: PEFT keeps their configurations in the model."""
        if self.owners is None:
            self.owners = [vars(model) for model in root.modules() if isinstance(model, PreTrainedModel)]
            WATCHED[self.number] = root
        configs = [config for own in self.owners for config in (own.get("peft_config") or {}).values()]
        same = len(configs) == len(self.known) and all(map(operator.is_, configs, self.known))
        self.known = configs
        return not same

    def look(self, root: nn.Module) -> None:
        """Replace the layers of new adapters."""
        before = self.known
        if not self.changed(root):
            return
        state, plan = root.__dict__[STATE], Plan(root)
        plan.all_norms = state.report.recompute is not None
        try:
            plan.lora()
            if state.fp8 is not None:
                plan.fp8(state.fp8)
            _replace(plan)
        except BaseException:
            self.known = before  # what is refused in this call is refused in the next
            raise
        report, slots = state.report, {entry.slot for entry in plan.entries} | {"lora"}
        report.entries[:] = [entry for entry in report.entries if entry.slot not in slots] + plan.entries
        layers = report.count("lora")
        if report.recompute is not None:
            report.recompute.adapters = layers
        log.info("[apply] the model's adapters have changed: %d layers call tigon.lora_linear", layers)


def _replace(plan: Plan, ledger: Ledger | None = None):
    """Bind the planned functions to modules that do not have them yet."""
    for module in plan.freed:
        unbind(module)
        forget_gather(module)
    forget_weights(plan.model.parameters())
    for linear in plan.packed:
        pack(linear)
    for function, module, spec, name in plan.binds:
        there = bound(module, name)
        same = there is not None and (there.function, there.spec) == (function, spec)
        if same and there.replaces_own() and function is not linear_forward:
            continue
        if isinstance(spec, MlpSpec):
            spec = replace(spec, ledger=ledger)
        bind(function, module, spec, name, of=GATE if name == LAYER else None)


def _commit(plan: Plan, state: State, lazy_logits: bool, max_peak_mb: float | None):
    """Make the planned changes."""
    _replace(plan, state.ledger)
    switch(plan.model, state.experts)
    for module, name, names in plan.turns:
        held = bound(module, name)
        if held is None:
            bind(rotary_forward, module, Rewritten(rewrite, type(module), names, name=name), name)
        elif isinstance(held.spec, Rewritten):
            held.spec.add(rewrite, names)
    for module in plan.model.modules() if plan.recompute else ():
        give_back(module)
    for place in plan.places:
        take(place)
    for owner, linears in plan.heads:
        known = [forward.spec[0] for forward in (model_forward(owner),) if forward and forward.spec]
        known += [forward.spec for forward in map(bound, linears) if forward is not None]
        spec = known[0] if known else HeadSpec(state.report.head_calls, state.ledger)
        spec.compiled |= owner.loss_function in (ForCausalLMLoss, causal_lm_loss)
        spec.always |= lazy_logits
        spec.max_peak_mb = spec.max_peak_mb if max_peak_mb is None else max_peak_mb
        bind_head(linears, spec)
        attach(owner, spec)
        tie(owner, linears)
    if state.report.count("loss"):
        for path in plan.losses:
            owner = plan.model.get_submodule(path)
            state.losses.setdefault(path, owner.__dict__.get("_loss_function", ABSENT))
            owner.__dict__["_loss_function"] = causal_lm_loss


def apply(
    model: nn.Module,
    *,
    norm: bool | None = None,
    mlp: bool | None = None,
    rope: bool | None = None,
    loss: bool | None = None,
    experts: bool | None = None,
    router: bool | None = None,
    qkv: bool | None = None,
    qk_norm: bool = False,
    hyper: bool | None = None,
    lora: bool | None = None,
    lazy_logits: bool = False,
    max_peak_mb: float | None = None,
    graphs: bool | Sequence[int] = False,
    recompute: str | float | None = None,
    fp8: str | None = None,
    fp8_except: Sequence[str] = (),
    first_last_bf16: bool = False,
    fp8_base_only: bool = False,
    strict: bool = False,
) -> Report:
    """Replace the norms, MLPs, rotary functions, loss head, experts and routers of a model by Tigon's.

    If q, k and v are slices of one projection, one split replaces the slices.

    Args:
        model: a Hugging Face model, or any module built from such parts. PEFT, DDP and `torch.compile`
            wrappers are unwrapped. The model is modified in place.
        norm, mlp, rope, loss, experts, router, qkv, qk_norm, hyper, lora: which slots to replace. router is
            that of experts; qk_norm is the norms of q and k with the rotary embedding (it needs the slots
            norm and rope too); hyper is hyper-connections; lora is PEFT's adapters, also those added later.
            None: replace the slot if the model has it. True: the report also says if nothing was found.
        lazy_logits: also return lazy logits from training forwards without labels, for a loss that you (or
            Trainer's ``compute_loss_func``) compute from ``output.logits``. It stays on until `undo`.
        max_peak_mb: bound of what the loss head allocates in a step, in MiB, as in
            :func:`tigon.linear_cross_entropy`. It holds until `undo`.
        graphs: replay training calls as CUDA graphs (docs/graphs.md). Numbers are the lengths to which rows
            are padded. It stays on until `undo`.
        recompute: what is not kept for the backward but computed again in it, bitwise equal
            (docs/checkpointing.md): "norms", their results; "elementwise", those of gated units too; or the
            fraction, up to 1, of the layers' kept bytes that shall go: as "elementwise", and as many whole
            layers as that takes. It stays on until `undo`.
        fp8: compute the matmuls of Linears in layers in float8: "rowwise", or "rowwise_dw_bf16", which
            leaves those of the weights' gradients unchanged (docs/fp8.md). It stays on until `undo`.
        fp8_except: names of Linears, or of modules that contain them, to leave unchanged.
        first_last_bf16: leave the Linears of the first and of the last layer unchanged.
        fp8_base_only: of frozen weights that are computed in float8 keep only the bytes (docs/fp8.md).
        strict: raise an error if any part of the other slots would keep its own code.

    Returns:
        a `Report` that says what was replaced by what, and what was left and why. A second call replaces the
        parts that are new in the model, also new modules at known places, and updates the same report.

    Raises:
        tigon.Error: nothing was recognised, or with `strict` something was left. Nothing is modified.

    Tigon recognises parts by the structure of their source, not by names; see docs/huggingface.md.
    """
    options = locals()
    given = {slot: options[slot] for slot in SLOTS}
    if not isinstance(model, nn.Module):
        raise Error(f"[apply] model must be a torch.nn.Module, got {_what(model)}")
    check_cap("apply", max_peak_mb=max_peak_mb)
    lengths = _lengths(graphs)
    root = unwrapped(model)
    check_recipe(fp8, root)
    check_recompute(recompute)
    switches = {slot: value for slot, value in given.items() if value is not None}
    switches |= {"lazy_logits": lazy_logits, "first_last_bf16": first_last_bf16}
    check_booleans("apply", **switches, fp8_base_only=fp8_base_only, strict=strict)
    state = root.__dict__.get(STATE)
    report = state.report if state else Report(type(root).__name__)
    if recompute is None and report.recompute is not None:
        recompute = report.recompute.given
    float8 = None
    if fp8 is not None:
        names = [fp8_except] if isinstance(fp8_except, str) else fp8_except
        float8 = Options(fp8, tuple(names), first_last_bf16, fp8_base_only)
    asked = {slot: value is None or bool(value) for slot, value in given.items()}
    asked["qk_norm"] &= asked["norm"] and asked["rope"]
    plan = _plan(root, given, asked, float8, recompute)
    _check(plan, report, strict)
    anew = {slot for slot in SLOTS if asked[slot] or given[slot]}
    _tell(report, plan, anew if float8 is None else anew | {"fp8"})
    if state is None:
        state = root.__dict__[STATE] = State(report)
    state.fp8 = float8 or state.fp8
    _commit(plan, state, lazy_logits, max_peak_mb)
    if asked["lora"]:
        _watch(root)
    _use_graphs(root, report, lengths)
    _tell_wrappers(model, root)
    return report


def _plan(root: nn.Module, given: dict, asked: dict[str, bool], float8: Options | None, recompute) -> Plan:
    """Plan the slots that are asked for; `given`: what the caller said of each slot."""
    plan = Plan(root)
    plan.all_norms = recompute is not None
    for slot, look in SLOTS.items():
        if asked[slot]:
            look(plan)
        if given[slot] and not any(entry.slot == slot for entry in plan.entries):
            why = NO_QK_NORM if slot == "qk_norm" else "nothing of this kind was found"
            plan.add(slot, "", type(root).__name__, why if asked[slot] else NEEDS_NORM_AND_ROPE)
    if float8 is not None:
        plan.fp8(float8)
    if recompute is not None:
        plan.recomputed(recompute)
    return plan


def _tell(report: Report, plan: Plan, slots: set[str]) -> None:
    """Write into the report what was planned for these slots."""
    for entry in plan.entries:
        if entry.slot == "loss" and not entry.replaced and entry.reason != plan.trl:
            report.head_calls.say(f"{entry.path} stays stock: {entry.reason}")
    report.entries[:] = [entry for entry in report.entries if entry.slot not in slots] + plan.entries
    report.notes[:] = _notes(plan.model, report)
    report.recompute = plan.recompute


def _watch(root: nn.Module) -> None:
    """Check for adapters whenever the model is called: they are often added after the patch."""
    arrivals = root.__dict__.setdefault(ARRIVALS, Arrivals())
    arrivals.owners = None  # the models may have changed
    arrivals.changed(root)
    if arrivals.owners and model_forward(root) is None and type(root).forward is not nn.Module.forward:
        bind_model(watched_forward, root, None)


def _lengths(graphs) -> tuple[int, ...] | None:
    """The lengths that `graphs` gives, none for True; None: no graphs."""
    if isinstance(graphs, bool) or graphs is None:
        return () if graphs else None
    lengths = tuple(graphs) if isinstance(graphs, Sequence) and not isinstance(graphs, str) else ()
    fits = bool(lengths) and all(type(length) is int and length > 0 for length in lengths)
    check("apply", fits, "graphs must be True, False or lengths of rows, got {!r}", graphs)
    return lengths


def _use_graphs(root: nn.Module, report: Report, lengths: tuple[int, ...] | None) -> None:
    """Let the patched forward of the whole model replay graphs; drop earlier graphs."""
    held = root.__dict__.get(GRAPHS)
    if held is not None:
        for graphs in filter(None, (vars(module).get(GRAPHS) for module in root.modules())):
            graphs.reset()
            graphs.lengths = lengths or graphs.lengths
    elif lengths is not None and calls_head(root):
        held = use_graphs(root, report.model, lengths)
    elif lengths is not None:
        report.notes.append("no graphs: the forward of the whole model is not replaced (its loss head)")
    report.graphs = held


def _notes(root: nn.Module, report: Report) -> list[str]:
    """Notes that a user should read before the first step."""
    notes = []
    if report.count("loss") and not root.training:
        notes.append("in evaluation mode the head computes logits as in stock: model.train() before training")
    if any(entry.slot == "loss" for entry in report.left) and getattr(root, "is_quantized", False):
        notes.append("the model is quantised: a head left out of it (llm_int8_skip_modules) would be fused")
    return notes


def _what(model) -> str:
    """The kind of an object that was passed instead of a model, and the place where its model may be."""
    if isinstance(model, str):
        return f"the name {model!r} (load it first: AutoModelForCausalLM.from_pretrained({model!r}))"
    if isinstance(model, type):
        return f"the class {model.__name__} (give a model of it)"
    inside = isinstance(getattr(model, "model", None), nn.Module)
    return type(model).__name__ + (" (give its .model)" if inside else "")


def _tell_wrappers(model: nn.Module, root: nn.Module) -> None:
    """Give the present forward to PEFT's adaption prompts, which keep the model's forward as their own."""
    for wrapper in model.modules():
        kept = wrapper.__dict__.get("forward")
        owner = kept.__self__ if isinstance(kept, types.MethodType) else getattr(kept, "module", None)
        if owner is root is not wrapper and model_forward(root) is not None:
            wrapper.__dict__["forward"] = root.forward


def _check(plan: Plan, report: Report, strict: bool) -> None:
    left = [entry for entry in plan.entries if not entry.replaced]
    reasons = "; ".join(sorted({f"{entry.kind}: {entry.reason}" for entry in left}))
    if not report.replaced and len(left) == len(plan.entries):
        raise Error(
            "[apply] model must hold a norm, gated MLP, rotary function or loss head that Tigon "
            f"knows, got {type(plan.model).__name__} ({reasons or 'none found'})"
        )
    left = [entry for entry in left if entry.slot != "fp8"]
    if strict and left:
        reasons = "; ".join(sorted({f"{entry.kind}: {entry.reason}" for entry in left}))
        raise Error(f"[apply] model must be replaced entirely (strict), got left: {reasons}")


def undo(model: nn.Module) -> None:
    """Restore everything that `apply` changed in this model; without `apply` this does nothing."""
    if not isinstance(model, nn.Module):
        raise Error(f"[undo] model must be a torch.nn.Module, got {_what(model)}")
    root = unwrapped(model)
    drop_graphs(root)
    for module in root.modules():
        unbind(module)
        forget_gather(module)
        unpack(module)
        give_back(module)
    root.__dict__.pop(ARRIVALS, None)
    forget_weights(root.parameters())
    state = root.__dict__.pop(STATE, None)
    if state is None:
        return
    switch_back(root, state.experts)
    owners = dict(root.named_modules())
    for path, previous in state.losses.items():
        owner = owners.get(path)
        if owner is None or owner.__dict__.get("_loss_function") is not causal_lm_loss:
            continue  # gone, or another one was set later: not ours to remove
        if previous == ABSENT:
            del owner.__dict__["_loss_function"]
        else:
            owner.__dict__["_loss_function"] = previous
