"""q, k and v, gate and up as one node: the bits of single calls, and single calls where a call is more."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from test_hf_slices import nodes
from tiny import batch, make, step
from torch import nn
from torch.nn.utils import prune

from tigon.integrations.transformers import apply, linears
from tigon.integrations.transformers.linears import rewrite

NODE = "_LinearsBackward"


def of_one_node(model, inputs):
    return nodes(model(**inputs).loss).count(NODE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "llama_bias_tied", "qwen2", "qwen3", "gemma2", "olmo2"])
@pytest.mark.parametrize("frozen", ["", "embed_tokens", "q_proj", "k_proj.weight,up_proj", "proj"])
def test_the_bits_of_single_calls(family, dtype, frozen, monkeypatch, device):
    model = make(family, dtype=dtype, device=device)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part and part in name for part in frozen.split(",")))
    apply(model)
    inputs, single = batch(device), copy.deepcopy(model)
    loss, gradients = step(model, inputs)
    assert of_one_node(model, inputs) == 4  # attention and MLP of two layers
    monkeypatch.setattr(linears, "_LARGE", 0)
    assert of_one_node(single, inputs) == 0
    wanted, others = step(single, inputs)
    assert torch.equal(loss, wanted) and gradients.keys() == others.keys()
    if family == "olmo2":  # x goes on as the residual too: its gradients add up in another order
        assert all((g - others[name]).norm() <= 0.02 * g.norm() for name, g in gradients.items())
    else:
        assert all(torch.equal(g, others[name]) for name, g in gradients.items())


def test_what_needs_no_gradient(device):
    parent = nn.Module()
    parent.a, parent.b = nn.Linear(3, 4, device=device), nn.Linear(3, 5, device=device)
    parent.a.requires_grad_(False)
    x = torch.randn(2, 3, device=device)
    a, b = linears.linears(parent, ("a", "b"), x)
    assert not a.requires_grad and b.requires_grad
    saved = b.grad_fn.saved_tensors
    assert len(saved) == 1 and saved[0] is x  # no weight
    with torch.no_grad():
        assert not linears.linears(parent, ("a", "b"), x)[1].requires_grad


def _hooked(part):
    part.register_forward_hook(lambda *_: None)


def _bound(part):
    part.forward = lambda x: nn.Linear.forward(part, x)


def _subclassed(part):
    part.__class__ = type("Other", (nn.Linear,), {"forward": lambda self, x: nn.Linear.forward(self, x)})


@pytest.mark.parametrize("change", [_hooked, _bound, _subclassed, lambda part: part.half()])
def test_other_calls_stay_single(change, device):
    parent = nn.Module()
    parent.a, parent.b = nn.Linear(3, 4, device=device), nn.Linear(3, 5, device=device)
    x = torch.randn(2, 3, device=device)
    assert linears.linears(parent, ("a", "b"), x)[0].grad_fn.name() == NODE
    change(parent.b)
    if parent.b.weight.dtype != x.dtype:
        with pytest.raises(RuntimeError, match="dtype"):
            linears.linears(parent, ("a", "b"), x)
    else:
        assert linears.linears(parent, ("a", "b"), x)[0].grad_fn.name() != NODE


def test_second_derivatives_and_transforms(device):
    parent = nn.Module()
    parent.a, parent.b = nn.Linear(3, 4, device=device), nn.Linear(3, 5, device=device)
    parent.double()
    x = torch.randn(2, 3, device=device, dtype=torch.float64, requires_grad=True)

    def f(x):
        return torch.cat(linears.linears(parent, ("a", "b"), x), -1).pow(3)

    torch.autograd.gradcheck(f, x)
    torch.autograd.gradgradcheck(f, x)
    with torch.no_grad():
        wanted = torch.func.jacrev(f)(x)
    assert torch.allclose(torch.func.jacfwd(f)(x), wanted)
    assert torch.allclose(torch.autograd.functional.jacobian(f, x), wanted)
    with torch.autocast(x.device.type, torch.bfloat16):
        assert linears.linears(parent.float(), ("a", "b"), x.float())[0].dtype == torch.bfloat16


def gradients(*ys):
    sum((i + 1) * y.float().pow(2).sum() for i, y in enumerate(ys)).backward()


def _retained(parent, x, call):
    loss = torch.cat(call(x), -1).pow(3).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def _some_inputs(parent, x, call):
    loss = torch.cat(call(x), -1).pow(3).sum()
    loss.backward(inputs=[parent.b.weight], retain_graph=True)
    return torch.autograd.grad(loss, x)


def _second(parent, x, call):
    (dx,) = torch.autograd.grad(torch.cat(call(x), -1).pow(3).sum(), x, create_graph=True)
    dx.pow(2).sum().backward()


def _batched(parent, x, call):
    a, b = call(x)
    rows = torch.eye(6).view(6, 2, 3)[..., :1]
    return torch.autograd.grad([a, b], [x, *parent.parameters()], [rows + a, rows * b], is_grads_batched=True)


def _gradient_hooks(parent, x, call):
    a, b = call(x)
    for t in (a, x, *parent.parameters()):
        t.register_hook(lambda g: 2 * g)
    gradients(a, b)


def _step(p):
    p.data.sub_(p.grad)


def _stepped_in_backward(parent, x, call):
    for p in parent.parameters():
        p.register_post_accumulate_grad_hook(lambda p: _step(p))
    gradients(*call(x))
    return list(parent.parameters())


def _packed(parent, x, call):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: 2 * t.detach(), lambda t: t):
        ys = call(x)
    gradients(*ys)


def _checkpointed(parent, x, call):
    for reentrant in (False, True):
        gradients(*torch.utils.checkpoint.checkpoint(call, x, use_reentrant=reentrant))


def _frozen_later(parent, x, call):
    ys = call(x)
    parent.requires_grad_(False)
    gradients(*ys)


def _tied(parent, x, call):
    parent.b.weight = parent.a.weight
    gradients(*call(x))


def _one_module(parent, x, call):
    parent.b = parent.a
    gradients(*call(x))


def _constant_input(parent, x, call):
    parent.a.weight.requires_grad_(False)
    parent.b.requires_grad_(False)
    gradients(*call(x.detach()))


def _frozen(parent, x, call):
    parent.requires_grad_(False)
    gradients(*call(x))


def _one_unused(parent, x, call):
    gradients(call(x)[1])


def _written_results(parent, x, call):
    a, b = call(x)
    gradients(a.mul_(2), b.add_(a.detach()))


def _parametrised(parent, x, call):
    class Doubled(nn.Module):
        def forward(self, weight):
            return 2 * weight

    nn.utils.parametrize.register_parametrization(parent.b, "weight", Doubled())
    prune.random_unstructured(parent.a, "weight", amount=2)
    gradients(*call(x))


def _property(parent, x, call):
    parent.b.__class__ = type(
        "Other", (nn.Linear,), {"weight": property(lambda p: 2 * p._parameters["weight"])}
    )
    gradients(*call(x))


def _functional(parent, x, call):
    others = {name: (2 * p).detach().requires_grad_() for name, p in parent.named_parameters()}
    gradients(*torch.func.functional_call(parent, others, x))
    return [p.grad for p in others.values()]


def _transformed(parent, x, call):
    gradient = torch.func.grad(lambda x: torch.cat(call(x), -1).pow(3).sum())
    return gradient(x.detach()), torch.func.vmap(gradient)(x.detach()[:, None])


def _mode(parent, x, call):
    class Doubles(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            y = function(*args, **(kwargs or {}))
            return y * 2 if function is torch.nn.functional.linear else y

    with Doubles():
        ys = call(x)
    gradients(*ys)


def _complex(parent, x, call):
    x = x.detach().to(torch.complex64).requires_grad_()
    a, b = call.__self__.to(torch.complex64)(x * (1 + 2j))
    (a * b.conj()).abs().sum().backward()
    return (x.grad,)


def _compiled(parent, x, call):
    gradients(*torch.compile(call, backend="eager", fullgraph=True)(x))


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)

    def forward(self, x):
        return linears.linears(self, ("a", "b"), x)


EVENTS = [
    value
    for name, value in list(globals().items())
    if name.startswith("_") and "call" in getattr(getattr(value, "__code__", None), "co_varnames", ())[:3]
]


@pytest.mark.parametrize("event", EVENTS, ids=[event.__name__[1:] for event in EVENTS])
def test_as_single_calls_whatever_happens(event, monkeypatch):
    found = []
    for large in (linears._LARGE, 0):
        monkeypatch.setattr(linears, "_LARGE", large)
        torch.manual_seed(0)
        pair, x = Pair(), torch.randn(2, 3, requires_grad=True)
        more = event(pair, x, pair.forward)
        found.append([*(more or ()), x.grad, *(p.grad for p in pair.parameters())])
    for shared, single in zip(*found, strict=True):
        assert (shared is None) == (single is None) and (shared is None or torch.equal(shared, single))
    assert any(g is not None and g.abs().sum() > 0 for g in found[0])


def test_changed_inputs_are_noticed(device):
    parent = nn.Module()
    parent.a, parent.b = nn.Linear(3, 4, device=device), nn.Linear(3, 5, device=device)
    x = torch.randn(2, 3, device=device)
    y = linears.linears(parent, ("a", "b"), x)[1].sum()
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


class Calls(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

    def together(self, x):
        y = self.a(x).tanh()
        z = self.b(x) + y
        x = z + 1
        return self.c(x) + self.a(x)

    def in_branch(self, x):
        y = self.a(x)
        if x is not None:
            y = y + self.b(x)
        return y

    def in_choice(self, x):
        return self.a(x) + (self.b(x) if self.c is None else x) + sum(self.c(x) for _ in range(2))

    def returned(self, x):
        y = self.a(x)
        if y.sum() > 0:
            return y
        return self.b(x)

    def changed(self, x):
        y = self.a(x)
        x[0] = 3
        z = self.b(x)
        x.add_(1)
        return self.c(x) + y + z

    def of_others(self, x):
        return self.a(x) + self.b(x + 1) + self.c(input=x)

    def forward(self, x):
        return self.together(x)


@pytest.mark.parametrize("name", ["together", "in_branch", "in_choice", "returned", "changed", "of_others"])
def test_calls_of_one_variable(name):
    found = ("a", "b") if name == "together" else None
    module, x = Calls(), torch.randn(2, 4, requires_grad=True)
    made = rewrite(getattr(Calls, name), frozenset("abc"))
    assert (made and made[0]) == found
    if made:
        assert torch.equal(made[1](module, x), getattr(module, name)(x))
        assert nodes(made[1](module, x)).count(NODE) == 1


def test_copies_and_adapters(device):
    peft = pytest.importorskip("peft")
    model = make("qwen3", device=device)
    apply(model)
    inputs = batch(device)
    again = pickle.loads(pickle.dumps(model))
    assert of_one_node(again, inputs) == of_one_node(copy.deepcopy(model), inputs) == 4
    adapted = peft.get_peft_model(again, peft.LoraConfig(target_modules=["q_proj", "up_proj"]))
    assert of_one_node(adapted, inputs) == 0
