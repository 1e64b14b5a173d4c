"""The table of recognised rotary functions, written as models write them.

Parameters are roles: q or x, k, cos and sin (or one table of complex numbers), and the dimension that the
tables get. Options: `rope` holds those of `tigon.rope`; `tables` says which columns of cos and sin are read:
all of them; the `left` half, each for a pair; or all, each for a pair (`pair`). `at`: the dimension that the
tables get, if no parameter says it; `ndim`: of q. `back`: rotated by minus the angle. `keeps_k`: k comes
back as None if there is none. `probe`: columns of tables that a function without source is tried with.
"""

from __future__ import annotations

import torch

from tigon.integrations.transformers.recognition import Structure


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


def _rotate_every_two(x):
    x1, x2 = x[:, :, :, ::2], x[:, :, :, 1::2]
    return torch.stack((-x2, x1), dim=-1).flatten(-2)


# --- one tensor, by tables that have its axes ------------------------------------------------------


def turned(rotate, x, cos, sin):
    return (x * cos) + (rotate(x) * sin)


def turned_back(rotate, x, cos, sin):
    return turned(rotate, x, cos, sin).to(x.dtype)


def in_float(rotate, x, cos, sin):
    return (x.float() * cos) + (rotate(x.float()) * sin)


def products_in_float(rotate, x, cos, sin):
    return (x.float() * cos) + (rotate(x).float() * sin)


def _columns_turned(rotate, x, cos, sin, columns):
    first, kept = x[..., :columns], x[..., columns:]
    return torch.cat([(first * cos) + (rotate(first) * sin), kept], dim=-1)


def first_columns(rotate, x, cos, sin):
    return _columns_turned(rotate, x, cos, sin, cos.shape[-1])


def narrow(_, x, cos, sin):
    x1, x2 = torch.chunk(x, 2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)


def narrow_pairs(_, x, cos, sin):
    x1, x2 = x[..., ::2], x[..., 1::2]
    return torch.stack((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).flatten(-2)


def pairs_to_halves(_, x, cos, sin):
    x1, x2 = x[..., 0::2], x[..., 1::2]
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1)


# --- tables --------------------------------------------------------------------------------------


def whole(table, dim):
    return table.unsqueeze(dim)


def in_float32(table, dim):
    return table.unsqueeze(dim).float()


def doubled(table, dim):
    table = table.unsqueeze(dim)
    return table[..., : table.shape[-1] // 2].repeat_interleave(2, dim=-1)


def left(table, dim):
    return table[..., : table.shape[-1] // 2].unsqueeze(dim)


# --- q and k ---------------------------------------------------------------------------------------


def both(turn, rotate=None, tables=whole):
    def rotary(q, k, cos, sin, unsqueeze_dim=1):
        cos, sin = tables(cos, unsqueeze_dim), tables(sin, unsqueeze_dim)
        return turn(rotate, q, cos, sin), turn(rotate, k, cos, sin)

    return rotary


def both_with_positions(turn, rotate=None, tables=whole):
    def rotary(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
        cos, sin = tables(cos, unsqueeze_dim), tables(sin, unsqueeze_dim)
        return turn(rotate, q, cos, sin), turn(rotate, k, cos, sin)

    return rotary


def both_to_q(turn, rotate, tables=whole):
    def rotary(q, k, cos, sin, unsqueeze_dim=1):
        cos, sin = tables(cos, unsqueeze_dim), tables(sin, unsqueeze_dim)
        return turn(rotate, q, cos, sin).to(q.dtype), turn(rotate, k, cos, sin).to(q.dtype)

    return rotary


def one_or_both(q, k=None, cos=None, sin=None, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    q_embed = first_columns(rotate_half, q, cos, sin)
    if k is not None:
        return q_embed, first_columns(rotate_half, k, cos, sin)
    return q_embed


def vision(rotate):
    def rotary(q, k, cos, sin):
        cos, sin = cos.unsqueeze(-2).float(), sin.unsqueeze(-2).float()
        q_embed, k_embed = in_float(rotate, q, cos, sin), in_float(rotate, k, cos, sin)
        return q_embed.to(q.dtype), k_embed.to(k.dtype)

    return rotary


def vision_packed(q, k, cos, sin):
    columns = cos.shape[-1]
    cos, sin = cos[:, None, :], sin[:, None, :]
    return _columns_turned(rotate_half, q, cos, sin, columns), _columns_turned(
        rotate_half, k, cos, sin, columns
    )


def to_halves_maybe_k(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = left(cos, unsqueeze_dim), left(sin, unsqueeze_dim)
    q_embed, k_embed = pairs_to_halves(None, q, cos, sin), None
    if k is not None:
        k_embed = pairs_to_halves(None, k, cos, sin)
    return q_embed, k_embed


def _complex(x):
    return torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))


def _real(x):
    return torch.view_as_real(x).flatten(3)


def complex_heads_inside(xq, xk, freqs_cis):
    q = _real(_complex(xq) * freqs_cis[:, :, None, :])
    k = _real(_complex(xk) * freqs_cis[:, :, None, :])
    return q.type_as(xq), k.type_as(xk)


def complex_heads_first(xq, xk, freqs_cis):
    q, k = _complex(xq), _complex(xk)
    freqs_cis = freqs_cis.unsqueeze(1).to(q.device)
    return _real(q * freqs_cis).type_as(xq), _real(k * freqs_cis).type_as(xk)


# --- one tensor ------------------------------------------------------------------------------------


def one(x, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return turned(rotate_half, x, cos, sin)


def one_back_to(x, cos, sin):
    missing = x.dim() - cos.dim()
    sizes = cos.shape[0:1] + (1,) * missing + cos.shape[1:]
    if missing > 0:
        cos, sin = cos.view(*sizes), sin.view(*sizes)
    return turned_back(rotate_half, x, cos, sin)


def tail(x, cos, sin, unsqueeze_dim=1):
    cos = cos.repeat_interleave(2, dim=-1).unsqueeze(unsqueeze_dim)
    sin = sin.repeat_interleave(2, dim=-1).unsqueeze(unsqueeze_dim)
    columns = cos.shape[-1]
    kept, last = x[..., :-columns], x[..., -columns:]
    return torch.cat([kept, products_in_float(rotate_pairs, last, cos, sin).to(x.dtype)], dim=-1)


def every_two(tensor, sin, cos):
    sin = torch.repeat_interleave(sin[:, :, None, :], 2, 3)
    cos = torch.repeat_interleave(cos[:, :, None, :], 2, 3)
    return turned(_rotate_every_two, tensor, cos, sin)


def _row(name, reference, *, tables="all", probe=None, back=False, at=1, ndim=(4,), keeps_k=False, **rope):
    options = {"tables": tables, "probe": probe, "back": back, "at": at, "ndim": ndim}
    return Structure(name, reference, {**options, "keeps_k": keeps_k, "rope": rope})


KEPT = {"keep_dtype": True}
PAIRS = {"interleaved": True}
LEFT = {"tables": "left", **PAIRS}
HALVES = {"deinterleave": True, **LEFT}
VISION = {"at": -2, "ndim": (3, 4), **KEPT}
COMPLEX = {**PAIRS, **KEPT}
ROTARY = (
    _row("half", both(turned, rotate_half), probe=16),
    _row("half, the other way", both(turned, rotate_half_back), back=True),
    _row("half, cast back", both(turned_back, rotate_half), probe=16, **KEPT),
    _row("half, partial", both(first_columns, rotate_half), probe=8),
    _row("half, partial", both_with_positions(first_columns, rotate_half)),
    _row("half, partial", one_or_both),
    _row("half, fp32", both_to_q(in_float, rotate_half), **KEPT),
    _row("half, fp32", both_to_q(in_float, rotate_half, in_float32), **KEPT),
    _row("half, vision", vision(rotate_half), **VISION),
    _row("half, vision, partial", vision_packed, ndim=(3,)),
    _row("half, one tensor", one),
    _row("half, one tensor, cast back", one_back_to, **KEPT),
    _row("half, narrow tables", both(narrow), tables="pair"),
    _row("interleaved", both(turned, rotate_pairs), **PAIRS),
    _row("interleaved, fp32", both_to_q(in_float, rotate_pairs), **PAIRS, **KEPT),
    _row("interleaved, fp32", both_to_q(products_in_float, rotate_pairs), **PAIRS, **KEPT),
    _row("interleaved, vision", vision(rotate_pairs_view), **PAIRS, **VISION),
    _row("interleaved, partial", both(first_columns, rotate_pairs), **PAIRS),
    _row("interleaved", both(turned, rotate_pairs, doubled), **LEFT),
    _row("interleaved, fp32", both_to_q(products_in_float, rotate_pairs, doubled), **LEFT, **KEPT),
    _row("interleaved, partial", both(first_columns, rotate_pairs, doubled), **LEFT),
    _row("interleaved, narrow tables", both(narrow_pairs), tables="pair", **PAIRS),
    _row("interleaved, tail", tail, tables="pair", tail=True, **PAIRS, **KEPT),
    _row("interleaved, one tensor", every_two, tables="pair", at=2, **PAIRS),
    _row("interleaved to halves", both_with_positions(pairs_to_halves, None, left), **HALVES),
    _row("interleaved to halves", to_halves_maybe_k, keeps_k=True, **HALVES),
    _row("complex", complex_heads_inside, unsqueeze_dim=2, **COMPLEX),
    _row("complex", complex_heads_first, unsqueeze_dim=1, **COMPLEX),
)
