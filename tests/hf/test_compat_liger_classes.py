"""Liger's patch of a whole class: models made or loaded after it, models that exist already."""

import torch
import transformers
from tiny import batch, config, make, report_of, same, step
from transformers import AutoModelForCausalLM

import tigon
from tigon.integrations import liger
from tigon.integrations.liger import patching
from tigon.integrations.transformers import LazyLogits


def test_class_level_patch(facade, tmp_path):
    """apply_liger_kernel_to_llama() before loading, as LLaMA-Factory and Axolotl do it."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    inputs = batch()
    stock = make()
    wanted = step(stock, inputs)
    stock.save_pretrained(tmp_path)
    before = transformers.LlamaForCausalLM.__init__
    assert MODEL_TYPE_TO_APPLY_LIGER_FN["llama"] is apply_liger_kernel_to_llama
    apply_liger_kernel_to_llama(rope=None)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").train()
    built = transformers.LlamaForCausalLM(config())
    other = make("qwen2")
    for model in (loaded, built):
        report = report_of(model)
        assert (report.count("norm"), report.count("mlp"), report.count("rope")) == (5, 2, 0)
        assert isinstance(model(**inputs).logits, LazyLogits)
        assert not hasattr(model.model, "_tigon_state"), "applied to the inner model too"
    assert not hasattr(other, "_tigon_state")
    got = step(loaded, inputs)
    same(got, wanted)
    liger.uninstall()
    assert transformers.LlamaForCausalLM.__init__ is before
    assert not hasattr(make(), "_tigon_state")


def test_class_level_patch_reaches_models_that_exist(facade):
    """oumi builds its model, then calls _apply_liger_kernel; what is patched or of another type stays."""
    from liger_kernel.transformers import _apply_liger_kernel

    model, stock, other, mine = make(), make(), make("qwen2"), make(seed=1)
    inner = make().model
    before = tigon.apply(mine, norm=False)
    inputs, wanted = batch(), step(stock, batch())
    _apply_liger_kernel("llama")
    assert report_of(model).count("norm") == report_of(inner).count("norm") == 5
    assert "_tigon_state" not in vars(model.model) and "_tigon_state" not in vars(other)
    assert report_of(mine) is before and before.count("norm") == 0
    same(step(model, inputs), wanted)
    report_of(model).check()
    report = report_of(model)
    _apply_liger_kernel("llama")
    assert report_of(model) is report


def test_class_level_patch_on_the_meta_device(facade):
    patching.apply_liger_kernel_to_llama()
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config())
    assert report_of(model).count("norm") == 5
    model = model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    model.model.rotary_emb.inv_freq.copy_(make().model.rotary_emb.inv_freq)
    assert model.train()(**batch()).loss.isfinite()
