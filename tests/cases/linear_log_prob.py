"""Cases of linear_log_prob: log-probabilities and entropies of labels under a linear head, without logits."""

import math

import torch
import torch.nn.functional as F

from .case import Case, Inputs, Maker, bench_case, lay_out, ours, params, test_case, upcast
from .heads import LLAMA, LORA_SCALE, adapter, altered, as_tigon, costs, linear, matmul_of, trained
from .linear_cross_entropy import bare_matmuls

NAME = "linear_log_prob"
tigon_fn = ours(NAME, as_tigon)
LOSS = True  # gradients may be made in the forward

DEFAULTS = {
    "lead": (13,),  # leading shape of hidden and target
    "layout": "contiguous",  # of hidden
    "labels": 0,  # of a row; 0: one, and no dimension of its own
    "known": False,  # the number of rows that count is said
    "lora": 0,  # rank
    "scale": 2.0,  # spread of the logits
}
DEFAULTS |= {"H": 32, "V": 67, "bias": False, "weight_layout": "contiguous", "masked": 0.0, "softcap": None}
DEFAULTS |= {"logit_scale": 1.0, "temperature": 1.0, "entropy": False, "shift": False, "ignore_index": -100}
DEFAULTS |= {"chunk_rows": None, "keep_mb": None, "logit_dtype": None, "grads": (0, 1)}
SIZES = (
    (8192, 4096, 128256, {}),
    (4096, 2048, 151936, {}),
    (16384, 2048, 151936, {}),
    (8192, 3584, 152064, {}),
    (4096, 2304, 256000, {"softcap": 30.0}),
)
WAYS = {  # what is kept, and what needs a gradient
    "": {},
    "_kept": {"keep_mb": 1e6},
    "_frozen": {"grads": (0,)},
    "_again": {"keep_mb": 0},
    "_frozen_again": {"grads": (0,), "keep_mb": 0},
    "_fp32": {"logit_dtype": torch.float32},
}

AGAIN = {"lead": (37,), "masked": 0.2, "chunk_rows": 8}
CAPPED = {"softcap": 3.0, "temperature": 0.7}
FORM = ("softcap", "logit_scale", "temperature")

CASES = [
    test_case("13x32x67"),
    test_case("odd_7x33x51", lead=(7,), H=33, V=51, masked=0.3),
    test_case("one_row", lead=(1,), V=1000),
    test_case("one_class", V=1),
    test_case("empty", lead=(0,)),
    test_case("rank3", lead=(2, 9), masked=0.2),
    test_case("rows", lead=(2, 9), layout="rows"),
    test_case("transposed", layout="transposed", weight_layout="transposed"),
    test_case("misaligned", H=64, layout="offset1", weight_layout="offset1"),
    test_case("all_masked", masked=1.0, bias=True),
    test_case("hidden_only", small=True, grads=(0,), masked=0.2),
    test_case("weight_only", grads=(1,), masked=0.2),
    test_case("no_grad", grads=(), grad=False),
    test_case("bias", small=True, bias=True, masked=0.2),
    test_case("entropy", small=True, entropy=True, masked=0.2),
    test_case("entropy_frozen", entropy=True, masked=0.2, grads=(0,), softcap=3.0),
    test_case("temperature", temperature=0.6, softcap=3.0, logit_scale=0.5, masked=0.2),
    test_case("shift", lead=(3, 8), shift=True, masked=0.2),
    test_case("lora", lora=4, masked=0.2, grads=(0,)),
    test_case("lora_again", lora=4, masked=0.2, keep_mb=0, chunk_rows=4),
    test_case("again", lead=(37,), masked=0.3, keep_mb=0),
    test_case("part", small=True, lead=(37,), masked=0.3, keep_mb=3e-3, chunk_rows=2, bias=True),
    test_case("part_chunks", lead=(37,), masked=0.3, keep_mb=3e-3, chunk_rows=4),
    test_case("chunks", lead=(37,), masked=0.3, chunk_rows=8),
    test_case("known", lead=(37,), masked=0.6, known=True, bias=True),
    test_case("known_frozen", lead=(37,), masked=0.6, known=True, grads=(0,), layout="rows"),
    test_case("known_again", lead=(37,), masked=0.6, known=True, chunk_rows=4, keep_mb=0),
    test_case("fp32_logits", small=True, masked=0.2, logit_dtype=torch.float32),
    test_case("fp32_logits_again", keep_mb=0, **AGAIN, logit_dtype=torch.float32, entropy=True, bias=True),
    test_case("wide_vocab", lead=(6,), H=16, V=32001),
    test_case("labels", small=True, labels=5, masked=0.3),
    test_case("labels_one", labels=1, masked=0.3, grads=(0,)),
    test_case("labels_rank3", lead=(2, 9), labels=7, masked=0.2, entropy=True, layout="rows", **CAPPED),
    test_case("labels_shift", lead=(3, 8), labels=3, shift=True, masked=0.3),
    test_case("labels_chunks", lead=(37,), labels=4, masked=0.6, chunk_rows=8, bias=True, lora=4),
    test_case("labels_known", lead=(37,), labels=2, masked=0.7, known=True, chunk_rows=4, entropy=True),
    test_case("labels_all", lead=(5,), V=9, labels=30, logit_scale=0.5),
    test_case("labels_wide", labels=6, logit_dtype=torch.float32, **AGAIN),
    test_case("labels_masked", labels=3, masked=1.0, bias=True, entropy=True),
    test_case(
        "labels_ignore_a_class", lead=(37,), labels=2, masked=0.7, ignore_index=3, entropy=True, bias=True
    ),
    test_case("labels_no_grad", labels=3, masked=0.2, grads=(), grad=False),
    test_case("labels_empty", lead=(0,), labels=3),
    *(
        bench_case(f"{rows}x{h}x{v}{name}", lead=(rows,), H=h, V=v, **options | way)
        for rows, h, v, options in SIZES
        for name, way in WAYS.items()
    ),
    *(
        bench_case(f"8192x4096x128256_{name}", lead=(8192,), **LLAMA, **options)
        for name, options in {
            "masked80": {"masked": 0.8, "known": True},
            "entropy": {"entropy": True},
            "entropy_frozen": {"entropy": True, "grads": (0,)},
            "softcap": {"softcap": 30.0},
            "softcap_entropy": {"softcap": 30.0, "entropy": True},
            "lora16": {"lora": 16, "grads": (0,)},
            "labels64": {"labels": 64},
        }.items()
    ),
    bench_case("2048x512x32000", "bench_cpu", lead=(2048,), H=512, V=32000),
    bench_case("1024x2048x128256", "bench_cpu", lead=(1024,), H=2048, V=128256),
    bench_case("256x128x1024", "smoke", lead=(256,), H=128, V=1024),
]


def make(case: Case, device, dtype: torch.dtype, seed: int = 0) -> Inputs:
    """Draw the inputs of a case; the logits have the spread `scale`, the upstream gradients differ."""
    p = params(case, DEFAULTS)
    draw = Maker(case, device, dtype, seed)
    lead, size, vocab = p["lead"], p["H"], p["V"]
    hidden = draw.randn(*lead, size, layout=p["layout"])
    weight = lay_out(draw.randn(vocab, size, scale=p["scale"] / math.sqrt(size)), p["weight_layout"])
    bias = draw.randn(vocab) if p["bias"] else None
    each = (*lead, p["labels"]) if p["labels"] else lead
    target = draw.labels(vocab, *each, masked=p["masked"], ignore_index=p["ignore_index"])
    wide = torch.promote_types(dtype, torch.float32)
    grads = (draw.randn(*each, dtype=wide), *(draw.randn(*lead, dtype=wide) for _ in range(p["entropy"])))
    names = (*FORM, "entropy", "shift", "ignore_index", "chunk_rows", "keep_mb", "logit_dtype")
    counted = target != p["ignore_index"]
    counted = counted.any(-1) if p["labels"] else counted
    counted = counted[..., 1:] if p["shift"] else counted
    return Inputs(
        args=(hidden, weight, target),
        kwargs={
            "bias": bias,
            "valid_rows": int(counted.sum()) if p["known"] else None,
            **adapter(draw, p["lora"], size, vocab),
            **{name: p[name] for name in names},
        },
        grads=p["grads"],
        grad_outputs=grads,
        grad_kwargs=trained(p),
    )


def eager_fn(hidden, weight, target, *, bias, entropy, lora_a=None, lora_b=None, logit_dtype=None, **options):
    """Logits in the model's dtype, upcast, log_softmax and gather; also the oracle, on fp64 copies."""
    several, ignore_index = target.dim() == hidden.dim(), options.get("ignore_index", -100)
    if options.get("shift"):
        rows = target if several else target.unsqueeze(-1)
        target = F.pad(rows[..., 1:, :], (0, 0, 0, 1), value=ignore_index).view(target.shape)
    operands = hidden, weight, bias
    if logit_dtype is not None:
        operands = (None if t is None else upcast(t) for t in operands)
    logits = linear(*operands)
    if lora_a is not None:  # an adapter's matmuls are of the model's dtype whatever the logits are
        logits = logits + LORA_SCALE * F.linear(F.linear(hidden, lora_a), lora_b)
    z = altered(logits, **{name: options[name] for name in FORM if name in options})
    log_p = torch.log_softmax(z, -1)
    labels = target if several else target.unsqueeze(-1)
    counts = labels != ignore_index
    picked = log_p.gather(-1, torch.where(counts, labels, 0))
    picked = torch.where(counts, picked, 0.0).view(target.shape)
    if not entropy:
        return picked
    return picked, torch.where(counts.any(-1), -(log_p.exp() * log_p).sum(-1), 0.0)


bytes_fwd, bytes_bwd, flops_fwd, _ = costs(matmul_of(DEFAULTS))


def flops_bwd(case: Case) -> int:
    """One matmul for each gradient; recomputing the logits is a choice, not counted."""
    return len(params(case, DEFAULTS)["grads"]) * flops_fwd(case)


def gemms(inputs: Inputs, step: bool) -> list:
    """The bare matmuls on the same operands: of logits, of gradients, and of logits computed again."""
    import tigon

    hidden, weight, target = inputs.args
    rows, size = hidden.numel() // hidden.shape[-1], hidden.shape[-1]
    keep_mb, known = inputs.kwargs["keep_mb"], inputs.kwargs["valid_rows"]
    worked = rows if known is None else known
    frozen = inputs.grads == (0,) and not inputs.grad_kwargs
    memory = tigon.linear_log_prob_memory(
        rows,
        size,
        weight.shape[0],
        hidden.dtype,
        device=hidden.device.type,
        valid_rows=known,
        keep_mb=keep_mb,
        train_weight=1 in inputs.grads,
        lora_rank=0 if inputs.kwargs["lora_a"] is None else 1,
    ).gradients
    again = keep_mb == 0 if frozen else memory < worked * weight.shape[0] * hidden.element_size()
    one = target[..., 0] if target.dim() == hidden.dim() else target
    return bare_matmuls(hidden, weight, one, inputs, step, again)


def _plain(kwargs) -> bool:
    """No option that this benchmark's peers lack."""
    return not kwargs["shift"] and kwargs["lora_a"] is None


def trl_log_prob(
    hidden, weight, target, *, bias=None, softcap=None, logit_scale=1.0, temperature=1.0, entropy=False
):
    """TRL's chunked head: log-probabilities of labels, and entropies."""
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE, _ChunkedLogProbFunction

    outputs = ("entropy",) if entropy else ()
    form = temperature, _CHUNKED_LOGPROB_CHUNK_SIZE, softcap, logit_scale, outputs
    found = _ChunkedLogProbFunction.apply(hidden.flatten(0, -2), weight, bias, target.flatten(), *form)
    log_prob, entropies, *_ = found
    log_prob = log_prob.view(target.shape)
    return (log_prob, entropies.view(target.shape)) if entropy else log_prob


def _trl(case, inputs):
    import trl.trainer.utils  # noqa: F401

    kwargs = inputs.kwargs
    if not _plain(kwargs) or kwargs["logit_dtype"] is not None or inputs.args[2].dim() > 1:
        return None
    names = ("bias", "softcap", "logit_scale", "temperature", "entropy")

    def fn(hidden, weight, target, **options):  # it has no ignored label: every row is computed
        form = {name: options[name] for name in names}
        if "masked" not in case.params:
            return trl_log_prob(hidden, weight, target, **form)
        counts = target != options["ignore_index"]
        return trl_log_prob(hidden, weight, target.clamp(min=0), **form).masked_fill(~counts, 0.0)

    return fn


def _cce(filter_eps):
    def factory(case, inputs):
        from cut_cross_entropy import linear_cross_entropy

        kwargs = inputs.kwargs
        changed = kwargs["temperature"] != 1.0 or kwargs["logit_scale"] != 1.0 or kwargs["entropy"]
        several = inputs.args[2].dim() > 1
        if not _plain(kwargs) or changed or several or kwargs["bias"] is not None:
            return None

        def fn(hidden, weight, target, *, softcap, **_):
            return -linear_cross_entropy(hidden, weight, target, -100, softcap, "none", filter_eps=filter_eps)

        return fn

    return factory


PEERS = {
    "trl": _trl,
    "cce": _cce("high"),  # logits in fp32 always
    "cce_exact": _cce(None),
}  # Liger has no differentiable log-probability
