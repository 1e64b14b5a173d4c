"""Routing replay of patched models: own records, foreign ids, engines' forms, checkpointing, refusals."""

import base64
import copy

import pytest
import torch
import torch.nn.functional as F
from tiny import SHARED, VOCABULARY, batch, loaded, same_bits, step, unequal

import tigon
from tigon.integrations.transformers.routing import _routers

L, E, K = 3, 8, 2
COMMON = {**SHARED, "num_hidden_layers": L}
QWEN3 = {"num_experts": E, "num_experts_per_tok": K, "moe_intermediate_size": 24, "head_dim": 8}
QWEN3 |= {"norm_topk_prob": True, "mlp_only_layers": [1]}
DEEPSEEK = {"n_routed_experts": E, "num_experts_per_tok": K, "moe_intermediate_size": 24, "n_group": 2}
DEEPSEEK |= {"topk_group": 1, "num_key_value_heads": 4, "first_k_dense_replace": 1, "kv_lora_rank": 16}
DEEPSEEK |= {"q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
DEEPSEEK |= {"n_shared_experts": 1}
MODELS = {
    "mixtral": ("Mixtral", {"num_local_experts": E}),
    "qwen3_moe": ("Qwen3Moe", QWEN3),
    "olmoe": ("Olmoe", {"num_experts": E, "num_experts_per_tok": K}),
    "gpt_oss": (
        "GptOss",
        {"num_local_experts": E, "num_experts_per_tok": K, "head_dim": 8, "layer_types": None},
    ),
    "deepseek_v3": ("DeepseekV3", DEEPSEEK),
}


def model_of(name="qwen3_moe", **changes):
    import transformers

    prefix, own = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{prefix}Config")(**COMMON | own | changes)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).train()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data.mul_(4.0)  # so that tokens choose differently
    report = tigon.apply(model)
    assert report.count("router"), str(report)
    return model


def recorded(model, inputs):
    with tigon.record_routing(model) as record, torch.no_grad():
        model(**inputs)
    return record


def drawn(rows, tokens, layers=L, seed=3):
    """Experts that no router chose."""
    draw = torch.Generator().manual_seed(seed)
    return torch.rand(rows, tokens, layers, E, generator=draw).argsort(-1)[..., :K].contiguous()


@pytest.mark.parametrize("name", MODELS)
def test_own_record(name):
    """What a model recorded replays with the same bits of the loss and of every gradient."""
    model, inputs = model_of(name), batch()
    want = step(model, inputs)
    record = recorded(model, inputs)
    routed = record.routed(2)
    assert routed.shape == (2, 11, L, K) and routed.dtype == torch.uint8
    for given in (routed, routed.to(torch.int16).numpy(), [*routed.to(torch.int64)]):
        with tigon.replay_routing(model, given):
            same_bits(step(model, inputs), want)
    same_bits(step(model, inputs), want)  # and nothing stays


@pytest.mark.parametrize("name", MODELS)
def test_foreign_ids(name):
    """Every router's weights are those of its live scores at the given ids, and it gets a gradient."""
    model, inputs, routed = model_of(name), batch(), drawn(2, 11)
    routers, seen = _routers("test", model), {}
    for module, layer in routers:
        module.register_forward_hook(lambda module, args, out, layer=layer: seen.update({layer: out}))
    with tigon.replay_routing(model, routed):
        step(model, inputs)
    for module, layer in routers:
        logits, weights, ids = seen[layer]
        assert torch.equal(ids, routed[:, :, layer].flatten(0, 1))
        scores = logits.double().sigmoid() if name == "deepseek_v3" else logits.double().softmax(-1)
        want = scores.gather(1, ids)
        if name != "olmoe":  # which does not normalize
            want = want / want.sum(1, keepdim=True)
        want = want * getattr(module, "routed_scaling_factor", 1.0)
        torch.testing.assert_close(weights.double(), want, rtol=1e-5, atol=1e-6)
        assert module.weight.grad is not None and module.weight.grad.any()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant):
    """A layer that is computed again reads the same rows; after the context has ended that is an error."""
    model, inputs, routed = model_of(), batch(), drawn(2, 11)
    with tigon.replay_routing(model, routed):
        want = step(model, inputs)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with tigon.replay_routing(model, routed):
        got = step(model, inputs)
        same_bits(step(model, inputs), got)
    torch.testing.assert_close(got, want)
    with tigon.replay_routing(model, routed):
        loss = model(**inputs).loss
    with pytest.raises(tigon.Error, match="the context must stay open until the backward"):
        loss.backward()
    model.gradient_checkpointing_disable()
    with tigon.replay_routing(model, routed):
        loss = model(**inputs).loss
    loss.backward()  # nothing is computed again: the saved ids are there
    own = step(model, inputs)
    assert unequal(own, want) and not unequal(step(model, inputs), own)


def test_engines_forms():
    """vLLM's arrays of prompt + generated - 1 rows, SGLang's base64, padding on either side, packed rows."""
    model, inputs = model_of(), batch(rows=2, tokens=11)
    routed = drawn(2, 11)
    routed[:, -1] = -1  # the last token was not routed
    with tigon.replay_routing(model, routed):
        want = step(model, inputs)
    vllm = [row[:-1].to(torch.uint8).numpy() for row in routed]
    sglang = [base64.b64encode(row[:-1].to(torch.int32).numpy().tobytes()).decode() for row in routed]
    packed = torch.cat([*routed])
    for given in (vllm, sglang, packed, packed.numpy(), routed[:, :-1]):
        with tigon.replay_routing(model, given):
            same_bits(step(model, inputs), want)
    moe = routed[:, :, [0, 2]]
    with tigon.replay_routing(model, moe, layers="moe"):
        same_bits(step(model, inputs), want)
    # Sequences of 7 and 9 tokens, padded on the right, on the left.
    losses = []
    for left in (False, True):
        ids, labels = torch.zeros(2, 11, dtype=torch.long), torch.full((2, 11), -100)
        mask, starts = torch.zeros(2, 11, dtype=torch.long), []
        for i, n in enumerate((7, 9)):
            part = slice(11 - n, 11) if left else slice(0, n)
            ids[i, part], mask[i, part] = inputs["input_ids"][i, :n], 1
            labels[i, part] = inputs["input_ids"][i, :n]
            labels[i, part.start] = -100
            starts.append(part.start)
        given = [routed[0, :6].numpy(), routed[1, :8].numpy()]
        positions = (mask.cumsum(1) - 1).clamp(0)
        with tigon.replay_routing(model, given, offset=starts if left else 0):
            more = {"attention_mask": mask, "position_ids": positions}
            losses.append(step(model, {"input_ids": ids, "labels": labels} | more))
    torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-6)


def test_copies_and_undo():
    """A copy made in the context, and one loaded, are outside of it; undone, a model has no context."""
    model, inputs, routed = model_of(), batch(), drawn(2, 11)
    own = step(model, inputs)
    with tigon.replay_routing(model, routed):
        assert unequal(step(model, inputs), own)
        same_bits(step(copy.deepcopy(model), inputs), own)
        same_bits(step(loaded(model), inputs), own)
    tigon.undo(model)
    with pytest.raises(tigon.Error, match=r"model must have routers that tigon.apply"):
        tigon.record_routing(model)


def test_weights_of_a_lost_router():
    """A router that chose is trained by its weights alone: so is one whose experts another engine chose."""
    model, inputs = model_of(), batch()
    with tigon.replay_routing(model, torch.full((2, 11, L, K), -1)):
        same_bits(step(model, inputs), step(model, inputs))


REFUSED = """
routed=None -> routed must be a tensor, an array or a list of sequences, got NoneType
routed=[] -> routed must be a tensor, an array or a list of sequences
routed='AAAA' -> routed must be a tensor, an array or a list of sequences, got str
routed=['AAAA'] -> routed must be base64 of int32 [length, 3, 2], got 3 bytes
routed=[1] -> routed must be tensors, arrays or base64 text, got int
routed=good[0, 0] -> routed must be [batch, length, layers, K] or [tokens, layers, K], got [3, 2]
routed=good.float() -> routed must hold integers, got torch.float32
routed=good[..., :1] -> routed must be [length, 3 (layers), 2 (K)] for each sequence, got [11, 3, 1]
routed=good[:, :, :2] -> routed must be [length, 3 (layers), 2 (K)] for each sequence, got [11, 2, 2]
routed=good, layers='moe' -> routed must be [length, 2 (layers), 2 (K)] for each sequence
routed=good, layers='dense' -> layers must be one of
routed=good, offset=[0] -> offset must be one number or 2, got 1
routed=good, offset=-1 -> offset must be >= 0, got -1
routed=good, offset=1 -> routed and offset must fit sequences of 11 tokens, got 11 from 1
routed=[good[0]] * 3 -> the batch must have 3 sequences as routed, got 22 tokens
routed=good + 7 -> ids must be in [0, 8), or begin with a negative one
"""


@pytest.mark.parametrize("line", REFUSED.strip().splitlines())
def test_refused(line):
    call, message = line.split(" -> ")
    model, inputs, good = model_of(), batch(), drawn(2, 11)
    own = step(model, inputs)
    with pytest.raises(tigon.Error) as caught:  # noqa: SIM117
        with eval(f"tigon.replay_routing(model, {call})", {"tigon": tigon, "model": model, "good": good}):
            step(model, inputs)
    assert message in str(caught.value)
    same_bits(step(model, inputs), own)


def test_refused_models():
    model = model_of()
    with (
        pytest.raises(tigon.Error, match="model must be in no other routing context"),
        tigon.record_routing(model),
        tigon.record_routing(model),
    ):
        pass
    with pytest.raises(tigon.Error, match="a forward must have run in the context, got none"):
        tigon.record_routing(model).routed()
    with pytest.raises(tigon.Error, match="model must be a torch.nn.Module, got int"):
        tigon.replay_routing(1, None)
    double = model_of().double()
    with (
        pytest.raises(tigon.Error, match="router must run tigon.route, got .* of torch.float64"),
        tigon.record_routing(double),
    ):
        double(**batch())
    wrapped = model_of("mixtral")
    tigon.undo(wrapped)
    gate = wrapped.model.layers[1].mlp.gate
    gate.forward = lambda *args, forward=gate.forward: forward(*args)
    tigon.apply(wrapped)
    with pytest.raises(tigon.Error, match="every router must run .* got model.layers.1.mlp.gate left"):
        tigon.replay_routing(wrapped, drawn(2, 11))


@pytest.mark.parametrize("change", ["forward", "class", "other"])
def test_a_router_that_changed_is_refused(change):
    """Its tokens would go where they like, with no word."""
    model = model_of("mixtral")
    mlp = model.model.layers[1].mlp
    if change == "forward":
        mlp.gate.forward = lambda *args, below=mlp.gate.forward: below(*args)
    elif change == "class":
        mlp.gate.__class__ = type("Other", (type(mlp.gate),), {"forward": type(mlp.gate).forward})
        del mlp.gate.forward
    else:
        mlp.gate = copy.deepcopy(mlp.gate)
        del mlp.gate.forward
    for context in (lambda: tigon.replay_routing(model, drawn(2, 11)), lambda: tigon.record_routing(model)):
        with pytest.raises(tigon.Error, match=r"every router must run .* got model.layers.1.mlp.gate left"):
            context()
    tigon.apply(model)
    if change == "other":
        tigon.record_routing(model)


def test_generate_does_not_replay():
    """After the context a model chooses again, step by step."""
    model = model_of().eval()
    ids = torch.randint(3, VOCABULARY, (1, 5))
    want = model.generate(ids, max_new_tokens=4, do_sample=False)
    with tigon.replay_routing(model, drawn(1, 5)), torch.no_grad():
        model(ids)
    assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), want)


def test_live_auxiliary_loss():
    """The balancing loss of transformers is of the live logits, whatever was replayed."""
    model, inputs = model_of("mixtral", output_router_logits=True), batch()
    with tigon.replay_routing(model, drawn(2, 11)):
        out = model(**inputs)
    logits = torch.cat([*out.router_logits])
    weights = logits.softmax(-1)
    fraction = F.one_hot(weights.topk(K, -1).indices, E).float().mean(0)
    torch.testing.assert_close(out.aux_loss, E * (fraction * weights.mean(0)).sum())
