"""Cases of multi_token_loss: several heads over one trunk, weights alone or behind Medusa's blocks."""

import math

import torch
import torch.nn.functional as F

from .case import Case, Inputs, Maker, bench_case, params, test_case
from .heads import LORA_SCALE, adapter, altered, costs, liger_head, linear, loss_gradient

NAME = "multi_token_loss"
LOSS = True

DEFAULTS = {
    "heads": "www",  # of each: w a weight, r a residual block and a weight, t a block and head 0's weight
    "packed": (),  # lengths of the sequences of a row
    "lora": False,  # on every second head
    "trunk": True,  # hidden has a gradient
    "weights": True,  # heads have gradients
}
DEFAULTS |= {"lead": (2, 11), "H": 32, "V": 67, "coefficients": None, "shifts": None, "masked": 0.0}
DEFAULTS |= {"known": False, "reduction": "mean", "denominator": None, "softcap": None}
DEFAULTS |= {"label_smoothing": 0.0, "z_loss": 0.0, "token_weight": False, "chunk_rows": None, "scale": 2.0}
DEFAULTS |= {"upstream": 1.0}

OF_BENCH = {"lead": (1, 8192), "H": 4096, "V": 128256}

CASES = [
    test_case("three", small=True, shifts=(0, 1, 2)),
    test_case("one", heads="w", masked=0.2),
    test_case("blocks", heads="wrr", masked=0.3, coefficients=(1.0, 0.8, 0.64)),
    test_case("odd", lead=(1, 7), H=33, V=51, heads="wr", masked=0.2),
    test_case("tied", heads="wtt", masked=0.2, coefficients=(1.0, 0.5, 0.25)),
    test_case("chunks", lead=(1, 37), heads="wr", chunk_rows=8, masked=0.2),
    test_case("shifts", heads="wrw", shifts=(0, 3, 2), masked=0.2),
    test_case("past_the_end", lead=(3, 4), shifts=(1, 4, 9), reduction="sum"),
    test_case("packed", heads="wrr", packed=(5, 1, 5), masked=0.2),
    test_case("upstream", heads="wr", upstream=0.7, masked=0.2),
    test_case("zero", heads="wrw", coefficients=(1.0, 0.0, 0.5), masked=0.2),
    test_case("negative", coefficients=(1.0, -0.3, 0.5)),
    test_case("frozen_trunk", heads="wrr", trunk=False, masked=0.2),
    test_case("frozen_heads", heads="wrr", weights=False),
    test_case("no_grad", heads="wr", trunk=False, weights=False, grad=False),
    test_case("lora", heads="wrw", lora=True, masked=0.2),
    test_case("token_weight", heads="wr", token_weight=True, masked=0.2),
    test_case("sum", heads="wr", reduction="sum", masked=0.2),
    test_case("denominator", heads="wr", denominator=9.0, masked=0.2),
    test_case("options", heads="wr", softcap=4.0, label_smoothing=0.1, z_loss=1e-3, masked=0.2),
    test_case("known", lead=(1, 37), heads="wr", known=True, masked=0.5, chunk_rows=8),
    test_case("all_masked", heads="wr", masked=1.0),
    test_case("empty", lead=(0, 4), heads="wr", reduction="sum"),
    bench_case("8192x4096x128256_3", **OF_BENCH),
    bench_case("8192x4096x128256_5", heads="wwwww", **OF_BENCH),
    bench_case("8192x4096x128256_3_blocks", heads="wrr", **OF_BENCH),
    bench_case("8192x4096x128256_5_blocks", heads="wrrrr", **OF_BENCH),
    bench_case("8192x4096x128256_3_stage1", trunk=False, **OF_BENCH),
    bench_case("8192x4096x128256_5_stage1", heads="wwwww", trunk=False, **OF_BENCH),
    bench_case("8192x4096x128256_3_blocks_stage1", heads="rrr", trunk=False, **OF_BENCH),
    bench_case("1024x512x32000_3", "bench_cpu", lead=(1, 1024), H=512, V=32000),
    bench_case("256x128x1024_3", "smoke", lead=(1, 256), H=128, V=1024),
]


class Block:
    """A residual block of Medusa's on a tensor that the caller has."""

    def __init__(self, matrix):
        self.matrix = matrix

    def parameters(self):
        return [self.matrix]

    def __call__(self, x):
        return x + F.silu(F.linear(x, self.matrix))


def make(case: Case, device, dtype: torch.dtype, seed: int = 0) -> Inputs:
    """Draw the inputs of a case: hidden, labels, then what each head has, block before weight."""
    p = params(case, DEFAULTS)
    draw = Maker(case, device, dtype, seed)
    lead, size, vocab, heads = p["lead"], p["H"], p["V"], p["heads"]
    hidden = draw.randn(*lead, size)
    labels = draw.labels(vocab, *lead, masked=p["masked"])
    tensors, loras = [], {}
    for i, kind in enumerate(heads):
        if kind in "rt":
            tensors.append(draw.randn(size, size, scale=0.5 / math.sqrt(size)))
        if kind in "wr":
            tensors.append(draw.randn(vocab, size, scale=p["scale"] / math.sqrt(size)))
        if p["lora"] and i % 2:
            loras |= {f"{name}{i}": t for name, t in adapter(draw, 4, size, vocab).items()}
    ids = torch.cat([torch.arange(n) for n in p["packed"]]).to(device) if p["packed"] else None
    shared = ("reduction", "denominator", "softcap", "label_smoothing", "z_loss", "chunk_rows")
    kwargs = {"heads": heads, "position_ids": ids, "token_weight": None, "valid_rows": None, **loras}
    kwargs |= {name: p[name] for name in shared}
    kwargs["shifts"] = p["shifts"] or tuple(range(1, len(heads) + 1))
    kwargs["coefficients"] = p["coefficients"] or (1.0,) * len(heads)
    if p["token_weight"]:
        kwargs["token_weight"] = draw.randn(*lead, dtype=torch.promote_types(dtype, torch.float32)).abs()
    if p["known"]:
        kwargs["valid_rows"] = [int((shifted(labels, k, ids) != -100).sum()) for k in kwargs["shifts"]]
    trained = range(2, 2 + len(tensors)) if p["weights"] else ()
    unused = _unused(heads, kwargs["coefficients"])
    upstream = torch.tensor(p["upstream"], dtype=torch.promote_types(dtype, torch.float32), device=device)
    return Inputs(
        args=(hidden, labels, *tensors),
        kwargs=kwargs,
        grads=(0,) * p["trunk"] + tuple(i for i in trained if i - 2 not in unused),
        grad_outputs=(upstream,),
        grad_kwargs=tuple(loras),
    )


def _unused(heads, coefficients):
    """Tensors of heads with coefficient 0: they have no gradient."""
    found, at = set(), 0
    for kind, coefficient in zip(heads, coefficients, strict=True):
        count = {"w": 1, "r": 2, "t": 1}[kind]
        found |= set(range(at, at + count)) if coefficient == 0 else set()
        at += count
    return found


def _taken(heads, tensors):
    """For each head its block (or None) and its weight."""
    left = list(tensors)
    first = None
    for kind in heads:
        block = left.pop(0) if kind in "rt" else None
        weight = first if kind == "t" else left.pop(0)
        first = weight if first is None else first
        yield block, weight


def tigon_fn(hidden, labels, *tensors, heads, **options):
    """Tigon's own."""
    import tigon

    loras = [options.pop(f"lora_a{i}", None) for i in range(len(heads))]
    loras = [a if a is None else (a, options.pop(f"lora_b{i}"), LORA_SCALE) for i, a in enumerate(loras)]
    made = [weight if block is None else (Block(block), weight) for block, weight in _taken(heads, tensors)]
    return tigon.multi_token_loss(hidden, made, labels, lora=loras, **options).loss


def shifted(labels, shift, ids=None):
    """The label of position t + shift at t, -100 past the end of its sequence."""
    shift = min(shift, labels.shape[-1])
    moved = F.pad(labels[..., shift:], (0, shift), value=-100)
    if ids is None or shift == 0:
        return moved
    return torch.where(F.pad(ids[shift:], (0, shift)) == ids + shift, moved, -100)


def eager_fn(
    hidden,
    labels,
    *tensors,
    heads,
    coefficients,
    shifts,
    position_ids,
    reduction,
    denominator,
    softcap,
    label_smoothing,
    z_loss,
    token_weight,
    **others,
):
    """Logits of each head in the model's dtype, upcast, cross-entropy; also the oracle, on fp64 copies."""
    total = 0.0
    for i, (block, weight) in enumerate(_taken(heads, tensors)):
        if coefficients[i] == 0:
            continue
        h = hidden if block is None else hidden + F.silu(F.linear(hidden, block))
        z = altered(linear(h, weight, None, others.get(f"lora_a{i}"), others.get(f"lora_b{i}")), softcap)
        target = shifted(labels, shifts[i], position_ids)
        counts = target != -100
        rows = F.cross_entropy(
            z.flatten(0, -2), target.flatten(), reduction="none", label_smoothing=label_smoothing
        ).view(target.shape)
        rows = rows + torch.where(counts, z_loss * torch.logsumexp(z, -1).square(), 0.0)
        rows = rows if token_weight is None else rows * token_weight
        by = denominator or (counts.sum() if reduction == "mean" else 1)
        total = total + coefficients[i] * (rows.sum() / by)
    return total


def _matmuls(case: Case) -> list[tuple[int, int, int]]:
    p = params(case, DEFAULTS)
    return [(math.prod(p["lead"]), p["H"], p["V"] * len(p["heads"]))]


bytes_fwd, bytes_bwd, flops_fwd, _ = costs(_matmuls)


def flops_bwd(case: Case) -> int:
    """The gradients' matmuls that are wanted; blocks with a frozen trunk need hidden's too."""
    p = params(case, DEFAULTS)
    wanted = sum(p["weights"] + (p["trunk"] or (kind in "rt" and p["weights"])) for kind in p["heads"])
    return flops_fwd(case) * wanted // len(p["heads"])


def gemms(inputs: Inputs, step: bool) -> list:
    """The bare matmuls with the vocabulary, of every head: logits, and for a step those of the gradients."""
    hidden, labels, *tensors = (value.detach() for value in inputs.args)
    x, found = hidden.reshape(-1, hidden.shape[-1]), []
    taken = list(_taken(inputs.kwargs["heads"], tensors))
    trunk, trained = 0 in inputs.grads, len(inputs.grads) > (0 in inputs.grads)
    if step:  # one stands for all heads: its values decide what power the matmuls draw
        gradient = loss_gradient(x, taken[0][1], labels)
    for block, weight in taken:
        found.append(lambda weight=weight: x @ weight.t())
        if step and (trunk or (block is not None and trained)):
            found.append(lambda weight=weight: gradient @ weight)
        if step and trained:
            found.append(lambda: gradient.t() @ x)
    return found


def _liger(accumulate):
    def factory(case, inputs):
        import liger_kernel.ops.fused_linear_cross_entropy  # noqa: F401

        kwargs = inputs.kwargs
        frozen = 0 not in inputs.grads and "w" in kwargs["heads"]  # it has no gradient of a weight then
        altered = any(kwargs[name] is not None for name in ("denominator", "token_weight"))
        if frozen or altered or inputs.grad_kwargs:
            return None

        def fn(hidden, labels, *tensors, heads, coefficients, shifts, position_ids, **options):
            total = 0.0
            for i, (block, weight) in enumerate(_taken(heads, tensors)):
                h = hidden if block is None else Block(block)(hidden)
                target = shifted(labels, shifts[i], position_ids).flatten()
                loss = liger_head(h.flatten(0, -2), weight, target, options, accumulate)
                total = total + coefficients[i] * loss
            return total

        return fn

    return factory


PEERS = {"liger": _liger(None), "liger_fp32": _liger(torch.float32)}  # its head, once for each
