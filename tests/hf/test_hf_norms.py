"""Every form of norm in the table, on its reference: recognised, and as near as stock to fp64."""

import copy
from types import SimpleNamespace

import pytest
import torch
from tiny import assert_all_as_good, assert_as_good
from torch import nn

from tigon.integrations.transformers import apply
from tigon.integrations.transformers.norms import plan_norm
from tigon.integrations.transformers.patterns.norms import GATED_NORMS, GROUP_NORMS, LAYER_NORMS, NORMS

SIZE = 48
DTYPES = [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)]
FORMS = {f"{i} {row.name}": row for i, row in enumerate((*NORMS, *LAYER_NORMS, *GATED_NORMS, *GROUP_NORMS))}


class Model(nn.Module):
    def __init__(self, row, odd=False):
        """`odd`: where a form leaves a choice to an attribute, the other one."""
        super().__init__()
        self.norm = type("SomeNorm", (nn.Module,), {"forward": row.reference})()
        self.norm.eps, self.norm.shape, self.norm.group_size = 1e-5, (SIZE,), SIZE // 3
        self.norm.groups = 4
        self.norm.with_weight, self.norm.activation = True, "silu"
        self.norm.axis, self.norm.unit_offset = -1, odd
        self.norm.data_format = "channels_first" if odd else "channels_last"
        self.norm.weight = nn.Parameter(1 + 0.3 * torch.randn(SIZE))
        self.norm.bias = nn.Parameter(0.3 * torch.randn(SIZE))

    def forward(self, *tensors):
        return self.norm(*tensors)


def run(model, inputs, upstream):
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    model.zero_grad()
    y = model(*leaves)
    y.backward(upstream.to(y.dtype))
    return [
        y.detach(),
        *(leaf.grad for leaf in leaves),
        *(p.grad for p in model.parameters() if p.grad is not None),
    ]


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_form(form, dtypes):
    row = FORMS[form]
    dtype, weight_dtype = dtypes
    for odd in (False, True) if "channels" in row.name or "offset" in row.name else (False,):
        torch.manual_seed(0)
        model = Model(row, odd).to(weight_dtype)
        by_channel = row in GROUP_NORMS or (odd and "channels" in row.name)
        shape = (2, SIZE, 3, 5) if by_channel else (2, 7, SIZE)
        count = 2 if row in GATED_NORMS else 1
        inputs = [torch.randn(shape).to(dtype) for _ in range(count)]
        upstream = torch.randn(shape)
        try:
            wanted = run(model, inputs, upstream)
        except RuntimeError:
            pytest.skip("stock refuses these dtypes")
        exact_model = Model(row, odd).double()
        exact_model.load_state_dict(model.state_dict())
        exact = run(exact_model, [tensor.double() for tensor in inputs], upstream.double())
        report = apply(model)
        assert report.count("norm") == 1 and f"({row.name})" in report.replaced[0].by
        assert_all_as_good(run(model, inputs, upstream), wanted, exact)


def test_a_norm_by_group_without_groups():
    """The attribute may say that there are none: Gemma's norm."""
    torch.manual_seed(0)
    model = Model(next(row for row in NORMS if "by group" in row.name))
    model.norm.group_size = None
    x = torch.randn(3, 7, SIZE).bfloat16()
    wanted = model(x)
    apply(model)
    torch.testing.assert_close(model(x), wanted, rtol=2**-8, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_eps_that_torch_adds_by_itself(dtype, device):
    """That of the dtype it computes in; rows so small that it decides."""
    x = (torch.randn(5, 32) * torch.logspace(-5, 0, 5)[:, None]).to(device, dtype)
    stock = nn.RMSNorm(32, device=device, dtype=dtype)
    nn.init.normal_(stock.weight)
    model = nn.Sequential(copy.deepcopy(stock))
    assert apply(model, strict=True).count("norm") == 1
    exact = nn.RMSNorm(32, torch.finfo(torch.promote_types(dtype, torch.float32)).eps, dtype=torch.float64)
    exact.load_state_dict(stock.state_dict())
    ulps = 1 if dtype == torch.float64 else 0.5  # the exact one is rounded too
    floor = ulps * torch.finfo(dtype).eps
    assert_as_good(model(x), stock(x), exact.to(device)(x.double()), floor)


class UnweightedNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.eps = 1e-5

    def forward(self, x):
        return torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps).to(x.dtype)


class FrozenBatchNorm(nn.Module):
    def forward(self, x):
        return x * self.weight


def test_what_is_called_a_norm_and_is_none_has_no_entry():
    """Norms of weights, statistics of batches, a row's factor."""
    conv = nn.utils.parametrizations.weight_norm(nn.Conv1d(4, 4, 3))
    linears = [nn.Linear(4, 4) for _ in range(2)]
    nn.utils.parametrizations.spectral_norm(linears[0])
    nn.utils.parametrizations.orthogonal(linears[1])
    model = nn.Sequential(
        nn.LayerNorm(4), conv, *linears, UnweightedNorm(), FrozenBatchNorm(), nn.BatchNorm1d(4)
    )
    assert any("Norm" in type(module).__name__ for module in conv.modules())
    report = apply(model, strict=True)
    assert [entry.path for entry in report.entries] == ["0"]


def test_what_is_left_says_why():
    other = Model(next(row for row in NORMS if "offset" in row.name)).norm
    other.axis = 1
    assert "axis 1" in plan_norm(other)
    other.axis, other.eps = -1, None
    assert "not a number" in plan_norm(other)
    row = FORMS["0 llama"]
    odd = Model(row).norm
    odd.weight = nn.Parameter(torch.ones(4, SIZE))
    assert "one for every head" in plan_norm(odd)
    gated = Model(GATED_NORMS[0]).norm
    gated.activation = "gelu"
    assert "gate is 'gelu'" in plan_norm(gated)
    assert plan_norm(nn.BatchNorm1d(4)) is None
    assert plan_norm(nn.ReLU()) is None


def test_a_declared_class_must_keep_its_numbers(monkeypatch):
    """Nemotron's norm is taken for what its table says as long as it computes that."""
    from transformers.models.nemotron import modeling_nemotron as nemotron

    norm = nemotron.NemotronLayerNorm1P(SIZE)
    spec, by = plan_norm(norm)
    assert (spec.op, spec.shift) == ("layer_norm", 1.0) and "(1 + weight)" in by
    torch.manual_seed(0)
    nn.init.normal_(norm.weight, std=0.3)
    x = torch.randn(3, SIZE)
    wanted = norm(x)
    model = nn.Sequential(norm)
    apply(model)
    torch.testing.assert_close(model(x), wanted, rtol=1e-6, atol=1e-6)
    monkeypatch.setattr(
        nemotron, "F", SimpleNamespace(layer_norm=lambda *a: 2 * nn.functional.layer_norm(*a))
    )
    assert "unrecognised" in plan_norm(nemotron.NemotronLayerNorm1P(SIZE))
