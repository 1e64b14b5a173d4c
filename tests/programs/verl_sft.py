"""verl's SFT trainer, and its engine as verl's actor uses it. PPO itself needs Ray, a server of rollouts and GPUs."""

import json
import os
import sys

from program import STEPS, case, on_gpu, pairs, saved_model

PROGRAM, DISTRIBUTION = "verl", "verl"
PACKAGES = (
    "transformers[kernels]==5.10.2 tensordict==0.10.0 accelerate datasets peft hydra-core codetiming dill pandas pyarrow torchdata "
    "ray pylatexenc tensorboard uvicorn fastapi aiohttp trl==0.24.0"
)
ALONE = "verl==0.9.1"
CASES = []
FUSED = {"model.use_fused_kernels": True, "model.fused_kernel_options.impl_backend": "torch"}


@case(
    CASES,
    "SFT, FSDP2",
    "`tigon.compat.liger.install()`, `model.use_liger=True`",
    {},
    "llama",
    processes=2,
    head=False,
)
@case(
    CASES,
    "SFT, FSDP2, fused and tied head",
    "`tigon.compat.verl.install()` too",
    FUSED,
    "llama_bias_tied",
    processes=2,
)
@case(
    CASES,
    "actor's log-probabilities, entropies and PPO loss, FSDP2",
    "the same",
    FUSED,
    "llama_bias_tied",
    True,
    processes=2,
)
@case(
    CASES,
    "SFT, FSDP2, fused and tied head, deterministic",
    "the same, `engine.full_determinism=True`",
    {**FUSED, "engine.full_determinism": True},
    "llama_bias_tied",
    processes=2,
)
def train(with_tigon, folder, settings, family, actor=False):
    if with_tigon:
        import tigon.compat.liger
        import tigon.compat.verl

        tigon.compat.liger.install()
        tigon.compat.verl.install()
    import pandas
    import torch

    rank = int(os.environ["RANK"])
    place = folder / f"rank{rank}"  # each process writes the same files for itself
    place.mkdir()
    data = pairs()
    rows = [
        [{"role": "user", "content": p}, {"role": "assistant", "content": c}]
        for p, c in zip(data["prompt"], data["chosen"], strict=True)
    ]
    pandas.DataFrame({"messages": rows}).to_parquet(place / "rows.parquet")
    os.environ["VERL_FILE_LOGGER_PATH"] = str(place / "log.jsonl")
    options = {
        "data.train_files": place / "rows.parquet", "data.train_batch_size": 4, "data.micro_batch_size_per_gpu": 2,
        "data.use_dynamic_bsz": False, "data.max_length": 256, "data.num_workers": 0, "data.max_token_len_per_gpu": 512,
        "model.path": saved_model(place, family), "model.use_remove_padding": False, "model.use_liger": with_tigon,
        "+model.override_config.attn_implementation": "eager", "model.enable_gradient_checkpointing": False,
        "engine.strategy": "fsdp2", "engine.use_torch_compile": False,
        "+engine.mixed_precision": "{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}",
        "trainer.device": "cuda" if on_gpu() else "cpu", "trainer.logger": "[file]", "trainer.total_training_steps": STEPS,
        "trainer.n_gpus_per_node": 2, "trainer.default_local_dir": folder / "out", "trainer.resume_mode": "disable",
        **settings,
    }  # fmt: skip
    sys.argv = ["sft_trainer", *(f"{name}={value}" for name, value in options.items())]
    from verl.trainer import sft_trainer
    from verl.utils import distributed

    if not on_gpu():
        cpu_platform()
        distributed.initialize_global_process_group = torch.distributed.init_process_group
    if actor:
        steps_of_actor()
    sft_trainer.main()
    if with_tigon:
        from tigon._deterministic import is_deterministic

        assert is_deterministic() == ("engine.full_determinism" in settings)
    if rank:
        return []
    steps = [json.loads(line)["data"] for line in (place / "log.jsonl").read_text().splitlines()]
    return [float(step[name]) for step in steps for name in ("train/loss", "train/grad_norm") if name in step]


def steps_of_actor():
    """The trainer's steps with the actor's loss in the place of its own."""
    import torch
    from verl.trainer.ppo.core_algos import agg_loss, get_policy_loss_fn
    from verl.utils import tensordict_utils
    from verl.workers.config import ActorConfig
    from verl.workers.engine_workers import TrainingWorker
    from verl.workers.utils import losses

    options = ActorConfig(strategy="fsdp2", ppo_micro_batch_size_per_gpu=2, rollout_n=1)
    train_batch = TrainingWorker.train_batch

    def loss(config, model_output, data, dp_group=None):
        log_prob, entropy = (model_output[name].values()[None] for name in ("log_probs", "entropy"))
        mask = torch.roll(data["loss_mask"].values(), -1)[None]
        advantages = torch.linspace(-1, 1, mask.numel())[None]
        before = log_prob.detach() + 0.3 * torch.sin(torch.arange(mask.numel()))
        policy, _ = get_policy_loss_fn("vanilla")(before, log_prob, advantages, mask, config=options)
        return policy - 0.1 * agg_loss(entropy, mask, "token-mean"), {}

    def with_entropy(self, data):
        tensordict_utils.assign_non_tensor(data, calculate_entropy=True)
        return train_batch(self, data)

    losses.sft_loss, TrainingWorker.train_batch = loss, with_entropy


def cpu_platform():
    """verl's description of a device, for one that it does not know."""
    import torch
    from verl.plugin.platform.platform_cuda import PlatformCUDA
    from verl.plugin.platform.platform_manager import set_platform

    class CPU(PlatformCUDA):
        device_name, device_module = "cpu", torch.cpu

        def is_available(self):
            return True

        def communication_backend_name(self):
            return "gloo"

        def current_device(self):
            return "cpu"

        def device_count(self):
            return 1

        def set_device(self, index):
            pass

        synchronize = set_allocator_settings = set_device

        def empty_cache(self):
            pass

        manual_seed = manual_seed_all = staticmethod(torch.manual_seed)

    set_platform(CPU())
    for name in (
        "memory_reserved",
        "memory_allocated",
        "max_memory_reserved",
        "max_memory_allocated",
        "empty_cache",
    ):
        setattr(torch.cpu, name, lambda *args: 0)
    from verl.workers.engine import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    EngineRegistry.register("language_model", ["fsdp2"], device="cpu")(FSDPEngineWithLMHead)
