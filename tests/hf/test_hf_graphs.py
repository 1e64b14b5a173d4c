"""Training calls as graphs: what a call computes, what drops a graph, what runs eagerly and says why.

On the CPU a recorder stands in for CUDA graphs (graph_recorder.py): it runs captured functions again, and
poisons the memory that graphs share. Which graphs are replayed is what most tests look at.
"""

import copy
import itertools
import pickle

import pytest
import torch
import transformers
from graph_cases import (
    TOKENS,
    captured,
    captured_pair,
    fp8_follows_the_optimizer,
    fp8_pair,
    held,
    inputs,
    near,
    pair,
    same_steps,
    twins,
)
from graph_recorder import Recorder
from tiny import SHARED, adapted, close, make, own_loss, report_of, same_bits, step, trainer_options
from torch import nn

import tigon
from tigon.graphs import backend
from tigon.integrations.transformers import apply
from tigon.integrations.transformers.graph_arguments import Eagerly, Traits, bucket, sort_out

pytestmark = pytest.mark.usefixtures("recorder")


# --- values ----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "llama_bias_tied", "qwen3", "gemma2", "granite"])
def test_a_replayed_step_is_an_eager_one(family):
    model, twin = pair(family)
    same_steps((model, twin), range(6))
    assert held(twin).replays == 4 and held(twin).captures == 1
    assert twin(**inputs()).logits.shape == (2, TOKENS, 97)


def test_weights_in_float8_follow_the_optimizer(monkeypatch):
    fp8_follows_the_optimizer(fp8_pair(monkeypatch), [inputs(0)] * 8)


def flattened(tokens: int, rows: int = 7) -> dict:
    """What else TRL's collator says of packed rows; attention with a dense mask does not read it."""
    bounds = torch.tensor([*range(0, tokens, rows), tokens], dtype=torch.int32)
    longest = dict.fromkeys(("max_length_q", "max_length_k"), rows)
    index = torch.arange(tokens, dtype=torch.int32).div(rows, rounding_mode="floor").expand(2, -1)
    return longest | {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "seq_idx": index}


@pytest.mark.parametrize("masks", ["none", "right", "left", "packed", "flattened"])
def test_shorter_rows_are_padded_to_a_bucket(masks):
    """Losses and gradients of unpadded rows, within rounding; one graph serves all lengths of a bucket."""
    model, twin = pair(attn_implementation="sdpa", use_cache=False)

    def given(seed, tokens):
        made = inputs(seed, tokens)
        if masks in ("packed", "flattened"):
            made["position_ids"] = torch.arange(tokens).remainder(7).expand(2, -1).contiguous()
            made |= flattened(tokens) if masks == "flattened" else {}
        elif masks != "none":
            mask = torch.ones(2, tokens, dtype=torch.long)
            cut = (1, slice(-4, None)) if masks == "right" else (1, slice(0, 4))
            mask[cut] = 0
            made["attention_mask"], made["labels"] = mask, made["labels"].masked_fill(mask == 0, -100)
        return made

    for seed, tokens in enumerate([34, 40, 33, 39, 40, 37, 35]):
        got, wanted = step(twin, given(seed, tokens)), step(model, given(seed, tokens))
        near(got, wanted)
    assert held(twin).captures == 1 and held(twin).replays == 5
    graph = next(iter(held(twin)._graphs.values()))
    kept = {"none": [], "right": [], "left": ["attention_mask"]}.get(masks, ["position_ids"])
    assert {*graph.inputs} == {"input_ids", "labels", *kept}
    logits = twin(**given(0, 36)).logits
    assert logits.shape == (2, 36, 97)
    there = given(0, 36).get("attention_mask", torch.ones(2, 36)) != 0
    torch.testing.assert_close(
        (logits + 0)[there], (model(**given(0, 36)).logits + 0)[there], rtol=1e-4, atol=1e-4
    )


def test_rows_that_a_kernel_reads_are_no_graph():
    """A flash kernel reads where rows begin, also parts of convolutions: another size in each batch."""
    _, twin = pair(attn_implementation="sdpa", use_cache=False)
    twin.config._attn_implementation = "flash_attention_2"
    given = inputs(0, 32) | {"position_ids": torch.arange(32).remainder(7).expand(2, -1)} | flattened(32)
    with pytest.raises(Eagerly, match="where packed rows begin"):
        sort_out(given, Traits.of(twin, ("use_cache",)), (), torch.device("cpu"))


def test_another_label_that_is_ignored():
    model, twin = pair()
    for seed in range(5):
        given = inputs(seed, 27, ignore_index=5)
        given["labels"] = given["labels"].masked_fill(given["labels"] == -100, 5)
        near(step(twin, given), step(model, given))
    assert held(twin).replays == 3


def test_no_row_is_padded_beyond_what_a_model_has():
    """Learned positions end, and so do embeddings: on a GPU what reads behind them breaks the process."""
    torch.manual_seed(0)
    options = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 97, "n_positions": 45}
    options["pad_token_id"] = 97  # nor an embedding for this
    dropout = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    model, twin = twins(transformers.GPT2LMHeadModel(transformers.GPT2Config(**options, **dropout)).train())
    for tokens in (42, 45, 41, 43):
        near(step(twin, inputs(1, tokens)), step(model, inputs(1, tokens)))
    assert held(twin).replays == 2


def test_buckets():
    lengths = [bucket(n) for n in range(1, 5000)]
    assert all(n <= b for n, b in enumerate(lengths, 1))
    assert all(bucket(b) == b for b in {*lengths})
    assert max(b / n for n, b in enumerate(lengths, 1) if n > 32) < 1.25
    assert [bucket(n, (100, 200)) for n in (1, 100, 101, 200, 201)] == [100, 100, 200, 200, 201]


def same_gradients(model, twin):
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), name


def test_accumulation_and_scaling():
    """The first gradients are not those of the second microbatch; what is upstream of the loss arrives."""
    model, twin, _ = captured_pair()
    for m in (model, twin):
        m.zero_grad()
        for seed in range(3):
            (m(**inputs(seed), num_items_in_batch=torch.tensor(40)).loss * (seed + 1) / 3).backward()
    same_gradients(model, twin)


def test_zeroed_in_place_and_between_forward_and_backward():
    model, twin, _ = captured_pair()
    for to_none in (False, True, False):
        for m in (model, twin):
            loss = m(**inputs(5)).loss
            m.zero_grad(set_to_none=to_none)
            loss.backward()
        same_gradients(model, twin)


def test_a_step_copies_no_gradient():
    """A parameter takes the graph's memory for its gradient."""
    _, twin, graphs = captured_pair()
    twin.zero_grad()
    twin(**inputs(9)).loss.backward()
    graph = next(iter(graphs._graphs.values()))
    for p, t in zip(graph.used, graph.loan.tensors, strict=True):
        assert p.grad.data_ptr() == t.data_ptr()


def test_gradients_that_somebody_holds_keep_their_values(caplog):
    _, twin, _ = captured_pair()
    step(twin, inputs(7))
    held_before = {n: p.grad for n, p in twin.named_parameters()}
    values = {n: g.clone() for n, g in held_before.items()}
    twin.zero_grad()
    replays = held(twin).replays
    step(twin, inputs(8))
    assert held(twin).replays == replays
    assert all(torch.equal(g, values[n]) for n, g in held_before.items())
    assert "gradients of an earlier step are still held" in caplog.text
    held_before.clear()
    step(twin, inputs(8))
    assert held(twin).replays == replays + 1


def test_options_of_the_loss_and_numbers():
    """A number of items is no part of a graph; other options are."""
    model, twin = pair()
    for seed in range(8):
        same_steps((model, twin), [seed], num_items_in_batch=20 + seed)
    assert held(twin).captures == 1
    for smoothing in (0.1, 0.2, 0.1, 0.2, 0.1, 0.2):
        same_steps((model, twin), [0], label_smoothing=smoothing)
    assert held(twin).captures == 3


def test_what_a_loss_counts_is_of_the_tokens_given():
    model, twin = pair()
    counts = {"return_token_accuracy": True, "return_predicted_tokens": True}
    for seed in range(5):
        outputs = [m(**inputs(seed, 27), **counts) for m in (model, twin)]
        for out in outputs:
            out.loss.backward()
        assert torch.equal(outputs[0].predicted_tokens, outputs[1].predicted_tokens)
        assert torch.equal(outputs[0].token_accuracy, outputs[1].token_accuracy)
        assert outputs[1].get("logits") is None
    assert held(twin).replays == 3


def same_runs(models):
    """Six steps of both, each run from one seed."""
    runs = []
    for m in models:
        torch.manual_seed(3)
        runs.append([step(m, inputs(seed)) for seed in range(6)])
    for one, other in zip(*runs, strict=True):
        same_bits(one, other)


def test_dropout_draws_what_eager_steps_draw():
    same_runs(pair(attention_dropout=0.3))


def test_autocast():
    model, twin = pair()
    autocast = torch.autocast("cpu", torch.bfloat16)
    same_steps((model, twin), range(6), loss_of=autocast(own_loss))
    assert held(twin).replays == 4
    step(twin, inputs(0))
    assert held(twin).captures == 2, "without autocast it is another graph"


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant, caplog):
    model, twin = pair()
    for m in (model, twin):
        m.gradient_checkpointing_enable({"use_reentrant": reentrant})
        m.enable_input_require_grads()
    same_steps((model, twin), range(5))
    assert held(twin).replays == (0 if reentrant else 3)
    assert ("checkpoints are reentrant" in caplog.text) == reentrant


@pytest.mark.parametrize("mode", ["elementwise", 0.5])
def test_recompute(mode):
    model, twin = pair(num_hidden_layers=4)
    report = apply(twin, recompute=mode)
    same_steps((model, twin), range(5))
    assert held(twin).replays == 3 and "down_proj keep no result" in str(report)


@pytest.mark.parametrize("where", ["adapters", "attention"])
def test_checkpoints_with_dropout(where, caplog):
    """The seeds of adapters are drawn once for a layer and its repetition; other dropout runs eagerly."""
    model = make("qwen3", attention_dropout=0.2 * (where == "attention"))
    model = adapted(model, lora_dropout=0.3, target_modules=["q_proj", "up_proj"])
    model, twin = twins(model)
    for m in (model, twin):
        m.gradient_checkpointing_enable({"use_reentrant": False})
        m.enable_input_require_grads()
    same_runs((model, twin))
    assert held(twin).replays == 4 * (where == "adapters")
    assert ("checkpoints repeat dropout" in caplog.text) == (where == "attention")


# --- what goes on ----------------------------------------------------------------------------


def _evaluate(model):
    model.eval()
    with torch.no_grad():
        model(**inputs(50))
    model.train()


def _generate(model):
    model.eval()
    model.generate(inputs(51)["input_ids"][:, :5], max_new_tokens=3, do_sample=False)
    model.train()


def _optimise(model):
    tigon.optim.AdamW(model.parameters(), lr=1e-2).step()


def _load(model):
    model.load_state_dict({name: value + 0.125 for name, value in model.state_dict().items()})


@pytest.mark.parametrize(
    "event",
    [_evaluate, _generate, _optimise, _load, lambda m: m.state_dict(), copy.deepcopy, pickle.dumps],
    ids=["eval", "generate", "optimizer", "load_state_dict", "state_dict", "deepcopy", "pickle"],
)
def test_a_graph_outlives(event):
    model, twin, graphs = captured_pair()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        q.grad = p.grad = None
    for m in (model, twin):
        step(m, inputs(20))
        event(m)
    replays = graphs.replays
    same_steps((model, twin), range(3))
    assert (graphs.captures, graphs.replays) == (1, replays + 3)


# --- what runs eagerly -----------------------------------------------------------------------


def test_two_forwards_before_a_backward(caplog):
    model, twin, _ = captured_pair()
    for m in (model, twin):
        m.zero_grad()
        first, second = m(**inputs(1)).loss, m(**inputs(2)).loss
        (first + 2 * second).backward()
    same_gradients(model, twin)
    assert "an earlier loss of the model waits for its backward" in caplog.text
    kept = twin(**inputs(3))
    del kept
    replays = held(twin).replays
    step(twin, inputs(4))
    assert held(twin).replays == replays + 1, "a loss that is gone waits for nothing"


def test_logits_are_values():
    model, twin, _ = captured_pair()
    out, wanted = twin(**inputs(3)), model(**inputs(3))
    assert torch.equal(out.logits + 0, wanted.logits + 0)
    assert torch.equal(out.logits.argmax(-1), wanted.logits.argmax(-1))
    del out
    stale = twin(**inputs(3)).logits
    step(twin, inputs(4))
    with pytest.raises(tigon.Error, match="before the next forward"):
        stale.sum()
    out = twin(**inputs(3))
    with pytest.raises(tigon.Error, match="gradients must come through the loss"):
        out.logits.float().logsumexp(-1).sum().backward()
    del out
    out = twin(**inputs(3))
    with pytest.raises(tigon.Error, match="gradients must come through the loss"):
        (out.loss + out.logits.float().mean()).backward()


@pytest.mark.parametrize("use", ["values", "gradients", "fused"])
def test_a_program_that_uses_logits(use, caplog):
    """Values are there; a loss of them runs eagerly."""
    model, twin = pair()
    for seed in range(5):
        found = []
        for m in (model, twin):
            m.zero_grad()
            out = m(**inputs(seed))
            if use == "values":
                found.append(out.logits.argmax(-1))
                out.loss.backward()
            elif use == "gradients":
                (out.loss + out.logits.square().mean()).backward()
            else:
                loss = nn.functional.cross_entropy(out.logits.view(-1, 97), inputs(seed)["labels"].view(-1))
                (out.loss + loss).backward()
            found.append(m.lm_head.weight.grad.clone())
        half = len(found) // 2
        assert all(map(torch.equal, found[:half], found[half:]))
    assert held(twin).replays == (3 if use == "values" else 0)
    assert ("computes a loss of output.logits" in caplog.text) == (use != "values")


def test_a_second_backward_is_refused_in_words():
    _, twin, _ = captured_pair()
    loss = twin(**inputs(3)).loss
    loss.backward(retain_graph=True)
    with pytest.raises(tigon.Error, match="differentiated once"):
        loss.backward()
    with pytest.raises(tigon.Error, match="second derivatives"):
        torch.autograd.grad(twin(**inputs(4)).loss, next(twin.parameters()), create_graph=True)


@pytest.mark.parametrize("change", ["step", "data"])
def test_parameters_that_change_before_the_backward(change):
    """A backward would read the new values, or memory that is freed."""
    _, twin, _ = captured_pair()
    loss = twin(**inputs(3)).loss
    if change == "step":
        for p in twin.parameters():
            p.grad = torch.ones_like(p)
        tigon.optim.AdamW(twin.parameters()).step()
    else:
        twin.model.norm.weight.data = twin.model.norm.weight.data.clone()
    with pytest.raises(tigon.Error, match="before the model's parameters change"):
        loss.backward()
    step(twin, inputs(4))


def test_routers_that_record_or_replay(caplog):
    """The ids are of each forward, and Python reads them."""
    sizes = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(**SHARED | sizes)
    model, twin = twins(transformers.Qwen3MoeForCausalLM(config).train())
    same_steps((model, twin), range(5))
    assert held(twin).replays == 3
    ids = torch.stack([torch.randperm(8)[:2] for _ in range(2 * TOKENS * 2)]).view(2, TOKENS, 2, 2)
    replays = held(twin).replays
    for seed in range(3):
        results = []
        for m in (model, twin):
            with tigon.replay_routing(m, ids):
                results.append([step(m, inputs(seed)) for _ in range(2)])
        for got, wanted in zip(*results, strict=True):
            same_bits(got, wanted)
        ids = ids.flip(1)
    assert held(twin).replays == replays and "its routers record or replay" in caplog.text
    same_steps((model, twin), range(3))
    assert held(twin).replays > replays


def test_grad_of_some_parameters():
    model, twin, _ = captured_pair()
    found = []
    for m in (model, twin):
        m.zero_grad()
        found.append(torch.autograd.grad(m(**inputs(3)).loss, [m.model.norm.weight, m.lm_head.weight]))
    close(*found, ulps=0)
    values = [g.clone() for g in found[1]]
    step(twin, inputs(5))
    close([*found[1]], values, ulps=0)


def test_a_capture_that_fails(caplog, recorder):
    model, twin = pair()
    recorder.fail = torch.OutOfMemoryError("CUDA out of memory")
    same_steps((model, twin), range(5))
    assert held(twin).replays == 0
    assert caplog.text.count("not enough memory to capture") == 1
    assert any("not enough memory" in line for line in held(twin).lines())
    recorder.fail = None
    same_steps((model, twin), range(4), 64)
    assert held(twin).replays > 0, "another shape is tried"


@pytest.mark.parametrize("what", ["fits", "leaves something", "does not fit", "is slower"])
def test_a_later_shape_is_captured_when_it_comes(what, recorder):
    """An eager call would need memory beside the pool; what cannot live beside other graphs ends them."""
    model, twin, graphs = captured_pair()
    recorder.left = what == "leaves something"
    recorder.fail = torch.OutOfMemoryError("CUDA out of memory") if what == "does not fit" else None
    recorder.times = itertools.chain([0, 1.0], itertools.cycle([0, 1.5])) if what == "is slower" else None
    same_steps((model, twin), range(5), 64)
    replays = {"does not fit": 2, "is slower": 6}.get(what, 7)
    first = what in ("fits", "is slower")
    shapes = [g.inputs["input_ids"].shape[1] for g in graphs._graphs.values()]
    assert shapes == [TOKENS] * first + [64] * (replays == 7) and graphs.replays == replays
    recorder.left, recorder.fail, captures = False, None, graphs.captures
    same_steps((model, twin), [1])
    assert graphs.captures == captures + (not first) and graphs.replays == replays + 1


def test_inside_another_capture(monkeypatch):
    model, twin, _ = captured_pair()
    replays = held(twin).replays
    monkeypatch.setattr(Recorder, "inside", True)
    same_steps((model, twin), [3])
    assert held(twin).replays == replays


def test_a_parameter_outside_of_the_model_is_seen(caplog):
    """Its gradient would be lost."""
    model = make("llama")
    apply(model, graphs=True)
    outside = nn.Parameter(torch.ones(()))
    norm = model.model.norm
    forward = norm.forward
    norm.forward = lambda x: forward(x) * outside
    for seed in range(4):
        outside.grad = None
        step(model, inputs(seed))
        assert outside.grad is not None
    assert "a parameter outside of the model takes part" in caplog.text


@pytest.mark.parametrize(
    "given, reason",
    [
        ({"use_cache": True}, "use_cache=True was given"),
        ({"inputs_embeds": "wanted"}, "inputs_embeds needs a gradient"),
        ({"output_hidden_states": True}, "the model returns hidden_states"),
        ({"return_dict": False}, "the model returns a tuple"),
    ],
)
def test_calls_that_run_eagerly_say_why(given, reason, caplog):
    model, twin = pair()

    def loss_of(m, made):
        if "inputs_embeds" in given:
            ids = made.pop("input_ids")
            made["inputs_embeds"] = model.model.embed_tokens(ids).detach().requires_grad_()
        return m(**made)[0]

    same_steps((model, twin), range(4), loss_of=loss_of, **given)
    assert held(twin).replays == 0
    assert caplog.text.count(reason) == 1


def test_models_without_a_head_and_wrong_lengths():
    model = make("llama")
    report = apply(model, loss=False, graphs=True)
    assert "no graphs" in str(report)
    for wrong in ("512", (), (0,), (3.5,), 512):
        with pytest.raises(tigon.Error, match="graphs must be True, False or lengths"):
            apply(make("llama"), graphs=wrong)


# --- bounds and words ------------------------------------------------------------------------


def test_graphs_are_bounded(caplog, monkeypatch):
    """More shapes run eagerly, and take the place of those that do not come any more."""
    from tigon.integrations.transformers import graphs

    monkeypatch.setattr(graphs, "LIMIT", 3)
    monkeypatch.setattr(graphs, "UNUSED", 6)
    model, twin = pair()
    for _ in range(3):
        for tokens in (8, 33, 41, 49, 57):
            same_steps((model, twin), [1], tokens, padded=True)
    assert held(twin).captures == 3 and "it comes in more than 3 shapes" in caplog.text
    for tokens in (33,) * 8 + (57,):
        step(twin, inputs(1, tokens))
    assert len(held(twin)._graphs) == 3 and held(twin).captures == 4


@pytest.mark.parametrize("graph, stays", [(0.9, True), (1.1, False)])
def test_a_graph_that_is_not_faster_goes(graph, stays, recorder, caplog):
    """By the shortest of some forwards each way."""
    model, twin = pair()
    ticks = itertools.chain([0, 3.0, 0, 1.0], itertools.cycle([0, 1.5, 0, graph]))
    recorder.times = ticks
    same_steps((model, twin), range(12))
    assert held(twin).replays == (10 if stays else 4)
    assert ("the device is the limit" in caplog.text) != stays


def test_the_report_and_the_environment_say_it(caplog):
    model = make("llama")
    report = apply(model, graphs=(TOKENS, 64))
    captured(model)
    assert f"1 captured (2x{TOKENS})" in str(report)
    assert "1 captured" in report._repr_html_()
    assert any(f"2x{TOKENS}" in line for line in tigon.env().graphs)
    assert report.head_calls.fused == 4 and report.head_calls.lazy == 4
    report.check()
    assert not caplog.records


def test_two_models_and_copies():
    """Each has graphs of its own; a copy begins without."""
    model, twin, _ = captured_pair()
    other = copy.deepcopy(twin)
    assert held(other) is not held(twin) and held(other).captures == 0
    third = pickle.loads(pickle.dumps(twin))
    for seed in range(6):
        for m in (twin, other, third):
            same_steps((model, m), [seed])
    assert held(other).replays == 4 and held(third).replays == 4
    assert "1 captured" in str(report_of(other))


@pytest.mark.parametrize(
    ("given", "mapped", "during"),
    [
        ("", False, "expandable_segments:True"),
        ("max_split_size_mb:64, ", False, "max_split_size_mb:64,expandable_segments:True"),
        ("expandable_segments:False", False, "expandable_segments:False"),
        ("max_split_size_mb:64", True, "max_split_size_mb:64"),  # by an earlier setting
    ],
)
def test_settings_of_the_allocator(given, mapped, during, monkeypatch):
    """Those of the program hold meanwhile and afterwards, also the one of how memory grows."""
    now = {"PYTORCH_CUDA_ALLOC_CONF": given, "expandable_segments": mapped}
    before = dict(now)

    def put(text):
        said = dict(setting.split(":") for setting in text.replace(" ", "").split(",") if setting)
        now["expandable_segments"] = (
            said.get("expandable_segments", str(now["expandable_segments"])) == "True"
        )
        now["PYTORCH_CUDA_ALLOC_CONF"] = text

    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", put, raising=False)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"allocator_settings": dict(now)})
    monkeypatch.setattr(backend, "_maps_memory", lambda _: True)
    with pytest.raises(KeyError), backend._in_one_piece(0):
        assert now["PYTORCH_CUDA_ALLOC_CONF"] == during
        raise KeyError
    assert now == before


def test_trainer(tmp_path):
    """The same losses with and without, through accumulation, clipping, evaluation and mixed precision."""
    mask = {"attention_mask": torch.ones(32, dtype=torch.long)}
    rows = [{name: t[0] for name, t in inputs(seed, 32).items()} | mask for seed in range(8)]
    losses = []
    for graphs in (False, True):
        model = make("qwen3", attn_implementation="sdpa")
        callback = tigon.TigonTrainerCallback(graphs=graphs)
        options = {"max_steps": 8, "gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "bf16": True}
        options |= {"eval_strategy": "steps", "eval_steps": 3}
        args = transformers.TrainingArguments(**trainer_options(tmp_path, **options))
        trainer = transformers.Trainer(
            model=model, args=args, train_dataset=rows, eval_dataset=rows[:4], callbacks=[callback]
        )
        trainer.train()
        names = ("loss", "eval_loss", "grad_norm")
        losses.append([[row.get(name) for name in names] for row in trainer.state.log_history])
    assert losses[0] == losses[1]
    assert held(model).replays == 14 and held(model).captures == 1
