"""GRPO with TRL: several answers to a prompt, rewarded by their likeness to the text.

    python examples/grpo.py --model out/checkpoint    from the checkpoint of `make train`
    python examples/grpo.py                           from a new small model, to see it run
    python examples/grpo.py --stock                   the same without Tigon

Needs trl (1.15 or 1.16).
"""

from __future__ import annotations

from sft_data import arguments, finish, load_model, load_pairs, load_tokenizer, losses_of, training_arguments


def likeness(completions: list[str], answer: list[str], **_) -> list[float]:
    """The share of a completion's pairs of characters that its answer has too, in [0, 1]."""

    def pairs(text):
        return {text[i : i + 2] for i in range(len(text) - 1)}

    return [
        len(pairs(c) & pairs(a)) / max(len(pairs(c)), 1) for c, a in zip(completions, answer, strict=True)
    ]


def main(words: list[str] | None = None) -> int:
    """Data, model, trainer, curve."""
    parser = arguments(__doc__, batch=8, lr=3e-4)
    parser.add_argument("--generations", type=int, default=4, help="answers a prompt; divides the batch")
    parser.add_argument("--completion", type=int, default=24, help="tokens an answer")
    parser.add_argument("--beta", type=float, default=0.0, help="weight of the KL term; needs --model")
    args = parser.parse_args(words)
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    import tigon
    from tigon.compat import trl

    tokenizer, _ = load_tokenizer(args)
    pairs = [(prompt, answer) for prompt, answer in load_pairs(args) if len(prompt) < 2 * args.seq]
    pairs = pairs[:: max(1, len(pairs) // (args.steps * args.batch))]
    dataset = Dataset.from_dict({"prompt": [p for p, _ in pairs], "answer": [a for _, a in pairs]})
    callback = None
    if not args.stock:
        trl.install()
        callback = tigon.TigonTrainerCallback()
    trainer = GRPOTrainer(
        model=load_model(args, tokenizer),
        reward_funcs=likeness,
        args=GRPOConfig(
            **training_arguments(args, "grpo"),
            num_generations=args.generations,
            max_completion_length=args.completion,
            beta=args.beta,
            gradient_checkpointing=False,
        ),
        train_dataset=dataset,
        processing_class=tokenizer,
        callbacks=[callback] if callback else None,
    )
    if callback:
        print(callback.report)
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    print(f"reward {rewards[0]:.4f} -> {rewards[-1]:.4f}")
    finish(args, "grpo", losses_of(trainer), rewards=rewards, tigon=not args.stock)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
