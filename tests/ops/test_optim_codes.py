"""tigon.optim.AdamW with moment_dtype="int8": state, other libraries' states, groups, bounds, convergence."""

import copy
import itertools

import pytest
import torch
from checks import same_bits
from test_optim import draw_gradients
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import tigon
from cases.adamw import Parameters
from tigon.optim import AdamW, codes, step_in_backward

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
MIXED = Parameters("mixed", ((33, 130), (4095,), (4096,), (17,), (0,), (70, 64)))
CODED = [True, False, True, False, False, True]


def states(optimizer) -> list[torch.Tensor]:
    """All tensors of the state, in the order of parameters."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return [t for p in params for t in optimizer.state[p].values()]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_what_has_codes(dtype, device):
    """Parameters from 4096 elements on, contiguous ones, 2.03 bytes each; the others have float32."""
    params = MIXED.make(dtype, device)
    params.append(nn.Parameter(torch.ones(80, 64, dtype=dtype, device=device).t()))
    optimizer = AdamW(params, moment_dtype="int8")
    draw_gradients((params,), 0)
    optimizer.step()
    for p, coded in zip(params, [*CODED, False], strict=True):
        state = optimizer.state[p]
        assert ("exp_avg_codes" in state) == coded
        if not coded:
            assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.float32
            continue
        assert set(state) == {*codes.NAMES, "step"}
        held = sum(state[name].numel() * state[name].element_size() for name in codes.NAMES)
        assert held <= 2 * p.numel() + 8 * (p.numel() / 256 + 1)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_beside_float32(dtype, device):
    """A step from moments that codes can say is that of float32 moments, taken as they are."""
    ours, wide = (MIXED.make(dtype, device) for _ in range(2))
    a, b = AdamW(ours, moment_dtype="int8"), AdamW(wide, moment_dtype=torch.float32)
    for i in range(3):
        draw_gradients((ours, wide), i)
        b.load_state_dict(copy.deepcopy(a.state_dict()))
        a.step(), b.step()
        assert all(same_bits(p, q) for p, q in zip(ours, wide, strict=True))
    for p, q in zip(ours, wide, strict=True):
        if "exp_avg_codes" in a.state[p]:
            exact = b.state[q]["exp_avg_sq"].view(-1)
            code, absmax = codes.encode(codes.root(exact), True)
            assert torch.equal(code.view_as(p), a.state[p]["exp_avg_sq_root_codes"])
            assert same_bits(absmax, a.state[p]["exp_avg_sq_root_absmax"])


def test_by_group(device):
    """A group's moment_dtype is its own, stays where a state is loaded, and is refused where it is none."""
    first, second = (nn.Parameter(torch.ones(64, 70, device=device)) for _ in range(2))
    groups = [{"params": [first]}, {"params": [second], "moment_dtype": torch.float32}]
    for default, other in (("int8", torch.float32), (torch.bfloat16, "int8")):
        groups[1]["moment_dtype"] = other
        optimizer = AdamW(copy.copy(groups), moment_dtype=default)
        draw_gradients(([first], [second]), 0)
        optimizer.step()
        coded = ["exp_avg_codes" in optimizer.state[p] for p in (first, second)]
        assert coded == [default == "int8", other == "int8"]
        loaded = AdamW([{"params": [first], "moment_dtype": "int8"}, {"params": [second]}])
        loaded.load_state_dict(optimizer.state_dict())
        assert [g.get("moment_dtype") for g in loaded.param_groups] == ["int8", None]
        assert "exp_avg_codes" in loaded.state[first]
        assert loaded.state[second]["exp_avg"].dtype == torch.float32
        optimizer.load_state_dict(loaded.state_dict())
        assert ["exp_avg_codes" in optimizer.state[p] for p in (first, second)] == coded
    with pytest.raises(tigon.Error, match="amsgrad must be False where moment_dtype is"):
        AdamW([{"params": [first], "amsgrad": True}], moment_dtype="int8")


@pytest.mark.parametrize("mode", [FakeTensorMode, torch.inference_mode, lambda: torch.device("meta")])
def test_the_map_of_a_mode_is_not_kept(mode):
    """Made first where tensors are fake, it was a fake one ever after."""
    device = torch.device("cpu", 0)  # another key than others have
    with mode():
        codes.code_map(True, device)
    values = codes.code_map(True, device)
    assert type(values) is torch.Tensor and not values.is_inference() and values.is_cpu
    saved = AdamW([nn.Parameter(torch.ones(64, 70))], moment_dtype="int8")
    saved.param_groups[0]["params"][0].grad = torch.ones(64, 70)
    saved.step()
    for state in saved.bitsandbytes_state_dict()["state"].values():
        state["__bnb_optimizer_quant_state__"]["qmap2"].zero_()
    assert codes.code_map(True).any()


@pytest.mark.parametrize("way", ["step", "in the backward"])
@pytest.mark.parametrize(
    "before, after", [*itertools.permutations(["int8", torch.float32, torch.bfloat16], 2)]
)
def test_a_group_that_changes_in_mid_run(before, after, way):
    """The moments are there: another dtype is an error until they are converted, and never ignored."""
    p, q = (nn.Parameter(torch.ones(64, 70)) for _ in range(2))
    optimizer = AdamW([{"params": [p], "moment_dtype": before}])
    if way == "in the backward":
        step_in_backward(optimizer)

    def step():
        p.sum().backward()
        optimizer.step()

    step()
    optimizer.add_param_group({"params": [q], "moment_dtype": after})
    step()
    kept = p.detach().clone()
    optimizer.param_groups[0]["moment_dtype"] = after
    with pytest.raises(
        tigon.Error, match=f"moment_dtype of a group must stay {before}, .* got {after}: load"
    ):
        step()
    assert torch.equal(p, kept)
    p.grad = None
    optimizer.load_state_dict(optimizer.state_dict())
    step()
    state = optimizer.state[p]
    assert ("exp_avg_codes" in state) if after == "int8" else (state["exp_avg"].dtype == after)


def test_refused_in_a_state(device):
    """Codes of other sizes or dtypes, maxima of other blocks, amsgrad set later: nothing was modified."""
    p = nn.Parameter(torch.ones(64, 70, device=device))
    optimizer = AdamW([p], moment_dtype="int8")
    draw_gradients(([p],), 0)
    optimizer.step()
    before = [t.clone() for t in states(optimizer)]
    for name, bad, words in (
        ("exp_avg_codes", lambda t: t.float(), "exp_avg_codes must be uint8, got torch.float32"),
        (
            "exp_avg_sq_root_codes",
            lambda t: t[1:],
            r"must have the sizes of its param, \[64, 70\], got \[63, 70\]",
        ),
        ("exp_avg_absmax", lambda t: t[1:], "must have an element for each of 18 blocks, got 17"),
        ("exp_avg_sq_root_absmax", None, "a state with codes must have"),
    ):
        saved = copy.deepcopy(optimizer.state_dict())
        value = saved["state"][0].pop(name)
        if bad is not None:
            saved["state"][0][name] = bad(value)
        saved["param_groups"][0]["lr"] = 7.0
        with pytest.raises(tigon.Error, match=words):
            optimizer.load_state_dict(saved)
        assert optimizer.param_groups[0]["lr"] == 1e-3
    optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(tigon.Error, match="amsgrad must be False where moments are 8-bit codes"):
        optimizer.step()
    assert all(same_bits(a, b) for a, b in zip(before, states(optimizer), strict=True))


def test_pytorch_does_not_take_codes_for_moments(device):
    """torch.optim.AdamW stops at the first step; states of it, and for it, go by float32."""
    ours, theirs = (MIXED.make(torch.float32, device) for _ in range(2))
    a, b = AdamW(ours, moment_dtype="int8"), torch.optim.AdamW(theirs)
    draw_gradients((ours, theirs), 0)
    a.step(), b.step()
    c = torch.optim.AdamW(ours)
    c.load_state_dict(a.state_dict())
    with pytest.raises(KeyError, match="exp_avg"):
        c.step()
    a.load_state_dict(b.state_dict())
    wide = AdamW(theirs, moment_dtype=torch.float32)
    wide.load_state_dict(a.state_dict())
    b.load_state_dict(wide.state_dict())
    b.step()
    assert ["exp_avg_codes" in a.state[p] for p in ours] == CODED


# --- other libraries' states ------------------------------------------------------------------


def bitsandbytes_state(params, optimizer_moments) -> dict:
    """What bitsandbytes' AdamW8bit saves of these moments: its layout, written by hand."""
    made, signed, unsigned = {}, codes.code_map(False), codes.code_map(True)
    for i, (p, (m, v)) in enumerate(zip(params, optimizer_moments, strict=True)):
        if p.numel() < 4096:
            quant = {"state1": m, "state2": v}
        else:
            (m_codes, m_max), (v_codes, v_max) = (
                codes.encode(m.view(-1), False),
                codes.encode(v.view(-1), True),
            )
            quant = {"state1": m_codes.view_as(p), "state2": v_codes.view_as(p)}
            quant |= {"qmap1": signed, "qmap2": unsigned, "absmax1": m_max, "absmax2": v_max}
        made[i] = {"step": 7, "__bnb_optimizer_quant_state__": quant}
    group = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
    group |= {"alpha": 0.0, "t_alpha": None, "t_beta3": None, "params": list(range(len(params)))}
    return {"state": made, "param_groups": [group]}


def drawn_moments(params):
    draw = torch.Generator().manual_seed(3)
    return [
        [torch.randn(p.shape, generator=draw) * 1e-2, torch.rand(p.shape, generator=draw) ** 4]
        for p in params
    ]


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_state_of_bitsandbytes_and_back(wrapped):
    """exp_avg has the same codes; exp_avg_sq goes by its root and back within a step of the map each."""
    params = MIXED.make(torch.bfloat16)
    moments = drawn_moments(params)
    saved = bitsandbytes_state(params, moments)
    if not wrapped:
        for state in saved["state"].values():
            state |= state.pop("__bnb_optimizer_quant_state__")
    for moment_dtype in ("int8", torch.float32):
        optimizer = AdamW(params, moment_dtype=moment_dtype)
        optimizer.load_state_dict(copy.deepcopy(saved))
        assert optimizer.param_groups[0]["betas"] == (0.9, 0.99)
        assert "alpha" not in optimizer.param_groups[0]
        back = optimizer.bitsandbytes_state_dict()
        for i, p in enumerate(params):
            theirs = saved["state"][i].get("__bnb_optimizer_quant_state__", saved["state"][i])
            state = optimizer.state[p]
            assert state["step"] == 7
            if not CODED[i]:
                assert same_bits(state["exp_avg"], theirs["state1"])
                assert same_bits(state["exp_avg_sq"], theirs["state2"])
                continue
            values = codes.code_map(True)[theirs["state2"].int()].view(-1)
            exact = values * theirs["absmax2"].repeat_interleave(256)[: p.numel()]
            v = codes.decoded(state, p, 0)["exp_avg_sq"] if moment_dtype == "int8" else state["exp_avg_sq"]
            # By the root's codes: half of a gap of the map, twice.
            assert ((v.view(-1) - exact).abs() <= 0.13 * exact + 1e-12).all()
            if moment_dtype == "int8":
                assert torch.equal(state["exp_avg_codes"], theirs["state1"])
                assert same_bits(state["exp_avg_absmax"], theirs["absmax1"])
                again = back["state"][i]["__bnb_optimizer_quant_state__"]
                assert back["state"][i]["step"] == 7
                assert torch.equal(again["state1"], theirs["state1"])
                code, absmax = codes.encode(v.view(-1), True)
                assert torch.equal(again["state2"].view(-1), code)
                assert same_bits(again["absmax2"], absmax)


def test_bitsandbytes_itself():
    """Its optimizer's state, made by its code, and ours loaded by it."""
    bnb = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
    params = MIXED.make(torch.float32)
    theirs = bnb.optim.AdamW8bit(params, lr=1e-2, betas=(0.9, 0.99))
    for i, p in enumerate(params):
        theirs.init_state(theirs.param_groups[0], p, 0, i)
    ours = AdamW(params, moment_dtype="int8")
    ours.load_state_dict(theirs.state_dict())
    draw_gradients((params,), 0)
    for _ in range(2):
        ours.step()
    theirs.load_state_dict(ours.bitsandbytes_state_dict())
    for p, coded in zip(params, CODED, strict=True):
        state = theirs.state[p]
        assert state["step"] == 2
        assert (state["state1"].dtype == torch.uint8) == coded
        if coded:
            assert torch.equal(state["state1"], ours.state[p]["exp_avg_codes"])
            assert same_bits(state["absmax1"], ours.state[p]["exp_avg_absmax"])
    assert theirs.param_groups[0]["betas"] == (0.9, 0.99)


def test_torchao_itself():
    """Its 8-bit states by their codes, its others by their values."""
    torchao = pytest.importorskip("torchao.optim", reason="needs torchao")
    for cls in (torchao.AdamW8bit, torchao.AdamW4bit, torchao.AdamWFp8):
        p = nn.Parameter(torch.ones(64, 128))
        theirs = cls([p])
        state = theirs.state[p]
        state["step"] = torch.tensor(3.0)
        m, v = drawn_moments([p])[0]
        for name, value, signed in (("exp_avg", m, True), ("exp_avg_sq", v, False)):
            state[name] = theirs._new_buffer(p, signed)
            state[name].copy_(value)
        ours = AdamW([p], moment_dtype="int8")
        ours.load_state_dict(theirs.state_dict())
        assert ours.state[p]["step"] == 3
        if cls is torchao.AdamW8bit:
            assert torch.equal(ours.state[p]["exp_avg_codes"], state["exp_avg"].codes)
        read = codes.decoded(ours.state[p], p, 0)
        assert torch.allclose(read["exp_avg"], state["exp_avg"].dequantize(), rtol=0.2, atol=1e-3)


def test_states_that_are_not_adams():
    """Of Lion there is one moment, of AdEMAMix a pair in state1."""
    p = nn.Parameter(torch.ones(64, 64))
    saved = bitsandbytes_state([p], drawn_moments([p]))
    del saved["state"][0]["__bnb_optimizer_quant_state__"]["state2"]
    with pytest.raises(tigon.Error, match="a state of bitsandbytes must be Adam's"):
        AdamW([p], moment_dtype="int8").load_state_dict(saved)
    saved["param_groups"][0]["alpha"] = 5.0
    with pytest.raises(tigon.Error, match="must not have 'alpha'"):
        AdamW([p], moment_dtype="int8").load_state_dict(saved)


# --- what the codes do to a run ---------------------------------------------------------------


@pytest.mark.parametrize("spread, bound", [(0.7, 0.11), (1.0, 0.14), (1.5, 0.19)])
def test_updates_stay_bounded(spread, bound, device):
    """Gradients whose scales differ within a block: m / sqrt(v) is near float32's, and never explodes."""
    draw = torch.Generator().manual_seed(0)
    n = 64 * 256
    sigma = (torch.randn(n, generator=draw) * spread).exp()
    ps = [nn.Parameter(torch.zeros(n, device=device)) for _ in range(2)]
    made = [
        AdamW([p], lr=1.0, weight_decay=0.0, eps=0.0, moment_dtype=t)
        for p, t in zip(ps, ("int8", torch.float32), strict=True)
    ]
    off, norm, largest = 0.0, 0.0, 0.0
    for i in range(900):
        g = (torch.randn(n, generator=draw) * sigma * (0.3 if i > 450 else 1.0)).to(device)
        before = [p.detach().clone() for p in ps]
        for p, optimizer in zip(ps, made, strict=True):
            p.grad = g
            optimizer.step()
        u, w = (p.detach() - b for p, b in zip(ps, before, strict=True))
        if i >= 700:
            off, norm = off + (u - w).square().sum().item(), norm + w.square().sum().item()
            largest = max(largest, u.abs().max().item())
    assert (off / norm) ** 0.5 <= bound
    assert largest <= 3.5


def test_two_thousand_steps_beside_float32(device):
    """A small regression with a warm-up and a spike of gradients: the loss is within the band of seeds of
    float32 moments."""

    def run(seed: int, moment_dtype) -> float:
        draw = torch.Generator().manual_seed(99)
        teacher = torch.randn(64, 64, generator=draw) / 8
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(64, 96), nn.SiLU(), nn.Linear(96, 64)).to(device)
        optimizer = AdamW(net.parameters(), lr=3e-3, moment_dtype=moment_dtype)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda i: min((i + 1) / 100, 1.0) * (1 - i / 2001)
        )
        last = []
        for i in range(2000):
            x = torch.randn(32, 64, generator=draw)
            loss = (net(x.to(device)) - (x @ teacher).tanh().to(device)).square().mean()
            (loss * (30.0 if i == 1000 else 1.0)).backward()
            optimizer.step(), optimizer.zero_grad(), schedule.step()
            last.append(loss.item())
        return sum(last[-200:]) / 200

    wide = [run(seed, torch.float32) for seed in range(3)]
    coded = [run(seed, "int8") for seed in range(3)]
    assert all(c <= 1.03 * max(wide) for c in coded), (coded, wide)


def test_compiled_and_deterministic(device):
    """A step beside a compiled forward, and under deterministic algorithms: the same bits."""

    def run(compiled: bool, deterministic: bool):
        torch.manual_seed(0)
        net = nn.Linear(70, 70, device=device)
        forward = torch.compile(net, backend="aot_eager") if compiled else net
        optimizer = AdamW(net.parameters(), moment_dtype="int8")
        torch.use_deterministic_algorithms(deterministic)
        try:
            for i in range(2):
                x = torch.randn(4, 70, generator=torch.Generator().manual_seed(i)).to(device)
                forward(x).square().sum().backward()
                optimizer.step(), optimizer.zero_grad()
        finally:
            torch.use_deterministic_algorithms(False)
        return [*net.parameters(), *states(optimizer)]

    plain = run(False, False)
    for other in (run(True, False), run(False, True)):
        assert all(same_bits(a, b) for a, b in zip(plain, other, strict=True))


@pytest.mark.gpu
def test_captured():
    """A replayed step has the bits of one that is not, counts its steps and reads lr from the device."""
    lists = [MIXED.make(torch.bfloat16, "cuda") for _ in range(2)]
    lr = torch.tensor(1e-2, device="cuda")
    a, b = (AdamW(ps, lr=lr, moment_dtype="int8", capturable=True) for ps in lists)
    for i in range(2):
        draw_gradients(lists, i)
        a.step(), b.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        a.step()
    for _ in range(3):
        graph.replay(), b.step()
    assert all(same_bits(p, q) for p, q in zip(*lists, strict=True))
    assert all(same_bits(x, y) for x, y in zip(states(a), states(b), strict=True))


@pytest.mark.gpu
def test_the_same_on_cpu_and_gpu():
    """Ten steps of a list, whole states included."""
    lists = [MIXED.make(torch.bfloat16, d) for d in ("cpu", "cuda")]
    made = [AdamW(ps, moment_dtype="int8", rounding="stochastic") for ps in lists]
    for i in range(10):
        draw_gradients(lists, i)
        for optimizer in made:
            optimizer.step()
    assert all(same_bits(p, q.cpu()) for p, q in zip(*lists, strict=True))
    assert all(same_bits(x, y.cpu()) for x, y in zip(*map(states, made), strict=True))
