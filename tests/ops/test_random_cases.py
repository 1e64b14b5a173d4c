"""Sizes, layouts, dtypes and options that nobody chose, by the rule in checks.py.

The cases of tests/cases are the edges somebody thought of; here each op's `make` gets drawn parameters, empty
inputs and single columns among them. A failing draw is its seed: run the test of that name again.
"""

import math
import random

import pytest
import torch
from checks import check_case

from cases import linear_log_prob, linear_loss, modules
from cases.case import Case

DRAWS = {"cross_entropy": 48, "linear_cross_entropy": 36, "linear_log_prob": 36}  # of other ops 12
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
LAYOUTS = ("contiguous", "offset1", "columns", "rows", "transposed", "expanded")


def _layout(draw, shape):
    return draw.choice(LAYOUTS if len(shape) > 1 else LAYOUTS[:4])


def _shape(draw, dims=(1, 2, 3, 4)):
    """Leading sizes that may be 0, columns on either side of a vector's width."""
    lead = [draw.choice((0, 1, 1, 2, 3, 5, 7)) for _ in range(draw.choice(dims) - 1)]
    return (*lead, draw.choice((1, 2, 3, 7, 8, 15, 16, 17, 33, 64, 127, 130, 257, 1031)))


def _rows(draw, *layouts, **more):
    shape = _shape(draw)
    return {"shape": shape, **{name: _layout(draw, shape) for name in (*layouts, "grad_layout")}, **more}


def _norm(draw, *layouts, **more):
    found = _rows(draw, "layout", *layouts, weight=draw.random() < 0.8, **more)
    # Of few columns and a small eps, dx is a difference of nearly equal numbers.
    return found | {"eps": 0.5 if found["shape"][-1] < 8 else draw.choice((1e-6, 1e-5, 0.1))}


def _rms_norm(draw):
    rounding = draw.choice(("llama", "gemma", "none"))
    return _norm(draw, rounding=rounding, offset=draw.choice((0.0, 1.0)))


def _gated(draw):
    found = _norm(draw, "gate_layout", activation=draw.choice(("silu", "sigmoid")))
    found |= {"norm_before_gate": draw.random() < 0.5, "rounding": draw.choice(("llama", "gemma"))}
    columns = found["shape"][-1]
    sizes = [n for n in range(8, columns + 1) if columns % n == 0]
    return found | {"group_size": draw.choice((None, *sizes))}


def _modulated(draw):
    found = _rms_norm(draw) | {"shift": draw.random() < 0.7, "wide": draw.random() < 0.3}
    lead = found["shape"][:-1]
    found["modulation"] = lead[: draw.randint(0, len(lead))]
    found["modulation_layout"] = draw.choice(LAYOUTS[:4])
    return found


def _attention_residual(draw):
    shape = (draw.choice((1, 2, 3, 9, 40)), *_shape(draw, (1, 2, 3)))
    found = {"shape": shape, "wide": draw.random() < 0.3, "eps": 0.5 if shape[-1] < 8 else 1e-6}
    return found | {"layout": _layout(draw, shape), "grad_layout": _layout(draw, shape[1:])}


def _group_norm(draw):
    groups, wide = draw.choice((1, 2, 3, 4)), draw.choice((1, 2, 5))
    shape = (draw.choice((0, 1, 2, 5)), groups * wide, *_shape(draw, (1, 2, 3)))
    if math.prod(shape) == groups:  # F.group_norm refuses one value a group
        shape = (2, *shape[1:])
    weight = draw.random() < 0.8  # a bias alone gets no gradient from F.group_norm
    found = {"shape": shape, "groups": groups, "weight": weight, "bias": weight and draw.random() < 0.7}
    return found | {"eps": 0.1} | {"layout": _layout(draw, shape), "grad_layout": _layout(draw, shape)}


def _sample(draw):
    shape = (draw.choice((0, 1, 2, 9)), draw.choice((1, 2, 7, 64, 131, 1000)))
    options = {"temperature": draw.choice((0.0, 0.5, 1.0, 3.0))}
    options |= {"top_k": draw.choice((None, 1, 3, 70)), "top_p": draw.choice((None, 0.1, 0.8))}
    options |= {"min_p": draw.choice((None, 0.02, 0.3))}
    found = {"shape": shape, "options": options, "seed": draw.randrange(2**62)}
    return found | {"by_row": draw.random() < 0.3, "layout": _layout(draw, shape), "fill": None}


def _dyt(draw):
    # Where tanh saturates, 1 - tanh^2 shows its last bit.
    alpha, scale = draw.choice((0.1, 0.5, 2.0)), draw.choice((0.1, 1.0, 2.0))
    return _rows(
        draw, "layout", alpha=alpha, scale=scale, weight=draw.random() < 0.7, bias=draw.random() < 0.7
    )


def _poly_norm(draw):
    found = _rows(draw, "layout", scale=draw.choice((0.5, 2.0)), mean=draw.choice((0.0, 1.0)))
    # Of few columns and a small eps, dx is a difference of nearly equal numbers.
    return found | {"eps": 0.5 if found["shape"][-1] < 8 else draw.choice((1e-6, 0.1))}


def _glu(draw):
    kind = draw.choice(("swiglu", "geglu", "reglu", "swiglu_oai"))
    found = _rows(draw, "layout", "up_layout", kind=kind, scale=draw.choice((0.5, 2.0, 20.0)))
    return found | {"packed": kind == "swiglu_oai" or draw.random() < 0.4}


def _one_tensor(draw):
    return _rows(draw, "layout", scale=draw.choice((0.5, 2.0)))


def _heads(draw):
    dim = draw.choice((2, 6, 16, 26, 40, 64, 96))
    rotated = draw.choice((None, 2 * draw.randint(1, dim // 2)))
    layout = draw.choice(("heads", "contiguous", "rows", "columns", "offset1"))
    found = {"B": draw.choice((1, 2, 3)), "T": draw.choice((0, 1, 3, 8, 17)), "D": dim, "R": rotated}
    found |= {
        "Hq": draw.choice((1, 3, 4)),
        "Hk": draw.choice((1, 2)),
        "layout": layout,
        "grad_layout": layout,
    }
    found |= {"tables": "random", "batched": draw.random() < 0.5, "unsqueeze_dim": draw.choice((1, 2))}
    found |= {"options": {"interleaved": draw.random() < 0.4, "tail": draw.random() < 0.3}}
    if draw.random() < 0.3:
        found["positions"] = draw.choice((torch.int64, torch.int32))
    return found


def _qk_norm_rope(draw):
    rounding = draw.choice(("llama", "gemma", "none"))
    return _heads(draw) | {"eps": 0.1, "rounding": rounding, "offset": draw.choice((0.0, 1.0))}


def _embedding(draw):
    table = (draw.choice((1, 2, 37, 300)), draw.choice((1, 3, 8, 64, 130)))
    tokens = tuple(draw.choice((0, 1, 5, 40)) for _ in range(draw.choice((1, 2))))
    found = {"tokens": tokens, "table": table, "draw": draw.choice(("uniform", "same"))}
    return found | {"wide": draw.random() < 0.5, "layout": draw.choice(LAYOUTS[:4])}


def _loss(draw):
    found = {"masked": draw.choice((0.0, 0.0, 0.3)), "label_smoothing": draw.choice((0.0, 0.1, 1.0))}
    found |= {"softcap": draw.choice((None, 5.0, 30.0)), "z_loss": draw.choice((0.0, 1e-3))}
    found |= {"denominator": draw.choice((None, 7.5, "tensor", "int_tensor"))}
    found |= {"scale": draw.choice((1.0, 2.0))}
    return found | {"reduction": draw.choice(("mean", "sum", "none")), "class_weight": draw.random() < 0.3}


def _cross_entropy(draw):
    rows, vocab = draw.choice((0, 1, 2, 9, 33)), draw.choice((2, 3, 16, 50, 257, 1031))
    return _loss(draw) | {"N": rows, "V": vocab, "layout": draw.choice(LAYOUTS[:5])}


def _head(draw):
    lead = tuple(draw.choice((1, 2, 5, 13)) for _ in range(draw.choice((1, 2))))
    found = {"lead": lead, "H": draw.choice((8, 17, 32, 65)), "V": draw.choice((3, 16, 67, 130))}
    found |= {"bias": draw.random() < 0.3, "chunk_rows": draw.choice((None, 1, 7))}
    found |= {"temperature": draw.choice((1.0, 0.6, 1.7)), "logit_scale": draw.choice((1.0, 0.3, 2.0))}
    found |= {"lora": draw.choice((0, 0, 3)), "known": draw.random() < 0.3}
    found |= _loss(draw) | {"layout": draw.choice(("contiguous", "offset1", "rows", "columns"))}
    kept = found["reduction"] == "none" and found["denominator"] is None
    return found | {"keep_mb": draw.choice((0.0, 2e-3, 1.0)) if kept else 0.0}


def _log_prob(draw):
    found = {name: value for name, value in _head(draw).items() if name in linear_log_prob.DEFAULTS}
    found |= {"entropy": draw.random() < 0.4, "keep_mb": draw.choice((None, 0, 2e-3, 1.0))}
    return found | {"logit_dtype": draw.choice((None, torch.float32))}


def _row_loss(draw):
    found = {name: value for name, value in _head(draw).items() if name in linear_loss.DEFAULTS}
    # Of a row or two, the last bit of one exponential decides how exact plain PyTorch happens to be.
    found |= {"entropy": draw.random() < 0.4, "lead": (draw.choice((5, 13)), draw.choice((1, 3)))}
    return found | {"grads": draw.choice(((0, 1), (0, 1, 3)))}


def _divergence(draw):
    op = draw.choice(("kl_div", "jsd", "tvd"))
    options = {"reduction": draw.choice(("batchmean", "sum", "mean", "none"))}
    options |= {"temperature": draw.choice((1.0, 2.0))}
    if op == "jsd":
        options["beta"] = draw.choice((0.1, 0.5, 0.9))
    # Nearly equal rows cancel: of two classes they often are.
    shape = (*(draw.choice((1, 2, 5)) for _ in range(draw.choice((1, 2)))), draw.choice((16, 33, 130, 1031)))
    found = {"op": op, "options": options, "shape": shape, "labels": draw.choice((None, 0.3))}
    return found | {"layout": draw.choice(LAYOUTS[:5]), "teacher_layout": draw.choice(LAYOUTS[:5])}


def _preference(draw):
    kind = draw.choice(
        ("sigmoid", "cdpo", "simpo", "hinge", "ipo", "robust", "nca_pair", "apo_zero", "orpo", "kto")
    )
    answers = 2 * draw.choice((1, 2, 5)) + (kind == "kto")
    found = {
        "kind": kind,
        "shape": (answers, draw.choice((1, 2, 17, 130))),
        "masked": draw.choice((None, 0.3)),
    }
    options = {"beta": draw.choice((0.05, 0.5))}
    if kind in ("cdpo", "simpo", "robust"):
        options["label_smoothing"] = draw.choice((0.0, 0.2))
    if kind != "kto":
        options["nll"] = draw.choice((0.0, 0.5))
    return found | {"options": options, "layout": draw.choice(LAYOUTS[:4])}


def _policy(draw):
    shape = (draw.choice((0, 1, 2, 6)), draw.choice((1, 2, 17, 130)))
    found = {
        "shape": shape,
        "masked": draw.choice((None, 0.3)),
        "ref": 0.3,
        "layout": draw.choice(LAYOUTS[:4]),
    }
    found |= {"importance": draw.choice((None, "token", "answer")), "entropies": draw.random() < 0.5}
    options = {"kind": draw.choice(("clip", "cispo", "sapo", "vespo")), "kl_corrected": draw.random() < 0.3}
    options |= {"normalise": draw.choice(("token", "sequence", "length")), "kl": draw.choice((0.0, 0.1))}
    options |= {"entropy": 0.1 * found["entropies"], "kl_estimator": draw.choice(("k1", "k2", "k3"))}
    return found | {"options": options}


def _token_head(draw):
    found = {"T": draw.choice((1, 3, 16)), "H": draw.choice((8, 17, 65)), "V": draw.choice((16, 67, 130))}
    found |= {"bias": draw.random() < 0.3, "lora": draw.choice((0, 0, 3)), "masked": draw.choice((0.0, 0.3))}
    found |= {"chunk_rows": draw.choice((None, 1, 7, 40)), "shift": draw.random() < 0.3}
    return found | {"softcap": draw.choice((None, 5.0)), "grads": draw.choice(((0, 1), (0,), (1,)))}


def _several_heads(draw):
    heads = draw.choice("wr") + "".join(draw.choice("wrt") for _ in range(draw.randrange(3)))
    k, tokens = len(heads), draw.choice((1, 5, 23))
    found = {"lead": (draw.choice((1, 3)), tokens), "H": draw.choice((8, 17)), "V": draw.choice((16, 67))}
    found |= {"heads": heads, "shifts": tuple(draw.randrange(6) for _ in range(k))}
    found |= {"coefficients": tuple(draw.choice((1.0, 0.8, -0.5, 3.0)) for _ in range(k))}
    found |= {"packed": draw.choice(((), (tokens,), (1,) * tokens)), "masked": draw.choice((0.0, 0.3))}
    found |= {"reduction": "sum", "chunk_rows": draw.choice((None, 1, 7)), "lora": draw.random() < 0.3}
    found |= {"softcap": draw.choice((None, 5.0)), "token_weight": draw.random() < 0.3}
    return found | {"trunk": draw.random() < 0.7, "upstream": draw.choice((1.0, 0.7))}


def _linear_preference(draw):
    found = _token_head(draw) | {
        "kind": draw.choice(("sigmoid", "hinge", "simpo", "bco_pair", "orpo", "kto"))
    }
    lone = found["kind"] == "kto"
    refs = (None,) if found["kind"] in ("simpo", "orpo") else (None, "sums", "head")
    found |= {"answers": 2 * draw.choice((1, 4, 9)) + lone, "ref": draw.choice(refs)}
    return found | {"nll_target": not lone and draw.random() < 0.3}


def _linear_policy(draw):
    options = {
        "kind": draw.choice(("clip", "cispo", "sapo")),
        "normalise": draw.choice(("token", "sequence")),
    }
    options |= {"kl": draw.choice((0.0, 0.1)), "entropy": draw.choice((0.0, 0.1))}
    found = _token_head(draw) | {"answers": draw.choice((1, 5, 12)), "ref": 0.3, "options": options}
    return found | {"importance": draw.choice((None, "token", "answer")), "per_token": draw.random() < 0.5}


def _two_heads(draw):
    op = draw.choice(("linear_kl_div", "linear_jsd", "linear_tvd"))
    options = {
        "reduction": draw.choice(("batchmean", "sum", "mean", "none")),
        "hard": draw.choice((0.0, 0.5)),
    }
    options |= {"temperature": draw.choice((1.0, 2.0)), "softcap": draw.choice((None, 5.0))}
    options |= {"chunk_rows": draw.choice((None, 1, 7))}
    if op == "linear_jsd":
        options["beta"] = draw.choice((0.1, 0.5, 0.9))
    lead = tuple(draw.choice((1, 2, 5, 13)) for _ in range(draw.choice((1, 2))))
    vocab = draw.choice((16, 67, 130))
    found = {"op": op, "options": options, "lead": lead, "V": vocab, "Vt": vocab + draw.choice((-3, 0, 0, 5))}
    found |= {"H": draw.choice((8, 17, 32, 65)), "Ht": draw.choice((8, 33)), "bias": draw.random() < 0.3}
    found |= {"masked": draw.choice((0.0, 0.3)), "teacher": draw.choice(("head", "logits"))}
    return found | {"layout": draw.choice(("contiguous", "offset1", "rows", "columns"))}


def _drafter(draw):
    options = {"loss": draw.choice(("ce", "kl", "hard", "tv", "lk")), "chunk_rows": draw.choice((None, 1, 7))}
    options |= {
        "outside": draw.choice(("renormalize", "mixed", "count")),
        "mask_outside": draw.random() < 0.5,
    }
    options |= {"reduction": draw.choice(("mean", "sum", "none"))}
    steps, vocab = draw.choice((0, 1, 3)), draw.choice((16, 67, 130))
    if draw.random() < 0.5:
        options["shifts"] = tuple(draw.choice((0, 1, 4)) for _ in range(max(steps, 1)))
    found = {"lead": (draw.choice((1, 2, 5)), draw.choice((1, 2, 5, 13))), "steps": steps, "options": options}
    found |= {"H": draw.choice((8, 17, 32, 65)), "Ht": draw.choice((33, 40)), "V": vocab}  # fewer: ties
    found |= {"map": draw.choice((None, "random", "holes")), "masked": draw.choice((None, 0.3))}
    return found | {"Vt": vocab if found["map"] is None else vocab * 3, "token_weight": draw.random() < 0.3}


def _contrastive(draw):
    n, size = draw.choice((1, 2, 37, 130)), draw.choice((1, 8, 17, 64))
    found = {"queries": n, "documents": n + draw.choice((0, 1, 40)) + 2, "H": size}
    found |= {"positives": draw.choice((None, 1, 3)), "masked": draw.choice((0.0, 0.3))}
    found |= {name: draw.random() < 0.5 for name in ("symmetric", "normalize", "learned", "weight")}
    found |= {"temperature": draw.choice((0.1, 1.0)) if found["normalize"] else 9.0}
    found |= {"ids": draw.choice((0, 5)), "sizes": draw.choice((None, (size, (size + 1) // 2)))}
    found |= {"reduction": draw.choice(("mean", "sum", "none")), "chunk_rows": draw.choice((None, 1, 7))}
    return found | {"layout": draw.choice(("contiguous", "offset1", "rows", "columns"))}


def _lora_linear(draw):
    found = {"lead": tuple(draw.choice((0, 1, 2, 5, 13)) for _ in range(draw.choice((1, 2))))}
    found |= {"K": draw.choice((1, 3, 8, 17, 64, 130)), "r": draw.choice((1, 3, 8, 17, 64))}
    found["N"] = tuple(draw.choice((1, 5, 8, 33, 64)) for _ in range(draw.choice((1, 2, 3))))
    found |= {"wide": draw.random() < 0.6, "bias": draw.random() < 0.4, "scale": draw.choice((0.3, 2.0))}
    found |= {"dropout": draw.choice((0.0, 0.0, 0.2)), "layout": draw.choice(LAYOUTS[:4])}
    return found | {"weight_layout": draw.choice(LAYOUTS[:5]), "grad_layout": draw.choice(LAYOUTS[:4])}


def _fp8_linear(draw):
    found = {"lead": tuple(draw.choice((0, 1, 2, 5, 17)) for _ in range(draw.choice((1, 2))))}
    found |= {"K": draw.choice((16, 48, 128)), "N": draw.choice((16, 80, 144))}
    found |= {"dw": draw.choice(("fp8", "fp8", "bf16")), "bias": draw.random() < 0.4}
    found |= {"wide": draw.random() < 0.3, "spread": draw.choice((0, 4)), "layout": draw.choice(LAYOUTS[:4])}
    return found | {"weight_layout": draw.choice(LAYOUTS[:5]), "grad_layout": draw.choice(LAYOUTS[:4])}


def _experts(draw):
    number = draw.choice((1, 2, 5, 17))
    found = {
        "tokens": draw.choice((0, 1, 7, 40)),
        "experts": number,
        "choices": draw.randint(1, min(number, 6)),
    }
    found |= {"hidden": draw.choice((8, 17, 64)), "inner": draw.choice((8, 13, 72))}
    found |= {"routing": draw.choice(("balanced", "zipf", "rest", "one", "twice"))}
    found |= {n: draw.random() < 0.5 for n in ("transposed", "interleaved", "bias")}
    clamped = ("swiglu_oai", "swiglu_clamped")
    plain = ("silu", "gelu", "gelu_tanh", "relu", "relu_squared")
    found |= {"activation": draw.choice((*plain, *clamped))}
    if found["activation"] not in clamped and draw.random() < 0.3:
        found |= {"gated": False, "interleaved": False}
    found["weights"] = draw.choice(("float32", "storage", None))
    return found | {"layout": draw.choice(LAYOUTS[:4]), "grad_layout": draw.choice(LAYOUTS[:4])}


def _hyper_connection(draw):
    lead = tuple(draw.choice((0, 1, 3, 17)) for _ in range(draw.choice((1, 2))))
    # A stream of a few columns may cancel: then little is left of its coefficients' gradients.
    found = {"shape": (*lead, draw.choice((1, 2, 3, 4, 4, 5, 8)), draw.choice((8, 17, 64, 130)))}
    found["layout"] = draw.choice(LAYOUTS[:3])
    if draw.random() < 0.5:
        found |= {"op": "post", "transposed": draw.random() < 0.5, "f": draw.random() < 0.8}
        outs = draw.choice((None, 1, 4, 7))
        return found | {"outs": outs, "res": outs is not None or draw.random() < 0.7}
    found |= {"parts": draw.choice((1, 2, 3, 3)), "iterations": draw.choice((1, 2, 20))}
    return found | {"parameters": draw.choice(("float32", None)), "collapse": draw.random() < 0.8}


def _route(draw):
    groups = draw.choice((1, 1, 2, 3, 8))
    experts = groups * draw.choice((2, 3, 8, 17, 60))
    top_groups = draw.randint(1, groups)
    found = {"groups": (groups, top_groups), "group_score": draw.choice(("max", "sum_of_two"))}
    found |= {"shape": (*(draw.choice((0, 1, 3, 17)) for _ in range(draw.choice((1, 2)))), experts)}
    found["top_k"] = draw.randint(1, min(12, experts // groups * top_groups))
    found |= {"score": draw.choice(("softmax", "sigmoid")), "scale": draw.choice((1.0, 2.5))}
    found |= {name: draw.random() < 0.5 for name in ("normalize", "bias", "wide", "wide_ids", "losses")}
    found["token_weights"] = draw.choice((None, "mask", "numbers", "none"))
    return found | {"layout": draw.choice(LAYOUTS[:4]), "grad_layout": draw.choice(LAYOUTS[:4])}


# Other ops have the parameters that _one_tensor draws.
DRAWERS = {
    "rms_norm": _rms_norm,
    "add_rms_norm": lambda draw: _rms_norm(draw) | {"residual_layout": "offset1"},
    "gated_rms_norm": _gated,
    "attention_residual": _attention_residual,
    "modulated_rms_norm": _modulated,
    "layer_norm": lambda draw: _norm(draw, bias=draw.random() < 0.7),
    "group_norm": _group_norm,
    "dyt": _dyt,
    "poly_norm": _poly_norm,
    "glu": _glu,
    "rope": _heads,
    "qk_norm_rope": _qk_norm_rope,
    "embedding": _embedding,
    "experts": _experts,
    "fp8_linear": _fp8_linear,
    "lora_linear": _lora_linear,
    "hyper_connection": _hyper_connection,
    "route": _route,
    "cross_entropy": _cross_entropy,
    "linear_cross_entropy": _head,
    "linear_log_prob": _log_prob,
    "linear_loss": _row_loss,
    "divergence": _divergence,
    "preference": _preference,
    "policy": _policy,
    "linear_preference": _linear_preference,
    "linear_policy": _linear_policy,
    "linear_divergence": _two_heads,
    "multi_token_loss": _several_heads,
    "sample": _sample,
    "drafter_loss": _drafter,
    "contrastive": _contrastive,
}


@pytest.mark.parametrize("op, seed", [(op, seed) for op in modules() for seed in range(DRAWS.get(op, 12))])
def test_random_case(op, seed, device):
    draw = random.Random(f"{op} {seed}")
    dtype = DTYPES[seed % len(DTYPES)]
    check_case(modules()[op], Case(f"random {seed}", DRAWERS.get(op, _one_tensor)(draw)), device, dtype)
