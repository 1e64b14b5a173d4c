"""TRL's divergence of two heads by Tigon: TRL's own function is the oracle."""

import types

import pytest
import torch

trl = pytest.importorskip("trl")
pytest.importorskip("trl.kernels.chunked_divergence")
from trl.kernels import chunked_divergence
from trl.trainer import distillation_trainer

import tigon
from tigon.integrations import trl as hook

ORIGINAL = chunked_divergence.ChunkedDivergenceFunction


@pytest.fixture
def installed():
    hook.install()
    yield chunked_divergence.ChunkedDivergenceFunction
    hook.uninstall()


def _heads(dtype, rows=23, h=24, ht=40, v=211, bias=True):
    def draw(*shape, scale=1.0):
        return (scale * torch.randn(shape)).to(dtype)

    student = [draw(rows, h).requires_grad_(), draw(v, h, scale=0.3).requires_grad_()]
    student.append(draw(v).requires_grad_() if bias else None)
    return student, [draw(rows, ht), draw(v, ht, scale=0.3), draw(v) if bias else None]


def _results(function, student, teacher, *options, reduce=torch.sum):
    divergence, entropy = function.apply(*student, *teacher, *options)
    leaves = [t for t in student if t is not None and t.requires_grad]
    gradients = torch.autograd.grad(reduce(divergence), leaves)
    return [divergence.detach(), entropy.detach(), *gradients]


OPTIONS = [
    (0.0,),
    (1.0,),
    (0.5,),
    (0.1, 2.0),
    (0.5, 1.5, 0.7, 6.0, 1.2, 9.0),
    (0.0, 0.8, 1.0, None, 1.0, 5.0),
]


def _close(got, wanted, dtype):
    for i, (a, b) in enumerate(zip(got, wanted, strict=True)):
        assert a.shape == b.shape and a.dtype == b.dtype
        room = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2}[dtype] if i > 1 else 2e-5
        assert (a - b).abs().max() <= room * b.abs().max(), f"result {i}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_results_are_those_of_trl(options, bias, dtype, installed):
    student, teacher = _heads(dtype, bias=bias)
    for reduce in (torch.sum, lambda rows: (rows * torch.linspace(0.5, 1.5, len(rows))).sum()):
        got = _results(installed, student, teacher, *options, reduce=reduce)
        _close(got, _results(ORIGINAL, student, teacher, *options, reduce=reduce), dtype)


@pytest.mark.parametrize("reduce", [torch.sum, lambda rows: (rows * torch.arange(len(rows))).sum()])
def test_rows_that_will_be_summed(reduce):
    """The route of CUDA: gradients with the losses, computed again where rows have their own upstream."""
    student, teacher = _heads(torch.float32)
    options = {"beta": 0.3, "temperature": 1.5, "softcap": None, "logit_scale": 1.0, "teacher_softcap": None}
    options |= {"teacher_logit_scale": 1.0}

    class Summed:
        @staticmethod
        def apply(hidden, weight, bias, *teacher_part):
            return hook._SummedRows.apply(options, teacher_part[:3], hidden, weight, bias)

    got = _results(Summed, student, teacher, 0.3, 1.5, reduce=reduce)
    _close(got, _results(ORIGINAL, student, teacher, 0.3, 1.5, reduce=reduce), torch.float32)
    divergence, _ = Summed.apply(*student, *teacher)
    first, again = (torch.autograd.grad(divergence.sum(), student, retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, again))


@pytest.mark.parametrize("frozen", [(0,), (1,), (2,), (0, 1)])
def test_frozen_operands(frozen, installed):
    student, teacher = _heads(torch.float32)
    student = [t.detach() if i in frozen else t for i, t in enumerate(student)]
    _close(
        _results(installed, student, teacher, 0.5), _results(ORIGINAL, student, teacher, 0.5), torch.float32
    )


def test_the_trainers_loss(installed):
    """The loss of the trainer, masked, with its number of items."""
    student, teacher = _heads(torch.float32, rows=24, bias=False)
    mask = (torch.rand(2, 12) < 0.6).long()
    shaped = [student[0].view(2, 12, -1), teacher[0].view(2, 12, -1), student[1], teacher[1], mask, 0.5]
    got = distillation_trainer._chunked_divergence_loss(*shaped, num_items_in_batch=11)
    mine = torch.autograd.grad(got[0], student[:2])
    hook.uninstall()
    wanted = distillation_trainer._chunked_divergence_loss(*shaped, num_items_in_batch=11)
    theirs = torch.autograd.grad(wanted[0], student[:2])
    _close([*got[:2], *mine], [*wanted[:2], *theirs], torch.float32)


def test_installed_and_removed(installed):
    places = (chunked_divergence, distillation_trainer)
    assert all(isinstance(p.ChunkedDivergenceFunction, hook.DivergenceHead) for p in places)
    hook.install()  # once more changes nothing
    assert all(p.ChunkedDivergenceFunction.original is ORIGINAL for p in places)
    hook.uninstall()
    assert all(p.ChunkedDivergenceFunction is ORIGINAL for p in places)


def test_another_signature_is_refused(monkeypatch):
    hook.uninstall()  # of tests of other files in this process

    class Other(torch.autograd.Function):
        @staticmethod
        def forward(ctx, student_hidden, beta):
            return student_hidden

    monkeypatch.setattr(chunked_divergence, "ChunkedDivergenceFunction", Other)
    with pytest.raises(tigon.Error, match="trl must be one whose fused head takes"):
        hook.install()
    assert distillation_trainer.ChunkedDivergenceFunction is ORIGINAL


def _partitioned(weight):
    """A parameter as ZeRO-3 marks one, gathered now."""
    weight = torch.nn.Parameter(weight.detach().clone())
    weight.ds_id, weight.ds_numel = 0, weight.numel()
    return weight


@pytest.mark.parametrize("weighted", [False, True])
def test_a_head_that_is_freed_after_the_forward(weighted, installed):
    """ZeRO-3 gathers a head for the forward and frees it; the backward needs it no more."""
    student, teacher = _heads(torch.float32, bias=False)
    head, teacher_part = _partitioned(student[1]), _partitioned(teacher[1])
    calls = installed.calls
    divergence, _ = installed.apply(student[0], head, None, teacher[0], teacher_part, None, 0.5)
    assert installed.calls == calls + 1
    factors = torch.linspace(0.5, 1.5, len(divergence)) if weighted else torch.ones(len(divergence))
    for weight in (head, teacher_part):
        weight.data = torch.empty(0)
    got = torch.autograd.grad((divergence * factors).sum(), (student[0], head))
    wanted, _ = ORIGINAL.apply(*student, *teacher, 0.5)
    _close(got, torch.autograd.grad((wanted * factors).sum(), student[:2]), torch.float32)


def test_log_probabilities_of_a_head_that_is_freed(installed, monkeypatch):
    from trl.trainer import utils

    (hidden, weight, _), _ = _heads(torch.float32, bias=False)
    labels = torch.randint(0, weight.shape[0], hidden.shape[:1])
    function = getattr(utils, hook.NAME)
    for outputs in ((), ("entropy",), ("is_top1",)):
        head, calls = _partitioned(weight), function.calls
        log_prob, entropy, *_ = function.apply(hidden, head, None, labels, 0.8, 32, None, 1.0, outputs)
        assert function.calls == calls + 1
        head.data = torch.empty(0)
        both = outputs == ("entropy",)
        got = torch.autograd.grad(log_prob.sum() + (entropy.sum() if both else 0), (hidden, head))
        wanted = tigon.linear_log_prob(hidden, weight, labels, temperature=0.8, entropy=True)
        total = wanted[0].sum() + (wanted[1].sum() if both else 0)
        _close(got, torch.autograd.grad(total, (hidden, weight)), torch.float32)
    head = _partitioned(weight)
    head.data, calls = torch.empty(0), function.calls
    monkeypatch.setattr(function, "original", types.SimpleNamespace(apply=lambda *_: "TRL's"))
    assert function.apply(hidden, head, None, labels, 1.0, 32, None, 1.0, ()) == "TRL's"
    assert function.calls == calls
