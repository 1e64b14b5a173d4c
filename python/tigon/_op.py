"""From raw forward and backward operators to one differentiable callable.

Four routes, one formula (``setup_context`` and ``backward`` are shared):

* eager, gradient needed: a classic ``torch.autograd.Function`` around the raw operators (lowest host cost,
  measured);
* eager, no gradient: only the raw forward operator, without what a backward would need;
* under ``torch.compile``: the operator ``tigon::<name>``, opaque to the compiler, with a fake kernel and the
  same backward attached by ``torch.library.register_autograd``;
* under the transforms of ``torch.func``: an ``autograd.Function`` in the form that they take.

First derivatives in reverse mode are supported. Second ones and forward mode are refused in words.
"""

from __future__ import annotations

import functools
import operator
import re
import sys
import weakref
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from torch.autograd import forward_ad

from tigon import _fp8_bytes
from tigon._dtensor import KERNEL_DTYPES, PLAIN, Layout, call_local, is_dtensor, takes_dtensors
from tigon._load import native
from tigon.error import Error, refuse

# Looked up once: every call asks them.
is_compiling = torch.compiler.is_compiling
is_transformed = torch._C._are_functorch_transforms_active
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
is_grad_enabled = torch.is_grad_enabled
_includes_key = torch._C._dispatch_tls_is_dispatch_key_included
_VMAP_MODE = torch._C._parse_dispatch_key("VmapMode")

_keeps_graph: Callable[[], bool] = getattr(
    torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True
)


def saves_through_hooks() -> bool:
    """Whether hooks take the tensors that autograd saves, as checkpoints and offloading have them."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def is_traced_or_transformed() -> bool:
    """Whether a compiler traces the call, or a transform of ``torch.func`` makes it."""
    return is_compiling() or is_transformed()


def cached_tensor(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Keeps a constant tensor by the arguments it is made of, but not one that a mode of PyTorch makes in its
    place: a fake tensor would be found ever after."""

    @functools.cache
    def kept(*key):
        with torch.inference_mode(False):
            return make(*key)

    @functools.wraps(make)
    def get(*key):
        intercepted = is_compiling() or torch._C._len_torch_dispatch_stack()
        return make(*key) if intercepted else kept(*key)

    return get


def graph_is_kept() -> bool:
    """Whether what the running backward pass finds must stay as it is: it keeps its graph
    (``retain_graph``; if PyTorch cannot tell, yes), or runs for a batch of gradients."""
    return _keeps_graph() or is_batched()


def is_batched() -> bool:
    """Whether a transform, or ``is_grads_batched`` of a backward, calls on several tensors at a time."""
    return is_transformed() or _includes_key(_VMAP_MODE)


def may_overwrite_saved(saved: tuple) -> bool:
    """Whether a backward pass may write over the tensors saved for it: it runs once, untraced."""
    # PyTorch 2.11 traces a backward without saying so: its tensors are then no plain ones.
    return not (is_compiling() or graph_is_kept()) and all(t is None or type(t) in PLAIN for t in saved)


def _references(tensors: tuple) -> int:
    return max(sys.getrefcount(t) for t in tensors)


def _references_of_one_holder() -> int:
    """The result of `_references` if C++ holds a tensor once and Python only by the tuple."""
    holder, saved = torch.empty(0, device="cpu"), (torch.empty(0, device="cpu"),)
    holder.grad = saved[0]
    return _references(saved)


_ONE_HOLDER = _references_of_one_holder()
_storage_holders: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)


def only_graph_holds(saved: tuple) -> bool:
    """Whether nobody else holds the tensors saved for the running backward pass, or their memory.

    Args:
        saved: what ``ctx.saved_tensors`` returned, with no other reference to its tensors in the caller.
    """
    # functorch's wrappers have no storage, and tell nothing of the tensor inside.
    if _storage_holders is None or _references(saved) > _ONE_HOLDER or any(map(_is_wrapped, saved)):
        return False
    # The graph and the Python object hold a tensor; the tensor and the Python object below its storage.
    return all(t._use_count() <= 2 and _storage_holders(t.untyped_storage()._cdata) <= 2 for t in saved)


def refuse_second(op: str) -> NoReturn:
    refuse(
        op,
        "second derivatives are not supported (create_graph=True, hessian, hvp): use float64 tensors, "
        "which run the plain PyTorch formula",
    )


def _refuse_forward_mode(op: str) -> NoReturn:
    refuse(
        op,
        "forward-mode AD is not supported (jvp, jacfwd, linearize, dual tensors): use reverse mode, or "
        "float64 tensors, which run the plain PyTorch formula",
    )


def refuse_tangents(op: str, args: tuple) -> None:
    """Dual tensors reach no kernel: their tangents would be lost."""
    # A Function's forward, which does not see them, calls this too.
    with forward_ad._set_fwd_grad_enabled(True):
        for a in args:
            if isinstance(a, torch.Tensor) and forward_ad.unpack_dual(a).tangent is not None:
                _refuse_forward_mode(op)


def once(op: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate an eager backward: it refuses to run if a second derivative would be recorded."""

    def wrap(backward):
        @functools.wraps(backward)
        def call(ctx, *grad_outputs):
            if is_grad_enabled() and not is_compiling():
                refuse_second(op)
            return backward(ctx, *grad_outputs)

        return call

    return wrap


def direct_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply`` without its look for functorch's wrappers, for calls that are known to have none.

    The engine calls ``backward`` at once, not by a method that looks for it.
    """
    function._backward_cls.apply = function.backward
    return super(torch.autograd.Function, function).apply


def transformable(op: str, name: str, forward, setup_context, backward) -> Callable[..., Any]:
    """A function of positional arguments under transforms of ``torch.func``; ``vmap`` calls it one by one."""

    def vmap(info, in_dims, *args):
        results = [
            function.apply(*(a if d is None else a.select(d, i) for a, d in zip(args, in_dims, strict=True)))
            for i in range(info.batch_size)
        ]
        if isinstance(results[0], torch.Tensor):
            return torch.stack(results), 0
        return tuple(torch.stack(column) for column in zip(*results, strict=True)), (0,) * len(results[0])

    members = {
        "forward": forward,
        "setup_context": setup_context,
        "backward": backward,
        "vmap": vmap,
        "jvp": lambda ctx, *tangents: _refuse_forward_mode(op),
    }
    members = {key: staticmethod(member) for key, member in members.items()}
    function = type(f"Tigon_{name}", (torch.autograd.Function,), members)
    return function.apply


def caller(op: str, overload, transformed: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """A native operator in eager mode: refusals arrive as :class:`Error`.

    Args:
        transformed: runs under transforms; the operator itself is then traced too.
    """
    run = overload._op

    def call(*args):
        if transformed is not None:
            if is_compiling():
                return overload(*args)
            if is_transformed():
                return transformed(*args)
        if forward_ad._current_level >= 0:
            refuse_tangents(op, args)
        try:
            return run(*args)
        except RuntimeError as exc:
            error = _explained(op, overload, args, exc)
            if error is None:
                raise
        raise error

    return call


def raw(name: str, fake: Callable[..., Any], op: str | None = None) -> Callable[..., Any]:
    """``tigon::name`` with its fake kernel registered. It has no derivative; asked for one, it refuses.

    The result's ``named`` takes the arguments by the names of the schema; those left out are None.

    Args:
        op: its name in messages; ``None``: `name` without its last word.
    """
    op = op or name.rpartition("_")[0]
    overload = native(name)
    register_fake(op, name, fake)
    eager = caller(op, overload)
    transformed = transformable(
        op, name, eager, lambda ctx, inputs, output: None, lambda ctx, *gradients: refuse_second(op)
    )
    call = caller(op, overload, transformed)
    names = [argument.name for argument in overload._schema.arguments]

    call.named = lambda **values: call(*_in_order(names, values))  # type: ignore[attr-defined]
    return call


def _in_order(names: list[str], values: dict[str, Any]) -> list:
    """The arguments of an operator in the order of its schema; those left out are None."""
    args = [values.pop(name, None) for name in names]
    if values:
        raise TypeError(f"the operator has no arguments {', '.join(values)}")
    return args


def register_fake(op: str, name: str, fake: Callable[..., Any]) -> None:
    """Shapes for fake tensors and for ``meta``; a mixture of ``meta`` and real tensors is refused."""
    names = [argument.name for argument in native(name)._schema.arguments]

    def checked(*args):
        first = None
        for argument, a in zip(names, args, strict=False):
            for i, t in enumerate(a if isinstance(a, (list, tuple)) else (a,)):
                if not isinstance(t, torch.Tensor):
                    continue
                first = t if first is None else first
                if t.is_meta != first.is_meta:
                    place = argument if t is a else f"{argument}[{i}]"
                    refuse(op, "{} must be on {}, got {}", place, first.device, t.device)
        return fake(*args)

    torch.library.register_fake(f"tigon::{name}", checked)


_library = torch.library.Library("tigon", "FRAGMENT")


def define(name: str, signature: str, function: Callable[..., Any]) -> None:
    """``tigon::<name>``, on CPU and CUDA a function of Python, which no tracer looks into."""
    _library.define(name + signature)
    for key in ("CPU", "CUDA"):
        _library.impl(name, function, key)


class _AutogradLibrary(torch.library.Library):
    """Takes autograd's kernels and has them refuse dual tensors, as compiled graphs hand them on."""

    def impl(self, op_name, fn, dispatch_key="", **options):
        def guarded(keyset, *args, **kwargs):
            if forward_ad._current_level >= 0:
                refuse_tangents(op_name, args)
            return fn(keyset, *args, **kwargs)

        super().impl(op_name, guarded, dispatch_key, **options)


_autograd_library = _AutogradLibrary("tigon", "IMPL")


class Op:
    """A differentiable operator.

    Args:
        name: ``tigon::<name>`` and ``tigon::<name>_fwd`` share schema and kernel.
        fake: shapes, dtypes and strides of the results for fake tensors.
        setup_context: ``(ctx, inputs, output)``, saves what ``backward`` needs.
        backward: ``(ctx, *grad_outputs)``, one gradient (or ``None``) per input.
        results: how many outputs callers see, ``None``: all. Those after them are only for the backward;
            ``tigon::<name>_infer``, if it exists, does without them.
        transformed: another ``(setup_context, backward)`` for the transforms of ``torch.func``.
        layout: which arguments are rows, and which are vectors by column: DTensors then stay local.
        fp8: ``inputs -> parameter``, by which the first result is known (:mod:`tigon._fp8_bytes`). If its
            bytes are wanted, ``tigon::<name>_fp8`` runs, which returns them and their scales too.
    """

    of_node: dict[type, Op] = {}  # by the type of their results' grad_fn

    def __init__(
        self,
        name: str,
        *,
        fake: Callable[..., Any],
        setup_context: Callable[..., None],
        backward: Callable[..., Any],
        results: int | None = None,
        transformed: tuple[Callable[..., None], Callable[..., Any]] | None = None,
        layout: Layout | None = None,
        fp8: Callable[[tuple], torch.Tensor | None] | None = None,
    ) -> None:
        self.name = name
        self.registered = native(name)
        self.layout = layout
        self.names = [argument.name for argument in self.registered._schema.arguments]
        self.tensors = sum(map(_is_tensor, self.registered._schema.arguments))  # they come first
        self.visible = visible = _first(results)
        for suffix in ("", "_fwd"):
            register_fake(name, name + suffix, fake)
        self.forward = self.infer = forward = caller(name, native(f"{name}_fwd"))
        if results is not None and hasattr(torch.ops.tigon, f"{name}_infer"):
            register_fake(name, f"{name}_infer", lambda *args: visible(fake(*args)))
            self.infer = caller(name, native(f"{name}_infer"))
        elif results is not None:
            self.infer = lambda *args: visible(forward(*args))

        def setup_traced(ctx, inputs, output):
            if results is not None:  # the last call counts: setup_context may mark these and others
                ctx.mark_non_differentiable(*output[results:])
            setup_context(ctx, inputs, output)

        eager_backward = once(name)(backward)
        torch.library.register_autograd(
            f"tigon::{name}", eager_backward, setup_context=setup_traced, lib=_autograd_library
        )
        self.transformed = transformable(name, name, forward, *(transformed or (setup_traced, backward)))

        with_bytes = None if fp8 is None else caller(name, native(f"{name}_fp8"))
        lone = len(self.registered._schema.returns) == 1

        def function_forward(ctx, *inputs):
            parameter = fp8(inputs) if fp8 is not None and _fp8_bytes.on else None
            if parameter is not None:
                ctx.fp8_key = weakref.ref(parameter)
            if parameter is not None and _fp8_bytes.wanted(parameter):
                *output, q, scales = with_bytes(*inputs)
                _fp8_bytes.put(output[0], q, scales)
                output = output[0] if lone else tuple(output)
            else:
                output = forward(*inputs)
            setup_context(ctx, inputs, output)
            return output if results is None else output[0] if results == 1 else output[:results]

        members = {"forward": staticmethod(function_forward), "backward": staticmethod(eager_backward)}
        self.function = type(f"Tigon_{name}", (torch.autograd.Function,), members)
        self.apply = direct_apply(self.function)
        self.node = self.function._backward_cls  # type of its results' grad_fn
        self.of_node[self.node] = self

    def __call__(self, *args):
        if type(args[0]) not in PLAIN and takes_dtensors(self.layout, args):
            return call_local(self.name, self, self.layout, self.names, args)
        if is_compiling():
            return self.visible(self.registered(*args))
        if is_transformed():
            return self.visible(self.transformed(*args))
        if is_grad_enabled():
            for a in args:
                if isinstance(a, torch.Tensor) and a.requires_grad:
                    return self.apply(*args)
        return self.infer(*args)

    def named(self, **values):
        """The results, of arguments by the names of the schema; those left out are None."""
        return self(*_in_order(self.names, values))

    def quick(self, *args):
        """The results for plain tensors of one dtype that has kernels, if the operator takes the call.

        If the native operator refuses all that is wrong with such a call, functions try this first, for
        the host's time. None: the call goes on to the checks in Python, which say why in the function's
        own words.
        """
        dtype, differentiable = getattr(args[0], "dtype", None), False
        for t in args[: self.tensors]:
            if t is None:
                continue
            if type(t) not in PLAIN or t.dtype is not dtype or not (t.is_cuda or t.is_cpu):
                return None
            differentiable = differentiable or t.requires_grad
        if dtype not in KERNEL_DTYPES or is_compiling() or is_transformed():
            return None
        try:
            return self.apply(*args) if differentiable and is_grad_enabled() else self.infer(*args)
        except Error:
            return None


def loss_with_gradients(name: str, fake: Callable[..., Any], results: int, places: tuple[int, ...]) -> Op:
    """``tigon::<name>`` as a scalar loss that forms its gradients in the forward.

    Args:
        results: how many outputs callers see, the loss first; the others are not differentiable.
        places: of the inputs whose gradients the outputs after them are, empty for one that is None.
    """
    # A multiplication that refuses to be differentiated.
    times = transformable(
        name, f"{name}_product", operator.mul, lambda *_: None, lambda *_: refuse_second(name)
    )

    def setup_context(ctx, inputs, output):
        ctx.inputs, ctx.places = len(inputs), [i for i in places if inputs[i] is not None]
        ctx.save_for_backward(*output[results:])
        ctx.mark_non_differentiable(*output[1:results])
        ctx.set_materialize_grads(False)

    def backward(ctx, dloss, *_):
        found = [None] * ctx.inputs
        if dloss is not None:
            product = times if is_transformed() and not is_compiling() else operator.mul
            for i, gradient in zip(ctx.places, ctx.saved_tensors, strict=False):
                found[i] = product(gradient, dloss)
        return tuple(found)

    return Op(name, fake=fake, setup_context=setup_context, backward=backward, results=results)


def paired(
    name: str,
    fake: Callable[..., Any],
    *,
    results: int | None = None,
    layout: Layout | None = None,
    fake_bwd: Callable[..., Any] | None = None,
    in_place: bool = False,
    fp8: Callable[[tuple], torch.Tensor | None] | None = None,
) -> Op:
    """``tigon::<name>`` and ``tigon::<name>_bwd`` as one operator.

    What the second takes is named in its schema: after the gradients of the results that callers see come
    arguments and results of the first, tensors before numbers, then ``need_d<argument>`` for each gradient
    that it returns (without any: that of the first argument).

    Args:
        fake, results, layout, fp8: as :class:`Op`.
        fake_bwd: if a gradient belongs to an argument that the second does not take. ``None``: a gradient
            is like its argument, and empty if it is not needed.
        in_place: ``tigon::<name>_bwd_in_place`` runs if what was saved may be overwritten.
    """
    forward, backward = native(name)._schema, native(f"{name}_bwd")._schema
    inputs = [a.name for a in forward.arguments]
    places = {key: i for i, key in enumerate([*inputs, *(r.name for r in forward.returns)])}
    upstreams = len(forward.returns) if results is None else results
    taken = [a for a in backward.arguments if not a.name.startswith("need_")][upstreams:]
    # A lone result has no name.
    saved = _picker([places.get(a.name, len(inputs)) for a in taken if _is_tensor(a)])
    numbers = [i for i, a in enumerate(forward.arguments) if not _is_tensor(a)]
    options_of = _picker(numbers)
    options = _picker([numbers.index(places[a.name]) for a in taken if not _is_tensor(a)])
    needed = [a.name.removeprefix("need_d") for a in backward.arguments if a.name.startswith("need_")]
    positions = [inputs.index(key) for key in needed]
    needs, several = _picker(positions), len(forward.returns) > 1

    def like(*args):
        tensors = {a.name: t for a, t in zip(taken, args[upstreams:], strict=False)}
        first = args[upstreams]
        if not needed:
            return first.new_empty(first.shape)
        return tuple(
            tensors[key].new_empty(tensors[key].shape) if need else first.new_empty(0)
            for key, need in zip(needed, args[-len(needed) :], strict=True)
        )

    bwd = raw(f"{name}_bwd", fake_bwd or like)
    overwriting = raw(f"{name}_bwd_in_place", fake_bwd or like, name) if in_place else None

    def setup_context(ctx, args, output):
        ctx.save_for_backward(*saved((*args, *output) if several else (*args, output)))
        ctx.options = options_of(args)
        ctx.set_materialize_grads(False)

    def gradients(ctx, *upstream):
        found, upstream = [None] * len(inputs), upstream[:upstreams]
        if upstream[0] is None and all(g is None for g in upstream):
            return tuple(found)
        if not needed:
            return bwd(*upstream, *ctx.saved_tensors), *found[1:]
        need, tensors = needs(ctx.needs_input_grad), ctx.saved_tensors
        run = overwriting if in_place and may_overwrite_saved(tensors) else bwd
        made = run(*upstream, *tensors, *options(ctx.options), *need)
        for i, g, wanted in zip(positions, made, need, strict=True):
            if wanted:
                found[i] = g
        return tuple(found)

    op = Op(
        name,
        fake=fake,
        setup_context=setup_context,
        backward=gradients,
        results=results,
        layout=layout,
        fp8=fp8,
    )
    op.bwd = bwd
    return op


def _picker(places: list[int]) -> Callable[[tuple], tuple]:
    """A function that takes the values at these places."""
    if len(places) > 1:
        return operator.itemgetter(*places)
    return (lambda values: (values[places[0]],)) if places else lambda values: ()


def _is_tensor(argument) -> bool:
    return "Tensor" in str(argument.type)


def _first(results: int | None) -> Callable[[Any], Any]:
    """A function that takes the first outputs of an operator; a single one is taken out of its tuple."""
    if results is None:
        return lambda output: output
    if results == 1:
        return lambda output: output[0]
    return lambda output: output[:results]


_REFUSAL = re.compile(r"\[\w+\] ")
_WRONG_TYPE = re.compile(r"type '(.+?)' for argument '(\w+)' but instead found type")


def _explained(op: str, overload, args: tuple, exc: RuntimeError) -> RuntimeError | None:
    """The failure of a native operator in the words and type that users expect; ``None``: as it is."""
    text = str(exc)
    if _REFUSAL.match(text):
        return Error(text.split("\n", 1)[0])
    if "out of memory" in text and not isinstance(exc, torch.OutOfMemoryError):
        return torch.OutOfMemoryError(text)
    wrong = _WRONG_TYPE.search(text)
    for argument, a in zip(overload._schema.arguments, args, strict=False):
        name = argument.name
        if wrong and wrong[2] == name:
            given = "a tensor" if isinstance(a, torch.Tensor) else repr(a)
            return Error(f"[{op}] {name} must be of type {wrong[1]}, got {given}")
        for t in a if isinstance(a, (list, tuple)) else (a,):
            kind = foreign(name, t) if isinstance(t, torch.Tensor) else None
            if kind is not None:
                return Error(f"[{op}] {name} must be a plain dense tensor, got {kind}")
    return None


def check_stored(op: str, name: str, x: torch.Tensor) -> None:
    """x must have its storage, which FSDP frees between uses: PyTorch's operations crash without one."""
    if type(x) not in PLAIN or x.layout is not torch.strided or x.is_nested or x.is_meta:
        return
    if is_traced_or_transformed():
        return  # what has no numbers, or none of its own, has none to miss
    if x.untyped_storage().nbytes() == 0 and x.numel() > 0:
        refuse(
            op,
            name + " was freed: its storage is empty (FSDP frees parameters outside of the forward "
            "and backward of their module, a hook or untyped_storage().resize_(0) does too)",
        )


def foreign(name: str, a: torch.Tensor) -> str | None:
    """The reason why kernels cannot take a tensor, or None."""
    if is_dtensor(a):
        return f"a DTensor (use {name}.to_local() or {name}.full_tensor())"
    if a.is_nested:
        return "a nested tensor"
    if a.layout != torch.strided:
        return f"one of layout {a.layout}"
    return None


_fallbacks_reported: set[tuple[str, str]] = set()


def has_kernel(
    op: str,
    /,
    *tensors: torch.Tensor | None,
    beside: Mapping[str, torch.Tensor | None] = MappingProxyType({}),
    **named: torch.Tensor | None,
) -> bool:
    """True when every float tensor has a kernel dtype and lives on CPU or CUDA.

    Otherwise the caller takes its eager reference; said once per op and reason on the ``tigon`` logger.

    Args:
        tensors, named: whose dtypes and devices decide; an error calls them ``tensors`` or by their names.
        beside: what else the reference computes with: all is on ``meta``, or nothing.
    """
    for t in (*tensors, *named.values()):
        if t is None or (t.dtype in KERNEL_DTYPES and (t.is_cuda or t.is_cpu or t.is_meta)):
            continue
        _check_fallback(op, t, [*(("tensors", t) for t in tensors), *named.items(), *beside.items()])
        reason = str(t.dtype) if t.dtype not in KERNEL_DTYPES else f"device {t.device.type}"
        return _report_fallback(op, reason)
    return True


def _check_fallback(op: str, unknown: torch.Tensor, tensors: list[tuple[str, torch.Tensor | None]]) -> None:
    """PyTorch's operations can take these tensors, of which no kernel has `unknown`."""
    given = [(name, t) for name, t in tensors if t is not None]
    name = next(name for name, t in given if t is unknown)
    if unknown.dtype not in KERNEL_DTYPES:
        if is_dtensor(unknown):  # PyTorch's operations might gather it
            refuse(op, "{}: DTensors must be float32, bfloat16 or float16, got {}", name, unknown.dtype)
        if unknown.dtype != torch.float64:
            refuse(op, "{} must be float32, bfloat16, float16 or float64, got {}", name, unknown.dtype)
    first = given[0][1]
    for name, t in given:
        if t.is_meta != first.is_meta:
            refuse(op, "{} must be on {}, got {}", name, first.device, t.device)
        check_stored(op, name, t)


def _report_fallback(op: str, reason: str) -> bool:
    if not torch.compiler.is_compiling() and (op, reason) not in _fallbacks_reported:
        import logging

        _fallbacks_reported.add((op, reason))
        logging.getLogger("tigon").info("[%s] %s has no kernel: the eager reference is used", op, reason)
    return False
