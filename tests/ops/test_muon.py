"""tigon.optim.Muon beside PyTorch's: trajectories, orthogonality, batches, experts, state, groups."""

import copy
import io
import itertools
import math

import pytest
import torch
from checks import check_close, same_bits
from torch import nn
from torch.optim._muon import _zeropower_via_newtonschulz

import tigon
from cases.muon import LISTS, make
from tigon.ops.muon import Start, momentum_, update_
from tigon.ops.orthogonalize import _native, orthogonalize_
from tigon.optim import Muon, muon_groups

COEFFICIENTS, STEPS, EPS = (3.4445, -4.7750, 2.0315), 5, 1e-7
OPTIONS = [
    {},
    {"weight_decay": 0.0, "nesterov": False},
    {"adjust_lr_fn": "match_rms_adamw"},
    {"momentum": 0.0},
    {"ns_steps": 1},
    {"ns_steps": 7, "ns_coefficients": (1.5, -0.5, 0.0)},
    {"lr": torch.tensor(0.03)},
    {"eps": 10.0},
]
SHAPES = ((64, 64), (64, 64), (48, 200), (200, 48), (37, 61), (1, 9), (9, 1), (24, 33), (0, 5))


def drawn(shapes, seed=0, dtype=torch.float32, device="cpu"):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=draw).to(device, dtype) for shape in shapes]


def parameters(shapes, dtype, device):
    return [nn.Parameter(p) for p in drawn(shapes, 0, dtype, device)]


def exact(x, coefficients=COEFFICIENTS, steps=STEPS):
    """The iterations in float64, of one matrix."""
    a, b, c = coefficients
    x = x.double() / x.double().norm()
    x = x.T if x.shape[0] > x.shape[1] else x
    for _ in range(steps):
        r = x @ x.T
        x = a * x + (b * r + c * r @ r) @ x
    return x


def spectrum(rows, cols, values, device, seed=0):
    """A matrix of these singular values."""
    n = min(rows, cols)
    draw = torch.Generator().manual_seed(rows + cols + 1000 * seed)
    u = torch.linalg.qr(torch.randn(rows, n, generator=draw))[0]
    v = torch.linalg.qr(torch.randn(cols, n, generator=draw))[0]
    return ((u * values(torch.arange(1.0, n + 1))) @ v.T).to(device)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_steps_are_pytorchs(options, dtype, device):
    """As near to the same steps in float64 as PyTorch's, whose iterations are in bfloat16."""
    shapes = SHAPES[:-1]  # PyTorch's fails without elements
    ours, theirs, wide = (parameters(shapes, dtype, device) for _ in range(3))
    wide = [nn.Parameter(p.detach().double()) for p in wide]
    options = {"lr": 0.02} | options
    a, b, c = Muon(ours, **options), torch.optim.Muon(theirs, **options), Muon(wide, **options)
    for i in range(5):
        for p, q, r, g in zip(ours, theirs, wide, drawn(shapes, i + 1, dtype, device), strict=True):
            p.grad, q.grad, r.grad = g, g.clone(), g.double()
        a.step(), b.step(), c.step()
    for p, q, r in zip(ours, theirs, wide, strict=True):
        scale = torch.finfo(dtype).eps * r.detach().abs().max().item()
        error, yours = ((x.detach() - r.detach()).abs().max().item() for x in (p, q))
        assert error <= 1.5 * yours + 2 * scale
        if not (
            dtype == torch.bfloat16 and not options.get("nesterov", True)
        ):  # theirs is divided by its norm
            assert same_bits(a.state[p]["momentum_buffer"], b.state[q]["momentum_buffer"])


def test_float64_is_the_formula(device):
    """One step in float64 from the formula."""
    (p,), (g,) = parameters([(24, 40)], torch.float64, device), drawn([(24, 40)], 1, torch.float64, device)
    before, p.grad = p.detach().clone(), g
    Muon([p], lr=0.1, weight_decay=0.3, momentum=0.9).step()
    update = exact(g + 0.9 * (0.1 * g - g))
    torch.testing.assert_close(p.detach(), before * 0.97 - 0.1 * update, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "values",
    [torch.ones_like, lambda i: 1 / i, lambda i: i**-2, lambda i: (-i / 8).exp(), lambda i: (i < 5).float()],
    ids=["equal", "inverse", "square", "exponential", "rank4"],
)
@pytest.mark.parametrize(
    "shape, dtype",
    [
        ((96, 96), None),
        ((24, 72), torch.float16),
        ((256, 456), None),
        ((456, 256), torch.float16),
        ((96, 136), None),
    ],
    ids=str,
)
def test_orthogonality(shape, dtype, values, device):
    """Nearer to the iterations in float64 than PyTorch's, no farther from orthogonal: of three matrices."""
    x = torch.stack([spectrum(*shape, values, device, seed) for seed in range(3)]).bfloat16()
    mine = orthogonalize_(x.clone(), COEFFICIENTS, STEPS, EPS, dtype)
    yours = torch.stack([_zeropower_via_newtonschulz(m.clone(), COEFFICIENTS, STEPS, EPS) for m in x])
    want = torch.stack([exact(m) for m in x])
    eye = torch.eye(min(shape), device=device, dtype=torch.float64)

    def errors(y):
        y = y.double().mT if shape[0] > shape[1] and y is not want else y.double()
        return (y - want).norm().item(), (y @ y.mT - eye).norm().item()

    (error, distance), (theirs, their_distance), (_, least) = map(errors, (mine, yours, want))
    assert error <= 0.5 * theirs
    # Most of it is the iterations' own; PyTorch's is less where rounding errors fill what is singular.
    assert distance <= 1.005 * max(their_distance, least)


FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def passes(case, dtype, other, nesterov, device="cpu", started=True):
    """Momenta, directions or what iterations start with, and parameters, after the passes; what they were
    made of."""
    p, m, g = ([t.to(device) for t in make(*case, d, i)] for i, d in enumerate((dtype, other, dtype)))
    given = [[t.clone() for t in tensors] for tensors in (p, m, g)]
    updates = momentum_(m, g, 0.95, nesterov, Start(g[0], 1e-7, other) if started else None)
    lr = torch.tensor(0.03, device=device) if other == torch.float16 else 0.03
    update_(p, list(updates.to(other)), lr, 1.5, 0.1)
    return m, list(updates), p, given


@pytest.mark.parametrize("case", LISTS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("other", FLOATS, ids=str)
@pytest.mark.parametrize("nesterov, started", [(True, True), (False, False)])
def test_passes(case, dtype, other, nesterov, started, device):
    """Each result beside the formula in float32, rounded once, and in float64."""
    *results, given = passes(case, dtype, other, nesterov, device, started)
    results = [torch.stack(list(tensors)) for tensors in results]
    p, m, g = map(torch.stack, given)
    assert results[1].dtype == (other if started else dtype)
    expected = []
    for wide in (torch.float32, torch.float64):
        x = torch.lerp(m.to(wide), g.to(wide), 1 - 0.95)
        kept = x.to(other).to(wide)
        u = (torch.lerp(g.to(wide), kept, 0.95) if nesterov else kept).to(dtype).to(wide)
        if started:
            u *= math.prod(case[0][-2:]) ** 0.5 / u.norm(dim=(-2, -1), keepdim=True)
        old, step = p.to(wide), results[1].to(other).to(wide)
        expected.append((x, u, old - 0.03 * (0.1 * old + 1.5 * step)))
    for a, b, c in zip(results, *expected, strict=True):
        check_close(str(case), a, b.to(a.dtype), c)


def test_passes_keep_to_their_matrices(device):
    """NaN and infinity stay in their matrices; nothing beside is written."""
    memory = torch.ones(3, 2 * 33 * 65 + 2, device=device)
    m = [row[1:-1].view(2, 33, 65) for row in memory]
    g = [torch.ones(2, 33, 65, device=device) for _ in m]
    g[1][0, 3, 4], g[2][1, 0, 0] = math.nan, math.inf
    updates = momentum_(m, g, 0.9, True, Start(g[0], 1e-7))
    assert updates.isfinite().all(-1).all(-1).tolist() == [[True, True], [False, True], [True, False]]
    assert (~memory.isfinite()).sum() == 2
    update_(m, list(torch.ones_like(updates)), 0.5, 1.0, 0.0)
    assert (memory[:, [0, -1]] == 1).all() and (~memory.isfinite()).sum() == 2


@pytest.mark.parametrize("started", [True, False])
def test_passes_of_gaps_and_float64_are_pytorchs(started, device):
    """Transposed parameters and float64 ones: the same results without the native call."""
    expected = passes(((24, 40), 2, 0), torch.float32, torch.float32, True, device, started)
    for dtype, view in ((torch.float64, lambda t: t), (torch.float32, lambda t: t.mT.contiguous().mT)):
        p, m, g = ([view(t.to(device)) for t in make((24, 40), 2, 0, dtype, i)] for i in range(3))
        updates = momentum_(m, g, 0.95, True, Start(g[0], 1e-7, dtype) if started else None)
        update_(p, list(updates), 0.03, 1.5, 0.1)
        for a, b in zip((*m, *updates, *p), itertools.chain(*expected[:3]), strict=True):
            torch.testing.assert_close(a.float(), b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "bad, words",
    [
        ({"momenta": [torch.ones(4, 5)]}, "grads must have 1 tensors as momenta, got 2"),
        ({"momenta": [torch.ones(4, 5), torch.ones(4, 4)]}, "momenta must be contiguous and of one shape"),
        ({"grads": [torch.ones(4, 5), torch.ones(5, 4)]}, "grads must be contiguous and of one shape"),
        ({"grads": [torch.ones(4, 5).double()] * 2}, "grads must be float32, bfloat16 or float16"),
        ({"momenta": [torch.ones(4, 5), torch.ones(4, 5).half()]}, "momenta must be float32, got float16"),
        ({"matrices": 3}, "matrices must divide 20 elements"),
        ({"updates": torch.ones(39)}, "updates must be"),
        ({"factors": torch.ones(3)}, "factors must be"),
        ({"squares": torch.ones(2)}, "squares must be float64"),
        ({"momentum": -1.0}, "momentum must be >= 0"),
    ],
)
def test_passes_refuse(bad, words):
    """Before anything is written."""
    m, g = ([torch.full((4, 5), x) for _ in "12"] for x in (1.0, 2.0))
    names = ("momenta", "grads", "momentum", "nesterov", "adds", "updates", "factors", "squares", "matrices")
    given = dict(zip(names, (m, g, 0.9, True, True, None, None, None, 1), strict=True)) | bad
    with pytest.raises(RuntimeError, match=words):
        torch.ops.tigon.muon_momentum_(*given.values())
    for other in (torch.ones(4, 4), torch.ones(5, 4).mT, torch.ones(4, 5, dtype=torch.float64)):
        with pytest.raises(RuntimeError, match="updates must be"):
            torch.ops.tigon.muon_update_(m[:1], [other], 0.1, None, 1.0, 0.0)
    assert all((t == 1).all() for t in (*m, *given["momenta"]))


@pytest.mark.gpu
@pytest.mark.parametrize("case", LISTS, ids=str)
@pytest.mark.parametrize("nesterov", [True, False])
def test_cpu_and_gpu_agree(case, nesterov):
    """The same bits on both."""
    for dtype in FLOATS:
        for other in FLOATS:
            a, b = (passes(case, dtype, other, nesterov, device, False) for device in ("cpu", "cuda"))
            for x, y in zip(itertools.chain(*a[:3]), itertools.chain(*b[:3]), strict=True):
                assert same_bits(x, y.cpu())


@pytest.mark.parametrize("shape", [(40, 40), (16, 72), (72, 16), (33, 50), (50, 33), (1, 8)], ids=str)
def test_batches_are_single_matrices(shape, device):
    """The same in a batch and by itself, on the CPU bit for bit (on CUDA cuBLAS chooses by the batch); zeros
    stay zeros, NaN and infinity in their matrices."""
    x = torch.stack(drawn([shape] * 5, 3, torch.bfloat16, device))
    x[1] = 0
    x[2, 0, 0], x[3, 0, 1 if shape[1] > 1 else 0] = math.nan, math.inf
    together = orthogonalize_(x.clone(), COEFFICIENTS, STEPS, EPS)
    for y, one in zip(together, x, strict=True):
        alone = orthogonalize_(one, COEFFICIENTS, STEPS, EPS)
        assert same_bits(y, alone) or device == "cuda"
        torch.testing.assert_close(y, alone, rtol=0, atol=1e-2, equal_nan=True)
    assert (together[1] == 0).all() and together[2].isnan().all() and not together[3].isfinite().all()
    assert together[0].isfinite().all() and together[4].isfinite().all()


def test_experts_are_matrices(device):
    """A parameter of three dimensions is so many matrices."""
    whole = nn.Parameter(torch.stack(drawn([(24, 40)] * 3, 0, device=device)))
    single = [nn.Parameter(p.clone()) for p in whole.detach()]
    a, b = Muon([whole], lr=0.1), Muon(single, lr=0.1)
    for i in range(3):
        whole.grad = torch.stack(drawn([(24, 40)] * 3, i + 1, device=device))
        for p, g in zip(single, whole.grad, strict=True):
            p.grad = g.clone()
        a.step(), b.step()
    for p, q in zip(whole, single, strict=True):
        assert same_bits(p.detach(), q.detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_state_of_pytorch(dtype, device):
    """Each loads the other's state dict, of the same keys; a run that is saved goes on with its bits."""
    p, q, r = (parameters([(16, 24)], dtype, device) for _ in range(3))
    a, b, c = Muon(p, lr=0.01), torch.optim.Muon(q, lr=0.02), Muon(r)
    assert a.defaults.keys() == b.defaults.keys()
    assert {**a.defaults, "lr": 1e-3} == {**b.defaults, "lr": 1e-3}
    for x in (p, q, r):
        x[0].grad = drawn([(16, 24)], 1, dtype, device)[0]
    a.step(), b.step()
    assert a.state_dict()["state"][0].keys() == b.state_dict()["state"][0].keys()
    file = io.BytesIO()
    torch.save(a.state_dict(), file)
    file.seek(0)
    c.load_state_dict(torch.load(file))
    r[0].data.copy_(p[0].data)
    a.step(), c.step()
    assert same_bits(p[0].detach(), r[0].detach())
    theirs = torch.optim.Muon(r)
    theirs.load_state_dict(copy.deepcopy(a.state_dict()))
    theirs.step()
    a.load_state_dict(copy.deepcopy(b.state_dict()))
    assert a.param_groups[0]["lr"] == 0.02
    assert same_bits(a.state[p[0]]["momentum_buffer"], b.state[q[0]]["momentum_buffer"])
    a.step()


class Model(nn.Module):
    """A part of each kind."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.mix = nn.Conv1d(8, 8, 3, padding=1)
        self.up = nn.Linear(8, 24)
        self.experts = nn.Parameter(torch.randn(2, 24, 8))
        self.norm = nn.LayerNorm(8)
        self.lm_head = nn.Linear(8, 11, bias=False)

    def forward(self, ids):
        x = self.mix(self.embed(ids).mT).mT
        return self.lm_head(self.norm(self.up(x).tanh() @ self.experts.mean(0)))


def test_groups_of_a_model():
    """Hidden matrices are Muon's, all others AdamW's, as two optimizers update them."""
    torch.manual_seed(0)
    net = Model()
    other = copy.deepcopy(net)
    groups = muon_groups(net, lr=3e-3)
    names = {p: name for name, p in net.named_parameters()}
    assert [names[p] for p in groups[0]["params"]] == ["experts", "up.weight"]
    assert [group["use_muon"] for group in muon_groups(tigon.nn.Embedding(5, 4))] == [False]
    optimizer = Muon(groups, lr=0.02)
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["lr"]) == (0.02, 3e-3)
    hidden, rest = (group["params"] for group in muon_groups(other))
    apart = [Muon(hidden, lr=0.02), tigon.optim.AdamW(rest, lr=3e-3)]
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in apart]
    for i in range(4):
        if i == 2:
            copied = copy.deepcopy(optimizer.state_dict())
            optimizer = Muon(muon_groups(net))
            optimizer.load_state_dict(copied)
            schedule.optimizer = optimizer
        ids = torch.randint(0, 11, (3, 7), generator=torch.Generator().manual_seed(i))
        for model, steps in ((net, [optimizer, schedule]), (other, [*apart, *schedules])):
            model.zero_grad()
            model(ids).square().mean().backward()
            for step in steps:
                step.step()
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        assert same_bits(p.detach(), q.detach())


def test_closure_and_missing_gradients(device):
    """The closure's loss is returned; parameters without gradients keep their bits and have no state."""
    p, q = parameters([(8, 8), (8, 8)], torch.float32, device)
    optimizer = Muon([p, q])
    before = q.detach().clone()

    def closure():
        p.grad = None
        loss = p.square().sum()
        loss.backward()
        return loss

    version = p._version
    assert optimizer.step(closure).requires_grad
    assert p._version > version and same_bits(q.detach(), before) and q not in optimizer.state


def test_bad_parameters(device):
    """Vectors, integers and sparse gradients are refused; nothing is modified before."""
    for bad in (torch.ones(3), torch.ones(2, 2, 2, 2), torch.ones(2, 2, dtype=torch.complex64)):
        with pytest.raises(tigon.Error, match="use_muon=False"):
            Muon([nn.Parameter(bad)])
    p, q = parameters([(4, 4), (4, 5)], torch.float32, device)
    before = p.detach().clone()
    p.grad, q.grad = torch.ones_like(p), torch.ones_like(q).to_sparse()
    for groups in ([p, q], [{"params": [p]}, {"params": [q], "use_muon": False}]):
        with pytest.raises(tigon.Error, match="gradients must be dense"):
            Muon(groups).step()
        assert same_bits(p.detach(), before)


@pytest.mark.gpu
@pytest.mark.parametrize("trans", [False, True])
@pytest.mark.parametrize("n, k", [(8, 16), (72, 200), (264, 72), (600, 1000), (1024, 256), (2304, 64)])
def test_symmetric_matmul(n, k, trans):
    """Of batches with every tail, against float64; what is above the diagonal is what is below."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs sm_90")
    for count in (1, 3):
        x, c, out = (
            torch.randn(count, *size, device="cuda").half()
            for size in ((k, n) if trans else (n, k), (n, n), (n, n))
        )
        c = c + c.mT
        exact = 0.5 * (x.double().mT @ x.double() if trans else x.double() @ x.double().mT) + 3 * torch.eye(
            n, device="cuda"
        )
        for added in (None, c):
            want = exact if added is None else exact - 2 * added.double()
            assert _native(out, x, x, added, trans, 0.5, -2.0, 3.0)
            torch.testing.assert_close(out.double(), want, rtol=1e-3, atol=1e-2)
            assert same_bits(out, out.mT.contiguous())


@pytest.mark.gpu
def test_captured_in_a_graph():
    """Nothing waits for the device: a graph replayed with a changing lr is the steps outside of it."""
    shapes = ((64, 64), (64, 64), (256, 512), (37, 61), (2, 24, 40))
    lists = [parameters(shapes, torch.bfloat16, "cuda") for _ in range(2)]
    lrs = [torch.tensor(1e-2, device="cuda") for _ in range(2)]
    a, b = (Muon(params, lr=lr) for params, lr in zip(lists, lrs, strict=True))
    for p, q in zip(*lists, strict=True):
        p.grad, q.grad = torch.randn_like(p), torch.empty_like(p)
        q.grad.copy_(p.grad)
    for optimizer in (a, b):
        optimizer.step()
        torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        a.step()
    for i in range(1, 4):
        for lr in lrs:
            lr.fill_(1e-2 / i)
        for p, q, g in zip(*lists, drawn(shapes, i, torch.bfloat16, "cuda"), strict=True):
            p.grad.copy_(g), q.grad.copy_(g)
        graph.replay()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            b.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for p, q in zip(*lists, strict=True):
            torch.testing.assert_close(p, q, rtol=0, atol=1e-2)
