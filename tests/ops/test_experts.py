"""tigon.experts beyond the cases: what changes no bit, what is never read, which matmuls run, bad calls."""

import pytest
import torch
from checks import bits, check_close, refusals, refused
from torch.utils.checkpoint import checkpoint

import tigon
from tigon.ops import experts as layers
from tigon.ops import grouped_gemm as ops

T, H, I, E, K, R = 23, 32, 24, 6, 3, 5


def drawn(*shape, seed=0, dtype=torch.float32, device="cpu"):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(
        device, dtype
    )


def layer(dtype=torch.float32, device="cpu", bias=True, lora=True):
    """Arguments by name; leaves that require a gradient."""
    found = {
        "x": drawn(T, H, seed=1, dtype=dtype, device=device),
        "gate_up": drawn(E, 2 * I, H, seed=2, dtype=dtype, device=device) * H**-0.5,
        "down": drawn(E, H, I, seed=3, dtype=dtype, device=device) * I**-0.5,
        "weights": drawn(T, K, seed=4, device=device).sigmoid(),
    }
    if bias:
        found["gate_up_bias"] = drawn(E, 2 * I, seed=5, dtype=dtype, device=device)
        found["down_bias"] = drawn(E, H, seed=6, dtype=dtype, device=device)
    if lora:
        shapes = {"gate_up_a": (E, R, H), "gate_up_b": (E, 2 * I, R), "down_a": (E, R, I)}
        shapes |= {"down_b": (E, H, R)}
        for seed, (name, shape) in enumerate(shapes.items(), 10):
            found[name] = drawn(*shape, seed=seed, device=device) * shape[-1] ** -0.5
    return {name: t.detach().requires_grad_() for name, t in found.items()}


def chosen(device="cpu"):
    return drawn(T, E, seed=7).topk(K, dim=-1).indices.to(device)


def adapted(run):
    """The function, of adapters whose parts are given by name."""

    def call(*args, **options):
        for name in ("gate_up", "down"):
            if f"{name}_a" in options:
                options[f"{name}_lora"] = options.pop(f"{name}_a"), options.pop(f"{name}_b"), 1.7
        return run(*args, **options)

    return call


def step(leaves, ids, run=tigon.experts, dy=None):
    """y and every gradient by name."""
    leaves = {name: t.detach().clone().requires_grad_() for name, t in leaves.items()}
    rest = dict(leaves)
    y = adapted(run)(rest.pop("x"), rest.pop("gate_up"), rest.pop("down"), ids, rest.pop("weights"), **rest)
    dy = drawn(*y.shape, seed=8, dtype=y.dtype, device=y.device) if dy is None else dy
    grads = torch.autograd.grad(y, list(leaves.values()), dy)
    return {"y": y.detach()} | dict(zip(leaves, grads, strict=True))


def assert_same(got, wanted):
    assert got.keys() == wanted.keys()
    for name in wanted:
        assert torch.equal(bits(got[name]), bits(wanted[name])), name


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16], ids=str)
def dtype(request):
    return request.param


def test_what_is_not_here_changes_no_bit(dtype, device):
    """Slots of other ranks, of any id past the last and with weights of NaN."""
    leaves, ids = layer(dtype, device), chosen(device)
    away = torch.full((T, 2), E, device=device)
    away[::2, 1] = E + 40
    more = leaves | {"weights": torch.cat((away * float("nan"), leaves["weights"]), 1)}
    wanted, got = step(leaves, ids), step(more, torch.cat((away, ids), 1))
    assert not got["weights"][:, :2].any()
    got["weights"] = got["weights"][:, 2:]
    assert_same(got, wanted)


def test_rows_past_the_last_offset_are_not_read(dtype, device):
    leaves = layer(dtype, device)
    leaves["weights"] = leaves["weights"][:, 0]
    ends = torch.tensor([4, 4, 9, 9, 12, 15], device=device)

    def poisoned(t):
        t = t.detach().clone()
        t[15:] = float("nan")
        return t

    dy = drawn(T, H, seed=8, dtype=dtype, device=device)
    wanted = step(leaves, ends, tigon.grouped_mlp, dy)
    spoiled = leaves | {n: poisoned(leaves[n]) for n in ("x", "weights")}
    got = step(spoiled, ends, tigon.grouped_mlp, poisoned(dy))
    assert_same(got, wanted)
    for name in ("y", "x", "weights"):
        assert not got[name][15:].any()
    for name in ("gate_up", "down", "gate_up_bias", "down_bias"):
        assert not got[name][1].any() and not got[name][3].any(), name


def test_routing_is_a_stable_sort(device):
    """Slots of ids past the last come behind all others, and have no place."""
    ids = torch.randint(0, E + 2, (T, K), device=device)
    order, place, offsets = torch.ops.tigon.experts_route(ids, E)
    wanted = ids.clamp(max=E).view(-1).sort(stable=True)
    assert torch.equal(order, wanted.indices.int())
    assert offsets.tolist() == [int((wanted.values < e).sum()) for e in range(E + 1)]
    here = torch.arange(T * K, device=device) < offsets[-1]
    assert torch.equal(place[order.long()], torch.where(here, torch.arange(T * K, device=device), -1).int())


def test_checkpointed_twice(dtype, device):
    leaves, ids = layer(dtype, device), chosen(device)

    def again(*args, **options):
        return checkpoint(tigon.experts, *args, use_reentrant=False, **options)

    wanted = step(leaves, ids)
    for _ in range(2):
        assert_same(step(leaves, ids, again), wanted)


def test_twice_through_one_graph(dtype, device):
    """The backward that ends a graph may write over what was saved, one that keeps it may not."""
    leaves = layer(dtype, device)
    rest = {n: t for n, t in leaves.items() if n not in ("x", "gate_up", "down", "weights")}
    y = adapted(tigon.experts)(
        leaves["x"], leaves["gate_up"], leaves["down"], chosen(device), leaves["weights"], **rest
    )
    dy = drawn(*y.shape, seed=8, dtype=y.dtype, device=device)
    node = y.grad_fn if hasattr(y.grad_fn, "saved_tensors") else y.grad_fn.next_functions[0][0]
    rows = node.saved_tensors[6]
    before = rows.clone()
    kept = [torch.autograd.grad(y, list(leaves.values()), dy, retain_graph=True) for _ in range(2)]
    assert torch.equal(rows, before)
    last = torch.autograd.grad(y, list(leaves.values()), dy)
    assert not torch.equal(rows, before)
    for found in (*kept, last):
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(found, kept[0], strict=True))


def test_saved_for_the_backward():
    """x, the rows of gate_up and indices: nothing else of the size of the chosen rows."""
    leaves, ids = layer(torch.bfloat16), chosen()
    y = tigon.experts(*(leaves[n] for n in ("x", "gate_up", "down")), ids, leaves["weights"])
    parameters = {t.data_ptr() for t in leaves.values()}
    node = y.grad_fn
    while not hasattr(node, "saved_tensors"):
        node = node.next_functions[0][0]
    saved = [t for t in node.saved_tensors if t is not None and t.data_ptr() not in parameters]
    assert sum(t.nbytes for t in saved) == T * K * 2 * I * 2 + 2 * T * K * 4 + (E + 1) * 4


@pytest.mark.parametrize(
    ("wanted", "matmuls", "gradients"),
    [(("x", "weights"), 2, 0), (("x",), 2, 0), (("weights",), 1, 0), (("gate_up",), 1, 1), (("down",), 0, 1)],
)
def test_matmuls_of_the_backward(monkeypatch, wanted, matmuls, gradients):
    """What is frozen costs no matmul."""
    leaves, calls = layer(), []
    for name in ("matmul", "weight_gradient"):
        function = getattr(ops, name)
        monkeypatch.setattr(ops, name, lambda *a, n=name, f=function, **kw: (calls.append(n), f(*a, **kw))[1])
    leaves = {n: t.detach().requires_grad_(n in wanted) for n, t in leaves.items()}
    y = tigon.experts(*(leaves[n] for n in ("x", "gate_up", "down")), chosen(), leaves["weights"])
    calls.clear()
    torch.autograd.grad(y.sum(), [leaves[n] for n in wanted])
    assert [calls.count(n) for n in ("matmul", "weight_gradient")] == [matmuls, gradients]


def test_adapters_of_frozen_experts(monkeypatch, dtype, device):
    """No gradient of the experts is formed, no t is saved but the rows' own, and zeros add nothing."""
    leaves, ids, sizes = layer(dtype, device), chosen(device), []
    function = ops.weight_gradient
    monkeypatch.setattr(
        ops, "weight_gradient", lambda a, *rest: (sizes.append(a.shape[1]), function(a, *rest))[1]
    )
    frozen = {n: t.detach().requires_grad_(n not in ("gate_up", "down")) for n, t in leaves.items()}
    inputs = [frozen.pop(n) for n in ("x", "gate_up", "down")]
    y = adapted(tigon.experts)(*inputs, ids, frozen.pop("weights"), **frozen)
    node = y.grad_fn if hasattr(y.grad_fn, "saved_tensors") else y.grad_fn.next_functions[0][0]
    assert [tuple(t.shape) for t in node.saved_tensors[-2:]] == [(T * K, 8)] * 2
    y.sum().backward()
    assert set(sizes) <= {8}
    zero = leaves | {n: torch.zeros_like(leaves[n]) for n in ("gate_up_b", "down_b")}
    wanted = step({n: t for n, t in leaves.items() if n[-2:] not in ("_a", "_b")}, ids)
    got = step(zero, ids)
    assert_same({n: got[n] for n in wanted}, wanted)
    assert got["gate_up_b"].any() and not got["gate_up_a"].any()


@pytest.mark.parametrize("rank", [5, 16, 24, 40])
def test_adapters_in_any_order_of_memory(rank, device):
    """The expert may be the fastest index, as PEFT has it. Gradients lie as adapters do, in the same bits."""
    shapes = {"gate_up_a": (E, rank, H), "gate_up_b": (E, 2 * I, rank), "down_a": (E, rank, I)}
    shapes |= {"down_b": (E, H, rank)}
    adapters = {name: drawn(*shape, seed=i, device=device) for i, (name, shape) in enumerate(shapes.items())}
    rest = layer(torch.bfloat16, device, bias=False, lora=False)
    wanted = step(rest | adapters, chosen(device))
    moved = {name: t.permute(1, 2, 0).contiguous().permute(2, 0, 1) for name, t in adapters.items()}
    got = step(rest | moved, chosen(device))
    assert_same(got, wanted)
    assert all(got[name].stride() == t.stride() for name, t in moved.items())


# Tokens, H, I, experts, choices and rank of what the passes of the backward take: every rank, and odd sizes.
PASSES = [(40, 144, 48, 5, 2, rank) for rank in range(1, 17)]
PASSES += [
    (300, 256, 96, 8, 3, 16),
    (70, 2048, 768, 16, 4, 16),
    (200, 1040, 16, 40, 2, 6),
    (3, 16, 752, 33, 2, 9),
]
PASSES += [(1200, 1552, 80, 2, 1, 12)]


def passed(tokens, hidden, inner, experts, choices, rank, device):
    """Leaves and ids: an expert has no tokens, slots are not here, tokens choose an expert twice."""
    wide, like = {"device": device}, {"dtype": torch.bfloat16, "device": device}
    found = {
        "x": drawn(tokens, hidden, seed=1, **like),
        "gate_up": drawn(experts, 2 * inner, hidden, seed=2, **like) * hidden**-0.5,
        "down": drawn(experts, hidden, inner, seed=3, **like) * inner**-0.5,
        "weights": drawn(tokens, choices, seed=4, **like).sigmoid(),
        "gate_up_a": drawn(experts, rank, hidden, seed=10, **wide) * hidden**-0.5,
        "gate_up_b": drawn(experts, 2 * inner, rank, seed=11, **wide) * rank**-0.5,
        "down_a": drawn(experts, rank, inner, seed=12, **wide) * inner**-0.5,
        "down_b": drawn(experts, hidden, rank, seed=13, **wide) * rank**-0.5,
    }
    ids = drawn(tokens, choices, seed=7).mul(97).long().abs() % (experts + 1)
    ids[ids == 1 % experts] = 0
    ids[::3] = ids[::3, :1]
    return {name: t.detach().requires_grad_() for name, t in found.items()}, ids.to(device)


def adapted_step(leaves, ids, frozen=("gate_up", "down"), run=tigon.experts, dy=None, kept=False):
    """y and the gradients of what is not frozen."""
    leaves = {n: t.detach().requires_grad_(n not in frozen) for n, t in leaves.items()}
    rest = dict(leaves)
    y = adapted(run)(rest.pop("x"), rest.pop("gate_up"), rest.pop("down"), ids, rest.pop("weights"), **rest)
    dy = drawn(*y.shape, seed=8, dtype=y.dtype, device=y.device) if dy is None else dy
    wanted = {n: t for n, t in leaves.items() if t.requires_grad}
    grads = torch.autograd.grad(y, list(wanted.values()), dy, retain_graph=kept)
    return {"y": y.detach()} | dict(zip(wanted, grads, strict=True))


def passes_of(monkeypatch):
    """Counts the passes that run."""
    calls = []
    for name in ("_adapter_pass", "_native_gate_pass"):
        run = getattr(layers, name)
        monkeypatch.setattr(layers, name, lambda n=name, f=run, **given: (calls.append(n), f(**given))[1])
    return calls


def needs_passes():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs wgmma (sm_90)")


@pytest.mark.gpu
@pytest.mark.parametrize("shape", PASSES, ids=str)
def test_passes_over_rows_of_the_backward(monkeypatch, shape):
    """As near to fp64 as the kernels that they replace, and the same bits from run to run."""
    needs_passes()
    leaves, ids = passed(*shape, "cuda")
    exact = adapted_step({n: t.double() for n, t in leaves.items()}, ids)
    calls = passes_of(monkeypatch)
    got = adapted_step(leaves, ids)
    assert calls == ["_adapter_pass", "_native_gate_pass"]
    assert_same(adapted_step(leaves, ids), got)
    monkeypatch.setattr(layers, "_pass_fits", lambda *_: False)
    general = adapted_step(leaves, ids)
    assert len(calls) == 4
    for name in got:
        check_close(name, got[name], general[name], exact[name].double())
    assert torch.equal(got["y"], general["y"])
    for name in got.keys() - {"y", "x", "weights"}:
        assert not got[name][1 % shape[3]].any(), name


@pytest.mark.gpu
def test_passes_depend_on_no_choice_of_gradients(monkeypatch):
    """Nor on the layout of adapters, a graph that is kept, or a gradient of y of other strides."""
    needs_passes()
    leaves, ids = passed(70, 272, 96, 8, 3, 11, "cuda")
    calls = passes_of(monkeypatch)
    wanted = adapted_step(leaves, ids)
    exact = adapted_step({n: t.double() for n, t in leaves.items()}, ids)
    assert_same(adapted_step(leaves, ids, kept=True), wanted)
    moved = {
        n: t.permute(1, 2, 0).contiguous().permute(2, 0, 1)
        for n, t in leaves.items()
        if n[-2:] in ("_a", "_b")
    }
    assert_same(adapted_step(leaves | moved, ids), wanted)
    dy = drawn(70, 272, seed=8, dtype=torch.bfloat16, device="cuda")
    assert_same(adapted_step(leaves, ids, dy=dy.t().contiguous().t()), wanted)
    assert len(calls) == 8
    for only in leaves.keys() - {"gate_up", "down"}:
        got = adapted_step(leaves, ids, frozen=leaves.keys() - {only})
        if only != "down_a":  # act is then formed, and needs no dact
            assert_same(got, {n: wanted[n] for n in got})
        else:
            check_close(only, got[only], wanted[only], exact[only].double())


@pytest.mark.gpu
def test_passes_refuse_what_they_do_not_take(monkeypatch):
    """Rows between vectors, other units, biases, ranks and sizes take the other kernels."""
    needs_passes()
    calls = passes_of(monkeypatch)
    leaves, ids = passed(40, 144, 48, 5, 2, 8, "cuda")
    dy = torch.empty(40 * 144 + 1, dtype=torch.bfloat16, device="cuda")[1:].view(40, 144)
    dy.copy_(drawn(40, 144, seed=8, dtype=torch.bfloat16, device="cuda"))
    off = adapted_step(leaves, ids, dy=dy)
    assert not calls
    for name, value in adapted_step(leaves, ids).items():
        check_close(name, value, off[name], off[name].double())
    calls.clear()
    adapted_step(*passed(40, 144, 48, 5, 2, 17, "cuda"))
    adapted_step(*passed(40, 136, 48, 5, 2, 8, "cuda"))
    assert not calls
    adapted_step(*passed(40, 144, 40, 5, 2, 8, "cuda"))
    adapted_step(*passed(40, 144, 784, 5, 2, 8, "cuda"))
    adapted_step(leaves, ids, frozen=("gate_up",))
    adapted_step(leaves, ids, run=lambda *a, **o: tigon.experts(*a, activation="gelu", **o))
    assert calls == 4 * ["_adapter_pass"]


@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_every_way_to_multiply(monkeypatch, transposed, odd):
    """grouped_mm and the loop that CUDA takes, on the CPU: as near to fp64 as the native matmul."""
    leaves = layer(torch.bfloat16)
    if odd:  # no whole vectors: H 29, I 23
        cuts = {"x": leaves["x"][:, :29], "gate_up": leaves["gate_up"][:, 2:, :29]}
        cuts |= {"down": leaves["down"][:, :29, :23], "gate_up_bias": leaves["gate_up_bias"][:, 2:]}
        cuts |= {"gate_up_a": leaves["gate_up_a"][..., :29], "gate_up_b": leaves["gate_up_b"][:, 2:]}
        cuts |= {"down_a": leaves["down_a"][..., :23], "down_b": leaves["down_b"][:, :29]}
        leaves |= {n: t.contiguous() for n, t in cuts.items()}
        leaves["down_bias"] = leaves["down_bias"][:, :29].contiguous()
    if transposed:
        leaves |= {n: leaves[n].transpose(1, 2).contiguous() for n in ("gate_up", "down")}
    ids = chosen()
    ids[:, 1] = E  # some rows are written by no matmul

    def run(*args, **options):
        return tigon.experts(*args, transposed=transposed, **options)

    exact = step({n: t.double() for n, t in leaves.items()}, ids, run)
    native = step(leaves, ids, run)
    for ways in (("grouped_matmul", "grouped_weight_gradient"), ("looped_matmul", "looped_weight_gradient")):
        with monkeypatch.context() as patch:
            patch.setattr(ops, "native_fits", lambda *_: False)
            for name, way in zip(("grouped_matmul", "grouped_weight_gradient"), ways, strict=True):
                patch.setattr(ops, name, getattr(ops, way))
            got = step(leaves, ids, run)
        for name, value in got.items():
            check_close(name, value, native[name], exact[name].double())
            assert value.is_contiguous(), name


def test_where_grouped_mm_has_a_kernel():
    offsets, rows = torch.zeros(1024, dtype=torch.int32), torch.zeros(8, 16, dtype=torch.bfloat16)
    assert ops.grouped_mm_fits(rows, offsets)
    assert not ops.grouped_mm_fits(rows.half(), offsets)
    assert not ops.grouped_mm_fits(rows, torch.zeros(1025, dtype=torch.int32))
    for t in (rows[:, 3:], rows.flatten()[1:17].view(2, 8), rows.new_ones(2, 12, 5)):
        whole = ops._whole(t)
        assert (
            whole.data_ptr() % 16 == 0 and whole.is_contiguous() and all(n % 8 == 0 for n in whole.shape[1:])
        )
        assert torch.equal(whole[tuple(map(slice, t.shape))], t) and whole.sum() == t.sum()


def test_where_the_own_matmul_fits(monkeypatch):
    def fits(rows, stack, dtype=torch.bfloat16):
        return ops.native_fits(*(torch.empty(shape, dtype=dtype, device="meta") for shape in (rows, stack)))

    monkeypatch.setattr(ops, "has_matmul_kernels", lambda _: True)
    assert fits((5, 16), (4, 24, 16)) and fits((5, 16), (4, 24, 16), torch.float16)
    assert not fits((5, 16), (4, 24, 16), torch.float32)
    assert not fits((5, 12), (4, 24, 12)) and not fits((5, 16), (4, 20, 16))
    monkeypatch.setattr(ops, "has_matmul_kernels", lambda _: False)
    assert not fits((5, 16), (4, 24, 16))


@pytest.mark.parametrize("columns", range(3), ids=["halves", "interleaved", "single"])
@pytest.mark.parametrize("gathered", [False, True])
def test_gated_matmul_is_its_pieces(dtype, device, columns, gathered):
    """Sorted rows or gathered ones, kept or not."""
    leaves = {n: t.detach() for n, t in layer(dtype, device).items()}
    order, place, offsets = torch.ops.tigon.experts_route(chosen(device), E)
    x, stack, bias = leaves["x"], leaves["gate_up"], leaves["gate_up_bias"]
    rows = ops._gather(x, place)
    z = ops.matmul(rows, stack, offsets, False)
    act = ops._gate(z, bias, offsets, 0, columns, 1.0, 1.0)
    for keep in (False, True):
        way = (x, order, place) if gathered else (rows, None, None)
        unit = ops.GatedUnit(0, columns, False, 1.0, 1.0)
        kept, got = ops.gated_matmul(*way, stack, bias, offsets, unit, keep)
        torch.testing.assert_close(got, act)
        assert torch.equal(kept, z) or (not keep and kept.numel() == 0)


def test_module():
    module = tigon.nn.Experts(E, H, I, "swiglu_oai", interleaved=True, transposed=True, bias=True)
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    assert shapes == {
        "gate_up_proj": (E, H, 2 * I),
        "down_proj": (E, I, H),
        "gate_up_proj_bias": (E, 2 * I),
        "down_proj_bias": (E, H),
    }
    leaves, ids = layer(), chosen()
    wanted = tigon.experts(
        leaves["x"],
        module.gate_up_proj,
        module.down_proj,
        ids,
        leaves["weights"],
        activation="swiglu_oai",
        interleaved=True,
        transposed=True,
        gate_up_bias=module.gate_up_proj_bias,
        down_bias=module.down_proj_bias,
    )
    assert torch.equal(module(leaves["x"], ids, leaves["weights"]), wanted)
    plain = tigon.nn.Experts(E, H, I, "relu_squared", gated=False)
    assert [n for n, _ in plain.named_parameters()] == ["up_proj", "down_proj"]
    assert plain(leaves["x"], ids, leaves["weights"]).shape == (T, H)
    with pytest.raises(tigon.Error, match="activation must be one of"):
        tigon.nn.Experts(E, H, I, "tanh")


X, GATE_UP, DOWN = torch.zeros(T, H), torch.zeros(E, 2 * I, H), torch.zeros(E, H, I)
IDS, WEIGHTS = torch.zeros(T, K, dtype=torch.long), torch.zeros(T, K)
ENDS = torch.full((E,), T)
A, B = torch.zeros(E, R, I), torch.zeros(E, H, R)
BAD = """
experts(X, GATE_UP, DOWN, IDS - 1, WEIGHTS) -> ids must be >= 0, got -1
experts(X[:, 1:], GATE_UP, DOWN, IDS, WEIGHTS) -> x must be [..., 32]
experts(X, GATE_UP[:, 1:], DOWN, IDS, WEIGHTS) -> even number of columns
experts(X, GATE_UP, DOWN, IDS, WEIGHTS, transposed=True) -> x must be
experts(X, GATE_UP, DOWN, IDS, WEIGHTS, activation='swiglu_oai', gated=False) -> gated must be
experts(X, GATE_UP, DOWN, IDS, WEIGHTS, activation='swiglu_clamped', gated=False)
    -> gated must be True for swiglu_clamped
experts(X, GATE_UP[:0], DOWN[:0], IDS, WEIGHTS) -> at least one expert
experts(X, GATE_UP, DOWN, IDS, WEIGHTS, down_lora=(A, B)) -> down_lora must be (a, b, scale), got
experts(X, GATE_UP, DOWN, IDS, WEIGHTS, down_lora=(A, B, '2')) -> down_lora[2] must be a number
experts(X, GATE_UP, DOWN, IDS, WEIGHTS, down_lora=(A[:, :0], B[..., :0], 1)) -> and a rank, got [6, 0, 24]
experts(X, GATE_UP, DOWN, IDS, WEIGHTS, down_lora=(A[1:], B, 1)) -> down_lora[0] must be [6, 5, 24]
experts(X, GATE_UP, DOWN, IDS, WEIGHTS, down_lora=(A, B[..., 1:], 1)) -> down_lora[1] must be [6, 32, 5]
experts(X, GATE_UP, DOWN, IDS, WEIGHTS, gate_up_lora=(A, B, 1)) -> gate_up_lora[0] must be [6, 5, 32]
experts(X, GATE_UP, DOWN, IDS, WEIGHTS, down_lora=(A.double(), B, 1)) -> down_lora[0] must be one of
experts(X, GATE_UP, DOWN, IDS, WEIGHTS, down_lora=(A.long(), B, 1)) -> down_lora[0] must be a float tensor
grouped_mlp(X, GATE_UP, DOWN, ENDS, down_lora=(A[0], B[0, 1:], 1)) -> down_lora[1] must be [32, 5]
grouped_mlp(X, GATE_UP, DOWN, torch.arange(E).flip(0)) -> offsets must not decrease
grouped_mlp(X, GATE_UP, DOWN, ENDS + 1) -> offsets must not decrease and lie in
grouped_mlp(X, GATE_UP, DOWN, ENDS - 100) -> offsets must not decrease and lie in
"""


@pytest.mark.parametrize("call, message", refusals(BAD))
def test_bad_calls(call, message):
    given = {"X": X, "GATE_UP": GATE_UP, "DOWN": DOWN, "IDS": IDS, "WEIGHTS": WEIGHTS, "ENDS": ENDS}
    refused(call, message, E=E, A=A, B=B, **given)
