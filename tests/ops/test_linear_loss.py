"""Streaming losses against the same function of plain PyTorch's log-probabilities."""

import pytest
import torch
from heads import compare, head_inputs, run

import tigon
from tigon.ops.loss_head.linear_log_prob import reference as log_prob_reference


def nll(log_prob):
    return -log_prob


def streamed(fn, **fixed):
    def call(hidden, weight, target, *tensors, **options):
        return tigon.linear_loss(hidden, weight, target, fn, *tensors, **fixed, **options)

    return call


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
        call(hidden, weight, target, lambda lp, old: lp - old, torch.zeros(11, device=device))


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
