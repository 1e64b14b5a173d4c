"""Routers of experts, as models write them: references for `modules.match`, and what tigon.route is told.

A reference returns logits, weights and ids. Its options and attribute names are fields of
`routers.RouterSpec`; `method` is DeepSeek-V2's way to choose.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tigon.integrations.transformers.patterns.modules import Structure


def softmax_then_choice(self, x):
    x = x.reshape(-1, self.hidden)
    logits = F.linear(x, self.weight)
    weights, ids = torch.topk(F.softmax(logits.float(), dim=-1), self.top_k, dim=-1)
    weights /= weights.sum(dim=-1, keepdim=True)
    return logits, weights, ids


def softmax_then_choice_rounded(self, x):
    x = x.reshape(-1, self.hidden)
    logits = F.linear(x, self.weight)
    weights, ids = torch.topk(F.softmax(logits.float(), dim=-1), self.top_k, dim=-1)
    weights /= weights.sum(dim=-1, keepdim=True)
    return logits, weights.to(logits.dtype), ids


def softmax_then_choice_optional(self, x):
    x = x.reshape(-1, self.hidden)
    logits = F.linear(x, self.weight)
    weights, ids = torch.topk(F.softmax(logits.float(), dim=-1), self.top_k, dim=-1)
    if self.normalize:
        weights /= weights.sum(dim=-1, keepdim=True)
    return logits, weights.to(logits.dtype), ids


def softmax_alone(self, x):
    logits = F.linear(x, self.weight)
    weights, ids = torch.topk(F.softmax(logits.float(), dim=-1), self.top_k, dim=-1)
    return logits, weights.to(x.dtype), ids


def choice_then_softmax(self, x):
    logits = F.linear(x, self.weight)
    chosen, ids = torch.topk(logits, self.top_k, dim=-1)
    return logits, F.softmax(chosen, dim=-1), ids


def choice_then_softmax_bias(self, x):
    logits = F.linear(x, self.weight, self.bias)
    chosen, ids = torch.topk(logits, self.top_k, dim=-1)
    return logits, F.softmax(chosen, dim=1, dtype=chosen.dtype), ids


def choice_then_softmax_wide(self, x):
    logits = F.linear(x, self.weight).float()
    chosen, ids = torch.topk(logits, self.top_k, dim=-1)
    return logits, F.softmax(chosen, dim=-1).type_as(x), ids


def softmax_groups(self, x):
    x = x.view(-1, self.hidden)
    logits = F.linear(x.float(), self.weight.float())
    scores = F.softmax(logits.float(), dim=-1)
    if self.method == "greedy":
        weights, ids = torch.topk(scores, self.top_k, dim=-1)
    elif self.method == "group_limited_greedy":
        groups = scores.view(-1, self.num_groups, self.num_experts // self.num_groups)
        group_scores = groups.max(dim=-1).values
        chosen = torch.topk(group_scores, self.top_groups, dim=-1)[1]
        mask = torch.zeros_like(group_scores)
        mask.scatter_(1, chosen, 1)
        mask = mask.unsqueeze(-1).expand(-1, self.num_groups, self.num_experts // self.num_groups)
        scores = scores.masked_fill(~mask.reshape(-1, self.num_experts).bool(), 0.0)
        weights, ids = torch.topk(scores, self.top_k, dim=-1)
    weights = weights * self.scale
    return logits, weights, ids


def _choice_of_groups(scores, top_k, num_experts, num_groups, top_groups):
    groups = scores.view(-1, num_groups, num_experts // num_groups)
    group_scores = groups.topk(2, dim=-1)[0].sum(dim=-1)
    chosen = torch.topk(group_scores, top_groups, dim=-1)[1]
    mask = torch.zeros_like(group_scores)
    mask.scatter_(1, chosen, 1)
    mask = mask.unsqueeze(-1).expand(-1, num_groups, num_experts // num_groups)
    scores = scores.masked_fill(~mask.reshape(-1, num_experts).bool(), float("-inf"))
    return torch.topk(scores, top_k, dim=-1)[1]


def sigmoid_groups(self, x):
    x = x.view(-1, self.hidden)
    logits = F.linear(x.float(), self.weight.float())
    scores = logits.sigmoid()
    biased = scores + self.correction
    ids = _choice_of_groups(biased, self.top_k, self.num_experts, self.num_groups, self.top_groups)
    weights = scores.gather(1, ids)
    if self.normalize:
        weights /= weights.sum(dim=-1, keepdim=True) + 1e-20
    return logits, weights * self.scale, ids


def sigmoid_groups_unscaled(self, x):
    x = x.view(-1, self.hidden)
    logits = F.linear(x.float(), self.weight.float())
    scores = logits.sigmoid()
    biased = scores + self.correction
    ids = _choice_of_groups(biased, self.top_k, self.num_experts, self.num_groups, self.top_groups)
    weights = scores.gather(1, ids)
    if self.normalize:
        weights /= weights.sum(dim=-1, keepdim=True) + 1e-20
    return logits, weights, ids


def sigmoid_bias_given(self, x, correction):
    x = x.reshape(-1, self.hidden)
    logits = F.linear(x.float(), self.weight.float())
    scores = torch.sigmoid(logits)
    ids = torch.topk(scores + correction, self.top_k, dim=-1)[1]
    weights = scores.gather(1, ids)
    weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return logits, weights * self.scale, ids


def sigmoid_rounded(self, x):
    x = x.reshape(-1, self.hidden)
    logits = F.linear(x.to(self.weight.dtype), self.weight)
    scores = torch.sigmoid(logits.float())
    ids = torch.topk(scores + self.correction, self.top_k, dim=-1)[1]
    weights = scores.gather(1, ids)
    weights /= weights.sum(dim=-1, keepdim=True)
    return logits, weights, ids


def sigmoid_rounded_bias_given(self, x, correction):
    x = x.reshape(-1, self.hidden)
    logits = F.linear(x.to(self.weight.dtype), self.weight)
    scores = torch.sigmoid(logits.float())
    ids = torch.topk(scores + correction, self.top_k, dim=-1)[1]
    weights = scores.gather(1, ids)
    weights /= weights.sum(dim=-1, keepdim=True)
    return logits, weights, ids


_WIDE = {"product": "float32"}
_SIGMOID = {"score": "sigmoid", "autocast": False}
_SIGMOID_GROUPS = {**_SIGMOID, **_WIDE, "group_score": "sum_of_two"}
ROUTERS = (
    Structure("softmax, choice", softmax_then_choice),
    Structure("softmax, choice", softmax_then_choice_rounded, {"out": "logits"}),
    Structure("softmax, choice", softmax_then_choice_optional, {"out": "logits"}),
    Structure("softmax, choice", softmax_alone, {"out": "hidden", "normalized": False}),
    Structure("choice, softmax", choice_then_softmax, {"out": "logits", "autocast": False}),
    Structure("choice, softmax", choice_then_softmax_bias, {"out": "logits"}),
    Structure("choice, softmax", choice_then_softmax_wide, {"out": "hidden", "wide_logits": True}),
    Structure("softmax, groups", softmax_groups, {**_WIDE, "normalized": False}),
    Structure("sigmoid, groups", sigmoid_groups, _SIGMOID_GROUPS),
    Structure("sigmoid, groups", sigmoid_groups_unscaled, _SIGMOID_GROUPS),
    Structure("sigmoid", sigmoid_bias_given, {**_SIGMOID, **_WIDE}),
    Structure("sigmoid", sigmoid_rounded, {**_SIGMOID, "product": "weight"}),
    Structure("sigmoid", sigmoid_rounded_bias_given, {**_SIGMOID, "product": "weight"}),
)
