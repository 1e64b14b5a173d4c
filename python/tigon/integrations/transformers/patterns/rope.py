"""The table of recognised rotary functions, written as models write them (see `modules.py`).

Their options: `call` names the signature (`../rope.py` has one replacement for each), `rope` holds the
options of `tigon.rope`, `tables` says which columns of cos and sin are read: all of them; the
`left` half, each for a pair; or all, each for a pair (`pair`). `probe`: how many columns a function
without source is tried with, where its numbers may be compared. `back`: turned by minus the angle.
"""

from __future__ import annotations

import torch

from tigon.integrations.transformers.patterns.modules import Structure


def rotate_half(x):
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def rotate_pairs(x):
    x1 = x[..., 0::2]
    x2 = x[..., 1::2]
    return torch.stack((-x2, x1), dim=-1).flatten(-2)


def rotate_pairs_view(x):
    x = x.view(*x.shape[:-1], -1, 2)
    x1, x2 = x.unbind(dim=-1)
    return torch.stack((-x2, x1), dim=-1).flatten(start_dim=-2)


# --- halves ----------------------------------------------------------------------------------


def rotate_half_back(x):
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((x2, -x1), dim=-1)


def full_back(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return (q * cos) + (rotate_half_back(q) * sin), (k * cos) + (rotate_half_back(k) * sin)


def full(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return (q * cos) + (rotate_half(q) * sin), (k * cos) + (rotate_half(k) * sin)


def cast_back(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    q_embed = (q * cos) + (rotate_half(q) * sin)
    k_embed = (k * cos) + (rotate_half(k) * sin)
    return q_embed.to(q.dtype), k_embed.to(k.dtype)


def in_float(q, k, cos, sin, unsqueeze_dim=1):
    dtype = q.dtype
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    q_embed = (q.float() * cos) + (rotate_half(q.float()) * sin)
    k_embed = (k.float() * cos) + (rotate_half(k.float()) * sin)
    return q_embed.to(dtype), k_embed.to(dtype)


def all_in_float(q, k, cos, sin, unsqueeze_dim=1):
    dtype = q.dtype
    q, k = q.float(), k.float()
    cos, sin = cos.unsqueeze(unsqueeze_dim).float(), sin.unsqueeze(unsqueeze_dim).float()
    q_embed = (q * cos) + (rotate_half(q) * sin)
    k_embed = (k * cos) + (rotate_half(k) * sin)
    return q_embed.to(dtype), k_embed.to(dtype)


def vision(q, k, cos, sin):
    q_dtype, k_dtype = q.dtype, k.dtype
    q, k = q.float(), k.float()
    cos, sin = cos.unsqueeze(-2).float(), sin.unsqueeze(-2).float()
    q_embed = (q * cos) + (rotate_half(q) * sin)
    k_embed = (k * cos) + (rotate_half(k) * sin)
    return q_embed.to(q_dtype), k_embed.to(k_dtype)


def vision_partial(q, k, cos, sin):
    columns = cos.shape[-1]
    cos, sin = cos[:, None, :], sin[:, None, :]
    q_rot, q_pass = q[..., :columns], q[..., columns:]
    k_rot, k_pass = k[..., :columns], k[..., columns:]
    q_rot = q_rot * cos + rotate_half(q_rot) * sin
    k_rot = k_rot * cos + rotate_half(k_rot) * sin
    return torch.cat([q_rot, q_pass], dim=-1), torch.cat([k_rot, k_pass], dim=-1)


def partial(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    columns = cos.shape[-1]
    q_rot, q_pass = q[..., :columns], q[..., columns:]
    k_rot, k_pass = k[..., :columns], k[..., columns:]
    q_embed = torch.cat([(q_rot * cos) + (rotate_half(q_rot) * sin), q_pass], dim=-1)
    k_embed = torch.cat([(k_rot * cos) + (rotate_half(k_rot) * sin), k_pass], dim=-1)
    return q_embed, k_embed


def partial_positions(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    columns = cos.shape[-1]
    q_rot, q_pass = q[..., :columns], q[..., columns:]
    k_rot, k_pass = k[..., :columns], k[..., columns:]
    q_embed = torch.cat([(q_rot * cos) + (rotate_half(q_rot) * sin), q_pass], dim=-1)
    k_embed = torch.cat([(k_rot * cos) + (rotate_half(k_rot) * sin), k_pass], dim=-1)
    return q_embed, k_embed


def partial_optional(q, k=None, cos=None, sin=None, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    columns = cos.shape[-1]
    q_rot, q_pass = q[..., :columns], q[..., columns:]
    q_embed = torch.cat([(q_rot * cos) + (rotate_half(q_rot) * sin), q_pass], dim=-1)
    if k is not None:
        k_rot, k_pass = k[..., :columns], k[..., columns:]
        k_embed = torch.cat([(k_rot * cos) + (rotate_half(k_rot) * sin), k_pass], dim=-1)
        return q_embed, k_embed
    return q_embed


def one_tensor(x, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return (x * cos) + (rotate_half(x) * sin)


def _narrow(x, cos, sin):
    x1, x2 = torch.chunk(x, 2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)


def narrow(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return _narrow(q, cos, sin), _narrow(k, cos, sin)


# --- pairs of neighbours ---------------------------------------------------------------------


def pairs(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return (q * cos) + (rotate_pairs(q) * sin), (k * cos) + (rotate_pairs(k) * sin)


def pairs_in_float(q, k, cos, sin, unsqueeze_dim=1):
    dtype = q.dtype
    q, k = q.float(), k.float()
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    q_embed = (q * cos) + (rotate_pairs(q) * sin)
    k_embed = (k * cos) + (rotate_pairs(k) * sin)
    return q_embed.to(dtype=dtype), k_embed.to(dtype=dtype)


def pairs_products_in_float(q, k, cos, sin, unsqueeze_dim=1):
    dtype = q.dtype
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    q_embed = (q.float() * cos) + (rotate_pairs(q).float() * sin)
    k_embed = (k.float() * cos) + (rotate_pairs(k).float() * sin)
    return q_embed.to(dtype), k_embed.to(dtype)


def pairs_vision(q, k, cos, sin):
    q_dtype, k_dtype = q.dtype, k.dtype
    q, k = q.float(), k.float()
    cos, sin = cos.unsqueeze(-2).float(), sin.unsqueeze(-2).float()
    q_embed = (q * cos) + (rotate_pairs_view(q) * sin)
    k_embed = (k * cos) + (rotate_pairs_view(k) * sin)
    return q_embed.to(q_dtype), k_embed.to(k_dtype)


def pairs_partial(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    columns = cos.shape[-1]
    q_rot, q_pass = q[..., :columns], q[..., columns:]
    k_rot, k_pass = k[..., :columns], k[..., columns:]
    q_embed = torch.cat([(q_rot * cos) + (rotate_pairs(q_rot) * sin), q_pass], dim=-1)
    k_embed = torch.cat([(k_rot * cos) + (rotate_pairs(k_rot) * sin), k_pass], dim=-1)
    return q_embed, k_embed


def _doubled(table, unsqueeze_dim):
    table = table.unsqueeze(unsqueeze_dim)
    return table[..., : table.shape[-1] // 2].repeat_interleave(2, dim=-1)


def left_pairs(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = _doubled(cos, unsqueeze_dim), _doubled(sin, unsqueeze_dim)
    return (q * cos) + (rotate_pairs(q) * sin), (k * cos) + (rotate_pairs(k) * sin)


def left_pairs_products_in_float(q, k, cos, sin, unsqueeze_dim=1):
    dtype = q.dtype
    cos, sin = _doubled(cos, unsqueeze_dim), _doubled(sin, unsqueeze_dim)
    q_embed = (q.float() * cos) + (rotate_pairs(q).float() * sin)
    k_embed = (k.float() * cos) + (rotate_pairs(k).float() * sin)
    return q_embed.to(dtype), k_embed.to(dtype)


def left_pairs_partial(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = _doubled(cos, unsqueeze_dim), _doubled(sin, unsqueeze_dim)
    columns = cos.shape[-1]
    q_rot, q_pass = q[..., :columns], q[..., columns:]
    k_rot, k_pass = k[..., :columns], k[..., columns:]
    q_embed = torch.cat([(q_rot * cos) + (rotate_pairs(q_rot) * sin), q_pass], dim=-1)
    k_embed = torch.cat([(k_rot * cos) + (rotate_pairs(k_rot) * sin), k_pass], dim=-1)
    return q_embed, k_embed


def _narrow_pairs(x, cos, sin):
    x1, x2 = x[..., ::2], x[..., 1::2]
    return torch.stack((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).flatten(-2)


def narrow_pairs(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return _narrow_pairs(q, cos, sin), _narrow_pairs(k, cos, sin)


def narrow_pairs_tail(x, cos, sin, unsqueeze_dim=1):
    cos = cos.repeat_interleave(2, dim=-1).unsqueeze(unsqueeze_dim)
    sin = sin.repeat_interleave(2, dim=-1).unsqueeze(unsqueeze_dim)
    columns = cos.shape[-1]
    kept, turned = x[..., :-columns], x[..., -columns:]
    y = ((turned.float() * cos) + (rotate_pairs(turned).float() * sin)).to(x.dtype)
    return torch.cat([kept, y], dim=-1)


def _rotate_every_two(x):
    x1 = x[:, :, :, ::2]
    x2 = x[:, :, :, 1::2]
    return torch.stack((-x2, x1), dim=-1).flatten(-2)


def sin_first(tensor, sin, cos):
    sin = torch.repeat_interleave(sin[:, :, None, :], 2, 3)
    cos = torch.repeat_interleave(cos[:, :, None, :], 2, 3)
    return (tensor * cos) + (_rotate_every_two(tensor) * sin)


# --- neighbours in, halves out ---------------------------------------------------------------


def deinterleaved(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
    cos = cos[..., : cos.shape[-1] // 2].unsqueeze(unsqueeze_dim)
    sin = sin[..., : sin.shape[-1] // 2].unsqueeze(unsqueeze_dim)
    q1, q2 = q[..., 0::2], q[..., 1::2]
    k1, k2 = k[..., 0::2], k[..., 1::2]
    q_embed = torch.cat([q1 * cos - q2 * sin, q2 * cos + q1 * sin], dim=-1)
    k_embed = torch.cat([k1 * cos - k2 * sin, k2 * cos + k1 * sin], dim=-1)
    return q_embed, k_embed


def deinterleaved_optional(q, k, cos, sin, unsqueeze_dim=1):
    cos = cos[..., : cos.shape[-1] // 2].unsqueeze(unsqueeze_dim)
    sin = sin[..., : sin.shape[-1] // 2].unsqueeze(unsqueeze_dim)
    q1, q2 = q[..., 0::2], q[..., 1::2]
    q_embed = torch.cat([q1 * cos - q2 * sin, q2 * cos + q1 * sin], dim=-1)
    if k is not None:
        k1, k2 = k[..., 0::2], k[..., 1::2]
        k_embed = torch.cat([k1 * cos - k2 * sin, k2 * cos + k1 * sin], dim=-1)
    else:
        k_embed = None
    return q_embed, k_embed


# --- complex numbers -------------------------------------------------------------------------


def complex_inside(xq, xk, freqs_cis):
    q = torch.view_as_complex(xq.float().reshape(*xq.shape[:-1], -1, 2))
    k = torch.view_as_complex(xk.float().reshape(*xk.shape[:-1], -1, 2))
    q_out = torch.view_as_real(q * freqs_cis[:, :, None, :]).flatten(3)
    k_out = torch.view_as_real(k * freqs_cis[:, :, None, :]).flatten(3)
    return q_out.type_as(xq), k_out.type_as(xk)


def complex_outside(xq, xk, freqs_cis):
    q = torch.view_as_complex(xq.float().reshape(*xq.shape[:-1], -1, 2))
    k = torch.view_as_complex(xk.float().reshape(*xk.shape[:-1], -1, 2))
    freqs_cis = freqs_cis.unsqueeze(1).to(q.device)
    q_out = torch.view_as_real(q * freqs_cis).flatten(3).type_as(xq)
    k_out = torch.view_as_real(k * freqs_cis).flatten(3).type_as(xk)
    return q_out, k_out


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
