"""Cases of two processes for DTensors: weights over the vocabulary, rows and norms.

The oracle is the same call with whole plain tensors.
"""

import functools

import torch
import torch.distributed as dist
from parallel_cases import problem
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module
from two_processes import case, device_type, full, mesh, refused

import tigon
from tigon import parallel

HERE, ALL, ROWS = [Shard(0)], [Replicate()], [Shard(1)]
near = functools.partial(torch.testing.assert_close, rtol=2e-5, atol=2e-5)


def place(tensor, placements, on=None):
    """A leaf with these numbers; without placements a plain one."""
    leaf = tensor.detach().clone()
    if placements is not None:
        leaf = distribute_tensor(leaf, on or mesh(), placements)
    return leaf.requires_grad_(tensor.is_floating_point())


def listed(results):
    return results if isinstance(results, tuple) else (results,)


def whole(results):
    return [full(r) for r in listed(results)]


def grid():
    """A mesh of one row: data parallel over one process, tensor parallel over two."""
    return mesh(1, 2, mesh_dim_names=("data", "tensor"))


HEADS = {
    "mean": (tigon.linear_cross_entropy, {"label_smoothing": 0.1, "z_loss": 0.01}),
    "rows": (tigon.linear_cross_entropy, {"reduction": "none", "shift": True, "softcap": 5.0}),
    "outputs": (tigon.linear_cross_entropy, {"outputs": ("loss", "predicted", "entropy")}),
    "log_prob": (tigon.linear_log_prob, {"entropy": True, "temperature": 0.7}),
}


def scalar(results):
    results = [r for r in whole(results) if r.requires_grad]
    return sum((r * torch.linspace(0.5, 1.5, r.numel()).view(r.shape)).sum() for r in results)


@case(**HEADS)
def dtensor_head(function, options):
    """A weight that is sharded, uneven, or replicated; hidden states plain, replicated, or shares."""
    p = problem(torch.float32, 31)
    leaves = {name: p[name].clone().requires_grad_() for name in ("hidden", "weight", "bias")}
    want = function(leaves["hidden"], leaves["weight"], p["target"], bias=leaves["bias"], **options)
    scalar(want).backward()
    for weight_place in (HERE, ALL):
        for hidden_place in (None, ALL, HERE):
            if weight_place == ALL and hidden_place == HERE:
                continue
            weight, bias = place(p["weight"], weight_place), place(p["bias"], weight_place)
            hidden = place(p["hidden"], hidden_place)
            got = function(hidden, weight, p["target"], bias=bias, **options)
            for a, b in zip(whole(got), whole(want), strict=True):
                assert type(a) is torch.Tensor
                near(a, b)
            scalar(got).backward()
            assert list(weight.grad.placements) == weight_place
            for name, tensor in (("hidden", hidden), ("weight", weight), ("bias", bias)):
                near(full(tensor.grad), leaves[name].grad)


@case
def dtensor_lora():
    """A replicated or plain, B placed as the weight; a cap on the workspace."""
    p = problem(torch.float32, 35)
    names = ("hidden", "weight", "lora_a", "lora_b")
    leaves = {name: p[name].clone().requires_grad_() for name in names}
    hidden, weight, *low = leaves.values()
    want = tigon.linear_cross_entropy(hidden, weight, p["target"], lora=(*low, 0.5))
    want.backward()
    for weight_place, hidden_place in ((HERE, None), (HERE, ALL), (HERE, HERE), (ALL, None)):
        for a_place in (None, ALL):
            places = (hidden_place, weight_place, a_place, weight_place)
            got = {name: place(p[name], where) for name, where in zip(names, places, strict=True)}
            hidden, weight, *low = got.values()
            loss = tigon.linear_cross_entropy(
                hidden, weight, p["target"], lora=(*low, 0.5), max_workspace_mb=64, max_peak_mb=64
            )
            near(loss, want)
            loss.backward()
            for name, tensor in got.items():
                near(full(tensor.grad), leaves[name].grad)


@case
def dtensor_head_of_two_meshes():
    """Data parallel beside tensor parallel, and a mesh whose ranks are turned."""
    p = problem(torch.float32, 32)
    want = tigon.linear_cross_entropy(p["hidden"], p["weight"], p["target"])
    weight = place(p["weight"], [Replicate(), Shard(0)], grid())
    near(tigon.linear_cross_entropy(p["hidden"], weight, p["target"]), want)
    near(tigon.linear_cross_entropy(p["hidden"], weight=weight, target=p["target"]), want)
    turned = dist.device_mesh.DeviceMesh(device_type(), torch.tensor([1, 0], device="cpu"))
    weight = DTensor.from_local(
        p["weight"].split([126, 125])[turned.get_local_rank()],
        turned,
        HERE,
        shape=p["weight"].shape,
        stride=p["weight"].stride(),
    )
    near(tigon.linear_cross_entropy(p["hidden"], weight, p["target"]), want)


@case
def dtensor_logits():
    """Given logits, sharded over classes or replicated, uneven."""
    p = problem(torch.float32, 33)
    logits = (p["hidden"] @ p["weight"].T).detach().requires_grad_()
    want = tigon.cross_entropy(logits, p["target"], label_smoothing=0.1, inplace=False)
    want.backward()
    for placements in ([Shard(-1)], [Shard(2)], ALL):
        got = place(logits, placements)
        for target in (p["target"], place(p["target"], ALL)):
            got.grad = None
            loss = tigon.cross_entropy(got, target, label_smoothing=0.1)
            near(loss, want.detach())
            loss.backward()
            near(got.grad.full_tensor(), logits.grad)
    got = tigon.cross_entropy(place(logits, [Shard(-1)]) * 1.0, p["target"], inplace=True)
    near(got, tigon.cross_entropy(logits.detach(), p["target"]))


@case
def dtensor_vocabulary_refusals():
    """What would need a gather, or has no rule, is refused in words by every process."""
    p = problem(torch.float32, 34)
    hidden, target, weight = p["hidden"], p["target"], place(p["weight"], HERE)
    call = functools.partial(tigon.linear_cross_entropy, hidden, target=target)
    refused(lambda: call(place(p["weight"], ROWS)), "weight must be replicated, or", "Shard(dim=1)")
    partial = DTensor.from_local(p["weight"], mesh(), [Partial()])
    refused(lambda: call(partial), "weight must be replicated, or")
    both = place(p["weight"], [Shard(0), Shard(0)], grid())
    refused(lambda: call(both), "in one mesh dimension")
    refused(lambda: call(weight, bias=p["bias"]), "bias must be a DTensor placed as weight")
    refused(lambda: call(weight, bias=place(p["bias"], ALL)), "bias must be placed as")
    a, b = p["lora_a"], p["lora_b"]
    refused(lambda: call(weight, lora=(a, b, 1.0)), "lora B must be a DTensor placed as weight")
    refused(lambda: call(weight, lora=(a, place(b, ALL), 1.0)), "lora B must be placed as")
    refused(lambda: call(weight, lora=(place(a, HERE), place(b, HERE), 1.0)), "lora A must be placed as")
    refused(lambda: call(weight, lora=a), "lora must be (A, B, scale)")
    refused(lambda: call(weight, position_ids=torch.zeros_like(target)), "position_ids is not supported")
    refused(
        lambda: tigon.linear_cross_entropy(place(hidden, ROWS), weight, target), "hidden must be placed as"
    )
    refused(
        lambda: tigon.linear_cross_entropy(hidden, weight, place(target, HERE)), "target must be placed as"
    )
    other = place(p["bias"], [Replicate(), Shard(0)], grid())
    refused(lambda: call(weight, bias=other), "bias must be on the mesh of weight")
    refused(lambda: tigon.linear_cross_entropy(place(hidden, ALL), p["weight"], target), "DTensor")
    refused(lambda: tigon.cross_entropy(place(hidden, HERE), target % 32), "logits must be replicated, or")
    weight.tigon_main_grad = True
    refused(lambda: call(weight), "tigon_main_grad")


C = 16
ROW_OPS = {
    "rms_norm": (tigon.rms_norm, 1, (C,)),
    "rms_norm without weight": (tigon.rms_norm, 1),
    "layer_norm": (tigon.layer_norm, 1, (C,), (C,)),
    "add_rms_norm": (tigon.add_rms_norm, 2, (C,)),
    "gated_rms_norm": (tigon.gated_rms_norm, 2, (C,)),
    "dyt": (tigon.dyt, 1, (1,), (C,), (C,)),
    "softmax": (tigon.softmax, 1),
    "sparsemax": (tigon.sparsemax, 1),
    "poly_norm": (tigon.poly_norm, 1, (3,), (1,)),
    "swiglu": (tigon.swiglu, 2),
    "packed swiglu": (tigon.swiglu, 1),
    "geglu": (tigon.geglu, 2),
    "relu_squared": (tigon.relu_squared, 1),
}
ELEMENTWISE = ("swiglu", "geglu", "relu_squared")


def drawn(rows, sizes):
    g = torch.Generator().manual_seed(5)
    shapes = [(3, 7, C)] * rows + list(sizes)
    numbers = (torch.randn(shape, generator=g, device="cpu") for shape in shapes)
    return [x.to(torch.get_default_device()).requires_grad_() for x in numbers]


@case(**{name: (name,) for name in ROW_OPS})
def dtensor_rows(name):
    """Sharded rows stay local, with the gradients of vectors partial; the last dimension is not gathered."""
    function, rows, *sizes = ROW_OPS[name]
    leaves = drawn(rows, sizes)
    want = function(*leaves)
    scalar(want).backward()
    places = [HERE, ROWS, [Shard(-2)], ALL] + [[Shard(-1)]] * (name in ELEMENTWISE)
    for placements in places:
        given = [place(leaf, placements if i < rows else ALL) for i, leaf in enumerate(leaves)]
        got = function(*given)
        for a, b in zip(listed(got), listed(want), strict=True):
            assert a.shape == b.shape
            assert a.placements == given[0].placements
            assert torch.equal(a.full_tensor(), b)
        with torch.no_grad():
            assert all(isinstance(r, DTensor) for r in listed(function(*given)))
        scalar(got).backward()
        for i, (tensor, leaf) in enumerate(zip(given, leaves, strict=True)):
            if i >= rows:
                assert list(tensor.grad.placements) == [Replicate() if placements == ALL else Partial()]
            near(tensor.grad.full_tensor(), leaf.grad)
    if name not in ELEMENTWISE:
        given = [place(leaf, [Shard(2)] if i < rows else ALL) for i, leaf in enumerate(leaves)]
        refused(lambda: function(*given), "must be sharded in another dimension than its last")
    given = [
        DTensor.from_local(leaf.detach(), mesh(), [Partial()] if i < rows else ALL)
        for i, leaf in enumerate(leaves)
    ]
    refused(lambda: function(*given), "must be sharded or replicated")
    given = [place(leaf, ROWS if i == 0 else HERE) for i, leaf in enumerate(leaves)]
    if len(given) > 1:
        refused(
            lambda: function(*given), "must be placed as" if rows > 1 else "must be replicated on the mesh"
        )
        refused(lambda: function(given[0], *leaves[1:]), "DTensor")
    refused(lambda: function(*[place(leaf.double(), ALL) for leaf in leaves]), "float32, bfloat16 or float16")


@case
def dtensor_rows_compiled():
    """Under torch.compile, without a break of the graph."""
    x, weight = drawn(1, [(C,)])

    def function(x, weight):
        return tigon.softmax(tigon.rms_norm(x, weight))

    given = [place(x, ROWS), place(weight, ALL)]
    torch._dynamo.reset()
    got = torch.compile(function, fullgraph=True, backend="aot_eager")(*given)
    assert got.placements == (Shard(1),)
    assert torch.equal(got.full_tensor(), function(x, weight))
    scalar(got).backward()
    scalar(function(x, weight)).backward()
    near(given[0].grad.full_tensor(), x.grad)
    near(given[1].grad.full_tensor(), weight.grad)
    torch._dynamo.reset()


@case
def dtensor_norm_module():
    """torch's SequenceParallel around our module."""
    norm, x = tigon.nn.RMSNorm(C), drawn(1, [])[0].detach()[:, :6]
    norm(x).square().sum().backward()
    want, grad = norm(x).detach(), norm.weight.grad
    norm.weight.grad = None
    parallelize_module(norm, mesh(), SequenceParallel())
    got = norm(x[:, 3 * mesh().get_local_rank() :][:, :3])
    assert torch.equal(got.full_tensor(), want)
    got.square().sum().backward()
    near(norm.weight.grad.full_tensor(), grad)


@case(shards=(False,), dtensor=(True,))
def losses_of_sharded_log_prob(dtensor_weight):
    """Policy gradients and preferences on a sharded head (docs/distributed.md): those of the whole one."""
    p = problem(torch.float32, 35)
    # [2, S]: an answer that was chosen, one that was not.
    tokens = p["target"].T.clamp(min=0)[:2].contiguous()
    hidden = p["hidden"].transpose(0, 1)[:2].contiguous()
    mask, ref = p["target"].T[:2] >= 0, torch.tensor([-40.0, -50.0])
    advantage = torch.tensor([0.7, -0.4])

    def losses(call, hidden, weight):
        old = call(hidden, weight, tokens).detach() + 0.1 * p["upstream"].T[:2]
        log_prob, entropies = call(hidden, weight, tokens, temperature=0.8, entropy=True)
        options = {"old": old, "entropies": entropies, "entropy": 0.01}
        policy = tigon.policy_loss(log_prob, advantage, mask, **options).loss
        preference = tigon.preference_loss(call(hidden, weight, tokens), mask, ref=ref).loss
        return policy, preference

    leaves = [hidden.clone().requires_grad_(), p["weight"].clone().requires_grad_()]
    want = losses(tigon.linear_log_prob, *leaves)
    sum(want).backward()
    if dtensor_weight:
        call, weight = tigon.linear_log_prob, place(p["weight"], HERE)
    else:
        call = parallel_log_prob
        weight = p["weight"].split([126, 125])[dist.get_rank()].clone().requires_grad_()
    own = hidden.clone().requires_grad_()
    got = losses(call, own, weight)
    sum(got).backward()
    near(torch.stack(got), torch.stack(want))
    near(own.grad, leaves[0].grad)
    grad = weight.grad.to_local() if dtensor_weight else weight.grad
    near(grad, leaves[1].grad.split([126, 125])[dist.get_rank()])


def parallel_log_prob(hidden, weight, tokens, **options):
    return parallel.linear_log_prob(hidden, weight, tokens, dist.group.WORLD, **options)
