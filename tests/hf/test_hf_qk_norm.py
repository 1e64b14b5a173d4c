"""Norms of q and k and the rotary embedding behind them in one pass, wherever stock's statements allow it."""

import copy
import functools
import importlib
from unittest import mock

import pytest
import torch
import transformers
from test_hf_models_table import build, table
from tiny import adapted, assert_step_as_good, batch, close, double, make, same, step, with_uneven_norms
from tiny_config import tiny_config
from torch import nn
from variants import variant

import tigon
from tigon.integrations.transformers import apply as tigon_apply
from tigon.integrations.transformers import qk_norm, undo

apply = functools.partial(tigon_apply, qk_norm=True)


@pytest.fixture
def calls():
    """Calls of the fused op."""
    with mock.patch.object(qk_norm, "qk_norm_rope", wraps=qk_norm.qk_norm_rope) as op:
        yield op.call_args_list


def tiny(model_type):
    """A tiny model whose norms are no identities."""
    if model_type != "glm4_moe":
        return build(model_type)
    config = tiny_config(transformers.Glm4MoeConfig(use_qk_norm=True))  # its default has none
    return with_uneven_norms(transformers.Glm4MoeForCausalLM(config))


# Norm inside the view's statement, behind the transposed view, before it under a condition, with the rotation
# under a condition, by one tensor at a time, behind a chunk of the projection, late and gemma forms.
NAMES = """
qwen3 gemma3_text glm4_moe exaone4 gemma4_text qwen3_5_text afmoe lfm2 qwen3_vl qwen3_moe minimax_m3_vl
apertus hy_v3 laguna
"""
FAMILIES = tuple(NAMES.split())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_of_the_family(family, calls):
    model = tiny(family)
    wanted = table.step(model)
    report = apply(model, **dict.fromkeys(("mlp", "experts", "router", "loss"), False))
    assert report.count("qk_norm") and not [entry for entry in report.left if entry.slot == "qk_norm"]
    got = table.step(model)
    assert calls
    assert abs(got[0] - wanted[0]) <= table.TOLERANCE["loss"] * abs(wanted[0])
    assert (got[1] - wanted[1]).norm() <= table.TOLERANCE["gradient"] * wanted[1].norm()


@pytest.mark.parametrize("family", ["olmo2", "hunyuan_v1_dense", "cohere", "llama", "deepseek_v3"])
def test_others_stay(family):
    """Norms over all heads, behind the rotation, of another kind, or none: who asked for them is told."""
    model = tiny(family)
    (entry,) = [entry for entry in apply(model).entries if entry.slot == "qk_norm"]
    assert not entry.replaced and "no attention normalises" in entry.reason
    undo(model)
    with pytest.raises(tigon.Error, match="strict.*no attention normalises"):
        apply(model, strict=True)
    assert not [e for e in tigon_apply(model).entries if e.slot == "qk_norm"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_as_good_as_stock_and_the_bits_of_norm_and_rope(dtype, device, calls):
    stock = make("qwen3", device=device, dtype=dtype)
    inputs = batch(device)
    exact, wanted = step(double(stock), inputs), step(stock, inputs)
    apart, together = copy.deepcopy(stock), copy.deepcopy(stock)
    apply(apart, qk_norm=False)
    report = apply(together)
    one, got = step(apart, inputs), step(together, inputs)
    assert len(calls) == 2 == report.count("qk_norm")
    ulp = 2.0**-23 if dtype == torch.float32 else 2.0**-8
    assert_step_as_good(got, wanted, exact, len(report.replaced), ulp)
    if device == "cpu":
        assert torch.equal(got[0], one[0])


def test_slots_decide(device, calls):
    for off in ("norm", "rope", "qk_norm"):
        model = make("qwen3", device=device)
        report = apply(model, **{off: False})
        assert report.count("qk_norm") == 0
        left = [entry.reason for entry in report.left]
        assert left == ([] if off == "qk_norm" else ["qk_norm needs the slots norm and rope"])
        step(model, batch(device))
    assert not calls


def test_a_norm_that_changed_runs_by_itself(device, calls):
    """Another class in its place, other numbers for k than for q, a rotary function rebound since."""
    model, inputs = make("qwen3", device=device), batch(device)
    apply(model)
    first, second = (layer.self_attn for layer in model.model.layers)
    first.q_norm = nn.RMSNorm(8, eps=1e-6, device=device)
    second.k_norm.variance_epsilon = 0.5
    stock = copy.deepcopy(model)
    undo(stock)
    got, wanted = step(model, inputs), step(stock, inputs)
    assert not calls
    close(got[0], wanted[0])


def test_lora_on_the_projections_and_a_norm_to_save(device, calls):
    options = {"target_modules": ["q_proj", "k_proj"], "modules_to_save": ["q_norm"]}
    model = adapted(make("qwen3", device=device), **options)
    inputs = batch(device)
    wanted = step(model, inputs)
    apply(model)
    same(step(model, inputs), wanted, ulps=64)
    assert not calls  # PEFT's wrapper of q_norm is no norm
    model = adapted(make("qwen3", device=device), target_modules=["q_proj"])
    apply(model)
    step(model, inputs)
    assert len(calls) == 2


class Attention(nn.Module):
    """Statements around which a norm may not be moved."""

    def __init__(self):
        super().__init__()
        attention = make("qwen3").model.layers[0].self_attn
        self.q_norm, self.k_norm = attention.q_norm, attention.k_norm


namespace = vars(importlib.import_module("transformers.models.qwen3.modeling_qwen3"))
apply_rotary_pos_emb = namespace["apply_rotary_pos_emb"]


class Plain(Attention):
    def forward(self, q, k, cos, sin):
        q = self.q_norm(q)
        k = self.k_norm(k)
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        return q, k


TURN = "        q, k = apply"
CHANGES = {
    "read": [(TURN, f"        v = k + 1\n{TURN}"), ("return q, k", "return q, k, v")],
    "scaled": [("self.q_norm(q)", "self.q_norm(q) * 2")],
    "crossed": [("q, k = apply", "k, q = apply")],
    "other axes": [(f"_norm({x})", f"_norm({x}).transpose(2, 3)") for x in "qk"],
    "branched": [(TURN, f"        if q.shape[0] > 1:\n    {TURN}")],
}


@pytest.mark.parametrize("name", CHANGES)
def test_forms_that_stay(name):
    assert qk_norm.rewrite(variant(Plain).forward) is not None
    assert qk_norm.rewrite(variant(Plain, *CHANGES[name]).forward) is None
