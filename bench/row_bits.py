"""Rows of `tigon.linear_log_prob` by themselves and beside 8193, and what `tigon.deterministic()` costs.

    python bench/row_bits.py bits     rows with other bits than they have beside 8193, by head and mode
    python bench/row_bits.py time     milliseconds with the mode off and on, alternating

Both print a table of Markdown. A row counts where its log-probability or its gradient of hidden differs. Both
modes of a time run in turn on one card, and the median of ten is shown.
"""

from __future__ import annotations

import argparse
import statistics

import torch

import tigon

HEADS = {
    "GPT-2": (768, 50257),
    "Llama 3": (4096, 128256),
    "Qwen2.5 0.5B": (896, 151936),
    "Qwen3 1.7B": (2048, 151936),
    "Gemma 2": (2304, 256000),
    "Mistral": (4096, 32768),
    "Phi-4": (5120, 100352),
    "DeepSeek": (7168, 129280),
    "gpt-oss": (2880, 201088),
    "OLMo 2": (4096, 100278),
    "odd": (1001, 32003),
    "small": (512, 8192),
}
ALL = 8193
PARTS = (1, 2, 7, 16, 64, 128, 257, 1024, 2048, 4096)


def operands(rows, size, vocabulary, dtype):
    """Hidden states, a head's weight, labels; one in nine is masked."""
    torch.manual_seed(0)
    hidden = torch.randn(rows, size, device="cuda").to(dtype)
    weight = (torch.randn(vocabulary, size, device="cuda") / size**0.5).to(dtype)
    target = torch.randint(0, vocabulary, (rows,), device="cuda")
    target[::9] = -100
    return hidden, weight, target


def train(hidden, weight, target):
    """Log-probabilities, and both gradients for an upstream gradient of 1."""
    hidden, weight = (t.detach().requires_grad_() for t in (hidden, weight))
    log_prob = tigon.linear_log_prob(hidden, weight, target)
    return log_prob.detach(), *torch.autograd.grad(log_prob.sum(), (hidden, weight))


def infer(hidden, weight, target):
    with torch.no_grad():
        return tigon.linear_log_prob(hidden, weight, target)


def differing(got, want) -> int:
    different = [(a != b).reshape(len(a), -1).any(-1) for a, b in zip(got, want, strict=True)]
    return int(torch.stack(different).any(0).sum())


def bits(dtypes, names) -> None:
    print(f"| head | dtype | mode | {' | '.join(map(str, PARTS))} | no gradient | again |")
    print("|---|---|---|" + "--:|" * (len(PARTS) + 2))
    for dtype in dtypes:
        for name in names:
            hidden, weight, target = operands(ALL, *HEADS[name], dtype)
            for mode in (False, True):
                with tigon.deterministic(mode):
                    want = train(hidden, weight, target)
                    found = [
                        differing(train(hidden[-n:], weight, target[-n:])[:2], [t[-n:] for t in want[:2]])
                        for n in PARTS
                    ]
                    found.append(differing([infer(hidden, weight, target)], want[:1]))
                    again = train(hidden, weight, target)
                    found.append(differing(again[:2], want[:2]) + differing(again[2:], want[2:]))
                size, vocabulary = HEADS[name]
                label = f"{name} {size} x {vocabulary} | {str(dtype)[6:]} | {'on' if mode else 'off'}"
                print(f"| {label} | {' | '.join(map(str, found))} |", flush=True)


def times(names) -> None:
    print("| head | rows | forward off | on | | training off | on | |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|")
    for name in names:
        for rows in (1024, 4096, 8192):
            call, cells = operands(rows, *HEADS[name], torch.bfloat16), []
            for run in (infer, train):
                taken = {False: [], True: []}
                for i in range(12):
                    for mode in (False, True) if i % 2 else (True, False):
                        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                        with tigon.deterministic(mode):
                            begin.record()
                            run(*call)
                            end.record()
                        torch.cuda.synchronize()
                        if i > 1:
                            taken[mode].append(begin.elapsed_time(end))
                off, on = (statistics.median(taken[mode]) for mode in (False, True))
                cells += [f"{off:.3f}", f"{on:.3f}", f"{on / off:.3f}"]
            print(f"| {name} | {rows} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["bits", "time"])
    parser.add_argument("--heads", nargs="+", default=None, choices=list(HEADS))
    parser.add_argument(
        "--dtypes", nargs="+", default=["bfloat16"], choices=["bfloat16", "float16", "float32"]
    )
    args = parser.parse_args()
    if args.what == "bits":
        bits([getattr(torch, d) for d in args.dtypes], args.heads or list(HEADS))
    else:
        times(args.heads or ["Llama 3", "Qwen3 1.7B", "GPT-2"])
    print(tigon.env())


if __name__ == "__main__":
    main()
