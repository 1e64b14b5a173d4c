"""Checkpointed models that keep what a policy names: the gradients of the plain model, bit for bit."""

import gc

import pytest
import torch
import transformers
from tiny import adapted, batch, make, same_bits, step, trainer_options

import tigon
from tigon.checkpoint import GROUPS

LAYERS = 2
POLICIES = [(), ("attention",), ("attention", "matmuls"), ("norms", "activations"), tuple(GROUPS)]
MODELS = {
    "llama": ("llama", {}),
    "mixtral": ("mixtral", {}),
    "mixtral grouped": ("mixtral", {"experts_implementation": "grouped_mm"}),
}


def model_of(name, patched=True, **changes):
    family, own = MODELS[name]
    model = make(
        family, attn_implementation="sdpa", num_hidden_layers=LAYERS, use_cache=False, **own, **changes
    )
    if patched:
        tigon.apply(model)
    return model


def switch(model, save):
    model.gradient_checkpointing_enable(
        gradient_checkpointing_kwargs={"use_reentrant": False, "context_fn": tigon.checkpoint_policy(save)}
    )


@pytest.mark.parametrize("save", POLICIES, ids=lambda save: "+".join(save) or "nothing")
@pytest.mark.parametrize("patched", [True, False], ids=["patched", "stock"])
@pytest.mark.parametrize("name", MODELS)
def test_the_same_bits(name, patched, save):
    model, inputs = model_of(name, patched), batch()
    expected = step(model, inputs)
    switch(model, save)
    same_bits(expected, step(model, inputs))


@pytest.mark.parametrize("save", [(), ("attention", "matmuls"), tuple(GROUPS)])
def test_lora(save):
    model = adapted(model_of("llama", patched=False), lora_dropout=0.25)
    tigon.apply(model)
    model.enable_input_require_grads()
    found = []
    for policy in (None, save):
        if policy is not None:
            switch(model, policy)
        found.append(step(model, batch(), seed=3))
    same_bits(*found)


def kept_bytes(save, layers):
    """Of all memory that tensors of Python hold when the forward has ended."""
    model = make(dtype=torch.bfloat16, num_hidden_layers=layers, attn_implementation="sdpa", use_cache=False)
    tigon.apply(model)
    switch(model, save)

    def held():
        gc.collect()
        plain = [t for t in gc.get_objects() if type(t) in (torch.Tensor, torch.nn.Parameter)]
        plain = [t for t in plain if t.device.type == "cpu" and t.layout is torch.strided]
        plain = [t for t in plain if not (torch._is_functional_tensor(t) or t.is_nested)]  # of other tests
        return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in plain}

    before = held()
    inputs = batch(rows=2, tokens=16)
    out = model(**inputs)
    after = held()
    del out
    return sum(size for place, size in after.items() if place not in before)


@pytest.mark.parametrize("save", [(), ("attention",), ("attention", "matmuls")])
def test_kept_bytes(save):
    """As the table of docs/checkpointing.md counts them, for one layer more."""
    tokens, hidden, keys, inner, heads = 32, 32, 16, 48, 4
    each, random = 2 * hidden, torch.get_rng_state().nbytes  # a checkpoint keeps the generator's state
    if "attention" in save:
        each += 2 * hidden + 4 * heads
    if "matmuls" in save:
        each += 2 * (hidden + 2 * keys) + 2 * hidden + 2 * 2 * inner + 2 * hidden
    assert kept_bytes(save, 3) - kept_bytes(save, 2) == tokens * each + random


def test_step_in_the_backward():
    """Weights change while layers below are still to be computed again."""
    found = []
    for save in (None, ("attention", "matmuls"), ("norms",)):
        model = model_of("llama")
        optimizer = tigon.optim.AdamW(model.parameters(), lr=1e-2)
        tigon.optim.step_in_backward(optimizer)
        if save is not None:
            switch(model, save)
        for _ in range(2):
            model(**batch()).loss.backward()
        found.append({name: p.detach().clone() for name, p in model.named_parameters()})
    for other in found[1:]:
        assert all(torch.equal(found[0][name], other[name]) for name in other)


def test_trainer(tmp_path):
    """Through the Trainer's arguments, which it also writes beside its checkpoints."""
    rows = [{key: value[0] for key, value in batch(rows=1, seed=seed).items()} for seed in range(4)]
    found = []
    for save in (None, (), ("attention", "matmuls")):
        model = model_of("mixtral")
        options = {"max_steps": 2, "learning_rate": 5e-5, "save_strategy": "steps", "save_steps": 2}
        if save is not None:
            policy = {"use_reentrant": False, "context_fn": tigon.checkpoint_policy(save)}
            options |= {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": policy}
        args = transformers.TrainingArguments(**trainer_options(tmp_path, **options))
        trainer = transformers.Trainer(model, args, train_dataset=rows)
        trainer.train()
        found.append({name: p.detach().clone() for name, p in model.named_parameters()})
    for other in found[1:]:
        assert all(torch.equal(found[0][name], other[name]) for name in other)
    assert torch.load(tmp_path / "checkpoint-2/training_args.bin", weights_only=False) is not None
