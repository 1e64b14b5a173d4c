"""drafter_loss: what the case list does not say."""

import itertools

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import tigon
from conftest import allocations

B, T, H, HT, V, VT = 2, 9, 16, 24, 40, 96
LOSSES = ("ce", "kl", "hard", "tv", "lk")
OUTPUTS = ("loss", "acceptance")


def inputs(steps=1, *, dtype=torch.float32, device="cpu"):
    """Hidden states of each step, the draft's weight, the teacher, the draft's ids."""
    hidden = [torch.randn(B, T, H).to(device, dtype).requires_grad_() for _ in range(steps)]
    weight = torch.randn(V, H).mul(0.5).to(device, dtype).requires_grad_()
    teacher = (torch.randn(B, T, HT).to(device, dtype), torch.randn(VT, HT).mul(0.5).to(device, dtype))
    return hidden, weight, teacher, torch.randperm(VT)[:V].to(device)


def gradients(loss, hidden, weight):
    return torch.autograd.grad(loss, (*hidden, weight))


def close(got, want):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6)


def long_inputs(steps, rows=3000, h=8, v=700, vt=1100):
    """More rows than a chunk has, and the draft's ids."""
    hidden = torch.randn(rows, steps, h).requires_grad_()
    weight = torch.randn(v, h).requires_grad_()
    return hidden, weight, (torch.randn(rows, h), torch.randn(vt, h)), torch.randperm(vt)[:v]


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("loss", ["kl", "lk"])
def test_no_logits_of_all_rows(loss, steps, reduction):
    """No block of memory holds the logits of all rows, of either side; everything together takes less too."""
    hidden, weight, teacher, ids = long_inputs(steps)
    options = {"loss": loss, "reduction": reduction, "outputs": OUTPUTS}

    def call(**more):
        out = tigon.drafter_loss(hidden, weight, teacher, ids, **options, **more)
        torch.autograd.grad(out.loss.sum(), (hidden, weight))

    call()
    logits = 4 * len(hidden) * len(weight)
    assert max(allocations(call)) < logits
    assert max(itertools.accumulate(allocations(lambda: call(chunk_rows=256)))) < logits / 2


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("chunk_rows", [None, 500])
def test_one_matmul_of_the_teacher(steps, reduction, chunk_rows):
    """Whatever the steps, and forward and backward together: each row of the teacher is multiplied once."""
    hidden, weight, teacher, ids = long_inputs(steps)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as prof:
        loss = tigon.drafter_loss(
            hidden, weight, teacher, ids, loss="lk", reduction=reduction, chunk_rows=chunk_rows
        )
        torch.autograd.grad(loss, (hidden, weight))
    shapes = [event.input_shapes for event in prof.events() if event.name == "aten::mm"]
    of_teacher = [a[0] for a, b, *_ in shapes if b[1] == len(teacher[1])]
    of_draft = [a[0] for a, b, *_ in shapes if b[1] == len(weight) and a[1] == hidden.shape[-1]]
    assert sum(of_teacher) == len(hidden) and sum(of_draft) == steps * len(hidden)
    assert not any(len(teacher[1]) in a for a, *_ in shapes), "no gradient of the teacher"
    assert len(of_teacher) > 1


def test_a_list_of_steps_is_their_stack(device):
    hidden, weight, teacher, ids = inputs(3, device=device)
    options = {"loss": "lk", "shifts": (0, 2, 4), "chunk_rows": 9, "outputs": OUTPUTS}
    got = tigon.drafter_loss(hidden, weight, teacher, ids, **options)
    want = tigon.drafter_loss(torch.stack(hidden, 2), weight, teacher, ids, **options)
    close(got, want)
    close(gradients(got.loss, hidden, weight), gradients(want.loss, hidden, weight))


def test_a_draft_that_is_the_teacher_is_accepted(device):
    """The same head: every token is accepted, and the losses of two distributions are 0."""
    states = torch.randn(B, T, H).to(device).requires_grad_()
    weight = torch.randn(V, H).to(device).requires_grad_()
    for loss in ("kl", "tv", "lk"):
        out = tigon.drafter_loss(states, weight, (states, weight), loss=loss, outputs=OUTPUTS)
        torch.testing.assert_close(out.acceptance, torch.ones_like(out.acceptance), rtol=1e-6, atol=1e-6)
        assert out.loss.abs() < 1e-6
        if loss == "kl":  # the others' has a jump there
            assert all(g.abs().max() < 1e-6 for g in gradients(out.loss, [states], weight))


def test_dtypes_of_the_parts(device):
    """Gradients have the dtypes of what they are of; a teacher of another dtype is converted."""
    hidden, weight, teacher, ids = inputs(device=device)
    with torch.autocast(device, torch.bfloat16):
        loss = tigon.drafter_loss(hidden, weight, tuple(t.double() for t in teacher), ids, mask_outside=False)
    assert [g.dtype for g in gradients(loss, hidden, weight)] == [torch.float32] * 2
    exact = tigon.drafter_loss(hidden, weight, teacher, ids, mask_outside=False)
    torch.testing.assert_close(loss, exact, rtol=0.02, atol=0.02)


def test_speculators(device):
    """The losses of speculators, which renormalizes and keeps every position of its mask."""
    eager = pytest.importorskip("speculators.losses.eager")
    hidden, weight, teacher, ids = inputs(device=device)
    mask = torch.rand(B, T).to(device) < 0.7
    options = {"mask": mask, "outside": "renormalize", "mask_outside": False}
    names = {"kl": "kl_div_loss", "hard": "ce_loss", "tv": "tv_loss", "lk": "lk_hybrid_loss"}
    for loss, name in names.items():
        got = tigon.drafter_loss(hidden, weight, teacher, ids, loss=loss, **options)
        logits, targets = hidden[0] @ weight.t(), (teacher[0] @ teacher[1].t())[..., ids]
        want = (getattr(eager, name)(logits, targets) * mask).sum() / mask.sum()
        close((got, *gradients(got, hidden, weight)), (want, *gradients(want, hidden, weight)))


def test_specforge(device):
    """SpecForge's EAGLE-3: cross-entropy over all positions, and its acceptance rate of a full softmax."""
    lk, compact = (pytest.importorskip(f"specforge.core.{name}") for name in ("lk_loss", "compact_teacher"))
    hidden, weight, teacher, _ = inputs(device=device)
    t2d = torch.zeros(VT, dtype=torch.bool, device=device)
    t2d[torch.randperm(VT)[:V]] = True
    mask = torch.rand(B, T).to(device) < 0.7
    got = tigon.drafter_loss(
        hidden,
        weight,
        teacher,
        t2d.nonzero().flatten(),
        loss="ce",
        mask=mask,
        denominator=B * T,
        outputs=OUTPUTS,
    )
    p, p_full, _, counts = compact.compute_target_from_hidden(*teacher, t2d, mask[..., None].int())
    logits = hidden[0] @ weight.t()
    want = -(counts * p * torch.log_softmax(logits, -1)).sum(2).mean()
    close((got.loss, *gradients(got.loss, hidden, weight)), (want, *gradients(want, hidden, weight)))
    rate, _ = lk.compute_acceptance_rate(logits=logits, target_probs=p_full, position_mask=counts)
    close((got.acceptance[0],), (rate.detach(),))


HIDDEN, WEIGHT, TEACHER, IDS = inputs()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"teacher": TEACHER[0]}, r"teacher must be \(hidden, weight\)"),
        ({"teacher": (TEACHER[0][:1], TEACHER[1])}, r"hidden must be \[1, 9\] and then H"),
        (
            {"teacher": (TEACHER[0], TEACHER[1][:, :5])},
            r"teacher must be \[\.\.\., T, H_t\] and \[V_t, H_t\]",
        ),
        ({"draft_ids": None}, "weight must have the teacher's 96 classes where draft_ids is None, got 40"),
        ({"draft_ids": IDS + VT}, "draft_ids must be below the teacher's 96 classes"),
        ({"draft_ids": IDS * 0}, "draft_ids must be different classes"),
        ({"hidden": []}, "hidden must be a tensor, or a tensor for each step"),
        ({"hidden": [HIDDEN[0], HIDDEN[0].double()]}, "hidden must be"),
        ({"shifts": [0, 1]}, "shifts must be one for each of 1 steps, got 2"),
        ({"shifts": [-1]}, "shifts must be >= 0"),
        ({"step_weights": [1.0, 2.0]}, "step_weights must be one for each of 1 steps"),
        ({"valid_rows": 3}, "valid_rows must be the number of labels"),
    ],
)
def test_bad_calls(changed, message):
    options = {"hidden": HIDDEN, "weight": WEIGHT, "teacher": TEACHER, "draft_ids": IDS} | changed
    with pytest.raises(tigon.Error, match=rf"^\[drafter_loss\] {message}"):
        tigon.drafter_loss(**options)
