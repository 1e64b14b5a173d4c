"""From raw forward and backward operators to one differentiable callable.

Three routes, one formula (``setup_context`` and ``backward`` are shared):

* eager, gradient needed: a classic ``torch.autograd.Function`` around the raw operators (lowest host cost,
  measured);
* eager, no gradient: the raw forward operator alone, without what a backward would need;
* under ``torch.compile`` or a functorch transform: the operator ``tigon::<name>``, opaque to the compiler,
  with a fake kernel and the same backward attached by ``torch.library.register_autograd``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from tigon._load import native
from tigon.error import Error


def _as_error(exc: RuntimeError) -> Error | None:
    """The native library's refusal as :class:`Error`; ``None`` for anything else."""
    text = str(exc)
    return Error(text.split("\n", 1)[0]) if text.startswith("[") else None


# Looked up once: every call asks them.
_is_compiling = torch.compiler.is_compiling
_is_transformed = torch._C._are_functorch_transforms_active
_is_grad_enabled = torch.is_grad_enabled

# Whether the running backward pass keeps its graph (``retain_graph``); where PyTorch cannot tell, yes.
graph_is_kept: Callable[[], bool] = getattr(
    torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True
)


def once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """``once_differentiable`` without its cost where no second derivative is recorded."""
    guarded = torch.autograd.function.once_differentiable(backward)

    @functools.wraps(backward)
    def call(ctx, *grad_outputs):
        return (guarded if torch.is_grad_enabled() else backward)(ctx, *grad_outputs)

    return call


def direct_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply`` without its look for functorch's wrappers: where it is known that there are none."""
    return super(torch.autograd.Function, function).apply


def raw(name: str, fake: Callable[..., Any]) -> Callable[..., Any]:
    """``tigon::name`` with its fake kernel registered; refusals arrive as :class:`Error`."""
    overload = native(name)
    torch.library.register_fake(f"tigon::{name}", fake)

    def call(*args):
        try:
            return overload(*args)
        except RuntimeError as exc:
            error = _as_error(exc)
            if error is None:
                raise
        raise error

    return call


class Op:
    """A differentiable operator.

    Args:
        name: ``tigon::<name>`` and ``tigon::<name>_fwd`` share schema and kernel.
        fake: shapes, dtypes and strides of the results for fake tensors.
        setup_context: ``(ctx, inputs, output)``, saves what ``backward`` needs.
        backward: ``(ctx, *grad_outputs)``, one gradient (or ``None``) per input.
        results: how many outputs callers see, ``None``: all. Those after them are for the backward alone, and
            ``tigon::<name>_infer`` does without them.
    """

    def __init__(
        self,
        name: str,
        *,
        fake: Callable[..., Any],
        setup_context: Callable[..., None],
        backward: Callable[..., Any],
        results: int | None = None,
    ) -> None:
        self.name = name
        self.registered = native(name)
        self.forward = self.infer = raw(f"{name}_fwd", fake)
        self.visible = visible = _first(results)
        if results is not None:
            self.infer = raw(f"{name}_infer", lambda *args: visible(fake(*args)))

        def setup_traced(ctx, inputs, output):
            setup_context(ctx, inputs, output)
            if results is not None:
                ctx.mark_non_differentiable(*output[results:])

        torch.library.register_fake(f"tigon::{name}", fake)
        torch.library.register_autograd(f"tigon::{name}", backward, setup_context=setup_traced)

        def function_forward(ctx, *inputs):
            output = self.forward(*inputs)
            setup_context(ctx, inputs, output)
            return visible(output)

        self.function = type(
            f"Tigon_{name}",
            (torch.autograd.Function,),
            {
                "forward": staticmethod(function_forward),
                "backward": staticmethod(once(backward)),
            },
        )
        self.apply = direct_apply(self.function)
        self.node = self.function._backward_cls  # type of its results' grad_fn

    def __call__(self, *args):
        if _is_compiling() or _is_transformed():
            return self.visible(self.registered(*args))
        if _is_grad_enabled():
            for a in args:
                if isinstance(a, torch.Tensor) and a.requires_grad:
                    return self.apply(*args)
        return self.infer(*args)


def _first(results: int | None) -> Callable[[Any], Any]:
    """What picks so many of an operator's outputs, a lone one out of its tuple."""
    if results is None:
        return lambda output: output
    if results == 1:
        return lambda output: output[0]
    return lambda output: output[:results]


_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_fallbacks_reported: set[tuple[str, str]] = set()


def has_kernel(op: str, *tensors: torch.Tensor | None) -> bool:
    """True when every float tensor has a kernel dtype and lives on CPU or CUDA.

    Otherwise the caller takes its eager reference; said once per op and reason on the ``tigon`` logger.
    """
    for t in tensors:
        if t is None:
            continue
        if t.dtype not in _KERNEL_DTYPES:
            return _report_fallback(op, str(t.dtype))
        if not (t.is_cuda or t.is_cpu or t.is_meta):
            return _report_fallback(op, f"device {t.device.type}")
    return True


def _report_fallback(op: str, reason: str) -> bool:
    if not torch.compiler.is_compiling() and (op, reason) not in _fallbacks_reported:
        import logging

        _fallbacks_reported.add((op, reason))
        logging.getLogger("tigon").info("[%s] %s has no kernel: the eager reference is used", op, reason)
    return False
