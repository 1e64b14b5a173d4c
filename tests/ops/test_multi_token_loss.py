"""Several heads over one trunk: what the cases cannot say. Modules, matmuls, memory, refusals."""

import itertools

import pytest
import torch
from checks import same_bits
from torch import nn
from torch.profiler import ProfilerActivity, profile

import tigon
from conftest import allocations

H, V, T = 16, 40, 12
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def draw(dtype=torch.float32, device="cpu", heads=2, layers=1, rows=(2, T)):
    """Trunk, heads whose blocks do something, labels."""
    torch.manual_seed(0)
    hidden = torch.randn(*rows, H).to(device, dtype).requires_grad_()
    made = tigon.nn.MedusaHeads(H, V, heads, layers)
    for p in made.parameters():
        nn.init.normal_(p, std=0.5 if p.dim() == 1 else p.shape[1] ** -0.5)
    labels = torch.randint(0, V, rows)
    labels[torch.rand(rows) < 0.2] = -100
    return hidden, made.to(device, dtype), labels.to(device)


def gradients(loss, hidden, module, **options):
    return torch.autograd.grad(loss, [hidden, *module.parameters()], **options)


def composed(hidden, heads, labels, coefficients, shifts):
    """Head by head, differentiated by autograd."""
    losses = [
        c * tigon.linear_cross_entropy(head[:-1](hidden), head[-1].weight, labels, shift=k)
        for head, c, k in zip(heads, coefficients, shifts, strict=True)
    ]
    return sum(losses[1:], losses[0])


# --- results -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("upstream", [1.0, 0.5])
def test_one_head_is_the_plain_one(dtype, upstream, device):
    hidden, heads, labels = draw(dtype, device, heads=1, layers=0)
    weight, options = heads[0][0].weight, {"softcap": 5.0, "z_loss": 1e-3, "chunk_rows": 8}
    for denominator in (None, 7.0, torch.tensor(7.0, device=device)):
        want = tigon.linear_cross_entropy(hidden, weight, labels, shift=1, denominator=denominator, **options)
        got = tigon.multi_token_loss(hidden, [weight], labels, denominator=denominator, **options)
        assert same_bits(got.loss, want) and same_bits(got.losses[0], want)
        pairs = zip(
            gradients(got.loss * upstream, hidden, heads),
            gradients(want * upstream, hidden, heads),
            strict=True,
        )
        assert all(same_bits(a, b) for a, b in pairs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_head_with_a_block_is_the_plain_one(dtype, device):
    hidden, heads, labels = draw(dtype, device, heads=1, layers=2)
    want = composed(hidden, heads, labels, [1.0], [3])
    got = tigon.multi_token_loss(hidden, heads, labels, shifts=[3])
    assert same_bits(got.loss, want)
    for a, b in zip(gradients(got.loss, hidden, heads), gradients(want, hidden, heads), strict=True):
        if device == "cpu" or dtype != torch.float32:
            assert same_bits(a, b)
        else:  # cuBLAS chooses among its float32 kernels by more than sizes
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6 * b.abs().max().item())


@pytest.mark.parametrize("dtype", DTYPES)
def test_losses_and_accuracies_of_each_head(dtype, device):
    hidden, heads, labels = draw(dtype, device, heads=3)
    got = tigon.multi_token_loss(hidden, heads, labels, coefficients=[1, 0.5, 0], shifts=[1, 2, 4])
    assert not got.losses.requires_grad and not got.accuracies.requires_grad
    for i, k in enumerate((1, 2, 4)):
        states, weight = heads[i][:-1](hidden), heads[i][-1].weight
        out = tigon.linear_cross_entropy(states, weight, labels, shift=k, outputs=("loss", "correct"))
        assert same_bits(got.losses[i], out.loss.detach())
        count = (labels[:, k:] != -100).sum()
        assert got.accuracies[i] == out.correct.sum() / count
    torch.testing.assert_close(got.loss.detach(), got.losses[0] + 0.5 * got.losses[1])
    with torch.no_grad():
        again = tigon.multi_token_loss(hidden, heads, labels, coefficients=[1, 0.5, 0], shifts=[1, 2, 4])
    assert all(same_bits(a.detach(), b) for a, b in zip(got, again, strict=True))


def test_no_label_left():
    """Shifts past the rows' end: nothing counts, no accuracy, gradients of a sum are zero."""
    hidden, heads, labels = draw()
    got = tigon.multi_token_loss(hidden, heads, labels, shifts=[T, 50], reduction="sum")
    assert got.loss == 0 and got.accuracies.isnan().all()
    assert not any(g.any() for g in gradients(got.loss, hidden, heads))
    assert tigon.multi_token_loss(hidden, heads, labels, shifts=[T, 50]).loss.isnan()


# --- gradients ---------------------------------------------------------------------------------


@pytest.mark.parametrize("upstream", [1.0, 0.25])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_compiled_and_owned_heads_have_the_same_bits(dtype, upstream, device):
    """Formed head by head, or by autograd under torch.compile and with main_grad."""
    hidden, heads, labels = draw(dtype, device, heads=3, layers=0)

    def loss(hidden, labels):
        return heads(hidden, labels, head=heads[0][-1].weight).loss * upstream

    want = gradients(loss(hidden, labels), hidden, heads)
    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")(hidden, labels)
    got = gradients(compiled, hidden, heads)
    assert same_bits(got[0], want[0]) and all(same_bits(a, b) for a, b in zip(got[2:], want[2:], strict=True))
    weight = heads[1][-1].weight
    weight.tigon_main_grad, weight.main_grad = True, torch.ones_like(weight, dtype=torch.float32)
    owned = torch.autograd.grad(
        loss(hidden, labels), [hidden, heads[2][-1].weight, weight], allow_unused=True
    )
    assert same_bits(owned[1], want[3]) and owned[2] is None
    for a, b in (
        (owned[0], want[0]),
        (weight.main_grad - 1, want[2]),
    ):  # upstream gradients multiplied before
        error = (a.float() - b.float()).abs().max() / b.abs().max()
        assert error < (1e-2 if dtype == torch.bfloat16 else 1e-5)


def test_compiled_blocks(device):
    hidden, heads, labels = draw(torch.bfloat16, device, heads=2)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, y: heads(x, y), fullgraph=True, backend="aot_eager")
    want, got = heads(hidden, labels), compiled(hidden, labels)
    assert all(same_bits(a.detach(), b.detach()) for a, b in zip(want, got, strict=True))
    pairs = zip(gradients(got.loss, hidden, heads), gradients(want.loss, hidden, heads), strict=True)
    assert all(same_bits(a, b) for a, b in pairs)


def test_trunk_is_summed_in_float32():
    """Many heads that nearly cancel: 16-bit partial sums would lose what is left."""
    hidden, heads, labels = draw(torch.bfloat16, heads=1, layers=0)
    weight, signs = heads[0][0].weight, [1.0, 1.0, 1.0, -1.0, -1.0, -1.0, 1.0]
    got = tigon.multi_token_loss(hidden, [weight] * 7, labels, coefficients=signs, shifts=[1] * 7)
    one = tigon.multi_token_loss(hidden, [weight], labels)
    pairs = zip(gradients(got.loss, hidden, heads), gradients(one.loss, hidden, heads), strict=True)
    assert all(same_bits(a, b) for a, b in pairs)


@pytest.mark.parametrize("upstream", [1.0, 0.7])
def test_gradients_that_share_memory(upstream):
    """``x + p``: both have the same gradient, in one tensor."""

    class Add(nn.Module):
        def __init__(self):
            super().__init__()
            self.p = nn.Parameter(torch.randn(2, T, H))
            self.scalar = nn.Parameter(torch.tensor(1.5))

        def forward(self, x):
            return (x + self.p) * self.scalar

    torch.manual_seed(0)
    hidden, heads, labels = draw()
    add, weight = Add(), heads[0][-1].weight
    leaves = [hidden, weight, add.p, add.scalar]
    got = torch.autograd.grad(tigon.multi_token_loss(hidden, [(add, weight)], labels).loss * upstream, leaves)
    want = torch.autograd.grad(
        tigon.linear_cross_entropy(add(hidden), weight, labels, shift=1) * upstream, leaves
    )
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


def test_coefficient_zero_gives_no_gradient():
    hidden, heads, labels = draw(heads=2)
    out = tigon.multi_token_loss(hidden, heads, labels, coefficients=[1.0, 0.0])
    found = gradients(out.loss, hidden, heads, allow_unused=True)
    assert [g is None for g in found] == [False, *[False] * 3, *[True] * 3]
    with torch.no_grad():
        heads[1][-1].weight.fill_(float("nan"))
    out = tigon.multi_token_loss(hidden, heads, labels, coefficients=[1.0, 0.0])
    assert out.loss.isfinite() and out.losses[1].isnan()
    out = tigon.multi_token_loss(hidden, heads[:1], labels, coefficients=[0])
    assert out.loss == 0 and not out.loss.requires_grad


def test_hooks_of_the_callers_tensors(device):
    """Each runs once, in the backward; ``retain_grad`` holds the gradient; autograd's own is the measure."""
    runs = []
    for loss in (lambda h, n, lo: tigon.multi_token_loss(h, n, lo).loss, None):
        hidden, heads, labels = draw(device=device)
        weight = heads[1][-1].weight * 1.0
        weight.retain_grad()
        calls = []

        def hook(gradient, calls=calls):
            calls.append(0)
            return gradient * 2

        for p in (weight, hidden, *heads.parameters()):
            p.register_hook(hook)
        given = [heads[0], (heads[1][:-1], weight)]
        if loss:
            total = loss(hidden, given, labels)
        else:
            parts = [(heads[0][:-1](hidden), heads[0][-1].weight), (given[1][0](hidden), weight)]
            total = sum(tigon.linear_cross_entropy(*p, labels, shift=k + 1) for k, p in enumerate(parts))
        assert not calls
        total.backward()
        runs.append([len(calls), weight.grad, hidden.grad, *(p.grad for p in heads.parameters())])
    (count, *ours), (expected, *theirs) = runs
    assert count == expected
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_what_holds_parameters_and_is_no_module():
    """Autograd differentiates the whole."""
    hidden, heads, labels = draw(heads=1)

    class Block:
        def parameters(self):
            return heads[0][0].parameters()

        def __call__(self, x):
            return heads[0][0](x)

    want = gradients(tigon.multi_token_loss(hidden, heads, labels).loss, hidden, heads)
    scripted = torch.jit.trace(heads[0][0], hidden)
    for block in (Block(), scripted):
        out = tigon.multi_token_loss(hidden, [(block, heads[0][1].weight)], labels)
        for a, b in zip(gradients(out.loss, hidden, heads), want, strict=True):
            torch.testing.assert_close(a, b)


def test_float64_has_every_derivative():
    hidden, heads, labels = draw(torch.float64, heads=2, rows=(1, 4))

    def loss(x):
        return tigon.multi_token_loss(x, heads, labels).loss

    assert torch.autograd.gradcheck(loss, (hidden,)) and torch.autograd.gradgradcheck(loss, (hidden,))


def test_autocast(device):
    hidden, heads, labels = draw(device=device)
    with torch.autocast(device, torch.bfloat16):
        out = heads(hidden, labels)
        want = composed(hidden, heads, labels, [0.8, 0.64], [2, 3])
    pairs = zip(gradients(out.loss, hidden, heads), gradients(want, hidden, heads), strict=True)
    for a, b in pairs:
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=2e-2, atol=1e-4)


# --- what it costs -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trunk", "weights", "wanted"), [(True, True, 9), (False, True, 6), (True, False, 6), (False, False, 3)]
)
def test_matmuls(trunk, weights, wanted):
    """A frozen trunk has no matmul of its gradient, frozen heads none of theirs."""
    hidden, heads, labels = draw(heads=3, layers=0)
    hidden.requires_grad_(trunk)
    heads.requires_grad_(weights)

    def step():
        loss = heads(hidden, labels).loss
        if loss.requires_grad:
            loss.backward()

    with profile(activities=[ProfilerActivity.CPU]) as prof:
        step()
    names = [event.name() for event in prof.profiler.kineto_results.events()]
    assert sum(name in ("aten::mm", "mkldnn::_linear_pointwise") for name in names) == wanted
    assert (hidden.grad is not None) == trunk


def test_memory_besides_gradients_is_that_of_one_head():
    rows, size, vocab = 512, 64, 2000

    def peak(heads):
        hidden = torch.randn(1, rows, size, requires_grad=True)
        labels = torch.randint(0, vocab, (1, rows))
        module = tigon.nn.MedusaHeads(size, vocab, heads, 1)

        def step():
            gradients(module(hidden, labels).loss, hidden, module)

        step()
        most = max(itertools.accumulate(allocations(step)))
        return most - heads * 4 * sum(p.numel() for p in module[0].parameters())

    one, five = peak(1), peak(5)
    assert five <= one + 2 * 4 * rows * size  # the sum of the trunk's gradient


# --- MedusaHeads -------------------------------------------------------------------------------


def test_medusa_heads_begin_as_the_model():
    weight, hidden = torch.randn(V, H), torch.randn(2, T, H)
    heads = tigon.nn.MedusaHeads(H, V, num_heads=3, num_layers=2).copy_head(weight)
    assert list(heads.state_dict())[:5] == [
        "0.0.linear.weight",
        "0.0.linear.bias",
        "0.1.linear.weight",
        "0.1.linear.bias",
        "0.2.weight",
    ]
    logits = heads(hidden)
    assert logits.shape == (3, 2, T, V)
    assert all(torch.equal(head_logits, hidden @ weight.T) for head_logits in logits)
    other = tigon.nn.MedusaHeads(H, V, 3, 2, dtype=torch.bfloat16)
    other.load_state_dict(heads.state_dict())
    assert other[0][-1].weight.dtype == torch.bfloat16
    for options, message in (
        ({"num_heads": 0}, r"\[MedusaHeads\] num_heads must be > 0, got 0"),
        ({"num_layers": -1}, "num_layers must be >= 0, got -1"),
        ({"num_heads": 1.5}, "num_heads must be an int, got float"),
    ):
        with pytest.raises(tigon.Error, match=message):
            tigon.nn.MedusaHeads(H, V, **options)
    with pytest.raises(tigon.Error, match=r"weight must be \[40, 16\], got \[41, 16\]"):
        heads.copy_head(torch.randn(V + 1, H))


def test_medusa_stages():
    """Stage 1: the heads alone. Stage 2: the model's own head first."""
    hidden, heads, labels = draw(heads=2)
    head = nn.Linear(H, V, bias=False)
    want = composed(hidden, heads, labels, [0.8, 0.64], [2, 3])
    torch.testing.assert_close(heads(hidden, labels).loss, want)
    want = composed(hidden, heads, labels, [0.16, 0.128], [2, 3])
    want = want + tigon.linear_cross_entropy(hidden, head.weight, labels, shift=True)
    out = heads(hidden, labels, head=head, scale=0.2)
    torch.testing.assert_close(out.loss, want)
    assert out.losses.shape == out.accuracies.shape == (3,)


# --- refusals ----------------------------------------------------------------------------------


class Narrow(nn.Module):
    def forward(self, x):
        return x[..., :-1]


W = torch.randn(V, H)
BAD = {
    "no heads": ([], {}, "heads must be a sequence of at least one head, got 0"),
    "a Sequential for all": (
        nn.Sequential(nn.Linear(H, V)),
        {},
        "heads must be a sequence of at least one head, got Sequential",
    ),
    "a head of another kind": ([W, "w"], {}, "heads must be tensors .* got str at 1"),
    "a module without a weight": ([nn.SiLU()], {}, "heads must be tensors .* got SiLU at 0"),
    "coefficients": ([W, W], {"coefficients": [1.0]}, "coefficients must be one for each of 2 heads, got 1"),
    "shifts": ([W, W], {"shifts": [1, 2, 3]}, "shifts must be one for each of 2 heads, got 3"),
    "one shift": ([W], {"shifts": 1}, r"shifts must be a sequence of 1 \(or None\), got int"),
    "lora": ([W], {"lora": [None, None]}, "lora must be one for each of 1 heads, got 2"),
    "valid_rows": ([W], {"valid_rows": []}, "valid_rows must be one for each of 1 heads, got 0"),
    "denominators": ([W], {"denominator": [1, 2]}, "denominator must be one for each of 1 heads, got 2"),
    "negative shift": ([W], {"shifts": [-1]}, "shifts must be >= 0, got -1"),
    "float shift": ([W], {"shifts": [1.0]}, "shifts must be an int, got float"),
    "coefficient": ([W], {"coefficients": ["1"]}, r"coefficients\[0\] must be a number, got str"),
    "tensor": ([W], {"coefficients": [torch.ones(())]}, r"coefficients\[0\] must be a number, got "),
    "weight's size": (
        [W[:, :-1]],
        {},
        r"heads\[0\] must return \[2, 12, 15\] to fit its weight \[40, 15\], got .*16\]",
    ),
    "result": (
        [W, (Narrow(), W)],
        {},
        r"heads\[1\] must return .*16\] to fit its weight \[40, 16\], got .*15\]",
    ),
    "no tensor": ([(lambda x: None, W)], {}, r"heads\[0\] must return a tensor, got NoneType"),
    "weight's shape": ([W[0]], {}, r"heads\[0\]'s weight must be \[V, H\], got \[16\]"),
    "weight's dtype": ([W.long()], {}, r"heads\[0\]'s weight must be a float tensor"),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("grad", [False, True])
def test_bad_calls_are_refused(name, grad):
    heads, options, message = BAD[name]
    hidden, _, labels = draw()
    with pytest.raises(tigon.Error, match=rf"^\[multi_token_loss\] {message}"):
        tigon.multi_token_loss(hidden.detach().requires_grad_(grad), heads, labels, **options)


def test_hidden_of_one_dimension_is_refused():
    hidden, heads, labels = draw()
    with pytest.raises(tigon.Error, match=r"^\[multi_token_loss\] hidden must be \[..., T, H\], got \[16\]"):
        tigon.multi_token_loss(hidden[0, 0], heads, labels)


def test_gradients_that_would_be_lost_are_refused():
    hidden, _, labels = draw()
    foreign = torch.randn(H, requires_grad=True)
    for scale in (foreign, foreign * 2):
        with pytest.raises(tigon.Error, match=r"heads\[1\] must use no tensor that needs a gradient but"):
            tigon.multi_token_loss(hidden, [W, (lambda x, s=scale: x * s, W)], labels)
    constant = foreign.detach()
    tigon.multi_token_loss(hidden, [(lambda x: x * constant, W)], labels).loss.backward()
    assert hidden.grad is not None
