"""Model FLOPs utilisation: a model's operations over what its card and a matmul on it are able to do.

The operations of a step are those of its passes: two for each token and weight of a matmul, and those of
causal attention. One pass is forward, one for the gradients of activations, one for those of weights. What
checkpointing repeats is not counted, nor are linear attention's own operations and an adapter's.
"""

from __future__ import annotations

import math

PEAK_TFLOPS = {"H200": 989.0, "H100": 989.0}  # dense bf16 of the SXM cards, as NVIDIA states it
NOTE = (
    "MFU: [the model's operations](../benchmarks.md#whole-models) over "
    f"{PEAK_TFLOPS['H200']:.0f} TFLOP/s, which NVIDIA states of dense bf16."
)
SLIDING = {"gemma3-4b": 6, "gpt-oss-20b": 2}  # layers of which one sees everything
LINEAR = {"qwen3.5-9b": 4}  # layers of which one has attention, the others linear attention


def matmul_tflops() -> float:
    """What a bf16 matmul of 8192 x 8192 x 8192 reaches on this card."""
    import timing
    import torch

    a, b = torch.randn(2, 8192, 8192, device="cuda", dtype=torch.bfloat16)
    return 2 * 8192**3 / timing.cuda_ms(lambda _: a @ b) / 1e9


def llama_weights(config: dict, layers: int) -> int:
    """Weights of a Llama's matmuls, the head among them."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    columns = config.get("head_dim") or hidden // heads
    attention = 2 * (heads + config["num_key_value_heads"]) * columns
    return hidden * (config["vocab_size"] + layers * (attention + 3 * config["intermediate_size"]))


def token_flops(
    record: dict, config: dict, passes: tuple[int, int] = (3, 3), head: float = 1.0, others: int = 0
) -> float:
    """Operations of a step for each token.

    `passes`: over the matmuls, over attention. `head`: the share of rows that the head sees. `others`:
    operations beside those of the model.
    """
    model, seq = record["model"], record["seq"]
    layers = min(record["layers"] or math.inf, config["num_hidden_layers"])
    weights, table = record.get("parameters"), config["vocab_size"] * config["hidden_size"]
    if weights is None:
        weights = llama_weights(config, layers)
    elif record.get("contrastive") or not config.get("tie_word_embeddings", model.startswith("gemma")):
        weights -= table  # rows that are looked up
    weights -= (1 - head) * table
    if "num_experts_per_tok" in config:
        experts = config.get("num_experts") or config["num_local_experts"]
        inner = config.get("moe_intermediate_size", config["intermediate_size"])
        idle = experts - config["num_experts_per_tok"]
        weights -= layers * idle * 3 * inner * config["hidden_size"]
    if record.get("packed"):
        seq = min(seq, 2 * record["packed"])  # lengths are geometric: a token sees the mean of them
    window = min(config.get("sliding_window") or seq, seq)
    local = layers - layers // SLIDING[model] if model in SLIDING else 0
    seen = (layers // LINEAR.get(model, 1) - local) * seq / 2 + local * window * (1 - window / seq / 2)
    heads = config["num_attention_heads"]
    columns = heads * config.get("head_dim", config["hidden_size"] // heads)
    return 2 * passes[0] * weights + 4 * passes[1] * columns * seen + others


def share(record: dict, config: dict, **work) -> float | None:
    """The part of the stated peak that a record reached; None for a device without one."""
    peak = next((peak for card, peak in PEAK_TFLOPS.items() if card in record.get("gpu", "")), None)
    if peak is None:
        return None
    return token_flops(record, config, **work) * record["tokens_per_s"] / record.get("gpus", 1) / 1e12 / peak


def text(record: dict | None, config: dict, **work) -> str:
    """The same as a cell."""
    found = None if record is None or "error" in record else share(record, config, **work)
    return "-" if found is None else f"{found:.0%}"
