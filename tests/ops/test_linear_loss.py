"""Streaming losses against the same function of plain PyTorch's log-probabilities."""

import itertools

import pytest
import torch
from heads import compare, head_inputs, run, widened
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tigon
from tigon.ops.loss_head.linear_log_prob import reference as log_prob_reference


def nll(log_prob):
    return -log_prob


def dft(log_prob):
    return -log_prob.detach().exp() * log_prob


def grpo(log_prob, old, advantage):
    ratio = torch.exp(log_prob - old)
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)


def entropy_bonus(log_prob, entropy, advantage):
    return -advantage * log_prob - 0.1 * entropy


def streamed(fn, **fixed):
    def call(hidden, weight, target, *tensors, **options):
        return tigon.linear_loss(hidden, weight, target, fn, *tensors, **fixed, **options)

    return call


def plain(fn, entropy=False):
    def call(hidden, weight, target, *tensors, reduction="mean", denominator=None, **options):
        statistics = log_prob_reference(hidden, weight, target, entropy=entropy, **options)
        statistics = statistics if entropy else (statistics,)
        counts = target != -100
        flat = [t.reshape(-1, *t.shape[target.dim() :]) for t in (*statistics, *tensors)]
        rows = torch.where(counts, fn(*flat).view(target.shape), 0.0)
        if denominator is not None:
            return rows.sum() / denominator
        if reduction == "none":
            return rows
        return rows.sum() / (counts.sum() if reduction == "mean" else 1)

    return call


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_combinations(data):
    draw = data.draw
    torch.manual_seed(draw(st.integers(0, 2**31), label="seed"))
    rows, h, v = draw(st.integers(1, 40)), draw(st.integers(1, 33)), draw(st.integers(2, 130))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    hidden, weight, target = head_inputs(rows, h, v, dtype=dtype, masked=draw(st.sampled_from([0.0, 0.4])))
    target[0] = 0
    fn = draw(st.sampled_from([nll, dft, grpo, entropy_bonus]))
    advantage = torch.randn(rows).requires_grad_(draw(st.booleans()))
    old = torch.randn(rows).mul(0.1).sub(2.0)
    tensors = {nll: (), dft: (), grpo: (old, advantage), entropy_bonus: (advantage,)}[fn]
    options = {
        "reduction": draw(st.sampled_from(["mean", "sum", "none"])),
        "denominator": draw(st.sampled_from([None, 5.0, torch.tensor(7)])),
        "temperature": draw(st.sampled_from([1.0, 0.6])),
        "softcap": draw(st.sampled_from([None, 5.0])),
        "bias": draw(st.sampled_from([None, torch.randn(v).to(dtype).requires_grad_()])),
        "chunk_rows": draw(st.sampled_from([None, 1, 7])),
    }
    entropy = fn is entropy_bonus
    if fn is grpo:  # its kinks must be taken the same way by all
        tensors = (log_prob_reference(*widened((hidden, weight)), target).detach().float() - 0.05, advantage)
    call = streamed(fn, entropy=entropy)
    args = (hidden, weight, target, *tensors)
    # A loss whose rows cancel is good to an ulp of float32 of what its rows add up to without their signs.
    rows = plain(fn, entropy)(*widened(args), **widened(options | {"reduction": "none", "denominator": None}))
    spread = rows.detach().abs().sum() / rows.detach().sum().abs().clamp(min=1e-30)
    eps = 16 * torch.finfo(dtype).eps
    compare(call, plain(fn, entropy), args, options, eps, float(spread) * torch.finfo(torch.float32).eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nll_is_cross_entropy(dtype, device):
    hidden, weight, target = head_inputs(40, 24, 61, dtype=dtype, device=device)
    for options in ({}, {"reduction": "sum"}, {"denominator": torch.tensor(9.0, device=device)}):
        got = run(streamed(nll), (hidden, weight, target), {**options, "chunk_rows": 16})
        want = run(tigon.linear_cross_entropy, (hidden, weight, target), {**options, "chunk_rows": 16})
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5 if dtype == torch.float32 else 2e-2, atol=1e-6)


@pytest.mark.parametrize("needs", list(itertools.product([False, True], repeat=4)))
def test_every_requires_grad_combination(needs, device):
    hidden, weight, target = head_inputs(20, device=device)
    tensors = (hidden, weight, torch.randn(20, device=device), torch.randn(40, device=device))
    results = []
    for call in (streamed(entropy_bonus, entropy=True, chunk_rows=6), plain(entropy_bonus, True)):
        h, w, a, b = (t.detach().clone().requires_grad_(n) for t, n in zip(tensors, needs, strict=True))
        loss = call(h, w, target, a, bias=b)
        assert loss.requires_grad == any(needs)
        if any(needs):
            (3 * loss).backward()
        results.append((loss.detach(), h.grad, w.grad, a.grad, b.grad))
    for a, b in zip(*results, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_what_fn_says_of_ignored_rows_is_dropped(device):
    hidden, weight, target = head_inputs(30, device=device)
    poison = torch.where(target == -100, float("nan"), 1.0)
    got = run(streamed(lambda lp, p: -lp * p, chunk_rows=9), (hidden, weight, target, poison), {})
    want = run(tigon.linear_cross_entropy, (hidden, weight, target), {})
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_exported_and_planned(device):
    """Without numbers to count and to stream: by autograd."""
    hidden, weight, target = (t.detach() for t in head_inputs(30, device=device))

    class Loss(torch.nn.Module):
        def forward(self, hidden, weight):
            return tigon.linear_loss(hidden, weight, target, nll)

    exported = torch.export.export(Loss(), (hidden, weight)).module()
    torch.testing.assert_close(exported(hidden, weight), Loss()(hidden, weight))
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        loss = Loss()(*(mode.from_tensor(t).requires_grad_() for t in (hidden, weight)))
        assert loss.requires_grad and loss.shape == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_all_rows_masked(dtype, device):
    hidden, weight, target = head_inputs(dtype=dtype, device=device, masked=1.0)
    for options, want in (({}, float("nan")), ({"reduction": "sum"}, 0.0), ({"denominator": 3.0}, 0.0)):
        for valid in (None, 0):
            loss, dh, dw = run(streamed(nll), (hidden, weight, target), {**options, "valid_rows": valid})
            assert loss.isnan() if want != want else loss == want
            assert torch.count_nonzero(dh) == 0 and torch.count_nonzero(dw) == 0


def test_refusals(device):
    hidden, weight, target = head_inputs(device=device, masked=0.0)
    call = tigon.linear_loss
    with pytest.raises(tigon.Error, match=r"fn must return one loss per row, a tensor \[12\], got \[\]"):
        call(hidden, weight, target, lambda lp: lp.mean())
    with pytest.raises(tigon.Error, match=r"fn must return one loss per row, a tensor \[12\], got float"):
        call(hidden, weight, target, lambda lp: 1.0)
    with pytest.raises(tigon.Error, match=r"tensors must be \[12\] or longer, got \[11\]"):
        call(hidden, weight, target, grpo, torch.zeros(11, device=device))
    outside = torch.ones((), device=device, requires_grad=True)
    with pytest.raises(tigon.Error, match="fn must take tensors that need a gradient as arguments"):
        call(hidden, weight, target, lambda lp: -lp * outside)


def gspo(log_prob, old, advantage, mask):
    length = mask.sum(-1).clamp(min=1)
    ratio = ((log_prob - old) * mask).sum(-1).div(length).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(0.9, 1.1) * advantage)


def dpo(log_prob, ref):
    chosen, rejected = log_prob.sum(-1) - ref
    return -torch.nn.functional.logsigmoid(0.3 * (chosen - rejected))


def dpo_with_entropy(log_prob, entropy, ref):
    return dpo(log_prob, ref) - 0.05 * entropy.sum((0, -1))


def grouped(group, fn, entropy):
    """The same of plain PyTorch's log-probabilities of all rows."""

    def call(hidden, weight, target, *tensors, reduction="mean", denominator=None, **options):
        statistics = log_prob_reference(hidden, weight, target, entropy=entropy, **options)
        statistics = statistics if entropy else (statistics,)
        seen = [*statistics, *tensors]
        if group == "pair":
            seen = [t.view(2, t.shape[0] // 2, *t.shape[1:]) for t in seen]
        values = fn(*seen)
        if denominator is not None:
            return values.sum() / denominator
        return values if reduction == "none" else values.sum() / (len(values) if reduction == "mean" else 1)

    return call


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chunk_rows", [None, 25, 4])  # all groups, some, none fits
@pytest.mark.parametrize("kind", ["sequence", "pair", "pair_entropy"])
def test_groups(kind, chunk_rows, dtype, device):
    group, entropy = kind.split("_")[0], kind.endswith("entropy")
    hidden, weight, target = head_inputs((6, 9), device=device, dtype=dtype, masked=0.4)
    target[4] = -100
    old = torch.randn(6, 9, device=device).mul(0.1).sub(3.0)
    advantage = torch.randn(6, device=device).requires_grad_()
    if group == "sequence":
        fn, tensors = gspo, (old, advantage, (target != -100).float())
    else:
        fn, tensors = dpo_with_entropy if entropy else dpo, (advantage,)
    for options in ({"reduction": "sum"}, {}, {"denominator": 2.5}, {"reduction": "none"}):
        ours = streamed(fn, group=group, entropy=entropy, chunk_rows=chunk_rows)
        compare(
            ours,
            grouped(group, fn, entropy),
            (hidden, weight, target, *tensors),
            options,
            noise=16 * torch.finfo(dtype).eps,
        )


def test_groups_of_one_row_are_rows(device):
    hidden, weight, target = head_inputs((11, 1), device=device, masked=0.3)
    row_results = run(streamed(nll, reduction="sum"), (hidden, weight, target), {})
    whole = streamed(lambda l: -l[:, 0], group="sequence", reduction="sum")
    grouped_results = run(whole, (hidden, weight, target), {})
    for a, b in zip(row_results, grouped_results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_groups_without_labels(device):
    hidden, weight, target = head_inputs((4, 5), device=device, masked=1.0)
    loss, *grads = run(
        streamed(dpo, group="pair"), (hidden, weight, target, torch.zeros(4, device=device)), {}
    )
    torch.testing.assert_close(loss, torch.full_like(loss, 2.0).log())
    assert all(torch.count_nonzero(g) == 0 for g in grads)
    none = tigon.linear_loss(
        hidden[:0], weight, target[:0], lambda l: -l.sum(-1), group="sequence", reduction="sum"
    )
    assert none == 0


def test_counts_of_sequences_change_nothing(device):
    hidden, weight, target = head_inputs((8, 7), device=device, masked=0.5)
    ref = torch.zeros(8, device=device)
    found = []
    for known in (False, True):
        labels = target.clone()
        if known:
            tigon.count_labels(labels, per_sequence=True)
            if device == "cuda":
                torch.cuda.synchronize()
        found.append(run(streamed(dpo, group="pair", chunk_rows=28), (hidden, weight, labels, ref), {}))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_refusals_of_groups(device):
    hidden, weight, target = head_inputs((4, 5), device=device)
    cases = [
        ({"group": "batch"}, "group must be one of"),
        ({"group": "pair", "rows": 3}, "target must have chosen and rejected answers"),
        ({"group": "sequence", "flat": True}, "target must be \\[B, T\\] with group"),
        ({"group": "sequence", "fn": nll}, "fn must return one loss per group"),
    ]
    for options, message in cases:
        x, y = hidden[: options.get("rows", 4)], target[: options.get("rows", 4)]
        if "flat" in options:
            x, y = x.flatten(0, 1), y.flatten()
        with pytest.raises(tigon.Error, match=message):
            tigon.linear_loss(x, weight, y, options.get("fn", lambda l: -l.sum(-1)), group=options["group"])
    with pytest.raises(tigon.Error, match="tensors must be"):
        tigon.linear_loss(hidden, weight, target, dpo, torch.zeros(2, device=device), group="pair")
    with pytest.raises(tigon.Error, match="target must be"):
        tigon.count_labels(target.flatten(), per_sequence=True)
