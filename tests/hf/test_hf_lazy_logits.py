"""The contract of the lazy logits."""

import copy
import inspect
import io
import math
import operator
import pickle
import warnings
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny import VOCABULARY, batch, close, make, same, step
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.trainer_pt_utils import nested_concat

import tigon
from tigon.integrations.transformers import LazyLogits, apply


@pytest.fixture
def pair(device):
    """(stock logits, patched model, report, its lazy logits, inputs)."""
    stock = make(device=device)
    inputs = batch(device)
    logits = stock(input_ids=inputs["input_ids"]).logits
    report = apply(stock)
    lazy = stock(**inputs).logits
    assert isinstance(lazy, LazyLogits)
    return logits, stock, report, lazy, inputs


def test_known_without_computing(pair):
    logits, _, report, lazy, _ = pair
    assert lazy.shape == logits.shape and lazy.size() == logits.size()
    assert lazy.size(-1) == VOCABULARY and lazy.dim() == lazy.ndim == 3
    assert lazy.dtype == logits.dtype and lazy.device == logits.device
    assert lazy.numel() == logits.numel() and len(lazy) == len(logits)
    assert lazy.requires_grad and lazy.is_floating_point() and "LazyLogits" in repr(lazy)
    assert report.head_calls.materialised == 0


STAYS_LAZY = {
    "float": lambda x: x.float(),
    "double": lambda x: x.double(),
    "to_dtype": lambda x: x.to(torch.float64),
    "to_dtype_keyword": lambda x: x.to(dtype=torch.float64),
    "to_device": lambda x: x.to(x.device, non_blocking=True),
    "to_device_and_dtype": lambda x: x.to(str(x.device), torch.float64),
    "times": lambda x: x * 0.5,
    "times_from_the_left": lambda x: 2 * x,
    "divided": lambda x: x / 3.0,
    "times_scalar_tensor": lambda x: x * torch.tensor(0.5, device=x.device),
    "mul": lambda x: x.mul(2.0),
    "torch_mul": lambda x: torch.mul(x, 2.0),
    "tanh": lambda x: x.tanh(),
    "torch_tanh": lambda x: torch.tanh(x),
    "functional_tanh": lambda x: F.tanh(x),
    "softcap": lambda x: 30.0 * torch.tanh(x / 30.0),
    "contiguous": lambda x: x.contiguous(),
    "view": lambda x: x.view(-1, VOCABULARY),
    "view_size": lambda x: x.view(x.shape),
    "view_keyword": lambda x: x.view(size=(-1, VOCABULARY)),
    "reshape_keyword": lambda x: x.reshape(shape=(-1, VOCABULARY)),
    "torch_reshape_keyword": lambda x: torch.reshape(x, shape=(-1, VOCABULARY)),
    "reshape": lambda x: x.reshape(-1, x.size(-1)),
    "flatten": lambda x: x.flatten(0, 1),
    "shift": lambda x: x[..., :-1, :],
    "shift_contiguous": lambda x: x[:, :-1].contiguous().view(-1, VOCABULARY),
    "row": lambda x: x[0],
    "last": lambda x: x[:, -1],
    "last_all": lambda x: x[:, -1, :],
    "rows_by_mask": lambda x: x[torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)],
    "rows_by_index": lambda x: x[:, torch.tensor([0, 2], device=x.device)],
    "prefix": lambda x: x[..., :50],
    "prefix_of_rows": lambda x: x[:, 1:, :50],
    "new_axis": lambda x: x[None],
    "detach": lambda x: x.detach(),
    "in_place_scale": lambda x: _scaled_in_place(x),
}


def _scaled_in_place(x):
    x = x[...] if isinstance(x, LazyLogits) else x.clone()
    x /= 2.0
    x *= 0.25
    return x


@pytest.mark.parametrize("name", STAYS_LAZY)
def test_stays_lazy(pair, name):
    logits, _, report, lazy, _ = pair
    wanted, got = STAYS_LAZY[name](logits), STAYS_LAZY[name](lazy)
    assert isinstance(got, LazyLogits)
    assert got.shape == wanted.shape and got.dtype == wanted.dtype
    assert got.requires_grad == wanted.requires_grad
    assert report.head_calls.materialised == 0
    close(got.materialise(), wanted)


COMPUTES = {
    "argmax": lambda x: x.argmax(-1),
    "log_softmax": lambda x: F.log_softmax(x, dim=-1),
    "log_softmax_method": lambda x: x.log_softmax(-1),
    "plus": lambda x: x + 1,
    "minus_from_the_left": lambda x: 1 - x,
    "compared": lambda x: x > 0,
    "to_integers": lambda x: x.to(torch.int64),
    "to_integers_on_its_device": lambda x: x.to(x.device, torch.int32),
    "reshape_keyword": lambda x: x.reshape(shape=(-1, 2)),
    "view_keyword": lambda x: x.view(size=(-1, 2)),
    "torch_reshape_keyword": lambda x: torch.reshape(x, shape=(-1, 2)),
    "matmul": lambda x: x @ torch.ones(VOCABULARY, 2, device=x.device),
    "with_tensor": lambda x: x * torch.full_like(x.materialise() if isinstance(x, LazyLogits) else x, 2.0),
    "tensor_with": lambda x: torch.ones(x.shape, device=x.device) + x,
    "cat": lambda x: torch.cat([x, x], dim=1),
    "stack": lambda x: torch.stack(list(x)),
    "gather": lambda x: torch.gather(x, 2, torch.zeros_like(x[..., :1], dtype=torch.long)),
    "one_column": lambda x: x[..., 5],
    "one_element": lambda x: x[0, 1, 5],
    "columns": lambda x: x[:, 1:, [3, 5]],
    "late_columns": lambda x: x[..., 7:],
    "new_last_axis": lambda x: x[..., None],
    "transpose": lambda x: x.transpose(1, 2),
    "view_other": lambda x: x.view(-1),
    "where": lambda x: torch.where(x > 0, x, torch.zeros((), device=x.device)),
}


@pytest.mark.parametrize("name", COMPUTES)
def test_computes_when_touched(pair, name):
    logits, _, report, lazy, _ = pair
    wanted, got = COMPUTES[name](logits), COMPUTES[name](lazy)
    assert isinstance(got, torch.Tensor) and got.dtype == wanted.dtype
    close(got, wanted)
    assert report.head_calls.materialised >= 1


def test_computed_once(pair):
    _, _, report, lazy, _ = pair
    first = lazy.materialise()
    assert lazy.materialise() is first and torch.equal(lazy.argmax(-1), first.argmax(-1))
    assert report.head_calls.materialised == 1
    assert lazy.view(-1, VOCABULARY).data_ptr() == first.data_ptr()


def test_writing_makes_it_real(pair):
    logits, _, _, lazy, _ = pair
    lazy[..., 3] = -1.0
    assert (lazy[..., 3] == -1).all()
    flat = lazy.view(-1, VOCABULARY)
    target = torch.full((flat.shape[0],), 3, device=flat.device)
    changed = logits.clone()
    changed[..., 3] = -1.0
    close(F.cross_entropy(flat, target), F.cross_entropy(changed.view(-1, VOCABULARY), target))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_touched_without_grad_still_trains(pair, mode):
    logits, model, _, lazy, inputs = pair
    with mode():
        assert (lazy.argmax(-1) == logits.argmax(-1)).all()
    for loss in (F.cross_entropy(lazy.view(-1, VOCABULARY), inputs["labels"].view(-1)), lazy.float().sum()):
        (gradient,) = torch.autograd.grad(loss, model.lm_head.weight, retain_graph=True)
        assert gradient.abs().sum() > 0


def test_gradient_through_loss_and_logits_together(device):
    def both(model, inputs):
        output = model(**inputs)
        return output.loss + 0.1 * output.logits.float().square().mean()

    model, inputs = make(device=device), batch(device)
    wanted = step(model, inputs, both)
    apply(model)
    same(step(model, inputs, both), wanted)


def test_reading_after_the_optimizer_step_is_refused(pair):
    _, model, _, lazy, _ = pair
    with torch.no_grad():
        model.lm_head.weight.add_(1.0)
    with pytest.raises(tigon.Error, match=r"before optimizer\.step"):
        lazy.argmax(-1)


def test_chains_of_numbers_without_gradients(pair):
    """As stock: what is made under no_grad has no graph, and its loss none either."""
    logits, _, report, lazy, inputs = pair
    target = inputs["labels"].view(-1).clamp(min=0)
    changes = [lambda x: 2 * x, lambda x: x[:, 1:], lambda x: x.double(), lambda x: x.view(-1, VOCABULARY)]
    with torch.no_grad():
        made = [change(lazy) for change in changes]
        flat = (lazy * 0.5).view(-1, VOCABULARY)
    loss = F.cross_entropy(flat, target)
    assert not loss.requires_grad and report.head_calls.fused == 2
    close(loss, F.cross_entropy(logits.view(-1, VOCABULARY) * 0.5, target).detach())
    for got, change in zip(made, changes, strict=True):
        assert isinstance(got, LazyLogits) and not got.requires_grad
        assert not got.materialise().requires_grad
        close(got.materialise(), change(logits).detach())


NUMBERS = {"float64": np.float64(2.0), "float32": np.float32(2.0), "int64": np.int64(2), "int": 2}


@pytest.mark.parametrize("number", NUMBERS)
def test_numbers_of_numpy_from_both_sides(pair, number):
    logits, _, report, lazy, _ = pair
    number = NUMBERS[number]
    for one in (lambda x: number * x, lambda x: x * number, lambda x: x / number):
        got = one(lazy)
        assert isinstance(got, LazyLogits) and got.dtype == one(logits).dtype
        close(got.materialise(), one(logits))
    assert report.head_calls.materialised == 3
    for name in ("add", "sub", "pow", "eq", "lt", "ge"):
        operation = getattr(operator, name)
        close(operation(number, lazy), operation(number, logits))


def test_pickle_and_copy_give_tensors(pair):
    logits, _, _, lazy, _ = pair
    close(pickle.loads(pickle.dumps(lazy)), logits.detach())
    close(copy.deepcopy(lazy.detach()), logits.detach())
    for of in (lambda x: x, lambda x: x[:, 1:], lambda x: x.view(-1, VOCABULARY)):
        file = io.BytesIO()
        torch.save({"logits": of(lazy)}, file)
        file.seek(0)
        close(torch.load(file, weights_only=True)["logits"], of(logits).detach())


def test_only_lazy_where_a_loss_may_take_them(device):
    model = make(device=device)
    inputs = batch(device)
    ids, labels = inputs["input_ids"], inputs["labels"]
    report = apply(model)
    assert isinstance(model(**inputs).logits, LazyLogits)
    assert isinstance(model(ids, shift_labels=labels).logits, LazyLogits)
    assert isinstance(model(ids, *[None] * (positional_labels(model) - 1), labels).logits, LazyLogits)
    assert report.head_calls.computed == 0
    for call in (lambda: model(ids), lambda: model(ids, labels=None), lambda: model(ids, None)):
        assert isinstance(call().logits, torch.Tensor)
    assert report.head_calls.computed == 3 and "without labels" in report.head_calls.reason
    assert isinstance(model.lm_head(model.model(ids)[0]), torch.Tensor)
    assert "outside of its model's forward" in report.head_calls.reason
    with torch.no_grad():
        assert isinstance(model(**inputs).logits, torch.Tensor)
    with torch.inference_mode():
        assert isinstance(model(**inputs).logits, torch.Tensor)
    assert isinstance(model.eval()(**inputs).logits, torch.Tensor)
    assert isinstance(model.train()(**inputs).logits, LazyLogits)


def positional_labels(model):
    return [*inspect.signature(model.forward).parameters].index("labels")


def test_lazy_for_callers_that_ask(device):
    """Without labels too: their loss is computed from the output's logits."""
    model = make(device=device)
    ids = batch(device)["input_ids"]
    report = apply(model, lazy_logits=True)
    assert isinstance(model(ids).logits, LazyLogits) and apply(model) is report
    assert isinstance(model(ids).logits, LazyLogits)
    assert isinstance(model(ids, skip_logits=False).logits, torch.Tensor)
    assert isinstance(model.lm_head(torch.zeros(1, 2, 32, device=device)), torch.Tensor)
    assert isinstance(model.eval()(ids).logits, torch.Tensor)
    tigon.undo(model)
    apply(model.train())
    assert isinstance(model(ids).logits, torch.Tensor)


CALLERS = {
    "trl.experimental.orpo.orpo_trainer": "examples/trl_heads.py has subclasses",
    "transformers.trainer": "a compute_loss_func with F.cross_entropy",
    "my_loop": "give it labels, or, if your loss is F.cross_entropy",
}


@pytest.mark.parametrize("name", CALLERS)
def test_callers_without_labels_are_told_what_helps_them(name, caplog):
    """By the module of the training loop, whatever stands between it and the model."""
    model = make()
    report = apply(model)
    scope = {"__name__": name}
    exec("def step(model, ids):\n return model(ids)", scope)
    scope["step"](torch.nn.Sequential(model), batch()["input_ids"])
    assert CALLERS[name] in report.head_calls.reason and report.head_calls.reason in caplog.text


def test_a_forward_that_fails_leaves_nothing_behind(device):
    model = make(device=device)
    inputs = batch(device)
    apply(model)
    with pytest.raises((IndexError, RuntimeError)):
        model(inputs["input_ids"].float(), labels=inputs["labels"])
    assert isinstance(model.lm_head(torch.zeros(1, 2, 32, device=device)), torch.Tensor)


def test_a_model_inside_another(device):
    """The outer model has the labels, the inner one the head."""
    inputs = batch(device)

    class Outer(PreTrainedModel):
        def __init__(self, inner):
            super().__init__(inner.config)
            self.inner = inner

        def get_output_embeddings(self):
            return self.inner.lm_head

        def forward(self, input_ids, labels=None):
            output = self.inner(input_ids)
            output.loss = self.inner.loss_function(output.logits, labels, VOCABULARY)
            return output

    model = Outer(make(device=device))
    wanted = step(model, inputs)
    report = apply(model)
    got = step(model, inputs)
    close(got[0], wanted[0])
    assert report.head_calls.fused == 1 and report.head_calls.materialised == 0
    assert isinstance(model.inner(inputs["input_ids"]).logits, torch.Tensor)
    output = model.eval()(**inputs, skip_logits=True)
    close(output.loss, wanted[0])
    assert output.logits is None and report.head_calls.fused == 2


NO_TENSOR_SUBSTITUTE = {
    "assert_close": lambda model, ids: close(model(ids).logits, without_grad(model, ids)),
    "concatenate": lambda model, ids: accelerate_operations().concatenate([model(ids).logits] * 2),
    "nested_concat": lambda model, ids: nested_concat(model(ids).logits, model(ids).logits),
    "vmap": lambda model, ids: torch.vmap(lambda row: row.sum())(model(ids).logits),
    "make_fx": lambda model, ids: make_fx(
        lambda ids: model(ids, attention_mask=ids.new_zeros(2, 1, 11, 11).float(), use_cache=False).logits
    )(ids)(ids),
    "checkpoint": lambda model, ids: (
        checkpoint(
            lambda hook, ids: model(ids).logits, torch.ones((), requires_grad=True), ids, use_reentrant=True
        )
        .sum()
        .backward()
    ),
}


@torch.no_grad()
def without_grad(model, ids):
    return model(ids).logits


def accelerate_operations():
    return pytest.importorskip("accelerate.utils.operations")


@pytest.mark.parametrize("name", NO_TENSOR_SUBSTITUTE)
def test_callers_that_take_tensors_only(name, device):
    model = make(device=device)
    apply(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        NO_TENSOR_SUBSTITUTE[name](model, batch(device)["input_ids"])
    if name == "checkpoint":
        assert model.lm_head.weight.grad.abs().sum() > 0


def test_reentrant_checkpoint_around_a_model_with_labels(device):
    """The second forward, in the backward pass, must give tensors: loss and logits are differentiated."""

    def loss_of(model, inputs):
        anchor = torch.ones((), requires_grad=True, device=device)
        loss, logits = checkpoint(
            lambda _, ids, labels: model(ids, labels=labels, return_dict=False)[:2],
            anchor,
            *inputs.values(),
            use_reentrant=True,
        )
        return loss + logits.square().mean()

    model, inputs = make(device=device), batch(device)
    wanted = step(model, inputs, loss_of)
    apply(model)
    same(step(model, inputs, loss_of), wanted)


def test_functions_of_tigon_say_what_to_give(pair):
    _, _, _, lazy, _ = pair
    labels = torch.zeros(lazy.shape[:-1], dtype=torch.int64, device=lazy.device)
    functions = (tigon.sample, tigon.softmax, lambda x: tigon.cross_entropy(x, labels))
    functions += (lambda x: tigon.kl_div(x, torch.zeros(x.shape, device=x.device)),)
    for function in functions:
        with pytest.raises(tigon.Error, match=r"got LazyLogits: give logits.materialise\(\)$"):
            function(lazy)
        function(lazy.materialise())


def test_attributes_tensors_do_not_have_stay_absent(pair):
    _, _, report, lazy, _ = pair
    assert not hasattr(lazy, "no_such_attribute") and not hasattr(lazy, "__cuda_array__")
    assert report.head_calls.materialised == 0


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_functional_cross_entropy_is_caught(device, reduction):
    stock = make(device=device)
    inputs = batch(device)
    target = inputs["labels"].view(-1).clamp(min=0)
    weight = torch.rand(VOCABULARY, device=device) + 0.5
    options = {"weight": weight, "ignore_index": 4, "reduction": reduction, "label_smoothing": 0.1}
    flat = stock(inputs["input_ids"]).logits.view(-1, VOCABULARY)
    wanted = F.cross_entropy(flat, target, **options)
    report = apply(stock, lazy_logits=True)
    flat = stock(inputs["input_ids"]).logits.view(-1, VOCABULARY)
    close(F.cross_entropy(flat, target, **options), wanted)
    close(torch.nn.CrossEntropyLoss(**options)(flat, target), wanted)
    assert report.head_calls.fused == 2 and report.head_calls.materialised == 0


def test_cross_entropy_of_bytes(device):
    """PyTorch takes labels of int64 and uint8."""
    model = make(device=device)
    inputs = batch(device, masked=0.0)
    labels = inputs["labels"].view(-1)
    report = apply(model, lazy_logits=True)
    flat = model(**inputs).logits.view(-1, VOCABULARY)
    close(F.cross_entropy(flat, labels.to(torch.uint8)), F.cross_entropy(flat.materialise(), labels))
    assert report.head_calls.fused == 2


def test_cross_entropy_with_probabilities_computes(device):
    stock = make(device=device)
    inputs = batch(device)
    target = torch.rand(22, VOCABULARY, device=device).softmax(-1)
    wanted = F.cross_entropy(stock(inputs["input_ids"]).logits.view(-1, VOCABULARY), target)
    apply(stock, lazy_logits=True)
    flat = stock(inputs["input_ids"]).logits.view(-1, VOCABULARY)
    close(F.cross_entropy(flat, target), wanted)


CHAINS = {
    "softcap": lambda x: torch.tanh(x / 0.5) * 0.5,
    "scaled softcap": lambda x: torch.tanh((x * 3.0) / 2.0).float() * 2.0,
    "prefix": lambda x: x[..., :80],
    "two tanh": lambda x: x.tanh().tanh(),
    "divided by zero": lambda x: x / 0.0,
    "cap over zero": lambda x: torch.tanh(x) / 0.0,
    "cap of infinity": lambda x: torch.tanh(x) * math.inf,
}


@pytest.mark.parametrize("change", CHAINS)
def test_chains_before_the_loss(device, change):
    stock = make(device=device)
    inputs = batch(device)
    labels = inputs["labels"].clamp(max=79)

    def run():
        stock.zero_grad()
        logits = CHAINS[change](stock(inputs["input_ids"]).logits)
        loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.view(-1))
        loss.backward()
        return loss.detach(), stock.lm_head.weight.grad.clone()

    wanted = run()
    report = apply(stock, lazy_logits=True)
    torch.testing.assert_close(run(), wanted, rtol=256 * 2.0**-23, atol=256 * 2.0**-23, equal_nan=True)
    assert report.head_calls.fused == (change in ("softcap", "scaled softcap", "prefix"))


def test_step_never_forms_logits(device):
    """The stock forward of the head does not run in a training step."""
    model = make(device=device)
    apply(model)
    with mock.patch.object(F, "linear", wraps=F.linear) as linear:
        step(model, batch(device))
    weights = [call.args[1] for call in linear.call_args_list]
    assert weights and not any(weight is model.lm_head.weight for weight in weights)
