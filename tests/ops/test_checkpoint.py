"""What a checkpoint keeps: the same bits, saved operators once, the others twice."""

import copy
import inspect
import pickle
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

import tigon
from tigon import checkpoint as policies

ROWS, SIZE, EXPERTS = 6, 16, 4
GROUPS = [(), *((name,) for name in policies.GROUPS), ("attention", "matmuls"), tuple(policies.GROUPS)]


class Count(TorchDispatchMode):
    """Names of the operators that ran."""

    def __init__(self):
        super().__init__()
        self.ran = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ran[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


def weights(dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    shapes = {"norm": (SIZE,), "qkv": (3 * SIZE, SIZE), "gate": (SIZE, SIZE), "up": (SIZE, SIZE)}
    shapes |= {"router": (EXPERTS, SIZE), "gate_up": (EXPERTS, 2 * SIZE, SIZE), "down": (EXPERTS, SIZE, SIZE)}
    return {name: torch.randn(shape).div_(4).to(dtype).requires_grad_() for name, shape in shapes.items()}


def layer(x, w, dropout=0.0):
    """A bit of everything that the groups name."""
    h = tigon.rms_norm(x, w["norm"])
    q, k, v = (t.view(1, ROWS, 2, -1).transpose(1, 2) for t in F.linear(h, w["qkv"]).chunk(3, -1))
    angles = torch.arange(ROWS * SIZE // 4, dtype=x.dtype).view(1, ROWS, -1)
    q, k = tigon.rope(q, k, torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1))
    x = x + F.scaled_dot_product_attention(q, k, v, dropout_p=dropout).transpose(1, 2).reshape(x.shape)
    x = x + tigon.swiglu(F.linear(x, w["gate"]), F.linear(x, w["up"]))
    share, ids = tigon.route(F.linear(x, w["router"]), 2)
    return F.dropout(tigon.experts(x, w["gate_up"], w["down"], ids, share.to(x.dtype)), dropout)


def gradients(w, x, function=layer, save=None, **options):
    """Of a sum of squares; forward operators that ran in the forward, and in the backward."""
    for t in (x, *w.values()):
        t.grad = None
    with Count() as first:
        if save is None:
            y = function(x, w, **options)
        else:
            context = tigon.checkpoint_policy(save)
            y = checkpoint(function, x, w, use_reentrant=False, context_fn=context, **options)
    with Count() as second:
        y.square().sum().backward()
    return [y.detach(), x.grad, *(t.grad for t in w.values())], first.ran, second.ran


def inputs(dtype=torch.float32):
    torch.manual_seed(1)
    return torch.randn(ROWS, SIZE).to(dtype).requires_grad_()


def equal(some, others):
    return all((a is None and b is None) or torch.equal(a, b) for a, b in zip(some, others, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("save", GROUPS, ids=lambda save: "+".join(save) or "nothing")
def test_the_same_bits_and_no_saved_operator_twice(save, dtype):
    w, x = weights(dtype), inputs(dtype)
    expected, forward, plain = gradients(w, x)
    found, _, again = gradients(w, x, save=save)
    assert equal(expected, found)
    again = again - plain  # without operators of the backward itself
    kept = {"tigon::route_fwd"}
    for group, name in {
        "attention": "aten::_scaled_dot_product_flash_attention_for_cpu",
        "matmuls": "aten::mm",
        "experts": "tigon::experts_fwd",
        "norms": "tigon::rms_norm_fwd",
        "activations": "tigon::glu_fwd",
        "rope": "tigon::rope_fwd",
    }.items():
        assert forward[name] > 0, name
        if group in save:
            kept.add(name)
        else:
            assert again[name] == forward[name], name
    assert not kept & set(again), save


def test_names():
    x, w = inputs(), weights()
    expected = gradients(w, x)[0]
    found, _, again = gradients(w, x, save="attention")
    assert equal(expected, found)
    assert not any("attention_for_cpu" in name and "backward" not in name for name in again)
    found, _, again = gradients(w, x, save=["tigon::glu_fwd", "aten::mm"])
    assert equal(expected, found)
    assert "tigon::glu_fwd" not in again
    assert "tigon::rms_norm_fwd" in again


@pytest.mark.parametrize(
    "save, given",
    [
        (("attention", "products"), "'products'"),
        ("mm", "'mm'"),
        (("aten::no_such_operator",), "'aten::no_such_operator'"),
        (("tigon::nothing",), "'tigon::nothing'"),
        ((torch.ops.aten.mm,), "aten.mm"),
        (None, "None"),
        (3, "3"),
    ],
)
def test_unknown_names_are_refused(save, given):
    with pytest.raises(tigon.Error, match=r"\[checkpoint_policy\] save must ") as error:
        tigon.checkpoint_policy(save)
    assert given in str(error.value)
    assert "attention, " in str(error.value)


def test_attention_with_dropout_draws_the_same_numbers():
    """Attention that is not run again draws no random numbers: the dropout after it would draw others."""
    w, x = weights(), inputs()
    found = []
    for save in (None, (), ("attention",), tuple(policies.GROUPS)):
        torch.manual_seed(7)
        found.append(gradients(w, x, save=save, dropout=0.3)[0])
    assert all(equal(found[0], other) for other in found[1:])


class Drifting:
    """Equal logits, of which the second run sees others."""

    def __init__(self):
        self.runs = 0

    def __call__(self, x, w):
        self.runs += 1
        drift = torch.linspace(0, 1e-6 * (-1) ** self.runs, EXPERTS)
        return F.linear(x, w["router"]) * 0 + drift


def _route(x, w, logits):
    share, ids = tigon.route(logits(x, w), 2)
    return x * share[:, :1] + w["down"][:, 0][ids].sum(1)


def _topk(x, w, logits):
    share, ids = logits(x, w).softmax(-1).topk(2)
    share /= share.sum(-1, keepdim=True)  # as models do, in place
    return x * share[:, :1] + w["down"][:, 0][ids].sum(1)


@pytest.mark.parametrize("router", [_route, _topk])
@pytest.mark.parametrize("save", [(), ("attention", "matmuls"), tuple(policies.GROUPS)])
def test_experts_are_chosen_once(router, save):
    """The backward computes with the experts of the forward, even where the logits came out otherwise."""
    w, x = weights(), inputs()
    expected = gradients(w, x, router, logits=Drifting())[0]
    logits = Drifting()
    found = gradients(w, x, router, save, logits=logits)[0]
    assert logits.runs == 2
    names = ["y", "x", *w]
    for name in ("y", "down"):
        assert torch.equal(expected[names.index(name)], found[names.index(name)])


@pytest.mark.parametrize("op", ["rope", "add_rms_norm"])
def test_a_saved_result_that_is_overwritten_is_an_error(op):
    """Kept results of frozen matmuls, overwritten without autograd's knowledge, are no operands."""

    def function(x, w):
        with torch.no_grad():
            y = F.linear(x, w["gate"])
            if op == "rope":
                angles = torch.ones(1, ROWS, SIZE)
                tigon.rope(y.view(1, 1, ROWS, SIZE), None, angles.cos(), angles.sin(), inplace=True)
            else:
                tigon.add_rms_norm(y.clone(), y, inplace=True)
        return x * y

    w, x = weights(), inputs()
    with pytest.raises(RuntimeError, match="mutated"):
        gradients(w, x, function, "matmuls")
    expected = gradients(w, x, function)[0]
    assert equal(expected, gradients(w, x, function, ())[0])


IN_PLACE = {
    "rope": lambda x: tigon.rope(x[None, None], None, *torch.randn(2, 1, ROWS, SIZE), inplace=True),
    "add_rms_norm": lambda x: tigon.add_rms_norm(torch.ones_like(x), x, inplace=True),
    "cross_entropy": lambda x: tigon.cross_entropy(x, torch.arange(ROWS), inplace=True),
    "kl_div": lambda x: tigon.kl_div(x, torch.randn(ROWS, SIZE), inplace=True),
    "jsd": lambda x: tigon.jsd(x, torch.randn(ROWS, SIZE), inplace=True),
    "tvd": lambda x: tigon.tvd(x, torch.randn(ROWS, SIZE), inplace=True),
}


@pytest.mark.parametrize("needs_gradient", [False, True])
@pytest.mark.parametrize("grad_mode", [torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("name", IN_PLACE)
def test_who_writes_in_place_tells_autograd(name, grad_mode, needs_gradient):
    """A tensor saved for a backward, then overwritten: no gradient is computed from other values."""
    a = torch.randn(ROWS, SIZE, requires_grad=True)
    x = (a * 1) if needs_gradient else a.detach().clone()
    y, before = x * a, x.detach().clone()
    with grad_mode():
        IN_PLACE[name](x)
    if not torch.equal(x, before):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_every_function_in_place_is_tested():
    functions = {name: getattr(tigon, name) for name in tigon.__all__}
    found = {name for name, f in functions.items() if inspect.isfunction(f)}
    assert {name for name in found if "inplace" in inspect.signature(functions[name]).parameters} == {
        *IN_PLACE
    }


def test_in_place_operators_are_never_saved():
    def function(x, w):
        y = torch.empty(ROWS, SIZE)
        torch.mm(x.detach(), w["gate"].detach(), out=y)
        return x * y

    w, x = weights(), inputs()
    assert equal(gradients(w, x, function)[0], gradients(w, x, function, "matmuls")[0])


@torch.library.custom_op("tests_flash_attn_0a1b::varlen_fwd", mutates_args=())
def flash(q: torch.Tensor, p_dropout: float) -> torch.Tensor:
    return q * (torch.rand_like(q) >= p_dropout) if p_dropout else q * 1


@flash.register_fake
def _(q, p_dropout):
    return torch.empty_like(q)


flash.register_autograd(
    lambda ctx, dy: (dy * ctx.saved_tensors[0], None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output != 0),
)


@pytest.mark.parametrize("dropout, runs", [(0.0, 0), (0.5, 1)])
def test_attention_of_packages(dropout, runs):
    """FlashAttention comes from many packages, each with names of its own; with dropout it draws numbers."""

    def function(x, w):
        y = flash(x, dropout).sin() * w["norm"]
        return F.dropout(y, 0.5).sin()

    w, x = weights(), inputs()
    torch.manual_seed(7)
    expected = gradients(w, x, function)[0]
    torch.manual_seed(7)
    found, _, again = gradients(w, x, function, "attention")
    assert equal(expected, found)
    assert again["tests_flash_attn_0a1b::varlen_fwd"] == runs


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("save", ["attention", ()])
def test_flex_attention(save, monkeypatch):
    """A higher-order operator passes PyTorch's modes, and is attention."""
    from torch.nn.attention.flex_attention import flex_attention

    choose, chosen = policies._choose, []

    def spy(saved, context, op, *args, **kwargs):
        policy = choose(saved, context, op, *args, **kwargs)
        chosen.extend([policy] * (getattr(op, "__name__", "") == "flex_attention"))
        return policy

    monkeypatch.setattr(policies, "_choose", spy)

    def function(x):  # it has no derivative on the CPU
        q = x.detach().view(1, 1, ROWS, SIZE)
        return (x * flex_attention(q, q, q)[0, 0]).sin()

    x = inputs()
    (expected,) = torch.autograd.grad(function(x).sum(), x)
    y = checkpoint(function, x, use_reentrant=False, context_fn=tigon.checkpoint_policy(save))
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], expected)
    assert chosen == [CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE]


@pytest.mark.parametrize("save", [(), ("attention", "matmuls")])
def test_a_graph_that_is_kept(save):
    """PyTorch refuses the second backward of saved results in words; there is no wrong gradient."""
    w, x = weights(), inputs()
    y = checkpoint(layer, x, w, use_reentrant=False, context_fn=tigon.checkpoint_policy(save))
    loss = y.square().sum()
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    try:
        (second,) = torch.autograd.grad(loss, x)
    except RuntimeError as error:
        assert "extra time" in str(error)
    else:
        assert torch.equal(first, second)


def test_nested_checkpoints():
    w, x = weights(), inputs()
    expected = gradients(w, x)[0]
    for reentrant in (False, True):

        def inner(x, w, reentrant=reentrant):
            return checkpoint(layer, x, w, use_reentrant=reentrant)

        assert equal(expected, gradients(w, x, inner, ("attention", "matmuls"))[0])


def test_copies_and_pickles():
    policy = tigon.checkpoint_policy(("attention", "norms"))
    w, x = weights(), inputs()
    expected = gradients(w, x)[0]
    for other in (copy.deepcopy(policy), pickle.loads(pickle.dumps(policy))):
        for t in (x, *w.values()):
            t.grad = None
        y = checkpoint(layer, x, w, use_reentrant=False, context_fn=other)
        y.square().sum().backward()
        assert equal(expected, [y.detach(), x.grad, *(t.grad for t in w.values())])


@pytest.mark.parametrize("save", [(), ("attention", "matmuls"), ("norms", "routing")])
def test_compiled(save):
    """A traced checkpoint takes the policy; saved operators stand in the graph of the backward no more."""
    w, x = weights(), inputs()
    expected = gradients(w, x)[0]
    seen = []

    def backward(graph, example):
        seen.append(Counter(str(node.target) for node in graph.graph.nodes if node.op == "call_function"))
        return graph.forward

    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    compiler = aot_autograd(
        fw_compiler=lambda graph, example: graph.forward,
        bw_compiler=backward,
        partition_fn=min_cut_rematerialization_partition,
    )
    policy = tigon.checkpoint_policy(save)

    @torch.compile(backend=compiler, fullgraph=True)
    def run(x, w):
        return checkpoint(layer, x, w, use_reentrant=False, context_fn=policy)

    for t in (x, *w.values()):
        t.grad = None
    y = run(x, w)
    y.square().sum().backward()
    for a, b in zip(expected, [y.detach(), x.grad, *(t.grad for t in w.values())], strict=True):
        torch.testing.assert_close(a, b)
    (again,) = seen
    assert again["tigon.route.default"] == 0
    assert (again["tigon.rms_norm.default"] == 0) == ("norms" in save)


def test_groups_hold_what_the_library_registers():
    """Each forward operator of the library is in one group, under the name that the docs promise."""
    registered = {
        name.partition("::")[2].partition(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("tigon::")
    }
    forward = {name.removesuffix("_fwd") for name in registered if name.endswith("_fwd")}
    grouped = [name for group in policies.GROUPS.values() for name in group if name.startswith("tigon::")]
    assert len(grouped) == len(set(grouped))
    assert {name.removeprefix("tigon::") for name in grouped} == forward
    for name in forward:
        assert name in registered, "what a compiled model has"


def test_groups_are_documented():
    page = (Path(__file__).parents[2] / "docs/checkpointing.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|(.*)\|(.*)\|$", page, re.MULTILINE)
    documented = {name: set(re.findall(r"`([^`]+)`", ours)) for name, ours, _ in rows}
    assert documented == {
        group: {name.removeprefix("tigon::") for name in names if name.startswith("tigon::")}
        for group, names in policies.GROUPS.items()
    }
    for name, _, others in rows:
        for other in re.findall(r"`(\w+::\w+)`", others):
            assert other in policies.GROUPS[name], other
