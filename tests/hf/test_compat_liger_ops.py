"""What the liger_kernel interface computes in its own way or refuses; else see test_compat_liger_calls.py."""

import functools
import pickle

import pytest
import torch
import torch.nn.functional as F
from tiny import close, config

import tigon
from tigon.integrations.liger import modules as LM
from tigon.integrations.liger import outputs, paths


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def get(name):
    """The object of this name, wherever the interface has it."""
    path = next(path for path in paths.PATHS if name in paths.names_of(path))
    return paths.resolve(path, name)


def with_gradients(function, *inputs):
    """Results and the gradients of their sum over the inputs, in one list."""
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    results = function(*inputs)
    results = results if isinstance(results, tuple) else (results,)
    sum((y.float() * (i + 1)).sum() for i, y in enumerate(results)).backward()
    return [*(y.detach() for y in results), *(x.grad for x in inputs if x.grad is not None)]


def assert_same(got, wanted, ulps=64.0):
    close([x.float() for x in got], [x.float() for x in wanted], ulps)


LABELS = torch.tensor([3, -100, 0, 7, 2])


def log_probs(seed):
    return drawn(5, 9, seed=seed).log_softmax(-1)


def masked(terms, reduction):
    """Elements of rows that count, reduced as there: mean over rows that count, times V for "mean"."""
    terms = torch.where((LABELS != -100).unsqueeze(-1), terms, 0.0)
    return (
        terms if reduction == "none" else terms.sum() / {"sum": 1, "batchmean": 4, "mean": 4 * 9}[reduction]
    )


@pytest.mark.filterwarnings("ignore:reduction")
@pytest.mark.parametrize("log_target", [False, True])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean", "batchmean"])
def test_kl(reduction, log_target):
    """What torch computes; probabilities of zero are no NaN."""
    teacher = log_probs(1).masked_fill(drawn(5, 9, seed=2) > 1, -torch.inf).log_softmax(-1)
    target = teacher if log_target else teacher.exp()
    if log_target:
        target = target.clamp(min=-50)

    def stock(lq):
        return F.kl_div(lq, target, reduction=reduction, log_target=log_target)

    wanted = with_gradients(stock, log_probs(0))
    module = get("LigerKLDIVLoss")(reduction=reduction, log_target=log_target)
    assert_same(with_gradients(lambda lq: module(lq, target), log_probs(0)), wanted)
    assert module(log_probs(0).bfloat16(), target.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_kl_of_small_probabilities(reduction):
    """The teacher's logarithm is that of eps at the least."""
    student, target, eps = log_probs(0), log_probs(1).exp(), 0.1
    assert (target < eps).any()
    wanted = target * (target.clamp(min=eps).log() - student)
    found = get("LigerKLDIVLoss")(eps, reduction=reduction)(student, target)
    close(found, {"none": wanted, "sum": wanted.sum(), "mean": wanted.mean()}[reduction])


@pytest.mark.parametrize("reduction", ["none", "sum", "mean", "batchmean"])
def test_tvd(reduction):
    """Half the distance of probabilities; where they are equal no gradient."""
    teacher = log_probs(1).exp()
    student = log_probs(0).exp()
    student[0, 0] = teacher[0, 0]
    wanted = masked((student - teacher).abs() / 2, reduction)
    scale = {"none": 1, "sum": 1, "mean": 36, "batchmean": 4}[reduction]
    gradient = masked((student - teacher).sign() / 2, "none") / scale
    module = get("LigerTVDLoss")(reduction=reduction)
    assert_same(with_gradients(lambda p: module(p, teacher, LABELS), student), [wanted, gradient])
    assert gradient[0, 0] == 0


def test_redirection_runs_inside_the_wrapper():
    """The method sees the wrapper's forward around it, and the module's own forward again."""
    inner = torch.nn.Linear(2, 2)
    seen = []

    class Wrapper(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self._fsdp_wrapped_module = inner

        def forward(self, *args, **kwargs):
            seen.append("gathered")
            return self._fsdp_wrapped_module.forward(*args, **kwargs)

    redirect = get("_FSDPForwardRedirection")()
    x = drawn(3, 2)
    got = redirect(Wrapper(), lambda x: (seen.append("inside"), inner(x))[1], x)
    assert torch.equal(got, F.linear(x, inner.weight, inner.bias)) and seen == ["gathered", "inside"]
    with pytest.raises(ZeroDivisionError):
        redirect(Wrapper(), lambda x: 1 / 0, x)
    assert "forward" not in vars(inner)


@pytest.mark.parametrize("own", [None, lambda x: x + 1], ids=["its class's forward", "a forward of its own"])
def test_redirection_leaves_the_module_as_it_was(own):
    """Also where the wrapper fails before it gets to the module, or never calls it."""
    inner = torch.nn.Linear(2, 2)
    if own is not None:
        inner.forward = own
    before = dict(vars(inner))

    class Wrapper(torch.nn.Module):
        _fsdp_wrapped_module = inner

        def forward(self, x):
            if x is None:
                raise RuntimeError("not gathered")
            return x

    redirect, seen = get("_FSDPForwardRedirection")(), []
    with pytest.raises(RuntimeError, match="not gathered"):
        redirect(Wrapper(), seen.append, None)
    assert vars(inner) == before
    assert redirect(Wrapper(), seen.append, 3) == 3
    assert vars(inner) == before and not seen


def test_output_classes():
    """transformers' own with two fields more, which exist only when they were asked for."""
    from transformers.models.gemma3.modeling_gemma3 import Gemma3CausalLMOutputWithPast

    output = outputs.with_counts(Gemma3CausalLMOutputWithPast(loss=torch.ones(())))
    assert isinstance(output, Gemma3CausalLMOutputWithPast)
    assert [*output] == ["loss"] and output.token_accuracy is None
    output.predicted_tokens = torch.zeros(1)
    again = pickle.loads(pickle.dumps(output))
    assert type(again) is type(output) and [*again] == ["loss", "predicted_tokens"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_logits_over_a_temperature_are_not_rounded(dtype):
    logits, ids = drawn(2, 6, 33).to(dtype), torch.arange(10).view(2, 5)
    got = get("fused_selective_log_softmax")(logits, ids, 0.7)
    wanted = (logits[:, :-1].double() / 0.7).log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    close(got, wanted.float())


def test_a_shard_of_fsdp_is_no_shard_of_a_vocabulary(tmp_path):
    """verl reads the head's weight outside of its unit: refused; a replicated one is whole."""
    dist, tensor = torch.distributed, pytest.importorskip("torch.distributed.tensor")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        weight, hidden, labels = drawn(11, 8), drawn(6, 8, seed=1), torch.arange(6)
        scaled = get("LigerFusedLinearScaledCrossEntropyFunction").apply
        shard = tensor.distribute_tensor(weight, mesh, [tensor.Shard(0)])
        copy = tensor.distribute_tensor(weight, mesh, [tensor.Replicate()])
        for function in (scaled, LM.F.liger_fused_linear_cross_entropy):
            loss = functools.partial(lambda f, w: f(hidden, w, labels), function)
            with pytest.raises(tigon.Error, match=r"weight must be whole .*Shard\(dim=0\)"):
                loss(shard)
            close(loss(copy), loss(weight))
    finally:
        dist.destroy_process_group()


def test_divergences_of_no_rows():
    """Nothing, and no gradient, where every label is ignored; the loss of logits has their dtype."""
    none, student = torch.full((5,), -100), log_probs(0)
    heads = drawn(5, 8), drawn(9, 8), drawn(5, 6), drawn(9, 6), none
    for name, *inputs in (
        ("LigerJSD", student, log_probs(1), none),
        ("LigerFusedLinearJSD", *heads),
        ("LigerFusedLinearJSDLoss", *heads),
    ):
        leaves = [x.requires_grad_() for x in (inputs[:1] if name == "LigerJSD" else inputs[:2])]
        loss = get(name)()(*inputs)
        assert loss == 0 and not any(g.any() for g in torch.autograd.grad(loss, leaves)), name
    assert get("LigerJSD")()(student.bfloat16(), log_probs(1).bfloat16()).dtype == torch.bfloat16


def test_wrong_options_are_refused():
    heads = drawn(5, 8), drawn(9, 8), drawn(5, 6), drawn(9, 6), LABELS
    for kind in ("LigerFusedLinearJSD", "LigerFusedLinearJSDLoss"):
        with pytest.raises(tigon.Error, match=r"temperature must be .*, got 0"):
            get(kind)(temperature=0)(*heads)
    with pytest.raises(tigon.Error, match="labels must"):
        get("LigerFusedLinearJSD")()(*heads[:4], LABELS[:4])
    for divergence in ("LigerTVDLoss", "LigerKLDIVLoss"):
        with pytest.raises(tigon.Error, match="reduction must be one of .*, got 'median'"):
            get(divergence)(reduction="median")(log_probs(0), log_probs(1))
    with pytest.raises(tigon.Error, match="rotary_dim must be"):
        get("liger_rotary_pos_emb")(*(drawn(2, 3, 5, 8),) * 2, *(drawn(2, 5, 8),) * 2, rotary_dim=10)
    for name, inputs in (
        ("LigerCrossEntropyLoss", (log_probs(0), LABELS)),
        ("LigerFusedLinearCrossEntropyLoss", (heads[1], heads[0], LABELS)),
    ):
        for option in ({"label_smoothing": 2.0}, {"reduction": "median"}, {"softcap": -1.0}):
            ((word, value),) = option.items()
            with pytest.raises(tigon.Error, match=f"{word} must be .*, got '?{value}"):
                get(name)(**option)(*inputs)
    assert LM.LigerRMSNorm(8, elementwise_affine=False)(drawn(2, 8)).shape == (2, 8)
    with pytest.raises(tigon.Error, match="casting_mode must be one of .*, got 'half'"):
        get("LigerRMSNorm")(8, casting_mode="half")
    with pytest.raises(tigon.Error, match="hidden_act must be .*, got 'tanh'"):
        get("LigerSwiGLUMLP")(config(hidden_act="tanh"))


def test_a_subclass_of_the_base_brings_its_passes():
    """Axolotl's distillation does; the base itself has no formula."""
    Base = get("LigerFusedLinearDistillationBase")

    class Double(Base):
        @classmethod
        def forward(cls, ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, grad_output):
            return 2 * grad_output

    x = torch.ones(3, requires_grad=True)
    Double.apply(x).sum().backward()
    assert x.grad.tolist() == [2.0] * 3
    with pytest.raises(tigon.Error, match=r"must bring its own forward, .* use tigon\.linear_loss"):
        Base.apply(x)
