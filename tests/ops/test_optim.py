"""tigon.optim.AdamW beside PyTorch's: trajectories, state, scalers, graphs, the step in the backward."""

import copy
import io
import math

import pytest
import torch
from checks import same_bits
from torch import nn

import tigon
from cases.adamw import LISTS, Parameters
from tigon.optim import AdamW, step_in_backward

FLAGS = [
    {},
    {"weight_decay": 0.0},
    {"weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-6},
    {"amsgrad": True},
    {"maximize": True},
    {"amsgrad": True, "maximize": True, "weight_decay": 0.3},
    {"lr": torch.tensor(0.01)},
    {"lr": 0.0},
    {"betas": (0.0, 0.0)},
    {"betas": (0.0, 0.9)},
    {"betas": (0.9, 0.2)},
]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
LONG = Parameters("long", ((33, 130), (4096,)))  # which have codes


def draw_gradients(lists, seed: int, scale: float = 1.0) -> None:
    """The same gradients for each list of parameters, in its dtype."""
    draw = torch.Generator().manual_seed(seed)
    for row in zip(*lists, strict=True):
        g = torch.randn(row[0].shape, generator=draw).to(row[0].dtype) * scale
        for p in row:
            p.grad = torch.empty_like(p).copy_(g)


def doubles(params) -> list[nn.Parameter]:
    """The same parameters in float64."""
    return [nn.Parameter(p.detach().double()) for p in params]


def distance(params, exact) -> tuple[float, float]:
    """Largest and root-mean-square error over all parameters."""
    errors = torch.cat(
        [(p.detach().double() - q.detach()).view(-1) for p, q in zip(params, exact, strict=True)]
    )
    return errors.abs().max().item(), errors.square().mean().sqrt().item()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("flags", FLAGS, ids=lambda f: "-".join(f) or "plain")
def test_200_steps_against_float64(dtype, flags, device):
    """Errors at most twice those of PyTorch's fused AdamW."""
    parameters = LISTS[0]
    ours, theirs = (parameters.make(dtype, device) for _ in range(2))
    exact = doubles(ours)
    flags = {"lr": 1e-2} | flags
    fused = {"fused": True} if isinstance(flags["lr"], float) else {}
    wide = flags | {"lr": float(flags["lr"])}
    optimizers = [
        AdamW(ours, **flags),
        torch.optim.AdamW(theirs, **flags, **fused),
        torch.optim.AdamW(exact, **wide, foreach=False),
    ]
    for i in range(200):
        draw_gradients((ours, theirs, exact), i, 10.0 if i % 20 == 0 else 0.3)
        for optimizer in optimizers:
            optimizer.step()
    eps = torch.finfo(dtype).eps
    for mine, yours in zip(distance(ours, exact), distance(theirs, exact), strict=True):
        assert mine <= 2 * yours + eps


@pytest.mark.parametrize("flags", FLAGS[:6], ids=lambda f: "-".join(f) or "plain")
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_one_step_is_pytorchs(dtype, flags, device):
    """From the same state within one rounding of each of PyTorch's step, moments too.

    What is rounded are the two terms of a sum, whose difference may be small: the largest value of a
    tensor measures it. PyTorch's fused CUDA kernel takes 1 - beta of a beta rounded to float32, which is
    2e-5 away where beta is 0.999: fp32 parameters are held to its foreach form there.
    """
    form = "foreach" if device == "cuda" and dtype == torch.float32 else "fused"
    ours, theirs = (LISTS[1].make(dtype, device) for _ in range(2))
    a, b = AdamW(ours, **flags), torch.optim.AdamW(theirs, **flags, **{form: True})
    for i in range(3):
        draw_gradients((ours, theirs), i)
        b.step()
        if i == 1:
            a.load_state_dict(copy.deepcopy(b.state_dict()))
            for p, q in zip(ours, theirs, strict=True):
                p.data.copy_(q.data)
    a.step()
    eps = torch.finfo(dtype).eps
    for p, q in zip(ours, theirs, strict=True):
        for name in (None, "exp_avg", "exp_avg_sq"):
            mine, yours = (p, q) if name is None else (a.state[p][name], b.state[q][name])
            largest = yours.abs().max().item() if yours.numel() else 0.0
            torch.testing.assert_close(mine, yours, rtol=2 * eps, atol=2 * eps * largest)


def test_split_and_master_follow_float32(device):
    """split is bit for bit the run with masters, and these are a float32 run on the same gradients."""
    split, master = (LISTS[0].make(torch.bfloat16, device) for _ in range(2))
    wide = [nn.Parameter(p.detach().float()) for p in split]
    optimizers = [
        AdamW(split, rounding="split", moment_dtype=torch.float32),
        AdamW(master, rounding="master", moment_dtype=torch.float32),
        AdamW(wide),
    ]
    for i in range(30):
        draw_gradients((split, master, wide), i)
        for optimizer in optimizers:
            optimizer.step()
    for p, q, r in zip(split, master, wide, strict=True):
        assert same_bits(p, q)
        assert same_bits(optimizers[1].state[q]["master_param"], r.detach())
        assert (
            (p.detach().float() - r.detach()).abs().max().item() <= 2**-8 * r.abs().max().item()
            if r.numel()
            else 1
        )
        low = optimizers[0].state[p]["param_low"]
        joined = (p.detach().view(torch.int16).int() << 16) + low.int()
        assert same_bits(joined.view(torch.float32), r.detach())


class Moments:
    """What the moments of gradients are in float64."""

    def __init__(self, n: int, betas: tuple[float, float]) -> None:
        self.m, self.v, self.betas = *(torch.zeros(n, dtype=torch.float64) for _ in "12"), betas

    def add(self, g: torch.Tensor) -> None:
        """A step's gradient."""
        g = g.cpu().double()
        self.m.lerp_(g, 1 - self.betas[0])
        self.v.lerp_(g * g, 1 - self.betas[1])


@pytest.mark.parametrize(
    "dtype, options",
    [
        (torch.bfloat16, {}),
        (torch.bfloat16, {"rounding": "stochastic", "seed": 3}),
        (torch.bfloat16, {"rounding": "split"}),
        (torch.bfloat16, {"rounding": "master"}),
        (torch.bfloat16, {"betas": (0.99, 0.9995)}),
        (torch.float32, {"moment_dtype": torch.bfloat16}),
        (torch.float16, {}),
        (torch.float16, {"moment_dtype": torch.bfloat16}),
    ],
    ids=str,
)
def test_moments_against_float64(dtype, options, device):
    """Moments of 16 bits are right in the mean while gradients are alike and after they fell: v within 2 %
    of float64's, m within 1 %, the update m / sqrt(v) within 5 %. To nearest v is 1.2 and then 5.3 of it."""
    n, steps = 4096, 2000
    p = nn.Parameter(torch.zeros(n, dtype=dtype, device=device))
    optimizer = AdamW([p], lr=1e-5, **options)
    exact, draw = Moments(n, options.get("betas", (0.9, 0.999))), torch.Generator().manual_seed(0)
    for i in range(2 * steps):
        p.grad = (torch.randn(n, generator=draw) * (1.0 if i < steps else 0.3)).to(device, dtype)
        exact.add(p.grad)
        optimizer.step()
        if i in (steps - 1, 2 * steps - 1):
            m, v = (optimizer.state[p][name].cpu().double() for name in ("exp_avg", "exp_avg_sq"))
            assert abs(v.sum() / exact.v.sum() - 1) <= 0.02
            assert abs((m * exact.m).sum() / exact.m.square().sum() - 1) <= 0.01
            u, want = m / v.sqrt(), exact.m / exact.v.sqrt()
            assert (u - want).norm() <= 0.05 * want.norm()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rounding": "stochastic", "seed": 3},
        {"rounding": "split"},
        {"rounding": "master"},
        {"moment_rounding": "nearest"},
        {"moment_dtype": torch.float32},
        {"moment_dtype": (torch.bfloat16, torch.float32)},
        {"amsgrad": True},
        {"moment_dtype": "int8"},
        {"moment_dtype": "int8", "rounding": "stochastic", "seed": 3},
        {"moment_dtype": "int8", "rounding": "split"},
        {"moment_dtype": "int8", "rounding": "master"},
        {"moment_dtype": "int8", "max_grad_norm": 1.0},
    ],
    ids=str,
)
def test_saved_in_mid_run(options, device):
    """A run that is saved and goes on in another optimizer keeps its bits; run twice, they are the same."""

    def run(interrupted: bool):
        params = [*LISTS[0].make(torch.bfloat16, device), *LONG.make(torch.bfloat16, device)]
        optimizer = AdamW(params, **options)
        for i in range(6):
            if interrupted and i == 3:
                file = io.BytesIO()
                torch.save(optimizer.state_dict(), file)
                file.seek(0)
                optimizer = AdamW(params, lr=1.0, **options)
                optimizer.load_state_dict(torch.load(file, weights_only=True))
                assert optimizer.param_groups[0]["lr"] == 1e-3
            draw_gradients((params,), i)
            optimizer.step()
        return [*params, *(t for p in params for t in optimizer.state[p].values())]

    plain = run(False)
    for other in (run(False), run(True)):
        assert all(same_bits(p, q) for p, q in zip(plain, other, strict=True))


@pytest.mark.parametrize("fused", [False, True])
def test_checkpoints_of_pytorch(fused, device):
    """PyTorch, Tigon, PyTorch: the curve of a run that never changed hands."""
    torch.manual_seed(0)
    ours, theirs = LISTS[1].make(torch.float32, device), LISTS[1].make(torch.float32, device)
    plain = torch.optim.AdamW(theirs, fused=fused, amsgrad=True)
    optimizer = torch.optim.AdamW(ours, fused=fused, amsgrad=True)
    for i in range(9):
        if i == 3:
            state, optimizer = optimizer.state_dict(), AdamW(ours, amsgrad=True)
            optimizer.load_state_dict(copy.deepcopy(state))
        if i == 6:
            state, optimizer = optimizer.state_dict(), torch.optim.AdamW(ours, fused=fused, amsgrad=True)
            optimizer.load_state_dict(copy.deepcopy(state))
        draw_gradients((ours, theirs), i)
        optimizer.step(), plain.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
        assert optimizer.state[p]["step"] == plain.state[q]["step"] == 9


def test_what_pytorch_has_rounded_is_not_restored(device):
    """The low halves that passed through PyTorch's optimizer begin anew at 0."""
    params = LISTS[1].make(torch.bfloat16, device)
    a, b, c = AdamW(params, rounding="split"), torch.optim.AdamW(params), AdamW(params, rounding="split")
    draw_gradients((params,), 0)
    a.step()
    b.load_state_dict(a.state_dict())
    b.step()
    c.load_state_dict(b.state_dict())
    assert all("param_low" not in c.state[p] for p in params)
    c.step()
    assert all(c.state[p]["param_low"].dtype == torch.int16 for p in params)


def test_groups_schedulers_and_tensor_lr(device):
    """Two groups, one of them with a tensor lr, under a scheduler: as in PyTorch."""
    ours, theirs = (LISTS[0].make(torch.float32, device) for _ in range(2))

    def make(cls, params):
        groups = [
            {"params": params[:2], "weight_decay": 0.0, "lr": torch.tensor(1e-2)},
            {"params": params[2:], "maximize": True},
        ]
        optimizer = cls(groups, lr=1e-3)
        return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)

    runs = [make(AdamW, ours), make(torch.optim.AdamW, theirs)]
    for i in range(10):
        draw_gradients((ours, theirs), i)
        for optimizer, scheduler in runs:
            optimizer.step()
            scheduler.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q)


def test_steps_of_their_own(device):
    """A parameter without a gradient is skipped, and counts its own steps; float64 takes the reference."""
    ours, theirs = (
        [*LISTS[0].make(torch.float32, device), *LISTS[1].make(torch.float64, device)] for _ in "12"
    )
    a, b = AdamW(ours), torch.optim.AdamW(theirs, foreach=False)
    for i in range(6):
        draw_gradients((ours, theirs), i)
        for params in (ours, theirs):
            params[i % 3].grad = None
        a.step(), b.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q)
        assert a.state[p]["step"] == b.state[q]["step"]


def test_tied_and_repeated_parameters(device):
    """One that is listed twice is updated once."""
    p = nn.Parameter(torch.ones(4, device=device))
    q = nn.Parameter(torch.ones(4, device=device))
    with pytest.warns(UserWarning, match="duplicate"):
        a = AdamW([p, p])
    b = AdamW([q])
    p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
    a.step(), b.step()
    assert same_bits(p, q)


def test_closure_and_versions(device):
    """The closure's loss is returned, and autograd sees that parameters were written."""
    p = nn.Parameter(torch.ones(3, device=device))
    optimizer = AdamW([p])
    y = (p * p).sum()

    def closure():
        optimizer.zero_grad()
        loss = (p * 2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 6.0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


# --- clipping and scaling ---------------------------------------------------------------------


def test_clipping_in_the_step(device):
    """max_grad_norm and optimizer.clip_grad_norm_ are PyTorch's clipping before the step."""
    lists = [LISTS[0].make(torch.float32, device) for _ in range(3)]
    a, b, c = AdamW(lists[0], max_grad_norm=0.5), AdamW(lists[1]), AdamW(lists[2])
    for i in range(5):
        draw_gradients(lists, i)
        kept = lists[0][0].grad.clone()
        norm = torch.nn.utils.clip_grad_norm_(lists[2], 0.5)
        assert torch.allclose(b.clip_grad_norm_(0.5), norm)
        a.step(), b.step(), c.step()
        assert torch.allclose(a.grad_norm, norm)
        assert a.grad_norm.device == norm.device
        assert same_bits(kept, lists[0][0].grad)
    for p, q, r in zip(*lists, strict=True):
        assert same_bits(p, q)
        torch.testing.assert_close(p, r)


# --- the step in the backward -----------------------------------------------------------------


class Tied(nn.Module):
    """A model with a tied weight, a frozen one and one that is not used."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(13, 64)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.unused = nn.Linear(8, 8)
        self.layers[1].weight.requires_grad_(False)

    def forward(self, ids, checkpoint=False):
        x = self.embedding(ids)
        for layer in self.layers:
            if checkpoint:
                x = torch.utils.checkpoint.checkpoint(self.block, layer, x, use_reentrant=False)
            else:
                x = self.block(layer, x)
        return x @ self.embedding.weight.t()

    @staticmethod
    def block(layer, x):
        """One layer."""
        return torch.tanh(layer(x)) + x


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rounding": "stochastic", "seed": 1},
        {"rounding": "split"},
        {"moment_rounding": "nearest"},
        {"moment_dtype": "int8"},
    ],
    ids=str,
)
@pytest.mark.parametrize("checkpoint", [False, True])
def test_step_in_backward(options, checkpoint, device):
    """Bit for bit the plain step, gradients freed, with accumulation, and undone."""
    torch.manual_seed(0)
    plain = Tied().to(device, torch.bfloat16)
    inside = copy.deepcopy(plain)
    a, b = (AdamW(model.parameters(), lr=1e-2, **options) for model in (plain, inside))
    handle = step_in_backward(b)
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 2) for optimizer in (a, b)]

    def same():
        return all(same_bits(p, q) for p, q in zip(plain.parameters(), inside.parameters(), strict=True))

    for i in range(6):
        ids = torch.randint(0, 13, (2, 4, 5), generator=torch.Generator().manual_seed(i)).to(device)
        if i == 3:  # two micro-batches
            plain(ids[0], checkpoint).float().square().mean().backward()
            with handle.accumulate():
                inside(ids[0], checkpoint).float().square().mean().backward()
        if i == 5:
            handle.undo()
        for model in (plain, inside):
            model(ids[1], checkpoint).float().square().mean().backward()
        gone = [p.grad is None for p in inside.parameters() if p.requires_grad]
        assert all(gone) == (i < 5)
        for optimizer, scheduler in zip((a, b), schedulers, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        assert same()


def test_step_in_backward_refuses(device):
    """Another optimizer, clipping, a scaler."""
    p = nn.Parameter(torch.ones(3, device=device))
    with pytest.raises(tigon.Error, match=r"must be a tigon.optim.AdamW, got AdamW"):
        step_in_backward(torch.optim.AdamW([p]))
    with pytest.raises(tigon.Error, match="max_grad_norm must be None, got 1.0: the norm of all gradients"):
        step_in_backward(AdamW([p], max_grad_norm=1.0))
    optimizer = AdamW([p])
    handle = step_in_backward(optimizer)
    with pytest.raises(tigon.Error, match="clip_grad_norm_ must not be called with step_in_backward"):
        optimizer.clip_grad_norm_(1.0)
    optimizer.grad_scale = torch.ones((), device=device)
    with pytest.raises(tigon.Error, match="GradScaler must not be used with step_in_backward"):
        optimizer.step()
    with pytest.raises(tigon.Error, match="optimizer must not step in the backward already"):
        step_in_backward(optimizer)
    handle.undo()
    optimizer.step()


# --- refusals ---------------------------------------------------------------------------------


def test_bad_parameters(device):
    """Complex ones, sparse gradients, gapped and freed parameters."""
    with pytest.raises(tigon.Error, match="params must be real floats, got torch.complex64"):
        AdamW([nn.Parameter(torch.ones(2, dtype=torch.complex64, device=device))])
    table = nn.Embedding(4, 3, sparse=True, device=device)
    table(torch.tensor([1], device=device)).sum().backward()
    with pytest.raises(tigon.Error, match="gradients must be dense"):
        AdamW(table.parameters()).step()
    gapped = nn.Parameter(torch.ones(8, 4, device=device)[:, ::2])
    gapped.grad = torch.ones_like(gapped)
    with pytest.raises(tigon.Error, match="param 0 must fill its memory without gaps"):
        AdamW([gapped]).step()
    freed = nn.Parameter(torch.ones(8, device=device))
    freed.grad = torch.ones_like(freed)
    freed.untyped_storage().resize_(0)
    with pytest.raises(tigon.Error, match="freed"):
        AdamW([freed]).step()


@pytest.mark.gpu
def test_moved_parameters():
    """State that stayed on the other device."""
    p = nn.Parameter(torch.ones(8))
    optimizer = AdamW([p])
    p.grad = torch.ones_like(p)
    optimizer.step()
    p.grad = None
    p.data = p.data.cuda()
    p.grad = torch.ones_like(p)
    with pytest.raises(tigon.Error, match="exp_avg 0 must be on cuda:0, got cpu"):
        optimizer.step()


@pytest.mark.gpu
def test_several_devices():
    """Parameters on the CPU and a GPU, clipped together."""
    lists = [[*LISTS[1].make(torch.float32), *LISTS[0].make(torch.float32, "cuda")] for _ in range(2)]
    a, b = AdamW(lists[0], max_grad_norm=0.5), torch.optim.AdamW(lists[1], foreach=False)
    for i in range(3):
        draw_gradients(lists, i)
        torch.nn.utils.clip_grad_norm_(lists[1], 0.5)
        a.step(), b.step()
    for p, q in zip(*lists, strict=True):
        torch.testing.assert_close(p, q)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [{}, {"rounding": "stochastic"}, {"max_grad_norm": 0.5}, {"capturable": True, "amsgrad": True}],
    ids=str,
)
def test_nothing_waits_for_the_device(options):
    """Plain, many tensors, clipped, under a scaler."""
    for parameters in LISTS:
        params = parameters.make(torch.float16, "cuda")  # PyTorch 2.11's scaler takes no bfloat16 there
        optimizer = AdamW(params, **options)
        scaler = torch.amp.GradScaler("cuda")
        scaler.scale(torch.ones((), device="cuda"))
        for warm in (True, False):
            draw_gradients((params,), 0)
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("default" if warm else "error")
            try:
                optimizer.step()
                scaler.step(optimizer)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            scaler.update()


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"rounding": "stochastic"}, {"max_grad_norm": 0.5}], ids=str)
def test_captured_in_a_graph(options):
    """A graph replayed with a changing lr and changing gradients: bit for bit the steps outside of it."""
    for parameters in (LISTS[0], LISTS[5]):  # a table in the kernel's parameters, and one in memory
        lists = [parameters.make(torch.bfloat16, "cuda") for _ in range(2)]
        lrs = [torch.tensor(1e-2, device="cuda") for _ in range(2)]
        a, b = (AdamW(p, lr=lr, capturable=True, **options) for p, lr in zip(lists, lrs, strict=True))
        draw_gradients(lists, 0)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            a.step()
        torch.cuda.current_stream().wait_stream(stream)
        b.step()
        grads = [p.grad for p in lists[0]]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            a.step()
        for i in range(1, 5):
            for lr in lrs:
                lr.fill_(1e-2 / i)
            draw_gradients(lists[1:], i)
            for g, q in zip(grads, lists[1], strict=True):
                g.copy_(q.grad)
            graph.replay()
            b.step()
            for p, q in zip(*lists, strict=True):
                assert same_bits(p, q)
                assert a.state[p]["step"].item() == i + 1


@pytest.mark.gpu
def test_capture_needs_capturable():
    """Steps that the host counts would stand still in a graph."""
    p = nn.Parameter(torch.ones(8, device="cuda"))
    p.grad = torch.ones_like(p)
    optimizer = AdamW([p])
    optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(tigon.Error, match="capturable must be True"), torch.cuda.graph(graph):
        optimizer.step()


@pytest.mark.gpu
@pytest.mark.xdist_group("large")
def test_more_than_2_31_elements():
    """The ends of one long parameter are those of a short one, its norm is exact."""
    n = 2**31 + 70001
    if torch.cuda.mem_get_info()[0] < 25e9:
        pytest.skip("needs 25 GB of free GPU memory")
    ends = 50000
    long = nn.Parameter(torch.zeros(n, dtype=torch.bfloat16, device="cuda"))
    long.grad = torch.full_like(long, 0.5)
    draw = torch.randn(ends, device="cuda").bfloat16()
    long.grad[-ends:] = draw
    short = nn.Parameter(torch.zeros(ends, dtype=torch.bfloat16, device="cuda"))
    short.grad = draw.clone()
    optimizer = AdamW([long])
    norm = tigon.optim.AdamW.clip_grad_norm_(optimizer, math.inf).double().item()
    optimizer.step()
    AdamW([short]).step()
    assert same_bits(long.detach()[-ends:], short.detach())
    exact = math.sqrt((n - ends) * 0.25 + draw.double().square().sum().item())
    assert abs(norm - exact) <= 1e-6 * exact
