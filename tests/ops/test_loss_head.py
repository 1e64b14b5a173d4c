"""The features of the fused loss head: rows left out, outputs, weights of tokens, LoRA, main_grad."""

import itertools
import random

import pytest
import torch
from checks import same_bits
from heads import compare, head_inputs, run

import tigon
from tigon.ops.loss_head import autograd, operands
from tigon.ops.loss_head import plan as head_plan
from tigon.ops.loss_head.linear_cross_entropy import OUTPUTS, reference
from tigon.ops.policy import PolicyFormula
from tigon.ops.preference import PreferenceFormula

LOSS = tigon.linear_cross_entropy
ALL = {"outputs": OUTPUTS}


def _count(target):
    return int((target != -100).sum())


# Rows that count


def test_left_out_rows_of_hidden_are_not_read(device):
    hidden, weight, target = head_inputs(40, masked=0.6, device=device)
    broken = hidden.detach().clone()
    broken[target == -100] = float("nan")
    broken.requires_grad_()
    want = run(LOSS, (hidden, weight, target), {"valid_rows": _count(target)})
    got = run(LOSS, (broken, weight, target), {"valid_rows": _count(target)})
    assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("off", [-5, -1, 1, 5])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignore_index", [-100, -1, 0])
def test_a_wrong_count_is_nan_on_cuda(off, reduction, ignore_index):
    hidden, weight, target = head_inputs(50, masked=0.4, device="cuda")
    target[target == 0] = 1
    target[target == -100] = ignore_index
    count = int((target != ignore_index).sum()) + off
    options = {"valid_rows": count, "reduction": reduction, "ignore_index": ignore_index}
    assert LOSS(hidden, weight, target, **options).isnan().all()
    lp = tigon.linear_log_prob(hidden, weight, target, valid_rows=count, ignore_index=ignore_index)
    assert lp.isnan().all()
    if reduction != "none":
        streamed = tigon.linear_loss(
            hidden,
            weight,
            target,
            lambda lp: torch.nan_to_num(-lp),
            valid_rows=count,
            ignore_index=ignore_index,
        )
        assert streamed.isnan()


@pytest.mark.gpu
@pytest.mark.parametrize("promise", [0, 3])
def test_a_wrong_count_at_the_ends_is_nan_on_cuda(promise):
    hidden, weight, target = head_inputs(20, masked=0.0 if promise == 0 else 1.0, device="cuda")
    assert LOSS(hidden, weight, target, valid_rows=promise, reduction="sum").isnan()


@pytest.mark.parametrize("rows", [0, 1, 31, 33, 1000, 1025, 40_000])
def test_list_of_rows(rows, device):
    target = torch.randint(0, 9, (rows,), device=device)
    target[torch.rand(rows, device=device) < 0.7] = -100
    want = (target != -100).nonzero().view(-1)
    index, labels, fault = torch.ops.tigon.linear_loss_rows(target, -100, want.numel())
    assert torch.equal(index, want) and torch.equal(labels, target[want]) and fault == 0
    for count in {max(want.numel() - 1, 0), want.numel() + 1} - {want.numel()}:
        index, labels, fault = torch.ops.tigon.linear_loss_rows(target, -100, count)
        assert fault.isnan() and (labels < 0).all() and (labels != -100).all() and (index >= 0).all()


@pytest.mark.gpu
def test_count_labels_is_used():
    from tigon.ops.loss_head.labels import counted

    hidden, weight, target = head_inputs((4, 30), masked=0.6, device="cuda")
    tigon.count_labels(target)
    tigon.count_labels(target, shift=True)
    assert counted(target, -100, False) == _count(target) == counted(target.view(-1), -100, False)
    assert counted(target, -100, True) == _count(target[:, 1:])
    assert counted(target, 0, False) == -1 and counted(target[:, 1:], -100, False) == -1
    want = run(LOSS, (hidden, weight, target), {"valid_rows": _count(target)})
    got = run(LOSS, (hidden, weight, target), {})
    assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))
    target[0, 0] = 1  # another version
    assert counted(target, -100, False) == -1


class _OnItsWay:
    """The event of a count that has arrived by chance."""

    def __init__(self, pinned=None, count=0):
        self.pinned, self.count = pinned, count

    def synchronize(self):
        if self.pinned is not None:
            self.pinned.fill_(self.count)

    def query(self):
        if random.random() < 0.5:
            return False
        self.synchronize()
        return True


@pytest.mark.parametrize("per_sequence", [False, True])
def test_a_count_on_its_way_is_waited_for(monkeypatch, per_sequence):
    """Which rows are computed does not depend on how far the device is."""
    from tigon.ops.loss_head import labels

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    found = set()
    for _ in range(100):
        target = torch.randint(0, 9, (2, 6))
        pinned = torch.full((2,) if per_sequence else (), -7)
        labels._counts[target] = {(-100, 1): (target._version, _OnItsWay(pinned, 5), pinned)}
        found.add(labels.counted(target, -100, True))
    assert found == {10 if per_sequence else 5}


def test_what_count_labels_remembers(monkeypatch):
    from tigon.ops.loss_head import labels

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    target = torch.randint(0, 9, (2, 6))
    labels._counts[target] = {(-100, False): (target._version, _OnItsWay(), torch.tensor(12))}
    assert labels.counted(target, -100, False) == 12 == labels.counted(target.view(-1), -100, False)
    assert labels.counted(target, -100, True) == labels.counted(target, 0, False) == -1
    assert labels.counted(target[:1], -100, False) == labels.counted(target.clone(), -100, False) == -1
    assert labels.counted(target.t(), -100, False) == -1  # of other sequences
    target[0, 0] = 3
    assert labels.counted(target, -100, False) == -1  # modified
    kept = len(labels._counts)
    del target
    assert len(labels._counts) == kept - 1


def test_count_labels_on_the_cpu_does_nothing():
    target = torch.randint(0, 9, (5,))
    assert tigon.count_labels(target) is None
    with pytest.raises(tigon.Error, match="target must be an integer tensor"):
        tigon.count_labels(torch.zeros(3))


# Outputs, temperature, weights of tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_outputs_temperature_and_token_weights(dtype, softcap, device):
    hidden, weight, target = head_inputs((3, 11), 16, 67, dtype=dtype, device=device, scale=3.0)
    for reduction, denominator in (("mean", None), ("sum", None), ("none", None), ("mean", 7.0)):
        options = {"temperature": 0.6, "softcap": softcap, "logit_scale": 0.7, "z_loss": 1e-2}
        options |= {"token_weight": torch.rand(3, 11, device=device) * 2, "reduction": reduction}
        options |= {"denominator": denominator, "chunk_rows": 8}
        noise = 4 * torch.finfo(dtype).eps
        compare(LOSS, reference, (hidden, weight, target), options, noise)
        with torch.no_grad():
            got = LOSS(hidden, weight, target, **options, **ALL)
            want = reference(hidden, weight, target, **options, **ALL)
        assert got._fields == OUTPUTS and not got.log_prob.requires_grad
        for name in ("log_prob", "lse", "entropy", "z_loss"):
            close = {"rtol": 2e-5, "atol": 2e-5} if dtype == torch.float32 else {"rtol": 3e-2, "atol": 5e-2}
            torch.testing.assert_close(getattr(got, name), getattr(want, name), **close)
            assert (getattr(got, name)[target == -100] == 0).all()
        if dtype == torch.float32:
            assert torch.equal(got.predicted, want.predicted) and torch.equal(got.correct, want.correct)
        assert (got.predicted[target == -100] == -1).all() and not got.correct[target == -100].any()


def test_each_output_alone_is_that_of_all(device):
    hidden, weight, target = head_inputs(30, device=device)
    everything = LOSS(hidden, weight, target, **ALL)
    plain = LOSS(hidden, weight, target)
    assert same_bits(plain, everything.loss)
    for name in OUTPUTS[1:]:
        pair = LOSS(hidden, weight, target, outputs=("loss", name))
        assert pair._fields == ("loss", name) and same_bits(pair.loss, plain) and pair.loss.requires_grad
        torch.testing.assert_close(pair[1], getattr(everything, name))


def test_correct_where_minus_one_is_ignored(device):
    hidden, weight, target = head_inputs(30, device=device)
    target[target == -100] = -1
    got = LOSS(hidden, weight, target, ignore_index=-1, outputs=("loss", "correct", "predicted"))
    assert not got.correct[target == -1].any() and (got.predicted[target == -1] == -1).all()


def test_token_weight_of_an_ignored_row_is_not_looked_at(device):
    hidden, weight, target = head_inputs(30, device=device)
    weights = torch.rand(30, device=device)
    spoiled = torch.where(target == -100, float("nan"), weights)
    for valid in (None, _count(target)):
        a = run(LOSS, (hidden, weight, target), {"token_weight": weights, "valid_rows": valid})
        b = run(LOSS, (hidden, weight, target), {"token_weight": spoiled, "valid_rows": valid})
        assert all(same_bits(x, y) for x, y in zip(a, b, strict=True))


# main_grad


def test_main_grad_must_fit(device):
    hidden, weight, target = head_inputs(device=device)
    weight.tigon_main_grad = True
    with pytest.raises(tigon.Error, match=r"weight.main_grad must be float32 \[40, 16\] .* got none"):
        LOSS(hidden, weight, target)
    weight.main_grad = torch.zeros(40, 16, device=device, dtype=torch.bfloat16)
    with pytest.raises(tigon.Error, match=r"got torch.bfloat16 \[40, 16\]"):
        LOSS(hidden, weight, target)


# Kept gradients


def test_kept_gradients_must_fit(device):
    """Too little for one row: as without."""
    hidden, weight, target = head_inputs(30, device=device)
    kept = run(LOSS, (hidden, weight, target), {"reduction": "none", "keep_mb": 1e-5})
    plain = run(LOSS, (hidden, weight, target), {"reduction": "none", "keep_mb": 0})
    assert all(same_bits(a, b) for a, b in zip(kept, plain, strict=True))


# Exactness


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sharp_and_flat_distributions_and_large_logits(dtype, device):
    rows, h, v = 24, 33, 131
    for kind in ("sharp", "flat", "large"):
        weight = torch.randn(v, h, device=device).to(dtype)
        if kind == "sharp":  # whole numbers: bf16 logits are exact, what is left is the loss's own error
            weight = torch.randint(-1, 2, (v, h), device=device).to(dtype)
        target = torch.randint(0, v, (rows,), device=device)
        size = {"sharp": 1.0, "flat": 1e-3, "large": 80.0 / h}[kind]
        hidden = (
            weight.float()[target] * size if kind != "flat" else torch.randn(rows, h, device=device) * size
        )
        args = (hidden.to(dtype).requires_grad_(), weight.requires_grad_(), target)
        compare(LOSS, reference, args, {"reduction": "mean"}, torch.finfo(dtype).eps)
        got = LOSS(*args, outputs=("loss", "log_prob", "entropy"))
        assert (got.log_prob <= 0).all() and (got.entropy >= -1e-6).all() and (got.entropy <= 4.8752).all()


def test_sixty_four_chunks_are_as_exact_as_one(device):
    hidden, weight, target = head_inputs(256, 31, 61, dtype=torch.bfloat16, device=device, masked=0.0)
    exact = run(reference, [t.detach().double().requires_grad_() for t in (hidden, weight)] + [target], {})
    errors = []
    for chunk in (256, 4):
        got = run(LOSS, (hidden, weight, target), {"chunk_rows": chunk})
        errors.append((got[2].double() - exact[2]).square().mean().sqrt())
    assert errors[1] <= 1.1 * errors[0] if device == "cuda" else 2.0 * errors[0]


@pytest.mark.gpu
def test_cuda_graph_with_a_promised_count():
    hidden, weight, target = head_inputs(64, masked=0.5, device="cuda")
    options = {"valid_rows": _count(target)}

    def step():  # leaves of its own: one made outside would tie the capture to the stream it was made on
        leaves = [t.detach().requires_grad_() for t in (hidden, weight)]
        loss = LOSS(*leaves, target, **options)
        return (loss.detach(), *torch.autograd.grad(loss, leaves))

    want = step()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    graph.replay()
    assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))


PER_ROW = {
    "linear_cross_entropy": lambda h, w, y, **o: tigon.linear_cross_entropy(h, w, y, reduction="none", **o),
    "kept": lambda h, w, y, **o: tigon.linear_cross_entropy(h, w, y, reduction="none", keep_mb=1.0, **o),
    "linear_log_prob": tigon.linear_log_prob,
    "entropy": lambda h, w, y, **o: sum(tigon.linear_log_prob(h, w, y, entropy=True, **o)),
    "linear_loss": lambda h, w, y, **o: tigon.linear_loss(h, w, y, torch.neg, reduction="none", **o),
}


@pytest.mark.parametrize("name", PER_ROW)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_empty_batches_have_zero_gradients(name, dtype, device):
    """A micro-batch without completions: each combination of what is trained."""
    for lead in ((0,), (3, 0)):
        for needs in itertools.product((False, True), repeat=3):
            if not any(needs):
                continue
            leaves = [torch.randn(*shape, device=device).to(dtype) for shape in ((*lead, 8), (11, 8), (11,))]
            hidden, weight, bias = (x.requires_grad_(need) for x, need in zip(leaves, needs, strict=True))
            target = torch.zeros(lead, dtype=torch.long, device=device)
            rows = PER_ROW[name](hidden, weight, target, bias=bias)
            assert rows.shape == lead
            (rows * torch.ones(lead, device=device)).sum().backward()
            for leaf, need in zip(leaves, needs, strict=True):
                assert (leaf.grad is not None) == need
                assert not need or (leaf.grad.shape == leaf.shape and not leaf.grad.any())


def _schema(name):
    schema = getattr(torch.ops.tigon, name).default._schema
    return [a.name for a in schema.arguments], [r.name for r in schema.returns]


def test_orders_of_arguments_are_those_of_the_schemas():
    """What Python hands to operators by position, and reads of their results, stands in C++'s order."""
    head = [*operands.Operands._fields, *operands.LabelFormula._fields, *operands.Memory._fields]
    names = {name.removeprefix("tigon::") for name in torch._C._dispatch_get_all_op_names()}
    found = 0
    for name in (n for n in names if n.startswith(("linear_", "drafter_"))):
        taken, given = _schema(name)
        if "keep_rows" in taken:
            begin, found = taken.index("hidden"), found + 1
            assert taken[begin : begin + len(head)] == head, name
        if given[:2] == ["loss", "scale"]:
            gradients = [f"d{gradient}" for gradient in operands.GRADIENTS]
            assert given[2 : autograd.RESULTS] == gradients, name
    assert found >= 12
    for name, formula in (("linear_preference", PreferenceFormula), ("linear_policy", PolicyFormula)):
        fields = [{"entropy": "entropy_factor"}.get(field, field) for field in formula._fields]
        after = _schema(name)[0][operands.HEAD_ARGUMENTS :]
        assert after[-len(fields) - 1 :][: len(fields)] == fields or after[-len(fields) :] == fields, name
    last = ["dlogits", "hidden", "weight", *("dhidden", "dweight", "dbias", "factor", "first", "add_dweight")]
    last += ["padded", "lora_a", "lora_b", "lora_scale", "dlora_a", "dlora_b"]
    assert _schema("loss_head_gradients")[0] == last
    shard = ["logits", "target", "bias", "class_weight", "ignore_index"]
    shard += ["label_smoothing", "softcap", "z_loss", "first_class", "classes", "logit_scale", "temperature"]
    for name in ("cross_entropy_shard_statistics", "cross_entropy_shard_gradient"):
        assert _schema(name)[0][: len(shard)] == shard


def test_names_of_the_native_side():
    """Bits of `needs`, sizes and the plan are C++'s: what Python names is among them."""
    assert sorted(operands._BITS.values()) == [1 << i for i in range(len(operands._BITS))]
    assert (operands.HIDDEN, operands.WEIGHT, operands.MAY_ROUND) == (1, 2, 32)
    sizes = head_plan.native_names("tigon_loss_head_size_names")
    assert sizes["cap"] == -1 and sizes["copies"] == 2 and sizes["dtype"] == head_plan._CODES[torch.bfloat16]
    with pytest.raises(TypeError, match="no_size"):
        head_plan.Sizes(no_size=1)
