"""Distillation with TRL: a student of half the layers follows its teacher on text that the student writes.

    python examples/distillation.py --model out/checkpoint    the teacher is the checkpoint of `make train`
    python examples/distillation.py                           the teacher is a new small model, to see it run
    python examples/distillation.py --stock                   the same without Tigon

Needs trl (1.15 or 1.16).
"""

from __future__ import annotations

from sft_data import arguments, finish, load_model, load_pairs, load_tokenizer, losses_of, training_arguments


def half_of(teacher):
    """A model of every other layer of the teacher, with its weights."""
    import copy

    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(teacher.config)
    config.num_hidden_layers = (teacher.config.num_hidden_layers + 1) // 2
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    student = AutoModelForCausalLM.from_config(config, dtype=teacher.dtype)
    weights = {}
    for name, value in teacher.state_dict().items():
        before, layers, after = name.partition("layers.")
        number, _, rest = after.partition(".")
        if layers and int(number) % 2:
            continue
        weights[f"{before}layers.{int(number) // 2}.{rest}" if layers else name] = value
    student.load_state_dict(weights)
    return student


def main(words: list[str] | None = None) -> int:
    """Data, models, trainer, curve."""
    parser = arguments(__doc__, lr=3e-4)
    parser.add_argument("--completion", type=int, default=24, help="tokens of an answer of the student's")
    parser.add_argument("--beta", type=float, default=0.5, help="0: KL(teacher | student), 1: the reverse")
    args = parser.parse_args(words)
    from datasets import Dataset
    from trl import DistillationConfig, DistillationTrainer

    import tigon
    from tigon.compat import trl

    tokenizer, _ = load_tokenizer(args)
    prompts = [prompt for prompt, _ in load_pairs(args) if len(prompt) < 2 * args.seq]
    prompts = prompts[:: max(1, len(prompts) // (args.steps * args.batch))]
    teacher = load_model(args, tokenizer)
    callback = None
    if not args.stock:
        trl.install()
        callback = tigon.TigonTrainerCallback()
    trainer = DistillationTrainer(
        model=half_of(teacher),
        teacher_model=teacher,
        args=DistillationConfig(
            **training_arguments(args, "distillation"),
            beta=args.beta,
            max_completion_length=args.completion,
            gradient_checkpointing=False,
        ),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
        callbacks=[callback] if callback else None,
    )
    if callback:
        print(callback.report)
    trainer.train()
    finish(args, "distillation", losses_of(trainer), tigon=not args.stock)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
