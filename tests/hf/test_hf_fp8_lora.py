"""LoRA on a base in float8: frozen weights are quantised once, and may be kept as bytes alone."""

import copy

import peft
import pytest
import tiny
import torch
from graph_cases import held, inputs
from graph_recorder import recording
from test_hf_fp8 import batch, equal, left, model, of_any_size, ratio, step, taken  # noqa: F401

import tigon
from tigon import _fp8_bytes
from tigon.integrations.transformers import apply, undo
from tigon.ops import fp8_linear
from tigon.ops.fp8_weight import Fp8Weight

FP8 = {"fp8": "rowwise"}
ONLY = FP8 | {"fp8_base_only": True}


def adapted(dtype=torch.float32, **options):
    return tiny.adapted(model().to(dtype), **options)


def bases(wrapped):
    return {n: m.base_layer for n, m in wrapped.named_modules() if isinstance(m, peft.tuners.lora.Linear)}


def close(some, others):
    """Equal but for the order of sums, which a matmul's memory may change."""
    torch.testing.assert_close(some, others, rtol=1e-4, atol=1e-6)


def dequantised(wrapped):
    """A copy whose base weights are what the bytes stand for, in PEFT's own layers."""
    stock = copy.deepcopy(wrapped)
    undo(stock)
    with torch.no_grad():
        for base in bases(stock).values():
            q, s = fp8_linear.quantize_rows(base.weight)
            base.weight.copy_(q.float() * s[:, None])
    return stock


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", ["none", "all"])
def test_a_layer(dtype, dropout, bias):
    """y and all gradients are those of the formula of fp8_linear and of the adapter beside it."""
    wrapped = adapted(dtype, lora_dropout=dropout, bias=bias)
    assert len(taken(apply(wrapped, **FP8))) == 21
    layer = wrapped.base_model.model.model.layers[0].mlp.down_proj
    x = torch.randn(2, 9, 96, dtype=dtype).requires_grad_()
    torch.manual_seed(7)
    y = layer(x)
    dy = torch.randn_like(y)
    torch.manual_seed(7)
    trained = {n: p for n, p in layer.named_parameters() if p.requires_grad}
    got = [y, *torch.autograd.grad(y, (x, *trained.values()), dy)]
    a, b = (part["default"].weight.double() for part in (layer.lora_A, layer.lora_B))
    wide, weight = x.detach().double().requires_grad_(), layer.base_layer.weight.double()
    dropped = wide
    if dropout:
        from tigon.ops.lora_linear import dropout_factors
        from tigon.ops.philox import draw_seed

        torch.manual_seed(7)
        factors = dropout_factors((18, 96), dropout, draw_seed(x), 0)
        dropped = wide * factors.reshape(wide.shape)
    low = dropped @ a.T @ b.T * layer.scaling["default"]
    exact = fp8_linear.reference(wide, weight) + low
    if layer.base_layer.bias is not None:
        exact = exact + layer.base_layer.bias.double()
    pairs = dict(zip(trained, got[2:], strict=True))
    leaves = wide, layer.lora_A["default"].weight, layer.lora_B["default"].weight
    want = [exact, *torch.autograd.grad(exact, leaves, dy.double())]
    ours = [got[0], got[1], pairs["lora_A.default.weight"], pairs["lora_B.default.weight"]]
    floor = 90 if dtype == torch.float32 else 40
    assert min(ratio(w, g) for w, g in zip(want, ours, strict=True)) > floor


@pytest.mark.slow
@pytest.mark.parametrize("options", [FP8, ONLY])
def test_a_model(options):
    """Eager steps are those of a traced model, where the adapters are beside fp8_linear."""
    wrapped = adapted()
    stock = step(wrapped)
    apply(wrapped, **FP8)
    torch._dynamo.reset()
    want = step(torch.compile(wrapped, backend="aot_eager", fullgraph=True))
    apply(wrapped, **options)
    got = step(wrapped)
    assert len(got) == 43 and equal(got, step(wrapped))
    for name, value in got.items():
        traced = want[name if name == "loss" else f"_orig_mod.{name}"]
        torch.testing.assert_close(value, traced, rtol=1e-3, atol=1e-5)
    assert not equal(got, stock)
    assert min(ratio(stock[name], got[name]) for name in got if name != "loss") > 13


@pytest.mark.parametrize("options", [FP8, ONLY])
def test_quantised_once(options, monkeypatch):
    """Steps read the bytes of the first; a frozen Linear without an adapter too."""
    wrapped = adapted(target_modules=["q_proj", "v_proj"])
    report = apply(wrapped, **options)
    assert len(taken(report)) == 21
    step(wrapped)
    seen, original = [], fp8_linear._quantize
    monkeypatch.setattr(fp8_linear, "_quantize", lambda x, f: (seen.append(x), original(x, f))[1])
    step(wrapped)
    weights = {p.data_ptr() for p in wrapped.parameters() if type(p) is not Fp8Weight}
    assert seen and not any(x.data_ptr() in weights for x in seen)


def test_what_changes_a_frozen_weight():
    """A loaded state, a merge that is taken back and adapters that bring their own base are seen."""
    wrapped = adapted()
    apply(wrapped, **FP8)
    first = step(wrapped)
    state = {n: t * 2 if "base_layer.weight" in n else t for n, t in wrapped.state_dict().items()}
    other = copy.deepcopy(wrapped)
    wrapped.load_state_dict(state)
    second = step(wrapped)
    assert not equal(first, second)
    other.merge_adapter()
    layer = bases(other)["base_model.model.model.layers.0.mlp.up_proj"]
    merged = layer.weight.clone()
    with torch.no_grad():
        other(**batch(tokens=17))
    other.merge_and_unload()
    report = apply(other.base_model.model, **FP8)
    assert len(taken(report)) == 21 and torch.equal(layer.weight, merged)
    x = torch.randn(4, 64)
    assert ratio(fp8_linear.reference(x.double(), merged.double()), layer(x)) > 90


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("options", [FP8, ONLY])
def test_report(first, options):
    """Whether PEFT comes before or after."""
    ours = model()
    if first:
        report = apply(ours, **options)
    wrapped = peft.get_peft_model(ours, peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"])).train()
    if first:
        step(wrapped)
    else:
        report = apply(wrapped, **options)
    words = "tigon.{}_linear (rowwise)" + ", bytes only" * ("fp8_base_only" in options)
    by = {
        entry.path.removeprefix("base_model.model."): entry.by
        for entry in report.entries
        if entry.slot == "fp8"
    }
    assert by["model.layers.1.mlp.up_proj.base_layer"] == words.format("lora")
    assert by["model.layers.1.mlp.gate_proj"] == words.format("fp8") and len(taken(report)) == 21
    assert {r for path, r in left(report).items() if "lora_" in path} == {"LoRA adapter"}
    assert sum(type(p) is Fp8Weight for p in ours.parameters()) == 21 * ("fp8_base_only" in options)
    apply(wrapped)  # keeps what it is not asked of
    layer = ours.model.layers[1].mlp.up_proj
    assert layer.forward.__self__.spec.fp8 is not None and report.count("fp8") == 21


@pytest.mark.parametrize(
    "options, adapter, reason",
    [
        ({}, {"use_dora": True}, "DoRA reads the base's own weight"),
        ({"lora": False}, {}, "base of an adapter that the slot lora does not compute"),
        ({"fp8_except": "mlp"}, {}, "asked for by name: fp8_except"),
    ],
)
def test_left(options, adapter, reason):
    wrapped = adapted(**adapter)
    stock = copy.deepcopy(wrapped)
    report = apply(wrapped, **ONLY, **options)
    assert left(report)["model.layers.1.mlp.up_proj.base_layer"] == reason
    assert type(wrapped.base_model.model.model.layers[1].mlp.up_proj.base_layer.weight) is not Fp8Weight
    if not taken(report):
        torch.testing.assert_close(step(wrapped), step(stock), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", ["q_proj.base_layer", "gate_proj"])
def test_zero_3_is_refused(name):
    """Its hooks gather a Linear's weight for the Linear's own forward and backward."""
    wrapped = adapted(target_modules=["q_proj"])
    apply(wrapped, **FP8)
    next(m for n, m in wrapped.named_modules() if n.endswith(name)).weight.ds_id = 1
    with pytest.raises(tigon.Error, match="got a weight that ZeRO-3 has sharded"):
        step(wrapped)


class TestBytesOnly:
    """What reads a weight of which only the bytes are kept gets what they stand for."""

    def pair(self, **options):
        wrapped = adapted(**options)
        stock = dequantised(wrapped)
        apply(wrapped, **ONLY)
        return wrapped, stock

    def test_memory(self):
        wrapped, _ = self.pair(dtype=torch.bfloat16)
        for base in bases(wrapped).values():
            held = base.weight.held
            assert held.dense is None and held.quantized.bytes.nbytes == base.weight.numel()
        step(wrapped)
        assert all(b.weight.held.quantized._transposed is None for b in bases(wrapped).values())

    def test_state_and_evaluation(self, tmp_path):
        wrapped, stock = self.pair()
        want, got = stock.state_dict(), wrapped.state_dict()
        assert want.keys() == got.keys() and all(type(t) is torch.Tensor for t in got.values())
        assert equal(want, got)
        ids = torch.arange(12).reshape(2, 6)
        with torch.no_grad():
            logits = [m.eval()(input_ids=ids).logits for m in (wrapped, stock)]
        torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-5)
        wrapped.save_pretrained(tmp_path)
        again = peft.PeftModel.from_pretrained(model(), tmp_path)
        assert {n: t for n, t in again.state_dict().items() if "lora_" in n}.keys() == {
            n for n in got if "lora_" in n
        }

    def test_merged(self):
        wrapped, stock = self.pair()
        before = step(wrapped)
        for m in (wrapped, stock):
            m.merge_adapter()
        assert equal(wrapped.state_dict(), stock.state_dict())
        for m in (wrapped, stock):
            m.unmerge_adapter()
        close(step(wrapped), before)
        assert all(base.weight.held.dense is None for base in bases(wrapped).values())
        wrapped, stock = self.pair()
        ours, theirs = wrapped.merge_and_unload(safe_merge=True), stock.merge_and_unload(safe_merge=True)
        assert equal(ours.state_dict(), theirs.state_dict())
        undo(ours)
        assert all(type(p) is torch.nn.Parameter for p in ours.parameters())
        assert equal(dict(ours.named_parameters()), dict(theirs.named_parameters()))

    def test_undo(self):
        wrapped, stock = self.pair()
        step(wrapped)
        undo(wrapped)
        assert all(type(p) is torch.nn.Parameter for p in wrapped.parameters())
        assert equal(wrapped.state_dict(), stock.state_dict()) and equal(step(wrapped), step(stock))

    def test_loaded_and_copied(self):
        wrapped, stock = self.pair()
        expected = step(wrapped)
        for other in (copy.deepcopy(wrapped), tiny.loaded(wrapped)):
            close(step(other), expected)
            other.load_state_dict({n: t * 2 if "base" in n else t for n, t in stock.state_dict().items()})
            assert not equal(step(other), expected)
            assert all(type(b.weight) is Fp8Weight for b in bases(other).values())
        wrapped.load_state_dict(stock.state_dict())
        close(step(wrapped), expected)

    def test_graphs(self):
        """A replayed step reads the bytes, and other bytes drop the graph."""
        wrapped, _ = self.pair()
        twin = copy.deepcopy(wrapped)
        with recording():
            apply(twin, graphs=True)
            for seed in range(8):
                if seed == 5:
                    for m in (wrapped, twin):
                        m.load_state_dict({n: t * 1.5 for n, t in m.state_dict().items()})
                some, others = (tiny.step(m, inputs(seed)) for m in (wrapped, twin))
                close(*({"loss": loss} | grads for loss, grads in (some, others)))
            assert held(twin).captures == 2 and held(twin).replays >= 4

    def test_moved(self):
        wrapped, _ = self.pair()
        expected = step(wrapped)
        assert equal(step(wrapped.to("cpu")), expected)
        wrapped.to(torch.bfloat16)
        weight = bases(wrapped)["base_model.model.model.layers.0.mlp.up_proj"].weight
        assert weight.dtype == torch.bfloat16 and weight.held.dense is None
        assert step(wrapped)["loss"].isfinite()


def test_producers_write_what_bases_read(monkeypatch):
    """Bytes of x and of gradients are those of norms and gated units, and no bit changes."""
    wrapped = adapted(torch.bfloat16)
    apply(wrapped, **FP8)
    with monkeypatch.context() as patched:
        patched.setattr(_fp8_bytes, "wanted", lambda parameter: False)
        patched.setattr(_fp8_bytes, "take", lambda x, factors: (None, None))
        expected = step(wrapped)
    step(wrapped)
    seen, given, quantize, take = [], [], fp8_linear._quantize, _fp8_bytes.take
    monkeypatch.setattr(fp8_linear, "_quantize", lambda *a: (seen.append(a), quantize(*a))[1])
    monkeypatch.setattr(_fp8_bytes, "take", lambda *a: (given.append(take(*a)), given[-1])[1])
    assert equal(step(wrapped), expected)
    # No gradient passes the first norm: its x is cast, and the first q, k and v take no bytes.
    assert len(seen) == 1 + 3  # and those of attention
    assert sum(q is not None for q, _ in given) == 3 * 2 and len(given) == 3 * 7 - 3
