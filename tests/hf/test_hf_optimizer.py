"""tigon.optim.AdamW in transformers' Trainer: by the callback, by the trainer's argument, clipping."""

import peft
import pytest
import torch
from peft.optimizers import create_loraplus_optimizer
from tiny import VOCABULARY, make, trainer_options
from transformers import Trainer, TrainerCallback, TrainingArguments

import tigon
from tigon.optim import AdamW, lora_plus_groups


class Watch(TrainerCallback):
    """The optimizer, and whether the step found gradients that clipping had written."""

    def __init__(self):
        self.norms = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        grads = [p.grad.float().norm() for p in model.parameters() if p.grad is not None]
        self.norms.append(torch.stack(grads).norm().item())


def train(tmp_path, callbacks=(), **options):
    """(losses, norms that the trainer saw, optimizer, norms of the gradients at the step)."""
    torch.manual_seed(0)
    model = make()
    ids = [torch.randint(0, VOCABULARY, (12,), generator=torch.Generator().manual_seed(i)) for i in range(16)]
    own = {"max_steps": 5, "seed": 42, "weight_decay": 0.1, "max_grad_norm": 0.1}
    args = TrainingArguments(**trainer_options(tmp_path, **own | options.pop("args", {})))
    watch = Watch()
    data = [{"input_ids": x, "labels": x} for x in ids]
    trainer = Trainer(model, args, train_dataset=data, callbacks=[*callbacks, watch], **options)
    trainer.train()
    optimizer = trainer.optimizer
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [e["loss"] for e in logs], [e["grad_norm"] for e in logs], optimizer, watch.norms


def test_callback(tmp_path):
    """Stock's losses and norms; clipping leaves gradients as they are; other trainers stay stock."""
    losses, norms, optimizer, written = train(tmp_path)
    assert type(optimizer) is torch.optim.AdamW
    assert max(written) <= 0.1001
    ours = train(tmp_path, [tigon.TigonTrainerCallback(optimizer=True, loss=False)])
    assert isinstance(ours[2], AdamW)
    assert ours[0] == pytest.approx(losses, rel=1e-4)
    assert ours[1] == pytest.approx(norms, rel=1e-3)
    assert ours[3] == pytest.approx(norms, rel=1e-3)
    groups = [group["weight_decay"] for group in ours[2].param_groups]
    assert groups == [0.1, 0.0]
    again = train(tmp_path)
    assert type(again[2]) is torch.optim.AdamW
    assert again[0] == losses


def test_options_and_the_trainers_own_way(tmp_path):
    """A dictionary of options; optimizer_cls_and_kwargs."""
    options = {"rounding": "stochastic", "seed": 3}
    _, _, optimizer, _ = train(tmp_path, [tigon.TigonTrainerCallback(optimizer=options)])
    assert (optimizer.rounding, optimizer.seed) == ("stochastic", 3)
    losses, _, _, _ = train(tmp_path)
    ours = train(tmp_path, optimizer_cls_and_kwargs=(AdamW, {"lr": 1e-2}))
    assert isinstance(ours[2], AdamW)
    assert ours[0] == pytest.approx(losses, rel=1e-4)


def test_another_optimizer_is_refused(tmp_path):
    """What arguments ask for is not replaced by something else."""
    with pytest.raises(tigon.Error, match="optimizer needs args.optim of"):
        train(tmp_path, [tigon.TigonTrainerCallback(optimizer=True)], args={"optim": "adafactor"})


class Mixed(torch.nn.Module):
    """Layers of the kinds that LoRA+ tells apart."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm = torch.nn.Embedding(11, 8), torch.nn.LayerNorm(8)
        self.up, self.rms, self.down = torch.nn.Linear(8, 12), torch.nn.RMSNorm(12), torch.nn.Linear(12, 8)
        self.conv, self.scale = torch.nn.Conv1d(8, 8, 3), torch.nn.Parameter(torch.ones(8))
        self.head = torch.nn.Linear(8, 11)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"modules_to_save": ["head", "norm", "rms"]},
        {"bias": "all"},
        {"bias": "lora_only", "use_dora": True},
        {"lora_bias": True, "target_modules": ["up", "down"]},
        {"target_modules": ["up", "down", "conv"]},
        {"target_modules": ["up"], "trainable_token_indices": {"embed": [1, 2]}},
    ],
    ids=lambda o: "-".join(o) or "plain",
)
def test_lora_plus_groups_are_pefts(options):
    """The parameters, learning rates and decays of each group of PEFT's create_loraplus_optimizer."""
    defaults = {"target_modules": ["embed", "up", "down"], "r": 2}
    model = peft.get_peft_model(Mixed(), peft.LoraConfig(**defaults | options))
    model.base_model.model.scale.requires_grad_(True)
    more = {"lr": 1e-3, "loraplus_lr_ratio": 16, "loraplus_weight_decay": 0.1, "loraplus_lr_embedding": 1e-5}
    theirs = create_loraplus_optimizer(model, torch.optim.AdamW, **more)
    ours = lora_plus_groups(model, lr=1e-3, ratio=16, embedding_lr=1e-5, weight_decay=0.1)
    wanted = [group for group in theirs.param_groups if group["params"]]
    assert len(ours) == len(wanted)
    for mine, group in zip(ours, wanted, strict=True):
        assert list(map(id, mine["params"])) == list(map(id, group["params"]))
        assert (mine["lr"], mine["weight_decay"]) == (group["lr"], group["weight_decay"])
    assert [len(group["params"]) for group in AdamW(ours).param_groups] == [len(g["params"]) for g in wanted]
