"""Applying Tigon to the models of a type: what a class-level patch means here.

No class is replaced and no forward is copied: the constructors of one modelling module's models run a
function on each finished model, the outermost one once. It runs on those that exist already too: oumi builds
its model first, and Liger's patch reaches the head and the rotary function of such a model.
"""

from __future__ import annotations

import functools
import gc
import importlib
import threading
from collections.abc import Callable

from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tigon.integrations.transformers.patch import STATE
from tigon.integrations.transformers.recognition import on_cpu

_patches: dict[str, Callable] = {}  # model type -> what to do with a finished model
_originals: dict[type, Callable] = {}  # class -> its own __init__
_building = threading.local()


def on_construction(model_type: str, patch: Callable) -> list[type]:
    """Run ``patch(model)`` on every model of this type, also if built from now on; the classes it covers."""
    classes = _model_classes(model_type)
    if classes:
        _patches[model_type] = patch
    for cls in classes:
        if cls not in _originals:
            _originals[cls] = cls.__init__
            cls.__init__ = _watched(cls.__init__)
    for model in _alive(model_type, tuple(classes)) if classes else ():
        patch(model)
    return classes


def _alive(model_type: str, classes: tuple[type, ...]) -> list[PreTrainedModel]:
    """The models of this type in this process that Tigon is not in, without those inside of another one."""
    models = [v for v in gc.get_objects() if issubclass(type(v), PreTrainedModel) and "config" in vars(v)]
    candidates = [m for m in models if isinstance(m, classes) and m.config.model_type == model_type]
    patched = [m for m in models if STATE in vars(m)]
    inside = {id(part) for model in (*candidates, *patched) for part in model.modules() if part is not model}
    return [model for model in candidates if id(model) not in inside and model not in patched]


def forget() -> None:
    """Give every constructor back; models that exist stay as they are."""
    _patches.clear()
    while _originals:
        cls, original = _originals.popitem()
        cls.__init__ = original


def _model_classes(model_type: str) -> list[type]:
    if model_type not in CONFIG_MAPPING:
        return []
    name = CONFIG_MAPPING[model_type].__module__.replace(".configuration_", ".modeling_")
    try:
        module = importlib.import_module(name)
    except ImportError:
        return []
    return [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, PreTrainedModel) and value.__module__ == name
    ]


def _watched(original):
    @functools.wraps(original)
    def __init__(self, *args, **kwargs):
        depth = getattr(_building, "depth", 0)
        _building.depth = depth + 1
        try:
            original(self, *args, **kwargs)
        finally:
            _building.depth = depth
        patch = _patches.get(getattr(self.config, "model_type", None))
        if depth == 0 and patch is not None:
            with on_cpu():
                patch(self)

    return __init__
