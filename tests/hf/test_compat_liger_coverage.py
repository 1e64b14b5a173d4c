"""Liger's switch on a model, for all of its types: Tigon replaces what Liger would have replaced, counted.

liger_coverage.json has, for each type and for models made of others, the modules by class whose forward Liger
0.8.5 exchanges by ``_apply_liger_kernel_to_instance(model)``, whether a rotary function (``rope``) and the
forward with the loss (``head``). It was counted with Liger's own code, whose patching needs no GPU.
"""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
import transformers
from tiny import report_of
from tiny_config import tiny_config

from tigon.integrations.liger import patching

COUNTED = json.loads((Path(__file__).parent / "liger_coverage.json").read_text())
OURS = {"ReLUSquaredActivation": "NemotronMLP"}  # where a larger part is replaced


def test_every_type_is_counted():
    assert {name for name in COUNTED if "+" not in name} == {*patching.MODEL_TYPE_TO_APPLY_LIGER_FN}


def made(name):
    """A tiny model without data; ``llava+pixtral+mistral`` has these parts."""
    model_type, *parts = name.split("+")
    cls = getattr(transformers, COUNTED[name]["class"])
    own = transformers.CONFIG_MAPPING[model_type]
    configs = [transformers.CONFIG_MAPPING[part]() for part in parts]
    fields = {
        ("vision" if part == "pixtral" else "text") + "_config": config
        for part, config in zip(parts, configs, strict=True)
    }
    config = own(**fields)
    if not isinstance(config, cls.config_class):
        config = config.get_text_config(decoder=True)
    with torch.device("meta"):
        return cls(tiny_config(config))


def by_kind(model) -> Counter:
    """What the report of a patched model counts, in the words of the file."""
    entries = report_of(model).replaced
    return Counter({"rope": "rope", "loss": "head"}.get(entry.slot, entry.kind) for entry in entries)


@pytest.mark.parametrize("name", COUNTED)
def test_as_much_as_liger(name):
    if not hasattr(transformers, COUNTED[name]["class"]):
        pytest.skip(f"transformers {transformers.__version__} has no {COUNTED[name]['class']}")
    model = made(name)
    patching._apply_liger_kernel_to_instance(model)
    found = by_kind(model)
    wanted = {OURS.get(kind, kind): count for kind, count in COUNTED[name].items() if kind != "class"}
    short = {kind: (found[kind], count) for kind, count in wanted.items() if found[kind] < count}
    assert not short, "(of Tigon, of Liger)"


def test_what_is_named_counts():
    """A switch of the text model's function, named beside the outer model's, is that and no default."""
    model = made("llava")
    patching._apply_liger_kernel_to_instance(model, rope=False)
    assert by_kind(model)["rope"] == 0 and by_kind(model)["LlamaMLP"] == 2
    model = made("internvl")
    patching.apply_liger_kernel_to_internvl(model=model, swiglu=False, rms_norm=False, layer_norm=False)
    assert {*by_kind(model)} == {"rope", "head"}
