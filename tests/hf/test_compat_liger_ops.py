"""Norms, divergences, rotary functions and MLPs of the liger_kernel interface against their formulas."""

import functools
import pickle

import pytest
import torch
import torch.nn.functional as F
from tiny import close, config, double

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
    assert len(got) == len(wanted)
    for a, b in zip(got, wanted, strict=True):
        close(a.float(), b.float(), ulps)


LABELS = torch.tensor([3, -100, 0, 7, 2])


def log_probs(seed):
    return drawn(5, 9, seed=seed).log_softmax(-1)


def masked(terms, reduction):
    """Elements of rows that count, reduced as there: mean over rows that count, times V for "mean"."""
    terms = torch.where((LABELS != -100).unsqueeze(-1), terms, 0.0)
    return (
        terms if reduction == "none" else terms.sum() / {"sum": 1, "batchmean": 4, "mean": 4 * 9}[reduction]
    )


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_jsd(beta):
    """op-semantics 1.6: beta KL(P || M) + (1 - beta) KL(Q || M), 0 is KL(P || Q), 1 is KL(Q || P)."""
    teacher = log_probs(1)

    def formula(lq):
        q, p = lq.exp(), teacher.exp()
        if beta in (0.0, 1.0):
            terms = p * (teacher - lq) if beta == 0.0 else q * (lq - teacher)
        else:
            lm = (beta * p + (1 - beta) * q).log()
            terms = beta * p * (teacher - lm) + (1 - beta) * q * (lq - lm)
        return masked(terms, "batchmean")

    wanted = with_gradients(formula, log_probs(0))
    module = get("LigerJSD")(beta=beta)
    assert_same(with_gradients(lambda lq: module(lq, teacher, LABELS), log_probs(0)), wanted)
    function = get("liger_jsd")
    assert_same(with_gradients(lambda lq: function(lq, teacher, LABELS, beta, -100), log_probs(0)), wanted)
    assert module(log_probs(0).bfloat16(), teacher.bfloat16()).dtype == torch.bfloat16


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
    functional = get("liger_kl_div")
    one = with_gradients(
        lambda lq: functional(lq, target, reduction=reduction, log_target=log_target), log_probs(0)
    )
    assert_same(one, wanted)
    assert module(log_probs(0).bfloat16(), target.bfloat16()).dtype == torch.float32
    with pytest.raises(tigon.Error, match="reduction"):
        functional(log_probs(0), target, reduction="median")


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
    functional = get("liger_tvd")(student, teacher, LABELS, reduction=reduction)
    close(functional, wanted)


@pytest.mark.parametrize("trailing", [(5,), (3, 2)])
def test_group_norm(trailing):
    """Of any rank (four dimensions fail in Liger), with every gradient."""
    x = drawn(2, 6, *trailing)
    module = get("LigerGroupNorm")(6, 3, eps=1e-5)
    assert torch.equal(module.bias, torch.zeros(6)) and module.weight.requires_grad
    apply = get("liger_group_norm")
    inputs = (x, drawn(6, seed=1), drawn(6, seed=2))
    wanted = with_gradients(lambda x, w, b: F.group_norm(x, 3, w, b, 1e-5), *inputs)
    assert_same(with_gradients(lambda x, w, b: apply(x, w, b, 6, 3, 1e-5), *inputs), wanted)
    close(module(x), F.group_norm(x, 3))
    with pytest.raises(tigon.Error, match="num_channels"):
        apply(x, *inputs[1:], 5, 3, 1e-5)
    with pytest.raises(tigon.Error, match="num_groups"):
        get("LigerGroupNorm")(6, 4)


def test_dyt():
    inputs = (drawn(4, 8), torch.tensor([0.7]), drawn(8, seed=1), drawn(8, seed=2))
    wanted = with_gradients(lambda x, a, g, b: g * torch.tanh(a * x) + b, *inputs)
    assert_same(with_gradients(get("liger_dyt"), *inputs), wanted)
    module = get("LigerDyT")(8, beta=False)
    close(module(inputs[0]), torch.tanh(0.5 * inputs[0]))


@pytest.mark.parametrize("mode, offset", [("llama", 0.0), ("gemma", 1.0), ("none", 0.0)])
def test_fused_add_rms_norm(mode, offset):
    """(norm of the sum, the sum), the residual's gradient too."""
    inputs = (drawn(4, 8), drawn(4, 8, seed=1), drawn(8, seed=2))

    def formula(x, r, w):
        s = x + r
        return s * torch.rsqrt(s.square().mean(-1, keepdim=True) + 1e-6) * (w + offset), s

    wanted = with_gradients(formula, *inputs)
    function = get("liger_fused_add_rms_norm")
    assert_same(with_gradients(lambda x, r, w: function(x, r, w, 1e-6, offset, mode), *inputs), wanted)
    module = get("LigerFusedAddRMSNorm")(8, offset=offset, casting_mode=mode)
    with torch.no_grad():
        module.weight.copy_(inputs[2])
    close(module(*inputs[:2])[0], wanted[0])


@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
def test_multimodal_rotary(unsqueeze_dim):
    """Pairs of time, height and width from their own tables, in that order."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    shape = (2, 3, 5, 8) if unsqueeze_dim == 1 else (2, 5, 3, 8)
    q, k = drawn(*shape), drawn(*shape, seed=1)
    angle = drawn(3, 2, 5, 4, seed=2)
    angle = torch.cat((angle, angle), -1)
    mixed = torch.cat([t[i % 3] for i, t in enumerate(angle.split([2, 1, 1] * 2, -1))], -1)
    wanted = apply_rotary_pos_emb(q, k, mixed.cos(), mixed.sin(), unsqueeze_dim=unsqueeze_dim)
    for name in ("liger_multimodal_rotary_pos_emb", "liger_qwen2vl_mrope"):
        assert_same(get(name)(q, k, angle.cos(), angle.sin(), [2, 1, 1], unsqueeze_dim), wanted)


def test_llama4_rotary():
    """Complex numbers, the same as real and imaginary parts, and the vision tower's table."""
    from transformers.models.llama4 import modeling_llama4 as stock

    q, k = drawn(2, 5, 3, 8).bfloat16(), drawn(2, 5, 3, 8, seed=1).bfloat16()
    angle = drawn(2, 5, 4, seed=2)
    freqs = torch.polar(torch.ones_like(angle), angle)
    wanted = stock.apply_rotary_emb(q, k, freqs)
    text, vision = get("liger_llama4_text_rotary_pos_emb"), get("liger_llama4_vision_rotary_pos_emb")
    calls = [text(q, k, freqs), text(q, k, torch.view_as_real(freqs).flatten(-2))]
    for got in calls:
        assert [torch.equal(a, b) for a, b in zip(got, wanted, strict=True)] == [True, True]
    table = freqs[0].unsqueeze(1)
    wanted = stock.vision_apply_rotary_emb(q, k, table)
    assert [torch.equal(a, b) for a, b in zip(vision(q, k, table), wanted, strict=True)] == [True, True]


def test_gated_products():
    x, up = drawn(4, 8), drawn(4, 8, seed=1)
    wanted = with_gradients(lambda a, b: 3 * F.silu(0.5 * a) * b, x, up)
    apply = get("LigerSiLUMulFunction").apply
    assert_same(with_gradients(lambda a, b: apply(a, b, 0.5, 3.0), x, up), wanted)


def test_experts():
    """The same as Mixtral's own, every gradient."""
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    settings = config("mixtral")
    mine, stock = LM.LigerExperts(settings), MixtralExperts(settings)
    with torch.no_grad():
        for i, p in enumerate(stock.parameters()):
            p.copy_(0.2 * drawn(*p.shape, seed=i))
    mine.load_state_dict(stock.state_dict())
    x, weights = drawn(7, 32), drawn(7, 2, seed=3).softmax(-1)
    chosen = torch.tensor([[0, 1], [1, 2], [0, 2], [1, 0], [2, 0], [0, 1], [1, 0]])  # nobody asks expert 3
    results = []
    for module in (mine, stock, double(stock)):
        dtype = module.down_proj.dtype
        results.append(with_gradients(lambda x, w, m=module: m(x, chosen, w), x.to(dtype), weights.to(dtype)))
        results[-1] += [p.grad for p in module.parameters()]
    assert_same(results[0], results[2], ulps=1024)
    assert results[0][-1][3].abs().max() == 0
    batches = (x.view(1, 7, 32), chosen.view(1, 7, 2), weights.view(1, 7, 2))
    assert torch.equal(mine(*batches)[0], mine(x, chosen, weights))
    with pytest.raises(tigon.Error, match="hidden_act"):
        LM.LigerExperts(config("mixtral", hidden_act="gelu"))


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


def test_jsd_of_no_rows():
    """Nothing, and no gradient, where every label is ignored."""
    student = log_probs(0).requires_grad_()
    loss = get("LigerJSD")()(student, log_probs(1), torch.full((5,), -100))
    loss.backward()
    assert loss == 0 and not student.grad.any()


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
