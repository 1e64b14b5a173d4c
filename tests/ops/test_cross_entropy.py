"""The loss of given logits beyond the cases: options together, sharp rows, gradients in place, refusals."""

import pytest
import torch
import torch.nn.functional as F
from checks import check_close, refusals, refused, same_bits

import tigon
from cases.cross_entropy import eager_fn, oracle_fn

NAN = float("nan")


def _inputs(rows=12, v=40, *, dtype=torch.float32, device="cpu", masked=0.25, scale=2.0):
    logits = (scale * torch.randn(rows, v, device=device)).to(dtype).requires_grad_()
    target = torch.randint(0, v, (rows,), device=device)
    target[torch.rand(rows, device=device) < masked] = -100
    return logits, target


def _all(fn, logits, target, upstream=None, **options):
    leaf = logits.detach().requires_grad_()
    loss = fn(leaf, target, **options)
    (grad,) = torch.autograd.grad(loss, leaf, torch.ones_like(loss) if upstream is None else upstream)
    return loss.detach(), grad


def _three(logits, target, upstream, options):
    """Tigon's, plain PyTorch's and the exact loss and gradient."""
    wide = {k: t.double() if torch.is_tensor(t) and t.is_floating_point() else t for k, t in options.items()}
    got = _all(tigon.cross_entropy, logits, target, upstream, **options)
    eager = _all(eager_fn, logits, target, upstream, **options)
    double = None if upstream is None else upstream.double()
    return got, eager, _all(oracle_fn, logits.detach().double(), target, double, **wide)


def _hold(logits, target, upstream=None, floor=0.0, redraw=None, **options):
    """The rule of checks.py for the loss and its gradient; errors up to `floor` need no comparison.

    p - 1 of a confident target has a few digits in float32, more or less by luck of the rounding.
    redraw: the scale of `_inputs`; others like the logits, with other upstream gradients, may be judged with
    them. The gradient is rounded when it is stored and again when it is scaled, plain PyTorch's once, which
    is exact for some factors: where one class has it all (p - 1 of every target), that is one draw.
    """
    three = _three(logits, target, upstream, options)
    for i, (name, a, b, c) in enumerate(zip(("loss", "gradient"), *three, strict=True)):

        def another_draw(seed, i=i):
            torch.manual_seed(seed)
            other = (redraw * torch.randn_like(logits, dtype=torch.float32)).to(logits.dtype)
            scales = None if upstream is None else torch.randn_like(upstream)
            return [values[i] for values in _three(other, target, scales, options)]

        if not (a.double() - c).abs().le(floor).all():  # NaN goes on
            check_close(name, a, b, c, None if redraw is None else another_draw)
    return three[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("v", [2, 50, 5000])
def test_sharp_rows(v, dtype, device):
    """Target probability of about 1 - 1e-6: the gradient there is not lost to rounding."""
    logits = torch.zeros(6, v, device=device, dtype=dtype)
    target = torch.arange(6, device=device) % v
    others = torch.log(torch.tensor(1e-6 / max(v - 1, 1)))
    logits += others.to(device, dtype)
    logits[torch.arange(6), target] = 0
    for shift in (0.0, 64.0, -64.0):
        moved = (logits + shift).to(dtype)
        loss, grad = _hold(moved, target, floor=2e-7, reduction="none")
        rest = -torch.expm1(torch.log_softmax(moved.double(), -1).gather(1, target[:, None]))
        assert ((loss - rest[:, 0]).abs() < 2e-7).all()
        assert ((grad.gather(1, target[:, None]) + rest).abs() < 2e-7 + 0.004 * rest).all()


def test_large_logits(device):
    logits = torch.empty(8, 300, device=device).uniform_(-80, 80)
    target = torch.randint(0, 300, (8,), device=device)
    logits[0], logits[1] = 80, -80
    for options in ({}, {"label_smoothing": 0.2}, {"softcap": 50.0}, {"z_loss": 1e-3}, {"softcap": 1e30}):
        loss, grad = _hold(logits, target, reduction="none", **options)
        assert loss.isfinite().all() and grad.isfinite().all()
    loss = tigon.cross_entropy(
        torch.full((2, 5), 3e38, device=device), torch.zeros(2, dtype=torch.long, device=device)
    )
    assert torch.allclose(loss.cpu(), torch.tensor(5.0).log())


LAYOUTS = {
    "strided rows": lambda x: torch.cat((x, x), 1)[:, : x.shape[1]],
    "every other row": lambda x: torch.stack((x, x), 1)[:, 0],
    "misaligned": lambda x: torch.cat((x.new_zeros(1), x.flatten()))[1:].view_as(x),
    "columns": lambda x: torch.stack((x, x), -1)[..., 0],
    "transposed": lambda x: x.t().contiguous().t(),
    "three dimensions": lambda x: x.view(3, 4, -1),
    "3-d strided": lambda x: torch.stack((x, x), 1)[:, 0].view(3, 4, -1),
    "3-d permuted": lambda x: x.view(3, 4, -1).transpose(0, 1).contiguous().transpose(0, 1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("v", [64, 101])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layouts(layout, v, dtype, device):
    logits, target = _inputs(12, v, dtype=dtype, device=device)
    view = LAYOUTS[layout](logits.detach())
    assert torch.equal(view.reshape(12, v), logits.detach())
    want = _hold(logits, target, reduction="none", label_smoothing=0.1)
    got = _all(tigon.cross_entropy, view, target.view(view.shape[:-1]), reduction="none", label_smoothing=0.1)
    assert got[0].shape == view.shape[:-1]
    for a, b in zip(got, want, strict=True):
        if device == "cpu":  # on a GPU the alignment of a row decides which thread adds what
            assert same_bits(a.reshape(b.shape), b)
        torch.testing.assert_close(a.reshape(b.shape), b)


def test_no_leading_dimension_and_int32(device):
    logits, target = torch.randn(7, device=device), torch.tensor(3, device=device)
    want = F.cross_entropy(logits, target)
    torch.testing.assert_close(tigon.cross_entropy(logits, target), want)
    torch.testing.assert_close(tigon.cross_entropy(logits, target.int(), reduction="none"), want)
    assert tigon.cross_entropy(logits, target, reduction="none").shape == ()


@pytest.mark.parametrize("v", [33, 9000])
@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}, {"label_smoothing": 0.1}], ids=str)
def test_nan_and_infinity(v, options, device):
    logits, _ = _inputs(7, v, device=device)
    logits, inf = logits.detach(), float("inf")
    target = torch.arange(7, device=device)
    logits[0, 20], logits[1, 20], logits[2, 20] = NAN, inf, -inf
    logits[3], logits[4, -1], logits[5, : v - 1] = -inf, NAN, -inf
    target[5] = v - 1
    got = _all(tigon.cross_entropy, logits, target, reduction="none", **options)
    want = _all(eager_fn, logits, target, **options | {"reduction": "none"})
    torch.testing.assert_close(got[0], want[0], equal_nan=True)
    if options.get("label_smoothing"):  # the loss is infinite; torch's gradient is that of finite classes
        assert not got[0][[2, 5]].isfinite().any()
    torch.testing.assert_close(got[1], want[1], equal_nan=True)
    # A bad row that is ignored does not show.
    target[[0, 1, 3, 4]] = -100
    loss, grad = _all(tigon.cross_entropy, logits, target, reduction="none", **options)
    assert not loss[[0, 1, 3, 4]].any() and not grad[[0, 1, 3, 4]].any()


def test_minus_infinity_fills_a_whole_block():
    logits, target = torch.randn(2, 3 * 4096), torch.tensor([4096 + 5, 1])
    logits[0, :4096], logits[0, 2 * 4096 :], logits[1, 4096:] = -float("inf"), -float("inf"), -float("inf")
    _hold(logits, target)


def test_infinite_loss_of_an_impossible_target(device):
    logits = torch.randn(2, 9, device=device)
    logits[0, 3] = -float("inf")
    loss, grad = _all(tigon.cross_entropy, logits, torch.tensor([3, 3], device=device), reduction="none")
    assert loss[0] == float("inf") and loss[1].isfinite() and grad.isfinite().all() and grad[0, 3] == -1


@pytest.mark.parametrize("label", [40, -1, 2**40, -(2**40)])
def test_label_out_of_range(label, device):
    """An error with its row, or a row of NaN; test_wrong_calls.py asks every function."""
    logits, target = _inputs(6, 40, device=device, masked=0.0)
    target[4] = label
    if device == "cpu":
        for options in ({}, {"reduction": "none"}, {"inplace": True}, {"weight": torch.ones(40)}):
            with pytest.raises(tigon.Error, match=rf"target must be in \[0, 40\) .*{label} in row 4"):
                tigon.cross_entropy(logits * 1, target, **options)
        assert tigon.cross_entropy(logits, target, ignore_index=label).isfinite()
        return
    for options in ({}, {"weight": torch.ones(40, device=device)}, {"softcap": 5.0}):
        loss, grad = _all(tigon.cross_entropy, logits, target, reduction="none", **options)
        assert loss[4].isnan() and grad[4].isnan().all()
        keep = [0, 1, 2, 3, 5]
        assert loss[keep].isfinite().all() and grad[keep].isfinite().all()
        assert tigon.cross_entropy(logits, target, **options).isnan()


# Refusals, binding, the reference.


BAD = """
cross_entropy(x[0, 0], y[0]) -> logits must have at least one dimension, got 0
cross_entropy(x[:, :0], y) -> logits must have at least one column, got [4, 0]
cross_entropy(x, y, weight=x[0].clone().requires_grad_()) -> weight must not require grad
cross_entropy(x.requires_grad_(), y, inplace=True)
    -> logits must not be a leaf that requires grad with inplace=True
cross_entropy((x.requires_grad_() * 1)[:, ::2], y % 4, inplace=True)
    -> logits must have a dense last dimension
cross_entropy((x[:1].clone().requires_grad_() * 1).expand(4, 8), y, inplace=True)
    -> dlogits must have rows that do not overlap
"""


@pytest.mark.parametrize("call, message", refusals(BAD))
def test_refusals(call, message, device):
    x, y = torch.randn(4, 8, device=device), torch.randint(0, 8, (4,), device=device)
    refused(call, "[cross_entropy] " + message, x=x, y=y)


@pytest.mark.gpu
def test_device_mix():
    x, y = torch.randn(4, 8, device="cuda"), torch.randint(0, 8, (4,))
    with pytest.raises(tigon.Error, match=r"\[cross_entropy\] target must be on cuda:0, got cpu"):
        tigon.cross_entropy(x, y)
    with pytest.raises(tigon.Error, match="weight must be on cuda:0, got cpu"):
        tigon.cross_entropy(x, y.cuda(), weight=torch.ones(8))
    with pytest.raises(tigon.Error, match="denominator must be on cpu, got cuda:0"):
        tigon.cross_entropy(x.cpu(), y, denominator=torch.tensor(3.0, device="cuda"))


def test_opcheck_in_place(device):
    logits, target = (x.detach() for x in _inputs(6, 40, device=device))
    tail = (1, -100, 0.1, 5.0, 0.01)
    torch.library.opcheck(
        torch.ops.tigon.cross_entropy_in_place.default, (logits, target, None, None, None, *tail)
    )


def test_module(device):
    weight = torch.rand(40, device=device)
    loss = tigon.nn.CrossEntropyLoss(weight, label_smoothing=0.1, softcap=7.0, z_loss=0.1, reduction="sum")
    assert "softcap=7.0" in repr(loss) and set(loss.state_dict()) == {"weight"}
    logits, target = _inputs(6, 40, device=device)
    options = {"weight": weight, "label_smoothing": 0.1, "softcap": 7.0, "z_loss": 0.1, "reduction": "sum"}
    assert same_bits(loss(logits, target), tigon.cross_entropy(logits, target, **options))
    assert same_bits(loss(logits, target, 5), tigon.cross_entropy(logits, target, denominator=5, **options))
    plain, torchs = tigon.nn.CrossEntropyLoss(ignore_index=3), torch.nn.CrossEntropyLoss(ignore_index=3)
    target = torch.randint(0, 40, (6,), device=device)
    torch.testing.assert_close(plain(logits, target), torchs(logits, target))


# What only a GPU can show.


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "v",
    [
        *(64, 1024, 8191, 32000, 32769, 43008, 43009, 43012, 50257, 69632, 69633, 86016, 86017, 86024),
        *(104448, 104449, 128256, 139264, 139265, 201088, 208896, 208897, 262147, 278528, 278529),
        *(400001, 450001, 557056, 557057, 700000, 1200003),
    ],
)
def test_every_row_length(v, dtype):
    """Each variant at both ends of its lengths, and rows that fit none; aligned, odd and strided."""
    logits, target = _inputs(5, v, dtype=dtype, device="cuda")
    target[:2] = torch.tensor([0, v - 1])
    weight = torch.rand(v, device="cuda")
    for options in (
        {},
        {"weight": weight, "z_loss": 1e-3},
        {"softcap": 9.0},
        {"softcap": 4.0, "weight": weight, "z_loss": 1e-3},
        {"label_smoothing": 0.1, "softcap": 9.0},
        {"weight": weight, "z_loss": 1e-3, "label_smoothing": 0.1},
    ):
        got = _hold(logits, target, redraw=2.0, **options)
        again = _all(tigon.cross_entropy, logits, target, **options)
        assert all(same_bits(a, b) for a, b in zip(got, again, strict=True))
        with torch.no_grad():
            alone = tigon.cross_entropy(logits, target, **options)  # another order of summation
            torch.testing.assert_close(alone, got[0], rtol=2e-6, atol=0)
        loss = tigon.cross_entropy(given := logits * 1, target, inplace=True, **options)
        assert same_bits(loss, got[0]) and same_bits(torch.autograd.grad(loss, given)[0], got[1])
    _hold(torch.cat((logits, logits[:, :3]), 1)[:, :v], target)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "v",
    [
        *(1, 96, 32000, 32768, 40003, 66000, 86016, 86024, 114689, 139264, 139265, 208897, 240001),
        *(278529, 300008, 557056, 557057),
    ],
)
def test_more_rows_than_run_at_once(v):
    """Rows wait for free SMs, some of them ignored, NaN or with a label out of range."""
    rows = 300 if v <= 139264 else 100
    logits, target = _inputs(rows, v, dtype=torch.bfloat16, device="cuda")
    for reduction in ("none", "sum"):
        _hold(logits, target, reduction=reduction)
    if v == 1:
        target.fill_(0)
        assert not _all(tigon.cross_entropy, logits, target)[1].any()
    data = logits.detach().clone()
    target[::4] = 0
    data[4, v // 2] = NAN
    data[8, v - 1] = float("inf")
    data[12] = -float("inf")
    data[16, v // 3] = 1e38
    target[20] = v
    target[24] = -100
    data[24] = NAN
    loss, grad = _all(tigon.cross_entropy, data, target, reduction="none")
    for i in (4, 8, 12, 20):
        assert loss[i].isnan() and grad[i].isnan().all()
    given = data.clone().requires_grad_() * 1
    total = tigon.cross_entropy(given, target, reduction="sum", inplace=True)
    (overwritten,) = torch.autograd.grad(total, given)
    fresh = _all(tigon.cross_entropy, data, target, reduction="sum")[1]
    assert same_bits(overwritten.nan_to_num(7), fresh.nan_to_num(7))
    others = torch.ones(rows, dtype=torch.bool)
    others[[4, 8, 12, 20]] = False
    assert loss[others].isfinite().all() and grad[others].isfinite().all()
    assert loss[24] == 0 and not grad[24].any()
    for i in range(0, rows, 8 if v % 8 else 7):  # rows that start as the first does
        one = _all(tigon.cross_entropy, data[i : i + 1].clone(), target[i : i + 1], reduction="none")
        assert same_bits(loss[i : i + 1].nan_to_num(7), one[0].nan_to_num(7))
        assert same_bits(grad[i : i + 1].nan_to_num(7), one[1].nan_to_num(7))
    target[20] = 0  # PyTorch, the oracle, aborts on a label out of range
    _hold(torch.cat((logits, logits), 1)[:, 1 : v + 1], target)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "v",
    [
        *(1, 7, 33, 255, 2056, 16385, 28160, 28168, 32769, 56320, 56327, 56328, 112640, 112648, 225281),
        *(256000, 450560, 450561, 901121),
    ],
)
def test_capped_rows(v, dtype):
    """Logits within the cap, beyond it, both in one vector, -inf; more rows than run at once."""
    rows = 300 if v < 60000 else 40
    logits, target = _inputs(rows, v, dtype=dtype, device="cuda")
    data = logits.detach().clone()
    data[0] *= 0.1
    data[1] = (data[1] * 50).clamp(-6e4, 6e4)
    data[2, v // 2 :] *= 20
    data[3, ::3] = -float("inf")
    data[4] = -float("inf")
    data[5, v // 3] = 6e4
    target[:6] = torch.tensor([0, v - 1, v // 2, v // 3, v - 1, v // 3])
    for options in ({"softcap": 6.0}, {"softcap": 30.0, "z_loss": 1e-3}):
        # One ulp of a saturated logit moves a probability by a quarter of itself at most.
        got = _hold(data, target, reduction="none", floor=1e-6, **options)
        again = _all(tigon.cross_entropy, data, target, reduction="none", **options)
        assert all(same_bits(a, b) for a, b in zip(got, again, strict=True))
        with torch.no_grad():  # the sweep, where rows are long
            alone = tigon.cross_entropy(data, target, reduction="none", **options)
        torch.testing.assert_close(alone, got[0], rtol=3e-6, atol=1e-6)
        loss = tigon.cross_entropy(
            given := data.clone().requires_grad_() * 1, target, reduction="none", inplace=True, **options
        )
        assert same_bits(loss, got[0])
        assert same_bits(torch.autograd.grad(loss.sum(), given)[0], got[1])
        for i in range(0, rows, 16):  # rows that start as the first does
            one = _all(
                tigon.cross_entropy, data[i : i + 1].clone(), target[i : i + 1], reduction="none", **options
            )
            assert same_bits(got[0][i : i + 1], one[0]) and same_bits(got[1][i : i + 1], one[1])


@pytest.mark.gpu
@pytest.mark.parametrize("offset", [0, 1])
def test_labels_where_a_row_is_divided(offset):
    """Parts of a row begin at multiples of 64 columns: the label is the last column of one or the first."""
    v = 43072
    starts = torch.arange(64, v, 64, device="cuda")
    target = torch.cat((starts - 1, starts, starts + 1))
    logits, _ = _inputs(len(target), v + offset, device="cuda")
    _hold(logits[:, offset:], target, reduction="none")
