"""The loss head: every way Hugging Face and users call the loss."""

import copy
import inspect

import pytest
import torch
import torch.nn.functional as F
from tiny import VOCABULARY, apply_as_stock, batch, close, make, step

import tigon
from tigon.integrations.transformers import LazyLogits, apply
from tigon.ops.loss_head import tied

CALLS = {
    "num_items_tensor": lambda device: {"num_items_in_batch": torch.tensor(37.0, device=device)},
    "num_items_int": lambda _: {"num_items_in_batch": 37},
    "num_items_on_cpu": lambda _: {"num_items_in_batch": torch.tensor(37)},
    "shift_labels": lambda device: {"shift_labels": batch(device, seed=5)["labels"]},
    "logits_to_keep": lambda device: {"logits_to_keep": 4, "labels": batch(device)["labels"][:, -4:]},
    "logits_to_keep_positions": lambda device: {
        "logits_to_keep": torch.tensor([1, 3, 4], device=device),
        "labels": batch(device)["labels"][:, [1, 3, 4]],
    },
    "ignore_index": lambda _: {"ignore_index": 5},
    "extra_keywords": lambda _: {"skip_logits": None},
}


@pytest.mark.parametrize("call", CALLS)
def test_loss_call(call, device):
    stock = make(device=device)
    inputs = {**batch(device, masked=0.25 if call != "ignore_index" else 0.0), **CALLS[call](device)}
    report = apply_as_stock(stock, inputs)
    assert report.head_calls.fused == 1 and report.head_calls.materialised == 0


def test_mask_that_counts_differ_per_sample(device):
    """logits_to_keep as a boolean mask flattens the rows; the labels are shifted by the caller."""
    stock = make(device=device)
    inputs = batch(device)
    keep = torch.rand(inputs["input_ids"].shape, device=device) < 0.5
    call = {**inputs, "logits_to_keep": keep, "shift_labels": inputs["labels"][keep]}
    try:
        wanted = step(stock, call)
    except (IndexError, RuntimeError, ValueError):
        pytest.skip("this transformers has no boolean logits_to_keep")
    apply(stock)
    close(step(stock, call)[0], wanted[0])


def test_all_labels_masked(device):
    model = make(device=device)
    inputs = batch(device, masked=1.1)
    apply(model)
    assert model(**inputs).loss.isnan()
    assert model(**inputs, num_items_in_batch=3).loss == 0


def test_return_dict_false(device):
    stock = make(device=device)
    inputs = batch(device)
    wanted = stock(**inputs, return_dict=False)
    apply(stock)
    got = stock(**inputs, return_dict=False)
    assert len(got) == len(wanted) and isinstance(got[1], LazyLogits)
    close(got[0], wanted[0])
    close(got[1].materialise(), wanted[1])


def test_head_with_bias(device):
    stock = make(device=device)
    stock.lm_head = torch.nn.Linear(32, VOCABULARY, bias=True, device=device)
    apply_as_stock(stock, batch(device))


@pytest.mark.parametrize("frozen", ["head", "trunk", "all but norms"])
def test_frozen_parts(frozen, device):
    stock = make(device=device)
    for name, parameter in stock.named_parameters():
        in_head = name.startswith("lm_head")
        keep = {"head": not in_head, "trunk": in_head, "all but norms": "norm" in name}[frozen]
        parameter.requires_grad_(keep)
    apply_as_stock(stock, batch(device))


def test_custom_loss_function_is_kept_and_still_caught(device):
    stock = make(device=device)

    def loss_function(logits, labels, vocab_size, **_):
        return 2 * F.cross_entropy(logits[:, :-1].float().reshape(-1, vocab_size), labels[:, 1:].reshape(-1))

    stock.loss_function = loss_function
    report = apply_as_stock(stock, batch(device))
    assert stock.loss_function is loss_function
    assert report.head_calls.fused == 1 and report.head_calls.materialised == 0


def test_other_losses_of_transformers_keep_their_meaning(device):
    """A model whose loss does not shift must not get the causal loss."""
    stock = make(device=device)
    stock.loss_type = "ForMaskedLM"
    report = apply_as_stock(stock, batch(device))
    assert report.head_calls.fused == 1


def test_a_backward_hook_on_the_head_sees_what_stock_shows_it(device):
    """Hooks that change something: test_every_module_is_asked in test_hf_changed_modules.py."""
    stock = make(device=device)
    inputs = batch(device)
    seen = []

    stock.lm_head.register_full_backward_hook(lambda module, dx, dy: seen.append(dy[0].clone()))
    wanted = step(stock, inputs)
    apply(stock)
    got = step(stock, inputs)
    close(got[0], wanted[0])
    assert len(seen) == 2
    close(seen[1], seen[0], ulps=256)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype, device):
    stock = make(device=device)
    inputs = batch(device)

    def run(model):
        model.zero_grad()
        with torch.autocast(device, dtype=dtype):
            output = model(**inputs)
        output.loss.backward()
        return output, model.lm_head.weight.grad.clone()

    wanted, wanted_grad = run(stock)
    patched = copy.deepcopy(stock)
    apply(patched)
    got, grad = run(patched)
    assert got.loss.dtype == wanted.loss.dtype == torch.float32
    assert got.logits.dtype == wanted.logits.dtype == dtype
    assert grad.dtype == torch.float32
    ulp = torch.finfo(dtype).eps
    # The logits are near one: a unit in the last place of them bounds each of the differences.
    assert (got.loss - wanted.loss).abs() <= 4 * ulp
    assert (grad - wanted_grad).abs().max() <= 8 * ulp * wanted_grad.abs().max()
    # Touched outside of autocast, logits come as the forward pass would have made them.
    assert (got.logits.materialise() - wanted.logits).abs().max() <= 8 * ulp
    assert got.logits.materialise().dtype == dtype


def test_loss_outside_of_autocast(device):
    stock = make(device=device)
    inputs = batch(device)
    apply(stock)
    with torch.autocast(device, dtype=torch.bfloat16):
        output = stock(**inputs)
    labels = F.pad(inputs["labels"], (0, 1), value=-100)[:, 1:].reshape(-1)
    loss = F.cross_entropy(output.logits.float().view(-1, VOCABULARY), labels)
    close(loss, output.loss)


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("form", ["labels", "shift_labels", "positional"])
def test_evaluation_without_logits(form, grad, device):
    """skip_logits=True in eval mode: the loss of stock, no logits made, none in the output."""
    model = make("gemma2", device=device).eval()
    ids, labels = batch(device).values()
    inputs = {"labels": labels} if form != "shift_labels" else {"shift_labels": labels}
    wanted = model(ids, **{"labels": labels, **inputs}).loss
    report = apply(model)
    with torch.set_grad_enabled(grad):
        if form == "positional":
            names = [*inspect.signature(model.forward).parameters]
            arguments = [None] * (names.index("labels") - 1)
            output = model(ids, *arguments, labels, skip_logits=True)
        else:
            output = model(ids, **{"labels": labels, **inputs}, skip_logits=True)
        close(output.loss, wanted)
        assert output.logits is None and "logits" not in output and output.loss.requires_grad == grad
    assert (report.head_calls.lazy, report.head_calls.fused, report.head_calls.materialised) == (1, 1, 0)
    after = model(ids, labels=labels)  # asked for once, not for ever
    assert isinstance(after.logits, torch.Tensor) and report.head_calls.lazy == 1
    assert isinstance(model.get_output_embeddings()(torch.zeros(1, 2, 32, device=device)), torch.Tensor)


def test_evaluation_without_logits_under_compile(device):
    """No graph break; the same loss."""
    torch._dynamo.reset()
    model, inputs = make(device=device, num_hidden_layers=1).eval(), batch(device)
    wanted = model(**inputs).loss
    report = apply(model)
    with torch.no_grad():
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        output = compiled(**inputs, skip_logits=True)
        close(output.loss, wanted)
        assert output.logits is None and report.head_calls.traced
        assert isinstance(compiled(**inputs).logits, torch.Tensor)


def test_training_with_logits_asked_for(device):
    """skip_logits=False: tensors, from the first touch on, and the loss of them."""
    model, inputs = make(device=device), batch(device)
    wanted = step(model, inputs)
    report = apply(model)
    output = model(**inputs, skip_logits=False)
    assert isinstance(output.logits, torch.Tensor) and report.head_calls.lazy == 0
    close(output.loss, wanted[0])


def test_skipping_logits_needs_labels():
    model = make()
    apply(model)
    with pytest.raises(tigon.Error, match=r"labels must be given with skip_logits=True, got \['input_ids'\]"):
        model(input_ids=batch()["input_ids"], skip_logits=True)
    tigon.undo(model)
    assert not model._forward_pre_hooks and not model._forward_hooks


def test_a_bound_of_the_heads_peak(device):
    """It reaches the loss of the model, until `undo`; tests/ops/test_head_memory.py measures peaks."""
    model = make(device=device)
    inputs = batch(device)
    with pytest.raises(tigon.Error, match=r"\[apply\] max_peak_mb must be a number, got str"):
        apply(model, max_peak_mb="1")
    apply(model, max_peak_mb=1e-3)
    apply(model)
    with pytest.raises(tigon.Error, match=r"max_peak_mb must be at least \d+ for this call, got 0.001"):
        model(**inputs)
    tigon.undo(model)
    wanted = step(model, inputs)
    apply(model, max_peak_mb=40)
    close(step(model, inputs)[0], wanted[0])


def test_a_tied_embedding_adds_its_gradient(device, monkeypatch):
    """tests/ops/test_tied.py has the cases in which it does not."""
    model = make("llama_bias_tied", device=device)
    inputs, name, own, added = batch(device), "model.embed_tokens.weight", tied._add_rows, []
    wanted = step(model, inputs)
    monkeypatch.setattr(tied, "_add_rows", lambda *args: added.append(own(*args)))
    apply(model)
    for change in (
        lambda: None,
        model.gradient_checkpointing_enable,
        lambda: model.lm_head.register_parameter("weight", torch.nn.Parameter(model.lm_head.weight.clone())),
    ):
        change()
        got = step(model, inputs)
        close(got[0], wanted[0])
        grads = [p.grad for p in (model.get_input_embeddings().weight, model.lm_head.weight)]
        total = grads[0] if grads[0] is grads[1] else grads[0] + grads[1]
        close(total, wanted[1][name], ulps=256)
    assert len(added) == 2
