"""Cases of two processes: transformers' own parallelism, of data, tensors and experts."""

from __future__ import annotations

from unittest import mock

import torch
import torch.distributed as dist
from tiny import VOCABULARY, close, make, step
from two_processes import FOLDER, case, data, full, fused, rank, two_steps, wanted

from tigon.integrations.transformers import apply, experts


def load(folder, config, **options):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        folder, distributed_config=config, dtype=torch.float32, attn_implementation="eager", **options
    ).train()


def saved(folder, family, **changes):
    path = folder / "_".join([family, *map(str, changes.values())])
    if rank() == 0 and not path.exists():
        make(family, **changes).save_pretrained(path)
    dist.barrier()
    return path


@case(untied=("llama",), tied=("llama_bias_tied",))
def transformers_fsdp2(family):
    from transformers.distributed import DistributedConfig

    losses, want = wanted(make(family))
    model = load(saved(FOLDER[0], family), DistributedConfig(fsdp_size=2))
    report = apply(model)
    two_steps(model, losses, want)
    fused(report, 2)


@case(untied=("llama",), tied=("llama_bias_tied",))
def transformers_tensor_parallel(family):
    """Norms, MLPs and rope are Tigon's; the sharded head is left, and the report says so."""
    from transformers.distributed import DistributedConfig

    even = {"vocab_size": VOCABULARY + 1}  # some versions of transformers shard no odd vocabulary
    loss, want = step(make(family, **even), data(0))
    model = load(saved(FOLDER[0], family, **even), DistributedConfig(tp_size=2, tp_plan="auto"))
    report = apply(model)
    assert (report.count("norm"), report.count("mlp"), report.count("loss")) == (5, 2, 0), str(report)
    assert "tensor parallel" in next(entry.reason for entry in report.left if entry.slot == "loss")
    got = model(**data(0)).loss
    got.backward()
    close(full(got.detach()), loss)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            close(full(parameter.grad), want[name], ulps=512)


@case(all_reduce=("all_reduce",), all_to_all=("all_to_all",))
def expert_parallel(how):
    """Each process holds half of the experts; the ids of the other half are not here."""
    from transformers.distributed import DistributedConfig

    changes = {"experts_implementation": "grouped_mm", "vocab_size": VOCABULARY + 1}
    loss, want = step(make("mixtral", **changes), data(0))
    config = DistributedConfig(tp_size=2, ep_size=2, tp_plan="auto", ep_implementation=how)
    model = load(saved(FOLDER[0], "mixtral", **changes), config)
    report = apply(model)
    assert report.count("experts") == 2, str(report)
    assert all("tigon.experts" in entry.by for entry in report.replaced if entry.slot == "experts")
    assert model.model.layers[0].mlp.experts.num_experts == 2
    with mock.patch.object(experts, "experts", wraps=experts.experts) as called:
        got = model(**data(0)).loss
    assert called.call_count == 2
    got.backward()
    close(full(got.detach()), loss)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            close(full(parameter.grad), want[name], ulps=512)
