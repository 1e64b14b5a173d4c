"""Training steps of whole models, side by side: Hugging Face as it is, with Tigon, with Liger.

    python bench/e2e.py --suite six                       six models, 16 x 512 tokens, one GPU of 141 GB
    python bench/e2e.py --suite paper --budget 25         five models over batch sizes, at most 25 minutes
    python bench/e2e.py --models llama3-8b --layers 8     a quarter of the layers, for a smaller card
    python bench/e2e.py --table out/e2e.jsonl             the table of an earlier run

Random weights from the published configurations, bfloat16, fused AdamW, sdpa attention, one optimizer step
per measured step. Every case runs in a process of its own on the same data; its record (or its error) is
appended to --out when it ends, so a run that is cut off has lost one case. While a case runs, the process of
the next one imports its libraries and waits: the card is not idle for that long. Throughput is the mean over
the steps with its standard deviation; peak memory is that of torch's allocator, model and optimizer included.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "python"))  # tigon, unless it is installed

LLAMA = {"model_type": "llama", "num_attention_heads": 32, "num_key_value_heads": 8}
MODELS = {
    "llama3-8b": LLAMA | {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    },
    "qwen2-7b": {
        "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
    },
    "gemma-7b": {
        "model_type": "gemma", "hidden_size": 3072, "intermediate_size": 24576, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 256, "vocab_size": 256000,
    },
    "mistral-7b": {
        "model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "sliding_window": None,
    },
    "phi3-mini": {
        "model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32064,
    },
    "llama3.2-1b": LLAMA | {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 128256,
        "head_dim": 64, "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    },
}  # fmt: skip
SUITES = {
    "paper": (tuple(MODELS)[:5], (8, 16, 32)),
    "six": (tuple(MODELS), (16,)),
}
PROVIDERS = ("stock", "tigon", "liger")
WARMUP = 3


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--suite", choices=tuple(SUITES), default="six")
    add("--models", help=f"of {', '.join(MODELS)} (the suite's)")
    add("--batches", help="batch sizes, comma-separated (the suite's)")
    add("--providers", default=",".join(PROVIDERS))
    add("--seq", type=int, default=512)
    add("--layers", type=int, help="fewer layers than published")
    add("--set", default="", metavar="K=V,...", help="other changes of every configuration")
    add("--steps", type=int, default=10, help=f"measured steps, after {WARMUP} to warm up")
    add("--masked", type=float, default=0.0, help="fraction of labels that do not count")
    add("--checkpointing", action="store_true", help="gradient checkpointing")
    add("--compile", action="store_true", help="torch.compile of the model, patched or not")
    add("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    add("--device", default="cuda")
    add("--budget", type=float, default=0.0, metavar="MINUTES", help="start no case after this long")
    add("--case-timeout", type=float, default=600.0, metavar="SECONDS")
    add("--again", action="store_true", help="run cases that --out already holds, too")
    add("--out", type=Path, default=Path("out/e2e.jsonl"))
    add("--table", type=Path, help="only print the table of this file")
    args = parser.parse_args(arguments)
    models, batches = SUITES[args.suite]
    args.models = args.models.split(",") if args.models else list(models)
    args.batches = [int(b) for b in args.batches.split(",")] if args.batches else list(batches)
    args.providers = args.providers.split(",")
    for name, known in (("models", MODELS), ("providers", PROVIDERS)):
        unknown = set(getattr(args, name)) - set(known)
        if unknown:
            raise SystemExit(f"--{name}: {', '.join(sorted(unknown))} is not of {', '.join(known)}")
    return args


def cases(args: argparse.Namespace) -> list[dict]:
    """Every case, providers of one setting one after the other."""
    changes = {}
    for pair in filter(None, args.set.split(",")):
        name, _, value = pair.partition("=")
        changes[name] = json.loads(value)
    shared = {name: getattr(args, name) for name in ("seq", "layers", "steps", "masked", "checkpointing",
                                                     "compile", "dtype", "device")}  # fmt: skip
    return [
        {"model": model, "batch": batch, "provider": provider, "changes": changes, **shared}
        for model in args.models
        for batch in args.batches
        for provider in args.providers
    ]


# --- one case, in its own process -------------------------------------------------------------


def build(case: dict):
    """The model of a case on its device, the same numbers for every provider."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = MODELS[case["model"]] | case["changes"]
    if case["layers"]:
        config["num_hidden_layers"] = min(case["layers"], config["num_hidden_layers"])
    config["max_position_embeddings"] = max(case["seq"], 4096)
    config = AutoConfig.for_model(**config, use_cache=False, pad_token_id=None)
    torch.manual_seed(0)
    with torch.device(case["device"]):
        model = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, case["dtype"]), attn_implementation="sdpa"
        )
    if case["checkpointing"]:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def patch(model, provider: str) -> str:
    """Put the provider in; what it reports."""
    if provider == "tigon":
        import tigon

        return str(tigon.apply(model))
    if provider == "liger":
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model=model)
    return ""


def run_case(case: dict) -> dict:
    """Steps of training; times, losses, memory."""
    import torch

    cuda = case["device"].startswith("cuda")
    model = build(case)
    report = patch(model, case["provider"])
    if case["compile"]:
        model = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    generator = torch.Generator().manual_seed(1)
    vocabulary = model.config.vocab_size
    seconds, losses, peak = [], [], 0
    for step in range(WARMUP + case["steps"]):
        ids = torch.randint(0, vocabulary, (case["batch"], case["seq"]), generator=generator)
        labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) < case["masked"], -100)
        ids, labels = ids.to(case["device"]), labels.to(case["device"])
        if cuda:
            if step == WARMUP:
                torch.cuda.reset_peak_memory_stats()
            torch.cuda.synchronize()
        start = time.perf_counter()
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())  # waits for the forward pass
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    if cuda:
        peak = torch.cuda.max_memory_allocated()
    times = seconds[WARMUP:]
    rates = [case["batch"] * case["seq"] / t for t in times]
    return {
        "tokens_per_s": statistics.mean(rates),
        "tokens_per_s_std": statistics.stdev(rates) if len(rates) > 1 else 0.0,
        "step_ms": [1e3 * t for t in times],
        "peak_gb": peak / 1e9,
        "losses": losses,
        "parameters": sum(p.numel() for p in model.parameters()),
        "report": report.splitlines(),
        **versions(case),
    }


def versions(case: dict) -> dict:
    """What the numbers belong to."""
    import importlib.metadata

    import torch

    found = {"torch": torch.__version__}
    for name in ("transformers", "liger-kernel", "triton"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    cuda = case["device"].startswith("cuda")
    return found | {"gpu": torch.cuda.get_device_name() if cuda else "CPU"}


def worker(case_file: str, result_file: str) -> None:
    """Import what takes long, wait for the word, run the case; an error becomes its record."""
    import torch  # noqa: F401
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: F401

    if not sys.stdin.readline():
        return
    case = json.loads(Path(case_file).read_text())
    try:
        result = run_case(case)
    except Exception as error:
        kind = type(error).__name__
        result = {
            "error": f"{kind}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}",
            "out_of_memory": kind == "OutOfMemoryError",
            "traceback": traceback.format_exc()[-4000:],
        }
    Path(result_file).write_text(json.dumps(result))


# --- all cases --------------------------------------------------------------------------------


class Worker:
    """A process that has its libraries and waits for a case."""

    def __init__(self):
        env = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "USE_HUB_KERNELS": "0",
               "PYTORCH_ALLOC_CONF": "expandable_segments:True", **os.environ}  # fmt: skip
        self.folder = tempfile.TemporaryDirectory()
        self.case_file, self.result_file = (Path(self.folder.name, name) for name in ("case", "result"))
        command = [sys.executable, __file__, "--worker", str(self.case_file), str(self.result_file)]
        self.process = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, case: dict, timeout: float) -> dict:
        """The record of one case, whatever happens to its process."""
        start = time.perf_counter()
        self.case_file.write_text(json.dumps(case))
        try:
            _, errors = self.process.communicate("go\n", timeout)
            if self.result_file.exists():
                result = json.loads(self.result_file.read_text())
            else:
                last = (errors.strip().splitlines() or ["no output"])[-1]
                result = {"error": f"exit code {self.process.returncode}: {last}"}
        except subprocess.TimeoutExpired:
            result = {"error": f"more than {timeout:.0f} s"}
        self.close()
        return {**case, **result, "seconds": time.perf_counter() - start}

    def close(self) -> None:
        """End the process, if it has not ended."""
        self.process.kill()
        self.process.communicate()
        self.folder.cleanup()


def measure(case: dict, timeout: float) -> dict:
    """The record of one case by the process that is ready; the next one gets ready meanwhile."""
    worker = _ready.pop() if _ready else Worker()
    _ready.append(Worker())
    return worker.run(case, timeout)


_ready: list[Worker] = []


def key(record: dict) -> tuple:
    """What makes two records the same case."""
    names = ("model", "batch", "seq", "provider", "layers", "masked", "checkpointing", "compile", "dtype",
             "device")  # fmt: skip
    return (*(record[name] for name in names), json.dumps(record["changes"], sort_keys=True))


def read(path: Path) -> list[dict]:
    """Records of a file; of a case that was run twice the last one."""
    if not path.exists():
        return []
    records = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    return list({key(record): record for record in records}.values())


def table(records: list[dict]) -> str:
    """Markdown: one row a setting, one column a provider."""
    providers = [name for name in PROVIDERS if any(r["provider"] == name for r in records)]
    settings: dict[tuple, dict] = {}
    for record in records:
        setting = (record["model"], record["layers"], record["batch"], record["seq"], record["compile"])
        settings.setdefault(setting, {})[record["provider"]] = record
    lines = ["| model | batch x tokens | " + " | ".join(providers) + " | Tigon to stock | to Liger |",
             "|---" * (4 + len(providers)) + "|"]  # fmt: skip
    for (model, layers, batch, seq, compiled), row in settings.items():
        name = model + (f", {layers} layers" if layers else "") + (", torch.compile" if compiled else "")
        cells = [_cell(row.get(provider)) for provider in providers]
        ratios = [_ratio(row, "stock"), _ratio(row, "liger")]
        lines.append(f"| {name} | {batch} x {seq} | " + " | ".join(cells + ratios) + " |")
    return "\n".join(lines)


def _cell(record: dict | None) -> str:
    if record is None:
        return "-"
    if "error" in record:
        return "out of memory" if record.get("out_of_memory") else record["error"][:60].replace("|", "/")
    rate, spread = record["tokens_per_s"], record["tokens_per_s_std"]
    return f"{rate:,.0f} ± {spread:,.0f} tokens/s, {record['peak_gb']:.1f} GB"


def _ratio(row: dict, other: str) -> str:
    pair = [row.get("tigon"), row.get(other)]
    if any(record is None or "error" in record for record in pair):
        return "-"
    speed = pair[0]["tokens_per_s"] / pair[1]["tokens_per_s"]
    memory = pair[0]["peak_gb"] / pair[1]["peak_gb"] if pair[1]["peak_gb"] else 1.0
    gap = max(abs(a - b) / abs(b) for a, b in zip(pair[0]["losses"], pair[1]["losses"], strict=True))
    return f"{speed:.2f}x, memory {memory:.2f}x, loss within {gap:.1e}"


def main(arguments: list[str] | None = None) -> int:
    """Every case, then the table."""
    words = sys.argv[1:] if arguments is None else arguments
    if words[:1] == ["--worker"]:
        worker(*words[1:3])
        return 0
    args = parse(words)
    if args.table:
        print(table(read(args.table)))
        return 0
    from tqdm import tqdm

    start = time.perf_counter()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    done = set() if args.again else {key(r) for r in read(args.out) if "error" not in r}
    too_large: set[tuple] = set()
    bar = tqdm([case for case in cases(args) if key(case) not in done], unit="case", dynamic_ncols=True)
    for case in bar:
        bar.set_description(f"{case['model']} {case['batch']} {case['provider']}")
        out_of_time = args.budget and time.perf_counter() - start > 60 * args.budget
        if out_of_time:
            record = {**case, "error": "not started: out of time"}
        elif (case["model"], case["provider"]) in too_large:
            record = {**case, "error": "a smaller batch was out of memory", "out_of_memory": True}
        else:
            record = measure(case, args.case_timeout)
        if record.get("out_of_memory"):
            too_large.add((case["model"], case["provider"]))
        with args.out.open("a") as file:
            file.write(json.dumps(record) + "\n")
        bar.write(f"{case['model']:<12} {case['batch']:>3} {case['provider']:<6} {_cell(record)}")
    while _ready:
        _ready.pop().close()
    wanted = {key(case) for case in cases(args)}
    records = [record for record in read(args.out) if key(record) in wanted]
    print(f"\n{table(records)}\n")
    broken = [r for r in records if "error" in r and not r.get("out_of_memory")]
    print(f"{len(records)} cases, {len(broken)} broken; {args.out}; {time.perf_counter() - start:.0f} s")
    return int(len(broken) == len(records))


if __name__ == "__main__":
    sys.exit(main())
