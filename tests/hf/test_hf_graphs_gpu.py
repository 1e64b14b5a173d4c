"""Graphs on a GPU: the same bits as eager calls of the same padded batch, whatever happens in between."""

import copy
import gc
import io
import pickle
import random

import peft
import pytest
import torch
from graph_cases import fp8_follows_the_optimizer, fp8_pair, held, inputs, pair, twins
from tiny import VOCABULARY, adapted, close, make, same_bits, step

import tigon
from tigon.graphs.backend import CudaBackend
from tigon.integrations.transformers import apply, head, undo
from tigon.integrations.transformers.graph_arguments import bucket
from tigon.integrations.transformers.graphs import GRAPHS

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def all_rows(monkeypatch):
    """Eager heads that compute all rows, as a capture has to."""
    monkeypatch.setattr(head, "count_labels", lambda *_, **__: None)


def on_gpu(seed=0, tokens=32, **changes):
    return {name: t.cuda() for name, t in inputs(seed, tokens, **changes).items()}


def gpu_pair(family="qwen3", dtype=torch.bfloat16, **changes):
    changes = {"attn_implementation": "sdpa", "use_cache": False, "hidden_size": 64, "head_dim": 16} | changes
    return pair(family, device="cuda", dtype=dtype, **changes)


class Both:
    """A model, its twin with graphs, and optimizers; one seed for both in each call."""

    def __init__(self, lora=False, lora_dropout=0.0, **changes):
        self.models = gpu_pair(**changes)
        if lora:
            for m in self.models:
                undo(m)
            targets = ["q_proj", "v_proj", "up_proj", "down_proj"]
            self.models = twins(adapted(self.models[0], target_modules=targets, lora_dropout=lora_dropout))
        self.make_optimizers()

    def make_optimizers(self):
        parameters = [[p for p in m.parameters() if p.requires_grad] for m in self.models]
        self.optimizers = [tigon.optim.AdamW(ps, lr=1e-2, max_grad_norm=1.0) for ps in parameters]

    def do(self, event):
        for m in self.models:
            event(m)

    def train(self, seed, tokens=32, accumulate=1, scale=1.0, **changes):
        """One optimizer step of both. The eager model gets what the graph gets: padded, where it replays."""
        replays, results = held(self.models[1]).replays, []
        for m, optimizer in zip(reversed(self.models), reversed(self.optimizers), strict=True):
            padded = m is self.models[0] and held(self.models[1]).replays - replays == accumulate
            torch.cuda.manual_seed(seed)
            losses = []
            for micro in range(accumulate):
                given = on_gpu(1000 * seed + micro, tokens, padded=padded)
                given |= {n: f(given) for n, f in changes.items() if n != "attention_mask" or not padded}
                loss = m(**given).loss
                (loss * scale).backward()
                losses.append(loss.detach())
            grads = {n: p.grad.clone() for n, p in m.named_parameters() if p.grad is not None}
            results.append((torch.stack(losses), grads))
            optimizer.step()
            optimizer.zero_grad()
        if held(self.models[1]).replays - replays in (0, accumulate):
            same_bits(*results)
        else:  # some of each
            for p, q in zip(*(m.parameters() for m in self.models), strict=True):
                p.data.copy_(q.data)
            self.make_optimizers()


def _evaluate(both, seed):
    both.do(lambda m: m.eval())
    with torch.no_grad():
        outputs = [m(**on_gpu(seed)) for m in both.models]
    assert torch.equal(outputs[0].logits, outputs[1].logits)
    both.do(lambda m: m.train())


def _generate(both, seed):
    both.do(lambda m: m.eval())
    ids = on_gpu(seed)["input_ids"][:, :4]
    tokens = [m.generate(input_ids=ids, max_new_tokens=3, do_sample=False) for m in both.models]
    assert torch.equal(*tokens)
    both.do(lambda m: m.train())


def _load(both, seed):
    """What was saved before."""
    for m in both.models:
        torch.save(m.state_dict(), file := io.BytesIO())
        m.load_state_dict(torch.load(io.BytesIO(file.getvalue())))


def _swap(both, seed):
    def swap(m):
        p = next(p for p in m.parameters() if p.requires_grad)
        p.data = p.data.clone()

    both.do(swap)


def _freeze(both, seed):
    def freeze(m):
        p = next(p for n, p in m.named_parameters() if "norm" in n or "lora_A" in n)
        p.requires_grad_(not p.requires_grad)

    both.do(freeze)
    both.make_optimizers()


def _attribute(both, seed):
    for m in both.models:
        attention = next(x for x in m.modules() if hasattr(x, "scaling") and hasattr(x, "q_proj"))
        attention.scaling = attention.scaling * 1.01


def _copies(both, seed):
    both.models = both.models[0], copy.deepcopy(both.models[1])
    both.make_optimizers()


def _pickles(both, seed):
    if not hasattr(both.models[1], "peft_config"):
        both.models = both.models[0], pickle.loads(pickle.dumps(both.models[1]))
        both.make_optimizers()


def _undo(both, seed):
    undo(both.models[1])
    apply(both.models[1], graphs=True)


def _adapters(both, seed):
    if hasattr(both.models[0], "peft_config"):
        both.do(lambda m: m.merge_adapter())
        _evaluate(both, seed)
        both.do(lambda m: m.unmerge_adapter())
        both.do(
            lambda m: [layer.scaling.update(default=0.7) for layer in m.modules() if hasattr(layer, "lora_A")]
        )


def _add_adapter(both, seed):
    if hasattr(both.models[0], "peft_config"):
        both.do(lambda m: m.add_adapter("other", peft.LoraConfig(r=2, target_modules=["k_proj"])))
        both.do(lambda m: m.set_adapter("other"))
        _evaluate(both, seed)
        both.do(lambda m: m.set_adapter("default"))
        both.do(lambda m: m.delete_adapter("other"))
        both.make_optimizers()


def _two_models(both, seed):
    """Another one with graphs of its own in between."""
    other = copy.deepcopy(both.models[1])
    for again in range(4):
        step(other, on_gpu(seed + again))
    assert held(other).replays == 2


def _no_memory(both, seed):
    """For one more graph."""
    capture = CudaBackend.capture

    def full(*_, **__):
        raise torch.OutOfMemoryError("no")

    CudaBackend.capture = full
    both.train(seed + 500, tokens=48)
    CudaBackend.capture = capture


def _hold(both, seed):
    m = both.models[1]
    m(**on_gpu(seed)).loss.backward()
    both.held = [(p.grad, p.grad.clone()) for p in m.parameters() if p.grad is not None]
    m.zero_grad()


def _empty(both, seed):
    gc.collect()
    torch.cuda.empty_cache()
    # What a dangling gradient or a freed pool would show.
    torch.full((1 << 22,), float("nan"), device="cuda")


def _forget(both, seed):
    """A forward without a backward."""
    both.do(lambda m: m(**on_gpu(seed)))


EVENTS = [
    _evaluate,
    _generate,
    _load,
    _swap,
    _freeze,
    _attribute,
    _copies,
    _pickles,
    _undo,
    _adapters,
    _add_adapter,
    _two_models,
    _no_memory,
    _hold,
    _empty,
    _forget,
]
FORMS = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "dropout": {"attention_dropout": 0.2},
    "lora": {"lora": True},
    "lora_dropout": {"lora": True, "lora_dropout": 0.1},
    "fp32": {"dtype": torch.float32},
}


@pytest.mark.parametrize("order", range(5))
@pytest.mark.parametrize("form", FORMS)
def test_random_orders_of_events(form, order):
    draw = random.Random(100 * order + len(form))
    both = Both(**FORMS[form])
    both.held = []
    replays = 0
    for seed in range(30):
        event = draw.choice([None, None, None, *EVENTS])
        if event is not None:
            event(both, seed)
        before = held(both.models[1]).replays
        both.train(
            seed,
            draw.choice([32, 32, 32, 27, 40, 37]),
            accumulate=draw.choice([1, 1, 3]),
            scale=draw.choice([1.0, 0.37, 1024.0]),
        )
        replays += max(held(both.models[1]).replays - before, 0)
        for gradient, value in both.held:
            assert torch.equal(gradient, value)
        if draw.random() < 0.5:
            both.held = []
    assert replays > 10, [*held(both.models[1]).lines()]


def test_an_attention_mask_of_padding():
    """Of ones: the same bits as without a mask."""
    both = Both()

    def ones(given):
        return torch.ones_like(given["input_ids"])

    for seed in range(6):
        both.train(seed, attention_mask=ones)
    assert held(both.models[1]).replays == 4


@pytest.mark.parametrize("rows", ["packed", "padded on the left"])
def test_masks_that_say_something(rows):
    """They are built in the graph, whatever their values: nothing waits for the device."""
    model, twin = gpu_pair()
    for seed in range(6):
        given = on_gpu(seed)
        if rows == "packed":
            given["position_ids"] = torch.arange(32, device="cuda").remainder(5 + seed).expand(2, -1)
        else:
            given["attention_mask"] = torch.ones_like(given["input_ids"])
            given["attention_mask"][:, : 3 + seed] = 0
            given["labels"] = given["labels"].masked_fill(given["attention_mask"] == 0, -100)
        same_bits(step(twin, given), step(model, given))
    assert held(twin).replays == 4, [*held(twin).lines()]


@pytest.mark.parametrize("kind", [int, float, torch.tensor])
def test_numbers_of_items(kind):
    """On the host or on the device, and another one in each call."""
    both = Both()
    for seed in range(6):
        both.train(seed, num_items_in_batch=lambda given, seed=seed: kind(20 + seed))
    assert held(both.models[1]).replays == 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_autocast_and_a_scaler(dtype):
    models = gpu_pair(dtype=torch.float32)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in models]
    scalers = [torch.amp.GradScaler("cuda", init_scale=2.0**12) for _ in models]
    for seed in range(8):
        losses = []
        for m, optimizer, scaler in zip(models, optimizers, scalers, strict=True):
            with torch.autocast("cuda", dtype):
                losses.append(m(**on_gpu(seed)).loss)
            scaler.scale(losses[-1]).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert torch.equal(*losses)
    close(*([*m.parameters()] for m in models), ulps=0)
    assert held(models[1]).replays >= 5


def test_a_decoder_below_a_loss_of_the_program():
    models = gpu_pair()

    def loss_of(m, given):
        hidden = m.model(input_ids=given["input_ids"]).last_hidden_state
        return tigon.linear_cross_entropy(hidden, m.lm_head.weight, given["labels"], shift=True)

    for seed in range(8):
        wanted, got = (step(m, on_gpu(seed, 27), loss_of) for m in models)
        torch.testing.assert_close(got[0], wanted[0], rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(got[1], wanted[1], rtol=5e-2, atol=5e-3)
    assert vars(models[1].model)[GRAPHS].replays == 6


@pytest.mark.parametrize("adapters", [{}, {"lora": True, "lora_dropout": 0.1}], ids=["plain", "lora_dropout"])
def test_checkpointing(adapters):
    both = Both(**adapters)
    both.do(lambda m: m.gradient_checkpointing_enable({"use_reentrant": False}))
    for seed in range(6):
        both.train(seed)
    assert held(both.models[1]).replays == 4


@pytest.mark.parametrize("mode", ["elementwise", 0.5])
def test_recompute(mode):
    both = Both()
    apply(both.models[1], recompute=mode)
    for seed in range(6):
        both.train(seed)
    assert held(both.models[1]).replays == 4


def test_not_enough_memory():
    """A capture that runs out of memory leaves an eager model, random numbers, and what was captured."""
    model, twin = gpu_pair(vocab_size=VOCABULARY)
    for seed in range(5):
        step(twin, on_gpu(seed))
    graphs = held(twin)
    total = torch.cuda.get_device_properties(0).total_memory
    given = {n: t.repeat(64, 1) for n, t in on_gpu(1, 512).items()}
    wanted = step(model, given)
    gc.collect()
    torch.cuda.empty_cache()
    limit = (torch.cuda.memory_reserved() + (8 << 20)) / total
    capture = graphs._capture

    def limited(*args):
        torch.cuda.set_per_process_memory_fraction(limit)
        try:
            return capture(*args)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)

    graphs._capture = limited
    same_bits(step(twin, given), wanted)
    del graphs._capture
    assert any("not enough memory" in line for line in graphs.lines())
    torch.rand(4, device="cuda")
    replays = graphs.replays
    same_bits(step(twin, on_gpu(3)), step(model, on_gpu(3)))
    assert graphs.replays == replays + 1


def test_what_waits_for_the_device(caplog):
    model, twin = gpu_pair()
    norm = twin.model.norm
    forward = norm.forward
    norm.forward = lambda x: forward(x) * (1.0 if x.sum().item() < 1e30 else 2.0)
    for seed in range(4):
        same_bits(step(twin, on_gpu(seed)), step(model, on_gpu(seed)))
    assert f"something in it waits for the device ({__name__}, line" in caplog.text
    torch.rand(4, device="cuda")


def test_inside_a_capture_of_the_program():
    model, twin = gpu_pair()
    for seed in range(4):
        step(twin, on_gpu(seed))
    replays = held(twin).replays
    static, graph = on_gpu(9), torch.cuda.CUDAGraph()
    twin.zero_grad()
    with torch.cuda.graph(graph):
        loss = twin(**static).loss
    graph.replay()
    assert torch.equal(loss, model(**static).loss) and held(twin).replays == replays


def test_streams():
    model, twin = gpu_pair()
    for seed in range(12):
        other = torch.cuda.Stream()
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            got = step(twin, on_gpu(seed))
        torch.cuda.current_stream().wait_stream(other)
        same_bits(got, step(model, on_gpu(seed)))
    assert held(twin).replays == 10


def test_memory_of_several_lengths_is_that_of_the_longest():
    _, twin = gpu_pair(hidden_size=256, head_dim=64, intermediate_size=1024, max_position_embeddings=2048)

    def reserved(lengths):
        for tokens in lengths:
            for seed in range(3):
                step(twin, {n: t.repeat(8, 1) for n, t in on_gpu(seed, tokens).items()})
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    longest = reserved([1024])
    assert reserved([128, 256, 512, 768]) <= 1.1 * longest + (32 << 20)
    assert held(twin).captures == 5


def test_a_model_may_go_while_its_graph_runs():
    """Its memory is unmapped when the device is done with it."""
    _, twin = gpu_pair()
    given = on_gpu(0)
    for _ in range(4):
        wanted = step(twin, given)
    torch.cuda._sleep(1 << 29)
    got = step(twin, given)
    assert held(twin).replays == 3
    del twin
    gc.collect()
    torch.cuda.empty_cache()
    same_bits(got, wanted)


def test_memory_is_that_of_eager_steps():
    """In a whole life: warm-up, all captures, fragments; a tenth more at most."""
    sizes = {"hidden_size": 512, "head_dim": 64, "intermediate_size": 2048, "max_position_embeddings": 2048}
    sizes["attn_implementation"] = "sdpa"  # eager attention makes a mask from a number of the host
    put = getattr(torch._C, "_accelerator_setAllocatorSettings", lambda _: None)
    put("garbage_collection_threshold:0.9")
    found, settings = [], torch.cuda.memory._snapshot()["allocator_settings"]
    for graphed in (False, True):
        model = make("qwen3", device="cuda", dtype=torch.bfloat16, use_cache=False, **sizes)
        apply(model, graphs=graphed)
        optimizer = tigon.optim.AdamW(model.parameters(), lr=1e-4)
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        for seed, tokens in enumerate([768, 1000, 640, 1000, 512, 768, 896, 640, 1000, 512, 896]):
            model(**{n: t.repeat(8, 1) for n, t in on_gpu(seed, tokens).items()}).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(torch.cuda.max_memory_reserved())
        if graphed:
            assert held(model).captures == 5, [*held(model).lines()]
        del model, optimizer
    assert found[1] <= 1.1 * found[0] + (32 << 20), found  # and the workspace of another stream
    assert torch.cuda.memory._snapshot()["allocator_settings"] == settings
    put("")


@pytest.mark.parametrize("kind", ["AdamW", "Muon"])
def test_a_whole_step(kind):
    """Forward, backward and optimizer in one graph; a scheduler writes a tensor."""
    options = {"use_cache": False, "attn_implementation": "sdpa"}
    models = [make("qwen3", device="cuda", dtype=torch.bfloat16, **options) for _ in range(2)]
    results = []
    for m, graphed in zip(models, (False, True), strict=True):
        apply(m)
        rate = torch.tensor(1e-2, device="cuda")
        if kind == "AdamW":
            optimizer = tigon.optim.AdamW(m.parameters(), lr=rate, capturable=True, max_grad_norm=1.0)
        else:
            matrices = [p for n, p in m.named_parameters() if p.ndim == 2 and "proj" in n]
            optimizer = tigon.optim.Muon(matrices, lr=1e-2)

        def train(input_ids, labels, m=m, optimizer=optimizer):
            loss = m(input_ids=input_ids, labels=labels, attention_mask=None).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            m.zero_grad()
            return loss

        call = tigon.graph_step(train, on_gpu(0)) if graphed else train
        found = []
        for seed in range(8):
            rate.fill_(1e-2 / (seed + 1))
            found.append(call(**on_gpu(seed)).detach().clone())
        results.append(torch.stack(found))
        if graphed:
            assert call.replays == 6, [*call.lines()]
    exact = {"rtol": 0, "atol": 0} if kind == "AdamW" else {"rtol": 1e-3, "atol": 1e-3}  # as test_muon.py
    torch.testing.assert_close(*results, **exact)


def test_buckets_are_padded_right():
    model, twin = gpu_pair()
    for seed in range(4):
        step(twin, on_gpu(seed))
    graphs = held(twin)
    for tokens in (33, 37, 40, 39, 36):
        got, wanted = step(twin, on_gpu(tokens, tokens)), step(model, on_gpu(tokens, tokens))
        torch.testing.assert_close(got[0], wanted[0], rtol=2e-3, atol=2e-3)
    assert graphs.captures == 2 and bucket(33) == bucket(40) == 40


def test_weights_in_float8_follow_the_optimizer(monkeypatch):
    sizes = {"attn_implementation": "sdpa", "use_cache": False, "hidden_size": 64, "head_dim": 16}
    pairs = fp8_pair(monkeypatch, device="cuda", dtype=torch.bfloat16, **sizes)
    fp8_follows_the_optimizer(pairs, [on_gpu(0)] * 8)
