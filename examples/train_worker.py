"""One provider's training run, in a process of its own: started by train.py with a plan (JSON).

python train_worker.py PLAN PROVIDER RESULT      train, write the result as JSON
python train_worker.py PLAN verify RESULT        load the checkpoint into a stock model
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import re
import statistics
import sys
import time
import warnings
from pathlib import Path

# Before the libraries are imported: no network, no chatter.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
warnings.filterwarnings("ignore")

WARMUP_STEPS = 2  # left out of tokens/s: first calls, allocator and thread pools


def processor() -> str:
    """The name of the processor, and the threads that PyTorch uses."""
    import torch

    found = None
    if (file := Path("/proc/cpuinfo")).exists():
        found = re.search(r"model name\s*:\s*(.+)", file.read_text())
    return f"{found[1].strip() if found else 'CPU'}, {torch.get_num_threads()} threads"


class NotAvailable(Exception):
    """The provider cannot run here; the message is one line for the user."""


def build_model(plan: dict):
    """The model of the plan, on its device, the same numbers in every process."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(plan["seed"])
    dtype = getattr(torch, plan["dtype"])
    if plan["checkpoint_in"]:
        model = AutoModelForCausalLM.from_pretrained(plan["checkpoint_in"], dtype=dtype)
    else:
        # Drawn in fp32 on the CPU and then rounded: every device and dtype starts alike.
        config = AutoConfig.for_model(**plan["config"])
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.config.use_cache = False
    return model.to(device=plan["device"], dtype=dtype).train()


def patch(model, provider: str) -> list[str]:
    """Put the provider's kernels into the model; returns lines to show."""
    if provider == "stock":
        return []
    if provider == "control":
        return nudge(model)
    if provider == "tigon":
        sys.path.append(str(Path(__file__).resolve().parents[1] / "python"))  # unless it is installed
        try:
            import tigon
        except ImportError as error:
            raise NotAvailable(f"tigon is not installed here: {error}") from error
        return str(tigon.apply(model)).splitlines()
    if provider == "liger":
        if next(model.parameters()).device.type != "cuda":
            raise NotAvailable("liger needs a GPU: it has no CPU kernels")
        try:
            from liger_kernel.transformers import _apply_liger_kernel_to_instance
        except ImportError as error:
            raise NotAvailable(f"liger-kernel is not installed here: {error}") from error
        _apply_liger_kernel_to_instance(model=model)
        return []
    raise NotAvailable(f"unknown provider {provider!r}: stock, tigon, liger, control")


def nudge(model) -> list[str]:
    """Move every parameter by one unit in the last place, up or down at random.

    A stock run from there shows how far rounding alone carries the loss curve, which is what
    "equal to within rounding" is measured by.
    """
    import torch

    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            sign = torch.randint(0, 2, p.shape, generator=generator).to(p.device, p.dtype) * 2 - 1
            p.mul_(1 + torch.finfo(p.dtype).eps * sign)
    return ["every parameter moved by one unit in the last place"]


class PeakMemory:
    """The most memory in use above a baseline.

    CUDA: bytes of tensors, from torch's allocator. CPU: resident memory of the process. Linux
    keeps its high-water mark as VmHWM in /proc/self/status, and writing 5 to /proc/self/clear_refs
    sets the mark back to the present value. Where that is not allowed (some containers), the mark
    of the whole run is taken, which includes the first step.
    """

    def __init__(self, device: str):
        self.cuda = device.startswith("cuda")
        self.baseline = 0
        self.note = ""

    def start(self) -> None:
        """Take the baseline: call it with gradients freed, model and optimizer state alive."""
        import gc

        gc.collect()
        if self.cuda:
            import torch

            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.baseline = torch.cuda.memory_allocated()
            return
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)  # hand freed memory back, so it does not count
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            self.note = "high-water mark of the whole run: /proc/self/clear_refs is not writable"
        self.baseline = self._status("VmRSS")

    def above(self) -> int:
        """Bytes above the baseline at the worst moment since."""
        if self.cuda:
            import torch

            return torch.cuda.max_memory_allocated() - self.baseline
        return max(0, self._status("VmHWM") - self.baseline)

    @staticmethod
    def _status(field: str) -> int:
        try:
            for line in Path("/proc/self/status").read_text().splitlines():
                if line.startswith(field + ":"):
                    return int(line.split()[1]) * 1024
        except OSError:
            pass
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def learning_rate(step: int, steps: int) -> float:
    """Warm-up over a tenth of the run, then half a cosine down to a tenth; factor of --lr."""
    warmup = max(1, steps // 10)
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * done))


def train(plan: dict, provider: str) -> dict:
    """Run the plan; returns what train.py shows and plots."""
    import torch
    from tqdm import tqdm
    from train_data import batches

    device, steps = plan["device"], plan["steps"]
    model = build_model(plan)
    lines = patch(model, provider)
    for line in lines:
        print(f"  {line}", flush=True)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=plan["lr"], betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: learning_rate(i, steps))
    memory = PeakMemory(device)
    memory.start()
    losses, seconds, tokens = [], [], plan["batch"] * plan["seq"]
    data = batches(plan["tokens_file"], plan["batch"], plan["seq"], steps, plan["seed"])
    often = 0.1 if sys.stderr.isatty() else 15  # seconds: a log file needs no moving bar
    bar = tqdm(data, f"{provider:>7}", steps, unit="step", dynamic_ncols=True, mininterval=often)
    for step, rows in enumerate(bar):
        ids = torch.from_numpy(rows).to(device)
        start = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())  # waits for the device, so the time below is the step's
        seconds.append(time.perf_counter() - start)
        bar.set_postfix_str(f"loss {losses[-1]:.4f}, {tokens / seconds[-1]:,.0f} tokens/s", refresh=False)
        del loss
        if step == 0 and steps > 1:
            memory.start()  # the first step made the optimizer's state: not part of the peak
    peak = memory.above()
    timed = seconds[min(WARMUP_STEPS, steps - 1) :]
    result = {
        "provider": provider,
        "losses": losses,
        "seconds": seconds,
        "tokens_per_s": tokens / statistics.median(timed),
        "peak_bytes": peak,
        "baseline_bytes": memory.baseline,
        "memory_note": memory.note,
        "report": lines,
        "parameters": sum(p.numel() for p in model.parameters()),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "device_name": torch.cuda.get_device_name() if device.startswith("cuda") else processor(),
    }
    if provider == "tigon" and plan["checkpoint_out"]:
        model.save_pretrained(plan["checkpoint_out"])
        result["checkpoint_loss"] = probe(model, ids)
    return result


def probe(model, ids) -> float:
    """Loss of a trained model on a few of its last sequences."""
    import torch

    model.eval()
    with torch.no_grad():
        return model(input_ids=ids[:2], labels=ids[:2]).loss.item()


def verify(plan: dict) -> dict:
    """Load the checkpoint with stock transformers, without tigon, and compute the probe."""
    import torch
    from train_data import batches
    from transformers import AutoModelForCausalLM

    *_, rows = batches(plan["tokens_file"], plan["batch"], plan["seq"], plan["steps"], plan["seed"])
    model = AutoModelForCausalLM.from_pretrained(plan["checkpoint_out"], dtype=getattr(torch, plan["dtype"]))
    model = model.to(plan["device"])
    result = {"checkpoint_loss": probe(model, torch.from_numpy(rows).to(plan["device"]))}
    assert "tigon" not in sys.modules
    return result


def main() -> None:
    """Read the plan, do the part, write the result."""
    plan_file, part, result_file = sys.argv[1:]
    plan = json.loads(Path(plan_file).read_text())
    if plan["threads"]:
        import torch

        torch.set_num_threads(plan["threads"])
    try:
        result = verify(plan) if part == "verify" else train(plan, part)
    except NotAvailable as reason:
        result = {"provider": part, "skipped": str(reason)}
    Path(result_file).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
