"""OpenRLHF's Actor: log-probabilities of a policy and their gradients. Its trainers need Ray, vLLM and GPUs."""

import torch
from program import batches, case, saved_model, stand_in

PROGRAM, DISTRIBUTION = "OpenRLHF", "openrlhf"
PACKAGES = (
    "transformers[kernels]==5.15.0 accelerate datasets peft optree torchmetrics einops loralib jsonlines pylatexenc ninja hjson "
    "py-cpuinfo msgpack"
)
ALONE = "openrlhf==0.11.2 optimum deepspeed==0.19.6"
CASES = []


@case(
    CASES, "Actor, log-probabilities", "`tigon.compat.liger.install()`, `use_liger_kernel=True`", head=False
)
def actor(with_tigon, folder):
    if with_tigon:
        import tigon.compat.liger

        tigon.compat.liger.install()
    stand_in("flash_attn", "flash_attn.bert_padding", "flash_attn.utils", "flash_attn.utils.distributed")
    from openrlhf.models.actor import Actor

    made = Actor(saved_model(folder), attn_implementation="eager", use_liger_kernel=with_tigon).float()
    optimizer, said = torch.optim.AdamW(made.parameters(), lr=1e-2), []
    for inputs in batches():
        mask = inputs["attention_mask"]
        log_prob, output = made(
            inputs["input_ids"],
            action_mask=mask[:, 1:],
            attention_mask=mask,
            return_output=True,
            return_entropy=True,
        )
        loss = -(log_prob.mean() + 0.1 * output.entropy.mean())
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in made.parameters() if p.grad is not None])
        said += [float(loss.detach()), float(norm)]
        optimizer.step()
        optimizer.zero_grad()
    return said
