"""Moments of 8-bit codes: map, codes, update, refusals. In the optimizer: test_optim_codes.py."""

import functools
import math

import pytest
import torch
from checks import same_bits
from test_adamw import GROUP, HALF, check_refused, step
from test_adamw import make_list as random_list

from cases.adamw import LISTS, Parameters
from tigon.ops.adamw import ROUNDINGS, TensorList
from tigon.optim import codes

ODD = Parameters("blocks", ((3, 5), (17,), (1,), (57, 129), (0,), (), (64, 64), (4097,), (5, 256), (255,)))
SHIFTED = Parameters("misaligned", ((3, 5), (57, 129), (9, 256)), layout="offset1")


@functools.cache
def map_of(signed: bool) -> torch.Tensor:
    """bitsandbytes' create_dynamic_map, linspace as PyTorch has it in vectors: products and sums fused."""
    f32, values = (lambda x: torch.tensor(x, dtype=torch.float32)), [0.0, 1.0]
    for i in range(7):
        n = 2**i if signed else 2 ** (i + 1)
        step = ((f32(1.0) - f32(0.1)) / n).double().item()
        points = [
            f32(f32(0.1).double().item() + step * k if k < (n + 1) // 2 else 1.0 - step * (n - k))
            for k in range(n + 1)
        ]
        means = [(a + b) / 2.0 * f32(10.0 ** (i - 6)) for a, b in zip(points, points[1:], strict=False)]
        values += [m.item() for m in means] + [-m.item() for m in means if signed]
    return torch.tensor(sorted(values), dtype=torch.float32)


def nearest(x: torch.Tensor, of_roots: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and absmax as the contract says them: the argmin over 256 distances, in float64."""
    values, flat = map_of(not of_roots).double(), x.detach().cpu().float().reshape(-1)
    blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % 256)).view(-1, 256)
    most = blocks.abs().amax(1) if flat.numel() else torch.empty(0)
    normal = (most >= 2.0**-126) & most.isfinite()
    y = (blocks * torch.where(normal, 1 / most, 0.0)[:, None]).nan_to_num(0.0).double()
    made = torch.stack([(row[:, None] - values).abs().argmin(1) for row in y]) if flat.numel() else y
    if of_roots:
        made = torch.where(blocks > 0, made.clamp(min=1), 0)
    return made.view(-1)[: flat.numel()].to(torch.uint8), torch.where(most.isfinite(), most, math.nan)


def value_of(code: torch.Tensor, absmax: torch.Tensor, of_roots: bool) -> torch.Tensor:
    """What codes stand for."""
    flat = map_of(not of_roots)[code.cpu().reshape(-1).long()]
    x = flat * absmax.cpu().repeat_interleave(256)[: flat.numel()]
    return x * x if of_roots else x


def make_list(params, rounding="nearest", wide=False, steps=3, grads=None, **options) -> TensorList:
    """A list of one group with codes of random moments; with `wide`, of the float32 that they stand for."""
    made, draw = random_list(params, rounding, **options), torch.Generator().manual_seed(2)
    for i, p in enumerate(made.params):
        if grads is not None:  # of digits that p's dtype has not
            made.grads[i] = made.grads[i].to(grads) * 1.003
        made.steps[i].fill_(steps)
        for name, of_roots in (("exp_avgs", False), ("exp_avg_sqs", True)):
            x = torch.randn(p.numel(), generator=draw) * 0.1 * torch.randn(p.numel(), generator=draw).exp()
            code, absmax = nearest(x.abs() if of_roots else x, of_roots)
            values = value_of(code, absmax, of_roots) if wide else code
            made.absmaxes += [] if wide else [absmax.to(p.device)]
            moment = torch.empty_like(p, dtype=values.dtype, requires_grad=False)
            getattr(made, name)[i] = moment.copy_(values.view(p.shape))
    return made


def check_codes(made: TensorList, wide: TensorList) -> None:
    """Each code is the nearest of what the moment is in float32; all else has the same bits."""
    for i, p in enumerate(made.params):
        assert same_bits(p, wide.params[i])
        moments = (
            (made.exp_avgs[i], wide.exp_avgs[i], False),
            (made.exp_avg_sqs[i], wide.exp_avg_sqs[i], True),
        )
        for k, (code, moment, of_roots) in enumerate(moments):
            expected, absmax = nearest(codes.root(moment) if of_roots else moment, of_roots)
            assert torch.equal(code.reshape(-1).cpu(), expected)
            assert same_bits(made.absmaxes[2 * i + k].cpu(), absmax)
    assert all(
        same_bits(a, b) for a, b in zip(made.extras + made.steps, wide.extras + wide.steps, strict=True)
    )


def test_the_map():
    """The 256 values in order, with 1 but without -1, and zero where bitsandbytes has it."""
    for signed, zero in ((True, 127), (False, 0)):
        values = map_of(signed)
        assert same_bits(values, codes.code_map(not signed))
        assert values.unique().numel() == 256
        assert values[zero] == 0
        assert values[255] == 1
    assert map_of(True)[0] > -1


def test_the_map_is_bitsandbytes():
    """Bit for bit, as it is computed on a processor with vectors."""
    functional = pytest.importorskip("bitsandbytes.functional", reason="needs bitsandbytes")
    for signed in (True, False):
        theirs = functional.create_dynamic_map(signed)
        torch.testing.assert_close(theirs, map_of(signed), rtol=2e-7, atol=0)
        if torch.backends.cpu.get_cpu_capability() != "DEFAULT":
            assert same_bits(theirs, map_of(signed))
        # Its own composition of PyTorch's operations, which float64 takes on the CPU.
        x = torch.randn(65, 256, dtype=torch.float64)
        x = (x if signed else x.abs()).float()
        code, most = torch.ops.bitsandbytes.quantize_blockwise(x.double(), theirs, 256)
        mine, absmax = codes.encode(x.view(-1), not signed)
        assert same_bits(most, absmax)
        if torch.backends.cpu.get_cpu_capability() != "DEFAULT":
            assert torch.equal(code.view(-1).clamp(min=0 if signed else 1), mine)


def test_codes_of_every_neighbourhood(device):
    """Values at, just below and just above each threshold, of both signs, and tiny ones: by one step whose
    gradient is the moment."""
    for of_roots in (False, True):
        values = map_of(not of_roots).double()
        middle = ((values[1:] + values[:-1]) / 2).float()
        near = [middle, *(torch.nextafter(middle, torch.tensor(towards)) for towards in (2.0, -2.0))]
        x = torch.cat([*near, torch.tensor([1e-8, 1e-30, 0.0, 3e-7])])
        x = x.abs() if of_roots else torch.cat([x, -x])
        x = torch.nn.functional.pad(x, (0, -x.numel() % 255)).view(-1, 255)
        x = torch.cat([torch.ones(x.shape[0], 1), x], 1).view(-1)  # each block has absmax 1
        p = torch.zeros(x.numel(), device=device)
        made = make_list([p], betas=(0.0, 0.0), steps=0)
        made.grads[0].copy_(x)
        step(made)
        got = made.exp_avg_sqs[0] if of_roots else made.exp_avgs[0]
        kept = codes.root(x * x) if of_roots else x
        assert torch.equal(got.cpu(), nearest(kept, of_roots)[0])
        assert torch.equal(codes.encode(kept, of_roots)[0], nearest(kept, of_roots)[0])


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("parameters", [ODD, SHIFTED], ids=lambda p: p.name)
def test_codes_of_an_update(parameters, dtype, rounding, device):
    """The update is that of the float32 moments which codes stand for, in the same bits; new codes are the
    nearest of its moments."""
    if (rounding, dtype) == ("split", torch.float16):
        pytest.skip("refused")
    made, wide = (make_list(parameters.make(dtype, device), rounding, w) for w in (False, True))
    for _ in range(2):
        for lists in (made, wide):
            step(lists, rounding=rounding, moment_rounding="stochastic", seed=5)
        check_codes(made, wide)
        for i in range(len(made.params)):
            for k, name in enumerate(("exp_avgs", "exp_avg_sqs")):
                values = value_of(getattr(made, name)[i], made.absmaxes[2 * i + k], k == 1)
                getattr(wide, name)[i].copy_(values.view(getattr(wide, name)[i].shape))


@pytest.mark.parametrize(
    "options",
    [{"decoupled_weight_decay": False}, {"maximize": True}, {"betas": (0.3, 0.4)}, {"lr": 0.0}],
    ids=str,
)
def test_options_and_mixed_gradients(options, device):
    """Those that all lists have, gradients in float32, and a list in which some moments are no codes."""
    made, wide = (
        make_list(ODD.make(torch.bfloat16, device), wide=w, grads=torch.float32, **options)
        for w in (False, True)
    )
    for i in (0, 3):  # these have moments in float32
        for name in ("exp_avgs", "exp_avg_sqs"):
            getattr(made, name)[i] = getattr(wide, name)[i].clone()
    made.absmaxes = [x for j, x in enumerate(made.absmaxes) if j // 2 not in (0, 3)]
    clip, scale = (torch.tensor(x, device=device) for x in (0.5, 4.0))
    for lists in (made, wide):
        step(lists, clip=clip, grad_scale=scale)
    coded = [i for i in range(len(made.params)) if made.exp_avgs[i].dtype == torch.uint8]
    for j, i in enumerate(coded):
        assert same_bits(made.params[i], wide.params[i])
        expected, absmax = nearest(codes.root(wide.exp_avg_sqs[i]), True)
        assert torch.equal(made.exp_avg_sqs[i].reshape(-1).cpu(), expected)
        assert same_bits(made.absmaxes[2 * j + 1].cpu(), absmax)
    for i in (0, 3):
        assert all(
            same_bits(getattr(made, n)[i], getattr(wide, n)[i]) for n in ("params", "exp_avgs", "exp_avg_sqs")
        )
    before = [t.clone() for t in (*made.params, *made.exp_avgs, *made.absmaxes)]
    step(made, found_inf=torch.ones((), device=device))
    after = (*made.params, *made.exp_avgs, *made.absmaxes)
    assert all(same_bits(a, b) for a, b in zip(before, after, strict=True))


def test_blocks_that_are_not_finite_or_zero(device):
    """A gradient that is not finite makes its block's moments NaN, and no other's; zeros stay zeros."""
    p = torch.ones(1024, device=device)
    made = make_list([p])
    for t, zero in ((made.exp_avgs[0], 127), (made.exp_avg_sqs[0], 0)):
        t.fill_(zero)
    for t in made.absmaxes:
        t.zero_()
    made.grads[0].zero_()
    made.grads[0][300], made.grads[0][600], made.grads[0][700] = math.nan, math.inf, 1e-3
    step(made)
    assert [x.isnan().tolist() for x in made.absmaxes] == [[False, True, True, False]] * 2
    assert p.isnan().nonzero().view(-1).tolist() == [300, 600]
    assert made.exp_avgs[0][:256].eq(127).all()
    assert made.exp_avg_sqs[0][768:].eq(0).all()
    step(made)
    assert p[256:768].isnan().all()
    assert p[:256].isfinite().all() and p[768:].isfinite().all()
    # Below 2^-126 a block counts as zero; nothing becomes NaN.
    made = make_list([torch.ones(300, device=device)])
    for t in made.absmaxes:
        t.fill_(1e-39)
    made.grads[0].zero_()
    step(made)
    assert made.params[0].isfinite().all() and all(t.isfinite().all() for t in made.absmaxes)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_blocks_of_every_size(dtype, rounding, device):
    """Gradients from 1e-38 to 1e38, some zero, a factor between blocks: the moments that float32 has."""
    scale = torch.logspace(-38, 38, 153).repeat_interleave(256)
    made, wide = (
        make_list([torch.ones(scale.numel(), dtype=dtype, device=device)], rounding, w) for w in (False, True)
    )
    zero = torch.arange(scale.numel()) % 521 == 0
    g = (torch.randn(scale.numel(), generator=torch.Generator().manual_seed(2)) * scale).masked_fill(
        zero, 0.0
    )
    for lists in (made, wide):
        lists.grads[0].copy_(g)
        for moment in (lists.exp_avgs[0], lists.exp_avg_sqs[0]):
            moment[: 256 * 60].fill_(0 if lists is wide else 127 if moment is lists.exp_avgs[0] else 0)
        step(lists, rounding=rounding, seed=5)
    check_codes(made, wide)


def test_order_and_split_at_blocks(device):
    """Lists in another order, and tensors cut at blocks: the same bits."""
    whole = make_list([torch.ones(5000, dtype=torch.bfloat16, device=device)])
    parts = make_list([torch.ones(5000, dtype=torch.bfloat16, device=device)])
    made = TensorList()
    for a, b in ((2560, 5000), (0, 2560)):
        for name in ("params", "grads", "exp_avgs", "exp_avg_sqs"):
            getattr(made, name).append(getattr(parts, name)[0][a:b])
        made.absmaxes += [x[a // 256 : -(-b // 256)] for x in parts.absmaxes]
        made.steps.append(torch.tensor(3.0))
        made.first.append(a)
    made.add_group(GROUP, 2, made.params[0].device)
    for lists in (whole, made):
        step(lists, rounding="stochastic", seed=3)
    for name in ("params", "exp_avgs", "exp_avg_sqs", "absmaxes"):
        assert all(same_bits(a, b) for a, b in zip(getattr(whole, name), getattr(parts, name), strict=True))


def test_writes_no_neighbours(device):
    """Codes before and after a tensor that begins anywhere."""
    for begin, n in ((1, 1), (3, 300), (8, 256), (5, 4096)):
        p = torch.ones(n, device=device)
        made = make_list([p])
        for name in ("exp_avgs", "exp_avg_sqs"):
            whole = torch.full((n + 16,), 77, dtype=torch.uint8, device=device)
            getattr(made, name)[0] = whole[begin : begin + n]
        step(made)
        for name in ("exp_avgs", "exp_avg_sqs"):
            code = getattr(made, name)[0]
            whole = code.as_strided((n + 16,), (1,), 0)
            assert whole[:begin].eq(77).all() and whole[begin + n :].eq(77).all()


@pytest.mark.gpu
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
def test_cpu_and_gpu_agree(rounding, dtype):
    """The same bits on both."""
    if (rounding, dtype) == ("split", torch.float16):
        pytest.skip("refused")
    for parameters in (*LISTS, ODD, SHIFTED):
        a, b = (make_list(parameters.make(dtype, d), rounding) for d in ("cpu", "cuda"))
        for made in (a, b):
            step(made, rounding=rounding, seed=9)
        for name in ("params", "exp_avgs", "exp_avg_sqs", "extras", "absmaxes", "steps"):
            pairs = zip(getattr(a, name), getattr(b, name), strict=True)
            assert all(same_bits(x, y.cpu()) for x, y in pairs), (parameters.name, name)


def of_amsgrad(made):
    """Codes have no third moment."""
    made.hyperparameters[7], made.max_exp_avg_sqs = 1.0, [t.clone() for t in made.exp_avg_sqs]


@pytest.mark.parametrize(
    "bad, words",
    [
        (lambda m: m.absmaxes.pop(), "absmaxes must have one tensor for each param that needs it, got 5"),
        (lambda m: m.absmaxes.__setitem__(3, m.absmaxes[3][1:]), "exp_avg_sq, its absmax, must be"),
        (lambda m: m.absmaxes.__setitem__(2, m.absmaxes[2].double()), "exp_avg, its absmax, must be"),
        (lambda m: m.exp_avgs.__setitem__(1, m.exp_avgs[1].float()), "must both be uint8 or neither"),
        (lambda m: m.hyperparameters.__setitem__(7, 1.0), "max_exp_avg_sqs must have one tensor"),
        (of_amsgrad, "amsgrad must be false where moments are uint8 codes"),
    ],
)
def test_refused_before_anything_is_written(bad, words, device):
    check_refused(make_list(LISTS[1].make(torch.bfloat16, device)), bad, words)
