"""Cases of tigon.parallel: several labels a row, and divergences from a teacher's K most likely classes."""

import functools
import itertools

import torch
from parallel_cases import LAYOUTS, B, S, V, compare, everywhere, formula, group, mine, problem
from parallel_cases import drawn as problems
from two_processes import case, device_type, rank, refused

import tigon
from tigon import parallel

K = 6
OPTIONS = {
    "plain": {},
    "capped": {"softcap": 5.0, "logit_scale": 1.3, "temperature": 0.7, "bias": True},
    "low": {"lora": True, "bias": True, "temperature": 0.9},
}


def drawn(dtype, seed):
    """Problems with K labels a row: some twice, some of one shard alone, some ignored, a row without any."""

    def draw(i):
        p = problem(dtype, seed + 100 * i)
        with torch.device("cpu"):
            g = torch.Generator().manual_seed(seed + i)
            target = torch.randint(0, V, (S, B, K), generator=g)
            upstream = torch.randn(S, B, K, generator=g)
        target[0] %= 100
        target[1, :, 4] = target[1, :, 2]
        target[2, 0, 1:] = target[3] = target[4, 1, 0] = -100
        device = p["target"].device
        return p | {"target": target.to(device), "upstream": upstream.to(device)}

    return draw


def whole(p, options):
    """The unsharded log-probabilities and entropies."""
    found = [formula(p | {"target": t}, options, entropy=True)[0] for t in p["target"].unbind(-1)]
    rows = torch.where((p["target"] != -100).any(-1), 0, -100)
    return torch.stack(found, -1), formula(p | {"target": rows}, options, entropy=True)[1]


@case(**{name: (name,) for name in OPTIONS})
def parallel_labels(name):
    options = OPTIONS[name]
    for dtype, sp, chunk in itertools.product((torch.float32, torch.bfloat16), (False, True), (None, 10)):
        more = {"chunk_rows": chunk, "entropy": True}
        unsharded = functools.partial(whole, options=options)
        compare(drawn(dtype, 40), options, "uneven", sp, parallel.linear_log_prob, unsharded, **more)


@case(**{name: (name,) for name in LAYOUTS})
def parallel_labels_layout(layout):
    for name, sp in itertools.product(OPTIONS, (False, True)):
        options = OPTIONS[name]
        draw, call = drawn(torch.float32, 41), parallel.linear_log_prob
        compare(draw, options, layout, sp, call, lambda p, options=options: whole(p, options)[:1])


@case
def parallel_labels_wrong():
    """A label of no class makes its row NaN in all processes; a confident row keeps its small numbers."""
    p = drawn(torch.float32, 42)(0)
    target = p["target"].clone()
    target[0, 0, 3], target[0, 1, 2] = V, -7
    call = (p["hidden"], mine(p["weight"], "padded"), target, group())
    got = everywhere(parallel.linear_log_prob(*call, vocab=V))
    assert got[0, :2].isnan().all() and not got[0, 2].isnan().any() and not got[1:].isnan().any()
    p["hidden"][6, 0] = 60 * p["weight"][target[6, 0, 1]]
    exact = whole({k: v.double() if v.is_floating_point() else v for k, v in p.items()}, {})[0][6, 0]
    got = parallel.linear_log_prob(*call, vocab=V)[6, 0]
    assert (got.double() - exact).abs().max() <= 2e-6 * exact.abs().max() and exact.abs().min() < 1e-6
    torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-12)
    few = target[..., :0] if rank() == 0 else target
    refused(lambda: parallel.linear_log_prob(*call[:2], few, group()), "K >= 1" if rank() == 0 else "refused")
    few = target[..., : K - rank()]
    refused(lambda: parallel.linear_log_prob(*call[:2], few, group()), "must be the same")


def teacher(p):
    """Classes and log-probabilities of a teacher's 5 most likely ones; one row has fewer."""
    with torch.device("cpu"):
        g = torch.Generator().manual_seed(3)
        top = torch.randn(S, B, V, generator=g).log_softmax(-1).topk(5)
    log_prob, classes = top.values.clone(), top.indices
    log_prob[0, 0, 4] = -torch.inf
    device = p["target"].device
    return classes.to(device), log_prob.to(device)


def divergence(p, options, reverse):
    """The loss of the plain formulation."""
    classes, log_prob = teacher(p)
    counts = p["target"] != -100
    student = whole(p | {"target": torch.where(counts.unsqueeze(-1), classes, 0)}, options)[0]
    log_prob = log_prob.to(student.dtype)
    used = log_prob > -torch.inf
    s, t = (torch.where(used, x.exp(), 0.0) for x in (student, log_prob))
    s, t = (torch.cat([x, 1 - x.sum(-1, keepdim=True)], -1) for x in (s, t))
    p_, q = (s, t) if reverse else (t, s)
    rows = torch.where(p_ > 0, p_ * (p_.clamp(min=1e-30).log() - q.clamp(min=1e-30).log()), 0.0).sum(-1)
    hard = -formula(p, options | {"temperature": 1.0}, entropy=True)[0]
    return (torch.where(counts, rows, 0.0) + 0.5 * hard).sum() / counts.sum()


@case(forward=(False,), reverse=(True,))
def parallel_top_k(reverse):
    for dtype, sp, name in itertools.product((torch.float32, torch.bfloat16), (False, True), OPTIONS):
        options = OPTIONS[name]

        def ours(hidden, weight, target, group, **kwargs):
            return parallel.linear_kl_div(
                hidden, weight, teacher({"target": target}), group, labels=target, hard=0.5, **kwargs
            )

        def plain(p, options=options):
            return [divergence(p, options, reverse)]

        compare(problems(dtype, 43), options, "padded", sp, ours, plain, reverse=reverse)


@case
def parallel_top_k_options():
    """Beside one process's function; what one process gets wrong is an error in both."""
    p = problem(torch.float32, 44)
    given, weight = teacher(p), mine(p["weight"], "uneven")
    for options in (
        {"reduction": "none"},
        {"labels": p["target"], "reduction": "mean", "shift": 1},
        {"labels": p["target"], "denominator": 9.0, "token_weight": p["token_weight"], "softcap": 8.0},
        {"labels": p["target"], "outputs": ("loss", "soft", "hard", "entropy")},
    ):
        want = tigon.linear_kl_div(p["hidden"], p["weight"], given, **options)
        got = parallel.linear_kl_div(p["hidden"], weight, given, group(), **options)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    first = rank() == 0
    call = (p["hidden"], weight, given, group())
    refused(
        lambda: parallel.linear_kl_div(*call, soft=-1.0 if first else 1.0), "soft" if first else "refused"
    )
    refused(lambda: parallel.linear_kl_div(*call, reverse=first), "must be the same", "compared=")
    if device_type() == "cpu":  # numbers on a GPU are not compared, which would wait for it
        moved = (given[0], given[1] - rank())
        refused(lambda: parallel.linear_kl_div(p["hidden"], weight, moved, group()), "must be the same")
    logits = p["hidden"].new_zeros(S, B, V) if first else given
    refused(
        lambda: parallel.linear_kl_div(p["hidden"], weight, logits, group()),
        "teacher" if first else "refused",
    )
