"""Cases of two processes for tigon.optim: DTensors, FSDP2, checkpoints over processes."""

import copy

import torch
from tiny import close
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from two_processes import case, full, mesh, rank, refused

import tigon
from tigon.optim import AdamW, Muon, muon_groups, step_in_backward


def same(a, b):
    a, b = (x.detach().reshape(-1).view(torch.uint8) for x in (a, b))
    assert torch.equal(a, b)


def alike(some, others):
    """Parameters of two runs, whole: the same bits."""
    for p, q in zip(some, others, strict=True):
        same(full(p.detach()), full(q.detach()))


def of_shapes(shapes, seed, dtype=torch.bfloat16):
    """Tensors that are the same on every rank."""
    draw = torch.Generator().manual_seed(seed)
    tensors = (torch.randn(s, generator=draw, device="cpu") for s in shapes)
    return [t.to(torch.get_default_device(), dtype) for t in tensors]


def drawn(seed, dtype=torch.bfloat16):
    """Parameters and gradients of sizes that do not divide evenly."""
    return of_shapes(((5, 24), (1, 16), (64, 8), (13,)), seed, dtype)


def parameters(draw, kinds):
    """Those of one process, and the same ones over two."""
    cut = [distribute_tensor(p, mesh(), kind) for p, kind in zip(draw(0), kinds, strict=True)]
    return [[nn.Parameter(p) for p in one] for one in (draw(0), cut)]


def give(plain, sharded, gradients, kinds):
    for p, q, g, kind in zip(plain, sharded, gradients, kinds, strict=True):
        p.grad, q.grad = g, distribute_tensor(g.clone(), mesh(), kind)


@case(**{rounding: (rounding,) for rounding in ("nearest", "stochastic", "split", "master")})
def adamw_of_shards(rounding):
    """Sharded by rows: bit for bit what one process computes, clipped by the norm over all of them."""
    placements = ([Shard(0)], [Shard(0)], [Shard(0)], [Replicate()])
    plain, sharded = parameters(drawn, placements)
    options = {"lr": 1e-2, "rounding": rounding, "seed": 5}
    a, b = AdamW(plain, **options), AdamW(sharded, max_grad_norm=1.0, **options)
    for i in range(4):
        give(plain, sharded, drawn(i + 1), placements)
        norm = a.clip_grad_norm_(1.0)
        a.step(), b.step()
        assert abs(norm - b.grad_norm) <= 1e-7 * norm
        alike(plain, sharded)
    for p, q in zip(plain, sharded, strict=True):
        for name, value in a.state[p].items():
            if name != "param_low":  # no process group gathers int16
                same(value, full(b.state[q][name]))


def large(seed, dtype=torch.bfloat16):
    """Parameters with codes whose rows are no blocks, so that processes share some; one whose halves are; a
    vector; one that a single process has; one that is small."""
    return of_shapes(((67, 77), (64, 128), (4099,), (1, 5000), (8, 9)), seed, dtype)


@case(
    rows=(torch.bfloat16, {"rounding": "stochastic"}, 0),
    rows_split=(torch.bfloat16, {"rounding": "split"}, 0),
    rows_f32=(torch.float32, {"max_grad_norm": 1.0}, 0),
    unsharded=(torch.float32, {}, None),
)
def adamw_codes_of_shards(dtype, options, dim):
    """Codes, their absmax and parameters are bit for bit those of one process, wherever rows are cut; so are
    those that are saved, and a run that goes on from them in one process and in two."""
    kind = [Replicate()] if dim is None else [Shard(dim)]
    make = {"lr": 1e-2, "seed": 5, "moment_dtype": "int8", **options}
    plain, sharded = parameters(lambda seed: large(seed, dtype), 5 * [kind])
    a, b = AdamW(plain, **make), AdamW(sharded, **make)

    def train(steps):
        for i in steps:
            give(plain, sharded, large(i + 1, dtype), 5 * [kind])
            a.step(), b.step()

    def check():
        mine, theirs = a.state_dict()["state"], b.state_dict()["state"]
        alike(plain, sharded)
        for i, state in mine.items():
            assert state.keys() == theirs[i].keys()
            for name, value in state.items():
                if name != "param_low":  # no process group gathers int16
                    same(value, full(theirs[i][name]))
        assert sum("exp_avg_codes" in state for state in mine.values()) == 4

    train(range(3))
    check()
    if "rounding" in options and options["rounding"] == "split":
        return
    saved = {"param_groups": a.state_dict()["param_groups"], "state": {}}
    for i, state in copy.deepcopy(a.state_dict())["state"].items():  # of one process for two
        whole = {n for n in state if n == "step" or n.endswith("absmax")}
        saved["state"][i] = {
            n: v if n in whole else distribute_tensor(v, mesh(), kind) for n, v in state.items()
        }
    a_saved = copy.deepcopy(a.state_dict())
    a, b = AdamW(plain, **make), AdamW(sharded, **make)
    a.load_state_dict(a_saved), b.load_state_dict(saved)
    check()
    train(range(3, 5))
    check()
    # Codes to float32 and again: what every process sees is the same.
    a2, b2 = (AdamW(ps, **{**make, "moment_dtype": torch.float32}) for ps in (plain, sharded))
    a2.load_state_dict(a.state_dict()), b2.load_state_dict(b.state_dict())
    for p, q in zip(plain, sharded, strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            same(a2.state[p][name], full(b2.state[q][name]))
    a, b = AdamW(plain, **make), AdamW(sharded, **make)
    a.load_state_dict(a2.state_dict()), b.load_state_dict(b2.state_dict())
    check()


@case
def adamw_codes_cut_by_columns():
    """Parameters that are cut along another dimension keep float32 moments, and read codes of the whole."""
    for i in (0, 1):  # cuts that go through blocks, and cuts at blocks
        whole, kind = nn.Parameter(large(0)[i]), [Shard(1)]
        p = nn.Parameter(distribute_tensor(large(0)[i], mesh(), kind))
        whole.grad, p.grad = large(1)[i], distribute_tensor(large(1)[i], mesh(), kind)
        a, b = (AdamW([x], moment_dtype="int8") for x in (whole, p))
        a.step(), b.step()
        assert b.state[p]["exp_avg"].dtype == torch.float32
        saved = copy.deepcopy(a.state_dict())
        for name in ("exp_avg_codes", "exp_avg_sq_root_codes"):
            saved["state"][0][name] = distribute_tensor(saved["state"][0][name], mesh(), kind)
        b.load_state_dict(saved)
        wide = AdamW([whole], moment_dtype=torch.float32)
        wide.load_state_dict(a.state_dict())
        for name in ("exp_avg", "exp_avg_sq"):
            same(wide.state[whole][name], full(b.state[p][name]))


@case
def clip_grad_norm_of_shards():
    """The norm of sharded, replicated and plain gradients together, each counted once."""
    grads = drawn(3, torch.float32)
    placements = ([Shard(0)], [Replicate()], [Shard(1)], None)
    params = []
    for g, placement in zip(grads, placements, strict=True):
        placed = g.clone() if placement is None else distribute_tensor(g.clone(), mesh(), placement)
        params.append(nn.Parameter(torch.zeros_like(placed)))
        params[-1].grad = placed
    exact = torch.cat([g.double().view(-1) for g in grads]).norm()
    norm = tigon.clip_grad_norm_(params, 0.5)
    assert abs(norm - exact) <= 1e-6 * exact
    for p, g in zip(params, grads, strict=True):
        close(full(p.grad), g * (0.5 / (exact.float() + 1e-6)), ulps=8)


def model(size=33):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, size), nn.Tanh(), nn.Linear(size, 5))


def trained(net, optimizer, steps, first=0):
    for i in range(first, first + steps):
        draw = torch.Generator().manual_seed(100 * i + rank())
        x = torch.randn(6, 8, generator=draw, device="cpu").to(torch.get_default_device())
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def sharded(size=33):
    net = model(size)
    for layer in (net[0], net[2]):
        fully_shard(layer, mesh=mesh())
    return fully_shard(net, mesh=mesh())


@case
def fsdp2_in_backward():
    """Updates inside the backward of FSDP2 are those of the step after it."""
    plain, inside = sharded(), sharded()
    a, b = AdamW(plain.parameters(), lr=1e-2), AdamW(inside.parameters(), lr=1e-2)
    step_in_backward(b)
    trained(plain, a, 3), trained(inside, b, 3)
    alike(plain.parameters(), inside.parameters())


def goes_on(optimizer, later=None, size=33, how=None, in_backward=False):
    """Cut in mid-run, through the distributed checkpoint's state dict: the parameters of a whole run."""
    whole, cut = sharded(size), sharded(size)
    a, b = optimizer(whole), optimizer(cut)
    if in_backward:
        step_in_backward(b)
    trained(whole, a, 4), trained(cut, b, 2)
    saved = copy.deepcopy(get_optimizer_state_dict(cut, b, options=how))
    if in_backward:
        b.updates_in_backward.undo()
    b = (later or optimizer)(cut)
    set_optimizer_state_dict(cut, b, saved, options=how)
    trained(cut, b, 2, first=2)
    alike(whole.parameters(), cut.parameters())
    return b


@case
def fsdp2_checkpoint():
    """With moments in another dtype."""
    goes_on(lambda net: AdamW(net.parameters(), lr=1e-2, moment_dtype=torch.bfloat16))


@case(whole=(True,), shards=(False,))
def adamw_codes_checkpoint(whole):
    """FSDP2 with shared blocks, in the backward too."""

    def optimizer(net):
        return AdamW(net.parameters(), lr=1e-2, moment_dtype="int8")

    b = goes_on(optimizer, size=700, how=StateDictOptions(full_state_dict=whole), in_backward=True)
    assert any("exp_avg_codes" in state for state in b.state.values())


@case
def muon_fsdp2():
    """FSDP2 with AdamW for the rest."""
    goes_on(lambda net: Muon(muon_groups(net, lr=1e-2), lr=0.02), lambda net: Muon(muon_groups(net)))


@case
def in_backward_refuses_plain_parameters():
    """Without DTensors a gradient would be that of one process."""
    net = model()
    step_in_backward(AdamW(net.parameters()))
    refused(lambda: net(torch.ones(1, 8)).sum().backward(), "must be DTensors (FSDP2)")


def matrices(seed):
    """Hidden matrices that do not divide evenly, more than one of a shape, and experts."""
    return of_shapes(((5, 24), (40, 16), (5, 24), (1, 16), (5, 24), (40, 16), (4, 6, 10)), seed)


@case(rows=(0,), columns=(1,))
def muon_of_shards(dim):
    """Matrices that come together at their homes, and experts that stay: as one process computes them."""
    kinds = [[Shard(dim)]] * 5 + [[Replicate()], [Shard(2 * dim)]]
    plain, sharded = parameters(matrices, kinds)
    a, b = Muon(plain, lr=0.02), Muon(sharded, lr=0.02)
    for i in range(3):
        give(plain, sharded, matrices(i + 1), kinds)
        a.step(), b.step()
    alike(plain, sharded)
    for p, q in zip(plain, sharded, strict=True):
        same(a.state[p]["momentum_buffer"], full(b.state[q]["momentum_buffer"]))


@case
def muon_of_meshes():
    """Sharded by two dimensions: each process orthogonalises whole matrices."""
    two = torch.distributed.init_device_mesh(mesh().device_type, (1, 2), mesh_dim_names=("data", "tensor"))
    plain, (g,) = nn.Parameter(matrices(0)[1]), matrices(1)[1:2]
    placements = [Shard(0), Shard(1)]
    cut = nn.Parameter(distribute_tensor(plain.detach().clone(), two, placements))
    plain.grad, cut.grad = g, distribute_tensor(g.clone(), two, placements)
    Muon([plain], lr=0.02).step(), Muon([cut], lr=0.02).step()
    same(plain, full(cut.detach()))


@case
def gradients_of_one_process():
    """Frozen on one process, or refused there: an error on both before anything moves, and none waits."""
    steps = {
        "clip_grad_norm_": lambda params: tigon.clip_grad_norm_(params, 0.5),
        "Muon": lambda params: Muon(params).step(),
        "AdamW": lambda params: tigon.optim.AdamW(params, max_grad_norm=0.5).step(),
    }
    for name, step in steps.items():
        for missing in (slice(1), slice(None)):  # one gradient; all of them
            params = [nn.Parameter(distribute_tensor(p.float(), mesh(), [Shard(0)])) for p in matrices(0)]
            for p, g in zip(params, matrices(1), strict=True):
                p.grad = distribute_tensor(g.float(), mesh(), [Shard(0)])
            for p in params[missing] if rank() else ():
                p.grad = None
            before = [p.detach().to_local().clone() for p in params]
            refused(lambda step=step, params=params: step(params), name, "the same in all", "gradients=")
            assert all(torch.equal(p.detach().to_local(), b) for p, b in zip(params, before, strict=True))
    p = nn.Parameter(distribute_tensor(matrices(0)[1].float(), mesh(), [Shard(0)]))
    p.grad = distribute_tensor(matrices(1)[1].float(), mesh(), [Shard(0)])
    refused(lambda: tigon.clip_grad_norm_([p], "x" if rank() else 1.0), "max_norm" if rank() else "refused")
