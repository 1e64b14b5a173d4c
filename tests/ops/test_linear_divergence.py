"""linear_kl_div, linear_jsd, linear_tvd: what the case list does not say."""

import functools

import pytest
import torch
from checks import same_bits
from heads import compare, head_inputs, run

import tigon
from cases.divergence import row_terms

FORMS = {
    "kl": (tigon.linear_kl_div, {}),
    "reverse": (tigon.linear_kl_div, {"reverse": True}),
    "jsd": (tigon.linear_jsd, {"beta": 0.3}),
    "tvd": (tigon.linear_tvd, {}),
}
every_form = pytest.mark.parametrize("form", FORMS)


def heads(rows=12, h=16, ht=24, v=40, *, dtype=torch.float32, device="cpu", masked=0.25):
    """Student's hidden states and weight, teacher's, labels."""
    hidden = torch.randn(rows, h).to(device, dtype).requires_grad_()
    weight = torch.randn(v, h).mul(0.5).to(device, dtype).requires_grad_()
    teacher = (torch.randn(rows, ht).to(device, dtype), torch.randn(v, ht).mul(0.5).to(device, dtype))
    labels = torch.randint(0, v, (rows,))
    labels[torch.rand(rows) < masked] = -100
    return hidden, weight, teacher, labels.to(device)


@every_form
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_never_negative_and_zero_for_equal_heads(form, dtype, device):
    fn, options = FORMS[form]
    hidden, weight, teacher, _ = heads(64, v=1031, dtype=dtype, device=device)
    near = (hidden.detach().float(), weight.detach().float() + 1e-4 * torch.randn_like(weight.float()))
    for other in (teacher, near):
        rows = fn(hidden, weight, other, reduction="none", **options)
        assert (rows >= (0.0 if other is teacher else -2e-7)).all()
    out = fn(hidden, weight, (hidden, weight), outputs=("loss", "soft", "entropy"), **options)
    assert not out.soft.any()
    assert (out.entropy >= 0).all() and (out.entropy <= 6.9383).all()
    for gradient in torch.autograd.grad(out.loss, (hidden, weight)):
        assert gradient.abs().max() < 1e-6


def test_beta_0_and_1_are_the_kls(device):
    args = heads(device=device)
    for beta, reverse in ((0.0, False), (1.0, True)):
        a = run(tigon.linear_jsd, args, {"beta": beta})
        for x, y in zip(a, run(tigon.linear_kl_div, args, {"reverse": reverse}), strict=True):
            assert torch.equal(x, y)


def test_outputs_are_named_and_detached(device):
    hidden, weight, teacher, labels = heads(device=device)
    out = tigon.linear_jsd(
        hidden, weight, teacher, labels, hard=0.5, soft=2.0, outputs=("loss", "entropy", "hard", "soft")
    )
    assert out._fields == ("loss", "entropy", "hard", "soft")
    assert out.loss.requires_grad and not (out.soft.requires_grad or out.hard.requires_grad)
    counts = labels != -100
    torch.testing.assert_close(out.loss.detach(), (2 * out.soft + 0.5 * out.hard).sum() / counts.sum())
    assert not out.soft[~counts].any() and not out.entropy[~counts].any()


def test_teacher_gets_no_gradient(device):
    hidden, weight, teacher, _ = heads(device=device)
    states, other = (t.requires_grad_() for t in teacher)
    tigon.linear_kl_div(hidden, weight, (states, other)).backward()
    assert states.grad is None and other.grad is None and weight.grad is not None


def test_tied_weight(device):
    """A student's weight that is its teacher's too gets the student's gradient."""
    hidden, weight, teacher, _ = heads(ht=16, device=device)
    a = torch.autograd.grad(tigon.linear_kl_div(hidden, weight, (teacher[0], weight)), weight)
    b = torch.autograd.grad(
        tigon.linear_kl_div(hidden, weight, (teacher[0], weight.detach().clone())), weight
    )
    assert torch.equal(a[0], b[0])


@pytest.mark.parametrize("shorter", ["student", "teacher"])
def test_padding_takes_no_part(shorter, device):
    """Classes of one side alone change nothing and get a gradient of exactly 0."""
    hidden, weight, teacher, labels = heads(device=device, v=37)
    wanted = run(tigon.linear_jsd, (hidden, weight, teacher, labels), {"hard": 0.5, "chunk_rows": 5})
    more = torch.full((3, 24), 7.0, device=device)
    if shorter == "student":
        got = run(
            tigon.linear_jsd,
            (hidden, weight, (teacher[0], torch.cat((teacher[1], more))), labels),
            {"hard": 0.5, "chunk_rows": 5},
        )
    else:
        longer = torch.cat((weight.detach(), more[:, :16])).requires_grad_()
        got = run(tigon.linear_jsd, (hidden, longer, teacher, labels), {"hard": 0.5, "chunk_rows": 5})
        assert not got[-1][37:].any()
        got[-1] = got[-1][:37]
    for a, b in zip(got, wanted, strict=True):
        assert torch.equal(a, b)


def _bad(**changes):
    hidden, weight, teacher, labels = heads()
    call = {"hidden": hidden, "weight": weight, "teacher": teacher, "labels": labels} | changes
    return [call.pop(name) for name in ("hidden", "weight", "teacher", "labels")], call


_, _, T, _ = heads()
BAD = {
    "teacher": ({"teacher": (T[0],)}, "teacher must be logits, or .*, got 1"),
    "teacher's kind": ({"teacher": 3}, "teacher must be logits, or .*got int"),
    "rows": ({"teacher": (T[0][:5], T[1])}, r"teacher_hidden must be \[12\] and then H, got \[5, 24\]"),
    "size": ({"teacher": (T[0], T[1][:, :5])}, r"teacher_weight must be \[V, 24\], got \[40, 5\]"),
    "bias": ({"teacher": (*T, T[0][0])}, r"teacher_bias must be \[40\], got \[24\]"),
    "labels": ({"teacher": (T[0], T[1][:9]), "labels": torch.full((12,), 20)}, "labels must be in .0, 9. or"),
    "no labels": ({"labels": None, "hard": 0.5}, "labels must be given for the hard loss, got None"),
    "no labels to shift": ({"labels": None, "shift": True}, "labels must be given with shift=True, got None"),
}


@pytest.mark.parametrize("changes, message", BAD.values(), ids=BAD)
def test_bad_input_is_refused(changes, message):
    args, options = _bad(**changes)
    with pytest.raises(tigon.Error, match=rf"^\[linear_\w+\] .*{message}"):
        tigon.linear_kl_div(*args, **options)


def _of_candidates(name, options):
    """The same from logits in plain PyTorch: K candidates and the rest of the mass."""

    def call(hidden, weight, log_prob, *, indices, labels, hard=0.0, temperature=1.0):
        z = torch.nn.functional.linear(hidden, weight)
        z = z if z.dtype == torch.float64 else z.float()
        counts = labels != -100
        inside = log_prob > -1e4
        student_log_prob = torch.log_softmax(z / temperature, -1).gather(-1, indices)
        both = []
        for t in (student_log_prob, log_prob.to(student_log_prob)):
            t = torch.where(inside, t, -1e4)
            both.append(torch.cat((t, torch.log(-torch.expm1(t.logsumexp(-1, keepdim=True)))), -1))
        s, t = both
        rows = row_terms(s, t, name, options.get("reverse", False), options.get("beta", 0.0))
        nll = -torch.log_softmax(z, -1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        return torch.where(counts, rows + hard * nll, 0.0).sum() / counts.sum()

    return call


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("kl_div", {}),
        ("kl_div", {"reverse": True}),
        ("jsd", {"beta": 0.3}),
        ("jsd", {"beta": 1.0}),
        ("tvd", {}),
    ],
)
def test_candidates_of_a_teacher(name, options, dtype, device):
    torch.manual_seed(2)
    hidden, weight, labels = head_inputs(11, h=16, v=60, dtype=dtype, device=device, scale=2.0)
    teacher = torch.log_softmax(torch.randn(11, 60, device=device) * 2, -1)
    log_prob, indices = teacher.topk(7)
    log_prob[3, 5:] = -torch.inf
    fn = getattr(tigon, f"linear_{name}")

    def ours(hidden, weight, log_prob, *, indices, labels, **more):
        return fn(hidden, weight, (indices, log_prob), labels, **options, **more)

    compare(
        ours,
        _of_candidates(name, options),
        (hidden, weight, log_prob),
        {"indices": indices, "labels": labels, "hard": 0.3, "temperature": 1.4},
        noise=8 * torch.finfo(dtype).eps,
    )


@pytest.mark.parametrize("ignore_index", [0, 5, -1, -(2**63)])
@pytest.mark.parametrize("name", ["kl_div", "jsd", "tvd"])
def test_a_candidate_may_be_the_ignored_label(name, ignore_index, device):
    """It says which rows do not count, and nothing of the teacher's classes."""
    hidden, weight, labels = head_inputs(11, h=16, v=12, device=device, scale=2.0)
    labels[labels == ignore_index] = 7
    teacher = torch.log_softmax(torch.randn(11, 12, device=device), -1)
    log_prob, indices = teacher.topk(8)
    log_prob[3], log_prob[4, 2:] = -torch.inf, -torch.inf  # no candidate, two
    fn = getattr(tigon, f"linear_{name}")
    options = {"hard": 0.3, "outputs": ("loss", "soft", "hard", "entropy")}

    def ours(ignored):
        leaves = [t.detach().requires_grad_() for t in (hidden, weight)]
        where = labels.masked_fill(labels == labels[1], ignored)
        got = fn(*leaves, (indices, log_prob), where, ignore_index=ignored, **options)
        return *got, *torch.autograd.grad(got.loss, leaves)

    want = ours(-100)
    assert want[3][3] > 0 and want[3][1] == 0
    for a, b in zip(ours(ignore_index), want, strict=True):
        assert torch.equal(a, b)


def test_candidates_of_another_kind(device):
    """NaN is no missing candidate, and a denominator's dtype is not the loss'."""
    hidden, weight, labels = head_inputs(5, h=16, v=12, device=device)
    log_prob, indices = torch.log_softmax(torch.randn(5, 12, device=device), -1).topk(3)
    seven = torch.tensor(7.0, dtype=torch.float64, device=device)
    loss = tigon.linear_kl_div(hidden, weight, (indices, log_prob), labels, denominator=seven)
    assert loss.dtype == torch.float32
    log_prob[2, 1] = torch.nan
    rows = tigon.linear_kl_div(hidden, weight, (indices, log_prob), reduction="none")
    assert rows.isnan().tolist() == [False, False, True, False, False]


def test_candidates_of_little_mass(device):
    """What is beside them is nearly 1, whose logarithm keeps its digits."""
    hidden, weight, _ = head_inputs(50, h=16, v=2000, device=device, scale=0.1)
    logits = hidden.double() @ weight.double().T
    log_prob, indices = torch.log_softmax(logits + 0.05 * torch.randn_like(logits), -1).topk(2)

    def rows(dtype):
        given = hidden.to(dtype), weight.to(dtype), (indices, log_prob.to(dtype))
        return tigon.linear_kl_div(*given, reduction="none")

    wanted = rows(torch.float64)
    assert (rows(torch.float32) - wanted).abs().max() < 1e-3 * wanted.mean()


def test_candidates_of_more_than_all_mass(device):
    """A teacher's rounded numbers may sum to more than 1; a divergence is not negative."""
    hidden, weight, _ = head_inputs(50, h=16, v=12, device=device, scale=2.0)
    log_prob, indices = torch.log_softmax(hidden @ weight.T, -1).topk(12)
    log_prob = log_prob * (1 - 0.01 * torch.rand_like(log_prob))
    for fn in (tigon.linear_kl_div, tigon.linear_jsd, tigon.linear_tvd):
        rows = fn(hidden, weight, (indices, log_prob), reduction="none")
        assert ((rows > -1e-6) & (rows < 0.01)).all()


def test_candidates_as_in_trl(device):
    """TRL's own divergence of a support with a tail."""
    loss_utils = pytest.importorskip("trl.experimental.sdft.loss_utils")
    server = pytest.importorskip("trl.experimental.iw_opd.iw_opd_trainer")
    hidden, weight, _ = head_inputs(9, h=16, v=60, device=device, scale=2.0)
    log_prob, indices = torch.log_softmax(torch.randn(9, 60, device=device) * 2, -1).topk(5)
    student = torch.log_softmax(hidden @ weight.T, -1).gather(-1, indices)
    s, t = (loss_utils.add_tail_bucket(x) for x in (student, log_prob))
    for beta in (0.0, 0.5, 1.0):
        theirs = server._jsd_divergence(s, t, beta).sum(-1)
        ours = tigon.linear_jsd(hidden, weight, (indices, log_prob), beta=beta, reduction="none")
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_refusals_of_candidates(device):
    hidden, weight, labels = head_inputs(6, h=16, v=40, device=device)
    log_prob, indices = torch.log_softmax(torch.randn(6, 40, device=device), -1).topk(3)
    for teacher, options, message in (
        ((indices[:5], log_prob), {}, "teacher indices must be"),
        ((indices, log_prob[:, :2]), {}, "teacher log_prob must be"),
        ((indices, log_prob), {"teacher_softcap": 3.0}, "teacher_softcap and teacher_logit_scale"),
        ((indices, log_prob), {"valid_rows": -1}, "valid_rows must be in "),
    ):
        with pytest.raises(tigon.Error, match=message):
            tigon.linear_kl_div(hidden, weight, teacher, labels, **options)
    call = functools.partial(tigon.linear_kl_div, hidden, weight, (indices, log_prob), labels)
    if device == "cpu":
        with pytest.raises(tigon.Error, match="valid_rows must be the number of labels that count, "):
            call(valid_rows=3)
    else:  # all rows are computed
        assert same_bits(call(valid_rows=3), call())
    named = tigon.linear_kl_div(
        hidden, weight, (indices, log_prob), labels, outputs=("loss", "soft", "entropy")
    )
    assert named.soft.shape == named.entropy.shape == labels.shape
