"""accelerate with FSDP2, on two processes."""

import torch
from program import case, loop, model, on_gpu

PROGRAM, DISTRIBUTION = "accelerate", "accelerate"
PACKAGES, ALONE = "accelerate==1.15.0", ""
CASES = []


@case(CASES, "FSDP2", "`tigon.apply(model)` before `prepare`", processes=2)
@case(CASES, "FSDP2, activation checkpointing", "the same", True, processes=2)
def fsdp2(with_tigon, folder, checkpointing=False):
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", reshard_after_forward=True,
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"], cpu_ram_efficient_loading=False,
        activation_checkpointing=checkpointing,
    )  # fmt: skip
    accelerator = Accelerator(cpu=not on_gpu(), fsdp_plugin=plugin)
    made = model()
    if with_tigon:
        import tigon

        report = tigon.apply(made)
    made, optimizer = accelerator.prepare(made, torch.optim.AdamW(made.parameters(), lr=1e-2))
    said = loop(made, optimizer, accelerator.backward, processes=2)
    if with_tigon:
        report.check()
    return said
