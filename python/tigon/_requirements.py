"""Checks that PyTorch is installed before anything else is imported; if not, one line says what to do."""

import importlib.util
import sys

from tigon.error import Error

MINIMUM_TORCH = (2, 10)


def look(platform: str = sys.platform) -> None:
    """Raise if this is not Linux, or there is no PyTorch that fits."""
    if platform != "linux":
        raise Error(f"[load] the system must be Linux, got {platform} (a container or WSL 2 will do)")
    if importlib.util.find_spec("torch") is None:
        text = "[load] PyTorch must be installed, found none (pip install torch, then tigon)"
        raise ModuleNotFoundError(text, name="torch")
    import torch

    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < MINIMUM_TORCH:
        raise Error(f"[load] torch must be >= 2.10, got {torch.__version__} (pip install -U torch)")


look()

import torch  # noqa: E402

if torch.distributed.is_available():
    # Its functions have the default process group of that moment as a default argument. Imported later, as by
    # torch._dynamo, they hold it: destroy_process_group leaves gloo's threads, which may abort the exit.
    import torch.distributed.nn.functional
