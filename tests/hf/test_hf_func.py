"""The transforms of torch.func over a patched model."""

from __future__ import annotations

import pytest
import torch
from tiny import batch, make
from torch import func

import tigon


@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3", "olmo2"])
@pytest.mark.filterwarnings("ignore")
def test_grad_over_functional_call(family):
    inputs = batch()

    def loss(parameters):
        return func.functional_call(model, parameters, kwargs=inputs).loss

    model = make(family)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    expected = func.grad(loss)(parameters)
    tigon.apply(model)
    got = func.grad(loss)(parameters)
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-4, atol=1e-6, msg=name)
    ones = {name: torch.ones_like(p) for name, p in parameters.items()}
    with pytest.raises(tigon.Error, match="forward-mode AD is not supported"):
        func.jvp(loss, (parameters,), (ones,))
