"""Captures and replays graphs, and holds the memory that they share."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import logging
import operator
import sys
import weakref
from collections.abc import Callable, Sequence

import torch

log = logging.getLogger("tigon")
live: weakref.WeakSet = weakref.WeakSet()  # whatever holds graphs, for `tigon.env`

WARMUP = 2  # calls that run eagerly first: optimizers make their states, libraries their workspaces
RECAPTURES = 8  # what changes more often than this, each time within so many replays, runs eagerly
LASTING = 100

_storage_holders: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)


class CudaBackend:
    """Captures on a stream of its own; all graphs of one backend share one pool of memory.

    Graphs of one pool are replayed one after the other: each may write where another one has worked.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(device)
        self.shared = True  # warm-ups work in the pool
        self.left = False  # whether something that was made `in_pool` is still alive
        self._last: torch.cuda.Stream | None = None
        self._kept = False  # the pool, also without a graph

    @staticmethod
    def capturing() -> bool:
        return torch.cuda.is_current_stream_capturing()

    @contextlib.contextmanager
    def in_pool(self):
        """Run on the stream of captures, in their pool: what a warm-up frees there, a capture takes."""
        torch.cuda.empty_cache()  # what eager steps have left would stay in addition to the pool
        index, current = self.device.index, torch.cuda.current_stream(self.device)
        begin = _allocate_in_pool if self.shared else None
        for stream in {current, self._last or current}:
            self.stream.wait_stream(stream)
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            with torch.enable_grad():  # cuBLAS makes its handles of this stream, and takes their workspaces
                ones = torch.ones(16, 16, device=self.device, requires_grad=True)
                torch.autograd.grad(torch.mm(ones, ones).sum(), ones)  # another thread has another handle
            before = torch.cuda.memory_allocated(index)
            with _in_one_piece(index) if begin else contextlib.nullcontext():
                if begin:
                    begin(index, self.pool)
                try:
                    yield
                finally:
                    if begin:
                        torch._C._cuda_endAllocateToPool(index, self.pool)
                        if self._kept:
                            self._release()
                        self._kept = True
                    current.wait_stream(self.stream)
        if torch.cuda.memory_allocated(index) > before:
            gc.collect()
        self.left = begin is not None and torch.cuda.memory_allocated(index) > before

    @staticmethod
    def warm(fn: Callable[[], object]) -> object:
        """Run `fn` as it will be captured; what makes the host wait for the device raises if it does."""
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            return fn()
        finally:
            torch.cuda.set_sync_debug_mode(mode)

    def capture(self, fn: Callable[[], Sequence[torch.Tensor | None]], weak: bool = False):
        """``(graph, tensors)``: the tensors that `fn` returned; ``graph.replay()`` computes them again.

        Args:
            weak: the tensors do not own their memory. It is the pool's: another graph may write there.
        """
        graph = torch.cuda.CUDAGraph()
        current, collects = torch.cuda.current_stream(self.device), gc.isenabled()
        gc.disable()  # collecting a graph while another one is captured breaks it
        try:
            with (
                torch.cuda.device(self.device),
                _in_one_piece(self.device.index),
                torch.cuda.graph(
                    graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"
                ),
            ):
                results = fn()
        except BaseException as error:
            torch.cuda.set_stream(current)  # a capture that fails does not come back by itself
            self._recover()
            first = error.__context__  # the end of a broken capture says that there was an error before
            raise first if isinstance(first, Exception) else error from None
        finally:
            if collects:
                gc.enable()
        return graph, _borrowed(results) if weak else list(results)

    def _recover(self) -> None:
        """A broken capture leaves PyTorch's generator as inside of it: another one ends that."""
        with contextlib.suppress(RuntimeError):
            torch.cuda.synchronize(self.device)
        graph, counter = torch.cuda.CUDAGraph(), torch.zeros(1, device=self.device)
        with torch.cuda.device(self.device), torch.cuda.graph(graph, capture_error_mode="thread_local"):
            counter += 1

    def replay(self, graph) -> None:
        current = torch.cuda.current_stream(self.device)
        if self._last is not None and self._last != current:
            current.wait_stream(self._last)
        self._last = current
        graph.replay()

    @staticmethod
    def mark(device: torch.device) -> torch.cuda.Event | None:
        """Now, on the device."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return event

    @staticmethod
    def between(some: torch.cuda.Event, later: torch.cuda.Event) -> float | None:
        """Milliseconds, None while the device is not there yet."""
        return some.elapsed_time(later) if later.query() else None

    def size(self) -> int:
        """Bytes of the pool."""
        segments = torch.cuda.memory_snapshot()
        return sum(s["total_size"] for s in segments if tuple(s["segment_pool_id"]) == tuple(self.pool))

    def settle(self) -> None:
        torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """Give the memory back to the device, as far as nobody uses it."""
        self.__del__()
        torch.cuda.empty_cache()

    def _release(self) -> None:
        torch._C._cuda_releasePool(self.device.index, self.pool)

    def __del__(self):
        if self._kept and not sys.is_finalizing():
            self._kept = False
            if not self.capturing():
                self.settle()  # before it unmaps memory the allocator waits for the stream of captures only
            self._release()


# PyTorch's, for what is allocated on the current stream, whichever thread does.
_allocate_in_pool = getattr(torch._C, "_cuda_beginAllocateCurrentStreamToPool", None)


@contextlib.contextmanager
def _in_one_piece(index: int):
    """Memory that is taken meanwhile grows in one piece (expandable_segments), unless the program says how.

    A pool that took a piece for each larger tensor would be half as large again.
    """
    put = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if put is None or not _maps_memory(index):
        yield
        return
    settings = torch.cuda.memory._snapshot()["allocator_settings"]  # of the environment and of the program
    given = settings["PYTORCH_CUDA_ALLOC_CONF"]
    if settings.get("expandable_segments") or "expandable_segments" in given:
        yield
        return
    so, others = "expandable_segments:{}".format, [given.strip(", ")] if given else []
    put(",".join([*others, so(True)]))  # a setting that is not named again loses its value
    try:
        yield
    finally:
        put(",".join([*others, so(False)]))
        put(given)


@functools.cache
def _maps_memory(index: int) -> bool:
    """Whether the driver maps memory piece by piece, and PyTorch's own allocator asks it."""
    found, supported = ctypes.c_int(0), 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
    try:
        ctypes.CDLL("libcuda.so.1").cuDeviceGetAttribute(ctypes.byref(found), supported, index)
    except (OSError, AttributeError):
        return False
    return bool(found.value) and torch.cuda.get_allocator_backend() == "native"


class _Memory:
    """Memory of a device by its address; a tensor made of it does not own it."""

    def __init__(self, address: int, size: int):
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }


def _borrowed(tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Tensors on the same memory that do not own it."""
    found, made = [], {}
    for t in tensors:
        if t is None:
            found.append(None)
            continue
        storage = t.untyped_storage()
        address = storage.data_ptr()
        if address not in made:
            memory = _Memory(address, storage.nbytes())
            made[address] = torch.as_tensor(memory, device=t.device) if storage.nbytes() else storage
        whole = made[address]
        if whole is storage:
            found.append(t.detach())
            continue
        alike = torch.empty(0, dtype=t.dtype, device=t.device)
        found.append(alike.set_(whole.untyped_storage(), t.storage_offset(), t.shape, t.stride()))
    return found


# What captures graphs, by the type of the device. Tests add a recorder.
backends: dict[str, type] = {"cuda": CudaBackend}


class Loan:
    """Tensors of a pool that are lent to the program: gradients that a parameter takes for its own.

    Their memory is written again when a graph of the pool is replayed. Whoever still holds one by then keeps
    its values: a gradient of a parameter moves to memory of its own. Of any other holder nothing is known.

    Args:
        owners: the parameters.
        keeper: what keeps the memory, if the tensors do not.
    """

    def __init__(self, tensors: list[torch.Tensor], owners: list[torch.Tensor], keeper=None):
        self.tensors, self.owners, self.keeper = tensors, owners, keeper
        self.storages = [t.untyped_storage()._cdata for t in tensors]
        self.out = False
        self.alone = [] if _storage_holders is None else [*map(_storage_holders, self.storages)]

    def lend(self) -> list[torch.Tensor]:
        if _storage_holders is None:  # PyTorch cannot tell who holds them
            return [t.clone() for t in self.tensors]
        self.out = True
        return [t.detach() for t in self.tensors]

    def call_in(self) -> int:
        """How many are still held by the program, after the gradients of the owners were moved."""
        if not self.out:
            return 0
        if [*map(_storage_holders, self.storages)] != self.alone:
            ours = set(self.storages)
            for p in self.owners:
                grad = p.grad
                if grad is not None and grad.untyped_storage()._cdata in ours:
                    grad.data = grad.detach().clone()
                del grad
        now = map(_storage_holders, self.storages)
        held = sum(map(operator.gt, now, self.alone))
        self.out = held > 0
        return held

    def __del__(self):
        if not self.out or sys.is_finalizing():
            return
        if self.call_in():
            _lost.append(self.keeper)  # the program still reads it, for an unknown time
        elif (device := self.tensors[0].device).type == "cuda" and not CudaBackend.capturing():
            torch.cuda.synchronize(device)  # what was moved is read before the memory goes


_lost: list = []


@contextlib.contextmanager
def undisturbed(device: torch.device):
    """Around warm-up and capture: random numbers and autocast's copies of weights stay as they were."""
    cached = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)  # a copy made outside would be captured as a constant
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        torch.set_autocast_cache_enabled(cached)
        torch.clear_autocast_cache()


def why(error: BaseException) -> str:
    """A failed capture in few words."""
    if isinstance(error, torch.OutOfMemoryError):
        return "there is not enough memory to capture it"
    text = str(error).strip().split("\n", 1)[0]
    if "called a synchronizing" in text:
        frame = error.__traceback__
        place = ""
        while frame is not None:
            name = frame.tb_frame.f_globals.get("__name__", "")
            if not name.startswith(("torch.", "tigon.")):
                place = f" ({name}, line {frame.tb_lineno})"
            frame = frame.tb_next
        return f"something in it waits for the device{place}"
    return f"its capture failed: {type(error).__name__}: {text}"


class Said:
    """Reasons why calls run eagerly: counted, each said once."""

    def __init__(self, who: str):
        self.who = who
        self.counts: dict[str, int] = {}

    def say(self, reason: str) -> None:
        if reason not in self.counts:
            self.counts[reason] = 0
            log.warning("[graphs] %s runs eagerly: %s", self.who, reason)
        self.counts[reason] += 1
