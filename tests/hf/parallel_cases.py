"""Cases of tigon.parallel, registered for `distributed_cases.py`: logits sharded over two processes.

The oracle is the unsharded formula in float64. The plain formulation is PyTorch's own in the same precision,
its head in the same shards, whose gradients of the hidden states it adds as autograd does.
"""

import functools
import itertools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint
from two_processes import case, device_type, mesh, rank, refused

import tigon
from tigon import parallel

S, B, H, V = 12, 3, 32, 251  # 36 rows; 126 and 125 classes
RANK, LORA_SCALE = 5, 0.7
LOSS, LOG_PROB = parallel.linear_cross_entropy, parallel.linear_log_prob
LAYOUTS = {  # classes of the two processes: (first, columns, padding)
    "uneven": ((0, 126, 0), (126, 125, 0)),
    "padded": ((0, 128, 0), (128, 123, 5)),
    "empty": ((0, 251, 0), (251, 0, 7)),
    "none": ((0, 0, 0), (0, 251, 0)),
    "turned": ((200, 51, 3), (0, 200, 0)),
}
OPTIONS = {
    "plain": {},
    "none": {"reduction": "none"},
    "sum": {"reduction": "sum", "token_weight": True, "logit_scale": 0.5},
    "denominator": {"denominator": 17.0, "z_loss": 0.01, "bias": True},
    "smoothing": {"label_smoothing": 0.2, "class_weight": True},
    "smooth rows": {"label_smoothing": 0.1, "reduction": "none", "token_weight": True, "softcap": 4.0},
    "all": {
        "label_smoothing": 0.1,
        "class_weight": True,
        "softcap": 6.0,
        "logit_scale": 1.3,
        "z_loss": 0.02,
        "temperature": 0.7,
        "bias": True,
        "token_weight": True,
        "reduction": "none",
    },
}


def group():
    return dist.group.WORLD


def problem(dtype, seed=0):
    """Hidden states [S, B, H], weight [V, H], bias [V], labels [S, B], and per-row numbers."""
    with torch.device("cpu"):  # the same numbers on every device
        tensors = drawn_on_cpu(dtype, torch.Generator().manual_seed(seed))
    return {name: tensor.to(torch.get_default_device()) for name, tensor in tensors.items()}


def drawn_on_cpu(dtype, g):
    draw = functools.partial(torch.randn, generator=g)
    target = torch.randint(0, V, (S, B), generator=g)
    target[0] = torch.randint(0, 50, (B,), generator=g)
    target[1, 0] = target[5] = -100
    return {
        "hidden": draw(S, B, H).to(dtype),
        "weight": (draw(V, H) / H**0.5).to(dtype),
        "bias": draw(V).to(dtype),
        "target": target,
        "class_weight": torch.rand(V, generator=g) + 0.5,
        "token_weight": torch.rand(S, B, generator=g),
        "upstream": draw(S, B),
        "entropy_grad": draw(S, B),
        "lora_a": (draw(RANK, H) / H**0.5).to(dtype),
        "lora_b": draw(V, RANK).to(dtype),
    }


def drawn(dtype, seed):
    """Problems, by the number of a draw."""
    return lambda i: problem(dtype, seed + 100 * i)


def mine(tensor, layout):
    """This process's classes, with NaN where padding is."""
    first, columns, padding = LAYOUTS[layout][rank()]
    return torch.cat(
        [tensor[first : first + columns], tensor.new_full((padding, *tensor.shape[1:]), torch.nan)]
    )


def share(tensor):
    return tensor.chunk(2)[rank()]


def formula(p, options, entropy=False):
    """The unsharded loss of the plain formulation, or (log_prob, entropy)."""
    o = {k: v for k, v in options.items() if v is not True}
    hidden, weight = p["hidden"], p["weight"]
    logits = torch.cat([hidden @ part.T for part in weight.split([126, 125])], -1)
    if options.get("lora"):
        logits = logits + LORA_SCALE * (hidden @ p["lora_a"].T @ p["lora_b"].T)
    if options.get("bias"):
        logits = logits + p["bias"]
    z = logits.to(torch.promote_types(logits.dtype, torch.float32))
    z = z * o.get("logit_scale", 1.0)
    if o.get("softcap"):
        z = o["softcap"] * torch.tanh(z / o["softcap"])
    z = z / o.get("temperature", 1.0)
    counts = p["target"] != -100
    if entropy:
        log_p = z.log_softmax(-1)
        log_prob = log_p.gather(-1, torch.where(counts, p["target"], 0)[..., None])[..., 0]
        return torch.where(counts, log_prob, 0.0), torch.where(counts, -(log_p.exp() * log_p).sum(-1), 0.0)
    weights = p["class_weight"].to(z.dtype) if options.get("class_weight") else None
    rows = F.cross_entropy(
        z.flatten(0, 1),
        p["target"].flatten(),
        weight=weights,
        reduction="none",
        label_smoothing=o.get("label_smoothing", 0.0),
    ).view(S, B)
    if o.get("z_loss"):
        rows = rows + torch.where(counts, o["z_loss"] * z.logsumexp(-1).square(), 0.0)
    if options.get("token_weight"):
        rows = rows * p["token_weight"].to(z.dtype)
    if o.get("denominator"):
        return rows.sum() / o["denominator"]
    if o.get("reduction") == "none":
        return rows
    if o.get("reduction") == "sum":
        return rows.sum()
    return rows.sum() / (counts.sum() if weights is None else weights[p["target"]][counts].sum())


LEAVES = ("hidden", "weight", "bias", "lora_a", "lora_b")


def plain(p, dtype, function):
    """Results of the plain formulation and its gradients, computed in dtype (None: as given)."""
    p = {k: v.to(dtype) if dtype and v.is_floating_point() else v for k, v in p.items()}
    for name in LEAVES:
        p[name] = p[name].detach().clone().requires_grad_()
    results = function(p)
    backward(results, p)
    return [r.detach() for r in results], [p[name].grad for name in LEAVES]


def backward(results, p):
    loss, *others = results
    total = (loss * p["upstream"].to(loss.dtype)).sum() if loss.dim() else loss
    for other in others:
        total = total + (other * p["entropy_grad"].to(other.dtype)).sum()
    total.backward()


def held(name, *draws, norms=("max", "rms")):
    """The rule of tests/ops/checks.py, over all draws (ours, plain, exact) together."""
    for got, eager, _ in draws:
        assert (got.shape, got.dtype) == (eager.shape, eager.dtype), name
    got, eager, exact = (torch.cat([t.flatten() for t in of]) for of in zip(*draws, strict=True))
    ours, theirs = (got.double() - exact), (eager.double() - exact)
    ulp = torch.finfo(got.dtype).eps * (1 + 3 / max(got.numel(), 1) ** 0.5)
    for norm, of in (("max", lambda x: x.abs().max()), ("rms", lambda x: x.square().mean().sqrt())):
        if got.numel() and norm in norms:
            bound = 2 * of(theirs) + ulp * of(exact)
            assert of(ours) <= bound, f"{name}: {norm} error {of(ours):.3e} over {bound:.3e}"


def everywhere(tensor):
    """The bits that every process has."""
    bits = tensor.detach().contiguous().view(torch.int32)
    found = [torch.empty_like(bits) for _ in range(dist.get_world_size())]
    dist.all_gather(found, bits)
    assert all(torch.equal(found[0], other) for other in found), tensor
    return tensor.detach()


def operands(p, options, layout, sp):
    """Leaves of this process and the keyword arguments of a sharded call."""
    hidden = (share(p["hidden"]) if sp else p["hidden"]).clone().requires_grad_()
    weight = mine(p["weight"], layout).requires_grad_()
    bias = mine(p["bias"], layout).requires_grad_() if options.get("bias") else None
    kwargs = options | {"bias": bias, "vocab": V, "sequence_parallel": sp}
    kwargs |= {name: p[name] for name in ("class_weight", "token_weight") if options.get(name)}
    if kwargs.pop("main_grad", False):
        weight.tigon_main_grad, weight.main_grad = True, torch.zeros_like(weight, dtype=torch.float32)
    if options.get("lora"):
        low = (p["lora_a"].clone().requires_grad_(), mine(p["lora_b"], layout).requires_grad_())
        kwargs["lora"] = (*low, LORA_SCALE)
    if layout in ("turned", "none"):
        kwargs["first_class"] = LAYOUTS[layout][rank()][0]
    return hidden, weight, bias, kwargs


def sharded(p, options, layout, sp, function, **more):
    """Results and gradients of this process."""
    hidden, weight, bias, kwargs = operands(p, options, layout, sp)
    results = function(hidden, weight, p["target"], group(), **(kwargs | more))
    results = results if isinstance(results, tuple) else (results,)
    backward(results, p)
    lora_leaves = (kwargs.get("lora") or (None, None))[:2]
    gradients = [None if t is None else t.grad for t in (hidden, weight, bias, *lora_leaves)]
    if options.get("main_grad"):
        assert weight.grad is None
        gradients[1] = weight.main_grad
    return [everywhere(r) for r in results], gradients


DRAWS = 8


def compare(draw, options, layout, sp, call, unsharded, **more):
    """Results and gradients of the problem `draw(0)`; if an error is too large, of several."""
    one = list(compared(draw(0), options, layout, sp, call, unsharded, more))
    broken = torch.zeros((), dtype=torch.int32)
    try:
        for name, *three in one:
            held(name, three)
    except AssertionError:
        broken += 1
    dist.all_reduce(broken)
    if not broken:
        return
    found = {}
    for seed in range(1, DRAWS + 1):
        for name, *three in compared(draw(seed), options, layout, sp, call, unsharded, more):
            found.setdefault(name, []).append(three)
    for name, draws in found.items():
        held(name, *draws, norms=("rms",))


def compared(p, options, layout, sp, call, unsharded, more):
    """Of one problem: names, ours, the plain formulation's, the exact values."""
    results, gradients = sharded(p, options, layout, sp, call, **more)
    eager, eager_grads = plain(p, None, unsharded)
    exact, exact_grads = plain(p, torch.float64, unsharded)
    for i, (got, e, x) in enumerate(zip(results, eager, exact, strict=True)):
        yield f"result {i}", got, e.float(), x
    again, gradients_again = sharded(p, options, layout, sp, call, **more)
    for a, b in zip([*results, *gradients], [*again, *gradients_again], strict=True):
        assert a is b is None or torch.equal(a, b), "two runs differ"
    _, columns, _ = LAYOUTS[layout][rank()]
    for name, got, e, x in zip(LEAVES, gradients, eager_grads, exact_grads, strict=True):
        if got is None:
            continue
        if name == "hidden":
            e, x = (share(e), share(x)) if sp else (e, x)
        elif name == "lora_a":
            everywhere(got.float())
        else:
            assert not got[columns:].any(), f"{name}: the gradient of padding is not 0"
            e, x, got = (mine(t, layout)[:columns] for t in (e, x, mine_back(got, layout)))
        yield f"d({name})", got, e.to(got.dtype), x  # main_grad is float32


def check(options, dtype=torch.float32, *, seed, layout="uneven", sp=False, **more):
    """parallel.linear_cross_entropy by `compare`."""
    compare(drawn(dtype, seed), options, layout, sp, LOSS, lambda p: [formula(p, options)], **more)


def mine_back(got, layout):
    """A shard's gradient at its place among all classes."""
    first, columns, _ = LAYOUTS[layout][rank()]
    whole = got.new_zeros(V, *got.shape[1:])
    whole[first : first + columns] = got[:columns]
    return whole


@case(**{name.replace(" ", "_"): (name,) for name in OPTIONS})
def parallel_head(name):
    options = OPTIONS[name]
    for dtype, sp, chunk in itertools.product((torch.float32, torch.bfloat16), (False, True), (None, 8)):
        check(options, dtype, seed=0, sp=sp, chunk_rows=chunk)


@case(**{name: (name,) for name in LAYOUTS})
def parallel_layout(layout):
    for name, sp in (("all", True), ("smoothing", False), ("plain", False)):
        options = OPTIONS[name]
        check(options, seed=1, layout=layout, sp=sp, chunk_rows=10)


@case(recomputed=(0.0,), kept=(1.0,))
def parallel_kept(keep_mb):
    options = {"reduction": "none", "bias": True, "softcap": 5.0}
    for dtype, sp in itertools.product((torch.float32, torch.bfloat16), (False, True)):
        check(options, dtype, seed=2, sp=sp, chunk_rows=10, keep_mb=keep_mb)


@case
def parallel_wide_logits():
    """Logits of 16-bit operands in float32: the loss of the exact matmuls."""
    p = problem(torch.bfloat16, 3)
    exact, _ = plain(p, torch.float64, lambda p: [formula(p, {"reduction": "none"})])
    more = {"chunk_rows": 10, "logit_dtype": torch.float32}
    for sp, keep_mb in itertools.product((False, True), (0.0, 1.0)):
        (got,), gradients = sharded(p, {"reduction": "none"}, "padded", sp, LOSS, keep_mb=keep_mb, **more)
        assert (got - exact[0]).abs().max() < 1e-5
        assert all(g is None or torch.isfinite(g).all() for g in gradients)


@case
def parallel_partial_hidden_gradient():
    """Its sum over the processes is what is otherwise given."""
    p = problem(torch.float32, 16)
    for reduction in ("none", "mean"):
        gradients = []
        for partial in (False, True):
            hidden, weight, _, kwargs = operands(p, {"reduction": reduction}, "uneven", False)
            loss = LOSS(hidden, weight, p["target"], group(), **kwargs, partial_hidden_grad=partial)
            backward((loss,), p)
            if partial:
                dist.all_reduce(hidden.grad)
            gradients.append((hidden.grad, weight.grad))
        assert all(map(torch.equal, *gradients))
    both = {"sequence_parallel": True, "partial_hidden_grad": True}
    call = share(p["hidden"]), mine(p["weight"], "uneven"), p["target"], group()
    refused(lambda: LOSS(*call, **both), "partial_hidden_grad must be False")


@case
def parallel_dtypes():
    """float16, a weight of another dtype, autocast, a denominator on the device, labels of another dtype."""
    for name in ("plain", "all", "none"):
        options = OPTIONS[name]
        for sp in (False, True):
            check(options, torch.float16, seed=15, sp=sp, chunk_rows=10)
    p = problem(torch.float32, 15)
    whole = [p["hidden"].clone().requires_grad_(), p["weight"].clone().requires_grad_()]
    part = [p["hidden"].clone().requires_grad_(), mine(p["weight"], "uneven").requires_grad_()]
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast(device_type(), dtype):
            want = tigon.linear_cross_entropy(*whole, p["target"], denominator=torch.tensor(9.0))
            count = torch.tensor([9], dtype=torch.int32)
            loss = LOSS(*part, p["target"].int(), group(), denominator=count)
        torch.testing.assert_close(loss, want, rtol=1e-5, atol=1e-5)
        gradients = torch.autograd.grad(loss, part)
        dhidden, dweight = torch.autograd.grad(want, whole)
        for got, one in zip(gradients, (dhidden, mine(dweight, "uneven")), strict=True):
            assert got.dtype == torch.float32
            torch.testing.assert_close(got, one, rtol=0.02, atol=0.004 * float(one.abs().max()))


@case
def parallel_log_prob():
    options = {"softcap": 7.0, "logit_scale": 1.2, "temperature": 0.8, "bias": True}

    def both(p):
        return formula(p, options, entropy=True)

    def alone(p):
        return formula(p, {}, entropy=True)[:1]

    for dtype, sp, chunk in itertools.product((torch.float32, torch.bfloat16), (False, True), (None, 10)):
        compare(drawn(dtype, 4), options, "padded", sp, LOG_PROB, both, entropy=True, chunk_rows=chunk)
        compare(drawn(dtype, 5), {}, "uneven", sp, LOG_PROB, alone, chunk_rows=chunk)


@case
def parallel_confident():
    """Where the label has nearly all probability, its gradient p - 1 is no difference of ones."""
    p = problem(torch.float32, 6)
    p["weight"] *= 40
    p["target"] = (p["hidden"] @ p["weight"].T).argmax(-1)
    exact, exact_grads = plain(p, torch.float64, lambda p: [formula(p, {"reduction": "none"})])
    (loss,), (dhidden, *_) = sharded(p, {"reduction": "none"}, "uneven", False, LOSS)
    whole = p["hidden"].clone().requires_grad_()
    unsharded = tigon.linear_cross_entropy(whole, p["weight"], p["target"], reduction="none")
    (unsharded * p["upstream"]).sum().backward()
    for got, one, x in ((loss, unsharded, exact[0]), (dhidden, whole.grad, exact_grads[0])):
        ours, theirs = ((t.double() - x).abs().max() for t in (got, one))
        assert ours <= 2 * theirs + 1e-12, (ours, theirs)


@case
def parallel_outputs():
    """What comes beside the loss is what the unsharded head gives."""
    p = problem(torch.float32, 7)
    names = ("loss", "z_loss", "log_prob", "lse", "entropy", "predicted", "correct")
    options = {"softcap": 5.0, "z_loss": 0.1, "reduction": "none", "outputs": names}
    want = tigon.linear_cross_entropy(p["hidden"], p["weight"], p["target"], **options)
    for layout, sp in itertools.product(LAYOUTS, (False, True)):
        hidden, weight, _, kwargs = operands(p, options, layout, sp)
        got = LOSS(hidden, weight, p["target"], group(), **kwargs, chunk_rows=10)
        assert got._fields == names
        for name, a, b in zip(names, got, want, strict=True):
            assert a.shape == b.shape and a.dtype == b.dtype, name
            if a.is_floating_point():
                assert (a - b).abs().max() <= 2e-6 * b.abs().max(), name
            else:
                assert torch.equal(a, b), name


@case
def parallel_given_logits():
    options = {"class_weight": True, "label_smoothing": 0.1, "softcap": 9.0, "z_loss": 0.01}
    for dtype, layout, reduction in itertools.product(
        (torch.float32, torch.bfloat16), LAYOUTS, ("none", "mean", "sum")
    ):
        p = problem(dtype, 8)
        logits = (p["hidden"] @ p["weight"].T).detach()
        p["hidden"], p["weight"] = logits, torch.eye(V, dtype=dtype)
        chosen = options if layout != "uneven" else {}
        chosen = chosen | {"reduction": reduction}
        eager, eager_grads = plain(p, None, lambda p, o=chosen: [formula(p, o)])
        exact, exact_grads = plain(p, torch.float64, lambda p, o=chosen: [formula(p, o)])
        own = mine(logits.movedim(-1, 0), layout).movedim(0, -1).clone().requires_grad_()
        kwargs = {k: v for k, v in chosen.items() if k != "class_weight"}
        kwargs["weight"] = p["class_weight"] if "class_weight" in chosen else None
        first, columns, _ = LAYOUTS[layout][rank()]
        loss = parallel.cross_entropy(own, p["target"], group(), vocab=V, first_class=first, **kwargs)
        backward((loss,), p)
        held("loss", (everywhere(loss), eager[0].float(), exact[0]))
        assert not own.grad[..., columns:].any()
        places = slice(first, first + columns)
        held("dlogits", (own.grad[..., :columns], eager_grads[0][..., places], exact_grads[0][..., places]))


def loss_of(p, **more):
    """A call on this process's half of the classes."""
    weight = mine(p["weight"], "uneven").requires_grad_()
    hidden = p["hidden"].clone().requires_grad_()
    more = {"reduction": "none"} | more
    loss = LOSS(hidden, weight, p["target"], group(), **more)
    return loss, hidden, weight


@case
def parallel_broken_rows():
    """Labels of no class, NaN and infinities: the same rows in every process, the others right."""
    p = problem(torch.float32, 9)
    want, *_ = loss_of(p)
    for bad in (V, -1, 1 << 40, -(1 << 40)):
        p = problem(torch.float32, 9)
        p["target"][3, 1] = bad
        loss, hidden, weight = loss_of(p)
        loss.sum().backward()
        broken = torch.zeros(S, B, dtype=torch.bool)
        broken[3, 1] = True
        assert torch.equal(everywhere(loss).isnan(), broken)
        assert torch.equal(loss[~broken], want[~broken])
        assert torch.equal(hidden.grad.isnan().all(-1), broken) and weight.grad.isnan().all()
    for value in (torch.nan, torch.inf):  # in the classes of the first process, of a label of the second
        p = problem(torch.float32, 9)
        p["target"][3, 1], p["hidden"][3, 1] = 200, 0.0
        p["hidden"][3, 1, 0] = 1.0
        p["weight"][7, 0] = value
        loss, hidden, _ = loss_of(p)
        loss.sum().backward()
        assert everywhere(loss)[3, 1].isnan() and hidden.grad[3, 1].isnan().all()
    for half in (slice(0, 126), slice(126, V)):  # no class above -inf in a process
        p = problem(torch.float32, 9)
        p["target"][3, 1] = 100 if half.start else 200
        p["bias"][half] = -torch.inf
        options = {"reduction": "none", "bias": True}
        exact, exact_grads = plain(p, torch.float64, lambda p, o=options: [formula(p, o)])
        (loss,), (dhidden, *_) = sharded(p, options, "uneven", False, LOSS)
        there = torch.isfinite(exact[0])
        assert there[3, 1] and torch.equal(loss.isinf(), exact[0].isinf())
        assert (loss - exact[0])[there].abs().max() < 1e-5
        assert (dhidden - exact_grads[0])[there].abs().max() < 1e-5


@case
def parallel_ignored_rows():
    """They are not computed: what their hidden states are does not matter, nor how many there are."""
    for options in (
        {"reduction": "none"},
        {"outputs": ("loss", "lse", "predicted")},
        {"label_smoothing": 0.1},
    ):
        found = []
        for value in (0.0, torch.nan):
            p = problem(torch.float32, 18)
            p["target"][2:8] = -100
            p["hidden"][p["target"] == -100] = value
            count = int((p["target"] != -100).sum())
            loss, hidden, weight = loss_of(p, **({"reduction": "mean"} | options), valid_rows=count)
            outputs = loss[1:] if isinstance(loss, tuple) else ()
            loss = loss[0] if isinstance(loss, tuple) else loss
            loss.sum().backward()
            ignored = p["target"] == -100
            assert not hidden.grad[ignored].any() and not (loss.dim() and loss[ignored].any())
            assert all((o[ignored] == (-1 if o.dtype == torch.int64 else 0)).all() for o in outputs)
            found.append([loss, hidden.grad, weight.grad, *outputs])
        assert all(map(torch.equal, *found))


@case
def parallel_nothing_counts():
    for reduction, want in (("mean", torch.nan), ("sum", 0.0), ("none", 0.0)):
        p = problem(torch.float32, 10)
        p["target"][:] = -100
        p["hidden"][0] = torch.nan
        (loss,), gradients = sharded(p, {"reduction": reduction}, "uneven", reduction == "sum", LOSS)
        assert torch.equal(loss.nan_to_num(7.0), torch.full_like(loss, want).nan_to_num(7.0))
        if reduction != "none":  # NaN hidden states times 0 are NaN in the weight's matmul
            assert not gradients[0].any()
    hidden = torch.empty(0, H, requires_grad=True)
    weight = torch.randn(5, H, requires_grad=True)
    loss = LOSS(hidden, weight, torch.empty(0, dtype=torch.long), group(), reduction="sum")
    loss.backward()
    assert loss == 0 and not weight.grad.any()
    logits, none = torch.empty(2, 0, 5, requires_grad=True), torch.empty(2, 0, dtype=torch.long)
    for reduction, want in (("mean", torch.nan), ("sum", 0.0)):
        loss = parallel.cross_entropy(logits, none, group(), reduction=reduction, label_smoothing=0.1)
        (gradient,) = torch.autograd.grad(loss, logits)
        assert torch.equal(loss.nan_to_num(7.0), torch.full_like(loss, want).nan_to_num(7.0))
        assert gradient.shape == logits.shape
    rows = parallel.cross_entropy(logits, none, group(), reduction="none")
    assert rows.shape == none.shape and rows.sum().backward() is None


@case
def parallel_autograd():
    """The graph kept, recomputed under checkpointing, in parts; second derivatives refused."""
    p = problem(torch.float32, 11)
    loss, hidden, weight = loss_of(p)
    first = torch.autograd.grad(loss, (hidden, weight), p["upstream"], retain_graph=True)
    again = torch.autograd.grad(loss, (hidden, weight), p["upstream"])
    assert all(map(torch.equal, first, again))
    scalar = LOSS(hidden, weight, p["target"], group())
    kept = torch.autograd.grad(scalar, (hidden, weight), retain_graph=True)
    twice = torch.autograd.grad(2 * scalar, (hidden, weight))
    assert all(torch.equal(2 * a, b) for a, b in zip(kept, twice, strict=True))
    call = functools.partial(LOSS, reduction="none")
    loss = checkpoint(call, hidden, weight, p["target"], group(), use_reentrant=False)
    assert all(map(torch.equal, first, torch.autograd.grad(loss, (hidden, weight), p["upstream"])))
    loss = call(hidden.detach(), weight, p["target"], group())
    (only,) = torch.autograd.grad(loss, (weight,), p["upstream"])
    assert torch.equal(only, first[1])
    loss = call(hidden, weight.detach(), p["target"], group())
    (only,) = torch.autograd.grad(loss, (hidden,), p["upstream"])
    assert torch.equal(only, first[0])
    with torch.no_grad():
        assert torch.equal(call(hidden, weight, p["target"], group()), loss)
    loss = call(hidden, weight, p["target"], group())
    refused(lambda: torch.autograd.grad(loss.sum(), hidden, create_graph=True), "second derivatives")
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(p["hidden"], p["hidden"])
        refused(lambda: call(dual, weight, p["target"], group()), "forward-mode")
    refused(
        lambda: torch.func.vmap(lambda x: call(x, weight, p["target"], group()))(hidden[None]), "torch.func"
    )
    head = DTensor.from_local(weight.detach(), mesh(), [Shard(0)])
    refused(
        lambda: call(hidden, head, p["target"], group()), "weight must be a plain dense tensor, got a DTensor"
    )
