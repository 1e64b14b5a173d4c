"""What the two loss modules share: the plain formulation and the fp64 one, from logits on."""

import torch
import torch.nn.functional as F

# The options of a call that has none.
PLAIN = {"weight": None, "ignore_index": -100, "label_smoothing": 0.0, "z_loss": 0.0}
PLAIN |= {"reduction": "mean", "denominator": None}


def _reduce(rows, divisor, reduction, denominator):
    """Rows to the value asked for; `divisor` is what a mean divides by."""
    if denominator is not None:
        if torch.is_tensor(denominator):
            denominator = denominator.to(rows.device)
        return rows.sum() / denominator
    if reduction == "none":
        return rows
    return rows.sum() if reduction == "sum" else rows.sum() / divisor


def eager_loss(logits, target, *, weight, ignore_index, label_smoothing, z_loss, reduction, denominator):
    """Loss of upcast logits by torch's own cross-entropy, as Hugging Face has it."""
    if weight is not None:
        weight = weight.to(logits.dtype)
    plain = z_loss == 0.0 and denominator is None
    options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    rows = F.cross_entropy(logits, target, weight, reduction=reduction if plain else "none", **options)
    if plain:
        return rows
    valid = target != ignore_index
    if z_loss:
        rows = rows + torch.where(valid, z_loss * torch.logsumexp(logits, -1).square(), 0.0)
    divisor = valid.sum() if weight is None else weight[target.clamp(min=0)][valid].sum()
    return _reduce(rows, divisor, reduction, denominator)


def oracle_loss(x, target, *, weight, ignore_index, label_smoothing, z_loss, reduction, denominator):
    """The formula row by row, for fp64.

    loss_i = (1-s) w_y (lse - x_y) + s/V sum_c w_c (lse - x_c) + z lse^2, zero where the label is
    ignored; a mean divides by the sum of w_y over the labels that count, as torch does.
    """
    valid = target != ignore_index
    y = torch.where(valid, target, 0)
    w = x.new_ones(x.shape[-1]) if weight is None else weight
    lse = torch.logsumexp(x, dim=-1)
    rows = (1 - label_smoothing) * w[y] * (lse - x.gather(-1, y.unsqueeze(-1)).squeeze(-1))
    if label_smoothing:
        rows = rows + label_smoothing / x.shape[-1] * (w * (lse.unsqueeze(-1) - x)).sum(-1)
    if z_loss:
        rows = rows + z_loss * lse * lse
    rows = torch.where(valid, rows, 0.0)
    return _reduce(rows, torch.where(valid, w[y], 0.0).sum(), reduction, denominator)
