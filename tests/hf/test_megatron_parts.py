"""tigon.megatron without Megatron: its functions, norms, and `apply` on classes of Megatron's names."""

import copy
import functools
import types

import pytest
import torch
import torch.nn.functional as F
from checks import check_close, run
from megatron_tiny import smoothed_loss
from torch import nn

import tigon
import tigon.megatron as tm
from cases.case import Inputs
from tigon.integrations.megatron.norm import plan_norm
from tigon.integrations.megatron.rope import thd_positions
from tigon.integrations.transformers.lazy_logits import LazyLogits

DTYPES = [torch.float32, torch.bfloat16]


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def judge(ours, plain, *args, grads=(0,)):
    """Ours at most twice as far from fp64 as the plain form of the same precision."""
    inputs = Inputs(args, grads=grads)
    got, eager, exact = run(ours, inputs), run(plain, inputs), run(plain, inputs, dtype=torch.float64)
    for name, tensor in got.tensors.items():
        check_close(name, tensor, eager.tensors[name], exact.tensors[name])


class Group:
    """A process group that knows its size."""

    def __init__(self, size, rank=0):
        self.sizes = size, rank

    def size(self):
        return self.sizes[0]

    def rank(self):
        return self.sizes[1]


# Activations.


def plain_swiglu(x, bias=None, limit=None):
    gate, up = (x if bias is None else x + bias).chunk(2, -1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return F.silu(gate) * up


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("limit", [None, 0.5])
def test_bias_swiglu(dtype, limit):
    x, bias = draw(5, 3, 14, dtype=dtype), draw(14, seed=1, dtype=dtype)
    judge(
        lambda x, b: tm.bias_swiglu_impl(x, b, False, False, limit),
        lambda x, b: plain_swiglu(x, b, limit),
        x,
        bias,
        grads=(0, 1),
    )
    judge(
        lambda x: tm.bias_swiglu_impl(x, None, clamp_value=limit), lambda x: plain_swiglu(x, None, limit), x
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_weighted_swiglu_and_geglu(dtype):
    x, weights = draw(7, 12, dtype=dtype), draw(7, 1, seed=1)

    def plain(x, w):
        return (plain_swiglu(x) * w).to(x.dtype)

    judge(lambda x, w: tm.weighted_bias_swiglu_impl(x, None, w), plain, x, weights, grads=(0, 1))
    bias = draw(12, seed=2, dtype=dtype)

    def plain_geglu(x, b):
        gate, up = (x + b).chunk(2, -1)
        return F.gelu(gate, approximate="tanh") * up

    judge(tm.bias_geglu_impl, plain_geglu, x, bias, grads=(0, 1))
    with pytest.raises(tigon.Error, match="bias must be None"):
        tm.weighted_bias_swiglu_impl(x, bias, weights)
    with pytest.raises(tigon.Error, match="clamp_value must be > 0"):
        tm.bias_swiglu_impl(x, None, clamp_value=-1.0)


# Cross-entropy.


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_vocab_parallel_cross_entropy(smoothing):
    logits, target = draw(6, 2, 11), torch.arange(12).view(6, 2) % 11
    ours = logits.clone().requires_grad_()
    loss = tm.vocab_parallel_cross_entropy(ours, target, smoothing, Group(1))
    theirs = logits.double().requires_grad_()
    want = smoothed_loss(theirs, target, smoothing)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), want, rtol=1e-6, atol=1e-6)
    upstream = draw(6, 2, seed=3)
    loss.backward(upstream)
    want.backward(upstream.double())
    torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-6, atol=1e-6)
    if not smoothing:
        assert torch.equal(tm.fused_vocab_parallel_cross_entropy(logits, target, Group(1)), loss)


def test_cross_entropy_refuses():
    logits, target = draw(2, 2, 5), torch.zeros(2, 2, dtype=torch.long)
    with pytest.raises(tigon.Error, match="group must be a ProcessGroup, got Group"):
        tm.fused_vocab_parallel_cross_entropy(logits, target, Group(2))
    with pytest.raises(tigon.Error, match=r"label_smoothing must be in \[0, 1\), got 1.0"):
        tm.vocab_parallel_cross_entropy(logits, target, 1.0)


# Rotary embedding.


def plain_rope(t, freqs, interleaved):
    """Rotation of the first columns by the angles, each pair a complex number."""
    rotated = freqs.shape[-1]
    x = t[..., :rotated]
    cos, sin = freqs.to(torch.promote_types(t.dtype, torch.float32)).cos(), freqs.sin()
    cos, sin = cos.to(t.dtype), sin.to(t.dtype)
    if interleaved:
        half = torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)
    else:
        half = torch.cat((-x[..., rotated // 2 :], x[..., : rotated // 2]), -1)
    return torch.cat((x * cos + half * sin, t[..., rotated:]), -1)


def angles(rows, columns, interleaved, batch=1):
    half = torch.outer(torch.arange(rows).float(), 10.0 ** -torch.linspace(0, 2, columns // 2))
    both = half.repeat_interleave(2, -1) if interleaved else torch.cat((half, half), -1)
    return both[:, None, None].expand(rows, batch, 1, columns)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
def test_rope_sbhd(dtype, interleaved, batch):
    freqs = angles(9, 6, interleaved, batch)
    joint = draw(7, 3, 2, 16, dtype=dtype)
    for t in (joint[..., :8], joint[..., 8:], joint[:, :1, :, :8].expand(7, 3, 2, 8)):
        judge(
            lambda t, f: tm.fused_apply_rotary_pos_emb(t, f, interleaved=interleaved),
            lambda t, f: plain_rope(t, f[: len(t)], interleaved),
            t,
            freqs,
        )
        y = tm.fused_apply_rotary_pos_emb(t, freqs, interleaved=interleaved)
        assert y.is_contiguous()
        turned = tm.fused_apply_rotary_pos_emb(t, freqs, True, interleaved)
        assert turned.transpose(0, 1).is_contiguous()
        assert torch.equal(turned, y)


def chunks(lengths, size, rank):
    """Positions of a rank's tokens, sequence by sequence."""
    found = []
    for length in lengths:
        parts = torch.arange(length).chunk(2 * size) if size > 1 else [torch.arange(length)]
        found.append(torch.cat((parts[rank], parts[-1 - rank])) if size > 1 else parts[0])
    return found


@pytest.mark.parametrize(("size", "rank"), [(1, 0), (2, 0), (2, 1), (3, 2)])
@pytest.mark.parametrize("packed", [False, True])
def test_rope_thd(size, rank, packed):
    lengths = [12, 24, 12]
    ends = torch.tensor([0, 12, 36, 48], dtype=torch.int32)
    positions = chunks(lengths, size, rank)
    if packed:  # one row of angles for every token of the pack
        positions = [p + start for p, start in zip(positions, ends.tolist(), strict=False)]
    positions = torch.cat(positions)
    freqs = angles(48 if packed else 24, 6, False)
    t = draw(len(positions), 2, 8)
    got = thd_positions(len(positions), ends, len(freqs), size, rank)
    assert torch.equal(got, positions)
    y = tm.fused_apply_rotary_pos_emb_thd(t, ends, freqs, cp_size=size, cp_rank=rank)
    want = plain_rope(t.double(), freqs[positions][:, 0].double(), False)
    torch.testing.assert_close(y.double(), want, rtol=1e-6, atol=1e-6)


def test_rope_tables_follow_their_angles():
    freqs, t = angles(4, 8, False).clone(), draw(4, 1, 1, 8)
    first = tm.fused_apply_rotary_pos_emb(t, freqs)
    assert torch.equal(first, tm.fused_apply_rotary_pos_emb(t, freqs))
    freqs.mul_(2)
    assert torch.equal(
        tm.fused_apply_rotary_pos_emb(t, freqs), tm.fused_apply_rotary_pos_emb(t, freqs.clone())
    )
    assert not torch.equal(tm.fused_apply_rotary_pos_emb(t, freqs), first)


def test_rope_refuses():
    t = draw(4, 2, 1, 8)
    with pytest.raises(tigon.Error, match=r"freqs must be \[4 or more, 1 or 2, 1, R\], got \[3, 1, 1, 8\]"):
        tm.fused_apply_rotary_pos_emb(t, angles(3, 8, False))
    with pytest.raises(tigon.Error, match="start_positions must be None"):
        tm.fused_apply_rotary_pos_emb(t, angles(4, 8, False), start_positions=torch.zeros(2))
    with pytest.raises(tigon.Error, match=r"cp_rank must be in \[0, cp_size\), got 2 of 2"):
        tm.fused_apply_rotary_pos_emb_thd(t[:, 0], torch.tensor([0, 4]), angles(4, 8, False), 2, 2)


# Norms.


def settings(**changes):
    values = {"normalization": "RMSNorm", "layernorm_zero_centered_gamma": False, "sequence_parallel": False}
    values |= {"params_dtype": torch.float32, "activation_func": F.silu, "gated_linear_unit": True}
    values |= {"activation_func_fp8_input_store": False, "bias_activation_fusion": True}
    values |= {"use_te_activation_func": False, "mtp_num_layers": None}
    return types.SimpleNamespace(**{**values, **changes})


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("name", ["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms(name, zero_centered, dtype):
    options = {"normalization": name, "layernorm_zero_centered_gamma": zero_centered}
    options |= {"sequence_parallel": True, "params_dtype": dtype}
    config = settings(**options)
    norm = tm.Norm(config=config, hidden_size=24, eps=1e-5)
    assert type(norm) is getattr(tm, name)
    assert norm.returns_residual is False
    assert all(p.sequence_parallel is True and p.dtype == dtype for p in norm.parameters())
    start = 0.0 if zero_centered else 1.0
    assert torch.equal(norm.weight, torch.full((24,), start, dtype=dtype))
    norm.weight.data.fill_(7.0)
    norm.reset_parameters()
    assert torch.equal(norm.weight, torch.full((24,), start, dtype=dtype))
    with torch.no_grad():
        norm.weight.add_(draw(24, seed=4, dtype=dtype))
    weight = norm.weight.detach()

    def plain(x, w):
        w = 1 + w if zero_centered else w
        if name == "LayerNorm":
            return F.layer_norm(x, (24,), w, norm.bias.to(x.dtype), 1e-5)
        return F.rms_norm(x, (24,), w, 1e-5)

    def ours(x, w):
        return torch.func.functional_call(norm, {"weight": w}, (x,))

    judge(ours, plain, draw(4, 3, 24, dtype=dtype), weight, grads=(0, 1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("zero_centered", [False, True])
def test_norm_with_residual(dtype, zero_centered):
    config = settings(
        fused_residual_rmsnorm=True, params_dtype=dtype, layernorm_zero_centered_gamma=zero_centered
    )
    norm = tm.NormWithResidual(config=config, hidden_size=16, eps=1e-6)
    assert norm.returns_residual is True
    with torch.no_grad():
        norm.weight.add_(draw(16, seed=4, dtype=dtype))

    def ours(x, w):
        return torch.func.functional_call(norm, {"weight": w}, (x,))

    def plain(x, w):
        return F.rms_norm(x, (16,), 1 + w if zero_centered else w, 1e-6), x * 1

    x, weight = draw(5, 2, 16, dtype=dtype), norm.weight.detach()
    judge(ours, plain, x, weight, grads=(0, 1))
    leaf = x.clone().requires_grad_()
    torch.autograd.backward(norm(leaf)[1], torch.ones_like(x))  # the norm itself is not used
    assert torch.equal(leaf.grad, torch.ones_like(x))
    with torch.no_grad():
        assert norm(x)[1] is x
    assert tm.NormWithResidual(config=settings(), hidden_size=16).returns_residual is False


def test_norm_of_another_kind():
    with pytest.raises(tigon.Error, match=r"normalization must be one of .*, got 'L2Norm'"):
        tm.Norm(settings(normalization="L2Norm"), 8)


def test_activation_slot():
    x = draw(3, 8)
    assert torch.equal(tm.Activation(config=settings())(x), tigon.swiglu(x))
    exact = tm.Activation(config=settings(activation_func=F.gelu, bias_activation_fusion=False))
    assert torch.equal(exact(x), tigon.geglu(x, approximate="none"))
    with pytest.raises(tigon.Error, match="not gated"):
        tm.Activation(config=settings(gated_linear_unit=False))


# A model of classes with Megatron's names.


def megatron_class(path):
    def name(cls):
        cls.__module__, _, cls.__qualname__ = path.rpartition(".")
        return cls

    return name


@megatron_class("megatron.core.tensor_parallel.layers.ColumnParallelLinear")
class Column(nn.Module):
    def __init__(self, vocab, hidden, group=1, allocate=True):
        super().__init__()
        self.weight = nn.Parameter(draw(vocab, hidden, seed=5)) if allocate else None
        self.bias, self.skip_bias_add, self.gradient_accumulation_fusion = None, False, False
        self.output_size_per_partition, self.input_size, self.tp_group = vocab, hidden, Group(group)

    def forward(self, input_, weight=None, runtime_gather_output=None):
        return F.linear(input_, self.weight if weight is None else weight), None


@megatron_class("megatron.core.transformer.mlp.MLP")
class Mlp(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config, self.activation_func = config, config.activation_func
        self.linear_fc1, self.linear_fc2 = nn.Linear(16, 24), nn.Linear(12, 16)

    def forward(self, x):
        x = self.linear_fc1(x)
        if self.config.use_te_activation_func:
            return self.linear_fc2(self.activation_func(x))
        gate, up = x.chunk(2, -1)
        return self.linear_fc2(self.activation_func(gate) * up)


class Language(nn.Module):
    def __init__(self, tied=False, group=1, **changes):
        super().__init__()
        torch.manual_seed(0)
        self.config = settings(**changes)
        self.embedding = nn.Embedding(40, 16)
        self.norm, self.mlp = nn.RMSNorm(16, eps=1e-6), Mlp(self.config)
        self.output_layer = Column(40, 16, group, allocate=not tied)
        self.tied = tied

    def compute_language_model_loss(self, labels, logits):
        logits = logits.float().transpose(0, 1)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return loss.view(labels.shape)

    def forward(self, ids, labels=None, scale=1.0):
        hidden = self.embedding(ids).transpose(0, 1)
        hidden = hidden + self.mlp(self.norm(hidden))
        logits, _ = self.output_layer(hidden, weight=self.embedding.weight if self.tied else None)
        logits = logits * scale
        if labels is None:
            return logits.transpose(0, 1).contiguous()
        self.seen = logits
        return self.compute_language_model_loss(labels, logits)


IDS = torch.arange(20).view(2, 10)


def step(model, **options):
    model.zero_grad(set_to_none=True)
    loss = model(IDS, labels=IDS + 1, **options)
    (loss * draw(2, 10, seed=8)).sum().backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


same = functools.partial(torch.testing.assert_close, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_stand_in(tied):
    model = Language(tied)
    want, logits, config = step(model, scale=0.5), model(IDS), model.config
    report = tm.apply(model)
    assert [(e.slot, e.by) for e in report.entries] == [
        ("norm", "tigon.rms_norm"),
        ("mlp", "tigon.swiglu"),
        ("loss", "tigon.linear_cross_entropy"),
    ]
    same(step(model, scale=0.5), want)
    assert isinstance(model.seen, LazyLogits)
    calls = report.head_calls
    assert (calls.lazy, calls.fused, calls.materialised) == (1, 1, 0)
    assert type(model(IDS)) is torch.Tensor  # without labels: logits
    same(model(IDS), logits)
    with pytest.raises(tigon.Error, match="without Tigon"):
        tm.apply(model)
    assert model.config is config and not config.use_te_activation_func
    tm.undo(model)
    assert model.mlp.config is config and model.mlp.activation_func is F.silu
    assert not {"forward", "compute_language_model_loss"} & (vars(model).keys() | vars(model.norm).keys())
    assert all(torch.equal(a, b) for a, b in zip(step(model, scale=0.5), want, strict=True))
    with pytest.raises(tigon.Error, match=r"undo\] model must be what apply"):
        tm.undo(model)


def test_parts_are_chosen_and_what_is_left_says_why():
    model = Language(group=2, gated_linear_unit=False)
    report = tm.apply(model, norm=False)
    left = {entry.slot: entry.reason for entry in report.left}
    assert left == {
        "mlp": "not gated",
        "loss": "tensor parallel over 2 processes, which are no torch.distributed group",
    }
    with pytest.raises(tigon.Error, match="must hold a Megatron language model, got Linear"):
        tm.apply(nn.Linear(2, 2))
    stage = Language()
    stage.output_layer = None
    assert "no output layer" in tm.apply(stage).left[0].reason
    offloaded = Language(activation_func_fp8_input_store=True)
    assert "FP8" in tm.apply(offloaded, loss=False).left[0].reason


def test_what_fails_leaves_the_model_as_it_was():
    model = Language()
    del model.output_layer.tp_group
    with pytest.raises(AttributeError, match="tp_group"):
        tm.apply(model)
    assert model.mlp.activation_func is F.silu and "forward" not in vars(model.norm)
    model.output_layer.tp_group = Group(1)
    assert tm.apply(model).count("loss") == 1


def test_a_copy_is_patched_for_itself():
    model = Language()
    want = step(model)
    tm.apply(model)
    model.seen = None
    twin = copy.deepcopy(model)
    tm.undo(model)
    assert model.mlp.activation_func is F.silu
    same(step(twin), want)
    assert isinstance(twin.seen, LazyLogits)
    tm.undo(twin)
    assert twin.mlp.activation_func is F.silu
    same(step(twin), want)


def test_loss_without_gradients_forms_no_logits():
    model = Language()
    want = model(IDS, labels=IDS).detach()
    report = tm.apply(model)
    with torch.no_grad():
        loss = model(IDS, labels=IDS)
        torch.testing.assert_close(loss, want, rtol=1e-5, atol=1e-5)
        assert report.head_calls.materialised == 0
        logits = model(IDS)
    assert not logits.requires_grad and logits.grad_fn is None
    with torch.inference_mode():
        model(IDS)


def test_hooks_of_the_output_layer_get_logits():
    model, seen = Language(), []
    model.output_layer.register_forward_hook(lambda module, args, output: seen.append(output[0]))
    want = step(model)
    report = tm.apply(model)
    same(step(model), want)
    assert type(seen[-1]) is torch.Tensor
    assert "forward hook" in report.head_calls.reason


def test_labels_to_ignore_count_nothing():
    model = Language()
    tm.apply(model)
    labels = (IDS + 1).clone()
    labels[0, :4] = -100
    loss = model(IDS, labels=labels)
    assert loss[0, :4].eq(0).all() and loss[0, 4:].gt(0).all()


def test_argmax_from_the_loss():
    model = Language(mtp_num_layers=1)
    tm.apply(model)
    loss = model(IDS, labels=IDS, scale=0.5)
    lazy = model.seen
    known = torch.argmax(lazy, dim=-1)
    assert lazy._calls.materialised == 0
    assert torch.equal(known, model(IDS).transpose(0, 1).argmax(-1))
    assert torch.equal(lazy.argmax(-1, keepdim=True), known[..., None])  # computed
    loss.sum().backward()


def fused_gradients(model, weight, dtype, zeros):
    """main_grad and what Megatron's hook finds when the weight's gradient arrives."""
    weight.main_grad, weight.grad_added_to_main_grad = torch.full(weight.shape, 2.0, dtype=dtype), False
    model.output_layer.gradient_accumulation_fusion = True
    if zeros:
        weight.zero_out_wgrad = True
    found = []
    weight.register_post_accumulate_grad_hook(
        lambda w: found.append((w.grad_added_to_main_grad, w.main_grad.clone(), w.grad.clone()))
    )
    return found


@pytest.mark.parametrize("keep_mb", [0.0, 8.0])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tied", [False, True])
def test_main_grad(dtype, tied, keep_mb):
    model = Language(tied)
    stock = step(model)
    weight = model.embedding.weight if tied else model.output_layer.weight
    others = {name: p.grad for name, p in model.named_parameters() if p is not weight}
    tm.apply(model, keep_mb=keep_mb)
    found = fused_gradients(model, weight, dtype, zeros=tied)
    same(step(model)[:1], stock[:1])
    same({name: p.grad for name, p in model.named_parameters() if p is not weight}, others)
    (flag, main_grad, dummy), *more = found  # once, when the sum was made
    assert flag and not more
    # Of a tied weight the embedding's share is in the gradient that arrives.
    total = (main_grad.float() - 2.0) + (dummy if tied else 0.0)
    want = stock[1] if tied else stock[-1]
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(total, want, rtol=tolerance, atol=tolerance)


def test_main_grad_without_the_flag():
    model = Language()
    want = step(model)[-1]
    tm.apply(model)
    weight = model.output_layer.weight
    weight.main_grad = torch.zeros_like(weight)
    model.output_layer.gradient_accumulation_fusion = True
    step(model)
    assert weight.grad is None  # as Megatron's own layer leaves it
    same(weight.main_grad, want)


def test_main_grad_of_a_head_alone():
    model = Language()
    want = step(model)[-1]
    tm.apply(model)
    weight = model.output_layer.weight
    model.requires_grad_(False)
    weight.requires_grad_(True)
    found = fused_gradients(model, weight, torch.float32, zeros=True)
    step(model)
    (flag, main_grad, dummy), *more = found
    assert flag and not more and not dummy.any()
    same(main_grad - 2.0, want)


def test_frozen_weight():
    model = Language()
    model.output_layer.weight.requires_grad_(False)
    want = step(model)
    tm.apply(model)
    model.output_layer.gradient_accumulation_fusion = True
    same(step(model), want)


def test_public_path():
    assert tm.apply is tigon.megatron.apply
    assert "TigonSpecProvider" in tm.__all__
    with pytest.raises(AttributeError):
        tm.nothing  # noqa: B018


def test_torch_norm_with_float32_weight():
    """Megatron keeps them in a bfloat16 model: the result has the dtype of x, as stock's."""
    norm = nn.RMSNorm(16, eps=1e-6)
    nn.init.normal_(norm.weight, 1.0, 0.1)
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    function, _ = plan_norm(norm)
    got, want = function(norm, None, x), norm(x)
    assert got.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(got, want, rtol=2**-7, atol=0)
