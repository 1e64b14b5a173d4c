"""Applying Tigon to models that are built later: what a class-level patch means here.

No class is replaced and no forward is copied: the constructors of one modelling module's models run a
function on each finished model, the outermost one once.
"""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable

from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tigon.integrations.transformers.probe import on_cpu

_patches: dict[str, Callable] = {}  # model type -> what to do with a finished model
_originals: dict[type, Callable] = {}  # class -> its own __init__
_building = threading.local()


def on_construction(model_type: str, patch: Callable) -> list[type]:
    """Run ``patch(model)`` on every model of this type built from now on; the classes it covers."""
    classes = _model_classes(model_type)
    if classes:
        _patches[model_type] = patch
    for cls in classes:
        if cls not in _originals:
            _originals[cls] = cls.__init__
            cls.__init__ = _watched(cls.__init__)
    return classes


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
