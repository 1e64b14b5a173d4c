"""What tigon.nn shares with PyTorch's modules: deferred initialisation, copies, state dicts."""

import copy
import math
import pickle

import pytest
import torch

import tigon
from tigon import nn

MODULES = {
    "RMSNorm": lambda **to: nn.RMSNorm(8, offset=1.0, **to),
    "AddRMSNorm": lambda **to: nn.AddRMSNorm(8, **to),
    "ModulatedRMSNorm": lambda **to: nn.ModulatedRMSNorm(8, **to),
    "weightless": lambda **to: nn.RMSNorm(8, elementwise_affine=False, **to),
    "GatedRMSNorm": lambda **to: nn.GatedRMSNorm(8, **to),
    "LayerNorm": lambda **to: nn.LayerNorm(8, **to),
    "LayerNorm without bias": lambda **to: nn.LayerNorm(8, bias=False, **to),
    "GroupNorm": lambda **to: nn.GroupNorm(2, 8, **to),
    "GroupNorm without affine": lambda **to: nn.GroupNorm(2, 8, affine=False, **to),
    "DyT": lambda **to: nn.DyT(8, 0.3, **to),
    "DyT without bias": lambda **to: nn.DyT(8, bias=False, **to),
    "PolyNorm": lambda **to: nn.PolyNorm(**to),
    "QKNormRotaryEmbedding": lambda **to: nn.QKNormRotaryEmbedding(8, offset=1.0, **to),
    "Embedding": lambda **to: nn.Embedding(5, 8, padding_idx=1, **to),
    "Experts": lambda **to: nn.Experts(3, 8, 16, bias=True, **to),
    "Router": lambda **to: nn.Router(8, 4, 2, bias=True, correction=True, **to),
    "HyperConnections": lambda **to: nn.HyperConnections(8, 2, **to),
    "LoRALinear": lambda **to: nn.LoRALinear(8, 6, 2, **to),
    "MedusaHeads": lambda **to: nn.MedusaHeads(8, 11, 2, 2, **to),
}
every_module = pytest.mark.parametrize("name", MODULES)


def test_every_module_with_parameters_is_here():
    known = {type(make(device="meta")) for make in MODULES.values()}
    for cls in vars(nn).values():
        if isinstance(cls, type) and issubclass(cls, torch.nn.Module) and cls not in known:
            options = {"RotaryEmbedding": (8,)}.get(cls.__name__, ())
            assert not [*cls(*options).parameters()], cls.__name__


@every_module
def test_reset_after_the_meta_device(name):
    """`to_empty` leaves what was in memory: `reset_parameters` of every module writes all of it."""
    torch.manual_seed(0)
    fresh = MODULES[name](device="cpu")
    made = MODULES[name](device="meta").to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*made.parameters(), *made.buffers()):
            tensor.fill_(math.nan)
    torch.manual_seed(0)
    for module in made.modules():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        assert hasattr(module, "reset_parameters") or not own, type(module).__name__
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    wanted, got = fresh.state_dict(), made.state_dict()
    assert got.keys() == wanted.keys()
    for key, value in wanted.items():
        torch.testing.assert_close(got[key], value, msg=lambda text, key=key: f"{key}: {text}")


@every_module
@pytest.mark.parametrize(
    "copier", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"]
)
def test_copies(name, copier):
    module = MODULES[name](dtype=torch.bfloat16)
    other = copier(module)
    assert repr(other) == repr(module)
    for key, value in module.state_dict().items():
        assert torch.equal(other.state_dict()[key], value)
        assert other.state_dict()[key].dtype == value.dtype


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16], ids=str)
def test_default_dtype(default):
    """Parameters take the default dtype, as those of PyTorch's modules do."""
    torch.set_default_dtype(default)
    try:
        assert {p.dtype for p in nn.RMSNorm(8).parameters()} == {default}
        x = torch.randn(3, 8)
        assert nn.RMSNorm(8)(x).dtype == default
        assert tigon.rms_norm(x, None).dtype == default
    finally:
        torch.set_default_dtype(torch.float32)
