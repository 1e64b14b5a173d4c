"""Prompts and answers out of real text, for the examples that fine-tune: no download.

A Python function is a prompt (signature and docstring) and an answer (its body). Other text: the first line
of a paragraph and the rest of it. The text and the tokenizer are those of train_data.py.
"""

from __future__ import annotations

import argparse
import ast
import bisect
import json
import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "python"))  # tigon, unless it is installed
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import train_data
from train import SMALL, pick_device

IGNORED = -100  # label of tokens that are not trained on


def arguments(description: str, **defaults) -> argparse.ArgumentParser:
    """The options all of these examples share."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", nargs="+", metavar="FILES", help="text files or folders (Python's own sources)")
    add(
        "--model",
        metavar="DIR",
        help="a checkpoint to start from, e.g. out/checkpoint of train.py (a new one)",
    )
    add("--model-config", metavar="K=V,...", default="", help="overrides of a new model's configuration")
    add("--steps", type=int, default=20)
    add("--batch", type=int, default=4, help="rows a step")
    add("--seq", type=int, default=512, help="tokens a row")
    add("--lr", type=float, default=1e-3)
    add("--device", help="cpu or cuda (cuda if there is one)")
    add("--stock", action="store_true", help="without Tigon, to compare")
    add("--out", type=Path, default=Path("out"))
    parser.set_defaults(**defaults)
    return parser


def pairs_of(text: str) -> list[tuple[str, str]]:
    """(prompt, answer) of every function with a docstring, or of every paragraph."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        tree = ast.Module(body=[], type_ignores=[])
    lines = text.splitlines(keepends=True)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) and len(node.body) > 1:
            body = node.body[1].lineno - 1
            prompt = "".join(lines[node.lineno - 1 : body]).rstrip()  # no token reaches over the border
            found.append((prompt, "\n" + "".join(lines[body : node.end_lineno])))
    if tree.body:
        return found
    for paragraph in text.split("\n\n"):
        first, _, rest = paragraph.strip().partition("\n")
        if rest:
            found.append((first, "\n" + rest))
    return found


def load_pairs(args: argparse.Namespace) -> list[tuple[str, str]]:
    """All pairs of the text, in a fixed order."""
    files = train_data.named_files(args.data) if args.data else train_data.standard_library()
    pairs = [pair for text in train_data.read(files) for pair in pairs_of(text)]
    if not pairs:
        raise SystemExit("the text holds no functions with docstrings and no paragraphs of two lines")
    return pairs


def load_tokenizer(args: argparse.Namespace):
    """The checkpoint's tokenizer, or the byte-level BPE of train_data.py, as transformers wants it."""
    from transformers import PreTrainedTokenizerFast

    given = Path(args.model, "tokenizer.json") if args.model else None
    given = given if given is not None and given.is_file() else None
    vocab = overrides(args).get("vocab_size", SMALL["vocab_size"])
    data = train_data.prepare(args.data, args.out / "cache", min(32000, vocab), given)
    return PreTrainedTokenizerFast(
        tokenizer_file=data["tokenizer_file"], eos_token=train_data.END, pad_token=train_data.END
    ), data


def overrides(args: argparse.Namespace) -> dict:
    """--model-config as a dictionary."""
    pairs = (pair.partition("=") for pair in filter(None, args.model_config.split(",")))
    return {name: json.loads(value) for name, _, value in pairs}


def load_model(args: argparse.Namespace, tokenizer):
    """The checkpoint of --model, or a new small Llama; stock, on the CPU (Trainer moves it)."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    if args.model:
        model = AutoModelForCausalLM.from_pretrained(args.model)
        model.config.use_cache = False  # with a cache transformers does not look for packed samples
        return model
    end = tokenizer.eos_token_id
    config = SMALL | {
        "use_cache": False,
        "max_position_embeddings": args.seq,
        "bos_token_id": end,
        "eos_token_id": end,
    }
    config = AutoConfig.for_model(**{**config, **overrides(args)})
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def encode_pair(tokenizer, prompt: str, answer: str) -> tuple[list[int], list[int]]:
    """Token ids, and labels that leave the prompt out."""
    head = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    tail = tokenizer(answer, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    return head + tail, [IGNORED] * len(head) + tail


def packed_rows(samples, seq: int, end: int) -> list[dict]:
    """Samples in rows of `seq` tokens, by best fit: the longest first, each into the row it fills best.

    The positions begin at 0 with every sample, and there is no attention mask: that is how transformers'
    attention knows that a sample does not see its neighbours. Samples longer than a row are cut. What is left
    of a row is one more sample, of end tokens without labels.

    Source: Ding et al. 2024, "Fewer truncations improve language modeling", arXiv:2404.10830, algorithm 1.
    """
    rows, spaces = [], []  # spaces: (tokens left, index of the row) of every row, ascending
    for ids, labels in sorted(samples, key=lambda sample: -len(sample[0])):
        ids, labels = ids[:seq], labels[:seq]
        at = bisect.bisect_left(spaces, (len(ids), 0))
        left, index = spaces.pop(at) if at < len(spaces) else (seq, len(rows))
        if index == len(rows):
            rows.append(_empty())
        _append(rows[index], ids, labels)
        bisect.insort(spaces, (left - len(ids), index))
    return [_closed(row, seq, end) for row in rows]


def _empty() -> dict:
    return {"input_ids": [], "labels": [], "position_ids": []}


def _append(row, ids, labels):
    row["input_ids"] += ids
    row["labels"] += labels
    row["position_ids"] += range(len(ids))


def _closed(row, seq, end):
    missing = seq - len(row["input_ids"])
    _append(row, [end] * missing, [IGNORED] * missing)
    return row


def packed_dataset(args, tokenizer, evaluation: int = 8) -> tuple[list[dict], list[dict]]:
    """Rows to train on, as many as the run takes, and a few others to evaluate on."""
    from tqdm import tqdm

    wanted = args.steps * args.batch + evaluation
    pairs = load_pairs(args)
    bar = tqdm(total=wanted, desc="packing", unit="row", leave=False, disable=None)
    rows, step = [], max(1, len(pairs) // 4096)
    order = [pair for start in range(step) for pair in pairs[start::step]]  # from all over the text
    samples = []
    for prompt, answer in order:
        samples.append(encode_pair(tokenizer, prompt, answer))
        if sum(len(ids) for ids, _ in samples) >= 16 * args.seq:
            rows += packed_rows(samples, args.seq, tokenizer.eos_token_id)
            bar.update(min(wanted, len(rows)) - bar.n)
            samples = []
            if len(rows) >= wanted:
                break
    rows += packed_rows(samples, args.seq, tokenizer.eos_token_id)
    bar.close()
    while len(rows) < wanted:  # a short text is read again and again
        rows += rows[: wanted - len(rows)]
    return rows[evaluation:wanted], rows[:evaluation]


def training_arguments(args, name: str, **changes) -> dict:
    """What TrainingArguments and its descendants take alike."""
    return {
        "output_dir": str(args.out / name),
        "per_device_train_batch_size": args.batch,
        "max_steps": args.steps,
        "learning_rate": args.lr,
        "warmup_steps": max(1, args.steps // 10),
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "seed": 0,
        "bf16": False,
        "use_cpu": not pick_device(args.device).startswith("cuda"),
        **changes,
    }


def losses_of(trainer) -> list[float]:
    """The training losses that were logged."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def finish(args, name: str, losses: list[float], beside: dict | None = None, **more) -> None:
    """Write the curve as JSON and, where matplotlib is there, as a picture with the curves `beside` it."""
    folder = args.out / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "losses.json").write_text(json.dumps({"losses": losses, **more}))
    print(f"loss {losses[0]:.4g} -> {losses[-1]:.4g} over {len(losses)} steps; {folder / 'losses.json'}")
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.5))
    for label, curve in {"": losses, **(beside or {})}.items():
        axes.plot(range(1, len(curve) + 1), curve, label=label or name, linestyle="--" if label else "-")
    if beside:
        axes.legend()
    axes.set(xlabel="step", ylabel="loss", title=name)
    figure.tight_layout()
    figure.savefig(folder / "losses.png", dpi=120)
    pyplot.close(figure)
