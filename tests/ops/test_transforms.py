"""The transforms of torch.func and higher derivatives: right, or refused in words that name the op."""

import functools

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from checks import outputs_of
from torch import func

import tigon
from cases import modules
from cases.case import select


def _cases():
    """The smallest case with gradients of every op."""
    for module in modules().values():
        cases = [case for case in select(module.CASES, "small") if "grad" in case.tags]
        if not cases:  # linear_loss: it refuses the transforms
            continue
        yield pytest.param(module, cases[0], id=module.NAME)
        if len(cases) > 1:
            yield pytest.param(module, cases[1], id=f"{module.NAME}-{cases[1].name}")


every_op = pytest.mark.parametrize("module, case", list(_cases()))


def _closed(module, case, dtype=torch.float32):
    """The case as a function of the tensors that get a gradient, and those tensors."""
    inputs = module.make(case, "cpu", dtype, 0)
    places = [*inputs.grads, *inputs.grad_kwargs]
    leaves = [(inputs.args if isinstance(p, int) else inputs.kwargs)[p].detach().clone() for p in places]

    def total(*values):
        args, kwargs = list(inputs.args), dict(inputs.kwargs)
        for place, value in zip(places, values, strict=True):
            (args if isinstance(place, int) else kwargs)[place] = value
        outputs = outputs_of(module.tigon_fn(*args, **kwargs))
        return sum((out.double() * _weights(out)).sum() for out in outputs if out.is_floating_point())

    return total, leaves


def _weights(out):
    """An upstream gradient that differs from element to element."""
    return torch.linspace(0.5, 1.5, out.numel(), dtype=torch.float64).reshape(out.shape)


def _gradients(total, leaves, **options):
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    return torch.autograd.grad(total(*leaves), leaves, **options)


@every_op
def test_grad(module, case):
    total, leaves = _closed(module, case)
    expected = _gradients(total, leaves)
    got = func.grad(total, tuple(range(len(leaves))))(*leaves)
    for g, e in zip(got, expected, strict=True):
        torch.testing.assert_close(g, e, rtol=1e-5, atol=1e-6)


@every_op
def test_grad_inside_eager_autograd(module, case):
    """A transform over tensors that an outer backward differentiates too."""
    total, leaves = _closed(module, case)
    factor = torch.tensor(2.0, requires_grad=True)
    got = func.grad(lambda x, *rest: total(x, *rest) * factor.detach())(*leaves)
    torch.testing.assert_close(got, 2 * _gradients(total, leaves)[0], rtol=1e-5, atol=1e-6)


@every_op
def test_vmap_of_grad_and_jacrev(module, case):
    total, leaves = _closed(module, case)
    stacked = [torch.stack([leaf, 2 * leaf]) for leaf in leaves]
    got = func.vmap(func.grad(total))(*stacked)
    rows = func.jacrev(lambda x: func.vmap(lambda *one: total(*one))(x, *stacked[1:]))(stacked[0])
    for i in range(2):
        expected = _gradients(total, [leaf[i] for leaf in stacked])[0]
        torch.testing.assert_close(got[i], expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(rows[i, i], expected, rtol=1e-5, atol=1e-6)
    assert not rows[0, 1].any()


@every_op
@pytest.mark.parametrize("retain_graph", [False, True])
def test_batched_gradients(module, case, retain_graph):
    """``is_grads_batched``, as ``jacobian(..., vectorize=True)`` has it: one backward for several."""
    total, leaves = _closed(module, case)
    expected = _gradients(total, leaves)
    upstream = torch.tensor([1.0, 2.0], dtype=torch.float64)
    leaves = [leaf.requires_grad_() for leaf in leaves]
    loss = total(*leaves)
    if module.NAME == "lora_linear":  # PyTorch has no loop for operators of lists
        with pytest.raises(tigon.Error, match="is_grads_batched"):
            torch.autograd.grad(loss, leaves, upstream, is_grads_batched=True, retain_graph=retain_graph)
        return
    batched = torch.autograd.grad(loss, leaves, upstream, is_grads_batched=True, retain_graph=retain_graph)
    for sample_grads, e in zip(batched, expected, strict=True):
        for g, factor in zip(sample_grads, upstream, strict=True):
            torch.testing.assert_close(g, factor.to(e.dtype) * e, rtol=1e-5, atol=1e-6)


@every_op
def test_vmap_has_the_bits_of_calls_one_by_one(module, case, recwarn):
    total, leaves = _closed(module, case)
    stacked = [torch.stack([leaf, 2 * leaf]) for leaf in leaves]
    got = func.vmap(total)(*stacked)
    for i in range(2):
        torch.testing.assert_close(got[i], total(*(leaf[i] for leaf in stacked)), rtol=0, atol=0)
    assert not [w for w in recwarn if "performance drop" in str(w.message)]


def _refused(text, module, call):
    with pytest.raises(tigon.Error, match=text) as caught:
        call()
    assert str(caught.value).startswith("["), caught.value
    assert "not supported" in str(caught.value)


FORWARD = {
    "jvp": lambda f, x, t: func.jvp(f, (x,), (t,)),
    "jacfwd": lambda f, x, t: func.jacfwd(f)(x),
    "linearize": lambda f, x, t: func.linearize(f, x)[1](t),
    "jvp of grad": lambda f, x, t: func.jvp(func.grad(f), (x,), (t,)),
    "hessian": lambda f, x, t: func.hessian(f)(x),
}


@every_op
@pytest.mark.parametrize("transform", FORWARD)
def test_forward_mode_is_refused(module, case, transform):
    total, (x, *rest) = _closed(module, case)
    _refused(
        "forward-mode AD",
        module,
        lambda: FORWARD[transform](lambda x: total(x, *rest), x, torch.ones_like(x)),
    )


@every_op
@pytest.mark.parametrize("place", ["first", "last"])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_dual_tensors_are_refused(module, case, requires_grad, place):
    total, leaves = _closed(module, case)
    i = 0 if place == "first" else len(leaves) - 1
    leaves = [leaf.requires_grad_(requires_grad) for leaf in leaves]
    with forward_ad.dual_level():
        total(*leaves)  # no tangent: nothing is lost
        leaves[i] = forward_ad.make_dual(leaves[i], torch.ones_like(leaves[i]))
        _refused("forward-mode AD", module, lambda: total(*leaves))
        with torch.no_grad():
            _refused("forward-mode AD", module, lambda: total(*leaves))


SECOND = {
    "grad of grad": lambda f, x: func.grad(lambda y: func.grad(f)(y).sum())(x),
    "jacrev of grad": lambda f, x: func.jacrev(func.grad(f))(x),
    "hessian": lambda f, x: torch.autograd.functional.hessian(f, x),
    "hvp": lambda f, x: torch.autograd.functional.hvp(f, x, torch.ones_like(x)),
    "penalty": lambda f, x: _gradients(f, [x], create_graph=True)[0].square().sum().backward(),
}
LINEAR = ("rope", "embedding")  # no second derivative in their inputs


@every_op
@pytest.mark.parametrize("transform", SECOND)
def test_second_derivatives_are_refused(module, case, transform):
    total, (x, *rest) = _closed(module, case)
    run = functools.partial(SECOND[transform], lambda y: total(y, *rest), x)
    if transform in ("grad of grad", "jacrev of grad") and module.NAME in LINEAR:
        assert not run().any()
    else:
        _refused("second derivatives", module, run)


@every_op
def test_second_derivatives_in_float64(module, case):
    """float64 runs the plain formula."""
    total, leaves = _closed(module, case, torch.float64)
    leaves = [leaf.requires_grad_() for leaf in leaves]
    gradients = torch.autograd.grad(total(*leaves), leaves, create_graph=True)
    penalty = sum(g.square().sum() for g in gradients)
    if penalty.requires_grad:
        torch.autograd.grad(penalty, leaves, allow_unused=True)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_dual_tensors_are_refused_by_registered_operators(requires_grad):
    """What a compiled graph calls."""
    x = torch.randn(4, 8, requires_grad=requires_grad)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(tigon.Error, match=r"^\[rms_norm\] forward-mode AD"):
            torch.ops.tigon.rms_norm(dual, None, 1e-6, 0.0, 0)
