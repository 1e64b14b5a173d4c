#!/usr/bin/env python3
"""Write docs/models.md: what `tigon.apply` replaces in every causal and multimodal model of transformers.

Each class is built with its default configuration on the meta device and given to `tigon.apply`: that is
the structure. A tiny random model of the class then takes one training step stock and one patched: that is
the proof. Nothing is downloaded. Workers are processes of their own: a crash or a hang costs one row.

    python tools/models_table.py             # all, writes docs/models.md
    python tools/models_table.py llama phi3  # these, printed
"""

from __future__ import annotations

import inspect
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SLOTS = ("norm", "mlp", "experts", "qkv", "qk_norm", "rope", "loss")
WORKERS = 2
SECONDS = 60  # of processor time for one class, and ten times that by the clock
LARGEST = 30_000_000  # weights of a "tiny" model that is still worth a step
EQUAL = "equal"
TOLERANCE = {"loss": 1e-5, "gradient": 1e-4}  # relative, fp32, gradients in the Euclidean norm of all


def models() -> list[tuple[str, str]]:
    """(model type, class name) of the causal and the multimodal mapping of the installed transformers."""
    from transformers.models.auto import modeling_auto

    pairs = {}
    for name in ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES"):
        for model_type, classes in getattr(modeling_auto, name).items():
            for cls in [classes] if isinstance(classes, str) else classes:
                pairs[model_type, cls] = None
    return sorted(pairs)


# --- one class -------------------------------------------------------------------------------


def survey(model_type: str, class_name: str) -> dict:
    """What apply does with one class, and whether a training step stays what it was."""
    import torch

    row = {"type": model_type, "class": class_name, "slots": {}, "built": None, "why": "", "step": ""}
    for tiny in (False, True):
        try:
            with torch.device("meta"):
                model = build(model_type, class_name, tiny)
        except Exception as error:  # whatever a modelling file raises is the row's reason
            row["why"] = row["why"] or brief(error)
            continue
        row["built"] = "tiny" if tiny else "default"
        row["slots"] = structure(model)
        break
    try:
        with torch.device("meta"):
            size = sum(p.numel() for p in build(model_type, class_name, tiny=True).parameters())
        if size > LARGEST:
            raise ValueError(f"{size // 1_000_000} M weights in the smallest model")
        row["step"] = compare(build(model_type, class_name, tiny=True))
    except Exception as error:
        row["step"] = brief(error)
    return row


def build(model_type: str, class_name: str, tiny: bool):
    """A random model of a class, with its default configuration or a shrunken one."""
    import transformers
    from tiny_config import tiny_config

    cls = getattr(transformers, class_name)
    config = transformers.CONFIG_MAPPING[model_type]()
    if not isinstance(config, cls.config_class):
        text = config.get_text_config(decoder=True)
        config = text if isinstance(text, cls.config_class) else config
    if tiny:
        config = tiny_config(config)
    if getattr(config, "is_decoder", None) is False:
        config.is_decoder = True
    return cls(config)


def structure(model) -> dict:
    """{slot: {"by": {what replaced it: places}, "left": {reason: places}}}."""
    import tigon
    from tigon.integrations.transformers import apply, undo
    from tigon.integrations.transformers.patch import NO_QK_NORM

    try:
        entries = [e for e in apply(model, qk_norm=True).entries if e.reason != NO_QK_NORM]
    except tigon.Error as error:
        return {"loss": {"by": {}, "left": {brief(error): 1}}}
    slots: dict = {}
    for entry in entries:
        slot = slots.setdefault(entry.slot, {"by": Counter(), "left": Counter()})
        if entry.replaced:
            slot["by"][entry.by] += 1
        else:
            slot["left"][f"{entry.kind}: {entry.reason}"] += 1
    undo(model)
    return slots


def compare(model) -> str:
    """One training step stock and one patched: `equal`, or what differs, or why it cannot run."""
    import torch

    from tigon.integrations.transformers import apply, undo

    model.train()
    wanted = step(model)
    again = step(model)
    if again[0] != wanted[0] or not torch.equal(again[1], wanted[1]):
        return "stock does not repeat itself"
    report = apply(model, qk_norm=True)
    got = step(model)
    undo(model)
    calls = report.head_calls
    loss = abs(got[0] - wanted[0]) / abs(wanted[0])
    gradient = ((got[1] - wanted[1]).norm() / wanted[1].norm()).item()
    if not (loss <= TOLERANCE["loss"] and gradient <= TOLERANCE["gradient"]):
        return f"DIFFERS: loss by {loss:.1e}, gradient by {gradient:.1e}"
    if report.count("loss") and not calls.fused:
        return "equal, logits computed"
    return EQUAL


def step(model):
    """Loss and all gradients of one step on text tokens."""
    import torch

    torch.manual_seed(0)
    ids = torch.randint(3, 90, (2, 12))
    model.zero_grad(set_to_none=True)
    options = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    output = model(input_ids=ids, labels=ids.clone(), **options)
    loss = getattr(output, "loss", None)
    if loss is None:
        raise ValueError("the model returns no loss")
    loss.backward()
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return loss.item(), torch.cat(gradients)


def brief(error: Exception) -> str:
    """One line of an exception."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:140]}"


# --- workers ---------------------------------------------------------------------------------


def work() -> None:
    """Answer every line `[type, class]` of standard input with a line of JSON."""
    import torch
    import transformers

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what models print is not an answer
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # its signal ends the process
        print(json.dumps(survey(*json.loads(line))), file=answers, flush=True)


class Worker:
    """A process that answers one question after the other, restarted when it dies or hangs."""

    def __init__(self):
        self.process = None

    def ask(self, pair) -> dict:
        """The row of one class."""
        if self.process is None:
            environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
            self.process = subprocess.Popen(
                [sys.executable, __file__, "--worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=environment,
            )
        process = self.process
        timer = threading.Timer(10 * SECONDS, process.kill)
        timer.start()
        try:
            process.stdin.write(json.dumps(pair) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        finally:
            timer.cancel()
        if answer:
            return json.loads(answer)
        self.close()
        why = f"the process died or took more than {SECONDS} s of processor time"
        return {"type": pair[0], "class": pair[1], "slots": {}, "built": None, "why": why, "step": ""}

    def close(self):
        """End the process."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


def survey_all(pairs) -> list[dict]:
    """The rows of all classes, in order."""
    questions: queue.Queue = queue.Queue()
    for pair in pairs:
        questions.put(pair)
    rows = {}

    def run():
        worker = Worker()
        while True:
            try:
                pair = questions.get_nowait()
            except queue.Empty:
                return worker.close()
            started = time.monotonic()
            rows[pair] = worker.ask(pair)
            print(f"{len(rows)}/{len(pairs)} {pair[1]} {time.monotonic() - started:.1f} s", file=sys.stderr)

    threads = [threading.Thread(target=run) for _ in range(WORKERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [rows[pair] for pair in pairs]


# --- the page --------------------------------------------------------------------------------


def full(row: dict) -> bool:
    """Nothing is left stock, and the step, where it could run, is equal."""
    left = any(slot["left"] for slot in row["slots"].values())
    wrong = row["step"].startswith(("DIFFERS", "equal, "))
    return row["built"] is not None and bool(row["slots"]) and not left and not wrong


def cell(row: dict, slot: str) -> str:
    """`12` replaced, `3 of 12`, or nothing of the kind."""
    found = row["slots"].get(slot)
    if found is None:
        return ""
    by, left = sum(found["by"].values()), sum(found["left"].values())
    return f"{by} of {by + left}" if left else f"{by}"


def left(row: dict) -> str:
    """What stays stock and why."""
    if row["built"] is None:
        return f"not buildable: {row['why']}"
    reasons = [
        f"{slot}: {reason}" for slot in SLOTS for reason in row["slots"].get(slot, {"left": ()})["left"]
    ]
    return "; ".join(reasons).replace("|", "/")


def line(row: dict) -> str:
    """The row of one class in the table."""
    cells = [row["type"], row["class"], "full" if full(row) else "partly" if row["built"] else "no"]
    cells += [cell(row, slot) for slot in SLOTS]
    return "| " + " | ".join([*cells, row["step"].replace("|", "/"), left(row)]) + " |"


def counts(rows: list[dict]) -> dict:
    """Model types by cover: a type is fully covered when all of its classes are."""
    verdicts: dict = {}
    for row in rows:
        verdicts.setdefault(row["type"], []).append(row)
    kinds = Counter()
    for group in verdicts.values():
        if all(map(full, group)):
            kinds["full"] += 1
        elif any(row["built"] for row in group):
            kinds["partly"] += 1
        else:
            kinds["no"] += 1
    stepped = {row["type"] for row in rows if row["step"].startswith(EQUAL)}
    return {"types": len(verdicts), **kinds, "stepped": len(stepped)}


def page(rows: list[dict]) -> str:
    """docs/models.md."""
    import transformers

    number = counts(rows)
    reasons: Counter = Counter()
    for row in rows:
        reasons.update(
            {f"{slot}: {reason}" for slot in row["slots"] for reason in row["slots"][slot]["left"]}
        )
    summary = " | ".join(str(number.get(kind, 0)) for kind in ("types", "full", "partly", "no", "stepped"))
    text = f"""# Models

Written by `tools/models_table.py` from what `tigon.apply` did; transformers
{transformers.__version__}, every type of the causal-LM and multimodal-LM mappings. Each class is built with
its default configuration on the meta device.

| model types | fully covered | partly | not buildable here | training step compared |
|---|---|---|---|---|
| {summary} |

Fully covered: every norm, gated MLP, experts module, rotary function and the loss head is Tigon's; plain
two-matrix MLPs, attention, scans, convolutions and batch norms stay what they are. A number is how many
places were replaced, `3 of 12` that some were left. `step`: a tiny random model took one training step on
text tokens, stock and patched, in fp32; `equal` says that the loss agrees to {TOLERANCE["loss"]:g} and
all gradients together to {TOLERANCE["gradient"]:g} (relative). Otherwise it says why that could not be tried.

| type | class | cover | {" | ".join(SLOTS)} | step | left stock, and why |
|---|---|---|{"---|" * len(SLOTS)}---|---|
"""
    text += "\n".join(map(line, rows)) + "\n"
    if reasons:
        text += "\n## Reasons, most frequent first\n\n| classes | reason |\n|---|---|\n"
        text += "".join(
            f"| {n} | {reason.replace('|', '/')} |\n"
            for reason, n in sorted(reasons.items(), key=lambda item: (-item[1], item[0]))
        )
    return text


def main() -> int:
    """Survey the classes; 1 when a step differs from stock's."""
    if "--worker" in sys.argv:
        work()
        return 0
    import tigon.integrations.transformers  # noqa: F401  said here, not by a worker that dies

    wanted = sys.argv[1:]
    rows = survey_all([pair for pair in models() if not wanted or pair[0] in wanted])
    if wanted:
        print(*map(line, rows), sep="\n")
    else:
        (ROOT / "docs/models.md").write_text(page(rows), encoding="utf-8")
    print(counts(rows))
    return any(row["step"].startswith("DIFFERS") for row in rows)


if __name__ == "__main__":
    sys.exit(main())
