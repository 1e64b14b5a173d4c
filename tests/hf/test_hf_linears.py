"""q, k and v, gate and up as one node: the bits of single calls, and single calls where a call is more."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from test_hf_slices import nodes
from tiny import batch, make, step
from torch import nn

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

    def of_others(self, x):
        return self.a(x) + self.b(x + 1) + self.c(input=x)

    def forward(self, x):
        return self.together(x)


@pytest.mark.parametrize("name, found", [("together", ("a", "b")), ("in_branch", None), ("of_others", None)])
def test_calls_of_one_variable(name, found):
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
