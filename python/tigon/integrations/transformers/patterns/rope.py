"""The table of recognised rotary functions, written as models write them (see `modules.py`).

Their options: `call` names the signature (`../rope.py` has one replacement for each), `rope` holds the
options of `tigon.rope`, `tables` says which columns of cos and sin are read: all of them; the `left` half,
each for a pair; or all, each for a pair (`pair`). `probe`: how many columns a function without source is
tried with, where its numbers may be compared. `back`: turned by minus the angle.
"""

from __future__ import annotations

import torch

from tigon.integrations.transformers.patterns.modules import Structure, reference


def rotate_half(x):
    x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def rotate_half_back(x):
    x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((x2, -x1), dim=-1)


def rotate_pairs(x):
    x1, x2 = x[..., 0::2], x[..., 1::2]
    return torch.stack((-x2, x1), dim=-1).flatten(-2)


def rotate_pairs_view(x):
    x = x.view(*x.shape[:-1], -1, 2)
    x1, x2 = x.unbind(dim=-1)
    return torch.stack((-x2, x1), dim=-1).flatten(start_dim=-2)


def _both(turn, rotate, q, k, cos, sin):
    return turn(rotate, q, cos, sin), turn(rotate, k, cos, sin)


def _both_to(q_dtype, k_dtype, turn, rotate, q, k, cos, sin):
    return turn(rotate, q, cos, sin).to(q_dtype), turn(rotate, k, cos, sin).to(k_dtype)


def _turned(rotate, x, cos, sin):
    return (x * cos) + (rotate(x) * sin)


def _turned_in_float(rotate, x, cos, sin):
    return (x.float() * cos) + (rotate(x.float()) * sin)


def _products_in_float(rotate, x, cos, sin):
    return (x.float() * cos) + (rotate(x).float() * sin)


def _part_turned(rotate, x, cos, sin, columns):
    turned, kept = x[..., :columns], x[..., columns:]
    return torch.cat([(turned * cos) + (rotate(turned) * sin), kept], dim=-1)


def _first_columns(rotate, x, cos, sin):
    return _part_turned(rotate, x, cos, sin, cos.shape[-1])


def _narrow(x, cos, sin):
    x1, x2 = torch.chunk(x, 2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)


def _doubled(table, unsqueeze_dim):
    table = table.unsqueeze(unsqueeze_dim)
    return table[..., : table.shape[-1] // 2].repeat_interleave(2, dim=-1)


def _narrow_pairs(x, cos, sin):
    x1, x2 = x[..., ::2], x[..., 1::2]
    return torch.stack((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).flatten(-2)


def _rotate_every_two(x):
    x1, x2 = x[:, :, :, ::2], x[:, :, :, 1::2]
    return torch.stack((-x2, x1), dim=-1).flatten(-2)


def _left(table, unsqueeze_dim):
    return table[..., : table.shape[-1] // 2].unsqueeze(unsqueeze_dim)


def _pairs_to_halves(x, cos, sin):
    x1, x2 = x[..., 0::2], x[..., 1::2]
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1)


def _complex(x):
    return torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))


def _real(x):
    return torch.view_as_real(x).flatten(3)


SIGNATURES = {
    "q k": "q, k, cos, sin, unsqueeze_dim=1",
    "q k positions": "q, k, cos, sin, position_ids=None, unsqueeze_dim=1",
    "q maybe k": "q, k, cos, sin, unsqueeze_dim=1",
    "q or both": "q, k=None, cos=None, sin=None, unsqueeze_dim=1",
    "vision": "q, k, cos, sin",
    "vision packed": "q, k, cos, sin",
    "x": "x, cos, sin, unsqueeze_dim=1",
    "x heads": "x, cos, sin",
    "x sin cos": "tensor, sin, cos",
    "complex": "xq, xk, freqs_cis",
}


def _row(name, *statements, call="q k", tables="all", probe=None, back=False, **rope):
    options = {"call": call, "tables": tables, "back": back, "rope": rope}
    options |= {"probe": probe} if probe else {}
    return Structure(name, reference(SIGNATURES[call], statements, globals()), options, forward=False)


_AT = "cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)"
_AT_HEADS = "cos, sin = cos.unsqueeze(-2).float(), sin.unsqueeze(-2).float()"
_DOUBLED = "cos, sin = _doubled(cos, unsqueeze_dim), _doubled(sin, unsqueeze_dim)"
_LEFT = "cos, sin = _left(cos, unsqueeze_dim), _left(sin, unsqueeze_dim)"
_FIRST = "_both(_first_columns, rotate_half, q, k, cos, sin)"
_FIRST_PAIRS = "_both(_first_columns, rotate_pairs, q, k, cos, sin)"
_IN_FLOAT = "_both_to(q.dtype, q.dtype, _turned_in_float, rotate_half, q, k, cos, sin)"
_VISION = "_both_to(q.dtype, k.dtype, _turned_in_float, {}, q, k, cos, sin)"
_PRODUCTS = "_both_to(q.dtype, q.dtype, _products_in_float, rotate_pairs, q, k, cos, sin)"
KEPT = {"keep_dtype": True}
PAIRS = {"interleaved": True}
HALVES = {"tables": "left", "deinterleave": True, **PAIRS}
COMPLEX = {"call": "complex", **PAIRS, **KEPT}
ROTARY = (
    _row("half", _AT, "_both(_turned, rotate_half, q, k, cos, sin)", probe=16),
    _row("half, the other way", _AT, "_both(_turned, rotate_half_back, q, k, cos, sin)", back=True),
    _row(
        "half, cast back",
        _AT,
        "_both_to(q.dtype, k.dtype, _turned, rotate_half, q, k, cos, sin)",
        probe=16,
        **KEPT,
    ),
    _row("half, partial", _AT, _FIRST, probe=8),
    _row("half, partial", _AT, _FIRST, call="q k positions"),
    _row(
        "half, partial",
        _AT,
        "q_embed = _first_columns(rotate_half, q, cos, sin)",
        "if k is not None: return q_embed, _first_columns(rotate_half, k, cos, sin)",
        "q_embed",
        call="q or both",
    ),
    _row("half, fp32", _AT, _IN_FLOAT, **KEPT),
    _row("half, fp32", _AT, "cos, sin = cos.float(), sin.float()", _IN_FLOAT, **KEPT),
    _row("half, vision", _AT_HEADS, _VISION.format("rotate_half"), call="vision", **KEPT),
    _row(
        "half, vision, partial",
        "columns = cos.shape[-1]",
        "cos, sin = cos[:, None, :], sin[:, None, :]",
        "_part_turned(rotate_half, q, cos, sin, columns), _part_turned(rotate_half, k, cos, sin, columns)",
        call="vision packed",
    ),
    _row("half, one tensor", _AT, "_turned(rotate_half, x, cos, sin)", call="x"),
    _row(
        "half, one tensor, cast back",
        "missing = x.dim() - cos.dim()",
        "sizes = cos.shape[0:1] + (1,) * missing + cos.shape[1:]",
        "if missing > 0: cos, sin = cos.view(*sizes), sin.view(*sizes)",
        "_turned(rotate_half, x, cos, sin).to(x.dtype)",
        call="x heads",
        **KEPT,
    ),
    _row("half, narrow tables", _AT, "_narrow(q, cos, sin), _narrow(k, cos, sin)", tables="pair"),
    _row("interleaved", _AT, "_both(_turned, rotate_pairs, q, k, cos, sin)", **PAIRS),
    _row("interleaved, fp32", _AT, _IN_FLOAT.replace("half", "pairs"), **PAIRS, **KEPT),
    _row("interleaved, fp32", _AT, _PRODUCTS, **PAIRS, **KEPT),
    _row(
        "interleaved, vision", _AT_HEADS, _VISION.format("rotate_pairs_view"), call="vision", **PAIRS, **KEPT
    ),
    _row("interleaved, partial", _AT, _FIRST_PAIRS, **PAIRS),
    _row("interleaved", _DOUBLED, "_both(_turned, rotate_pairs, q, k, cos, sin)", tables="left", **PAIRS),
    _row("interleaved, fp32", _DOUBLED, _PRODUCTS, tables="left", **PAIRS, **KEPT),
    _row("interleaved, partial", _DOUBLED, _FIRST_PAIRS, tables="left", **PAIRS),
    _row(
        "interleaved, narrow tables",
        _AT,
        "_narrow_pairs(q, cos, sin), _narrow_pairs(k, cos, sin)",
        tables="pair",
        **PAIRS,
    ),
    _row(
        "interleaved, tail",
        "cos = cos.repeat_interleave(2, dim=-1).unsqueeze(unsqueeze_dim)",
        "sin = sin.repeat_interleave(2, dim=-1).unsqueeze(unsqueeze_dim)",
        "columns = cos.shape[-1]",
        "kept, turned = x[..., :-columns], x[..., -columns:]",
        "torch.cat([kept, _products_in_float(rotate_pairs, turned, cos, sin).to(x.dtype)], dim=-1)",
        call="x",
        tables="pair",
        tail=True,
        **PAIRS,
        **KEPT,
    ),
    _row(
        "interleaved, one tensor",
        "sin = torch.repeat_interleave(sin[:, :, None, :], 2, 3)",
        "cos = torch.repeat_interleave(cos[:, :, None, :], 2, 3)",
        "_turned(_rotate_every_two, tensor, cos, sin)",
        call="x sin cos",
        tables="pair",
        **PAIRS,
    ),
    _row(
        "interleaved to halves",
        _LEFT,
        "_pairs_to_halves(q, cos, sin), _pairs_to_halves(k, cos, sin)",
        call="q k positions",
        **HALVES,
    ),
    _row(
        "interleaved to halves",
        _LEFT,
        "q_embed, k_embed = _pairs_to_halves(q, cos, sin), None",
        "if k is not None: k_embed = _pairs_to_halves(k, cos, sin)",
        "q_embed, k_embed",
        call="q maybe k",
        **HALVES,
    ),
    _row(
        "complex",
        "q = _real(_complex(xq) * freqs_cis[:, :, None, :])",
        "k = _real(_complex(xk) * freqs_cis[:, :, None, :])",
        "q.type_as(xq), k.type_as(xk)",
        unsqueeze_dim=2,
        **COMPLEX,
    ),
    _row(
        "complex",
        "q, k = _complex(xq), _complex(xk)",
        "freqs_cis = freqs_cis.unsqueeze(1).to(q.device)",
        "_real(q * freqs_cis).type_as(xq), _real(k * freqs_cis).type_as(xk)",
        unsqueeze_dim=1,
        **COMPLEX,
    ),
)
