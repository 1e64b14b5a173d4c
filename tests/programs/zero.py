"""DeepSpeed's ZeRO, on two processes."""

import torch
from program import batches, case, model, on_gpu

PROGRAM, DISTRIBUTION = "DeepSpeed", "deepspeed"
PACKAGES, ALONE = "hjson py-cpuinfo msgpack psutil einops", "deepspeed==0.19.8"
CASES = []
CHEAP = True


@case(CASES, "ZeRO-2", "`tigon.apply(model)` before `initialize`", {"stage": 2}, processes=2)
@case(CASES, "ZeRO-3", "the same", {"stage": 3}, processes=2)
@case(CASES, "ZeRO-3, checkpointing", "the same", {"stage": 3}, True, processes=2)
@case(CASES, "ZeRO-3, hpZ", "the same", {"stage": 3, "zero_hpz_partition_size": 2}, processes=2)
def zero(with_tigon, folder, settings, checkpointing=False):
    import deepspeed

    deepspeed.init_distributed(dist_backend="nccl" if on_gpu() else "gloo", verbose=False)
    made = model()
    if checkpointing:
        made.gradient_checkpointing_enable({"use_reentrant": False})
    if with_tigon:
        import tigon

        report = tigon.apply(made)
    settings = {
        "train_micro_batch_size_per_gpu": 2, "zero_allow_untested_optimizer": True, "gradient_clipping": 100.0,
        "zero_optimization": {"stage3_param_persistence_threshold": 0, "overlap_comm": False, **settings},
    }  # fmt: skip
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2)
    engine = deepspeed.initialize(model=made, optimizer=optimizer, config=settings)[0]
    said = []
    for inputs in batches(2):
        loss = engine(**inputs).loss
        engine.backward(loss)
        engine.step()
        said += [float(loss.detach()), float(engine.get_global_grad_norm())]
    if with_tigon:
        report.check()
    return said
