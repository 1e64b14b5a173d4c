"""Several heads over one trunk, each against labels at its own distance (multi-token prediction).

Calls :func:`tigon.linear_cross_entropy` for one head after another; each uses the memory of the last one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call

from tigon._dtensor import is_dtensor
from tigon._op import has_kernel, is_transformed, once, refuse_tangents, transformable
from tigon.error import check
from tigon.ops import arguments
from tigon.ops.arguments import kind_of, one_each
from tigon.ops.loss_head.autograd import scale_gradients
from tigon.ops.loss_head.labels import check_shift, labels_of, shifted
from tigon.ops.loss_head.linear_cross_entropy import linear_cross_entropy
from tigon.ops.loss_head.linear_loss import graph_leaves
from tigon.ops.loss_head.operands import check_lora
from tigon.ops.loss_head.plan import MIB, Sizes, check_cap, check_unbounded, plan, with_head

_OP = "multi_token_loss"
_REDUCTIONS = ("mean", "sum")
_WIDE = {torch.bfloat16: torch.float32, torch.float16: torch.float32}


class MultiTokenLoss(NamedTuple):
    """The results of :func:`tigon.multi_token_loss`."""

    loss: torch.Tensor  # float32 scalar, differentiable
    losses: torch.Tensor  # [k] float32, of each head, without its coefficient; detached
    accuracies: torch.Tensor  # [k] float32, share of the rows that count whose label is the first argmax


class _TokenHead(NamedTuple):
    """One head: its layers, the operands of its last matmul, and the options of its loss."""

    layers: tuple[Callable[[torch.Tensor], torch.Tensor], ...]
    weight: torch.Tensor
    bias: torch.Tensor | None
    coefficient: float
    options: dict[str, Any]  # of linear_cross_entropy

    def parameters(self) -> list[torch.Tensor]:
        """Its parameters, without the operands of the matmul."""
        return [p for layer in self.layers if hasattr(layer, "parameters") for p in layer.parameters()]

    def tensors(self) -> list[torch.Tensor]:
        """Its tensors that need a gradient."""
        given = [*self.parameters(), self.weight, self.bias, *(self.options["lora"] or ())[:2]]
        return [t for t in given if t is not None and t.requires_grad]


def _parts(i, head):
    """Return layers, weight and bias of a head in any of its forms."""
    if isinstance(head, torch.Tensor):
        return (), head, None
    if isinstance(head, nn.Linear):
        return (), head.weight, head.bias
    if isinstance(head, nn.Sequential) and len(head) and isinstance(head[-1], nn.Linear):
        return tuple(head)[:-1], head[-1].weight, head[-1].bias
    pair = isinstance(head, (tuple, list)) and len(head) in (2, 3)
    pair = pair and (head[0] is None or callable(head[0]))
    forms = "tensors (weights), Linears, Sequentials that end in one or (module, weight[, bias])"
    check(_OP, pair, "heads must be " + forms + ", got {} at {}", kind_of(head), i)
    module, weight, bias = (*head, None)[:3]
    return () if module is None else (module,), weight, bias


def _token_head(i, head, coefficient, labels, options) -> _TokenHead:
    """Check a head and the options of its loss."""
    number = isinstance(coefficient, (float, int)) and not isinstance(coefficient, bool)
    check(_OP, number, "coefficients[{}] must be a number, got {}", i, kind_of(coefficient))
    arguments.check_number(_OP, f"coefficients[{i}]", coefficient)
    check_shift(_OP, options["shift"], options["position_ids"], labels)
    layers, weight, bias = _parts(i, head)
    arguments.check_float(_OP, f"heads[{i}]'s weight", weight)
    check(_OP, weight.dim() == 2, "heads[{}]'s weight must be [V, H], got {}", i, weight.shape)
    for name, t in (("weight", weight), ("bias", bias)):
        words = name + " must be a plain dense tensor, got a DTensor (use {}.to_local())"
        check(_OP, not is_dtensor(t), words, name)
    check_lora(_OP, options["lora"], weight, weight)
    return _TokenHead(layers, weight, bias, float(coefficient), options)


def _apply_layers(i, head, x, leaves=None):
    """Compute the hidden states of a head; `leaves`, by parameter id, replace its parameters."""
    h = x
    for layer in head.layers:
        if leaves and isinstance(layer, nn.Module):
            own = {name: leaves[id(p)] for name, p in layer.named_parameters() if id(p) in leaves}
            h = functional_call(layer, own, (h,))
        else:
            h = layer(h)
    check(_OP, isinstance(h, torch.Tensor), "heads[{}] must return a tensor, got {}", i, kind_of(h))
    wanted = (*x.shape[:-1], head.weight.shape[-1])
    words = "heads[{}] must return {} to fit its weight {}, got {}"
    check(_OP, tuple(h.shape) == wanted, words, i, wanted, head.weight.shape, h.shape)
    return h


def _loss_of(h, labels, head):
    """Compute loss and accuracy of one head."""
    options = head.options
    out = linear_cross_entropy(h, head.weight, labels, bias=head.bias, outputs=("loss", "correct"), **options)
    targets = shifted(labels, options["ignore_index"], options["shift"], options["position_ids"])
    return out.loss, out.correct.sum() / targets.ne(options["ignore_index"]).sum()


def _sum(heads, losses):
    """Add the losses times their coefficients; a head of coefficient 0 is left out, even if NaN."""
    parts = [loss * head.coefficient for head, loss in zip(heads, losses, strict=True) if head.coefficient]
    return sum(parts[1:], parts[0]) if parts else losses[0].detach() * 0.0


class _Fork(torch.autograd.Function):
    """hidden for each head: gradients are summed in the heads' order, in float32 if they have 16 bits."""

    @staticmethod
    def forward(x, k):
        return tuple(x.view_as(x) for _ in range(k))

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, first, *others):
        total = first.float()
        for gradient in others:
            total = total + gradient
        return total.to(first.dtype), None


_transformed_fork = transformable(_OP, "fork", _Fork.forward, _Fork.setup_context, _Fork.backward)


def _composed(hidden, heads, labels):
    """Head by head, differentiated by autograd: the tensors that each head saves live until the backward."""
    active = sum(head.coefficient != 0 for head in heads)
    plain = hidden.dtype == torch.float64 or not torch.is_grad_enabled()
    forked = active > 1 and hidden.requires_grad and not plain
    fork = _Fork.apply if torch.compiler.is_compiling() else _transformed_fork
    inputs = iter(fork(hidden, active) if forked else (hidden,) * active)
    losses, accuracies = [], []
    for i, head in enumerate(heads):
        if head.coefficient:
            loss, accuracy = _loss_of(_apply_layers(i, head, next(inputs)), labels, head)
        else:
            with torch.no_grad():
                loss, accuracy = _loss_of(_apply_layers(i, head, hidden), labels, head)
        losses.append(loss)
        accuracies.append(accuracy)
    return _sum(heads, losses), torch.stack([loss.detach() for loss in losses]), torch.stack(accuracies)


def _refuse_others(i, h, known):
    """Refuse tensors in a head's graph that would lose their gradient."""
    words = "heads[{}] must use no tensor that needs a gradient but its input and its module's parameters, "
    for leaf in graph_leaves(h):
        check(_OP, id(leaf) in known, words + "got one of {}", i, leaf.shape)


def _on_leaves(head, leaves):
    """The head with leaves for the operands of its matmul."""
    weight, bias = (leaves.get(id(t), t) for t in (head.weight, head.bias))
    lora = head.options["lora"]
    lora = lora and (*(leaves.get(id(t), t) for t in lora[:2]), lora[2])
    return head._replace(weight=weight, bias=bias, options=head.options | {"lora": lora})


class _Gradients:
    """The gradients of all heads so far; those of a shared tensor are summed in float32."""

    def __init__(self, uses: list[list[int]]) -> None:
        self.uses = Counter(key for used in uses for key in used)
        self.of: dict[int, torch.Tensor] = {}
        self.memory: set[int] = set()

    def add(self, key: int, tensor: torch.Tensor, gradient: torch.Tensor | None) -> None:
        if gradient is None:
            return
        if key in self.of:
            self.of[key].add_(gradient)
            return
        at = gradient.untyped_storage().data_ptr()
        if self.uses[key] > 1:
            dtype = _WIDE.get(tensor.dtype, tensor.dtype)
            gradient = torch.empty(tensor.shape, dtype=dtype, device=tensor.device).copy_(gradient)
        elif at in self.memory or not gradient.is_contiguous():  # a tensor scaled in place owns its memory
            gradient = gradient.clone(memory_format=torch.contiguous_format)
        else:
            self.memory.add(at)
        self.of[key] = gradient


class _InTurn(torch.autograd.Function):
    """Computes the gradients of each head in the forward, so that all heads use the memory of one.

    They are gradients of leaves that replace the caller's tensors, whose hooks run in the backward.
    """

    @staticmethod
    def forward(ctx, heads, labels, hidden, *tensors):
        active = [head for head in heads if head.coefficient]
        uses = [[id(hidden), *{id(t) for t in head.tensors()}] for head in active]
        total, losses, accuracies = _Gradients(uses), [], []
        for i, head in enumerate(heads):
            with torch.set_grad_enabled(head.coefficient != 0):
                x = hidden.detach().requires_grad_(hidden.requires_grad)
                leaves = {id(t): t.detach().requires_grad_() for t in head.tensors()}
                h = _apply_layers(i, head, x, leaves)
                if h.grad_fn is not None:
                    _refuse_others(i, h, {id(x), *map(id, leaves.values())})
                loss, accuracy = _loss_of(h, labels, _on_leaves(head, leaves))
            losses.append(loss.detach())
            accuracies.append(accuracy)
            if not loss.requires_grad:
                continue
            if x.requires_grad:
                leaves[id(hidden)] = x
            upstream = torch.full_like(loss, head.coefficient)
            del h
            gradients = torch.autograd.grad(loss, list(leaves.values()), upstream, allow_unused=True)
            for (key, tensor), gradient in zip(leaves.items(), gradients, strict=True):
                total.add(key, tensor, gradient)
            del gradients, gradient
        ctx.dtypes = [t.dtype for t in (hidden, *tensors)]
        ctx.save_for_backward(*(total.of.get(id(t)) for t in (hidden, *tensors)))
        results = _sum(heads, losses), torch.stack(losses), torch.stack(accuracies)
        ctx.mark_non_differentiable(*results[1:])
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    @once(_OP)
    def backward(ctx, dloss, *_):
        if dloss is None:
            return (None,) * (2 + len(ctx.dtypes))
        kept = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return None, None, *(_scaled(dloss, gradient, dtype) for gradient, dtype in kept)


def _scaled(dloss, gradient, dtype):
    """``gradient * dloss`` rounded once; in place if possible, which costs nothing for 1."""
    if gradient is None:
        return None
    if gradient.dim() == 0 or gradient.dtype not in (torch.float32, torch.bfloat16):
        return (gradient * dloss).to(dtype)
    empty = [gradient.new_empty(0, dtype=torch.float32) for _ in range(4)]
    gradients = (torch.ones_like(dloss), empty[0], gradient, *empty[1:])
    return scale_gradients(dloss, gradients, dtype, torch.float32)[1]


def _within_peak(hidden, heads, max_peak_mb):
    """The heads, each with the peak that the gradients of those before it leave; an error names the least."""
    rows, kept, least, bounded = hidden[..., 0].numel(), {}, 0, []
    uses = Counter(id(t) for head in heads if head.coefficient for t in (hidden, *head.tensors()))
    for head in heads:
        trained = head.coefficient != 0 and torch.is_grad_enabled()
        tensors = {id(t): t for t in (hidden, *head.tensors()) if trained and t.requires_grad}
        vocab = head.weight.shape[0]
        sizes = with_head(Sizes(classes=True, peak=0), hidden, vocab, rows, head.weight.dtype)._replace(
            train_hidden=any(id(t) in tensors for t in (hidden, *head.parameters())),
            train_weight=id(head.weight) in tensors,
            train_bias=id(head.bias) in tensors,
        )
        head_plan = plan(sizes)
        before = sum(kept.values())
        options = head.options | {"max_peak_mb": max_peak_mb - before / MIB}
        bounded.append(head._replace(options=options))
        for key, t in tensors.items():  # the sum of several heads' gradients is wide
            kept[key] = t.numel() * max(t.element_size(), 4 if uses[key] > 1 else 0)
        summed = sum(kept[key] for key in tensors if uses[key] > 1)
        least = max(least, before + head_plan.least, before + head_plan.results + summed)
    least = -(-least // MIB)
    words = "max_peak_mb must be at least {} for this call, got {}"
    check(_OP, least <= max_peak_mb, words, least, max_peak_mb)
    return bounded


def _in_turn(hidden, heads, labels):
    tensors = {id(t): t for head in heads if head.coefficient for t in head.tensors()}
    return _InTurn.apply(heads, labels, hidden, *tensors.values())


def _composes(hidden, heads) -> bool:
    """Whether autograd differentiates the whole: if gradients cannot be computed, or not exactly, before the
    upstream gradient is known."""
    if arguments.is_traced(hidden) or is_transformed() or hidden.is_meta:
        return True
    active = [head for head in heads if head.coefficient]
    trained = hidden.requires_grad or any(head.tensors() for head in active)
    if not active or not trained or not torch.is_grad_enabled():
        return True
    autocast = torch.is_autocast_enabled(hidden.device.type)
    dtype = torch.get_autocast_dtype(hidden.device.type) if autocast else hidden.dtype
    owned = any(getattr(head.weight, "tigon_main_grad", False) for head in active)
    # An object that holds parameters and is not a Python module cannot be called on other parameters.
    layers = [layer for head in active if head.parameters() for layer in head.layers]
    closed = any(isinstance(f, torch.jit.ScriptModule) or not isinstance(f, nn.Module) for f in layers)
    return owned or closed or torch.float16 in (hidden.dtype, dtype) or not has_kernel(_OP, hidden=hidden)


@arguments.called({"target": "labels", "shift": "shifts", "linear_cross_entropy.weight": "heads' weight"})
def multi_token_loss(
    hidden: torch.Tensor,
    heads: Sequence[Any],
    labels: torch.Tensor,
    *,
    coefficients: Sequence[float] | None = None,
    shifts: Sequence[int] | None = None,
    lora: Sequence[tuple[torch.Tensor, torch.Tensor, float] | None] | None = None,
    denominator: float | torch.Tensor | Sequence[float | torch.Tensor] | None = None,
    valid_rows: Sequence[int | None] | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    z_loss: float = 0.0,
    token_weight: torch.Tensor | None = None,
    reduction: str = "mean",
    position_ids: torch.Tensor | None = None,
    chunk_rows: int | None = None,
    max_workspace_mb: float | None = None,
    max_peak_mb: float | None = None,
    logit_dtype: torch.dtype | None = None,
) -> MultiTokenLoss:
    """``sum_i coefficient_i * cross_entropy(heads_i(hidden)[t], labels[t + shift_i])``, without full logits.

    The heads run one after another through :func:`tigon.linear_cross_entropy`. In eager mode each head's
    gradients are computed before the next head starts. So the call takes the gradients and the memory of one
    head, including the activations of its layers. The gradient of `hidden` is summed over the heads in
    float32 and rounded once; so is that of a tensor that several heads share. Each head takes 3 matmuls with
    the vocabulary, 2 if neither `hidden` nor a layer of the head needs a gradient, 1 without gradients.

    Args:
        hidden: ``[..., T, H]``, the input of all heads (float32, bfloat16, float16; float64 runs the eager
            reference).
        heads: one for each loss, any of: a weight ``[V, H]``; a ``torch.nn.Linear``; a
            ``torch.nn.Sequential`` that ends in one (a Medusa head); ``(module, weight)`` or ``(module,
            weight, bias)``, whose module maps `hidden` to ``[..., T, H_i]`` for a weight ``[V, H_i]``
            (``None``: hidden itself). Vocabularies may differ. A module must not use tensors that need a
            gradient and are not its parameters. Modules are called only in the forward: with FSDP wrap the
            module that contains them instead of them. Heads may share weights and modules.
        labels: ``[..., T]`` int64 class indices, or ``ignore_index``.
        coefficients: a number for each head; ``None``: 1. A head with 0 is evaluated and gets no gradient.
        shifts: for each head how far ahead its label is, >= 0; ``None``: 1, 2, 3, ...
        position_ids: for packed sequences, as in :func:`tigon.linear_cross_entropy`.
        lora: for each head ``None`` or ``(A [r, H_i], B [V, r], scale)``.
        token_weight, ignore_index, label_smoothing, softcap, logit_scale, temperature, z_loss, chunk_rows,
            max_workspace_mb, logit_dtype: as in :func:`tigon.linear_cross_entropy`, the same for all heads.
        max_peak_mb: upper bound, in MiB, of what the call and its backward allocate, without what the layers
            of the heads allocate. Each head gets what the gradients of the heads before it have left, and
            keeps to it as :func:`tigon.linear_cross_entropy` does. Refused if autograd differentiates the
            whole (see below).
        reduction: ``"mean"`` (for each head over its rows that count) or ``"sum"``.
        denominator: a number or tensor of one element for all heads, or a sequence with one for each head:
            the loss is ``sum / denominator`` instead of ``reduction``.
        valid_rows: for each head how many labels count; see :func:`tigon.count_labels`, called once for each
            shift.

    Returns:
        ``(loss, losses, accuracies)``: the float32 scalar, and detached ``[k]`` vectors of each head's loss
        (without its coefficient) and of the share of its counted rows whose label is the first argmax (NaN
        if no row counts). The loss is differentiable in hidden, weights, biases, A, B and the modules'
        parameters; each gradient is computed only if needed. One head with coefficient 1 is bitwise equal to
        :func:`tigon.linear_cross_entropy`. In three cases autograd differentiates the whole: under
        torch.compile and torch.func, with float16 (whose gradients need the loss scale before they are
        rounded), and if a weight has ``tigon_main_grad``. The formula is the same, but the tensors that each
        head saves are kept until the backward, and the gradients of tensors that heads share are summed in
        their dtype.

    Raises:
        tigon.Error: the numbers of heads, coefficients and shifts differ, a head's result does not fit its
            weight, or :func:`tigon.linear_cross_entropy` refuses an argument.

    Source: Cai et al. 2024, "Medusa" (arXiv:2401.10774), equations 1 and 2; Gloeckle et al. 2024, "Better &
    Faster Large Language Models via Multi-token Prediction" (arXiv:2404.19737).
    """
    arguments.check_float(_OP, "hidden", hidden)
    check(_OP, hidden.dim() >= 2, "hidden must be [..., T, H], got {}", hidden.shape)
    listed = isinstance(heads, (Sequence, nn.ModuleList)) and not isinstance(heads, nn.Sequential)
    words = "heads must be a sequence of at least one head, got {}"
    check(_OP, listed and len(heads) > 0, words, 0 if listed else kind_of(heads))
    labels = labels_of(labels, ignore_index)
    arguments.check_indices(_OP, "labels", labels)
    arguments.check_shape(_OP, "labels", labels, hidden.shape[:-1])
    arguments.check_choice(_OP, "reduction", reduction, _REDUCTIONS)
    options = {"softcap": softcap, "logit_scale": logit_scale, "temperature": temperature, "z_loss": z_loss}
    options |= {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "reduction": reduction}
    options |= {"token_weight": token_weight, "position_ids": position_ids, "chunk_rows": chunk_rows}
    options |= {"max_workspace_mb": max_workspace_mb, "logit_dtype": logit_dtype}
    k = len(heads)
    coefficients = one_each(_OP, "coefficients", coefficients, k, "heads", [1.0] * k)
    each = {"shift": one_each(_OP, "shifts", shifts, k, "heads", range(1, k + 1))}
    each["lora"] = one_each(_OP, "lora", lora, k, "heads", [None] * k)
    each["valid_rows"] = one_each(_OP, "valid_rows", valid_rows, k, "heads", [None] * k)
    if not isinstance(denominator, (tuple, list)):
        denominator = [denominator] * k
    each["denominator"] = one_each(_OP, "denominator", denominator, k, "heads", None)
    made = []
    for i, head in enumerate(heads):
        own = options | {name: values[i] for name, values in each.items()}
        made.append(_token_head(i, head, coefficients[i], labels, own))
    if forward_ad._current_level >= 0 and hidden.dtype != torch.float64:
        refuse_tangents(_OP, (hidden, *(t for head in made for t in (head.weight, head.bias))))
    run = _composed if _composes(hidden, made) else _in_turn
    check_cap(_OP, max_peak_mb=max_peak_mb)
    if max_peak_mb is not None:
        trained = torch.is_grad_enabled() and any(t.requires_grad for t in (hidden, *made[0].tensors()))
        if run is _composed and (trained or is_transformed()):
            check_unbounded(_OP, max_peak_mb, "where autograd differentiates all heads together")
        made = _within_peak(hidden, made, max_peak_mb)
    return MultiTokenLoss(*run(hidden, made, labels))
