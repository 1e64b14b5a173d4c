"""What people do with a model keeps working after apply."""

import contextlib
import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from tiny import SHARED, adapted, apply_around, batch, close, make, same, step
from torch._dynamo.testing import CompileCounter

from tigon.integrations.transformers import LazyLogits, apply, undo


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"do_sample": True}], ids=str)
def test_generate(options, device):
    stock = make(device=device)
    ids = batch(device)["input_ids"]

    def run():
        torch.manual_seed(3)
        return stock.generate(ids, max_new_tokens=8, **options)

    wanted = run()
    apply(stock)
    assert torch.equal(run(), wanted)
    stock.eval()
    assert run().shape[0] == ids.shape[0]


def test_eval_gives_stock_logits_and_loss(device):
    stock = make(device=device).eval()
    inputs = batch(device)
    wanted = stock(**inputs)
    apply(stock)
    got = stock(**inputs)
    assert isinstance(got.logits, torch.Tensor)
    close(got.logits, wanted.logits)
    close(got.loss, wanted.loss)


def test_accumulation_over_micro_batches(device):
    """num_items_in_batch makes accumulated micro-batches equal one batch."""
    model = make(device=device)
    apply(model)
    whole = batch(device, rows=4)
    count = (whole["labels"][:, 1:] != -100).sum()
    _, wanted = step(model, {**whole, "num_items_in_batch": count})
    model.zero_grad()
    for rows in (slice(0, 1), slice(1, 4)):
        part = {name: tensor[rows] for name, tensor in whole.items()}
        model(**part, num_items_in_batch=count).loss.backward()
    close({name: p.grad for name, p in model.named_parameters()}, wanted, ulps=256)


# --- torch.compile ---------------------------------------------------------------------------


def test_compiled_output_carries_lazy_logits(device):
    torch._dynamo.reset()
    stock = make(device=device, num_hidden_layers=1)
    inputs = batch(device)
    wanted = stock(**inputs).logits
    apply(stock)
    output = torch.compile(stock, fullgraph=True, backend="eager")(**inputs)
    assert isinstance(output.logits, LazyLogits)
    close(output.logits[:, -1].materialise(), wanted[:, -1])
    close(output.logits + 0, wanted)


def test_compile_does_not_recompile_per_step(device):
    torch._dynamo.reset()
    counter = CompileCounter()
    model = make(device=device, num_hidden_layers=1)
    apply(model)
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for seed in range(4):
        step(compiled, batch(device, seed=seed))
    assert counter.frame_count == 1


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_layers_compiled_one_by_one_share_a_graph(device, family):
    """More layers than dynamo makes versions of one function; stock and patched compile equally often."""
    counts, losses = [], []
    for patched in (False, True):
        torch._dynamo.reset()
        counter = CompileCounter()
        model = make(family, device=device, num_hidden_layers=10, use_cache=False)
        if patched:
            apply(model)
        for layer in model.model.layers:
            layer.compile(backend=counter, fullgraph=True)
        losses.append(step(model, batch(device))[0])
        counts.append(counter.frame_count)
    assert counts[0] == counts[1] < 10
    close(losses[1], losses[0])


def test_compile_under_autocast_and_with_a_custom_loss(device):
    torch._dynamo.reset()
    stock = make(device=device, num_hidden_layers=1)
    inputs = batch(device)
    stock.loss_function = lambda logits, labels, vocab_size, **_: F.cross_entropy(
        logits.float().view(-1, vocab_size), labels.view(-1)
    )
    wanted = step(stock, inputs)
    apply(stock)
    compiled = torch.compile(stock, fullgraph=True, backend="eager")
    close(step(compiled, inputs)[0], wanted[0])
    stock.loss_function = None
    del stock._loss_function
    with torch.autocast(device, dtype=torch.bfloat16):
        assert torch.compile(stock, fullgraph=True, backend="eager")(**inputs).loss.isfinite()


@pytest.mark.gpu  # on the CPU the same graph is held to stock above; inductor's C++ takes long
def test_compile_inductor():
    """The default backend."""
    device = "cuda"
    torch._dynamo.reset()
    model = make(device=device, num_hidden_layers=1)
    inputs = batch(device)
    wanted = step(model, inputs)
    apply(model)
    close(step(torch.compile(model, fullgraph=True), inputs)[0], wanted[0])


def test_export_gives_tensors():
    model = make(num_hidden_layers=1)
    apply(model)
    ids = batch()["input_ids"]
    wanted = model.eval()(ids, use_cache=False).logits
    for training in (False, True):
        program = torch.export.export(model.train(training), (ids,), {"use_cache": False})
        close(program.module()(ids, use_cache=False).logits, wanted)


# --- PEFT ------------------------------------------------------------------------------------

LORA = {
    "attention": {"target_modules": ["q_proj", "v_proj"]},
    "all_linear": {"target_modules": "all-linear"},
    "dora": {"target_modules": ["q_proj", "v_proj"], "use_dora": True},
    "mlp": {"target_modules": ["gate_proj", "up_proj", "down_proj"]},
    "head_saved": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "norms_saved": {"target_modules": ["q_proj"], "modules_to_save": ["norm"]},
    "on_head": {"target_modules": ["q_proj", "lm_head"]},
    "dora_on_head": {"target_modules": ["q_proj", "lm_head"], "use_dora": True},
    "bias_on_head": {"target_modules": ["q_proj", "lm_head"], "lora_bias": True},
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("what", LORA)
def test_lora(what, when, device):
    inputs, base = batch(device), make(device=device)
    around = functools.partial(adapted, **LORA[what])
    wanted = step(around(copy.deepcopy(base)), inputs)
    model, report = apply_around(around, base, when)
    same(step(model, inputs), wanted, ulps=512)
    if what == "bias_on_head":
        assert report.head_calls.fused == 0  # more than two matmuls: logits
    else:
        assert report.head_calls.fused == 1 and report.head_calls.materialised == 0
    undo(model)
    close(step(model, inputs)[0], wanted[0])
    assert not any("forward" in m.__dict__ for m in model.modules() if m is not model)


def test_lora_on_the_head_in_all_its_states(device):
    """Merged, switched off, dropped out, two at a time: the loss is stock's, fused where it can be."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, init_lora_weights=False, target_modules=["lm_head"])
    dropped = peft.LoraConfig(r=2, init_lora_weights=False, target_modules=["lm_head"], lora_dropout=0.5)
    inputs = batch(device)

    def states(model):
        model = adapted(model, target_modules=["lm_head"])
        model.add_adapter("other", config)
        model.add_adapter("dropped", dropped)
        report = apply(model) if patch else None
        head = model.base_model.model.lm_head
        for name in ("default", "merged", "off", "dropped", "two"):
            model.base_model.set_adapter(
                {"dropped": "dropped", "two": ["default", "other"]}.get(name, "default")
            )
            if name == "merged":
                head.merge()
            torch.manual_seed(1)
            before = report.head_calls.fused if patch else 0
            with model.disable_adapter() if name == "off" else contextlib.nullcontext():
                loss = model.train()(**inputs).loss.detach()
            yield name, loss, patch and report.head_calls.fused - before
            if name == "merged":
                head.unmerge()

    patch = False
    wanted = list(states(make(device=device)))
    patch = True
    fused = {"default": 1, "merged": 1, "off": 1, "dropped": 0, "two": 0}
    for (name, want, _), (_, got, count) in zip(wanted, states(make(device=device)), strict=True):
        close(got, want, ulps=256)
        assert count == fused[name], name


def test_shared_configuration_has_no_dropout():
    """The comparisons above need stock and patched models to draw nothing."""
    assert "attention_dropout" not in SHARED
