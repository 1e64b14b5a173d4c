"""Contrastive losses of two processes' batches as one."""

import functools

import torch
import torch.distributed as dist
from two_processes import case, device_type, rank, refused

import tigon


@case(
    rows=({"symmetric": True},),
    learned=({"symmetric": True, "several": True, "temperature": 0.2, "margin": 0.4, "chunk_rows": 5},),
    one_sided=({"reduction": "none", "ids": True},),
)
def contrastive_group(options):
    """The loss and every gradient are those of one process with both batches."""
    n, m, size = 19, 31, 24
    generator = torch.Generator().manual_seed(3)
    q, d = (
        torch.randn(2, rows, size, generator=generator, device="cpu").to(device_type()) for rows in (n, m)
    )
    d[:, :n] += q
    own = slice(rank(), rank() + 1)
    options = dict(options)
    several, ids = options.pop("several", False), options.pop("ids", False)
    labels = torch.arange(n, device=q.device)
    if several:
        labels = torch.stack([labels, (labels + 12).where(labels % 3 > 0, -100)], 1)
    codes = [torch.arange(2 * rows, device=q.device).view(2, rows) % 13 for rows in (n, m)]
    temperature = options.pop("temperature", None)

    def step(q, d, labels, codes, group):
        leaves = [x.flatten(0, 1).clone().requires_grad_() for x in (q, d)]
        given = dict(options, group=group)
        if temperature is not None:
            leaves.append(torch.tensor(temperature, device=q.device, requires_grad=True))
            given["temperature"] = leaves[2]
        if ids:
            given["ids"] = [x.flatten() for x in codes]
        loss = tigon.contrastive_loss(*leaves[:2], labels, **given)
        weights = torch.linspace(0.5, 1.5, 2 * n, device=q.device)
        part = weights.view(2, n)[own].flatten() if group else weights
        return loss.detach(), torch.autograd.grad((loss * part).sum() if loss.dim() else loss, leaves)

    alike = torch.cat([torch.where(labels >= 0, labels + m * r, labels) for r in range(2)])
    want, whole = step(q, d, alike, codes, None)
    got, grads = step(q[own], d[own], labels, [x[own] for x in codes], dist.group.WORLD)
    part = slice(rank() * n, rank() * n + n) if want.dim() else ()
    torch.testing.assert_close(got, want[part], rtol=1e-5, atol=1e-5)
    for found, exact, rows in zip(grads, whole, (n, m, None), strict=False):
        if rows is None:
            dist.all_reduce(found)
        torch.testing.assert_close(
            found, exact if rows is None else exact[rank() * rows :][:rows], rtol=1e-4, atol=1e-6
        )


@case
def contrastive_group_refuses():
    """Batches of other sizes, other options, a refusal of one process: every process says so, none waits."""
    first, world = rank() == 0, dist.group.WORLD
    q, d = (torch.randn(rows + rank(), 8) for rows in (4, 9))
    refused(lambda: tigon.contrastive_loss(q, d, group=world), "the number of rows must be the same")
    q, other = q[:4], f"in process {1 - rank()}"
    call = functools.partial(tigon.contrastive_loss, q, d, group=world)
    differ = {"symmetric": (True, False), "temperature": (0.05, torch.tensor(0.06)), "margin": (0.1, None)}
    differ |= {"relative_margin": (True, False), "sizes": ((4, 8), (8, 4)), "size_weights": ((2.0,), None)}
    differ |= {"normalize": (True, False), "reduction": ("sum", "mean"), "labels": (torch.arange(4), None)}
    differ |= {"ids": ((torch.arange(4), torch.arange(len(d))), None)}
    for name, values in differ.items():
        given = {"margin": 0.2} if name == "relative_margin" else {}
        given[name] = values[rank()]
        if name == "temperature" and device_type() != "cpu":  # nobody reads it on the host
            given[name] = float(given[name])
        refused(functools.partial(call, **given), "the options must be the same", name, other)
    bad = {"temperature": -1.0, "sizes": (9,), "labels": torch.arange(3), "margin": "x", "reduction": "no"}
    for name, value in bad.items():
        given = {name: value} if first else {}
        refused(functools.partial(call, **given), name if first else "process 0 of the group has refused")
    refused(lambda: tigon.contrastive_loss(q if first else None, d, group=world), *(["refused"] * first))
    for frozen in range(2):
        leaves = [x.clone().requires_grad_(i != frozen or first) for i, x in enumerate((q, d))]
        refused(lambda leaves=leaves: tigon.contrastive_loss(*leaves, group=world), "require grad must be")
    assert call().isfinite()


@case(
    needs="sentence_transformers>=6",
    one_sided=("MultipleNegativesRankingLoss", 3, {}),
    both=("CachedMultipleNegativesSymmetricRankingLoss", 3, {"mini_batch_size": 5}),
    all_directions=(
        "MultipleNegativesRankingLoss",
        3,
        {"directions": ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc"), "scale": 5.0},
    ),
    gist=("GISTEmbedLoss", 3, {"margin": 0.1}),
    cached_gist=("CachedGISTEmbedLoss", 4, {"margin_strategy": "relative", "margin": 0.2}),
)
def sentence_transformers_gathers(name, count, options):
    """Embeddings gathered from both processes: stock's loss and gradients."""
    import test_sentence_transformers as single

    leaves = [x.detach()[7 * rank() :][:7].requires_grad_() for x in single.columns(count, n=14)]
    guide = [x.detach()[7 * rank() :][:7] for x in single.columns(count + 10, n=14, size=17)[:count]]
    loss, run = single.loss_of(name, gather_across_devices=True, **options), single.step_of(name, guide)
    assert not single.integration._why_not(loss)
    want = run(loss, leaves)
    single.integration.install()
    got = run(loss, leaves)
    single.integration.uninstall()
    torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got[1], want[1], rtol=1e-4, atol=1e-6)
