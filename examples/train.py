"""Train a Llama on real text, stock and with Tigon, and show what changes.

    python examples/train.py                          a small model on the CPU, 1B on a GPU
    python examples/train.py --data notes/*.txt       your own text
    python examples/train.py --model path/to/model    fine-tune a checkpoint (or a config.json)
    python examples/train.py --tokens out/cpp/tokens.npy --model out/cpp/checkpoint     after `make train-cpp`

Every provider trains in a process of its own, from the same seed, on the same batches:
stock (transformers as it is), tigon (after `tigon.apply(model)`), liger (liger-kernel, if
installed, on a GPU), control (stock, with every parameter moved by one unit in the last place:
what rounding alone does to the curve). It ends with a table, train.png, train.json and a
checkpoint that plain `from_pretrained` loads.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent

# About 22 million parameters, 16 of them the embedding that is also the head.
SMALL = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
}
# The shape of Llama 3.2 1B. Its vocabulary is kept, though the text uses 32,000 entries of it: the
# head is a third of the work in this model, and a smaller one would not be this model.
ONE_BILLION = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}
INSTRUCTIONS = {"amx_bf16": "AMX", "avx512_bf16": "AVX512-BF16"}  # Linux's names of bf16 matmuls
DEFAULTS = {
    "cpu": {"config": SMALL, "dtype": "float32", "batch": 8, "seq": 512, "steps": 20, "lr": 1e-3},
    "cuda": {"config": ONE_BILLION, "dtype": "bfloat16", "batch": 4, "seq": 2048, "steps": 30, "lr": 3e-4},
}

# "Equal to within rounding": the largest relative difference of the loss at any step. Training amplifies
# rounding, so this is measured, not derived. Over 20 steps of the CPU default, stock with every parameter
# moved by one unit in the last place (provider `control`) stays within 1.3e-7 of stock in float32 and 1.1e-3
# in bfloat16; the bounds are about ten times that, in float32 with room for the summation orders of other
# processors. They are for runs of this length; a run that includes `control` uses ten times its own figure,
# but at least FLOOR, some units in the last place.
BOUND = {"float32": 1e-5, "bfloat16": 1e-2}
FLOOR = {"float32": 2e-6, "bfloat16": 2e-3}
CONTROL_FACTOR = 10


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", nargs="+", metavar="FILES", help="text files or folders (Python's own sources)")
    add("--tokens", type=Path, metavar="NPY", help="token ids, int32 [tokens], instead of text")
    add("--model", metavar="DIR_OR_CONFIG", help="a checkpoint to fine-tune, or a config.json")
    add("--model-config", metavar="K=V,...", default="", help="overrides of the configuration")
    add("--steps", type=int)
    add("--batch", type=int, help="sequences a step")
    add("--seq", type=int, help="tokens a sequence")
    add("--lr", type=float)
    add("--dtype", choices=("float32", "bfloat16"))
    add("--device", help="cpu or cuda (cuda if there is one)")
    add("--seed", type=int, default=0)
    add("--threads", type=int, default=0, help="CPU threads (torch's choice)")
    add("--out", type=Path, default=Path("out"))
    add("--providers", default="stock,tigon", help="of stock, tigon, liger, control")
    add("--checkpoint", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_args(arguments)


def pick_device(wanted: str | None) -> str:
    """The device asked for, or a GPU if there is one."""
    if wanted and wanted.startswith("cpu"):
        return wanted
    import torch  # only now: importing it takes seconds

    if wanted is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if wanted.startswith("cuda") and not torch.cuda.is_available():
        raise SystemExit(f"--device {wanted}: torch {torch.__version__} sees no CUDA device")
    return wanted


def of_bfloat16(plan: dict, cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """What a run in float32 leaves unused on a processor that multiplies in bfloat16; else nothing."""
    if plan["device"] != "cpu" or plan["dtype"] != "float32" or not cpuinfo.exists():
        return ""
    flags = set(cpuinfo.read_text().split())
    found = [name for flag, name in INSTRUCTIONS.items() if flag in flags]
    if not found:
        return ""
    return (
        "float32 is the default on a CPU: its curves agree to 1e-5. This processor has "
        f'{" and ".join(found)},\nwhich bfloat16 uses: make train ARGS="--dtype bfloat16". '
        "In bench/results/cpu Tigon took\n1.83 times stock's tokens a second in bfloat16, "
        "and 1.45 times in float32."
    )


def read_model(model: str | None, default: dict) -> tuple[dict, str, Path | None]:
    """Configuration, checkpoint folder ("": none) and tokenizer file of --model."""
    if model is None:
        return dict(default), "", None
    path = Path(model)
    folder = path if path.is_dir() else path.parent
    config_file = path / "config.json" if path.is_dir() else path
    if not config_file.is_file():
        raise SystemExit(f"--model {model}: no folder with a config.json, nor such a file")
    config = json.loads(config_file.read_text())
    weights = any(path.glob("*.safetensors")) or any(path.glob("*.bin"))
    tokenizer = folder / "tokenizer.json"
    return config, str(path) if weights else "", tokenizer if tokenizer.is_file() else None


def make_plan(args: argparse.Namespace) -> dict:
    """Everything a worker needs to know."""
    from train_data import given_tokens, prepare

    device = pick_device(args.device)
    default = DEFAULTS["cuda" if device.startswith("cuda") else "cpu"]
    config, checkpoint, tokenizer = read_model(args.model, default["config"])
    if args.model_config and checkpoint:
        raise SystemExit("--model-config changes a new model, not a checkpoint's weights")
    for pair in filter(None, args.model_config.split(",")):
        name, _, value = pair.partition("=")
        try:
            config[name] = json.loads(value)
        except ValueError:
            config[name] = value
    plan = {
        "device": device,
        "seed": args.seed,
        "threads": args.threads,
        "checkpoint_in": checkpoint,
        "checkpoint_out": str(args.out / "checkpoint") if args.checkpoint else "",
    }
    for name in ("steps", "batch", "seq", "lr", "dtype"):
        given = getattr(args, name)
        plan[name] = default[name] if given is None else given
    if min(plan["steps"], plan["batch"]) < 1 or plan["seq"] < 2:
        raise SystemExit("--steps and --batch must be at least 1, --seq at least 2")
    config["max_position_embeddings"] = max(plan["seq"], config.get("max_position_embeddings") or 0)
    plan["config"] = config
    vocab = config.get("vocab_size", 32000)
    if args.tokens:
        data = given_tokens(args.tokens)
    else:
        data = prepare(args.data, args.out / "cache", min(32000, vocab), tokenizer)
    if data["largest_token"] >= vocab:
        raise SystemExit(f"token {data['largest_token']} is outside the model's {vocab} entries")
    if data["end"] is not None and not checkpoint:
        # Llama's own ids of the first and last token need not exist in this vocabulary.
        config |= {"bos_token_id": data["end"], "eos_token_id": data["end"]}
    return plan | data


def work(plan: dict, part: str) -> dict:
    """Run a part of the plan in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        plan_file, result_file = Path(folder, "plan.json"), Path(folder, "result.json")
        plan_file.write_text(json.dumps(plan))
        command = [sys.executable, HERE / "train_worker.py", plan_file, part, result_file]
        code = subprocess.run([str(word) for word in command], check=False).returncode
        if code or not result_file.exists():
            raise SystemExit(f"{part} ended with exit code {code}")
        return json.loads(result_file.read_text())


def compare(runs: dict[str, dict], dtype: str) -> dict:
    """Largest differences of the losses from the first run's, and the bound they must keep."""
    first = next(iter(runs.values()))["losses"]
    for run in runs.values():
        pairs = list(zip(run["losses"], first, strict=True))
        run["loss_difference"] = max(abs(a - b) for a, b in pairs)
        run["relative_difference"] = max(abs(a - b) / abs(b) for a, b in pairs)
        run["finite"] = all(map(math.isfinite, run["losses"]))
    bound, source = BOUND[dtype], f"the bound of examples/train.py for {dtype}"
    if "control" in runs:
        bound = max(FLOOR[dtype], CONTROL_FACTOR * runs["control"]["relative_difference"])
        source = f"{CONTROL_FACTOR} times what one unit in the last place does (control)"
    return {"value": bound, "source": source}


def show(summary: dict) -> None:
    """The table."""
    runs, bound = summary["runs"], summary["bound"]
    first = next(iter(runs.values()))
    head = ("", "tokens/s", "", "peak memory", "", "final loss", "largest difference")
    rows = [head]
    for name, run in runs.items():
        speed = run["tokens_per_s"] / first["tokens_per_s"]
        memory = run["peak_bytes"] / max(1, first["peak_bytes"])
        rows.append(
            (
                name,
                f"{run['tokens_per_s']:,.0f}",
                f"{speed:.2f}x",
                f"{run['peak_bytes'] / 1e9:.2f} GB",
                f"{memory:.2f}x",
                f"{run['losses'][-1]:.4f}",
                "-"
                if run is first
                else f"{run['loss_difference']:.1e} ({run['relative_difference']:.1e} relative)",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    print(f"\n{summary['title']}")
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        print("  ".join(cells).rstrip())
    print(
        f"\npeak memory: above model and optimizer state, after the first step; "
        f"loss fell from {first['losses'][0]:.3f} to {first['losses'][-1]:.3f}"
    )
    for name, run in runs.items():
        if run["memory_note"]:
            print(f"  {name}: {run['memory_note']}")
    for name in [name for name in runs if runs[name] is not first and name != "control"]:
        held = runs[name]["relative_difference"] <= bound["value"] and runs[name]["finite"]
        verdict = "equal to within rounding" if held else "NOT equal to within rounding"
        print(
            f"{name}: loss curve {verdict}: every step within {bound['value']:.1e} "
            f"relative of {next(iter(runs))} ({bound['source']})"
        )


def check_checkpoint(plan: dict, trained: float) -> dict:
    """Load the checkpoint into a stock model in a fresh process and compare its loss."""
    loaded = work(plan, "verify")["checkpoint_loss"]
    same = abs(loaded - trained) <= BOUND[plan["dtype"]] * abs(trained)
    result = {"path": plan["checkpoint_out"], "trained": trained, "stock": loaded, "same": same}
    print(
        f"checkpoint {result['path']}: stock from_pretrained loads it, loss {loaded:.4f} "
        f"(patched model {trained:.4f}) {'ok' if same else 'DIFFERS'}"
    )
    return result


def main(arguments: list[str] | None = None) -> int:
    """Plan, train each provider, compare, show, save."""
    args = parse(arguments)
    providers = [name.strip() for name in args.providers.split(",") if name.strip()]
    unknown = set(providers) - {"stock", "tigon", "liger", "control"}
    if unknown or not providers:
        raise SystemExit(f"--providers {args.providers}: of stock, tigon, liger, control")
    start = time.perf_counter()
    args.out.mkdir(parents=True, exist_ok=True)
    plan = make_plan(args)
    print(
        f"text: {plan['files']} files, {plan['bytes'] / 1e6:.1f} MB, {plan['tokens']:,} tokens "
        f"of a vocabulary of {plan['vocab']:,}"
    )
    print(
        f"training: {plan['steps']} steps of {plan['batch']} x {plan['seq']} tokens, "
        f"{plan['dtype']} on {plan['device']}",
        flush=True,
    )
    if advice := of_bfloat16(plan):
        print(advice, flush=True)
    runs: dict[str, dict] = {}
    for name in providers:
        result = work(plan, name)
        if "skipped" in result:
            print(f"{name}: left out, {result['skipped']}")
            if name == "tigon":
                return 1
            continue
        runs[name] = result
    if not runs:
        return 1
    one = next(iter(runs.values()))
    size = f"{one['parameters'] / 1e6:,.0f} M parameters"
    summary = {
        "title": f"{size}, {plan['dtype']}, {plan['batch']} x {plan['seq']}, {one['device_name']}",
        "runs": runs,
        "bound": compare(runs, plan["dtype"]),
        "plan": {name: value for name, value in plan.items() if not name.endswith("_file")},
    }
    show(summary)
    if "checkpoint_loss" in runs.get("tigon", {}):
        summary["checkpoint"] = check_checkpoint(plan, runs["tigon"]["checkpoint_loss"])
    (args.out / "train.json").write_text(json.dumps(summary, indent=1))
    try:
        from train_plot import draw

        draw(summary, args.out / "train.png")
        print(f"{args.out / 'train.png'}, {args.out / 'train.json'}")
    except ImportError as error:
        print(f"{args.out / 'train.json'} (no picture: {error})")
    print(f"{time.perf_counter() - start:.0f} s in all")
    return 0 if summary.get("checkpoint", {"same": True})["same"] else 1


if __name__ == "__main__":
    sys.exit(main())
