"""Megatron's tensor parallelism over two processes: what the processes of distributed_cases.py run of it."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from two_processes import case

PACKAGE = "megatron"
VARIANTS = {
    "plain": ({},),
    "tied": ({"tied": True},),
    "gelu bias": ({"activation_func": F.gelu, "add_bias_linear": True},),
}


@case(needs=PACKAGE, **VARIANTS)
def megatron_tensor_parallel(options):
    import megatron_tiny as tiny

    import tigon.megatron as tm

    with tiny.megatron(tensor_parallel=2):
        model = tiny.gpt(**options)
        want = tiny.step(model)
        report = tm.apply(model)
        tiny.same(tiny.step(model), want)
        assert [report.count(slot) for slot in ("norm", "mlp", "rope", "loss")] == [5, 2, 2, 0], report
        (left,) = report.left
        assert "tensor parallel over 2 processes" in left.reason, left
        tm.undo(model)
        assert torch.equal(tiny.step(model)[0], want[0])


@case(needs=PACKAGE)
def megatron_sequence_parallel():
    """Norms in the specs' slots: Megatron's own refuse sequence parallelism."""
    import megatron_tiny as tiny

    import tigon.megatron as tm

    with tiny.megatron(tensor_parallel=2):
        want = tiny.step(tiny.gpt())
        model = tiny.gpt(tm.gpt_block_spec, sequence_parallel=True)
        tm.apply(model)
        loss, grads = tiny.step(model)
        partial = [name for name, p in model.named_parameters() if getattr(p, "sequence_parallel", False)]
        assert len(partial) == 5 and all("norm" in name for name in partial), partial
        for name in partial:  # as finalize_model_grads does
            dist.all_reduce(grads[name])
        tiny.same((loss, grads), want)


@case(needs=PACKAGE)
def megatron_groups_of_one():
    """A head that no process shares, in a world of two."""
    import megatron_tiny as tiny

    import tigon.megatron as tm

    with tiny.megatron(tensor_parallel=1):
        model = tiny.gpt(tensor_model_parallel_size=1)
        want = tiny.step(model)
        report = tm.apply(model)
        tiny.same(tiny.step(model), want)
        assert report.head_calls.fused == 1 and not report.left
