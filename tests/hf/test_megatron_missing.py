"""tigon.megatron where megatron-core is not installed."""

import sys

import pytest
import torch
from test_megatron_parts import Language, draw

import tigon.megatron as tm


@pytest.fixture
def no_megatron(monkeypatch):
    """As where megatron-core is not installed."""

    class Missing:
        def find_spec(name, *rest):
            if name.partition(".")[0] == "megatron":
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    specs = "tigon.integrations.megatron.specs"
    for name in [name for name in sys.modules if name.partition(".")[0] == "megatron" or name == specs]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Missing, *sys.meta_path])


NEED_MEGATRON = ("TigonSpecProvider", "gpt_block_spec", "gpt_layer_spec", "hybrid_stack_spec", "with_norms")


@pytest.mark.parametrize("name", tm.__all__)
def test_names_without_megatron(name, no_megatron):
    """Every public name: it is there, or an ImportError says what to install."""
    if name not in NEED_MEGATRON:
        assert getattr(tm, name)
        return
    with pytest.raises(ImportError, match=rf"tigon.megatron.{name} needs megatron-core 0.16 or newer \(pip "):
        getattr(tm, name)


def test_calls_without_megatron(no_megatron):
    """What goes to Megatron's own function says that it is missing; everything else runs."""
    x, weights = draw(4, 8), draw(4, 1)
    calls = {
        "bias_swiglu_impl": lambda: tm.bias_swiglu_impl(x, None, fp8_input_store=True),
        "weighted_bias_swiglu_impl": lambda: tm.weighted_bias_swiglu_impl(x, None, weights, True),
        "install_rope_fusion": tm.install_rope_fusion,
    }
    for name, call in calls.items():
        with pytest.raises(ImportError, match=f"tigon.megatron.{name} needs megatron-core .*No module named"):
            call()
    assert tm.bias_swiglu_impl(x, None).shape == (4, 4)
    loss = tm.fused_vocab_parallel_cross_entropy(x[:, None], torch.zeros(4, 1, dtype=torch.long))
    assert loss.shape == (4, 1)
    assert tm.apply(Language()).count("loss") == 1
