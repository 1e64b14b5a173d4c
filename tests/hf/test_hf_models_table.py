"""Tiny models of transformers' own configurations: the families Liger patches, and rows of docs/models.md."""

import importlib
from pathlib import Path

import pytest
import torch
import transformers
from tiny import assert_as_good, with_uneven_norms

from tigon.integrations.transformers import apply
from tigon.integrations.transformers.patterns.mlp import BATCHED_EXPERTS, EXPERT_GATES, MLPS
from tigon.integrations.transformers.patterns.norms import GATED_NORMS, LAYER_NORMS, NORMS

ROOT = Path(__file__).parents[2]
table = importlib.import_module("models_table")

# Every model type of liger_kernel 0.8.5's dictionary that has a head (pixtral is a tower, in mistral3).
LIGERS = """
deepseek_v2 deepseek_v3 deepseek_v4 exaone4 falcon_h1 gemma gemma2 gemma3 gemma3_text gemma4 gemma4_text
glm4 glm4v glm4v_moe gpt_oss granite hunyuan_v1_dense hunyuan_v1_moe internvl llama llama4 llama4_text
llava ministral mistral mistral3 mixtral mllama muse_glimmer nemotron olmo2 olmo3 paligemma phi3 qwen2
qwen2_5_vl qwen2_vl qwen3 qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next
qwen3_vl qwen3_vl_moe smollm3 smolvlm
"""
FAMILIES = LIGERS.split()
# Rows of the committed page that are made again; the page itself takes minutes.
ROWS = "llama gemma3 mixtral gpt_oss qwen2_vl gpt2 musicgen mamba2 cohere2 phi3 qwen3 dory nemotron arcee "
ROWS += "cohere glm ernie4_5 helium deepseek_v3"


def classes(model_type):
    """Names of the classes of a model type; the multimodal one where there are several."""
    return [name for kind, name in table.models() if kind == model_type]


def build(model_type, dtype=torch.float32):
    """A tiny model whose norms are no identities."""
    torch.manual_seed(0)
    return with_uneven_norms(table.build(model_type, classes(model_type)[-1], tiny=True)).to(dtype)


# Whose stock forward fails.
BROKEN = {("llama4", "5.24.0"): "the output of its text model has no image_outputs"}

# The loss of the first is the outer model's, its head the inner model's, which is given no labels.
FAMILIES += ["nemotron_h_omni", "arcee", "cohere", "glm", "ernie4_5", "helium"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_of_the_family(family):
    """fp32: loss and all gradients together equal stock's within the rounding of another order."""
    if (family, transformers.__version__) in BROKEN:
        pytest.skip(f"stock does not run: {BROKEN[family, transformers.__version__]}")
    model = build(family)
    assert table.compare(model) == table.EQUAL


@pytest.mark.parametrize(
    "family", ["deepseek_v3", "gemma3", "glm4v", "gpt_oss", "llama4_text", "qwen2_vl", "qwen3_next"]
)
def test_a_bf16_step_of_the_family(family):
    """bf16: as near as stock to the same step in fp32, in the loss and in all gradients together."""
    model = build(family, torch.bfloat16)
    exact = table.step(build(family, torch.bfloat16).float())
    wanted = table.step(model)
    places = len(apply(model).replaced)
    got = table.step(model)
    ulp = 2.0**-8
    assert_as_good(*(torch.tensor(value[0]) for value in (got, wanted, exact)), places * ulp, "loss")
    assert_as_good(got[1], wanted[1], exact[1].double(), places * ulp, "gradient")


def test_rows_of_the_page():
    """docs/models.md says what apply does today."""
    text = (ROOT / "docs/models.md").read_text(encoding="utf-8")
    if transformers.__version__ not in text:
        pytest.skip("the page was made with another transformers")
    page = text.splitlines()
    for kind, name in table.models():
        if kind in ROWS.split():
            row = table.line(table.survey(kind, name))
            assert row in page, f"run tools/models_table.py\n{row}"


def test_every_reference_has_an_expression():
    """A reference that does not reduce would match nothing, in silence."""
    for row in (*NORMS, *LAYER_NORMS, *GATED_NORMS, *MLPS, *EXPERT_GATES, *BATCHED_EXPERTS):
        assert row.expression.text
