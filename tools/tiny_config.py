"""Shrink any transformers configuration to a model of a few thousand weights.

Rules by attribute name: configurations share their vocabulary of names, and a rule that fits most
models beats a list of models. What the rules do not fit fails to build, and the caller says so.
"""

from __future__ import annotations

import re

VOCABULARY = 160
WIDTH, HEADS, HEAD_DIM, FFN, EXPERTS, LAYERS = 64, 4, 16, 96, 4, 2
PARTS = 32  # low ranks, states and the like

LAYER_COUNTS = re.compile(
    r"^(num_hidden_layers|n_layers?|num_layers|(num_)?(en|de)coder_layers|layers|depth|num_blocks"
    r"|conf_num_hidden_layers|num_layers_per_stack|resampler_depth|num_global_layers)$"
)
RULES = (
    (r".*vocab_size|vocab_size_per_layer_input|num_embeddings", VOCABULARY),
    (r"codebook_size", 128),  # some insist on a power of two
    (r"(num|n)_(kv|key_value)_heads|.*num_key_value_heads|attn_config_kv_n_heads", "kv"),
    (r"linear_num_key_heads", 2),
    (
        r"(.*_)?(num_)?attention_heads|(.*_)?(num|n)_heads?|mamba_n(um)?_heads|mamba_num_heads"
        r"|linear_num_value_heads|linear_num_heads|index_n_heads",
        HEADS,
    ),
    (r"attn_layer_period", 2),
    (r"attn_layer_offset", 1),
    (
        r"(.*_)?head_dim|d_kv|kv_channels|attention_head_dim|dim_head|query_pre_attn_scalar"
        r"|rotary_dim|.*_head_dim",
        HEAD_DIM,
    ),
    (r"qk_head_dim", 2 * HEAD_DIM),
    (
        r"intermediate_size.*|.*_intermediate_size|.*ffn_dim|n_inner|d_ff|dim_ff|dff|mlp_dim"
        r"|.*ffn_hidden_size|moe_hidden_size",
        FFN,
    ),
    (
        r"hidden_size_per_layer_input|.*_rank|.*d_state|.*state_size|d_rel|rel_extent|.*window"
        r"|sliding_window_size|.*chunk_size|block_size|index_topk|window_size",
        PARTS,
    ),
    (
        r"hidden_size.*|.*hidden_size|d_model|n_embd|embed_dim|emb_dim|.*embedding_size|.*_proj_dim"
        r"|projector_(in|out)put_dim|.*output_dim|hidden_dim|.*embed_dim|input_size"
        r"|projection_dim|ple_embed_dim",
        WIDTH,
    ),
    (r"(num|n)_experts|num_local_experts|n_routed_experts|moe_num_experts|.*expert_num", EXPERTS),
    (r"num_experts_per_tok(en)?|moe_k|moe_topk|top_k_experts|moe_top_k", 2),
    (r"n_group|topk_group|num_expert_group|max_window_layers", 1),
    (r"mamba_expand|expand", 2),
    (r"ngram_vocab_size_base|encoder_hash_byte_group_vocab", 1000),
    (r"split_ngram_parts|make_ngram_vocab_size_divisible_by", 4),
    (r"n_groups|mamba_n_groups", 1),
)
RULES = tuple((re.compile(f"^({pattern})$"), value) for pattern, value in RULES)
# Mamba: expand * width = heads * the size of a head.
EXACT = {"mamba_d_head": 2 * HEAD_DIM, "mamba_head_dim": 2 * HEAD_DIM, "mamba_d_ssm": 2 * WIDTH}
UNSET = {  # what may be left open and has no default in the models
    "head_dim": HEAD_DIM,
    "num_key_value_heads": HEADS,
    "num_experts_per_tok": 2,
    "sliding_window": PARTS,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "layer_types": ["full_attention"] * LAYERS,
    "mlp_layer_types": ["dense", "sparse"],
    "num_experts": EXPERTS,
    "top_k_experts": 2,
    "indexer_n_heads": HEADS,
    "indexer_kv_heads": 1,
    "indexer_head_dim": HEAD_DIM,
    "indexer_budget": PARTS,
    "indexer_compress_ratio": 4,
    "vocabulary_map": {"<image>": 5},
    "moe_topk": 2,
}
IGNORED = ("transformers_version", "id2label", "label2id", "dtype", "torch_dtype")
FIRST_DENSE = ("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers")


def tiny_config(config):
    """A configuration of the same class with the smallest sizes that keep its structure."""
    ids = iter(range(VOCABULARY - 60, VOCABULARY))
    return type(config)(**_shrink(config.to_dict(), ids))


def _shrink(options: dict, ids) -> dict:
    counts = [value for key, value in options.items() if LAYER_COUNTS.match(key) and isinstance(value, int)]
    kinds = [value for key, value in options.items() if _is_layer_list(value, counts)]
    layers = _layers(kinds)
    heads = next((options[k] for k in ("num_attention_heads", "n_head", "num_heads") if k in options), None)
    small = {}
    for key, value in options.items():
        key = str(key)
        if key in IGNORED:
            continue
        if key == "per_layer_config" and value:
            places = {str(place): place for place in value}
            small[key] = {
                i: _shrink(value[places[str(old)]], ids) for i, old in enumerate(layers) if str(old) in places
            }
        elif key == "rope_parameters" or key == "rope_scaling":
            small[key] = _rope(value or _plain_rope(options))
        elif isinstance(value, dict):
            small[key] = _shrink(value, ids)
        elif value is None:
            small[key] = UNSET.get(key)
        elif any(value is kind for kind in kinds):
            small[key] = [value[i] for i in layers]
        elif isinstance(value, int) and not isinstance(value, bool):
            small[key] = _number(key, value, len(layers), heads, ids)
        elif isinstance(value, list) and key.endswith("mrope_section"):
            small[key] = [HEAD_DIM // 4, HEAD_DIM // 8, HEAD_DIM // 8]
        elif isinstance(value, list) and key.endswith("token_id"):
            small[key] = 2
        else:
            small[key] = value
    if {"expand", "num_heads", "head_dim"} <= small.keys():  # Mamba 2: expand * width = heads * head_dim
        small["head_dim"] = 2 * HEAD_DIM
    if "n_recurrent_layers" in small:  # Dory writes two entries for each layer, of attention and of MLP
        small["layer_types"] = ["sliding_attention", "mlp", "full_attention", "mlp"]
        small |= {"num_hidden_layers": 4, "n_input_layers": 2, "n_recurrent_layers": 2, "n_output_layers": 0}
    return small


def _is_layer_list(value, counts) -> bool:
    return isinstance(value, list | tuple) and len(value) > LAYERS and len(value) in counts


def _layers(kinds: list) -> list[int]:
    """Places of the layers to keep: one of every combination of kinds, two at least."""
    if not kinds:
        return list(range(LAYERS))
    length = min(map(len, kinds))
    combinations = {}
    for place in range(length):
        combinations.setdefault(str([kind[place] for kind in kinds]), place)
    places = sorted(combinations.values())[:6]
    return places if len(places) >= LAYERS else [*places, *range(places[-1] + 1, places[-1] + LAYERS)]


def _plain_rope(options: dict) -> dict | None:
    """Rotary parameters for every kind of layer, where a configuration leaves them empty."""
    kinds = options.get("layer_types") or ()
    return {kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in kinds} or None


def _rope(options: dict | None) -> dict | None:
    if options is None:
        return None
    if any(isinstance(value, dict) for value in options.values()):  # one for each kind of layer
        return {key: _rope(value) for key, value in options.items()}
    half = int(HEAD_DIM * options.get("partial_rotary_factor", 1.0)) // 2
    small = {**options, "mrope_section": [half // 2, half // 4, half // 4]}
    return small if half % 4 == 0 else options


def _number(key: str, value: int, layers: int, heads, ids) -> int:
    if LAYER_COUNTS.match(key):
        return layers
    if key in FIRST_DENSE:
        return min(value, 1)
    if key.startswith(("pad_token", "bos_token", "eos_token", "decoder_start_token")):
        return {"p": 0, "b": 1, "e": 2, "d": 1}[key[0]]
    if key.endswith(("token_id", "token_index", "_patch_id")):
        return next(ids) if value > 0 else value
    if value <= 0:
        return value
    if key in EXACT:
        return EXACT[key]
    for pattern, wanted in RULES:
        if pattern.match(key):
            if wanted == "kv":
                return HEADS if value == heads else 1 if value == 1 else HEADS // 2
            return min(value, wanted)
    return value
