"""adamw_, grad_norm and scale_ on lists: bits, random bits, refusals. The optimizer itself: test_optim.py."""

import math

import pytest
import torch
from checks import check_close, same_bits

import tigon
from cases.adamw import LISTS
from tigon.ops.adamw import ROUNDINGS, TensorList, adamw_, reference_
from tigon.ops.grad_norm import clip_grad_norm_

GROUP = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2, "decoupled_weight_decay": True}
GROUP |= {"maximize": False, "amsgrad": False}
HALF = (torch.bfloat16, torch.float16)


def make_list(params, rounding="nearest", seed=1, moments=None, on_device=False, **options) -> TensorList:
    """A list of one group with random moments."""
    made, first = TensorList(params=list(params)), 0
    draw = torch.Generator().manual_seed(seed)

    def random(p, scale, dtype=None):
        x = torch.empty_like(p, dtype=dtype or p.dtype, requires_grad=False)
        return x.copy_(torch.randn(p.shape, generator=draw) * scale)

    for p in made.params:
        made.grads.append(random(p, 0.1))
        made.exp_avgs.append(random(p, 0.1, moments))
        made.exp_avg_sqs.append(random(p, 0.1, moments).square_())
        if options.get("amsgrad"):
            made.max_exp_avg_sqs.append(random(p, 0.1, moments).square_())
        if p.dtype in HALF and rounding == "split":
            made.extras.append(torch.zeros_like(p, dtype=torch.int16, requires_grad=False))
        if p.dtype in HALF and rounding == "master":
            made.extras.append(p.detach().float())
        made.steps.append(torch.tensor(3.0, device=p.device if on_device else "cpu"))
        made.first.append(first)
        first += (p.numel() + 7) // 8 * 8
    made.add_group(GROUP | options, len(made.params), made.params[0].device)
    return made


def results(made: TensorList) -> list[torch.Tensor]:
    """Everything that a call writes."""
    names = ("params", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "absmaxes", "extras", "steps")
    return [t for name in names for t in getattr(made, name)]


def step(made: TensorList, **options) -> list[torch.Tensor]:
    """One call, and copies of what it wrote."""
    with torch.no_grad():
        adamw_(made, **options)
    return [t.detach().clone() for t in results(made)]


def check_refused(made: TensorList, bad, words: str, **options) -> None:
    """A list with one thing wrong stays as it is."""
    written = results(made)
    before = [t.detach().clone() for t in written]
    bad(made)
    with pytest.raises(tigon.Error, match=words):
        step(made, **options)
    assert all(map(same_bits, before, written))


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("parameters", LISTS, ids=lambda p: p.name)
@pytest.mark.parametrize("amsgrad", [False, True])
def test_against_the_reference(parameters, dtype, amsgrad, device):
    """Every list by the rule of checks.py, with the reference in the same precision and in float64."""
    ours, eager, exact = (make_list(parameters.make(dtype, device), amsgrad=amsgrad) for _ in range(3))
    step(ours)
    for name in ("params", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs"):
        setattr(exact, name, [t.detach().double() for t in getattr(exact, name)])
    for made in (eager, exact):
        for i, p in enumerate(made.params):
            most = made.max_exp_avg_sqs[i] if amsgrad else None
            with torch.no_grad():
                reference_(
                    p, made.grads[i], made.exp_avgs[i], made.exp_avg_sqs[i], most, made.steps[i], GROUP
                )
    for a, b, c in zip(results(ours), results(eager), results(exact), strict=True):
        check_close(parameters.name, a.detach(), b.detach(), c)


@pytest.mark.parametrize("moment_rounding", ROUNDINGS[:2])
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_order_and_split_of_a_list(rounding, moment_rounding, device):
    """A list forwards, backwards and tensor by tensor: the same bits."""
    parameters = LISTS[0]
    options = {"rounding": rounding, "moment_rounding": moment_rounding, "seed": 5}
    whole = make_list(parameters.make(torch.bfloat16, device), rounding)
    expected = step(whole, **options)
    for order in (range(len(whole.params)), reversed(range(len(whole.params)))):
        made = make_list(parameters.make(torch.bfloat16, device), rounding)
        for i in order:
            one = TensorList()
            for name in ("params", "grads", "exp_avgs", "exp_avg_sqs", "extras", "steps", "first"):
                values = getattr(made, name)
                getattr(one, name).extend(values[i : i + 1])
            one.add_group(GROUP, 1, made.params[0].device)
            step(one, **options)
        assert all(same_bits(a, b) for a, b in zip(expected, results(made), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("moment_rounding", ROUNDINGS[:2])
def test_cpu_and_gpu_agree(rounding, dtype, on_device, moment_rounding):
    """The same bits on both."""
    if (rounding, dtype) == ("split", torch.float16):
        pytest.skip("refused")
    for parameters in LISTS:
        for moments in (None, torch.float32, torch.bfloat16):
            options = {"rounding": rounding, "moments": moments, "amsgrad": parameters.name == "odd"}
            how = {"rounding": rounding, "moment_rounding": moment_rounding, "seed": 9}
            a = step(make_list(parameters.make(dtype), **options), **how)
            b = step(make_list(parameters.make(dtype, "cuda"), on_device=on_device, **options), **how)
            for x, y in zip(a, b, strict=True):
                assert same_bits(x, y.cpu()), parameters.name


def test_stochastic_rounding_is_unbiased(device):
    """The mean error over 1e7 draws within four standard errors, and no error beyond a neighbour."""
    n = 10_000_000
    p = torch.full((n,), 1.0, dtype=torch.bfloat16, device=device)
    made = make_list([p])
    update = 1e-3  # an eighth of an ulp at 1
    for t in (*made.exp_avgs, *made.exp_avg_sqs):
        t.zero_()
    made.grads[0].fill_(1.0)
    made.steps[0].zero_()
    made.hyperparameters[0], made.hyperparameters[4] = update, 0.0
    step(made, rounding="stochastic", seed=11)
    exact = 1.0 - update
    low, high = 1 - 2**-8, 1.0
    assert set(p.unique().tolist()) <= {low, high}
    share = (exact - low) / (high - low)
    error = (p.double().mean().item() - exact) / (high - low)
    assert abs(error) <= 4 * math.sqrt(share * (1 - share) / n)
    # Neighbours and steps are independent of each other.
    up = (p == high).double() - share
    assert abs((up[1:] * up[:-1]).mean().item()) <= 4 * share * (1 - share) / math.sqrt(n)


def philox(block: int, step: int, seed: int) -> list[int]:
    """Four words of Philox4x32-10 of Salmon et al. 2011."""
    x, key = [block & 0xFFFFFFFF, block >> 32, step, 0], [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        a, b = 0xD2511F53 * x[0], 0xCD9E8D57 * x[2]
        x = [b >> 32 ^ x[1] ^ key[0], b & 0xFFFFFFFF, a >> 32 ^ x[3] ^ key[1], a & 0xFFFFFFFF]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return x


def random_bits(at: int, step: int, seed: int, factor: int) -> int:
    """Those of an element: a half of a word times a factor."""
    word = philox(at // 8, step, seed)[at % 8 // 2] * factor & 0xFFFFFFFF
    return word >> 16 * (at % 2) & 0xFFFF


@pytest.mark.parametrize("rounding", ["nearest", "stochastic", "split"])
@pytest.mark.parametrize(
    "moments", [None, (torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_bits_of_stochastic_moments(dtype, moments, rounding, device):
    """exp_avg and exp_avg_sq are those in float32, rounded by the bits of adamw.h, whatever the rounding of
    parameters, which are as with moments in float32; first is a multiple of eight, and none."""
    first, seed, done = [8 * 2**32, 3, 77, 80], 2**40 + 5, 6
    shapes = (40, 19, 3, 1)
    pair = moments or (torch.bfloat16, torch.bfloat16)
    made, wide = (
        make_list([torch.full((n,), 1.5, dtype=dtype, device=device) for n in shapes], rounding)
        for _ in range(2)
    )
    for name, kind in zip(("exp_avgs", "exp_avg_sqs"), pair, strict=True):
        values = [t.bfloat16() for t in getattr(made, name)]
        setattr(made, name, [t.to(kind) for t in values])
        setattr(wide, name, [t.float() for t in values])
    for lists in (made, wide):
        lists.first = first
        for t in lists.steps:
            t.fill_(done)
    for lists in (made, wide):
        step(lists, rounding=rounding, moment_rounding="stochastic", seed=seed)
    names = (("exp_avgs", 23941, pair[0]), ("exp_avg_sqs", 23941**2, pair[1]))
    for i, n in enumerate(shapes):
        assert same_bits(made.params[i], wide.params[i])
        for name, factor, kind in names:
            exact, got = getattr(wide, name)[i], getattr(made, name)[i]
            if kind == torch.float32:
                assert same_bits(got, exact)
                continue
            draws = [random_bits(first[i] + k, done + 1, seed, factor) for k in range(n)]
            bits = exact.cpu().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
            want = bits + torch.tensor(draws) >> 16
            assert torch.equal(got.cpu().view(torch.int16).to(torch.int64) & 0xFFFF, want)


def test_stochastic_moments_that_are_not_finite(device):
    """Infinity and NaN stay, in both kinds of 16 bits and in a maximum."""
    for dtype in HALF:
        made = make_list([torch.ones(64, dtype=dtype, device=device)], amsgrad=True)
        for i, value in enumerate((math.inf, -math.inf, math.nan)):
            made.grads[0][i] = value
        step(made, moment_rounding="stochastic")
        avg, sq, most = made.exp_avgs[0], made.exp_avg_sqs[0], made.max_exp_avg_sqs[0]
        assert avg[:2].tolist() == [math.inf, -math.inf] and sq[:2].tolist() == [math.inf] * 2
        assert most[:2].tolist() == [math.inf] * 2 and avg[2].isnan() and sq[2].isnan()
        assert all(t[3:].isfinite().all() for t in (avg, sq, most))


def test_another_seed_step_or_place_gives_other_bits(device):
    """Each of them changes about half of the draws between two equally likely neighbours."""

    def drawn(seed, done, first=0):
        made = make_list([torch.full((4096,), 1.0, dtype=torch.bfloat16, device=device)])
        for t in (*made.exp_avgs, *made.exp_avg_sqs):
            t.zero_()
        made.grads[0].fill_(1.0)
        made.hyperparameters[:5] = [2**-9, 0.0, 0.0, 0.0, 0.0]
        made.steps[0].fill_(done)
        made.first[0] = first
        return step(made, rounding="stochastic", seed=seed)[0]

    base = drawn(1, 0)
    assert same_bits(base, drawn(1, 0))
    for other in (drawn(2, 0), drawn(1, 1), drawn(1 + 2**40, 0), drawn(1, 0, 2**31), drawn(1, 0, 2**33)):
        assert 0.4 < (base != other).double().mean().item() < 0.6


@pytest.mark.parametrize(
    "bad, words",
    [
        (lambda m: m.params.__setitem__(1, m.params[1].detach()[::2]), "param 1 must fill its memory"),
        (
            lambda m: m.params.__setitem__(1, m.params[1].detach()[:8]),
            "grad 1 must have the sizes of its param",
        ),
        (lambda m: m.exp_avgs.__setitem__(0, m.exp_avgs[0].view(-1)), "exp_avg 0 must have the sizes of its"),
        (lambda m: m.exp_avgs.__setitem__(0, m.exp_avgs[0].t().contiguous().t()), "0 must have the strides"),
        (lambda m: m.grads.pop(), "lists must have 3 tensors each, got one of 2"),
        (
            lambda m: m.grads.__setitem__(2, m.grads[2].double()),
            "grad must be bfloat16 or float32, got float64",
        ),
        (lambda m: m.steps.__setitem__(2, m.steps[2].double()), "step 2 must be float32, got float64"),
        (lambda m: m.extras.pop(), "extras must have one tensor for each param that needs it, got 2"),
        (lambda m: m.hyperparameters.__setitem__(1, 1.0), "betas"),
        (lambda m: m.group_sizes.__setitem__(0, 2), "group_sizes must sum up"),
        (lambda m: m.exp_avgs.__setitem__(1, m.exp_avgs[1].to("meta")), "exp_avgs[1] must be on"),
    ],
)
def test_refused_before_anything_is_written(bad, words, device):
    made = make_list(LISTS[1].make(torch.bfloat16, device), "split")
    check_refused(made, bad, words.replace("[", r"\["), rounding="split")


def test_moments_have_two_roundings(device):
    """The others keep something that moments have not."""
    made = make_list(LISTS[1].make(torch.bfloat16, device))
    with pytest.raises(tigon.Error, match="moment_rounding must be 0 or 1, nearest or stochastic, got 2"):
        step(made, moment_rounding="split")


def test_split_refuses_float16(device):
    """Whose range is less than its master's."""
    made = make_list(LISTS[1].make(torch.float16, device))
    made.extras = [torch.zeros_like(p, dtype=torch.int16, requires_grad=False) for p in made.params]
    with pytest.raises(tigon.Error, match="rounding must not be split where a param is float16"):
        step(made, rounding="split")


# --- the norm ---------------------------------------------------------------------------------


def gradients(dtype, device, layout="contiguous") -> list[torch.nn.Parameter]:
    """Parameters with gradients."""
    params = next(x for x in LISTS if x.name == ("misaligned" if layout == "offset1" else "odd")).make(
        dtype, device
    )
    for i, p in enumerate(params):
        g = torch.randn(p.shape, generator=torch.Generator().manual_seed(i)).to(device, dtype)
        p.grad = torch.empty(p.numel() + 1, dtype=dtype, device=device)[1:].view(p.shape).copy_(g)
    return params


@pytest.mark.parametrize("dtype", [torch.float32, *HALF, torch.float64], ids=str)
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clip_grad_norm(dtype, max_norm, device):
    """PyTorch's result; the norm right to 1e-6."""
    ours, theirs = gradients(dtype, device), gradients(dtype, device)
    exact = torch.cat([p.grad.double().view(-1) for p in ours]).norm()
    norm = clip_grad_norm_(ours, max_norm)
    torch.nn.utils.clip_grad_norm_(theirs, max_norm)
    assert norm.dtype == torch.float32
    assert norm.dim() == 0
    assert abs(norm.double() - exact) <= 1e-6 * exact
    for p, q in zip(ours, theirs, strict=True):
        # PyTorch rounds norm and factor to the gradients' dtype.
        torch.testing.assert_close(p.grad, q.grad, rtol=4 * torch.finfo(dtype).eps, atol=1e-7)


def test_clip_grad_norm_of_what_is_not_finite(device):
    """The norm says so; the gradients are spared where that is asked for."""
    for bad in (math.inf, math.nan):
        params = gradients(torch.float32, device)
        params[1].grad[0] = bad
        before = [p.grad.clone() for p in params]
        with pytest.raises(tigon.Error, match="must be finite"):
            clip_grad_norm_(params, 1.0, error_if_nonfinite=True)
        assert all(same_bits(a, p.grad) for a, p in zip(before, params, strict=True))
        norm = clip_grad_norm_(params, 1.0)
        assert not norm.isfinite()
        assert norm.isnan() == math.isnan(bad)


def test_clip_grad_norm_of_other_kinds(device):
    """One tensor, a generator, none at all, other norms, sparse ones."""
    params = gradients(torch.float32, device)
    assert clip_grad_norm_(params[0], 1e9) == params[0].grad.norm()
    assert clip_grad_norm_((p for p in params), 1e9) > 0
    assert clip_grad_norm_([torch.nn.Parameter(torch.ones(3))], 1.0) == 0
    expected = torch.stack([p.grad.abs().max() for p in params if p.numel()]).max()
    assert clip_grad_norm_([p for p in params if p.numel()], 1e9, math.inf) == expected
    named = [p for p in params if p.numel()]
    assert clip_grad_norm_(named, 1e9, "inf") == expected
    assert clip_grad_norm_(named, 1e9, "2.0") == clip_grad_norm_(named, 1e9)
    with pytest.raises(tigon.Error, match="norm_type must be a number, got str"):
        clip_grad_norm_(named, 1.0, "largest")
    table = torch.nn.Embedding(4, 3, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(tigon.Error, match="must be dense and real"):
        clip_grad_norm_(table.parameters(), 1.0)
    meta = torch.nn.Parameter(torch.empty(3, device="meta"))
    meta.grad = torch.empty_like(meta)
    for mixed in ([*params, meta], [meta, *params]):
        with pytest.raises(tigon.Error, match="gradients must be on .* as the first, got"):
            clip_grad_norm_(mixed, 1.0)
    with pytest.raises(tigon.Error, match="max_norm must be a number, got NaN"):
        clip_grad_norm_(params, math.nan)


def test_long_sums_stay_exact(device):
    """2^25 equal gradients, whose squares a single float32 sum would lose."""
    p = torch.nn.Parameter(torch.empty(2**25, device=device))
    p.grad = torch.full_like(p, 0.1)
    exact = float(torch.tensor(0.1)) * 2**12.5
    assert abs(clip_grad_norm_([p], 1e9).item() - exact) <= 5e-7 * exact


# --- scaling ----------------------------------------------------------------------------------


def scaled(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """The contract of scale: a float32 product, rounded once."""
    return (x.float() * factor).to(x.dtype)


@pytest.mark.parametrize("shapes", LISTS, ids=lambda x: x.name)
def test_scale(shapes, device):
    """The bits of a float32 product rounded once, dtypes mixed in one list, with inf and NaN."""
    xs = [p.detach() for dtype in (torch.float32, *HALF) for p in shapes.make(dtype, device)]
    xs[0][(0,) * xs[0].dim()], xs[-1][(-1,) * xs[-1].dim()] = math.inf, math.nan
    for by in (0.3, 0.0, math.nan):
        factor = torch.tensor(by, device=device)
        expected = [scaled(x, factor) for x in xs]
        torch.ops.tigon.scale_(xs, factor)
        for x, y in zip(xs, expected, strict=True):
            assert torch.equal(x.isnan(), y.isnan())
            assert same_bits(x.nan_to_num(7.0), y.nan_to_num(7.0))


def test_scale_of_a_factor_of_one_writes_nothing(device):
    """A signaling NaN, which a product would quiet, keeps its bits."""
    bits = torch.full((4100,), 0x7F81, dtype=torch.int16, device=device)
    x = bits.clone().view(torch.bfloat16)
    torch.ops.tigon.scale_([x[1:], x[:1]], torch.ones((), device=device))
    assert torch.equal(x.view(torch.int16), bits)


def test_scale_writes_no_neighbours(device):
    """Elements before and after a tensor that begins anywhere."""
    for dtype in (torch.float32, *HALF):
        for begin, n in ((1, 1), (3, 2), (1, 8), (7, 9), (5, 16384), (2, 33000)):
            whole = torch.full((n + 16,), 2.0, dtype=dtype, device=device)
            torch.ops.tigon.scale_([whole[begin : begin + n]], torch.tensor(0.5, device=device))
            expected = torch.full_like(whole, 2.0)
            expected[begin : begin + n] = 1.0
            assert torch.equal(whole, expected)


@pytest.mark.parametrize(
    "second, factor, words",
    [
        (torch.ones(4, 4)[:, :2], torch.tensor(0.5), "must fill their memory"),
        (torch.ones(3).expand(2, 3), torch.tensor(0.5), "must fill their memory"),
        (torch.ones(3, dtype=torch.float64), torch.tensor(0.5), "must be float32, bfloat16 or float16"),
        (torch.ones(3), torch.tensor(0.5).double(), "factor must be float32"),
        (torch.ones(3), torch.ones(2), "factor must"),
    ],
)
def test_scale_refuses(second, factor, words):
    """Before anything is written."""
    first = torch.ones(3)
    with pytest.raises(RuntimeError, match=words):
        torch.ops.tigon.scale_([first, second], factor)
    assert torch.equal(first, torch.ones(3))


@pytest.mark.parametrize("case", ["plain", "gaps", "twice", "mixed", "double"])
def test_clip_grad_norm_scales_every_gradient_once(case, device):
    """One native call for all kernel dtypes; gradients with gaps, given twice or of float64 by PyTorch."""
    params = gradients(torch.bfloat16, device)
    if case == "mixed":
        params += gradients(torch.float32, device) + gradients(torch.float16, device)
    if case == "double":
        params += gradients(torch.float64, device)
    if case == "gaps":
        params[0].grad = torch.randn(*params[0].shape, 2, device=device).to(torch.bfloat16)[..., 0]
    if case == "twice":
        params.append(params[1])
    grads = [p.grad for p in params]
    before, versions = [g.clone() for g in grads], [g._version for g in grads]
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        norm = clip_grad_norm_(params, 0.5)
    counts = {event.key: event.count for event in profile.key_averages()}
    if case in ("plain", "mixed"):
        assert counts.get("tigon::scale_") == 1
        assert "aten::mul_" not in counts
        factor = (0.5 / (norm.double() + 1e-6)).float()
        assert all(
            torch.allclose(g.float(), scaled(x, factor).float(), rtol=1e-6, atol=0) or g.dtype in HALF
            for g, x in zip(grads, before, strict=True)
        )
    for i, (g, x, version) in enumerate(zip(grads, before, versions, strict=True)):
        assert g._version > version or not g.numel()
        times = 2 if case == "twice" and i in (1, len(grads) - 1) else 1
        expected = x.double() * (0.5 / (norm.double() + 1e-6)) ** times
        # On CUDA PyTorch rounds the factor to the gradients' dtype too.
        eps = 2 * times * max(torch.finfo(g.dtype).eps, 2e-7)
        torch.testing.assert_close(g.double(), expected, rtol=eps, atol=1e-7)


def test_clip_grad_norm_compiles():
    """In one graph, with the same bits."""
    params = gradients(torch.bfloat16, "cpu")
    before = [p.grad.clone() for p in params]

    def clip():
        return clip_grad_norm_(params, 0.5)

    norm, expected = clip(), [p.grad.clone() for p in params]
    for p, g in zip(params, before, strict=True):
        p.grad.copy_(g)
    assert torch.compile(clip, backend="aot_eager", fullgraph=True)() == norm
    assert all(same_bits(p.grad, x) for p, x in zip(params, expected, strict=True))


def test_fake_tensors():
    """Operators of lists know their results' shapes."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        grads = [torch.empty(3, dtype=torch.bfloat16), torch.empty(2)]
        total, norm, factor = torch.ops.tigon.grad_norm(grads, 1.0, None)
        assert (total.dtype, norm.dtype, factor.shape) == (torch.float64, torch.float32, ())
        assert torch.ops.tigon.scale_(grads, factor) is None
        assert torch.ops.tigon.adamw_(*([[]] * 12), 0, 0, 0, None, None, None) is None
