"""Modules of a configuration, tigon's and those of Liger's names: the models' own, with their weights."""

import importlib
import pickle

import pytest
import torch
import torch.nn.functional as F
from tiny import close, config, make

import tigon
from tigon import transformers as tt
from tigon.integrations.liger import modules as liger


def theirs(path):
    module, name = path.rsplit(".", 1)
    return getattr(importlib.import_module(f"transformers.models.{module}"), name)


@pytest.mark.parametrize(
    "ours, other, family",
    [
        (tt.GatedMLP, "llama.modeling_llama.LlamaMLP", "llama"),
        (tt.GatedMLP, "llama.modeling_llama.LlamaMLP", "llama_bias_tied"),
        (tt.GatedMLP, "gemma2.modeling_gemma2.Gemma2MLP", "gemma2"),
        (tt.FusedGatedMLP, "phi3.modeling_phi3.Phi3MLP", "phi3"),
        (liger.LigerSwiGLUMLP, "llama.modeling_llama.LlamaMLP", "llama"),
        (liger.LigerGEGLUMLP, "gemma.modeling_gemma.GemmaMLP", "gemma"),
    ],
)
def test_mlps(ours, other, family):
    stock, mine = theirs(other)(config(family)), ours(config(family))
    mine.load_state_dict(stock.state_dict())
    x = torch.randn(3, 32, requires_grad=True)
    close(mine(x), stock(x))
    assert torch.equal(pickle.loads(pickle.dumps(mine))(x), mine(x))
    close(*(torch.autograd.grad(m(x).square().sum(), [*m.parameters()]) for m in (mine, stock)), ulps=256)


@pytest.mark.parametrize(
    "ours, other",
    [
        (tt.RMSNorm, "llama.modeling_llama.LlamaRMSNorm"),
        (tt.GemmaRMSNorm, "gemma.modeling_gemma.GemmaRMSNorm"),
        (liger.LigerRMSNorm, "llama.modeling_llama.LlamaRMSNorm"),
        (liger.LigerRMSNormForGemma2, "gemma2.modeling_gemma2.Gemma2RMSNorm"),
    ],
)
def test_norms(ours, other):
    one, two = ours(16, eps=1e-5), theirs(other)(16, eps=1e-5)
    assert torch.equal(one.weight, two.weight)
    with torch.no_grad():
        two.weight.add_(0.1 * torch.randn(16))
    one.load_state_dict(two.state_dict())
    x = torch.randn(4, 16).bfloat16()
    assert torch.equal(one(x), two(x))
    assert tt.RMSNorm(4, eps=1e-3).variance_epsilon == 1e-3


def test_unknown_activations_are_refused():
    with pytest.raises(tigon.Error, match=r"\[GatedMLP\] hidden_act must be one of .*, got 'tanh'"):
        tt.GatedMLP(config(hidden_act="tanh"))


@pytest.mark.parametrize("count", [None, 7, torch.tensor(7)])
@pytest.mark.parametrize("given", ["labels", "shift_labels"])
def test_causal_lm_loss(given, count):
    """transformers' loss of the same hidden states, its way of counting included."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    hidden, weight = torch.randn(2, 6, 16, requires_grad=True), torch.randn(31, 16, requires_grad=True)
    labels = torch.randint(0, 31, (2, 6)).masked_fill(torch.rand(2, 6) < 0.3, -100)
    shifted = None
    if given == "shift_labels":
        shifted = F.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()
    wanted = ForCausalLMLoss(hidden @ weight.T, labels, 31, count, shift_labels=shifted)
    got = tt.causal_lm_loss(hidden, weight, labels, num_items_in_batch=count, shift_labels=shifted)
    close(got, wanted)
    close(*(torch.autograd.grad(x, (hidden, weight)) for x in (got, wanted)), ulps=256)


def test_rotary():
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    q, k, angle = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 5, 8)
    close(*(f(q, k, angle.cos(), angle.sin()) for f in (tt.apply_rotary_pos_emb, apply_rotary_pos_emb)))


@pytest.mark.parametrize("positions", [None, "packed"])
def test_rotary_modules_are_the_models_own(positions):
    """Llama's table and function, Qwen3's norms before it, from q and k alone."""
    from transformers.models.qwen3 import modeling_qwen3 as qwen3

    settings = config("qwen3", rope_parameters={"rope_type": "default", "rope_theta": 5000.0})
    q, k = torch.randn(2, 4, 7, 8, requires_grad=True), torch.randn(2, 2, 7, 8)
    ids = torch.arange(7)[None].repeat(2, 1)
    if positions == "packed":
        ids = torch.tensor([[0, 1, 2, 0, 1, 2, 3], [4, 5, 6, 7, 0, 1, 2]])
    tables = qwen3.Qwen3RotaryEmbedding(settings)(q, ids)
    given = None if positions is None else ids
    rotary = tt.RotaryEmbedding(8, 5000.0)
    close(rotary(q, k, given), qwen3.apply_rotary_pos_emb(q, k, *tables))
    close(rotary(q, None, given), rotary(q, k, given)[0])
    turned = tt.RotaryEmbedding(8, 5000.0, unsqueeze_dim=2)(q.transpose(1, 2), k.transpose(1, 2), given)
    close(turned[1].transpose(1, 2), rotary(q, k, given)[1])
    both = tt.QKNormRotaryEmbedding(8, 5000.0, eps=1e-5)
    norms = [qwen3.Qwen3RMSNorm(8, eps=1e-5) for _ in range(2)]
    with torch.no_grad():
        for weight, norm in zip((both.q_weight, both.k_weight), norms, strict=True):
            norm.weight.add_(0.3 * torch.randn(8))
            weight.copy_(norm.weight)
    got = both(q, k, given)
    wanted = qwen3.apply_rotary_pos_emb(norms[0](q), norms[1](k), *tables)
    close(got, wanted)
    grads = [
        torch.autograd.grad(y[0].cos().sum(), (q, w))
        for y, w in ((got, both.q_weight), (wanted, norms[0].weight))
    ]
    close(*grads, ulps=256)
    close(both(q, None, given), got[0])


def test_rotary_modules_partly_and_in_16_bits():
    """The first columns turn, the others pass; angles stay float32 when the module is moved to bfloat16."""
    rotary = tt.RotaryEmbedding(8, rotary_dim=4)
    q = torch.randn(1, 2, 5000, 8)
    assert torch.equal(rotary(q)[..., 4:], q[..., 4:])
    half = tt.QKNormRotaryEmbedding(8, offset=1.0, rounding="gemma").bfloat16()
    assert half.q_weight.dtype == torch.bfloat16 and half.q_weight.abs().max() == 0
    got = half(q.bfloat16())
    wanted = tt.QKNormRotaryEmbedding(8)(q.bfloat16().float())
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), wanted, rtol=2e-2, atol=2e-2)
    assert "rotary_dim=4" in repr(rotary) and "offset=1.0" in repr(half)
    compiled = torch.compile(rotary, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(q[:, :, :9]), rotary(q[:, :, :9]))


def test_auto_class_keywords_and_loading_info(tmp_path):
    make().save_pretrained(tmp_path)
    model, info = tigon.AutoTigonForCausalLM.from_pretrained(tmp_path, output_loading_info=True, rope=False)
    assert not info["missing_keys"] and model.tigon_report.count("rope") == 0
    assert model.tigon_report.count("norm") == 5
