"""Routers of experts, as models write them: rows for `modules.match`, and what tigon.route is told.

A row returns logits, weights and ids. Its options and attribute names are fields of `routers.RouterSpec`;
`method` is DeepSeek-V2's way to choose.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tigon.integrations.transformers.patterns.modules import Structure, reference


def _masked(scores, group_scores, num_experts, num_groups, top_groups, value):
    chosen = torch.topk(group_scores, top_groups, dim=-1)[1]
    mask = torch.zeros_like(group_scores)
    mask.scatter_(1, chosen, 1)
    mask = mask.unsqueeze(-1).expand(-1, num_groups, num_experts // num_groups)
    return scores.masked_fill(~mask.reshape(-1, num_experts).bool(), value)


def softmax_groups(self, x):
    x = x.view(-1, self.hidden)
    logits = F.linear(x.float(), self.weight.float())
    scores = F.softmax(logits.float(), dim=-1)
    if self.method == "greedy":
        weights, ids = torch.topk(scores, self.top_k, dim=-1)
    elif self.method == "group_limited_greedy":
        best = scores.view(-1, self.num_groups, self.num_experts // self.num_groups).max(dim=-1).values
        scores = _masked(scores, best, self.num_experts, self.num_groups, self.top_groups, 0.0)
        weights, ids = torch.topk(scores, self.top_k, dim=-1)
    return logits, weights * self.scale, ids


def _group_choice(scores, top_k, num_experts, num_groups, top_groups):
    best = scores.view(-1, num_groups, num_experts // num_groups).topk(2, dim=-1)[0].sum(dim=-1)
    scores = _masked(scores, best, num_experts, num_groups, top_groups, float("-inf"))
    return torch.topk(scores, top_k, dim=-1)[1]


def _row(name, *statements, parameters="self, x", **options):
    return Structure(name, reference(parameters, statements, globals()), options)


_ROWS = "x = x.reshape(-1, self.hidden)"
_PRODUCT = "logits = F.linear(x, self.weight)"
_SOFTMAX = "weights, ids = torch.topk(F.softmax(logits.float(), dim=-1), self.top_k, dim=-1)"
_CHOICE = "chosen, ids = torch.topk(logits, self.top_k, dim=-1)"
_SCORES = "scores = torch.sigmoid(logits.float())"
_IDS = "ids = torch.topk(scores + self.correction, self.top_k, dim=-1)[1]"
_IDS_GIVEN = "ids = torch.topk(scores + correction, self.top_k, dim=-1)[1]"
_GATHER = "weights = scores.gather(1, ids)"
_NORMALIZE = "weights /= weights.sum(dim=-1, keepdim=True)"
_RESULT = "logits, weights, ids"
_ROUNDED = "logits, weights.to(logits.dtype), ids"
_ROUNDED_PRODUCT = "logits = F.linear(x.to(self.weight.dtype), self.weight)"
_GIVEN = {"parameters": "self, x, correction"}
_WIDE = {"product": "float32"}
_SIGMOID = {"score": "sigmoid", "autocast": False}
_SIGMOID_GROUPS = {**_SIGMOID, **_WIDE, "group_score": "sum_of_two"}
_GROUPS = (
    "x = x.view(-1, self.hidden)",
    "logits = F.linear(x.float(), self.weight.float())",
    "scores = logits.sigmoid()",
    "biased = scores + self.correction",
    "ids = _group_choice(biased, self.top_k, self.num_experts, self.num_groups, self.top_groups)",
    _GATHER,
    "if self.normalize: weights /= weights.sum(dim=-1, keepdim=True) + 1e-20",
)


ROUTERS = (
    _row("softmax, choice", _ROWS, _PRODUCT, _SOFTMAX, _NORMALIZE, _RESULT),
    _row("softmax, choice", _ROWS, _PRODUCT, _SOFTMAX, _NORMALIZE, _ROUNDED, out="logits"),
    _row("softmax, choice", _ROWS, _PRODUCT, _SOFTMAX, f"if self.normalize: {_NORMALIZE}", _ROUNDED,
         out="logits"),
    _row("softmax, choice", _PRODUCT, _SOFTMAX, "logits, weights.to(x.dtype), ids",
         out="hidden", normalize=False),
    _row("choice, softmax", _PRODUCT, _CHOICE, "logits, F.softmax(chosen, dim=-1), ids",
         out="logits", autocast=False),
    _row("choice, softmax", "logits = F.linear(x, self.weight, self.bias)", _CHOICE,
         "logits, F.softmax(chosen, dim=1, dtype=chosen.dtype), ids", out="logits"),
    _row("choice, softmax", "logits = F.linear(x, self.weight).float()", _CHOICE,
         "logits, F.softmax(chosen, dim=-1).type_as(x), ids", out="hidden", wide_logits=True),
    Structure("softmax, groups", softmax_groups, {**_WIDE, "normalize": False}),
    _row("sigmoid, groups", *_GROUPS, "logits, weights * self.scale, ids", **_SIGMOID_GROUPS),
    _row("sigmoid, groups", *_GROUPS, _RESULT, **_SIGMOID_GROUPS),
    _row("sigmoid", _ROWS, "logits = F.linear(x.float(), self.weight.float())",
         "scores = torch.sigmoid(logits)", _IDS_GIVEN, _GATHER,
         "weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)",
         "logits, weights * self.scale, ids", **_GIVEN, **_SIGMOID, **_WIDE),
    _row("sigmoid", _ROWS, _ROUNDED_PRODUCT, _SCORES, _IDS, _GATHER, _NORMALIZE, _RESULT,
         **_SIGMOID, product="weight"),
    _row("sigmoid", _ROWS, _ROUNDED_PRODUCT, _SCORES, _IDS_GIVEN, _GATHER, _NORMALIZE, _RESULT,
         **_GIVEN, **_SIGMOID, product="weight"),
)  # fmt: skip
