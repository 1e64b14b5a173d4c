"""What all functions on a linear head share: labels, counts, graphs, autocast, main_grad, modules."""

import copy
import functools
import inspect
import pickle

import pytest
import torch
from calls import calls
from checks import check_needs, outputs_of, same_bits
from heads import head_inputs, run
from torch.utils.checkpoint import checkpoint

import tigon
from cases.case import Inputs
from cases.heads import as_tigon
from tigon.ops import arguments, cross_entropy
from tigon.ops.loss_head import linear_log_prob
from tigon.ops.loss_head.linear_cross_entropy import OUTPUTS
from tigon.ops.loss_head.reference import reference as linear_ce_reference


def spread(y):
    """A number for each element, whatever it is."""
    return torch.linspace(-1.0, 1.5, y.numel(), device=y.device).view(y.shape)


FUNCTIONS = {
    "linear_cross_entropy": tigon.linear_cross_entropy,
    "kept": lambda h, w, y, **o: tigon.linear_cross_entropy(h, w, y, reduction="none", keep_mb=1.0, **o),
    "linear_log_prob": tigon.linear_log_prob,
    "linear_loss": lambda h, w, y, **o: tigon.linear_loss(h, w, y, torch.neg, reduction="none", **o),
    "several": lambda h, w, y, **o: tigon.linear_log_prob(h, w, torch.stack((y, y), -1), **o).sum(-1),
    "reduced": lambda h, w, y, **o: tigon.linear_loss(h, w, y, torch.neg, reduction="sum", **o),
    "linear_kl_div": lambda h, w, y, **o: tigon.linear_kl_div(
        h, w, (h @ w.to(h.dtype).T).detach() + 1, y, hard=0.5, **o
    ),
    "multi_token": lambda h, w, y, **o: tigon.multi_token_loss(h, [w, w], y, **o).loss,
    "linear_policy": lambda h, w, y, **o: tigon.linear_policy(h, w, y, spread(y), **o).loss,
    "linear_preference": lambda h, w, y, **o: tigon.linear_preference(
        h, w, y, nll=1.0, nll_target=y[: len(y) // 2], **o
    )[0],
    "linear_kto": lambda h, w, y, **o: tigon.linear_kto(h, w, y, spread(y)[:, 0] > 0, **o)[0],
}


@pytest.mark.parametrize("ignored", [-100, 255, 2**32 + 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_labels_of_other_integers(name, dtype, ignored, device):
    """As int64, also where ignore_index does not fit: 156 is -100 in 8 bits, 3 is 2^32 + 3 in 32."""
    hidden, weight = torch.randn(2, 6, 8, device=device), torch.randn(256, 8, device=device)
    target = torch.tensor([[156, 255, 3, 255, 0, 8], [7, 156, 1, 255, 255, 99]], device=device)
    options = {"ignore_index": ignored} | ({} if name in ("several", "multi_token") else {"shift": True})
    leaves = [x.to(dtype).requires_grad_() for x in (hidden, weight)]
    results = [
        run(FUNCTIONS[name], (*leaves, y), options) for y in (target, target.to(torch.uint8), target.int())
    ]
    for a, b, c in zip(*results, strict=True):
        assert same_bits(a, b) and same_bits(a, c)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_of_wider_parameters(name, dtype, device):
    """A weight and a bias in float64 beside narrower hidden states: the gradients of float32, in float64."""
    hidden, weight, target = head_inputs((2, 6), 8, 16, dtype=dtype, device=device)
    takes_bias = name != "multi_token"
    found = []
    for wide in (torch.float32, torch.float64):
        leaves = [x.detach().to(of).requires_grad_() for x, of in ((hidden, dtype), (weight, wide))]
        bias = torch.linspace(-1, 1, 16, device=device, dtype=wide).requires_grad_()
        FUNCTIONS[name](*leaves, target, **({"bias": bias} if takes_bias else {})).sum().backward()
        found.append([x.grad for x in (*leaves, bias)[: 2 + takes_bias]])
        assert [x.dtype for x in found[-1]] == [dtype, wide, wide][: 2 + takes_bias]
    for narrow, wide in zip(*found, strict=True):
        torch.testing.assert_close(narrow, wide.to(narrow.dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_main_grad_of_every_function(name, dtype, device):
    """weight's gradient is added there and nowhere else, and hidden's is what it is without."""
    hidden, weight, target = head_inputs((2, 6), 8, 16, dtype=dtype, device=device)
    call = FUNCTIONS[name]
    call(hidden, weight, target).sum().backward()
    alone = hidden.grad.clone()
    owned = weight.detach().clone().requires_grad_()
    owned.tigon_main_grad, owned.main_grad = True, torch.zeros(16, 8, device=device)
    for _ in range(2):
        call(hidden, owned, target).sum().backward()
    assert owned.grad is None
    torch.testing.assert_close(owned.main_grad, 2 * weight.grad.float(), rtol=2e-2, atol=1e-2)
    torch.testing.assert_close(hidden.grad, 3 * alone, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda result: pickle.loads(pickle.dumps(result))])
def test_copies_of_results(copier):
    hidden, weight, target = (t.detach() for t in head_inputs())
    teacher = torch.zeros(12, 40)
    for result in (
        tigon.linear_cross_entropy(hidden, weight, target, outputs=("loss", "entropy")),
        tigon.linear_kl_div(hidden, weight, teacher, target, hard=0.5, outputs=("loss", "soft")),
    ):
        other = copier(result)
        assert type(other) is type(result) and other._fields == result._fields
        assert all(same_bits(a, b) for a, b in zip(other, result, strict=True))


def _adapted(h, w, y, **o):
    pair = (torch.linspace(-1, 1, 3 * n, device=h.device).to(h) for n in (h.shape[-1], w.shape[0]))
    lora = (*(x.view(shape) for x, shape in zip(pair, ((3, -1), (-1, 3)), strict=True)), 0.5)
    options = {"lora": lora, "temperature": 0.7, "token_weight": spread(y) + 1.0, "outputs": OUTPUTS} | o
    return tigon.linear_cross_entropy(h, w, y, **options).loss


def _candidates(h, w, y, **o):
    log_prob, indices = torch.log_softmax((h.detach() @ w.detach().to(h).T).float(), -1).topk(5)
    return tigon.linear_jsd(h, w, (indices, log_prob), y, hard=0.2, temperature=1.3, **o)


BY_SEQUENCE = {"level": "sequence", "normalise": "sequence", "entropy": 0.1}
# Calls in other forms, of which the promises below hold too.
FORMS = FUNCTIONS | {
    "with an adapter": _adapted,
    "candidates": _candidates,
    "linear_tvd": lambda h, w, y, **o: tigon.linear_tvd(h, w, (spread(h).to(h), spread(w).to(w)), y, **o),
    "of tensors": lambda h, w, y, **o: tigon.linear_loss(h, w, y, torch.mul, spread(y), **o),
    "sequences": lambda h, w, y, **o: (
        tigon.linear_policy(h, w, y, spread(y)[:, 0], old=spread(y) - 3.0, **BY_SEQUENCE, **o).loss
    ),
    "entropy": lambda h, w, y, **o: sum(tigon.linear_log_prob(h, w, y, entropy=True, **o)),
    "wide": lambda h, w, y, **o: tigon.linear_cross_entropy(h, w, y, logit_dtype=torch.float32, **o),
    "again": functools.partial(tigon.linear_log_prob, keep_mb=0),
    "in part": functools.partial(tigon.linear_log_prob, keep_mb=4e-4, chunk_rows=4),
    "drafter": lambda h, w, y, **o: tigon.drafter_loss(
        h, w, (spread(h).to(h), spread(w).to(w)), loss="lk", mask=y != -100, shifts=(1,), **o
    ),
    "simpo": lambda h, w, y, **o: tigon.linear_preference(h, w, y, kind="simpo", **o).loss,
    "contrastive": lambda h, w, y: tigon.contrastive_loss(h.flatten(0, 1), w, y.flatten(), symmetric=True),
}
# And by chunks of less rows than the calls have.
FORMS |= {
    f"{name} by chunks": functools.partial(FORMS[name], chunk_rows=4)
    for name in ("linear_cross_entropy", "linear_log_prob", "linear_preference", "linear_kto", "sequences")
}
NO_BIAS = ("multi_token", "drafter", "contrastive")
OF_PYTHON = ("linear_loss", "reduced", "of tensors")  # which no graph holds
# On CUDA these compute all rows if the number of labels takes several chunks.
ALL_ROWS = [f"{name} by chunks" for name in ("linear_preference", "linear_kto", "sequences")]
PER_ROW = ("linear_log_prob", "kept", "in part")
every_form = pytest.mark.parametrize("name", FORMS)


def drawn(dtype=torch.float32, device="cpu", lead=(2, 6)):
    return head_inputs(lead, 8, 16, dtype=dtype, device=device)


@pytest.mark.parametrize("name", [name for name in FORMS if name != "multi_token"])
def test_autocast(name, device):
    """As with operands in autocast's dtype; the gradient of a float32 weight is rounded to that alone."""
    hidden, weight, target = drawn(device=device)
    with torch.autocast(device, torch.bfloat16):
        got = run(FORMS[name], (hidden, weight, target), {})
    narrow = [x.detach().bfloat16().requires_grad_() for x in (hidden, weight)]
    want = run(FORMS[name], (*narrow, target), {})
    assert got[1].dtype == got[2].dtype == torch.float32
    assert same_bits(got[0], want[0]) and same_bits(got[1], want[1].float())
    torch.testing.assert_close(got[2], want[2].float(), rtol=2**-8, atol=1e-6)


@every_form
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed(name, reentrant, device):
    """A checkpoint hands every saved tensor out once."""
    args = drawn(device=device)

    def call(*args):
        return checkpoint(FORMS[name], *args, use_reentrant=reentrant).sum()

    got, want = [], []
    for found, fn in ((got, call), (want, lambda *args: FORMS[name](*args).sum())):
        leaves = [x.detach().requires_grad_() for x in args[:2]]
        loss = fn(*leaves, args[2])
        loss.backward()
        found += [loss.detach(), *(x.grad for x in leaves)]
    assert all(map(same_bits, got, want))


@pytest.mark.parametrize("name", [name for name in FORMS if name not in OF_PYTHON])
def test_compiled(name, device):
    """One graph for any number of rows, with the bits of eager calls."""
    torch._dynamo.reset()
    compiled = torch.compile(FORMS[name], fullgraph=True, backend="aot_eager", dynamic=True)
    for lead, frozen in (((2, 6), False), ((4, 9), False), ((4, 9), True))[: 2 + (name in PER_ROW)]:
        hidden, weight, target = drawn(torch.bfloat16, device, lead)
        args = (hidden, weight.detach() if frozen else weight, target)
        assert all(map(same_bits, run(compiled, args, {}), run(FORMS[name], args, {})))


@every_form
def test_without_gradients(name, device):
    args = drawn(device=device)
    with torch.no_grad():
        loss = FORMS[name](*args)
    assert loss.grad_fn is None
    torch.testing.assert_close(loss, FORMS[name](*args).detach(), rtol=0, atol=0 if device == "cpu" else 1e-5)


@every_form
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_kept_graph(name, dtype, device):
    """Its gradients are handed out again and again, and scaled; a graph that is not kept runs once."""
    hidden, weight, target = drawn(dtype, device)
    loss = FORMS[name](hidden, weight, target).sum()
    leaves, factor = (hidden, weight), torch.tensor(4.0, device=device)
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    copies = [g.clone() for g in first]
    four = torch.autograd.grad(loss, leaves, factor, retain_graph=True)
    again = torch.autograd.grad(loss, leaves)
    assert all(map(same_bits, first, copies)) and all(map(same_bits, first, again))
    assert all(same_bits(g, 4 * one) for g, one in zip(four, first, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize("name", [name for name in FORMS if name not in NO_BIAS])
def test_gradients_on_demand(name, device):
    """Of hidden states, weight, bias and both matrices of an adapter: every set of them."""
    hidden, weight, target = drawn(device=device)
    options, names = {"bias": torch.randn(16, device=device)}, ("bias",)
    if name not in OF_PYTHON:
        options |= {"lora_a": torch.randn(3, 8, device=device), "lora_b": torch.randn(16, 3, device=device)}
        names = tuple(options)
    inputs = Inputs((hidden, weight, target), options, grads=(0, 1), grad_kwargs=names)
    check_needs(lambda *args, **options: FORMS[name](*args, **as_tigon(options)), inputs)


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", [name for name in FORMS if name not in (*NO_BIAS, "candidates")])
def test_counts_of_labels(name, dtype, shift, device):
    """The count says which rows are computed; a wrong one is an error where it is looked at, else NaN."""
    options = {"shift": 1} if shift and name != "several" else {}
    device = "cpu" if dtype == torch.float64 else device  # the route of the reference
    args = drawn(dtype, device)
    count = int((args[2][:, len(options) :] != -100).sum())
    got, want = run(FORMS[name], args, options | {"valid_rows": count}), run(FORMS[name], args, options)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    for wrong in (count - 1, count + 1, 0):
        if device == "cpu":
            words = rf"valid_rows must be the number of labels .*{count}, got {wrong}"
            with pytest.raises(tigon.Error, match=words):
                FORMS[name](*args, **options, valid_rows=wrong)
            continue
        loss = FORMS[name](*args, **options, valid_rows=wrong).detach()
        if name in ALL_ROWS and not loss.isnan():
            torch.testing.assert_close(loss, want[0], rtol=1e-4, atol=1e-6)
        else:
            assert (loss.isnan() | (want[0] == 0)).all() and loss.isnan().any()


MODULES = {name: name.title().replace("_", "") + "Loss" for name in ("linear_cross_entropy", "linear_policy")}
MODULES |= {"linear_kl_div": "LinearKLDivLoss", "linear_jsd": "LinearJSDLoss", "linear_tvd": "LinearTVDLoss"}
MODULES |= {"linear_preference": "LinearPreferenceLoss", "linear_kto": "LinearKTOLoss"}


@pytest.mark.parametrize(
    "call", [c for c in calls() if c.name.removesuffix(" with all") in MODULES], ids=lambda call: call.name
)
def test_modules(call):
    """What a module is made with goes to its function; the rest comes with each call."""
    module, given = getattr(tigon.nn, MODULES[call.function.__name__]), call.draw() | {"denominator": 7.0}
    of_calls = set(inspect.signature(module.forward).parameters) & set(given)
    own = {name: value for name, value in given.items() if name not in of_calls} | {"temperature": 0.8}
    made = module(**own)
    got = made(**{name: given[name] for name in of_calls})
    want = call.function(**given | own)
    for a, b in zip(outputs_of(got), outputs_of(want), strict=True):
        assert same_bits(a, b)
    assert "temperature=0.8" in repr(made)
    with pytest.raises(TypeError):
        module(warmth=0.5)


@pytest.mark.parametrize("ignore_index", [-100, 0])
@pytest.mark.parametrize("shape", [(2, 6), (2, 6, 3)], ids=["one label", "several"])
def test_plain_formulas_of_labels_of_no_class(monkeypatch, shape, ignore_index):
    """On a GPU, where nothing refuses them, PyTorch's kernels never see them: NaN for these rows alone."""
    hidden, weight, _ = drawn(torch.float64)
    target = torch.arange(torch.Size(shape).numel()).view(shape) % 15 + 1
    wrong = target.clone()
    wrong[0, 2], wrong[1, 3] = 16, -100 if ignore_index == 0 else -7
    wrong[0, 1] = target[0, 1] = ignore_index
    options = {"ignore_index": ignore_index}
    monkeypatch.setattr(arguments, "refuses_labels", lambda _: False)

    broken = torch.zeros(2, 6, dtype=torch.bool)
    broken[0, 2] = broken[1, 3] = True

    def rows_of(labels):
        found = [linear_log_prob.reference(hidden, weight, labels, **options)]
        if labels.dim() == 2:
            logits = hidden @ weight.T
            of_rows = options | {"outputs": ("loss", "log_prob")}
            found += linear_ce_reference(hidden, weight, labels, reduction="none", **of_rows)[:1]
            log_prob = linear_ce_reference(hidden, weight, labels, **of_rows).log_prob
            assert torch.equal(log_prob.isnan(), broken & (labels != target))
            found += [cross_entropy.reference(logits, labels, reduction="none", z_loss=0.1, **options)]
        return found

    for got, want in zip(rows_of(wrong), rows_of(target), strict=True):
        rows = got.view(2, 6, -1)
        assert rows[broken].isnan().all() and same_bits(rows[~broken], want.view(2, 6, -1)[~broken])
        (gradient,) = torch.autograd.grad(got.sum(), hidden, retain_graph=True)
        assert torch.equal(gradient.isnan().all(-1), broken)
