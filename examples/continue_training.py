"""Training that stops and goes on from its checkpoint, in Hugging Face's Trainer, with Tigon on both sides.

    python examples/continue_training.py                          stops half way, loads, goes on
    python examples/continue_training.py --model out/checkpoint   begins with the checkpoint of `make train`

The second half starts from files only: weights, optimizer, schedule, position in the data. It is compared
with a run that never stopped.
"""

from __future__ import annotations

import shutil

from sft_data import arguments, finish, load_model, load_tokenizer, losses_of, training_arguments


def main(words: list[str] | None = None) -> int:
    """Train half, load, train the rest; and all of it in one go, to compare."""
    args = arguments(__doc__, steps=12).parse_args(words)
    from train_data import batches
    from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    import tigon

    class StopHalfWay(TrainerCallback):
        def on_step_end(self, arguments, state, control, **kwargs):
            if state.global_step == args.steps // 2:
                control.should_save = control.should_training_stop = True

    def trainer(model, *callbacks):
        callbacks += () if args.stock else (tigon.TigonTrainerCallback(),)
        options = TrainingArguments(**training_arguments(args, "continued", save_steps=args.steps * 2))
        options.save_strategy = "steps"
        return Trainer(model=model, args=options, train_dataset=rows, callbacks=[*callbacks])

    tokenizer, data = load_tokenizer(args)
    rows = [
        {"input_ids": row, "labels": row}
        for step in batches(data["tokens_file"], args.batch, args.seq, args.steps, 0)
        for row in step.tolist()
    ]
    folder = args.out / "continued"
    shutil.rmtree(folder, ignore_errors=True)
    whole = trainer(load_model(args, tokenizer))
    whole.train()
    shutil.rmtree(folder, ignore_errors=True)
    first = trainer(load_model(args, tokenizer), StopHalfWay())
    first.train()
    checkpoint = folder / f"checkpoint-{args.steps // 2}"
    print(f"stopped after {first.state.global_step} steps, going on from {checkpoint}")
    second = trainer(AutoModelForCausalLM.from_pretrained(checkpoint))
    second.train(resume_from_checkpoint=str(checkpoint))
    wanted, got = losses_of(whole), losses_of(second)
    difference = max(abs(a - b) / abs(b) for a, b in zip(got, wanted, strict=True))
    print(f"largest difference from the run that never stopped: {difference:.1e} relative")
    finish(args, "continued", got, wanted=wanted, difference=difference, tigon=not args.stock)
    return int(difference > 1e-4)


if __name__ == "__main__":
    raise SystemExit(main())
