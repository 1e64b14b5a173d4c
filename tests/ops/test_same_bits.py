"""The promise of docs/same-bits.md: a row's results have the same bits whatever stands beside it."""

import random
import re
import textwrap
import time

import pytest
import torch
import torch.nn.functional as F
from checks import outputs_of, same_bits
from heads import head_inputs

import tigon
from conftest import DEVICES
from ranks import run_ranks

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROWS = 67
# Hidden size and vocabulary of ten families at an eighth of their size, and odd ones.
HEADS = {
    "gpt2": (96, 6283),
    "llama": (512, 16032),
    "qwen2.5": (112, 18992),
    "qwen3": (256, 18992),
    "gemma": (288, 32768),
    "mistral": (512, 4096),
    "phi": (384, 12508),
    "deepseek": (896, 16160),
    "gpt_oss": (360, 25136),
    "olmo": (256, 12550),
    "odd_hidden": (77, 1003),
    "small": (16, 40),
    "one": (1, 3),
}
SMALL = ("gpt2", "mistral", "odd_hidden", "small", "one")


@pytest.fixture
def deterministic():
    with tigon.deterministic():
        yield


def subsets(rows):
    """Some rows alone, few, many, in another order."""
    yield from ([0], [rows - 1], [3, 4], list(range(5, 12)), list(range(20, 36)), list(range(1, rows, 2)))
    yield from (list(range(n)) for n in (150, 500) if n < rows)
    yield torch.randperm(rows, generator=torch.Generator().manual_seed(1)).tolist()


def results(fn, rows):
    """Outputs and gradients of every float of `rows`, a row each; the upstream gradients are by row too."""
    rows = [r.detach().requires_grad_(r.is_floating_point()) for r in rows]
    outputs = outputs_of(fn(*rows))
    found = [o.detach() for o in outputs]
    outputs = [o for o in outputs if o.requires_grad]
    upstream = [(o.detach().float().sin() + 0.5).to(o.dtype) for o in outputs]
    leaves = [r for r in rows if r.requires_grad]
    gradients = torch.autograd.grad(outputs, leaves, upstream, allow_unused=True)
    return found + [g for g in gradients if g is not None]


def check(fn, rows, run=results):
    want = run(fn, rows)
    for at in subsets(len(rows[0])):
        for i, (got, of_all) in enumerate(zip(run(fn, [r[at] for r in rows]), want, strict=True)):
            assert same_bits(got, of_all[at]), (i, at)


def row_ops(columns, dtype, device, rows=ROWS):
    """Name -> function of rows, and its inputs."""

    def drawn(*shape):
        return torch.randn(*shape).to(device, dtype)

    w, b, one = drawn(columns), drawn(columns), drawn(1)
    teacher, labels = drawn(1, columns), torch.arange(rows, device=device) % 7
    ops = {
        "rms_norm": (lambda x: tigon.rms_norm(x, w), 1),
        "layer_norm": (lambda x: tigon.layer_norm(x, w, b), 1),
        "add_rms_norm": (lambda x, r: tigon.add_rms_norm(x, r, w), 2),
        "gated_rms_norm": (lambda x, g: tigon.gated_rms_norm(x, g, w), 2),
        "poly_norm": (lambda x: tigon.poly_norm(x, drawn(3) * 0 + 0.3, one * 0), 1),
        "dyt": (lambda x: tigon.dyt(x, one, w, b), 1),
        "silu": (tigon.silu, 1),
        "mish": (tigon.mish, 1),
        "relu_squared": (tigon.relu_squared, 1),
        "swiglu": (tigon.swiglu, 2),
        "geglu": (tigon.geglu, 2),
        "softmax": (tigon.softmax, 1),
        "sparsemax": (tigon.sparsemax, 1),
        "modulated_rms_norm": (lambda *given: tigon.modulated_rms_norm(given[0], w, *given[1:]), 3),
        "attention_residual": (lambda *values: tigon.attention_residual(values, b / columns**0.5, w), 3),
    }
    ops = {name: (fn, [drawn(rows, columns) for _ in range(n)]) for name, (fn, n) in ops.items()}
    for name, loss in {"kl_div": tigon.kl_div, "jsd": tigon.jsd, "tvd": tigon.tvd}.items():

        def of_rows(x, labels, loss=loss):
            return loss(x, teacher.expand_as(x), labels, reduction="none", ignore_index=3)

        ops[name] = of_rows, [drawn(rows, columns), labels]
    return ops


ROW_OPS = list(row_ops(8, torch.float32, "cpu"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [64, 1024, 2056, 8192])
@pytest.mark.parametrize("name", ROW_OPS)
def test_rows(name, columns, dtype, device):
    """Without the mode: rows of whole vectors, on a GPU more than run at once."""
    check(*row_ops(columns, dtype, device, 2200 if device == "cuda" else ROWS)[name])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [1, 65, 1001, 5003])
@pytest.mark.parametrize("name", ROW_OPS)
def test_rows_that_begin_anywhere(name, columns, dtype, device, deterministic):
    check(*row_ops(columns, dtype, device)[name])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [64, 5003, 50257, 128256])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 30.0}], ids=str)
def test_cross_entropy(options, columns, dtype, device, deterministic):
    x, target = (
        torch.randn(ROWS, columns).to(device, dtype),
        torch.randint(0, columns, (ROWS,), device=device),
    )
    target[::5] = -100
    check(lambda x, t: tigon.cross_entropy(x, t, reduction="none", **options), [x, target])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rope(dtype, device):
    q, k = torch.randn(ROWS, 8, 64).to(device, dtype), torch.randn(ROWS, 2, 64).to(device, dtype)
    angles = torch.randn(ROWS, 64, device=device)
    w = torch.randn(64).to(device, dtype)

    def rotate(q, k, angles):
        tables = angles.detach().cos()[None], angles.detach().sin()[None]
        q, k = (t[None].transpose(1, 2) for t in (q, k))
        out = (*tigon.rope(q, k, *tables), *tigon.qk_norm_rope(q, k, w, w, *tables))
        return tuple(t.transpose(1, 2)[0] for t in out)

    check(rotate, [q, k, angles])


@pytest.mark.parametrize("options", [{}, {"score": "sigmoid", "num_groups": 4, "top_groups": 2}], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_router(dtype, options, device):
    check(lambda x: tigon.route(x, 4, **options), [torch.randn(ROWS, 60).to(device, dtype)])


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_experts(dtype, transposed, device, deterministic):
    """A token's result and gradient, whichever tokens its experts get besides."""
    experts, h, inner = 6, 64, 40
    gate_up, down = torch.randn(experts, 2 * inner, h) / 8, torch.randn(experts, h, inner) / 8
    if transposed:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    gate_up, down = (t.contiguous().to(device, dtype) for t in (gate_up, down))
    loras = {}
    for name, k, n in (("gate_up", h, 2 * inner), ("down", inner, h)):
        a, b = torch.randn(experts, 5, k) / 8, torch.randn(experts, n, 5) / 2
        loras[f"{name}_lora"] = a.to(device), b.to(device), 0.7
    ids = torch.rand(ROWS, experts, device=device).topk(3).indices
    rows = [torch.randn(ROWS, h).to(device, dtype), ids, torch.rand(ROWS, 3, device=device)]
    check(lambda x, ids, w: tigon.experts(x, gate_up, down, ids, w, transposed=transposed), rows)
    check(lambda x, ids, w: tigon.experts(x, gate_up, down, ids, w, transposed=transposed, **loras), rows)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lora_linear(dtype, device, deterministic):
    x, w, a, b = (torch.randn(*s).to(device, dtype) for s in ((ROWS, 96), (80, 96), (5, 96), (80, 5)))
    check(lambda x: tigon.lora_linear(x, w, a, b, 0.5), [x])


def head_of(name, dtype, device, rows=ROWS, masked=0.3):
    return head_inputs(rows, *HEADS[name], dtype=dtype, device=device, masked=masked)


FORMS = {
    "plain": {},
    "frozen": {"frozen": True},
    "chunks": {"chunk_rows": 16},
    "again": {"keep_mb": 0.0},
    "some": {"keep_mb": 0.01, "chunk_rows": 8},
    "entropy": {"entropy": True},
    "bias": {"bias": True},
    "capped": {"softcap": 30.0, "temperature": 0.7},
    "wide": {"logit_dtype": torch.float32},
    "lora": {"lora": 3},
    "several": {"several": 3},
    "known": {"known": True},
}


def log_prob(weight, *, frozen=False, bias=False, lora=0, several=0, known=False, **options):
    """The function of hidden and labels that a form stands for."""
    vocabulary, size = weight.shape
    if bias:
        options["bias"] = torch.linspace(-1, 1, vocabulary, device=weight.device)
    if lora:
        g = torch.Generator().manual_seed(2)
        pair = (torch.randn(lora, size, generator=g), torch.randn(vocabulary, lora, generator=g))
        options["lora"] = (*(t.to(weight) for t in pair), 0.5)
    weight = weight.detach().requires_grad_(not frozen)

    def run(hidden, target):
        if several:
            target = torch.stack([target, *((target + i) % vocabulary for i in range(1, several))], -1)
        if known:
            options["valid_rows"] = int((target != -100).sum())
        return tigon.linear_log_prob(hidden, weight, target, **options)

    return run


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SMALL)
def test_head(name, dtype, form, device, deterministic):
    """Log-probability, entropy and gradient of hidden: alone, in any batch, beside masked rows."""
    hidden, weight, target = head_of(name, dtype, device)
    check(log_prob(weight, **FORMS[form]), [hidden, target])


def log_probs(hidden, weight, target, **options):
    """By name: the log-probabilities of every call that returns them, or has them as its loss."""
    x, w = (t.detach().requires_grad_() for t in (hidden, weight))
    lead, of_policy = target.view(-1, 8), {k: o for k, o in options.items() if k != "logit_dtype"}
    seen = {}

    def own(name, **more):
        def loss(log_prob, *_):
            seen.setdefault(name, []).append(log_prob.detach())
            return -log_prob

        tigon.linear_loss(x, w, target, loss, reduction="sum", chunk_rows=24, **options, **more)

    with torch.no_grad():
        seen["without gradients"] = tigon.linear_log_prob(x, w, target, **options)
        seen["entropy without"] = tigon.linear_log_prob(x, w, target, entropy=True, **options)[0]
    for name, more in {
        "with gradients": {},
        "again": {"keep_mb": 0},
        "some": {"keep_mb": 0.02, "chunk_rows": 8},
        "entropy": {"entropy": True},
        "entropy again": {"entropy": True, "keep_mb": 0},
        "entropy, some": {"entropy": True, "keep_mb": 0.02, "chunk_rows": 8},
    }.items():
        value = tigon.linear_log_prob(x, w, target, **options, **more)
        seen[name] = value[0] if "entropy" in more else value
    own("linear_loss"), own("linear_loss, entropy", entropy=True)
    loss = tigon.linear_cross_entropy
    seen["cross-entropy"] = -loss(x, w, target, reduction="none", **options)
    every = ("log_prob", "lse", "entropy", "predicted")
    for reduction in ("none", "sum"):
        for more in (("log_prob",), ("log_prob", "entropy"), ("log_prob", "correct"), every):
            out = loss(x, w, target, reduction=reduction, outputs=("loss", *more), **options)
            seen[f"cross-entropy, {reduction}, {more}"] = out.log_prob
    if "logit_dtype" not in options:
        advantage = torch.ones(len(lead), device=hidden.device)
        for entropy in (0.0, 0.1):
            out = tigon.linear_policy(
                x.view(*lead.shape, -1), w, lead, advantage, entropy=entropy, **of_policy
            )
            seen[f"policy, {entropy}"] = out.log_prob
    return {name: torch.cat(v) if isinstance(v, list) else v.flatten() for name, v in seen.items()}


@pytest.mark.parametrize(
    "options",
    [{}, {"softcap": 30.0, "temperature": 0.7}, {"bias": True}, {"logit_dtype": torch.float32}],
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
# On a CPU a large head has the matmuls of a small one.
@pytest.mark.parametrize("name", ["gpt2", *["gemma"] * ("cuda" in DEVICES), "odd_hidden", "small", "one"])
def test_log_probs_of_all_calls(name, dtype, options, device, deterministic):
    """A row's log-probability does not depend on what else a call returns, or on which call it is."""
    hidden, weight, target = head_of(name, dtype, device, rows=64, masked=0.0)
    if "bias" in options:
        options = {"bias": torch.linspace(-1, 1, len(weight), device=device)}
    found = log_probs(hidden, weight, target, **options)
    want = found["with gradients"].detach()
    assert [k for k, v in found.items() if not same_bits(v.detach(), want)] == []


def between_vectors(t):
    """The same values one element after a 16-byte boundary, and in rows of one element more."""
    moved = t.new_empty(t.numel() + 1)[1:].view(t.shape)
    wider = t.new_empty(len(t), t.shape[1] + 1)[:, 1:]
    return [view.copy_(t) for view in (moved, wider)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["gpt2", "mistral", "odd_hidden", "small"])
def test_heads_that_begin_anywhere(name, dtype, device, deterministic):
    """Hidden and weight in memory that begins between vectors."""
    hidden, weight, target = head_of(name, dtype, device)
    hidden, weight = hidden.detach(), weight.detach()
    for form in ("plain", "chunks", "again", "entropy", "known", "lora"):
        want = results(log_prob(weight, **FORMS[form]), [hidden, target])
        for h in (hidden, *between_vectors(hidden)):
            for w in between_vectors(weight):
                for at in (slice(0, ROWS), slice(5, 18)):
                    got = results(log_prob(w, **FORMS[form]), [h[at], target[at]])
                    assert all(same_bits(g, of_all[at]) for g, of_all in zip(got, want, strict=True)), form


@pytest.mark.parametrize(
    "name, dtype, device",
    [
        (name, dtype, device)
        for i, name in enumerate(HEADS)
        for device in DEVICES
        # On a CPU a large head has the matmuls of a small one: one dtype says it.
        for dtype in (DTYPES if device == "cuda" or name in SMALL else [DTYPES[i % 3]])
    ],
)
def test_heads_of_families(name, dtype, device, deterministic):
    """One row, alone and in a batch, whatever form the call has that changes no formula."""
    hidden, weight, target = head_of(name, dtype, device, masked=0.0)
    target[1::3] = -100
    runs = {form: log_prob(weight, **FORMS[form]) for form in ("plain", "frozen", "chunks", "again", "some")}
    with pytest.raises(tigon.Error, match="max_peak_mb must be at least") as refused:
        log_prob(weight, max_peak_mb=1e-3)(hidden, target)
    least = re.search(r"at least (\d+)", str(refused.value))
    runs["peak"] = log_prob(weight, max_peak_mb=int(least[1]))
    want = results(runs["plain"], [hidden, target])
    with torch.no_grad():
        assert same_bits(tigon.linear_log_prob(hidden, weight, target), want[0])
    for run in runs.values():
        for at in ([0], [65, 3], list(range(ROWS))):
            for got, of_all in zip(results(run, [hidden[at], target[at]]), want, strict=True):
                assert same_bits(got, of_all[at])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_padded_and_packed(dtype, device, deterministic):
    """Sequences one after another, or beside padding of ignored labels and any hidden states."""
    hidden, weight, target = head_of("gpt2", dtype, device, masked=0.0)
    lengths, rows = (11, 1, 40, 15), max(11, 40)
    run = log_prob(weight)
    packed = results(run, [hidden, target])
    padded = torch.full((len(lengths), rows, hidden.shape[1]), 7.0, device=device, dtype=dtype)
    labels = torch.full((len(lengths), rows), -100, device=device)
    for i, (h, t) in enumerate(zip(hidden.detach().split(lengths), target.split(lengths), strict=True)):
        padded[i, : len(h)], labels[i, : len(h)] = h, t
    for got, want in zip(results(run, [padded, labels]), packed, strict=True):
        got = torch.cat([row[:n] for row, n in zip(got, lengths, strict=True)])
        assert same_bits(got, want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_losses_of_a_head(dtype, device, deterministic):
    """Hidden's gradient of summed losses, and of losses of answers that share a chunk or do not."""
    hidden, weight, target = head_of("gpt2", dtype, device, rows=64, masked=0.2)

    def summed(hidden, target):
        tigon.linear_cross_entropy(hidden, weight, target, reduction="sum").backward()
        return hidden.grad

    def policy(hidden, target, **options):
        target = target.view(-1, 8)
        advantage = torch.ones(len(target), device=device)
        out = tigon.linear_policy(
            hidden.view(len(target), 8, -1), weight, target, advantage, denominator=64, **options
        )
        out.loss.backward()
        return hidden.grad, out.log_prob.flatten()

    def leaf(at):
        return hidden.detach()[at].requires_grad_(), target[at]

    every = slice(0, 64)
    want, of_policy = summed(*leaf(every)), policy(*leaf(every))
    for at in (slice(0, 8), slice(24, 64)):
        assert same_bits(summed(*leaf(at)), want[at])
        for options in ({}, {"chunk_rows": 8}):
            for got, of_all in zip(policy(*leaf(at), **options), of_policy, strict=True):
                assert same_bits(got, of_all[at])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_losses_of_rows(dtype, device, deterministic):
    """Hidden's gradient of losses of rows: with a token's weight, against a teacher, of a user's own loss."""
    hidden, weight, target = head_of("gpt2", dtype, device)
    teacher = torch.randn_like(weight) / 8
    token_weight = torch.rand(ROWS, device=device)

    def weighted(h, t, w):
        return tigon.linear_cross_entropy(h, weight, t, reduction="none", token_weight=w, z_loss=1e-3)

    check(weighted, [hidden, target, token_weight])
    check(
        lambda h, t: tigon.linear_kl_div(h, weight, (h.detach(), teacher), t, reduction="none"),
        [hidden, target],
    )

    def own(h, target):
        hidden = h.detach().requires_grad_()
        tigon.linear_loss(hidden, weight, target, lambda lp: -lp * (1 - lp.exp()), reduction="sum").backward()
        return [hidden.grad]

    check(None, [hidden, target], lambda _, rows: own(*rows))


@pytest.mark.parametrize("threads", [1, 2])
def test_threads(threads, deterministic):
    """On the CPU the mode's matmuls do not depend on the number of threads."""
    hidden, weight, target = head_of("odd_hidden", torch.float32, "cpu")
    before, found = torch.get_num_threads(), []
    try:
        for n in (3, threads):
            torch.set_num_threads(n)
            found.append(results(lambda h, t: tigon.linear_log_prob(h, weight, t), [hidden, target]))
    finally:
        torch.set_num_threads(before)
    assert all(same_bits(a, b) for a, b in zip(*found, strict=True))


def steps(device):
    """Name -> a step from the same start, which calls its argument on the way."""

    def drawn(*shape):
        return torch.randn(*shape).to(device, torch.bfloat16)

    def gradients(fn, pause, *leaves):
        leaves = [t.clone().requires_grad_() for t in leaves]
        out = fn(*leaves)
        pause()
        return [out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))]

    q, d, temperature = drawn(160, 64), drawn(200, 64), torch.tensor(0.05, device=device)
    x, gate_up, down, weights = drawn(ROWS, 64), drawn(6, 80, 64) / 8, drawn(6, 64, 40) / 8, drawn(ROWS, 3)
    ids = torch.rand(ROWS, 6).topk(3).indices.to(device)
    matrices = [drawn(64, 96), drawn(64, 96), drawn(3, 40, 72)]

    def contrastive(q, d, temperature):
        options = {"symmetric": True, "margin": 0.1, "chunk_rows": 48}
        return tigon.contrastive_loss(q, d, temperature=temperature, **options)

    def experts(x, gate_up, down, weights):
        return tigon.experts(x, gate_up, down, ids, weights.float())

    def muon(pause):
        parameters = [torch.nn.Parameter(m.clone()) for m in matrices]
        optimizer = tigon.optim.Muon(parameters, lr=1e-2)
        for _ in range(2):
            for p, m in zip(parameters, matrices, strict=True):
                p.grad = m.flip(-1)
            pause()
            optimizer.step()
        return parameters

    return {
        "contrastive": lambda pause: gradients(contrastive, pause, q, d, temperature),
        "experts": lambda pause: gradients(experts, pause, x, gate_up, down, weights),
        "muon": muon,
    }


@pytest.mark.parametrize("name", ["contrastive", "experts", "muon"])
def test_delays(name, device):
    """The same step without the mode: the host slow or fast, ahead of the device or behind it."""
    step, draw = steps(device)[name], random.Random(0)

    def pause():
        if device == "cuda" and draw.random() < 0.5:
            torch.cuda._sleep(draw.randrange(4_000_000))
        if device == "cuda" and draw.random() < 0.25:
            torch.cuda.synchronize()
        time.sleep(draw.choice([0.0, 1e-4, 2e-3]))

    first = step(lambda: None)
    for _ in range(20):
        assert all(map(same_bits, step(pause), first))


# vLLM's rounding.


def vllm(hidden, weight, ids, temperature=1.0, softcap=None, logit_scale=1.0, bias=None):
    """What vLLM does with hidden states and sampled tokens, in plain PyTorch."""
    logits = F.linear(hidden, weight, bias)
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    if logit_scale != 1.0:
        logits = logits * logit_scale
    logits = logits.to(torch.float32)
    temperatures = torch.full((len(logits),), temperature, device=logits.device)
    logits.div_(temperatures.unsqueeze(1))
    return logits.log_softmax(-1, dtype=torch.float32).gather(-1, ids[:, None])[:, 0]


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.7}, {"softcap": 30.0}, {"logit_scale": 0.06, "temperature": 1.3}],
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["gpt2", "mistral", "odd_hidden"])
def test_match_of_vllm(name, dtype, options, device):
    hidden, weight, target = head_of(name, dtype, device, masked=0.0)
    bias = torch.randn(weight.shape[0]).to(weight)
    for more in ({}, {"bias": bias}):
        call = {**options, **more}
        want = vllm(hidden.detach(), weight.detach(), target, **call)
        got = tigon.linear_log_prob(hidden, weight, target, match="vllm", **call)
        assert same_bits(got.detach(), want)
        plain = tigon.linear_log_prob(hidden, weight, target, **call)
        for a, b in zip(*(torch.autograd.grad(x.sum(), [hidden, weight]) for x in (got, plain)), strict=True):
            assert same_bits(a, b)
    labels = torch.stack([target, target.flip(0)], -1)
    got = tigon.linear_log_prob(hidden.detach(), weight.detach(), labels, match="vllm", **options)
    assert same_bits(got[:, 0], vllm(hidden.detach(), weight.detach(), target, **options))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["gpt2", "mistral", "odd_hidden"])
def test_match_at_both_ends(name, dtype, device, deterministic):
    """A trainer's batch and a sampler's rows."""
    hidden, weight, target = (t.detach() for t in head_of(name, dtype, device))
    bias = torch.randn(weight.shape[0]).to(weight)
    for options in ({"temperature": 0.7, "chunk_rows": 8}, {"bias": bias}, {"logit_dtype": torch.float32}):
        check(
            lambda h, t, o=options: (tigon.linear_log_prob(h, weight, t, match="vllm", **o),),
            [hidden, target],
            lambda fn, rows: fn(*rows),
        )


def test_match_with_other_options(device):
    hidden, weight, target = head_of("small", torch.float32, device, rows=(4, 6))
    value, entropy = tigon.linear_log_prob(hidden, weight, target, match="vllm", entropy=True, shift=True)
    alone = tigon.linear_log_prob(hidden, weight, target, match="vllm", shift=True)
    assert same_bits(value, alone) and entropy.shape == target.shape and (value[:, -1] == 0).all()
    lora = (torch.zeros(2, 16, device=device), torch.zeros(40, 2, device=device), 1.0)
    refused = {
        "match must be 'vllm'": {"match": "sglang"},
        "lora must be merged": {"match": "vllm", "lora": lora},
        "must not be given both": {"match": "vllm", "softcap": 3.0, "logit_scale": 0.5},
    }
    for words, options in refused.items():
        with pytest.raises(tigon.Error, match=words):
            tigon.linear_log_prob(hidden, weight, target, **options)


@pytest.mark.parametrize("mode", [False, True])
def test_match_compiled(mode, device):
    """One graph, which reads the switch when it runs."""
    torch._dynamo.reset()
    hidden, weight, target = head_of("odd_hidden", torch.bfloat16, device)

    def run(hidden, weight):
        return tigon.linear_log_prob(hidden, weight, target, match="vllm", temperature=0.7, chunk_rows=9)

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    with tigon.deterministic(not mode):
        compiled(hidden, weight)
    with tigon.deterministic(mode):
        want, got = run(hidden, weight), compiled(hidden, weight)
        assert same_bits(got.detach(), want.detach())
        grads = (torch.autograd.grad(x.sum(), [hidden, weight]) for x in (want, got))
        assert all(map(same_bits, *grads))
        assert same_bits(compiled(hidden.detach(), weight.detach()), want.detach())


# Processes.

SHARDED = """
    import pathlib, torch, torch.distributed as dist, tigon
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    tigon.deterministic()
    for dtype in (torch.float32, torch.bfloat16):
        for h, v in ((64, 1024), (77, 1003)):
            hidden, target = torch.randn(48, h).to(dtype), torch.randint(0, v, (48,))
            weight = (torch.randn(v, h) / h**0.5).to(dtype)
            target[::7] = -100
            step = -(-v // size)
            shard = weight[rank * step : (rank + 1) * step]
            def run(at, **options):
                x, w = hidden[at].requires_grad_(), shard.clone().requires_grad_()
                y = tigon.parallel.linear_log_prob(x, w, target[at], dist.group.WORLD, **options)
                (y * (y.detach().sin() + 0.5)).sum().backward()
                return y.detach(), x.grad
            want = run(slice(0, 48))
            for at in (slice(0, 1), slice(40, 48), slice(3, 36)):
                for options in ({}, {"chunk_rows": 8}, {"keep_mb": 0.0}, {"keep_mb": 64.0}):
                    for got, of_all in zip(run(at, **options), want, strict=True):
                        assert torch.equal(got, of_all[at]), (dtype, h, at, options)
    dist.destroy_process_group()
    threads = [comm.read_text() for comm in pathlib.Path("/proc/self/task").glob("*/comm")]
    assert not any("gloo" in name for name in threads), threads  # at exit such a thread may abort the process
"""


@pytest.mark.xdist_group("two processes")
@pytest.mark.parametrize("size", [2, 4])
def test_shards(size, tmp_path):
    """Equal for a given number of shards; gloo adds in an order that depends on an element's place."""
    script = tmp_path / "sharded.py"
    script.write_text(textwrap.dedent(SHARDED))
    run_ranks(script, [], tmp_path, size)
