"""The table of recognised rotary functions, written as models write them (see `modules.py`).

What several share stands in helpers: a canonical expression sees through them. Their options: `call` names
the signature (`../rope.py` has one replacement for each), `rope` holds the options of `tigon.rope`, `tables`
says which columns of cos and sin are read: all of them; the `left` half, each for a pair; or all, each for a
pair (`pair`). `probe`: how many columns a function without source is tried with, where its numbers may be
compared. `back`: turned by minus the angle.
"""

from __future__ import annotations

import torch

from tigon.integrations.transformers.patterns.modules import Structure


def rotate_half(x):
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def rotate_half_back(x):
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((x2, -x1), dim=-1)


def rotate_pairs(x):
    x1 = x[..., 0::2]
    x2 = x[..., 1::2]
    return torch.stack((-x2, x1), dim=-1).flatten(-2)


def rotate_pairs_view(x):
    x = x.view(*x.shape[:-1], -1, 2)
    x1, x2 = x.unbind(dim=-1)
    return torch.stack((-x2, x1), dim=-1).flatten(start_dim=-2)


def _unsqueezed(cos, sin, dim):
    return cos.unsqueeze(dim), sin.unsqueeze(dim)


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


# --- halves ----------------------------------------------------------------------------------


def full(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = _unsqueezed(cos, sin, unsqueeze_dim)
    return _both(_turned, rotate_half, q, k, cos, sin)


def full_back(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = _unsqueezed(cos, sin, unsqueeze_dim)
    return _both(_turned, rotate_half_back, q, k, cos, sin)


def cast_back(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = _unsqueezed(cos, sin, unsqueeze_dim)
    return _both_to(q.dtype, k.dtype, _turned, rotate_half, q, k, cos, sin)


def in_float(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = _unsqueezed(cos, sin, unsqueeze_dim)
    return _both_to(q.dtype, q.dtype, _turned_in_float, rotate_half, q, k, cos, sin)


def all_in_float(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim).float(), sin.unsqueeze(unsqueeze_dim).float()
    return _both_to(q.dtype, q.dtype, _turned_in_float, rotate_half, q, k, cos, sin)


def vision(q, k, cos, sin):
    cos, sin = cos.unsqueeze(-2).float(), sin.unsqueeze(-2).float()
    return _both_to(q.dtype, k.dtype, _turned_in_float, rotate_half, q, k, cos, sin)


def vision_partial(q, k, cos, sin):
    columns = cos.shape[-1]
    cos, sin = cos[:, None, :], sin[:, None, :]
    return _part_turned(rotate_half, q, cos, sin, columns), _part_turned(rotate_half, k, cos, sin, columns)


def partial(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = _unsqueezed(cos, sin, unsqueeze_dim)
    return _both(_first_columns, rotate_half, q, k, cos, sin)


def partial_positions(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
    cos, sin = _unsqueezed(cos, sin, unsqueeze_dim)
    return _both(_first_columns, rotate_half, q, k, cos, sin)


def partial_optional(q, k=None, cos=None, sin=None, unsqueeze_dim=1):
    cos, sin = _unsqueezed(cos, sin, unsqueeze_dim)
    q_embed = _first_columns(rotate_half, q, cos, sin)
    if k is not None:
        return q_embed, _first_columns(rotate_half, k, cos, sin)
    return q_embed


def one_tensor(x, cos, sin, unsqueeze_dim=1):
    return _turned(rotate_half, x, cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim))


def _narrow(x, cos, sin):
    x1, x2 = torch.chunk(x, 2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)


def narrow(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = _unsqueezed(cos, sin, unsqueeze_dim)
    return _narrow(q, cos, sin), _narrow(k, cos, sin)


# --- pairs of neighbours ---------------------------------------------------------------------


def pairs(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = _unsqueezed(cos, sin, unsqueeze_dim)
    return _both(_turned, rotate_pairs, q, k, cos, sin)


def pairs_in_float(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = _unsqueezed(cos, sin, unsqueeze_dim)
    return _both_to(q.dtype, q.dtype, _turned_in_float, rotate_pairs, q, k, cos, sin)


def pairs_products_in_float(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = _unsqueezed(cos, sin, unsqueeze_dim)
    return _both_to(q.dtype, q.dtype, _products_in_float, rotate_pairs, q, k, cos, sin)


def pairs_vision(q, k, cos, sin):
    cos, sin = cos.unsqueeze(-2).float(), sin.unsqueeze(-2).float()
    return _both_to(q.dtype, k.dtype, _turned_in_float, rotate_pairs_view, q, k, cos, sin)


def pairs_partial(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = _unsqueezed(cos, sin, unsqueeze_dim)
    return _both(_first_columns, rotate_pairs, q, k, cos, sin)


def _doubled(table, unsqueeze_dim):
    table = table.unsqueeze(unsqueeze_dim)
    return table[..., : table.shape[-1] // 2].repeat_interleave(2, dim=-1)


def left_pairs(q, k, cos, sin, unsqueeze_dim=1):
    return _both(_turned, rotate_pairs, q, k, _doubled(cos, unsqueeze_dim), _doubled(sin, unsqueeze_dim))


def left_pairs_products_in_float(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = _doubled(cos, unsqueeze_dim), _doubled(sin, unsqueeze_dim)
    return _both_to(q.dtype, q.dtype, _products_in_float, rotate_pairs, q, k, cos, sin)


def left_pairs_partial(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = _doubled(cos, unsqueeze_dim), _doubled(sin, unsqueeze_dim)
    return _both(_first_columns, rotate_pairs, q, k, cos, sin)


def _narrow_pairs(x, cos, sin):
    x1, x2 = x[..., ::2], x[..., 1::2]
    return torch.stack((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).flatten(-2)


def narrow_pairs(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = _unsqueezed(cos, sin, unsqueeze_dim)
    return _narrow_pairs(q, cos, sin), _narrow_pairs(k, cos, sin)


def narrow_pairs_tail(x, cos, sin, unsqueeze_dim=1):
    cos = cos.repeat_interleave(2, dim=-1).unsqueeze(unsqueeze_dim)
    sin = sin.repeat_interleave(2, dim=-1).unsqueeze(unsqueeze_dim)
    columns = cos.shape[-1]
    kept, turned = x[..., :-columns], x[..., -columns:]
    return torch.cat([kept, _products_in_float(rotate_pairs, turned, cos, sin).to(x.dtype)], dim=-1)


def _rotate_every_two(x):
    x1 = x[:, :, :, ::2]
    x2 = x[:, :, :, 1::2]
    return torch.stack((-x2, x1), dim=-1).flatten(-2)


def sin_first(tensor, sin, cos):
    sin = torch.repeat_interleave(sin[:, :, None, :], 2, 3)
    cos = torch.repeat_interleave(cos[:, :, None, :], 2, 3)
    return _turned(_rotate_every_two, tensor, cos, sin)


# --- neighbours in, halves out ---------------------------------------------------------------


def _left(table, unsqueeze_dim):
    return table[..., : table.shape[-1] // 2].unsqueeze(unsqueeze_dim)


def _pairs_to_halves(x, cos, sin):
    x1, x2 = x[..., 0::2], x[..., 1::2]
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1)


def deinterleaved(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
    cos, sin = _left(cos, unsqueeze_dim), _left(sin, unsqueeze_dim)
    return _pairs_to_halves(q, cos, sin), _pairs_to_halves(k, cos, sin)


def deinterleaved_optional(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = _left(cos, unsqueeze_dim), _left(sin, unsqueeze_dim)
    q_embed, k_embed = _pairs_to_halves(q, cos, sin), None
    if k is not None:
        k_embed = _pairs_to_halves(k, cos, sin)
    return q_embed, k_embed


# --- complex numbers -------------------------------------------------------------------------


def _complex(x):
    return torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))


def _real(x):
    return torch.view_as_real(x).flatten(3)


def complex_inside(xq, xk, freqs_cis):
    q, k = _real(_complex(xq) * freqs_cis[:, :, None, :]), _real(_complex(xk) * freqs_cis[:, :, None, :])
    return q.type_as(xq), k.type_as(xk)


def complex_outside(xq, xk, freqs_cis):
    q, k = _complex(xq), _complex(xk)
    freqs_cis = freqs_cis.unsqueeze(1).to(q.device)
    return _real(q * freqs_cis).type_as(xq), _real(k * freqs_cis).type_as(xk)


def _row(name, reference, call="q k", tables="all", probe=None, back=False, **rope):
    options = {"call": call, "tables": tables, "back": back, "rope": rope}
    options |= {"probe": probe} if probe else {}
    return Structure(name, reference, options, forward=False)


KEPT = {"keep_dtype": True}
PAIRS = {"interleaved": True}
COMPLEX = {"call": "complex", **PAIRS, **KEPT}
ROTARY = (
    _row("half", full, probe=16),
    _row("half, the other way", full_back, back=True),
    _row("half, cast back", cast_back, probe=16, **KEPT),
    _row("half, partial", partial, probe=8),
    _row("half, partial", partial_positions, "q k positions"),
    _row("half, partial", partial_optional, "q or both"),
    _row("half, fp32", in_float, **KEPT),
    _row("half, fp32", all_in_float, **KEPT),
    _row("half, vision", vision, "vision", **KEPT),
    _row("half, vision, partial", vision_partial, "vision packed"),
    _row("half, one tensor", one_tensor, "x"),
    _row("half, narrow tables", narrow, tables="pair"),
    _row("interleaved", pairs, **PAIRS),
    _row("interleaved, fp32", pairs_in_float, **PAIRS, **KEPT),
    _row("interleaved, fp32", pairs_products_in_float, **PAIRS, **KEPT),
    _row("interleaved, vision", pairs_vision, "vision", **PAIRS, **KEPT),
    _row("interleaved, partial", pairs_partial, **PAIRS),
    _row("interleaved", left_pairs, tables="left", **PAIRS),
    _row("interleaved, fp32", left_pairs_products_in_float, tables="left", **PAIRS, **KEPT),
    _row("interleaved, partial", left_pairs_partial, tables="left", **PAIRS),
    _row("interleaved, narrow tables", narrow_pairs, tables="pair", **PAIRS),
    _row("interleaved, tail", narrow_pairs_tail, "x", "pair", tail=True, **PAIRS, **KEPT),
    _row("interleaved, one tensor", sin_first, "x sin cos", "pair", **PAIRS),
    _row("interleaved to halves", deinterleaved, "q k positions", "left", deinterleave=True, **PAIRS),
    _row("interleaved to halves", deinterleaved_optional, "q maybe k", "left", deinterleave=True, **PAIRS),
    _row("complex", complex_inside, unsqueeze_dim=2, **COMPLEX),
    _row("complex", complex_outside, unsqueeze_dim=1, **COMPLEX),
)
