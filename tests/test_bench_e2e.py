"""bench/e2e.py on tiny configurations: records, errors, budget, table."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
import e2e
import floor

TINY = (
    "hidden_size=32,intermediate_size=48,num_attention_heads=4,num_key_value_heads=2,vocab_size=97,head_dim=8"
)
EXPERTS = {
    "qwen3-30b-a3b": ",num_experts=8,num_experts_per_tok=2,moe_intermediate_size=24",
    "gpt-oss-20b": ",num_local_experts=8,num_experts_per_tok=2",
}


@pytest.fixture
def words(tmp_path):
    options = f"--device cpu --layers 1 --set {TINY} --steps 2 --seq 16 --batches 2 --dtype float32"
    return [*options.split(), "--out", str(tmp_path / "e2e.jsonl")]


def records(words):
    return [json.loads(line) for line in Path(words[-1]).read_text().splitlines()]


def test_models_build_and_agree(words, monkeypatch):
    """Every published configuration, tiny: Tigon's losses are stock's."""
    for model in e2e.MODELS:
        changes = ["--set", TINY + EXPERTS.get(model, "")]
        args = e2e.parse([*words, *changes, "--models", model, "--providers", "stock,tigon"])
        stock, tigon = (e2e.run_case(case) for case in e2e.cases(args))
        found = stock.get("experts"), tigon.get("experts")
        assert found == (("grouped_mm", "tigon") if model in e2e.MOE else (None, None))
        assert tigon["losses"] == pytest.approx(stock["losses"], rel=1e-5), model
        assert tigon["tokens_per_s"] > 0 and len(tigon["step_ms"]) == 2
        assert any("loss" in line and "->" in line for line in tigon["report"]) and tigon["commit"]


@pytest.mark.parametrize("recipe", ["", "fp8='tensorwise'"])
def test_torchao(words, recipe):
    """Stock layers, or torchao's Linears in them, with Tigon's loss head and optimizer."""
    if recipe:
        pytest.importorskip("torchao.float8", reason="needs torchao")
    assert not any(case["provider"] == "torchao" for case in e2e.cases(e2e.parse(words)))
    options = "--models llama3-8b --providers stock,torchao --optimizer tigon --apply"
    stock, peer = e2e.cases(e2e.parse([*words, *options.split(), recipe]))
    stock, peer = e2e.run_case(stock | {"apply": {}}), peer | e2e.run_case(peer)
    assert peer["losses"] == pytest.approx(stock["losses"], rel=5e-2 if recipe else 1e-5)
    assert [line.split()[0] for line in peer["report"] if "->" in line] == ["loss"]
    assert "torchao" in e2e.table([peer])


def test_mixtures_of_experts(words, tmp_path):
    """The suite's layers, attention that has sinks, and records whose table and command name them."""
    args = e2e.parse(["--suite", "moe", "--seq", "2048"])
    qwen, gpt = (case for case in e2e.cases(args) if case["provider"] == "stock")
    assert (qwen["layers"], qwen["batch"], qwen["seq"], qwen["attention"]) == (4, 16, 2048, "sdpa")
    assert gpt["attention"] == "flex_attention"
    assert e2e.parse(["--suite", "moe", "--layers", "2"]).layers == 2
    options = ["--models", "gpt-oss-20b", "--set", TINY + EXPERTS["gpt-oss-20b"], "--providers", "stock"]
    (case,) = e2e.cases(e2e.parse([*words, *options]))
    assert case["attention"] == "eager"
    model = e2e.build(case)
    assert model.config._attn_implementation == "eager" and e2e.experts_of(model) == "grouped_mm"
    assert "gpt-oss-20b, 1 layers, eager, float32" in e2e.setting(case)


ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8}
LINEAR |= {"linear_value_head_dim": 8, "head_dim": 16}
SMALL_PEOPLE = {"qwen3-vl-2b": {"rope_parameters": ROPE}, "qwen3.5-9b": LINEAR}


def test_people(words):
    """Cases with settings of their own, tiny: stock and Tigon agree, and tables name each."""
    args = e2e.parse(["--suite", "people", *words, "--providers", "stock,tigon", "--seq", "32"])
    cases = e2e.cases(args)
    assert len(cases) == 2 * len(e2e.PEOPLE) and {case["seq"] for case in cases} == {32}
    for stock, own in zip(cases[::2], cases[1::2], strict=True):
        model = stock["model"]
        for case in (stock, own):
            case["changes"] = case["changes"] | SMALL_PEOPLE.get(model, {})
            case["packed"] = case["packed"] and 8
        layers = 4 if model == "qwen3.5-9b" else 1  # one of attention
        first, second = (e2e.run_case(case | {"layers": layers}) for case in (stock, own))
        tolerance = 2e-2 if stock["autocast"] else 1e-5
        assert second["losses"] == pytest.approx(first["losses"], rel=tolerance), model
        assert any("tigon." in line for line in second["report"]), model
    names = [e2e.setting(case) for case in cases[::2]]
    assert len(set(names)) == len(names)
    for word in ("autocast", "checkpointing", "packed, 8 tokens", "bi-encoder"):
        assert any(word in name for name in names)
    published = e2e.cases(e2e.parse(["--suite", "people"]))
    assert [case["seq"] for case in published[::3]] == [case["seq"] for case in e2e.PEOPLE]


@pytest.mark.parametrize("enough", [True, False])
def test_cards(words, monkeypatch, enough):
    """A case is tried under one limit after the other."""
    cases = e2e.cases(e2e.parse(["--suite", "card", *words]))
    assert len({e2e.key(case) for case in cases}) == len({str(case) for case in cases})
    names = [e2e.setting(case) for case in e2e.cases(e2e.parse(["--suite", "card"]))]
    assert "llama3-8b, checkpointing, limit 37 GB, moments in 8 bits, step in the backward" in names
    limits = []

    def within(case, gb):
        limits.append(gb)
        if gb < (48 if enough else 100):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate much")
        return {"memory_gb": f"{gb:g}"}

    monkeypatch.setattr(e2e, "run_within", within)
    monkeypatch.setattr(e2e, "ProcessPoolExecutor", lambda count, mp_context: ThreadPoolExecutor(count))
    case = next(case for case in cases if case["memory"] == e2e.CARDS and not case["lora"])
    if enough:
        record = case | e2e.run_case(case)
        assert record["memory_gb"] == "48" and limits == [24, 40, 48] and "limit 48 GB" in e2e.setting(record)
    else:
        with pytest.raises(torch.OutOfMemoryError, match="out of memory: 80 GB are too little"):
            e2e.run_case(case)
        assert limits == [24, 40, 48, 80]


@pytest.mark.slow
def test_a_limit_has_a_process_of_its_own(words):
    assert e2e.main([*words, "--models", "llama3.2-1b", "--providers", "tigon", "--memory", "8"]) == 0
    (record,) = records(words)
    assert record["memory_gb"] == "8" and len(record["losses"]) == e2e.WARMUP + record["steps"]


def test_adapters(words):
    """PEFT's adapters alone learn, and Tigon's losses are PEFT's."""
    pytest.importorskip("peft")
    options = ["--models", "qwen3-4b", "--lora", "4", "--checkpointing", "--providers", "stock,tigon"]
    stock, tigon = (e2e.run_case(case) for case in e2e.cases(e2e.parse([*words, *options])))
    assert tigon["losses"] == pytest.approx(stock["losses"], rel=1e-5)


def test_packed_rows(words):
    """Positions begin again at every sequence, whose first token is nobody's label."""
    case = e2e.cases(e2e.parse([*words, "--packed", "4", "--seq", "400"]))[0]
    data = e2e.inputs(case, 97, torch.Generator().manual_seed(0))
    ids = data["position_ids"]
    begins = ids == 0
    assert begins[:, 0].all() and 0.2 < begins.float().mean() < 0.3
    assert ((ids[:, 1:] == ids[:, :-1] + 1) | begins[:, 1:]).all()
    assert torch.equal(data["labels"] == -100, begins)


def test_model_flops(words):
    """Matmuls and causal attention counted by hand; experts that rest, and lookups, are left out."""
    case = e2e.cases(e2e.parse([*words, "--models", "llama3-8b", "--providers", "tigon"]))[0]
    config = e2e.MODELS["llama3-8b"] | case["changes"]
    record, flops = case | e2e.run_case(case), e2e.mfu.token_flops
    projections, mlp, norms = 2 * 32 * (4 + 2) * 8, 3 * 32 * 48, 3 * 32
    weights, attention = projections + mlp + norms + 32 * 97, 12 * 4 * 8 * 16 / 2
    assert flops(record, config) == 6 * weights + attention
    assert e2e.mfu.llama_weights(config, 1) == weights - norms
    two_passes = flops(record, config, passes=(2, 3), head=0.5, others=7)
    assert two_passes == 4 * (weights - 0.5 * 32 * 97) + attention + 7
    assert e2e.mfu.text(record, config) == "-", "no card"
    record |= {"gpu": "NVIDIA H200", "tokens_per_s": 3.2e7}
    share = flops(record, config) * 3.2e7 / 989e12
    assert e2e.mfu.text(record, config) == f"{share:.0%}"
    assert flops(record | {"seq": 32}, config) > flops(record, config)
    sparse = e2e.MODELS["qwen3-30b-a3b"] | {"num_experts": 8, "num_experts_per_tok": 2}
    moe = record | {"model": "qwen3-30b-a3b", "layers": 2, "parameters": 10**9}
    idle = 2 * 6 * 3 * sparse["moe_intermediate_size"] * sparse["hidden_size"]
    assert flops(moe, sparse | {"num_experts_per_tok": 8}) - flops(moe, sparse) == 6 * idle


def test_options_of_apply(words):
    """They reach tigon.apply, are part of the record, and tell its row apart."""
    words += ["--models", "llama3-8b,phi3-mini", "--providers", "tigon"]
    losses = []
    for given in ("", "norm=False"):
        case, other = e2e.cases(e2e.parse([*words, "--apply", given]))
        record = json.loads(json.dumps(case | e2e.run_case(case)))
        assert any("tigon.rms_norm" in line for line in record["report"]) != bool(given)
        assert other["apply"] == record["apply"] == ({"norm": False} if given else {})
        assert ("apply norm=False" in e2e.setting(record)) == bool(given)
        losses.append(record["losses"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert e2e.key(record) != e2e.key(record | {"apply": {}})


@pytest.mark.parametrize(
    "optimizer, clip", [("tigon", "1"), ("tigon", "0"), ("backward", "0"), ("torch", "1")]
)
def test_optimizers_agree(words, optimizer, clip):
    """Stock with fused AdamW beside Tigon with its own: one trajectory, and settings that the table names."""
    options = f"--models llama3-8b --providers stock,tigon --optimizer {optimizer} --clip {clip}".split()
    stock, tigon = (case | e2e.run_case(case) for case in e2e.cases(e2e.parse([*words, *options])))
    assert tigon["losses"] == pytest.approx(stock["losses"], rel=1e-5)
    assert ("clipped at 1" in e2e.setting(tigon)) == (clip == "1")
    assert ("Tigon's" in e2e.setting(tigon)) == (optimizer != "torch")


@pytest.mark.slow
def test_a_run(words, capsys):
    """Processes of their own; a provider that fails leaves a record and the others go on."""
    command = [*words, "--models", "llama3-8b", "--providers", "tigon,liger"]
    assert e2e.main(command) == 0
    one, two = records(words)
    assert one["provider"] == "tigon" and one["tokens_per_s"] > 0 and one["layers"] == 1
    assert "error" in two and two["provider"] == "liger"
    shown = capsys.readouterr().out
    assert "| llama3-8b, 1 layers, float32, hidden_size=32, " in shown and "| 2 x 16 |" in shown
    assert "1 broken" in shown
    assert e2e.main([*command, "--budget", "0.0000001"]) == 0  # what is done is not done again
    assert len(records(words)) == 2 and "out of time: 1 cases not started" in capsys.readouterr().out
    assert e2e.main(["--table", words[-1]]) == 0


def test_out_of_memory_ends_the_larger_batches(words, monkeypatch):
    seen = []

    def measure(script, key, case, timeout, following, quiet):
        assert len(following) <= e2e.processes.AHEAD and case not in following
        seen.append((case["batch"], case["provider"]))
        failed = {"error": "OutOfMemoryError: ", "out_of_memory": True}
        fine = {"tokens_per_s": 1.0, "tokens_per_s_std": 0.0, "peak_gb": 1.0, "losses": [1.0]}
        return {**case, **(failed if case["provider"] == "stock" and case["batch"] > 4 else fine)}

    monkeypatch.setattr(e2e.processes, "measure", measure)
    command = [*words, "--models", "qwen2-7b", "--providers", "stock,tigon", "--batches"]
    assert e2e.main([*command, "4,8,16"]) == 0
    assert seen == [(4, "stock"), (4, "tigon"), (8, "stock"), (8, "tigon"), (16, "tigon")]
    text = e2e.table(e2e.read(Path(words[-1])))
    assert text.count("out of memory") == 2 and "| 1.00x | 0.0e+00 |" in text
    seen.clear()
    assert e2e.main([*command, "32,6,8"]) == 0, "later, and in another order: only what is not known"
    assert seen == [(32, "tigon"), (6, "stock"), (6, "tigon")]
    assert e2e.main([*command, "8", "--layers", "2"]) == 0
    assert seen[3:] == [(8, "stock"), (8, "tigon")], "another setting"


def test_a_case_that_hangs_is_a_record(words):
    case = e2e.cases(e2e.parse([*words, "--models", "llama3-8b"]))[0]
    assert e2e.processes.measure(e2e.__file__, e2e.key, case, 0.01)["error"] == "more than 0 s"


def test_a_case_ends_with_the_budget(words, capsys):
    assert e2e.main([*words, "--models", "llama3-8b", "--providers", "tigon", "--budget", "0.001"]) == 1
    assert records(words)[0]["error"] == "more than 0 s"
    assert not e2e.processes.ready


def test_padding(words):
    """Rows end in padding that no label and no attention reaches; the rows of the table tell it apart."""
    args = e2e.parse([*words, "--models", "llama3-8b", "--padding", "0.4", "--batches", "64"])
    case = e2e.cases(args)[0]
    data = e2e.inputs(case, 97, torch.Generator().manual_seed(0))
    mask = data["attention_mask"]
    assert (mask.sort(descending=True).values == mask).all() and mask[:, 0].all()
    assert 0.3 < 1 - mask.float().mean() < 0.5
    assert torch.equal(data["labels"] == -100, mask == 0)
    assert "attention_mask" not in e2e.inputs({**case, "padding": 0.0}, 97, torch.Generator())
    case["batch"] = 2
    full, padded = e2e.run_case({**case, "padding": 0.0}), e2e.run_case(case)
    assert full["losses"] != padded["losses"]
    assert "llama3-8b, 1 layers, 40% padding, float32, " in e2e.table([{**case, **padded}])


def test_compiled(words, monkeypatch):
    """Whole or layer by layer: what is compiled, and that it learns the same."""
    compile_, seen = torch.compile, []

    def eagerly(what, *_, **__):
        seen.append(type(getattr(what, "__self__", what)).__name__)
        return compile_(what, backend="eager")

    monkeypatch.setattr(torch, "compile", eagerly)
    losses = {}
    for what in ("", "model", "layers"):
        torch._dynamo.reset()
        option = ["--compile", *filter(None, [what])] if what else []
        args = e2e.parse([*words, "--models", "llama3-8b", "--providers", "tigon", *option])
        (case,) = e2e.cases(args)
        assert case["compile"] == what
        losses[what] = e2e.run_case(case)["losses"]
    assert seen == ["LlamaForCausalLM", "LlamaDecoderLayer"]
    assert losses["model"] == pytest.approx(losses[""], rel=1e-5) == losses["layers"]
    assert e2e.parse([*words, "--compile"]).compile == "model"


def test_older_files(tmp_path):
    args = e2e.parse(["--models", "llama3-8b", "--batches", "2", "--seq", "16", "--providers", "stock"])
    (case,) = e2e.cases(args)
    del case["padding"]
    case["compile"] = True
    path = tmp_path / "old.jsonl"
    path.write_text(json.dumps({**case, "error": "no"}))
    assert "| llama3-8b, compiled model | 2 x 16 | no |" in e2e.table(e2e.read(path))


def test_floor(words, capsys):
    """Each part is there, the bytes of the rest are those counted by hand, and a step is set beside them."""
    options = [*words, "--models", "llama3-8b"]
    (case,) = e2e.cases(e2e.parse([*options, "--providers", "tigon"]))
    record = floor.floor(case)
    assert set(record["parts_ms"]) == set(floor.PARTS) and min(record["parts_ms"].values()) > 0
    norms, rope, gate = 2 * 8 * 32, 4 * (4 + 2) * 8, 8 * 48
    head, table = 8 * 32 + 2 * 97, 97 * 32
    assert record["rest_bytes"] == 4 * (32 * (norms + rope + gate + head + 3 * 32) + table)
    steps = {floor.e2e.key(record): 2 * record["floor_ms"]}
    assert floor.table([record], steps).endswith("| 50% |") and "| - | - |" in floor.table([record], {})
    assert floor.main(options) == 0 and "| llama3-8b | " in capsys.readouterr().out
