"""examples/trl_heads.py: TRL's own trainers are the oracle."""

import functools
import importlib.util
import types
from pathlib import Path

import pytest
import tiny
import torch

pytest.importorskip("trl.experimental")
PATH = Path(__file__).resolve().parents[2] / "examples" / "trl_heads.py"


@pytest.fixture(scope="module")
def heads():
    spec = importlib.util.spec_from_file_location("trl_heads", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ACCELERATOR = types.SimpleNamespace(
    device=torch.device("cpu"), gather_for_metrics=lambda x: x, unwrap_model=lambda model: model
)


def _made(kind, **attributes):
    """A trainer without its constructor: what the methods look at."""
    trainer = kind.__new__(kind)
    shared = {"accelerator": ACCELERATOR, "is_encoder_decoder": False, "padding_value": 0, "pad_token_id": 0}
    shared |= {"aux_loss_enabled": False}
    for name, value in (shared | attributes).items():
        setattr(trainer, name, value)
    return trainer


def _step(model, loss):
    model.zero_grad()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


_same = functools.partial(torch.testing.assert_close, rtol=2e-4, atol=2e-6)


@pytest.mark.parametrize("items", [None, 7])
@pytest.mark.parametrize("name", ["GKD", "GOLD"])
def test_distillation(name, items, heads):
    model, teacher = tiny.make(seed=0), tiny.make(seed=1)
    inputs = tiny.batch()
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    options = {"teacher_model": teacher, "beta": 0.3, "temperature": 1.5, "use_uld_loss": False}
    options |= {"_get_model_forward_kwargs": lambda inputs: {}, "use_liger_gkd_loss": False}
    if name == "GKD":
        del options["use_uld_loss"]
    fused = heads.trainer(name)
    results = []
    for kind in (fused, fused.__bases__[1]):
        made = _made(kind, **options)
        results.append(_step(model, made.compute_loss(model, inputs, num_items_in_batch=items)))
    _same(*results)


def _pairs():
    torch.manual_seed(3)
    batch = {}
    for side, length in (("chosen", 11), ("rejected", 9)):
        ids = torch.randint(1, 60, (3, length))
        mask = torch.ones_like(ids)
        mask[1, length - 2 :] = 0
        labels = ids.masked_fill(mask == 0, -100)
        labels[:, :4] = -100
        batch |= {f"{side}_input_ids": ids, f"{side}_attention_mask": mask, f"{side}_labels": labels}
    return batch


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ORPO", {}),
        ("CPO", {"loss_type": "sigmoid", "label_smoothing": 0.1, "cpo_alpha": 0.7}),
        ("CPO", {"loss_type": "simpo", "label_smoothing": 0.0, "cpo_alpha": 0.0, "simpo_gamma": 0.5}),
        ("CPO", {"loss_type": "hinge", "label_smoothing": 0.0, "cpo_alpha": 1.0}),
        ("CPO", {"loss_type": "ipo", "label_smoothing": 0.0, "cpo_alpha": 0.0}),
    ],
)
def test_pairs(name, options, heads):
    model, batch, results, metrics = tiny.make(), _pairs(), [], []
    fused = heads.trainer(name)
    for kind in (fused, fused.__bases__[1]):
        loss, found = _made(kind, beta=0.4, alpha=0.0, **options).get_batch_loss_metrics(model, batch)
        results.append(_step(model, loss))
        metrics.append(found)
    _same(*results)
    mine, theirs = metrics
    for key, value in mine.items():
        if not (key == "nll_loss" and options.get("cpo_alpha") == 0.0):  # TRL does not compute it then
            assert value == pytest.approx(float(theirs[key]), rel=1e-4, abs=1e-5), key
