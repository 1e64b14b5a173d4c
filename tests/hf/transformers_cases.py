"""Cases of two processes: transformers' own parallelism, of data, tensors and experts."""

from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tiny import VOCABULARY, close, make, step
from two_processes import FOLDER, case, data, full, fused, rank, two_steps, wanted

from tigon.integrations.transformers import apply, experts, undo
from tigon.parallel import dtensor


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
    """Norms, MLPs and rope are Tigon's, and the sharded head, whose loss is that of tigon.parallel."""
    from transformers.distributed import DistributedConfig

    even = {"vocab_size": VOCABULARY + 1}  # some versions of transformers shard no odd vocabulary
    loss, want = step(make(family, **even), data(0))
    model = load(saved(FOLDER[0], family, **even), DistributedConfig(tp_size=2, tp_plan="auto"))
    report = apply(model)
    assert (report.count("norm"), report.count("mlp"), report.count("loss")) == (5, 2, 1), str(report)
    with mock.patch.object(dtensor, "loss", wraps=dtensor.loss) as head:
        got = model(**data(0)).loss
    assert head.call_count == 1
    got.backward()
    check_tensor_parallel(model, got, loss, want)
    fused(report, 1)
    logits = model(**data(0)).logits[..., :60].flatten(0, 1)  # classes of one process and some of the other's
    target = torch.arange(logits.shape[0]) * 2
    some = F.cross_entropy(logits, target)
    assert report.head_calls.fused == 3  # the model had its own loss
    touched = logits.exp().log()  # stock's matmul, gathered
    assert report.head_calls.materialised == 1
    assert type(touched) is torch.Tensor
    close(some.detach(), F.cross_entropy(touched, target).detach(), ulps=64)
    model.zero_grad()
    undo(model)
    got = model(**data(0)).loss
    assert report.head_calls.lazy == 2
    got.backward()
    check_tensor_parallel(model, got, loss, want)


def check_tensor_parallel(model, got, loss, want):
    close(full(got.detach()), loss)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            close(full(parameter.grad), want[name], ulps=512)


@case(needs="transformers>=5.19", all_reduce=("all_reduce",), all_to_all=("all_to_all",))
def expert_parallel(implementation):
    """Each process holds half of the experts; the ids of the other half are not here."""
    from transformers.distributed import DistributedConfig

    changes = {"experts_implementation": "grouped_mm", "vocab_size": VOCABULARY + 1}
    loss, want = step(make("mixtral", **changes), data(0))
    config = DistributedConfig(tp_size=2, ep_size=2, tp_plan="auto", ep_implementation=implementation)
    model = load(saved(FOLDER[0], "mixtral", **changes), config)
    report = apply(model)
    assert report.count("experts") == 2, str(report)
    assert all("tigon.experts" in entry.by for entry in report.replaced if entry.slot == "experts")
    assert model.model.layers[0].mlp.experts.num_experts == 2
    with mock.patch.object(experts, "experts", wraps=experts.experts) as called:
        got = model(**data(0)).loss
    assert called.call_count == 2
    got.backward()
    check_tensor_parallel(model, got, loss, want)
