"""transformers' Trainer."""

from program import case, logged, model, token_rows, trainer_options

PROGRAM, DISTRIBUTION = "Trainer (transformers)", "transformers"
PACKAGES, ALONE = "accelerate==1.15.0", ""
CASES = []


def train(folder, callbacks=None, **changes):
    from transformers import Trainer, TrainingArguments

    trainer = Trainer(
        model=model(), args=TrainingArguments(**trainer_options(folder, **changes)), train_dataset=token_rows(),
        callbacks=callbacks,
    )  # fmt: skip
    trainer.train()
    return logged(trainer.state.log_history)


@case(CASES, "flag", "`tigon.compat.liger.install()`, `use_liger_kernel=True`")
@case(
    CASES,
    "flag, checkpointing, accumulation",
    "the same",
    {"gradient_checkpointing": True, "gradient_accumulation_steps": 2},
)
def flag(with_tigon, folder, changes=()):
    if with_tigon:
        import tigon.compat.liger

        tigon.compat.liger.install()
    return train(folder, use_liger_kernel=with_tigon, **dict(changes))


@case(CASES, "callback", "`callbacks=[tigon.TigonTrainerCallback()]`")
@case(
    CASES,
    "callback, torch_compile",
    "the same",
    {"torch_compile": True, "torch_compile_backend": "aot_eager"},
)
def callback(with_tigon, folder, changes=()):
    callbacks = []
    if with_tigon:
        import tigon

        callbacks = [tigon.TigonTrainerCallback()]
    return train(folder, callbacks, **dict(changes))
