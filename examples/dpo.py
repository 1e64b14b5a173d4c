"""Direct preference optimisation with TRL's DPOTrainer: a function's own body is preferred to another's.

    python examples/dpo.py --model out/checkpoint    from the checkpoint of `make train`
    python examples/dpo.py                           from a new small model, to see it run
    python examples/dpo.py --stock                   the same without Tigon

Needs trl (1.15 or 1.16).
"""

from __future__ import annotations

from sft_data import arguments, finish, load_model, load_pairs, load_tokenizer, losses_of, training_arguments


def preferences(args) -> dict[str, list[str]]:
    """Prompts, each with its own answer and the answer of the function half the list away."""
    pairs = load_pairs(args)
    pairs = pairs[:: max(1, len(pairs) // (args.steps * args.batch))]
    others = pairs[len(pairs) // 2 :] + pairs[: len(pairs) // 2]
    return {
        "prompt": [prompt for prompt, _ in pairs],
        "chosen": [answer for _, answer in pairs],
        "rejected": [answer for _, answer in others],
    }


def main(words: list[str] | None = None) -> int:
    """Data, model, trainer, curve."""
    parser = arguments(__doc__, seq=256, lr=1e-4)
    parser.add_argument("--beta", type=float, default=0.1)
    args = parser.parse_args(words)
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    import tigon
    from tigon.compat import trl

    tokenizer, _ = load_tokenizer(args)
    callback = None
    if not args.stock:
        trl.install()
        callback = tigon.TigonTrainerCallback()
    trainer = DPOTrainer(
        model=load_model(args, tokenizer),
        ref_model=load_model(args, tokenizer),
        args=DPOConfig(
            **training_arguments(args, "dpo"),
            beta=args.beta,
            max_length=args.seq,
            gradient_checkpointing=False,
        ),
        train_dataset=Dataset.from_dict(preferences(args)),
        processing_class=tokenizer,
        callbacks=[callback] if callback else None,
    )
    if callback:
        print(callback.report)
    trainer.train()
    margins = [entry["rewards/margins"] for entry in trainer.state.log_history if "rewards/margins" in entry]
    print(f"margin of the rewards {margins[0]:.4f} -> {margins[-1]:.4f}")
    finish(args, "dpo", losses_of(trainer), margins=margins, tigon=not args.stock)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
