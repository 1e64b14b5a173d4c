"""The rule in checks.py catches what it is for."""

import pytest
import torch
from checks import check_case

from cases import glu, rms_norm
from conftest import poisoned


def _case(module, name):
    return next(case for case in module.CASES if case.name == name)


def test_poison_fills_fresh_memory():
    """Uninitialised memory is NaN inside the block."""
    with poisoned():
        assert torch.empty(1000).isnan().all()


def _low_precision(gate, up):
    return glu.eager_fn(gate.bfloat16(), up.bfloat16()).float()


def _wrong_nan(gate, up):
    return torch.nan_to_num(glu.eager_fn(gate, up))


def _unwritten(gate, up):
    y = glu.eager_fn(gate, up)
    out = torch.empty_like(y)
    out[:-1] = y[:-1]
    return out


def _modifying(gate, up):
    y = glu.eager_fn(gate, up)
    with torch.no_grad():
        gate.data.neg_()
    return y


def _unsteady(gate, up):
    return glu.eager_fn(gate, up) * (1 + 1e-7 * torch.rand(()))


@pytest.mark.parametrize(
    "fn, name, message",
    [
        (_low_precision, "4x64", "error"),
        (_wrong_nan, "nan_row", "NaN at other places"),
        (_unwritten, "4x64", "NaN at other places|two runs differ"),
        (_modifying, "4x64", "modified"),
        (_unsteady, "4x64", "two runs differ|error"),
    ],
)
def test_rule_refuses(fn, name, message):
    """Lost digits, lost NaN, holes, side effects and unsteady results."""
    with pytest.raises(AssertionError, match=message):
        check_case(glu, _case(glu, name), "cpu", torch.float32, fn=fn)


def test_rule_accepts_the_plain_formulation():
    """What errors are measured by passes."""
    check_case(rms_norm, _case(rms_norm, "33x4096"), "cpu", torch.bfloat16, fn=rms_norm.eager_fn)
