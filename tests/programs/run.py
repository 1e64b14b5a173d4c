#!/usr/bin/env python3
"""Other people's programs, stock and with Tigon: `make programs`, `make programs ARGS="--only trl lightning"`.

Each program is a file of this folder. It gets a virtual environment of its own under build/programs, on top of .venv's
packages, and its own packages from PyPI. Each of its cases runs twice in processes of their own, with the same seeds: losses and
gradient norms must agree within rounding, and Tigon's native operators must have been called. Results go to record.jsonl,
and from there to docs/programs.md.
"""

import argparse
import datetime
import hashlib
import importlib
import importlib.metadata
import json
import math
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BUILD = ROOT / "build/programs"
RECORD = HERE / "record.jsonl"
PROGRAMS = sorted(path.stem for path in HERE.glob("*.py") if path.stem not in ("run", "program"))
NOT_RUN = (  # what no file of this folder runs, and why
    ("verl", "PPO, GRPO", "Ray, a server of rollouts (vLLM, SGLang) and GPUs. The actor's steps are run above"),
    ("OpenRLHF", "`train_sft`, `train_dpo`, PPO", "flash-attn and DeepSpeed's CUDA optimizers; PPO needs Ray and vLLM"),
    ("TRL", "`vllm_mode` of GRPO and RLOO", "vLLM, which needs a GPU"),
    ("accelerate", "its DeepSpeed plugin", "a GPU: on a CPU it takes DDP in its place. DeepSpeed's own entry is run above"),
    ("NeMo", "everything but AutoModel", "Transformer Engine and Apex, which build on CUDA only"),
    ("NeMo AutoModel", "its Auto classes and recipes", "a GPU: they ask CUDA for its device. Their patch of a model is run above"),
    ("InstructLab", "its training loop", "a GPU, and FSDP or DeepSpeed. Its models and their loss are run above"),
    ("VeOmni", "its models and trainers", "a GPU: its register refuses Liger's kernels elsewhere. The kernels are run above"),
    ("torchtune", "everything", "nothing: `tigon.apply` replaces its norms and gated MLPs; its losses take their own head"),
    ("DeepSpeed", "ZeRO++'s qwZ and qgZ, offload to NVMe", "their quantising kernels and aio are built with CUDA"),
)  # fmt: skip
TOLERANCE = 2e-4
SECONDS = 600  # of one run


def environment(name: str, packages: str, alone: str) -> Path:
    """The Python of a program's environment, made where it is not there or its packages have changed.

    `alone` are packages that come without those they ask for: these would bring CUDA or another torch.
    """
    folder = BUILD / name
    log, stamp = folder / "install.log", folder / "packages"
    key = hashlib.sha256(f"{sys.version} {packages} | {alone}".encode()).hexdigest()
    python = folder / "bin/python"
    if stamp.exists() and stamp.read_text() == key:
        return python
    shutil.rmtree(folder, ignore_errors=True)
    base = Path(sys.base_prefix, "bin", f"python{sys.version_info[0]}.{sys.version_info[1]}")
    subprocess.run([base, "-m", "venv", folder], check=True)
    site = next((folder / "lib").glob("python*/site-packages"))
    shared = [path for path in sys.path if path.endswith("site-packages")]
    (site / "shared.pth").write_text("\n".join([*shared, str(ROOT / "python")]) + "\n")
    (folder / "constraints").write_text(f"torch=={importlib.metadata.version('torch').partition('+')[0]}\n")
    pip = [python, "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "-q"]
    with open(log, "w") as file:
        for options in (
            ["-c", folder / "constraints", *packages.split()],
            ["--no-deps", *alone.format(site=site).split()],
        ):
            if packages if "-c" in options else alone:
                done = subprocess.run([*pip, *options], stdout=file, stderr=file, stdin=subprocess.DEVNULL)
                if done.returncode:
                    raise RuntimeError(f"pip failed: {log.read_text().strip().splitlines()[-1]}")
    stamp.write_text(key)
    return python


def run(python: Path, program: str, index: int, processes: int, mode: str, folder: Path) -> dict:
    """Losses, counted calls and peak memory of one run."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = {
        **os.environ, "PYTHONPATH": os.pathsep.join(map(str, (HERE / "counting", ROOT / "python"))),
        "TIGON_COUNTS": str(folder), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false", "HF_HOME": str(BUILD / "cache"), "WANDB_MODE": "disabled", "DO_NOT_TRACK": "1", "AXOLOTL_DO_NOT_TRACK": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PATH": f"{python.parent}:{os.environ['PATH']}",
        "PYTHONHASHSEED": "0", "DS_ACCELERATOR": os.environ.get("DS_ACCELERATOR", "cpu"),
    }  # fmt: skip
    if Path("/dev/nvidia0").exists():
        variables.pop("DS_ACCELERATOR")
    command = [python, Path(__file__), "--child", program, str(index), mode, folder]
    started = []
    for rank in range(processes):
        place = {} if processes == 1 else {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes}
        place |= {} if processes == 1 else {"LOCAL_WORLD_SIZE": processes}
        with open(folder / f"log{rank}.txt", "w") as file:
            started.append(subprocess.Popen(
                command, env=variables | {k: str(v) for k, v in place.items()}, cwd=folder,
                stdout=file, stderr=file, stdin=subprocess.DEVNULL,
            ))  # fmt: skip
    try:
        deadline = time.monotonic() + SECONDS
        codes = [process.wait(max(1.0, deadline - time.monotonic())) for process in started]
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{mode}: no end after {SECONDS} s ({folder}/log0.txt)") from None
    finally:
        for process in started:
            process.kill()
            process.wait()
    if any(codes):
        bad = folder / f"log{next(i for i, code in enumerate(codes) if code)}.txt"
        said = [line for line in bad.read_text().splitlines() if line.strip()]
        raised = [line for line in said if re.match(r"(\[rank\d\]: )?[\w.]*(Error|Exception|Exit)\b", line)]
        raise RuntimeError(f"{mode}: {(raised or said or [f'ended with {codes}'])[-1][:300]} ({bad})")
    calls: dict[str, int] = {}
    for path in folder.glob("calls-*.json"):
        for op, count in json.loads(path.read_text()).items():
            calls[op] = calls.get(op, 0) + count
    peaks = [json.loads(path.read_text()) for path in folder.glob("memory-*.json")]
    return {
        "losses": json.loads((folder / "losses.json").read_text()),
        "calls": calls,
        "memory_mb": round(max(peaks) / 2**20) if peaks else None,
    }


def compare(stock: dict, tigon: dict, head: bool, lora: int | None) -> tuple[float, str]:
    """The largest relative difference, and what is wrong, if anything."""
    one, other = stock["losses"], tigon["losses"]
    if not one or len(one) != len(other) or not all(map(math.isfinite, one + other)):
        return math.nan, f"stock has {one}, Tigon {other}"
    difference = max(abs(a - b) / max(abs(a), 0.1) for a, b in zip(one, other, strict=True))
    if stock["calls"]:
        return difference, "the stock run called Tigon"
    if not tigon["calls"]:
        return difference, "no native operator of Tigon was called"
    if head and not any(re.search("::(linear|loss_head)_", op) for op in tigon["calls"]):
        return difference, "the loss head was not fused"
    if lora == 0:
        return difference, "no adapter was fused"
    return difference, "" if difference <= TOLERANCE else f"stock has {one}, Tigon {other}"


def run_program(name: str, only_cases: str | None) -> list[dict]:
    """Every case of a program, printed as it ends."""
    module = importlib.import_module(name)
    wanted = [(i, c) for i, c in enumerate(module.CASES) if not only_cases or only_cases in c.name]
    print(f"{module.PROGRAM}", flush=True)
    gpu = Path("/dev/nvidia0").exists()
    try:
        runs_here = any(gpu or not case.gpu for _, case in wanted)
        python = environment(name, module.PACKAGES, module.ALONE) if runs_here else None
        broken = ""
    except (RuntimeError, subprocess.CalledProcessError) as error:
        broken = str(error)
    results = []
    for index, case in wanted:
        entry = {
            "program": module.PROGRAM,
            "case": case.name,
            "switch": case.switch,
            "processes": case.processes,
        }
        entry |= {"date": str(datetime.date.today()), "device": "GPU" if gpu else "CPU", "error": broken}
        start = time.monotonic()
        if case.gpu and not gpu:
            entry["not_run"] = case.gpu
        elif not broken:
            folder = BUILD / name / "runs" / re.sub(r"\W+", "-", case.name)
            try:
                one, other = (
                    run(python, name, index, case.processes, m, folder / m) for m in ("stock", "tigon")
                )
                lora = sum(n for op, n in other["calls"].items() if "::lora_linear" in op)
                entry |= {"lora": lora} if re.search("LoRA|DoRA", case.name) else {}
                expected = entry.get("lora") if case.lora else None
                entry["difference"], entry["error"] = compare(one, other, case.head, expected)
                entry["calls"] = sum(other["calls"].values())
                entry["ops"] = len(other["calls"])
                entry["memory_mb"] = [one["memory_mb"], other["memory_mb"]]
                versions = json.loads((folder / "tigon/versions.json").read_text())
                entry["version"] = versions.pop("own")
                entry["beside"] = versions
            except RuntimeError as error:
                entry["error"] = str(error)
        results.append(entry)
        said = (
            entry.get("not_run")
            or entry["error"]
            or "difference {difference:.1e}, {calls} calls".format_map(entry)
            + (f", {entry['lora']} of lora_linear" if "lora" in entry else "")
        )
        state = "not here" if entry.get("not_run") else "FAILED" if entry["error"] else "ok"
        print(f"  {case.name:<34} {state:<8} {time.monotonic() - start:4.0f} s  {said}", flush=True)
    return results


def child(program: str, index: int, mode: str, folder: Path) -> None:
    """One process of one run, inside the program's environment."""
    sys.path.insert(0, str(HERE))
    module = importlib.import_module(program)
    case = module.CASES[index]
    losses = case.function(mode == "tigon", folder, *case.arguments)
    if int(os.environ.get("RANK", 0)) == 0:
        (folder / "losses.json").write_text(json.dumps(losses))
        names = {"own": module.DISTRIBUTION, "torch": "torch", "transformers": "transformers", "peft": "peft"}
        versions = {}
        for key, name in names.items():
            try:
                versions[key] = importlib.metadata.version(name).partition("+")[0]
            except importlib.metadata.PackageNotFoundError:
                pass
        (folder / "versions.json").write_text(json.dumps(versions))


def table(entries: list[dict]) -> str:
    """docs/programs.md."""
    lines = [
        "# Other programs, run", "",
        "Written by `make programs`, which runs each program's own entry point on a tiny random model, stock and with Tigon, with",
        "the same seeds. The difference is the largest relative one of all losses and gradient norms of the run. Native calls are",
        "the calls of Tigon's operators that PyTorch's profiler counted in all processes of the run; of adapters, those of",
        "`lora_linear` and its backward. The programs are in `tests/programs`, each in an environment of its own on top of `.venv`.", "",
        "| program | what ran | switch | difference | native calls | beside | date |",
        "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for e in entries:
        what = e["case"] + (f", {e['processes']} processes" if e["processes"] > 1 else "")
        if e.get("not_run"):
            outcome = f"not run: {e['not_run']} | "
        elif e["error"]:
            outcome = "**failed** | " + str(e.get("calls", ""))
        else:
            outcome = f"{e['difference']:.1e} | {e['calls']} of {e['ops']} operators"
            outcome += f", {e['lora']} of `lora_linear`" if "lora" in e else ""
        beside = ", ".join(f"{name} {v}" for name, v in e.get("beside", {}).items())
        beside += "".join(
            f", {e['memory_mb'][1]} MB for {e['memory_mb'][0]}"
            for _ in "."
            if (e.get("memory_mb") or [None])[0]
        )
        program = f"{e['program']} {e.get('version', '')}".strip()
        lines.append(
            f"| {program} | {what} | {e['switch']} | {outcome} | {beside} | {e['date']}, {e['device']} |"
        )
    lines += ["", "## Not run on a CPU", "", "| program | what | it needs |", "|---|---|---|"]
    lines += [f"| {program} | {what} | {why} |" for program, what, why in NOT_RUN]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run what is asked for; 1 when a case failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", nargs="+", metavar="PROGRAM", help=f"of {', '.join(PROGRAMS)}, or a part of a name"
    )
    parser.add_argument("--cases", metavar="TEXT", help="cases whose names hold this")
    parser.add_argument("--cheap", action="store_true", help="what CI runs")
    args = parser.parse_args()
    sys.path.insert(0, str(HERE))
    names = [
        name for name in PROGRAMS if not args.cheap or getattr(importlib.import_module(name), "CHEAP", False)
    ]
    if args.only:
        names = [name for name in names if any(part.lower().replace("-", "") in name for part in args.only)]
        if not names:
            parser.error(f"--only must name some of {', '.join(PROGRAMS)}")
    results = [entry for name in names for entry in run_program(name, args.cases)]
    before = map(json.loads, RECORD.read_text().splitlines()) if RECORD.exists() else ()
    record = {(e["program"], e["case"]): e for e in (*before, *results)}
    order = [(m.PROGRAM, c.name) for m in map(importlib.import_module, PROGRAMS) for c in m.CASES]
    entries = [record[key] for key in order if key in record]
    RECORD.write_text("".join(json.dumps(e) + "\n" for e in entries))
    (ROOT / "docs/programs.md").write_text(table(entries))
    failed = [e for e in results if e["error"]]
    print(f"{len(results) - len(failed)} passed, {len(failed)} failed")
    return bool(failed)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], int(sys.argv[3]), sys.argv[4], Path(sys.argv[5]))
    else:
        sys.exit(main())
