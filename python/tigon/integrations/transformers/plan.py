"""Plans what `apply` replaces in a model; `patch` then replaces it. Nothing in the model is modified here."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import NamedTuple

from torch import nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from tigon.integrations import trl
from tigon.integrations.transformers.causal_loss import causal_lm_loss
from tigon.integrations.transformers.expert_adapters import is_wrapper, plan_wrapper, wrapper_forward
from tigon.integrations.transformers.experts import plan_experts
from tigon.integrations.transformers.forward import STATE, blocked, bound, plain
from tigon.integrations.transformers.fp8 import Options, fp8_forward, plan_fp8
from tigon.integrations.transformers.head import output_head, plan_head
from tigon.integrations.transformers.hyper_connections import hyper_forward, plan_hyper, plan_streams
from tigon.integrations.transformers.lora import LoraSpec, find_siblings, lora_forward, plan_lora
from tigon.integrations.transformers.mlp import mlp_forward, plan_mlp
from tigon.integrations.transformers.norms import norm_forward, plan_norm
from tigon.integrations.transformers.qk_norm import plan_qk_norm
from tigon.integrations.transformers.qkv_split import plan_slices
from tigon.integrations.transformers.recompute import Recompute, linear_forward
from tigon.integrations.transformers.report import Entry
from tigon.integrations.transformers.rewriting import rewritten_forward
from tigon.integrations.transformers.rope import plan_rotary, rewrite, rotary_callers
from tigon.integrations.transformers.routers import plan_router, router_forward

NO_QK_NORM = "no attention normalises each head of q and k right before a rotary call"
NEEDS_NORM_AND_ROPE = "qk_norm needs the slots norm and rope"


class Replacement(NamedTuple):
    """A function that replaces a method of a module, and the description of the module that it gets."""

    function: Callable
    module: nn.Module
    spec: object
    name: str = "forward"


class Plan:
    """Everything that `apply` would do to a model."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.entries: list[Entry] = []
        self.binds: list[Replacement] = []
        self.freed: list = []  # modules that were replaced before and are left now
        self.packed: list = []  # Linears of which only the float8 bytes are kept
        self.turns: list = []  # (module, its method, names of the rotary functions to be fused in it)
        self.losses: list[str] = []  # paths of models whose loss function is transformers' causal one
        self.heads: list = []  # (model, Linears of its head)
        self.trl: str | None = None  # why Tigon does not replace TRL's heads
        self.recompute: Recompute | None = None
        self.places: list = []  # layers among which some are checkpointed
        self.all_norms = False  # LoRA layers keep no result of a norm

    def modules(self, slot, *rows):
        """Check all modules with each row's plan, and bind its function to those that the plan accepts.

        A plan returns (spec of the function, its name), the reason why a module is left, or None for a module
        of another kind.
        """
        for plan, function in rows:
            taken = {id(bind.module) for bind in self.binds if bind.name == "forward"}
            for path, module in self.model.named_modules():
                verdict = None if id(module) in taken else plan(module)
                if isinstance(verdict, tuple):
                    self.binds.append(Replacement(function, module, verdict[0]))
                elif _is_left(module, function, verdict):
                    self.freed.append(module)
                if verdict is not None:
                    self.add(slot, path, type(module).__name__, verdict)

    def experts(self):
        for path, module in self.model.named_modules():
            verdict = plan_experts(module)
            if isinstance(verdict, tuple):
                function, target, name, spec, _ = verdict
                self.binds.append(Replacement(function, target, spec, name))
            if verdict is not None:
                self.add("experts", path, type(module).__name__, verdict)

    def heads_of_owners(self) -> set[int]:
        """Identities of the output heads of all models inside."""
        owners = (m for m in self.model.modules() if isinstance(m, PreTrainedModel))
        return {id(owner.get_output_embeddings()) for owner in owners}

    def lora(self):
        """Plan LoRA layers, except output heads, whose loss includes their adapter."""
        heads, first = self.heads_of_owners(), len(self.binds)
        planned = {id(bind.module): bind.function for bind in self.binds}
        wrappers = [module for module in self.model.modules() if is_wrapper(module)]
        inner = {id(module.base_layer) for module in wrappers}
        outer = {id(module) for module in wrappers if id(module) not in inner}
        heads |= {id(module) for module in wrappers}
        self.modules(
            "lora",
            (lambda m: None if id(m) in heads else plan_lora(m), lora_forward),
            (lambda m: plan_wrapper(m, planned) if id(m) in outer else None, wrapper_forward),
        )
        specs = {id(bind.module): bind.spec for bind in self.binds[first:] if bind.function is lora_forward}
        for _, module, spec, _ in self.binds[first:]:
            known = getattr(bound(module), "spec", None)
            if isinstance(spec, LoraSpec) and isinstance(known, LoraSpec):
                spec.fp8 = known.fp8
            if isinstance(spec, LoraSpec):
                spec.all_norms = self.all_norms
        for parent in self.model.modules():
            names = {name: specs[id(c)] for name, c in parent.named_children() if id(c) in specs}
            siblings = find_siblings(parent, [*names])
            for name in siblings.names if siblings else ():
                names[name].name, names[name].siblings = name, siblings

    def fp8(self, options: Options):
        heads = self.heads_of_owners()
        bases = {id(b.module.base_layer): b.spec for b in self.binds if isinstance(b.spec, LoraSpec)}
        for path, module, verdict in plan_fp8(self.model, heads, {*bases}, options):
            there, spec = bound(module), bases.get(id(module))
            taken = isinstance(verdict, tuple)
            if spec is not None:
                spec.fp8 = verdict[0] if taken else None
            elif taken:
                self.binds.append(Replacement(fp8_forward, module, verdict[0]))
            if there is not None and there.function is fp8_forward and not (taken and spec is None):
                self.freed.append(module)
            if taken and verdict[0].packs:
                self.packed.append(module)
            self.add("fp8", path, type(module).__name__, verdict)

    def recomputed(self, given):
        self.recompute = Recompute(given)
        taken = {id(bind.module): bind.function for bind in self.binds if bind.name == "forward"}
        for linear, spec in self.recompute.plan(self.model, self.heads_of_owners(), taken):
            self.binds.append(Replacement(linear_forward, linear, spec))
        self.recompute.adapters = sum(function is lora_forward for function in taken.values())
        self.places = list(self.recompute.places(self.model))

    def add(self, *found):
        self.entries.append(Entry.of(*found))

    def rope(self):
        verdicts, turned, left = {}, set(), []
        callers = {kind: rotary_callers(kind) for kind in {type(m) for m in self.model.modules()}}
        for path, module in self.model.named_modules():
            for method, functions in callers[type(module)].items():
                verdicts |= {key: plan_rotary(key, f) for key, f in functions.items() if key not in verdicts}
                keys = [key for key in functions if isinstance(verdicts[key], tuple)]
                if not keys:
                    continue
                names = tuple(name for _, name in keys)
                reason = blocked(module) if method == "forward" else None
                if reason is None and rewrite(inspect.getattr_static(type(module), method), names) is None:
                    reason = f"its {method} is not a function with source, which names {', '.join(names)}"
                if reason is not None:
                    left.append((path, type(module).__name__, reason))
                    continue
                self.turns.append((module, method, names))
                turned.update(keys)
        for key, verdict in sorted(verdicts.items()):
            if key in turned or isinstance(verdict, str):
                self.add("rope", ".".join(key), key[1], verdict)
        for where in left:
            self.add("rope", *where)

    def loss(self):
        self.trl = trl.take(has_loss)
        paths = {id(module): path for path, module in self.model.named_modules()}
        verdicts = {}
        for path, owner in self.model.named_modules():
            head = output_head(owner)
            if head is None:
                continue
            if owner.loss_function in (ForCausalLMLoss, causal_lm_loss):
                self.losses.append(path)
            if id(head) not in verdicts and id(head) in paths:
                linears = verdicts[id(head)] = plan_head(head)
                left = isinstance(linears, str)
                verdict = linears if left else ("tigon.linear_cross_entropy, lazy logits",)
                if trl.fuses(owner):
                    verdict = self.trl or ("tigon.linear_log_prob in TRL's head",)
                self.add("loss", paths[id(head)], type(head).__name__, verdict)
            linears = verdicts.get(id(head))
            if isinstance(linears, list):
                self.heads.append((owner, linears))


def _is_left(module: nn.Module, function, verdict: str | None) -> bool:
    """Whether a module that `function` replaced is left now; unknown if it is sharded or freed."""
    there = bound(module)
    if there is None or there.function is not function:
        return False
    whole = all(plain(p) and p.numel() for p in module.parameters())
    return not there.replaces_own() or (isinstance(verdict, str) and whole)


# In this order: later plans skip a module that an earlier one has taken.
SLOTS = {
    "norm": lambda plan: plan.modules("norm", (plan_norm, norm_forward)),
    "mlp": lambda plan: plan.modules("mlp", (plan_mlp, mlp_forward)),
    "experts": Plan.experts,
    "router": lambda plan: plan.modules("router", (plan_router, router_forward)),
    "qkv": lambda plan: plan.modules("qkv", (plan_slices, rewritten_forward)),
    "qk_norm": lambda plan: plan.modules("qk_norm", (plan_qk_norm, rewritten_forward)),
    "hyper": lambda plan: plan.modules(
        "hyper", (plan_hyper, hyper_forward), (plan_streams, rewritten_forward)
    ),
    "lora": Plan.lora,
    "rope": Plan.rope,
    "loss": Plan.loss,
}


def has_loss(model) -> bool:
    """Whether Tigon computes the loss of a model, which may be wrapped."""
    state = getattr(unwrapped(model), "__dict__", {}).get(STATE)
    return state is not None and state.report.count("loss") > 0


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside wrappers of PEFT, torch.compile, DDP and FSDP1."""
    while True:
        if isinstance(model, PreTrainedModel) or not isinstance(model, nn.Module):
            return model
        if callable(getattr(model, "get_base_model", None)):
            inner = model.get_base_model()
        else:
            inner = model._modules.get("_orig_mod") or model._modules.get("module")
        if inner is None or inner is model:
            return model
        model = inner
