"""Routers of experts.

A row returns logits, weights and ids. Its options and attribute names are fields of `routers.RouterSpec`;
`method` is DeepSeek-V2's way to choose.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tigon.integrations.transformers.recognition import form


def _masked(scores, group_scores, num_experts, num_groups, top_groups, value):
    chosen = torch.topk(group_scores, top_groups, dim=-1)[1]
    mask = torch.zeros_like(group_scores)
    mask.scatter_(1, chosen, 1)
    mask = mask.unsqueeze(-1).expand(-1, num_groups, num_experts // num_groups)
    return scores.masked_fill(~mask.reshape(-1, num_experts).bool(), value)


def _group_choice(scores, top_k, num_experts, num_groups, top_groups):
    best = scores.view(-1, num_groups, num_experts // num_groups).topk(2, dim=-1)[0].sum(dim=-1)
    scores = _masked(scores, best, num_experts, num_groups, top_groups, float("-inf"))
    return torch.topk(scores, top_k, dim=-1)[1]


def _logits(self, x):
    return F.linear(x.reshape(-1, self.hidden), self.weight)


def _logits_of_rounded(self, x):
    return F.linear(x.reshape(-1, self.hidden).to(self.weight.dtype), self.weight)


def _softmax(logits, top_k):
    return torch.topk(F.softmax(logits.float(), dim=-1), top_k, dim=-1)


def _normalised_weights(weights):
    return weights / weights.sum(dim=-1, keepdim=True)


def softmax(self, x):
    logits = _logits(self, x)
    weights, ids = _softmax(logits, self.top_k)
    return logits, _normalised_weights(weights), ids


def softmax_rounded(self, x):
    logits = _logits(self, x)
    weights, ids = _softmax(logits, self.top_k)
    return logits, _normalised_weights(weights).to(logits.dtype), ids


def softmax_maybe_normalised(self, x):
    logits = _logits(self, x)
    weights, ids = _softmax(logits, self.top_k)
    if self.normalize:
        weights = _normalised_weights(weights)
    return logits, weights.to(logits.dtype), ids


def softmax_as_it_is(self, x):
    logits = F.linear(x, self.weight)
    weights, ids = _softmax(logits, self.top_k)
    return logits, weights.to(x.dtype), ids


def choice_softmax(self, x):
    logits = F.linear(x, self.weight)
    chosen, ids = torch.topk(logits, self.top_k, dim=-1)
    return logits, F.softmax(chosen, dim=-1), ids


def choice_softmax_with_bias(self, x):
    logits = F.linear(x, self.weight, self.bias)
    chosen, ids = torch.topk(logits, self.top_k, dim=-1)
    return logits, F.softmax(chosen, dim=1, dtype=chosen.dtype), ids


def choice_softmax_of_wide(self, x):
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
        best = scores.view(-1, self.num_groups, self.num_experts // self.num_groups).max(dim=-1).values
        scores = _masked(scores, best, self.num_experts, self.num_groups, self.top_groups, 0.0)
        weights, ids = torch.topk(scores, self.top_k, dim=-1)
    return logits, weights * self.scale, ids


def _best_in_groups(self, x):
    x = x.view(-1, self.hidden)
    logits = F.linear(x.float(), self.weight.float())
    scores = logits.sigmoid()
    biased = scores + self.correction
    ids = _group_choice(biased, self.top_k, self.num_experts, self.num_groups, self.top_groups)
    return logits, scores.gather(1, ids), ids


def sigmoid_groups(self, x):
    logits, weights, ids = _best_in_groups(self, x)
    if self.normalize:
        weights /= weights.sum(dim=-1, keepdim=True) + 1e-20
    return logits, weights, ids


def sigmoid_groups_scaled(self, x):
    logits, weights, ids = _best_in_groups(self, x)
    if self.normalize:
        weights /= weights.sum(dim=-1, keepdim=True) + 1e-20
    return logits, weights * self.scale, ids


def _sigmoid(scores, correction, top_k):
    ids = torch.topk(scores + correction, top_k, dim=-1)[1]
    return scores.gather(1, ids), ids


def sigmoid_wide(self, x, correction):
    logits = F.linear(x.reshape(-1, self.hidden).float(), self.weight.float())
    weights, ids = _sigmoid(torch.sigmoid(logits), correction, self.top_k)
    return logits, weights / (weights.sum(dim=-1, keepdim=True) + 1e-20) * self.scale, ids


def sigmoid_given(self, x, correction):
    logits = _logits_of_rounded(self, x)
    weights, ids = _sigmoid(torch.sigmoid(logits.float()), correction, self.top_k)
    return logits, _normalised_weights(weights), ids


_WIDE_LOGITS = {"product": "float32"}
_SIGMOID = {"score": "sigmoid", "autocast": False}
_SIGMOID_GROUPS = {**_SIGMOID, **_WIDE_LOGITS, "group_score": "sum_of_two"}
ROUTERS = (
    form("softmax, choice", softmax),
    form("softmax, choice", softmax_rounded, out="logits"),
    form("softmax, choice", softmax_maybe_normalised, out="logits"),
    form("softmax, choice", softmax_as_it_is, out="hidden", normalize=False),
    form("choice, softmax", choice_softmax, out="logits", autocast=False),
    form("choice, softmax", choice_softmax_with_bias, out="logits"),
    form("choice, softmax", choice_softmax_of_wide, out="hidden", wide_logits=True),
    form("softmax, groups", softmax_groups, **_WIDE_LOGITS, normalize=False),
    form("sigmoid, groups", sigmoid_groups_scaled, **_SIGMOID_GROUPS),
    form("sigmoid, groups", sigmoid_groups, **_SIGMOID_GROUPS),
    form("sigmoid", sigmoid_wide, **_SIGMOID, **_WIDE_LOGITS),
    form("sigmoid", lambda self, x: sigmoid_given(self, x, self.correction), **_SIGMOID, product="weight"),
    form("sigmoid", sigmoid_given, **_SIGMOID, product="weight"),
)
