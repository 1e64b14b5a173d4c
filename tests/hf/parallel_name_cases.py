"""Cases of two processes for the sharded losses that other libraries' names stand for."""

import torch
import torch.distributed as dist
from parallel_cases import group, problem
from two_processes import case, rank, refused

import tigon


def half(tensor):
    """This process's of two equal shards."""
    return tensor.chunk(2)[rank()].clone()


@case
def parallel_liger_names():
    """The sharded loss of the liger_kernel interface."""
    from tigon.integrations.liger.megatron import LigerMegatronCrossEntropy

    logits = problem(torch.float32, 1)["hidden"][:4, :2, :22].contiguous()
    labels = torch.arange(8).view(4, 2)
    own = logits.chunk(2, -1)[rank()]
    for smoothing in (0.0, 0.1):
        loss = LigerMegatronCrossEntropy(
            label_smoothing=smoothing, label_smoothing_formula="pytorch", label_smoothing_mode="global"
        )
        whole = tigon.cross_entropy(logits, labels, label_smoothing=smoothing, reduction="none")
        torch.testing.assert_close(loss(own, labels, group()), whole, rtol=1e-5, atol=1e-5)
    smoothed = LigerMegatronCrossEntropy(label_smoothing=0.1)
    refused(lambda: smoothed(own, labels, group()), "label_smoothing_mode must be 'global'")
    alone = smoothed(logits, labels)
    whole = tigon.cross_entropy(logits, labels, label_smoothing=0.1 * 22 / 21, reduction="none")
    assert torch.equal(alone, whole)


@case
def parallel_verl_head():
    """verl's function over a group: its results, and hidden's gradient in parts that sum up."""
    from tigon.integrations.verl import LogProbHead

    p = problem(torch.float32, 17)
    p["weight"] = p["weight"][:250].clone()
    target = p["target"].clamp(min=0).flatten() % 250
    hidden = p["hidden"].flatten(0, 1).clone().requires_grad_()
    weight = half(p["weight"]).requires_grad_()
    whole = [hidden.detach().clone().requires_grad_(), p["weight"].clone().requires_grad_()]
    results = LogProbHead(None)(hidden, weight, target, 0.9, "none", group())
    wanted = tigon.linear_log_prob(*whole, target, temperature=0.9, entropy=True)
    torch.testing.assert_close(results, wanted, rtol=1e-5, atol=1e-5)
    sum(r.sum() for r in results).backward()
    sum(r.sum() for r in wanted).backward()
    dist.all_reduce(hidden.grad)  # what verl's gather of the shares does
    torch.testing.assert_close(hidden.grad, whole[0].grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(weight.grad, half(whole[1].grad), rtol=1e-4, atol=1e-4)
