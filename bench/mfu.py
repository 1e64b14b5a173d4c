"""Model FLOPs utilisation: a model's operations over what its card and a product on it are able to do.

The operations of a step are six for each token and weight of a product, and those of causal attention. What
checkpointing repeats is not counted, nor are linear attention's own operations.
"""

from __future__ import annotations

import math

PEAK_TFLOPS = {"H200": 989.0, "H100": 989.0}  # dense bf16 of the SXM cards, as NVIDIA states it
SLIDING = {"gemma3-4b": 6, "gpt-oss-20b": 2}  # layers of which one sees everything
LINEAR = {"qwen3.5-9b": 4}  # layers of which one has attention, the others linear attention


def product_tflops() -> float:
    """What a bf16 product of 8192 x 8192 x 8192 reaches on this card."""
    import timing
    import torch

    a, b = torch.randn(2, 8192, 8192, device="cuda", dtype=torch.bfloat16)
    return 2 * 8192**3 / timing.cuda_ms(lambda _: a @ b) / 1e9


def llama_parameters(config: dict, layers: int) -> int:
    """Weights of a Llama's products and embeddings."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    attention = 2 * (heads + config["num_key_value_heads"]) * (hidden // heads)
    return hidden * (2 * config["vocab_size"] + layers * (attention + 3 * config["intermediate_size"]))


def token_flops(record: dict, config: dict) -> float:
    """Operations of a step for each token, of a record of bench/e2e.py or bench/parallel_e2e.py."""
    model, seq = record["model"], record["seq"]
    layers = min(record["layers"] or math.inf, config["num_hidden_layers"])
    weights = record.get("parameters") or llama_parameters(config, layers)
    if record.get("contrastive") or not config.get("tie_word_embeddings", model.startswith("gemma")):
        weights -= config["vocab_size"] * config["hidden_size"]  # rows that are looked up
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
    return 6 * weights + 12 * columns * seen


def text(record: dict, config: dict) -> str:
    """Percent of the stated peak, in brackets of the product measured in the same process; empty on a CPU."""
    peak = next((peak for card, peak in PEAK_TFLOPS.items() if card in record.get("gpu", "")), None)
    if peak is None:
        return ""
    reached = token_flops(record, config) * record["tokens_per_s"] / record.get("gpus", 1) / 1e12
    product = record.get("product_tflops")
    return f", MFU {reached / peak:.0%}" + (f" ({reached / product:.0%})" if product else "")
