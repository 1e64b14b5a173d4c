"""The loss head: in training `lm_head` returns lazy logits, and the loss never computes them."""

from __future__ import annotations

import functools
import inspect
import weakref
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from tigon._dtensor import sharded_loss
from tigon._op import is_traced_or_transformed, saves_through_hooks
from tigon.error import check, refuse
from tigon.integrations.transformers.causal_loss import COUNTS, causal_lm_loss, loss_options
from tigon.integrations.transformers.forward import (
    ARRIVALS,
    autocast_dtype,
    bind,
    bind_model,
    blocked,
    bound,
    follows,
    model_forward,
    plain,
    stock,
    tensor_parallel,
    unbind,
    written,
)
from tigon.integrations.transformers.graphs import GRAPHS
from tigon.integrations.transformers.head_operands import head_operands, is_linear, is_lora, is_tokens
from tigon.integrations.transformers.lazy_logits import LazyLogits, LogitsRequest, LossRequest
from tigon.integrations.transformers.recompute import Ledger
from tigon.integrations.transformers.report import HeadCalls, caller
from tigon.integrations.transformers.sharding import (
    gathered_once,
    present,
    refuse_main_grad,
    vocabulary_sharded,
)
from tigon.ops.loss_head.labels import count_labels
from tigon.ops.loss_head.linear_cross_entropy import linear_cross_entropy
from tigon.ops.loss_head.linear_log_prob import linear_log_prob
from tigon.ops.loss_head.operands import TrainedCalls
from tigon.ops.loss_head.tied import lookup

# Hooks of these packages gather weights or move tensors; they do not read the logits.
INFRASTRUCTURE = ("torch.distributed", "deepspeed", "accelerate")


# Advice for a caller that passes no labels, by the prefix of its module's name.
NO_LABELS = "the model was called without labels; "
WITHOUT_LABELS = {
    "transformers.trainer": "a compute_loss_func with F.cross_entropy or nn.CrossEntropyLoss of "
    "output.logits keeps the head fused with TigonTrainerCallback(lazy_logits=True), label_smoothing= too; "
    "label_smoothing_factor reads the logits of the whole vocabulary",
    "trl": "this trainer reads the logits of the whole vocabulary, and no option of apply changes that "
    "(examples/trl_heads.py has subclasses of TRL's GKD, GOLD, ORPO and CPO trainers that read none; "
    "tigon.compat.trl.install() serves its SFT, DPO, KTO, GRPO, RLOO and distillation trainers)",
    "": "give it labels, or, if your loss is F.cross_entropy or nn.CrossEntropyLoss of output.logits, "
    "apply(lazy_logits=True); log_softmax, softmax and logsumexp of them read the whole vocabulary "
    "(tigon.linear_log_prob takes hidden states and the head's weight)",
}
NOT_PRESENT = (
    "the head's weight must be whole when its logits are read, got it sharded or freed "
    "(read output.logits before backward())"
)


@dataclass(frozen=True)
class LogitsUse:
    """How a running forward of a model uses its logits."""

    skip: bool | None  # skip_logits of this model or of the one around it
    labels: bool  # passed to it or to the model around it
    drop: bool  # skip_logits=True was its own: no logits in the output
    counts: dict[str, torch.Tensor | None]  # of COUNTS, its own or of the model around it; None until known


@dataclass
class HeadSpec:
    """State of one patched head."""

    calls: HeadCalls
    ledger: Ledger
    compiled: bool = False  # its model's loss_function is Tigon's, so tracing meets no torch function
    always: bool = False  # lazy logits without labels too
    max_peak_mb: float | None = None  # of its loss
    without_labels: str | None = None  # advice for the first caller that passed none
    once: str | None = None  # why its weight is in memory only during the first call
    forwards: dict[nn.Module, LogitsUse] = field(
        default_factory=dict
    )  # of models around it, the innermost last

    def answer(self, module: nn.Module, hidden, request: LossRequest | LogitsRequest):
        """Compute the loss or the logits, even if ``module.forward`` has changed."""
        check("lazy_logits", present(module), NOT_PRESENT)
        loss = isinstance(request, LossRequest)
        return _loss(module, self, hidden, request) if loss else stock(module, hidden)

    def __deepcopy__(self, memo):
        return self  # PEFT copies heads out of a patched model: they count into the same report


@follows
def head_forward(module: nn.Module, spec: HeadSpec, hidden, request=None):
    """Run a patched head: lazy logits in training, or the answer to a request."""
    if isinstance(request, LossRequest | LogitsRequest):
        return spec.answer(module, hidden, request)
    use = next(reversed(spec.forwards.values()), None)
    skip = None if use is None else use.skip
    if not (module.training and torch.is_grad_enabled() if skip is None else skip):
        return stock(module, hidden)
    if bound(module) is None and not torch.compiler.is_compiling():
        return stock(module, hidden)  # wrapped: the model's forward has reported it
    reason = _why_computed(module, spec, use, hidden)
    if reason is not None:
        spec.calls.compute(reason)
        return stock(module, hidden)
    autocast = autocast_dtype(hidden.device.type)
    if not torch.compiler.is_compiling():
        spec.calls.lazy += 1
    columns, dtype, rows = module.weight.shape[0], autocast or hidden.dtype, not vocabulary_sharded(module)
    return LazyLogits(module, hidden, columns, dtype, spec.calls, autocast, rows)


def _why_computed(module, spec, use, hidden) -> str | None:
    """Why logits are computed at once although they could be lazy, or None."""
    if use is None:
        return "the head was called outside of its model's forward (call the model, with labels)"
    if not (use.labels or spec.always):
        if spec.without_labels is None and not torch.compiler.is_compiling():
            name = caller()
            spec.without_labels = next(
                text for start, text in WITHOUT_LABELS.items() if name.startswith(start)
            )
        return NO_LABELS + (spec.without_labels or WITHOUT_LABELS[""])
    own = bound(module)
    if own is None or not own.replaces_own():
        return "the head, or its class, has another forward than apply saw, which may change the logits"
    if getattr(module, "weight", None) is None:
        return "PEFT's layer of the head is around another module than a Linear"
    if vocabulary_sharded(module):
        if not plain(hidden) or torch.compiler.is_compiling():
            return "the hidden states are sharded, or torch.compile traces the tensor-parallel head"
    elif not plain(hidden, module.weight):
        return (
            f"{type(hidden).__name__} times {type(module.weight).__name__} is not a matmul of plain tensors"
        )
    if spec.once is not None:
        return spec.once
    if not is_linear(module) and head_operands(module) is None:
        return (
            "the adapter of the head does more than two matmuls (lora_dropout=0, or leave the head out), or "
            "hooks or another forward watch a part of it"
        )
    if torch.compiler.is_compiling():
        if not spec.compiled:
            return "torch.compile traces a loss that is not transformers' causal one (compile the layers)"
    elif _in_reentrant_checkpoint():
        return "a reentrant checkpoint takes tensors only (use_reentrant=False)"
    if torch.jit.is_tracing():
        return "torch.jit traces tensors only"
    if hidden.dtype != module.weight.dtype and autocast_dtype(hidden.device.type) is None:
        return "hidden states and the head's weight differ in dtype"  # the forward raises its own error
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    if module._backward_hooks or module._backward_pre_hooks or any(map(_foreign, hooks)):
        return "hooks on the head expect one call with logits (remove them)"
    return None


def _in_reentrant_checkpoint() -> bool:
    """Whether a backward pass runs a forward again to differentiate the tensors it returns."""
    running = torch._C._current_graph_task_id() != -1
    return running and not saves_through_hooks()


def _foreign(hook) -> bool:
    """Whether a hook belongs to code that expects logits in each call."""
    hook = getattr(hook, "func", hook)  # functools.partial
    return not (getattr(hook, "__module__", None) or "").startswith(INFRASTRUCTURE)


def _loss(module, spec, hidden, request):
    counts = next((use.counts for use in reversed(spec.forwards.values())), None)
    if not counts:
        return _linear_loss(module, spec, hidden, request)
    request.options["outputs"] = ("loss", "predicted", "correct")
    result = _linear_loss(module, spec, hidden, request)
    accuracy = result.correct.sum() / (result.predicted >= 0).sum()
    known = {"token_accuracy": accuracy, "predicted_tokens": result.predicted.reshape(-1)}
    counts.update({field: known[field] for field in counts})
    return result.loss


def _linear_loss(module, spec, hidden, request):
    operands = head_operands(module)
    check(
        "lazy_logits",
        operands is not None,
        "the loss must be computed before the parts of the head get "
        "hooks or another forward, got some since the forward pass",
    )
    weight, bias, lora = operands
    columns, dtype = request.columns, request.dtype
    sharded = not plain(weight)
    if columns is not None and not sharded:
        weight, bias = weight[:columns], None if bias is None else bias[:columns]
        lora = None if lora is None else (lora[0], lora[1][:columns], lora[2])
    if dtype is not None:
        hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    if request.added is not None:  # the original code adds it unrounded to the rounded logits
        added = request.added[: weight.shape[0]]
        added = added.to(torch.promote_types(added.dtype, torch.float32))
        bias = added if bias is None else bias + added
    target = request.target  # on the CPU: counted there, then moved
    target = target if target.device.type == "cpu" else target.to(hidden.device)
    spec.ledger.note(hidden, weight.to_local() if sharded else weight, spec.max_peak_mb)
    device = hidden.device.type
    off = nullcontext() if autocast_dtype(device) is None else torch.autocast(device, enabled=False)
    options = {"bias": bias, "max_peak_mb": spec.max_peak_mb, **request.options}
    scaling = options.pop("token_scaling", False)
    words = "use_token_scaling must not be given where the head is sharded over a vocabulary, got True"
    check("apply", not (scaling and sharded), words)
    eager = not torch.compiler.is_compiling()
    others = TrainedCalls.number if eager else 0
    with off:  # the casts are done; autocast must not add its own
        if sharded:
            args = hidden, weight, target
            return sharded_loss("linear_cross_entropy", linear_cross_entropy, args, options, vocab=columns)
        options["lora"] = lora
        if scaling:
            same = ("bias", "lora", "softcap", "logit_scale", "ignore_index", "shift", "max_peak_mb")
            with torch.no_grad():
                log_prob = linear_log_prob(hidden, weight, target, **{name: options[name] for name in same})
            options["token_weight"] = log_prob.exp()
        loss = linear_cross_entropy(hidden, weight, target, **options)
    if eager:
        TrainedCalls.number = others  # the report counts this one as its own
    return loss


def tie(owner: nn.Module, linears) -> None:
    """Let the embedding add its gradient to that of a head with the same weight."""
    try:
        table = owner.get_input_embeddings() if isinstance(owner, PreTrainedModel) else None
    except NotImplementedError:  # the model does not say
        return
    if getattr(type(table), "forward", None) is not nn.Embedding.forward or "forward" in vars(table):
        return
    plain_table = table.max_norm is None and not (table.sparse or table.scale_grad_by_freq)
    if plain_table and any(table.weight is linear.weight for linear in linears if is_linear(linear)):
        bind(table_forward, table, None)


def table_forward(module: nn.Embedding, spec, ids):
    """Forward of an embedding whose table is a head's weight too."""
    weight = module.weight
    trained = torch.is_grad_enabled() and weight.requires_grad and weight.is_leaf and plain(ids, weight)
    if not trained or hasattr(weight, "ds_id") or is_traced_or_transformed():
        return stock(module, ids)
    if not weight.numel() or weight.dtype == torch.float64:
        return stock(module, ids)
    return lookup(ids, weight, module.padding_idx)


def attach(owner: nn.Module, spec: HeadSpec) -> None:
    """Let a model tell its head in every forward how the logits are used.

    It does so in its forward and not in hooks: PEFT before 0.21 calls `model.forward`.
    """
    present = model_forward(owner)
    if present is None or present.function is watched_forward:
        names = tuple(inspect.signature(type(owner).forward).parameters)[1:]
        bind_model(forward_of_model, owner, (spec, names))


def calls_head(model: nn.Module) -> bool:
    """Whether a model's forward is the one of a patched head."""
    forward = model_forward(model)
    return forward is not None and forward.function is forward_of_model


def watched_forward(module: nn.Module, spec: None, *args, **kwargs):
    """Forward of a model without a patched head."""
    look_for_adapters(module)
    return stock(module, *args, **kwargs)


def look_for_adapters(model: nn.Module) -> None:
    """Let a patched model find adapters that were added later."""
    arrivals = model.__dict__.get(ARRIVALS)
    if arrivals is None:
        return
    if torch.compiler.is_compiling():
        _look_while_tracing(arrivals.number)
    else:
        arrivals.look(model)


@torch.compiler.assume_constant_result
def _look_while_tracing(number: int) -> None:
    """Look for adapters before the layers are traced."""
    watched = WATCHED.get(number)
    if watched is not None:
        watched.__dict__[ARRIVALS].look(watched)


WATCHED: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()


def forward_of_model(module: nn.Module, head: tuple[HeadSpec, tuple[str, ...]], *args, **kwargs):
    """Forward of a patched model, which tells its head whether a loss will take its logits.

    This is so if labels are given (any argument with "labels" in its name) or if apply was told so. The
    keyword ``skip_logits`` (Liger's name, which TRL passes) is removed: True makes logits lazy in evaluation
    too, and leaves them out of the output. The keywords of `COUNTS` are also removed: the counts of a fused
    loss become fields of the output, which then has no logits in training.
    """
    spec, names = head
    if module in spec.forwards:  # inside of itself
        return stock(module, *args, **kwargs)
    look_for_adapters(module)
    graphs = module.__dict__.get(GRAPHS)
    if graphs is not None and not graphs.running and not torch.compiler.is_compiling():
        plain = functools.partial(forward_of_model, module, head)
        return graphs.call(module, spec.calls, names, plain, args, kwargs)
    counts = {field: None for name, field in COUNTS.items() if kwargs.pop(name, None)}
    use = before_forward(module, spec, {**dict(zip(names, args, strict=False)), **kwargs}, counts)
    kwargs.pop("skip_logits", None)
    spec.forwards[module] = use
    try:
        output = stock(module, *args, **kwargs)
    finally:
        spec.forwards.pop(module, None)
    if use.drop and isinstance(output, ModelOutput):
        output = type(output)(**{name: value for name, value in output.items() if name != "logits"})
    if isinstance(output, ModelOutput):
        for field, value in counts.items():
            if value is not None:
                output[field] = value
    return output


def before_forward(module: nn.Module, spec: HeadSpec, given: dict, counts: dict) -> LogitsUse:
    """How a model's forward uses its logits, from the arguments that it was given.

    Labels on the GPU are counted before the layers run. The loss waits for their number at most until the
    device starts the layers, and leaves out the rows that do not count.
    """
    given = {name: value for name, value in given.items() if value is not None}
    skip = given.pop("skip_logits", None)
    labels = any("labels" in name for name in given)
    if skip is None and counts and labels and module.training:
        skip = True  # as Liger
    check("apply", labels or not skip, "labels must be given with skip_logits=True, got {}", sorted(given))
    if loss_options(given) and module.loss_function is not causal_lm_loss:
        words = (
            "options of the loss must be given to a model with transformers' causal-LM loss, got {} for {}"
        )
        refuse("apply", words, sorted(given), type(module).__name__)
    head = output_head(module)
    spec.once = gathered_once(head)
    patched = _patched(head, spec)
    if isinstance(patched, str):
        if (labels or spec.always) and module.training and torch.is_grad_enabled():
            spec.calls.compute(patched)
        patched = []
    for linear in patched:
        refuse_main_grad(module, linear)
    running = list(spec.forwards.values())  # of the models around this one
    around = running[-1] if running else LogitsUse(None, False, False, {})
    spec.ledger.open()
    if not torch.compiler.is_compiling() and (module.training or skip):
        shifted = given.get("shift_labels")
        target = given.get("labels") if shifted is None else shifted
        if isinstance(target, torch.Tensor) and target.is_cuda and target.ndim:
            count_labels(target, given.get("ignore_index", -100), shift=shifted is None)
    skip_here = around.skip if skip is None else skip
    return LogitsUse(skip_here, labels or around.labels, bool(skip), counts or around.counts)


def output_head(model: nn.Module) -> nn.Module | None:
    """The output head of a model, or of the only model right inside it that has one."""
    if not isinstance(model, PreTrainedModel):
        return None
    head = model.get_output_embeddings()
    inner = () if head is not None else [output_head(child) for child in model.children()]
    heads = [found for found in inner if found is not None]
    return heads[0] if len(heads) == 1 else head


def _patched(head: nn.Module, spec: HeadSpec) -> list[nn.Module] | str:
    """The patched Linears of an output head; a new one (after resizing) is patched now.

    If it cannot be patched, the reason (another class, quantised, another forward).
    """
    linears = [] if head is None else _behind(head)
    patched = [linear for linear in linears if bound(linear) is not None]
    if torch.compiler.is_compiling() or len(patched) == len(linears):
        return patched
    linears = plan_head(head)
    if isinstance(linears, str):
        inside = any(bound(module) is not None for module in head.modules())  # in a wrapper, such as FSDP1's
        return patched if inside else linears
    bind_head(linears, spec)
    return linears


def bind_head(linears: list[nn.Module], spec: HeadSpec) -> None:
    """Patch the modules of an output head that are not patched yet."""
    for linear in linears:
        if _adapted(linear):
            unbind(linear.base_layer)  # patched before an adapter was put around it
        own = bound(linear)
        if own is None or not own.replaces_own():
            bind(head_forward, linear, spec, above=True)


def _behind(head: nn.Module) -> list[nn.Module]:
    """The modules of an output head: the head, or the modules in PEFT's wrapper."""
    if hasattr(head, "modules_to_save") and hasattr(head, "original_module"):
        return [*head.modules_to_save.values(), head.original_module]
    return [getattr(head, "token_adapter", head)]


def _adapted(module: nn.Module) -> bool:
    """Whether it is one of PEFT's layers around a Linear that `head_operands` knows."""
    return is_lora(module) or is_tokens(module)


def plan_head(head: nn.Module) -> list[nn.Linear] | str:
    """The Linear modules behind an output head, or why it is left."""
    linears = _behind(head)
    return next(filter(None, map(_unfit, linears)), linears)


def _unfit(head: nn.Module) -> str | None:
    if hasattr(head, "base_layer") and not _adapted(head):
        return f"{type(head).__name__} adds an adapter to the head; its logits must be computed"
    if not is_linear(head) and not _adapted(head):
        return f"the head is {type(head).__name__}, not nn.Linear"
    if _adapted(head) and type(head).forward is not written(type(head)):
        return f"{type(head).__name__} has another forward than it was written with"
    shape = tuple(getattr(head.weight, "ds_shape", head.weight.shape))  # ZeRO-3 keeps it there
    if not head.weight.is_floating_point() or len(shape) != 2:
        return f"the head's weight is {head.weight.dtype} of {shape}: quantised or flattened"
    return None if tensor_parallel(head) else blocked(head)
