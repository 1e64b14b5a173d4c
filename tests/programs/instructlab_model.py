"""InstructLab's models: Liger's for the layers, and a loss of logits of its own."""

import torch
from program import batches, case, saved_model, tokenizer

PROGRAM, DISTRIBUTION = "InstructLab", "instructlab-training"
PACKAGES, ALONE = "numba rich pydantic aiofiles py-cpuinfo", "instructlab-training==0.16.2"
CASES = []


@case(CASES, "full", "`tigon.compat.liger.install()`, `use_liger=True`", "llama", head=False)
@case(CASES, "full, Granite", "the same", "granite", head=False)
def train(with_tigon, folder, family):
    if with_tigon:
        import tigon.compat.liger

        tigon.compat.liger.install()
    from instructlab.training import model as models
    from instructlab.training.config import DistributedBackend

    kind = models.LigerModel if with_tigon else models.CausalLMModel
    extra = {"output_dir": str(folder)}
    made = kind(
        model_path=saved_model(folder, family), distributed_framework=DistributedBackend.FSDP, noise_alpha=None,
        tokenizer=tokenizer(), **extra,
    )  # fmt: skip
    made.model.train()
    optimizer, said = torch.optim.AdamW(made.model.parameters(), lr=1e-2), []
    for inputs in batches():
        loss, _ = made.compute_loss(
            inputs, world_size=1, samples_in_batch=int((inputs["labels"] != -100).sum())
        )
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in made.model.parameters() if p.grad is not None])
        said += [float(loss.detach()), float(norm)]
        optimizer.step()
        optimizer.zero_grad()
    return said
