"""What a name of liger_kernel computes is a call of tigon: the same bits of results and of gradients.

``cases`` holds these calls to float64. What the interface computes in its own way: test_compat_liger_ops.py.
"""

import re

import pytest
import torch
import torch.nn.functional as F
from test_compat_liger_ops import LABELS, drawn, get, log_probs

import tigon

P, T, H, V = 3, 7, 16, 37  # pairs of answers, their tokens, sizes of a head


def shared(result, logits, asked):
    """The loss, and the results that losses of pairs share; means of logits by the formula."""
    halves = (*result.log_prob.split(P), *(part.mean() for part in logits.split(P)))
    return result.loss, (*halves, result.nll * asked, *result.rewards.split(P))


class Names(dict):
    """Tensors and functions of the lines below; other names are those of liger_kernel."""

    def __missing__(self, name):
        return get(name)

    def __init__(self, device="cpu"):
        at = {"x": (4, 8), "r": (4, 8), "w": (8,), "b": (8,), "cube": (4, 7, 5)}
        at |= {"rows": (2, 3, 8), "scale": (2, 8), "shift": (2, 8)}
        at |= {"q": (2, 5, 3, 8), "k": (2, 5, 3, 8), "h": (2 * P, T, H), "W": (V, H), "bias": (V,)}
        at |= {"tokens": (P * T, H), "bias2": (V,)}
        leaves = {name: drawn(*shape, seed=i) for i, (name, shape) in enumerate(at.items())}
        leaves["lq"] = log_probs(0)
        self.leaves = [t.to(device).requires_grad_() for t in leaves.values()]
        super().__init__(zip(leaves, self.leaves, strict=True))
        at = {"rh": (2 * P, T, H), "rW": (V, H), "old": (2 * P, T), "ref": (2 * P, T), "adv": (2 * P,)}
        at |= {"angle": (3, 2, 5, 4), "th": (P * T, H + 8), "tW": (V, H + 8)}
        given = {name: drawn(*shape, seed=40 + i).to(device) for i, (name, shape) in enumerate(at.items())}
        target = torch.randint(0, V, (2 * P, T), generator=torch.Generator().manual_seed(0), device="cpu")
        target = target.masked_fill(drawn(2 * P, T, seed=9) > 0.5, -100).to(device)
        angle, mask = given["angle"], target != -100
        given |= {"cos": angle.cos(), "sin": angle.sin()}
        given |= {"lp": log_probs(1).to(device), "target": target, "ids": target.clamp(min=0), "mask": mask}
        given |= {"labels": LABELS.to(device), "count": mask.sum(), "first": target[:P].flatten()}
        given |= {"old": given["old"] / 4 - 3.6, "ref": given["ref"] / 4 - 3.6}
        self.update(given, tigon=tigon, torch=torch)
        self.update(twice=lambda t: torch.cat((t, t), -1), of_values=self.of_values, grpo=self.grpo)
        self.update(half=lambda t: torch.cat((t, torch.full_like(t, torch.nan)), -1), policy=self.policy)
        self.update(preference=self.preference, pairs=lambda loss, *ref: loss(self["W"], *self.head(), *ref))

    def head(self):
        return self["h"], self["target"], self["bias"]

    @staticmethod
    def of_values(module, **parameters):
        return lambda *args: torch.func.functional_call(module, parameters, args)

    def preference(self, **options):
        h, target, bias = self.head()
        result = tigon.linear_preference(h, self["W"], target, bias=bias, **options)
        return shared(result, F.linear(h, self["W"], bias).detach(), options["nll"] != 0)

    def grpo(self, **options):
        given = (self[name] for name in ("h", "W", "ids", "mask", "adv", "bias", "ref", "old"))
        return get("LigerFusedLinearGRPOLoss")(**options)(*given)

    def policy(self, **options):
        given = (self[name] for name in ("h", "W", "target", "adv"))
        options = {name: self[name] for name in ("bias", "old", "ref")} | {"kl": 0.04} | options
        result = tigon.linear_policy(*given, clip=(0.2, 0.2), **options)
        return result.loss, (result.kl.sum() / self["count"], (result.clipped != 0).sum() / self["count"])


CALLS = """
LigerSiLUMulFunction.apply(x, r, 0.5, 3.0) == tigon.swiglu(x, r, gate_multiplier=0.5, down_multiplier=3.0)
liger_modulated_rms_norm(rows, w, scale, shift) == tigon.modulated_rms_norm(rows, w, scale, shift, 1e-6)
liger_modulated_rms_norm(rows, None, scale, shift, 1e-6, 1.0, 'gemma') ==
    tigon.modulated_rms_norm(rows, None, scale, shift, 1e-6, offset=1.0, rounding='gemma')
of_values(LigerModulatedRMSNorm(8, 1e-5, 1.0, 'none'), weight=w)(rows, scale) ==
    tigon.modulated_rms_norm(rows, w, scale, None, 1e-5, offset=1.0, rounding='none')
LigerModulatedRMSNorm(8, elementwise_affine=False)(rows, scale, shift) ==
    tigon.modulated_rms_norm(rows, None, scale, shift, 1e-6)
of_values(LigerLayerNorm(8, 1e-5), weight=w, bias=b)(x) == tigon.layer_norm(x, w, b, 1e-5)
LigerSoftmax()(cube) == tigon.softmax(cube)
LigerSparsemax()(cube) == tigon.sparsemax(cube)
LigerSparsemax(1)(cube) == tigon.sparsemax(cube.mT).mT
liger_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos[0], sin[0], rotary_dim=4) ==
    tigon.rope(q.transpose(1, 2), k.transpose(1, 2), cos[0, ..., :2], sin[0, ..., :2], rotary_dim=4)
liger_rotary_pos_emb(q, k, half(cos[0]), half(sin[0]), unsqueeze_dim=2) ==
    tigon.rope(q, k, cos[0], sin[0], unsqueeze_dim=2, rotary_dim=8)
liger_rotary_pos_emb(q, k, twice(cos[0]), twice(sin[0]), 2) ==
    tigon.rope(q, k, cos[0], sin[0], unsqueeze_dim=2, rotary_dim=8)
liger_rotary_pos_emb(q, k, twice(cos[0])[:, :, None], twice(sin[0])[:, :, None], 2) ==
    tigon.rope(q, k, cos[0], sin[0], unsqueeze_dim=2, rotary_dim=8)
liger_rotary_pos_emb(q, k, cos[0], sin[0], unsqueeze_dim=2) ==
    tigon.rope(q, k, cos[0, ..., :2], sin[0, ..., :2], unsqueeze_dim=2, rotary_dim=4)
LigerJSD(0.0)(lq, lp, labels) == tigon.jsd(lq, lp, labels, beta=0.0, log_probs=True)
LigerJSD(0.3, 7)(lq, lp, labels) == tigon.jsd(lq, lp, labels, beta=0.3, log_probs=True, ignore_index=7)
LigerJSD(beta=1.0)(lq, lp) == tigon.jsd(lq, lp, beta=1.0, log_probs=True)
"""
HEADS = """
pairs(LigerFusedLinearDPOLoss(), rh, rW) == preference(ref=(rh, rW), nll=0.0)
pairs(LigerFusedLinearDPOLoss(compute_nll_loss=True, alpha=0.5), rh, rW, bias) ==
    preference(ref=(rh, rW, bias), nll=0.5)
pairs(LigerFusedLinearDPOLoss(average_log_prob=True, beta=0.3, use_ref_model=False)) ==
    preference(beta=0.3, average=True, nll=0.0)
pairs(LigerFusedLinearDPOLoss(loss_type='robust', label_smoothing=0.1), rh, rW) ==
    preference(kind='robust', ref=(rh, rW), label_smoothing=0.1, nll=0.0)
pairs(LigerFusedLinearDPOLoss(loss_type='discopop', discopop_tau=0.1), rh, rW) ==
    preference(kind='discopop', ref=(rh, rW), tau=0.1, nll=0.0)
pairs(LigerFusedLinearCPOLoss(label_smoothing=0.1)) == preference(kind='cpo', label_smoothing=0.1, nll=1.0)
pairs(LigerFusedLinearSimPOLoss(alpha=0.5)) == preference(kind='simpo', gamma=0.5, nll=0.5)
pairs(LigerFusedLinearORPOLoss())[0] == preference(kind='orpo', nll=1.0)[0]
grpo(loss_type='grpo') == policy(normalise='sequence')
grpo(loss_type='bnpo') == policy()
grpo(loss_type='dr_grpo', max_completion_length=9) == policy(denominator=6 * 9)
grpo() == policy(denominator=count)
grpo(loss_type='luspo') == policy(normalise='length', denominator=6)
grpo(loss_type='cispo') == policy(kind='cispo', denominator=count)
grpo(loss_type='sapo', sapo_temperature_pos=1.3) ==
    policy(kind='sapo', tau=(1.3, 1.05), normalise='sequence')
grpo(loss_type='vespo', vespo_k_pos=1.5) ==
    policy(kind='vespo', gamma=(1.5, 3.0, 3.0, 2.0), denominator=count)
grpo(temperature=0.7, delta=1.5, importance_sampling_level='sequence') ==
    policy(temperature=0.7, delta=1.5, level='sequence', denominator=count)
LigerFusedLinearJSD(jsd_beta=0.3, temperature=2.0)(tokens, W, th, tW, first) ==
    tigon.linear_jsd(tokens, W, (th, tW), first, beta=0.3, temperature=2.0)
LigerFusedLinearJSD(1.0)(tokens, W, th, tW) == tigon.linear_jsd(tokens, W, (th, tW), beta=1.0)
LigerFusedLinearJSDLoss()(tokens, W, th, tW, first, bias) ==
    tigon.linear_jsd(tokens, W, (th, tW), first, soft=0.5, hard=0.5, bias=bias,
    denominator=(first != -100).sum())
LigerFusedLinearJSDLoss(1.0, 0.0, 0.4)(tokens, W, th, tW, first) ==
    tigon.linear_jsd(tokens, W, (th, tW), first, beta=0.4, soft=0.0, hard=1.0,
    denominator=(first != -100).sum())
LigerFusedLinearJSDLoss(0.0, 1.0, temperature=0.7)(tokens, W, th, tW, first, bias, bias2) ==
    tigon.linear_jsd(tokens, W, (th, tW, bias2), first, temperature=0.7, bias=bias,
    denominator=(first != -100).sum())
"""


def flat(results):
    return [t for one in results for t in flat(one)] if isinstance(results, tuple) else [results]


def run(text, device):
    """Results of a side of a line, then the gradient of every tensor that it reads."""
    names = Names(device)
    results = flat(eval(text, {}, names))
    sum((y.float() * (i + 1)).sum() for i, y in enumerate(results) if y.requires_grad).backward()
    return results, [x.grad for x in names.leaves]


def lines(text):
    return re.sub(r"\n +", " ", text.strip()).splitlines()


def check(line, device="cpu"):
    (got, gradients), (wanted, others) = (run(text, device) for text in line.split(" == ", 1))
    for one, other in zip(got, wanted, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=1e-4 * (one.dim() == 0), atol=1e-5 * (one.dim() == 0))
    assert torch.equal(got[0], wanted[0])
    assert any(gradient is not None for gradient in others)
    for one, other in zip(gradients, others, strict=True):
        assert one is other is None or torch.equal(one, other)


@pytest.mark.parametrize("line", lines(CALLS))
def test_functions_and_modules(line):
    check(line)


@pytest.mark.parametrize("line", lines(HEADS))
def test_heads(line, device):
    check(line, device)


def test_the_parts_of_a_chunked_jsd():
    """The two losses come too, without their weights."""
    names = Names()
    tokens, weight, teacher, labels = names["tokens"], names["W"], (names["th"], names["tW"]), names["first"]
    loss, soft, hard = get("LigerFusedLinearJSDLoss")(0.3, 0.6, return_soft_hard_loss=True, compiled=False)(
        tokens, weight, *teacher, labels
    )
    torch.testing.assert_close(loss, 0.3 * hard + 0.6 * soft)
    torch.testing.assert_close(hard, F.cross_entropy(tokens @ weight.T, labels))


def test_kto_with_a_reference_point_for_each_answer():
    """Liger broadcasts such a kl over chunks of answers; here it is refused."""
    names = Names()
    (h, target, bias), wanted = names.head(), torch.arange(2 * P) % 2 == 0
    with pytest.raises(tigon.Error, match=r"kl must be one float, got \[6\]"):
        get("LigerFusedLinearKTOLoss")()(h, names["W"], target, bias, wanted, kl=torch.ones(2 * P))


@pytest.mark.parametrize(
    "loss, options, words",
    [
        ("DPO", {"loss_type": "what"}, "Unsupported loss_type: what"),
        ("DPO", {"loss_type": "robust", "label_smoothing": 0.5}, "label_smoothing must be .*, got 0.5"),
        ("GRPO", {"loss_type": "what"}, "Unknown loss type: what"),
        ("GRPO", {"loss_type": "cispo", "importance_sampling_level": "sequence"}, "Sequence-level .*'cispo'"),
        ("GRPO", {"importance_sampling_level": "what"}, "level must be .*, got 'what'"),
        ("GRPO", {"loss_type": "sapo", "sapo_temperature_neg": 0.0}, "tau must be two numbers > 0, got"),
    ],
)
def test_options_that_no_formula_has(loss, options, words):
    names = Names()

    def dpo():
        get("LigerFusedLinearDPOLoss")(**options)(names["W"], *names.head(), names["rh"], names["rW"])

    with pytest.raises(ValueError, match=words):
        dpo() if loss == "DPO" else names.grpo(**options)


def test_vespo_has_the_ratio_of_an_answer_once(device):
    """An importance ratio [B, 1] is a factor of the answer's weight, not of each of its tokens'."""
    names, ratio = Names(device), torch.linspace(0.5, 1.6, 2 * P, device=device).unsqueeze(1)
    (h, target, bias), mask = names.head(), names["mask"]
    old = tigon.linear_log_prob(h, names["W"], target, bias=bias).detach() + 0.1
    module = get("LigerFusedLinearGRPOLoss")(loss_type="vespo", beta=0.0, use_ref_model=False)
    operands = (h, names["W"], names["ids"], mask, names["adv"], bias, None)
    loss, _ = module(*operands, old, vllm_is_ratio=ratio)
    wanted, _ = module(*operands, old - ratio.log() / mask.sum(-1, keepdim=True))
    torch.testing.assert_close(loss, wanted, rtol=1e-4, atol=1e-5)
    assert abs(loss - module(*operands, old)[0]) > 1e-2
