"""The same log-probabilities in a sampler and in a trainer, bit for bit.

    python examples/same_bits.py                    both ends call one function in deterministic mode
    python examples/same_bits.py --default          the same without the mode
    python examples/same_bits.py --device cuda --hidden 2048 --vocabulary 151936 --dtype bfloat16

A small policy writes answers of different lengths. The sampler sees a row of each unfinished answer at a
time, a trainer all tokens at once. The policy looks at two tokens, so that everything in it is a call of
Tigon's. It stands for a model whose layers are batch-invariant too.
"""

from __future__ import annotations

import argparse
import contextlib

import torch

import tigon

END = 0  # the token that ends an answer


class Policy(torch.nn.Module):
    """Hidden states of a token and the one before it, and a head."""

    def __init__(self, vocabulary: int, size: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Parameter(torch.randn(vocabulary, size))
        self.norm = torch.nn.Parameter(torch.ones(size))
        self.head = torch.nn.Parameter(2 * torch.randn(vocabulary, size) / size**0.5)

    def forward(self, tokens, previous):
        """Hidden states of any number of rows."""
        x = tigon.embedding(tokens, self.embedding)
        return tigon.rms_norm(x + tigon.swiglu(x, tigon.embedding(previous, self.embedding)), self.norm)

    def log_prob(self, hidden, tokens, temperature):
        """The one function of both ends, with the roundings of vLLM's head and sampler."""
        return tigon.linear_log_prob(hidden, self.head, tokens, match="vllm", temperature=temperature)


@torch.no_grad()
def sample(policy, prompts, most, temperature):
    """Tokens ``[answers, most]`` with END after each answer, and the sampler's log-probabilities."""
    tokens = prompts.new_full((len(prompts), most), END)
    log_prob = torch.zeros(len(prompts), most, device=prompts.device)
    last, previous, alive = prompts[:, 1], prompts[:, 0], torch.arange(len(prompts), device=prompts.device)
    for t in range(most):
        hidden = policy(last, previous)
        logits = (hidden @ policy.head.t()).float() / temperature
        drawn = torch.multinomial(logits.softmax(-1), 1)[:, 0]
        tokens[alive, t] = drawn
        log_prob[alive, t] = policy.log_prob(hidden, drawn, temperature)
        goes_on = drawn != END
        alive, previous, last = alive[goes_on], last[goes_on], drawn[goes_on]
        if len(alive) == 0:
            break
    return tokens, log_prob


def train_log_prob(policy, prompts, tokens, mask, temperature):
    """The trainer's log-probabilities of every token that was sampled, packed into one batch."""
    whole = torch.cat([prompts, tokens], 1)
    hidden = policy(whole[:, 1:-1][mask], whole[:, :-2][mask])
    return policy.log_prob(hidden, tokens[mask], temperature)


def main(words: list[str] | None = None) -> int:
    """Sample, train a step, and compare."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--hidden", type=int, default=77)
    parser.add_argument("--vocabulary", type=int, default=999)
    parser.add_argument("--answers", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.9)
    parser.add_argument("--default", action="store_true", help="without tigon.deterministic()")
    args = parser.parse_args(words)
    torch.manual_seed(0)
    policy = Policy(args.vocabulary, args.hidden).to(args.device, getattr(torch, args.dtype))
    prompts = torch.randint(1, args.vocabulary, (args.answers, 2), device=args.device)
    with contextlib.nullcontext() if args.default else tigon.deterministic():
        tokens, sampled = sample(policy, prompts, args.tokens, args.temperature)
        ends = (tokens == END).int().cumsum(1)
        mask = (ends == 0) | ((tokens == END) & (ends == 1))
        trained = train_log_prob(policy, prompts, tokens, mask, args.temperature)
        ratio = (trained - sampled[mask]).exp()
        (-ratio.mean()).backward()
    differing = int((trained.detach() != sampled[mask]).sum())
    print(f"tokens of {args.answers} answers: {mask.sum().item()}")
    print(f"log-probabilities that differ: {differing}; largest ratio {ratio.max().item():.9f}")
    return differing


if __name__ == "__main__":
    main()
