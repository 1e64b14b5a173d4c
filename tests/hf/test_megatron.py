"""tigon.megatron in Megatron-Core's own models, on the CPU; test_megatron_parts.py needs no Megatron."""

import types

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

pytest.importorskip("megatron.core")

import megatron.core
import megatron_tiny as tiny
from megatron_tiny import config, data, gpt, hybrid, same, step
from tiny import close, same_bits

import tigon
import tigon.megatron as tm

VERSION = tuple(int(part) for part in megatron.core.__version__.split("+")[0].split(".")[:2])
newer = pytest.mark.skipif(VERSION < (0, 19), reason="of Megatron-Core 0.19 and later")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module", autouse=True)
def groups():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with tiny.megatron():
            yield
    finally:
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def no_metrics_of_the_last_model():
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    MTPLossLoggingHelper.tracker.clear()


LAYERNORM = {"normalization": "LayerNorm", "add_bias_linear": True}
GELU = {"activation_func": F.gelu}
MUP = {"use_mup": True, "mup_base_hidden_size": 8}
MOE = {"num_moe_experts": 2, "moe_router_topk": 2, "moe_router_load_balancing_type": "none"}
MOE |= {"moe_token_dispatcher_type": "allgather", "moe_ffn_hidden_size": 24}


@pytest.mark.parametrize(
    ("options", "norms"),
    [
        ({}, 5),
        ({"tied": True}, 5),
        (LAYERNORM, 5),
        ({"qk_layernorm": True, **GELU}, 9),
        ({"qk_l2_norm": True, "bias_activation_fusion": False, **GELU}, 9),
        ({"rotary_interleaved": True, "num_query_groups": 2, "model": {"rotary_percent": 0.5}}, 5),
        ({"cross_entropy_loss_fusion": True}, 5),
        pytest.param(MUP, 5, marks=newer),
        ({"mtp": 1}, 10),
        ({"mtp": 2, "tied": True}, 15),
    ],
    ids=str,
)
def test_gpt(options, norms):
    interleaved = options.get("rotary_interleaved")
    if interleaved:  # Megatron asks for Transformer Engine's version here: set behind its back
        options = {name: value for name, value in options.items() if name != "rotary_interleaved"}
    model = gpt(**options)
    if interleaved:
        model.config.rotary_interleaved = model.rotary_pos_emb.rotary_interleaved = True
    want = step(model)
    report = tm.apply(model)
    # Megatron's fused loss rounds the gradient of the logits to bfloat16.
    same(step(model), step(gpt()) if model.config.cross_entropy_loss_fusion else want)
    report.check()
    mtp = options.get("mtp") or 0
    assert not report.left, report
    layers = 2 + mtp
    counts = [report.count(slot) for slot in ("norm", "mlp", "rope", "loss")]
    assert counts == [norms, layers, layers, 1], report
    calls = report.head_calls
    assert (calls.fused, calls.materialised, calls.computed) == (1 + mtp, 0, 0)
    tm.undo(model)
    same_bits(step(model), want)


@pytest.mark.parametrize("tied", [False, True])
def test_deterministic_mode(tied, monkeypatch):
    """What Megatron's --deterministic-mode sets: the head is fused, steps repeat, rows are independent."""
    for name, value in (
        ("NCCL_ALGO", "Ring"),
        ("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0"),
        ("CUBLAS_WORKSPACE_CONFIG", ":4096:8"),
    ):
        monkeypatch.setenv(name, value)  # and as it was afterwards
    tiny.deterministic_mode()
    try:
        model = gpt(tied=tied, deterministic_mode=True)  # its rules refuse cross_entropy_loss_fusion
        want = step(model)
        report = tm.apply(model)
        first, second = step(model), step(model)
        report.check()
        assert report.head_calls.materialised == 0 and report.count("loss") == 1
        same(first, want)
        same_bits(second, first)
        hidden, labels = torch.randn(16, 2, 32), torch.randint(0, tiny.VOCAB, (2, 16))

        def losses(at):
            logits, _ = model.output_layer(hidden[:, at], weight=head)
            return model.compute_language_model_loss(labels[at], logits)

        head = model.shared_embedding_or_output_weight() if tied else None
        assert torch.equal(losses(slice(0, 2))[1:], losses(slice(1, 2)))
    finally:
        torch.use_deterministic_algorithms(False)


def test_batch_invariant_mode():
    """Megatron's other switch replaces matmuls: the output layer keeps its own, and the report says so."""
    model = gpt()
    want = step(model)
    model.config.batch_invariant_mode = True  # its construction asks for FlashAttention
    report = tm.apply(model)
    same(step(model), want)
    assert report.count("loss") == 0 and "batch_invariant_mode asks for Megatron's own matmul" in str(report)


@newer
def test_mtp_acceptance_count_without_logits():
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    def counts(model):
        MTPLossLoggingHelper.tracker.clear()
        step(model)
        tracker = MTPLossLoggingHelper.tracker
        return {name: value.clone() for name, value in tracker.items() if torch.is_tensor(value)}

    model = gpt(mtp=1)
    with torch.no_grad():  # some tokens are guessed right
        model.output_layer.weight.copy_(model.embedding.word_embeddings.weight * 3)
    want = counts(model)
    report = tm.apply(model)
    got = counts(model)
    assert report.head_calls.materialised == 0
    assert got.keys() == want.keys() and len(got) > 1
    for name, value in want.items():
        torch.testing.assert_close(got[name], value)


HYBRIDS = {
    "plain": pytest.param({}, 2),
    "scaled": pytest.param(MUP, 2, marks=newer),
    "experts": pytest.param({"pattern": "*-*E", **MOE}, 3, marks=newer),  # 0.16's want Transformer Engine
}


@pytest.mark.parametrize("options, mlps", HYBRIDS.values(), ids=HYBRIDS)
def test_hybrid(options, mlps):
    model = hybrid(**options)
    want = step(model)
    report = tm.apply(model)
    same(step(model), want)
    assert not report.left and report.head_calls.fused == 1
    assert [report.count(slot) for slot in ("norm", "mlp", "rope", "loss")] == [5, mlps, 2, 1], report


def test_hybrid_with_norms_in_its_slots():
    model = hybrid(norms=True)
    norms = [type(m) for m in model.modules() if "Norm" in type(m).__name__]
    assert norms == [tm.RMSNorm] * 5 and norms[-1] is type(model.decoder.final_norm)
    same(step(model), step(hybrid()))
    zero = hybrid(norms=True, layernorm_zero_centered_gamma=True)
    same(step(zero), step(hybrid()))


@pytest.mark.parametrize("builder", [tm.gpt_layer_spec, tm.gpt_block_spec, tm.hybrid_stack_spec])
def test_specs_refuse_kitchen(builder):
    """Kitchen's layers come from its own provider; a spec that left them out would say nothing of it."""
    conf = config()
    fields = [name for name in ("use_kitchen", "use_kitchen_attention") if hasattr(conf, name)]
    assert fields
    for field in fields:
        setattr(conf, field, True)
        with pytest.raises(tigon.Error, match=rf"megatron.{builder.__name__}\] {field} must be False"):
            builder(conf)
        setattr(conf, field, False)
    if builder is tm.gpt_layer_spec:
        with pytest.raises(tigon.Error, match="use_kitchen must be False"):
            builder(conf, use_kitchen=True)


class Grouped(torch.nn.Module):
    """The grouped matmul that Transformer Engine has, in its constructor's and call's form."""

    def __init__(self, experts, inputs, outputs, **unused):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(experts, outputs, inputs) / inputs**0.5)

    def forward(self, x, tokens_per_expert):
        parts = zip(x.split(tokens_per_expert), self.weight, strict=True)
        return torch.cat([part @ weight.T for part, weight in parts]), None


@pytest.mark.parametrize("fused", [True, False])
def test_grouped_experts(fused):
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.moe.experts import TEGroupedMLP

    model = gpt()
    conf = config(moe_ffn_hidden_size=24, num_moe_experts=3, bias_activation_fusion=fused)
    parts = types.SimpleNamespace(linear_fc1=Grouped, linear_fc2=Grouped, activation_func=None)
    groups = ProcessGroupCollection.use_mpu_process_groups(["ep", "expt_tp"])
    model.experts = TEGroupedMLP(3, conf, parts, groups)
    given = torch.randn(11, 32, requires_grad=True), torch.tensor([5, 0, 6]), torch.rand(11).requires_grad_()

    def run():
        y, _ = model.experts(*given)
        wanted = (given[0], given[2], *model.experts.parameters())
        return y, *torch.autograd.grad(y, wanted, torch.ones_like(y))

    wanted = run()
    report = tm.apply(model, norm=False, rope=False, loss=False)
    (entry,) = [entry for entry in report.replaced if entry.path == "experts"]
    assert entry.by == "tigon.swiglu" and model.experts.activation_func is tigon.swiglu
    torch.testing.assert_close(run(), wanted)
    tm.undo(model)
    assert model.experts.config is conf
    close(run(), wanted, ulps=0)
    model.experts._with_fused_impl = True
    assert "op_fuser" in tm.apply(model, norm=False, rope=False, loss=False).left[0].reason


@newer  # the router of 0.16.1 asks for Transformer Engine
@pytest.mark.parametrize("experts", [{"moe_shared_expert_intermediate_size": 16}, {}], ids=str)
def test_experts(experts):
    model = gpt(**MOE, **experts)
    want = step(model)
    report = tm.apply(model)
    same(step(model), want)
    assert report.count("mlp") == 4 + 2 * len(experts), report


# Specs.


@pytest.mark.parametrize("options", [{}, LAYERNORM, {"qk_layernorm": True}], ids=str)
def test_specs(options):
    want = step(gpt(**options))
    for spec in (tm.gpt_block_spec, tm.gpt_layer_spec):
        model = gpt(spec, **options)
        same(step(model), want)
        kinds = [type(m) for m in model.modules() if "Norm" in type(m).__name__]
        ours = tm.LayerNorm if options is LAYERNORM else tm.RMSNorm
        final = [type(model.decoder.final_layernorm)] if spec is tm.gpt_layer_spec else []
        assert [kind for kind in kinds if kind is not ours] == final
        report = tm.apply(model)
        same(step(model), want)
        assert not report.left


def test_specs_of_what_megatron_has_no_norm_for():
    zero = gpt(tm.gpt_block_spec, layernorm_zero_centered_gamma=True)
    assert all(not p.any() for name, p in zero.named_parameters() if "layernorm" in name)
    same(step(zero), step(gpt()))
    if VERSION >= (0, 19):
        fused = gpt(tm.gpt_block_spec, fused_residual_rmsnorm=True)
        assert fused.decoder.layers[0].input_layernorm.returns_residual
        same(step(fused), step(gpt()))


def test_spec_provider():
    provider = tm.TigonSpecProvider()
    assert provider.layer_norm(rms_norm=True, for_qk=True) is tm.Norm
    assert provider.layer_norm(has_residual=True) is tm.NormWithResidual
    assert provider.activation_func() is tm.Activation
    assert provider.fuse_layernorm_and_linear() is False


def test_mtp_spec_with_norms():
    spec = tm.with_norms(tiny.mtp_spec(config(mtp_num_layers=1), tm.gpt_layer_spec(config())).layer_specs[0])
    assert spec.submodules.enorm is spec.submodules.hnorm is tm.Norm


# What a model keeps.


def test_other_models_stay_as_they_are():
    one, two = gpt(), gpt()
    want = step(two)
    two.load_state_dict(one.state_dict())
    tm.apply(one)
    assert not one.config.apply_rope_fusion and not one.config.use_te_activation_func
    again = step(two)
    assert torch.equal(again[0], want[0])
    assert one.state_dict().keys() == two.state_dict().keys()


def test_wrapped_in_float16():
    from megatron.core.transformer.module import Float16Module

    model = gpt(bf16=True, params_dtype=torch.bfloat16)
    inner = Float16Module(model.config, model)
    report = tm.apply(inner)
    inputs, labels, _ = data()
    loss = inner(*inputs, labels=labels)
    assert loss.dtype == torch.float32 and report.head_calls.fused == 1
    loss.sum().backward()
    tm.undo(inner)
    torch.testing.assert_close(inner(*inputs, labels=labels), loss, rtol=2e-2, atol=2e-2)


def test_logits_and_evaluation():
    model = gpt()
    inputs, labels, _ = data()
    logits, loss = model(*inputs), model(*inputs, labels=labels)
    report = tm.apply(model)
    ours = model(*inputs)
    assert type(ours) is torch.Tensor and ours.grad_fn is not None
    torch.testing.assert_close(ours, logits, rtol=1e-5, atol=1e-5)
    made = report.head_calls.materialised
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(*inputs, labels=labels), loss, rtol=1e-5, atol=1e-5)
        assert report.head_calls.materialised == made
    with torch.inference_mode():
        torch.testing.assert_close(model(*inputs), logits, rtol=1e-5, atol=1e-5)


def test_heads_that_are_left():
    model = gpt()
    model.config.defer_embedding_wgrad_compute = True
    assert "defer_embedding_wgrad_compute" in tm.apply(model).left[0].reason
    tm.undo(model)
    model.config.defer_embedding_wgrad_compute = False
    model.output_layer.forward = lambda *args, **kwargs: None
    assert "bound to the instance" in tm.apply(model).left[0].reason
    with pytest.raises(tigon.Error, match="without Tigon"):
        tm.apply(model)


@pytest.mark.parametrize("tied", [False, True])
def test_megatron_ddp_and_main_grad(tied, monkeypatch):
    """Megatron's DDP: its hooks take the gradient that the head left in main_grad."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)  # it is asked for, and not used
    model = gpt(tied=tied)
    _, want = step(model)
    model.zero_grad(set_to_none=True)
    options = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=True)
    wrapped = DistributedDataParallel(model.config, options, model)
    tm.apply(wrapped)
    model.output_layer.gradient_accumulation_fusion = True  # Megatron's own needs Apex
    inputs, labels, upstream = data()
    for times in (1, 2):
        loss = wrapped(*inputs, labels=labels)
        (loss * upstream).sum().backward()
        for name, p in model.named_parameters():
            scale = want[name].abs().max().item()
            torch.testing.assert_close(p.main_grad, times * want[name], rtol=1e-4, atol=1e-5 * scale + 1e-7)
            assert p.grad is None
        for group in wrapped.bucket_groups:
            group.is_last_microbatch = False
    wrapped.zero_grad_buffer()


# Functions against Megatron's own.


def test_functions_beside_megatrons():
    from megatron.core.fusions import fused_bias_geglu, fused_bias_swiglu
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    x, bias = torch.randn(6, 2, 16), torch.randn(16)
    for b in (None, bias):
        want = fused_bias_swiglu.bias_swiglu_impl(x, b)
        torch.testing.assert_close(tm.bias_swiglu_impl(x, b, False, False), want)
        torch.testing.assert_close(tm.bias_geglu_impl(x, b), fused_bias_geglu.bias_geglu_impl(x, b))
    flat, weights = x.view(12, 16), torch.rand(12, 1)
    torch.testing.assert_close(
        tm.weighted_bias_swiglu_impl(flat, None, weights),
        fused_bias_swiglu.weighted_bias_swiglu_impl(flat, None, weights),
    )
    target = torch.randint(0, 16, (6, 2))
    for smoothing in (0.0, 0.1):
        want = vocab_parallel_cross_entropy(x.clone(), target, smoothing)
        got = tm.vocab_parallel_cross_entropy(x, target, smoothing)
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("fused", [False, True])
def test_ignored_labels_beside_megatrons(fused):
    """What docs/megatron.md says of -100: lse minus the maximum and softmax there, nothing here."""
    from megatron.core import parallel_state
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    logits = torch.randn(3, 2, 16, requires_grad=True)
    target = torch.full((3, 2), -100)
    group = {"tp_group": parallel_state.get_tensor_model_parallel_group()} if fused else {}
    theirs = fused_vocab_parallel_cross_entropy if fused else vocab_parallel_cross_entropy
    loss = theirs(logits.clone(), target, **group)
    torch.testing.assert_close(loss, logits.logsumexp(-1) - logits.amax(-1))
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    tolerance = {"rtol": 2.0**-8, "atol": 0.0} if fused else {}  # fused, it is rounded to bfloat16
    torch.testing.assert_close(gradient, logits.softmax(-1), **tolerance)
    ours = getattr(tm, theirs.__name__)(logits, target, **group)
    (gradient,) = torch.autograd.grad(ours.sum(), logits)
    assert not ours.any() and not gradient.any()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_rope_thd_beside_megatrons(packed, rank):
    from megatron.core.models.common.embeddings import rope_utils
    from test_megatron_parts import Group, angles

    ends = torch.tensor([0, 8, 12, 24], dtype=torch.int32)
    freqs = angles(24 if packed else 12, 6, False)
    t = torch.randn(12, 2, 8)
    want = rope_utils._apply_rotary_pos_emb_thd(t, ends, freqs, cp_group=Group(2, rank))
    got = tm.fused_apply_rotary_pos_emb_thd(t, ends, freqs, cp_size=2, cp_rank=rank)
    torch.testing.assert_close(got, want)


def test_rope_fusion_by_configuration():
    assert tm.install_rope_fusion()
    want = step(gpt())
    model = gpt(apply_rope_fusion=True)
    same(step(model), want)
    report = tm.apply(model)
    same(step(model), want)
    assert report.count("rope") == 2
