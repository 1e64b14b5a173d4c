"""`apply(model, graphs=True)`: forward and backward of a training call as two CUDA graphs.

They hold the whole model with its loss if the model computes it. If other code computes a loss from hidden
states or logits (TRL's trainers, a loss of the program), they hold the decoder below the head.

The forward of a patched model replays the first one and returns a loss; the backward of that loss copies its
upstream gradient, replays the second one and hands out the gradients, which autograd accumulates as ever. So
hooks on gradients, a scaler, DDP and accumulation see what they see without graphs. Two graphs and not one:
what is upstream of the loss is known only in the backward, and scaling gradients afterwards would round (and,
in float16, lose) what a scaler preserves.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel, masking_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import ModelOutput

from tigon._op import is_transformed, once
from tigon.error import check
from tigon.graphs.backend import LASTING, RECAPTURES, WARMUP, Loan, Said, backends, live, undisturbed, why
from tigon.graphs.watch import StandIns, Watch, intercepted
from tigon.integrations.transformers.forward import (
    ARRIVALS,
    BELOW,
    HOOKED,
    MODEL,
    STATE,
    bind_model,
    model_forward,
    stock,
)
from tigon.integrations.transformers.graph_arguments import Eagerly, Given, Traits, sort_out
from tigon.integrations.transformers.graph_outputs import Parts, Refusing, Unfit, replayed_logits, taken_apart
from tigon.integrations.transformers.lazy_logits import LazyLogits
from tigon.integrations.transformers.routers import ROUTED
from tigon.ops.loss_head.plan import MIB
from tigon.ops.philox import Draws

GRAPHS = "_tigon_graphs"  # attribute of a model with its `ModelGraphs`
LIMIT = 16  # graphs kept of one model
HELD = "gradients of an earlier step are still held by the program (clone what you keep)"
OWN_LOSS = "the program computes a loss of output.logits"
MEASURED = 4  # replays whose time is compared with that of eager calls
UNUSED = 256  # replays of others after which a graph makes room

# Attributes of a model's instance that its forward does not read, or that others put around it.
_AROUND = (
    "forward",
    "_original_forward",
    HOOKED,
    MODEL,
    BELOW,
    GRAPHS,
    STATE,
    ARRIVALS,
    "_hf_hook",
    "tigon_report",
)


def use_graphs(root: nn.Module, name: str, lengths: Sequence[int]) -> ModelGraphs:
    """Make the patched forward of a model replay graphs, and its decoder's forward for other callers."""
    vars(root)[GRAPHS] = graphs = ModelGraphs(name, lengths)
    decoder = getattr(root, "base_model", root)
    if isinstance(decoder, PreTrainedModel) and decoder is not root and model_forward(decoder) is None:
        names = tuple(inspect.signature(type(decoder).forward).parameters)[1:]
        vars(decoder)[GRAPHS] = ModelGraphs(type(decoder).__name__, lengths, graphs)
        bind_model(forward_of_decoder, decoder, names)
    return graphs


def drop_graphs(root: nn.Module) -> None:
    """Remove the graphs of a model."""
    for module in root.modules():
        graphs = vars(module).pop(GRAPHS, None)
        if graphs is not None:
            graphs.reset()


def forward_of_decoder(module: nn.Module, names: tuple[str, ...], *args, **kwargs):
    """Run a decoder's forward: a replay, unless a graph of the whole model contains it."""
    graphs = vars(module).get(GRAPHS)
    idle = graphs is not None and not graphs.running and not torch.compiler.is_compiling()
    if not idle or (graphs.outer.running and not graphs.outer.bypassed):
        return stock(module, *args, **kwargs)
    plain = functools.partial(forward_of_decoder, module, names)
    return graphs.call(module, None, names, plain, args, kwargs)


class _Call:
    """A replayed forward whose backward has not been replayed."""

    def __init__(self, owner: ModelGraphs, graph: _Graph, generation: int):
        self.owner, self.graph, self.generation = owner, graph, generation
        self.versions = owner.versions()
        self.done = False

    def backward(self, upstream: torch.Tensor):
        words = (
            "a loss must be differentiated once, got a second backward (retain_graph=True needs graphs=False)"
        )
        check("graphs", not self.done, words)
        self.done = True
        return self.owner.backward(self, upstream)


class _Replayed(torch.autograd.Function):
    """The result of a replayed forward, differentiable by the parameters that it reaches."""

    @staticmethod
    def forward(ctx, call: _Call, result: torch.Tensor, *parameters):
        ctx.call = call
        ctx.set_materialize_grads(False)
        return result.clone()

    @staticmethod
    @once("graphs")
    def backward(ctx, upstream):
        if upstream is None:
            return (None,) * len(ctx.needs_input_grad)
        return None, None, *ctx.call.backward(upstream)


@dataclass(eq=False)
class _Graph:
    """One captured forward and backward."""

    key: tuple
    inputs: dict[str, torch.Tensor]
    forward: object = None
    backward: object = None
    upstream: torch.Tensor | None = None
    result: torch.Tensor | None = None  # the loss, or hidden states
    parts: Parts | None = None
    used: list[torch.Tensor] = field(default_factory=list)  # parameters with a gradient
    loan: Loan | None = None
    replayed: int = 0  # when, the last time


class _Request(NamedTuple):
    """A call of a forward that no graph holds yet."""

    module: nn.Module
    calls: object  # counts of the model's head
    key: tuple  # of the graph
    sort: Given  # its arguments
    plain: Callable  # the forward without graphs


class _Step:
    """The forward and the backward of a request, captured with stand-ins of the parameters."""

    parameters: StandIns

    def __init__(self, request: _Request, watch: Watch, result: str, padding):
        self.sort, self.plain, self.watch, self.result = request.sort, request.plain, watch, result
        self.device = watch.parameters[0].device
        inputs = {
            name: torch.empty(self.sort.size(value), dtype=value.dtype, device=self.device)
            for name, value in self.sort.tensors.items()
        }
        self.graph = _Graph(request.key, inputs)
        self.sort.copy_to(inputs, padding)
        if not watch.trained:
            raise Unfit("no parameter has a gradient")

    def forward(self) -> list[torch.Tensor]:
        with self.parameters:
            self.output = self.plain(**self.graph.inputs, **self.sort.options)
        self.parts, tensors = taken_apart(self.output, self.result)
        return tensors

    def backward(self) -> list[torch.Tensor]:
        graph, loss = self.graph, self.output[self.result]
        del self.output
        off = torch.autocast(self.device.type, enabled=False)  # as where programs call loss.backward()
        with off, self.parameters as stand_ins:  # checkpoints run layers again
            gradients = torch.autograd.grad(loss, stand_ins.parameters, graph.upstream, allow_unused=True)
        graph.used = [p for p, g in zip(self.watch.trained, gradients, strict=True) if g is not None]
        return [g for g in gradients if g is not None]

    def both(self) -> None:
        self.forward()
        loss = self.output[self.result]
        _check_leaves(loss, self.parameters.parameters)
        self.graph.upstream = torch.ones_like(loss)
        del loss
        if any(g.layout != torch.strided for g in self.backward()):
            raise Unfit("a gradient is sparse")
        # The one that replays read is made outside of the pool.
        self.graph.upstream = torch.empty_like(self.graph.upstream, device="meta")


class ModelGraphs:
    """The graphs of one model, and the reasons why calls run eagerly."""

    def __init__(self, name: str, lengths: Sequence[int] = (), outer: ModelGraphs | None = None):
        self.name, self.lengths, self.outer = name, tuple(sorted(lengths)), outer
        self.said = Said(name)
        self.running = False
        self.bypassed = False  # the call under way is none of a whole model with its loss
        self.generation = 0
        self.captures = self.replays = 0
        self.changes: dict[str, int] = {}  # why graphs were dropped, and how often
        self._again = self._renewed = 0  # changes one soon after the other; replays at the last of them
        self.seconds, self.bytes = 0.0, 0
        self._graphs: dict[tuple, _Graph] = {}  # the last replayed one last
        self._seen: dict[tuple, int] = {}
        self._refused: dict[tuple, str] = {}
        self._backend = self._watch = None
        self._pending: Callable[[], _Call | None] = lambda: None
        self._eager = 0  # training calls before the first capture
        self._stop = self._unfit = None  # why nothing is captured any more; until something changes
        self._times: dict[tuple, dict[str, list]] = {}  # of forwards: pairs of marks, by key, eager and graph
        self._timed: tuple | None = None  # the key of an eager call whose time is of interest
        self._kind = self._device = None
        self._result = "loss" if outer is None else "last_hidden_state"
        self._traits, self._writes = None, False  # whether a forward changes more than its results
        live.add(self)

    def __deepcopy__(self, memo):
        return ModelGraphs(self.name, self.lengths, copy.deepcopy(self.outer, memo))

    def __reduce__(self):
        return ModelGraphs, (self.name, self.lengths, self.outer)

    # --- a call --------------------------------------------------------------------------

    def call(self, module: nn.Module, calls, names, plain: Callable, args: tuple, kwargs: dict):
        """Run the model's forward: a replay if one is possible, otherwise `plain`.

        Args:
            calls: counts of the model's head.
            names: of its positional arguments.
            plain: the forward without graphs.
        """
        self.running, self.bypassed = True, False
        try:
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            try:
                return self._replay(module, calls, names, given, plain)
            except Eagerly as left:
                if left.reason is not None:
                    self.said.say(left.reason)
            key, self._timed = self._timed, None
            with self._clock(key, "eager"):
                output = plain(*args, **kwargs)
            logits = output.get("logits") if isinstance(output, ModelOutput) else None
            if isinstance(logits, LazyLogits) and not self.bypassed:
                logits._differentiated = self._differentiated
            return output
        finally:
            self.running = False

    def _replay(self, module, calls, names, given: dict, plain):
        """Replay the graph of a call, captured first if it is due; raises `Eagerly` if there is none."""
        given = {name: value for name, value in given.items() if value is not None}
        self._admit(module, names, given)
        eagerly = functools.partial(plain, **given)
        sort = sort_out(given, self._traits, self.lengths, self._device)
        key = sort.key(self._device.type)
        if key in self._refused:
            raise Eagerly(self._refused[key])
        graph = self._graphs.get(key)
        if graph is None:
            if (reason := self._watch.changed()) is not None:
                self._renew(module, names, reason)
            if self._unfit is not None:
                raise Eagerly(self._unfit)
            graph = self._capture_if_due(_Request(module, calls, key, sort, plain), eagerly)
        self._judge(key)
        if self._held():
            raise Eagerly(HELD)
        sort.copy_to(graph.inputs, self._traits.padding)
        if self._writes:
            self._check(module, names)
        with _uncounted(calls), self._clock(key if key in self._times else None, "graph"):
            self._backend.replay(graph.forward)
        if not self._writes:  # while the device works: what an old graph computes harms nobody
            self._check(module, names)
        self._graphs[key] = self._graphs.pop(key)
        self.generation += 1
        graph.replayed = self.generation
        self.replays += 1
        if calls is not None:
            calls.lazy += 1
            calls.fused += 1
        return self._output(graph, sort)

    def _admit(self, module, names, given: dict) -> None:
        """Raise `Eagerly` if no graph may hold this call; drop graphs whose memory has moved."""
        first = next(module.parameters(), None)
        kind = None if first is None else backends.get(first.device.type)
        if not (module.training and torch.is_grad_enabled() and kind is not None) or kind.capturing():
            raise Eagerly
        if torch.jit.is_tracing() or is_transformed():
            raise Eagerly
        if self.outer is None and not any("labels" in name for name in given):
            self.bypassed = True
            raise Eagerly
        if self._stop is not None:
            if self._graphs:
                self.reset()
            self.bypassed = self._stop is OWN_LOSS
            raise Eagerly(self._stop)
        if (reason := intercepted()) is not None:
            raise Eagerly(reason)
        pending = self._pending()
        if pending is not None and not pending.done:
            raise Eagerly("an earlier loss of the model waits for its backward")
        if self._watch is None:
            self._look(module, names)
        elif (reason := self._watch.moved()) is not None:
            self._renew(module, names, reason)
        if (reason := self._watch.refused()) is not None:
            raise Eagerly(reason)
        if any(part.open for part in self._watch.held(ROUTED)):
            raise Eagerly("its routers record or replay")
        self._kind, self._device = kind, first.device

    @contextlib.contextmanager
    def _clock(self, key: tuple | None, what: str):
        """Measure the forward inside, until it is known whether graphs are faster."""
        began = None if key is None else self._kind.mark(self._device)
        yield
        if began is not None:
            pairs = self._times.setdefault(key, {"eager": [], "graph": []})[what]
            pairs.append((began, self._kind.mark(self._device)))

    def _judge(self, key) -> None:
        """Leave a shape to eager calls if their forward takes the device no longer.

        A graph's forward computes all rows of the loss head, and padding. If the host is not the limit, this
        may cost more than what a graph saves.
        """
        pairs = self._times.get(key)
        if pairs is None or len(pairs["graph"]) < MEASURED:
            return
        durations = {what: [self._kind.between(*pair) for pair in some] for what, some in pairs.items()}
        if None in durations["graph"]:
            return
        del self._times[key]
        if min(durations["graph"]) > min(durations["eager"]):
            self._refused[key] = "an eager call is as fast: the device is the limit"
            self._drop(key)
            self._close()
            raise Eagerly(self._refused[key])

    def _check(self, module, names) -> None:
        """Drop the graphs if a value that the captured Python read has changed."""
        if (reason := self._watch.changed()) is not None:
            self._renew(module, names, reason)
            raise Eagerly

    def _differentiated(self, _) -> None:
        self._stop = OWN_LOSS

    def backward(self, call: _Call, upstream: torch.Tensor) -> list[torch.Tensor]:
        """The gradients of the parameters that the loss reaches."""
        graph = call.graph
        same = graph.backward is not None and call.generation == self.generation
        same = same and self._watch.moved() is None and call.versions == self.versions()
        words = "a loss must be differentiated before the model's parameters change, got it later"
        check("graphs", same, words)
        if upstream.shape != graph.upstream.shape:  # of hidden states, which end before the padding
            graph.upstream.zero_()
        graph.upstream[tuple(map(slice, upstream.shape))].copy_(upstream)
        self._backend.replay(graph.backward)
        return graph.loan.lend()

    def versions(self) -> list[int]:
        """The versions of the parameters that a backward reads."""
        return [p._version for p in self._watch.parameters]

    def _held(self) -> int:
        return sum(graph.loan.call_in() for graph in self._graphs.values())

    # --- capture -------------------------------------------------------------------------

    def _capture_if_due(self, request: _Request, eagerly: Callable) -> _Graph:
        """The graph of a request; else the call runs eagerly.

        The first one is of a key that has been seen before. Later ones are made at once: an eager call needs
        as much memory again as the pool of graphs.
        """
        self._eager += 1
        key = request.key
        seen = self._seen[key] = self._seen.pop(key, 0) + 1
        if len(self._seen) > 64 * LIMIT:
            self._times.pop(old := next(iter(self._seen)), None)
            del self._seen[old]
        new = seen < 2
        if self._eager <= WARMUP or (new and not 0 < len(self._graphs) < LIMIT // 2):
            self._timed = key
            raise Eagerly
        try:
            return self._capture(request, eagerly if new else None)
        except Eagerly:
            raise
        except Exception as error:
            reason = error.args[0] if isinstance(error, Unfit) else why(error)
            if reason in self._refused.values():
                self._unfit = reason
            self._refused[key] = reason
            self._settle()
            if isinstance(error, torch.OutOfMemoryError):  # eager calls need what graphs have
                for other in [*self._graphs]:
                    self._drop(other)
            traceback.clear_frames(error.__traceback__)
            self._close()
            raise Eagerly(reason) from error

    def _capture(self, request: _Request, eagerly: Callable | None) -> _Graph:
        """Capture forward and backward of a request, after one eager call if `eagerly` is given."""
        began = time.perf_counter()
        module, calls, key, sort, _ = request
        device = self._watch.parameters[0].device
        self._make_room()
        backend = self._backend = self._backend or self._kind(device)
        step = _Step(request, self._watch, self._result, self._traits.padding)
        graph = step.graph
        self.generation += 1  # values of an earlier forward are lost from here
        with undisturbed(device), _uncounted(calls), _as_captured(module, sort, device):
            step.parameters = StandIns(self._watch)
            with self._unwritten(), backend.in_pool():
                if eagerly is not None:
                    with step.parameters, self._clock(key, "eager"):
                        eagerly()
                backend.warm(step.both)
            graph.upstream = torch.ones_like(graph.upstream, device=device)
            if backend.left and self._graphs:  # it lies where other graphs write
                backend.shared = False
                for other in [*self._graphs]:
                    self._drop(other)
            step.parameters = StandIns(self._watch)
            graph.forward, results = backend.capture(step.forward)
            graph.result, graph.parts = results[0], step.parts.of(results[1:])
            graph.backward, gradients = backend.capture(step.backward, weak=True)
        graph.loan = Loan(gradients, graph.used, graph.backward)
        self._graphs[key] = graph
        self.captures += 1
        self.seconds += time.perf_counter() - began
        self.bytes = backend.size()
        return graph

    def _make_room(self) -> None:
        """Drop the oldest graph if there are many; raise `Eagerly` if none can be made."""
        if len(self._graphs) >= LIMIT:
            oldest = next(iter(self._graphs))
            if self.generation - self._graphs[oldest].replayed < UNUSED:
                raise Eagerly(f"it comes in more than {LIMIT} shapes (graphs=[lengths] pads to fewer)")
            self._drop(oldest)
        if self._held():
            raise Eagerly(HELD)

    @contextlib.contextmanager
    def _unwritten(self):
        """Restore the buffers that a forward writes, and remember which ones it writes."""
        buffers = self._watch.buffers
        kept = [(b, b._version, b.detach().clone()) for b in buffers]
        yield
        with torch.no_grad():
            for b, version, value in kept:
                if b._version != version:
                    self._writes = True
                    b.copy_(value)

    def _output(self, graph: _Graph, sort: Given):
        call = _Call(self, graph, self.generation)
        self._pending = weakref.ref(call)
        outputs = {self._result: _Replayed.apply(call, sort.cut(graph.result), *graph.used)}
        parameter, parts = self._watch.trained[0], graph.parts
        for (name, needs), value in zip(parts.values, parts.tensors, strict=False):
            value = sort.cut(value).clone()
            outputs[name] = Refusing.apply(value, parameter) if needs else value
        if parts.logits is not None:
            outputs[parts.logits[0]] = replayed_logits(
                parts, (self, self.generation), sort.length or None, parameter
            )
        return parts.put_together(outputs)

    # --- the end of graphs ---------------------------------------------------------------

    def _renew(self, module, names, reason: str) -> None:
        """Drop the graphs and look at the model again: something that they were made of has changed."""
        if self._graphs:
            self.changes[reason] = self.changes.get(reason, 0) + 1
            self._again = self._again + 1 if self.replays - self._renewed < LASTING else 1
            self._renewed = self.replays
        self.reset()
        if self._again > RECAPTURES:
            self._stop = f"{reason}, again and again"
            raise Eagerly(self._stop)
        self._look(module, names)

    def _look(self, module, names) -> None:
        if self.outer is None:
            vars(module)[STATE].report.graphs = self  # of a copied model too
        self._watch = _watch(module)
        self._writes = any(map(_drops, module.modules()))  # a replay draws numbers: none in vain
        self._traits = Traits.of(module, names)
        self._unfit = self._watch.unfit() or _unfit(module)

    def reset(self) -> None:
        """Drop all graphs. The next call looks again at what they depend on."""
        self._settle()
        for key in [*self._graphs]:
            self._drop(key)
        self._close()
        self._watch = None
        self._refused.clear()
        self._times.clear()

    def _drop(self, key) -> None:
        graph = self._graphs.pop(key)
        self._settle()
        graph.forward = graph.backward = graph.loan = None

    def _settle(self) -> None:
        if self._backend is not None:
            self._backend.settle()

    def _close(self) -> None:
        """Free the pool if no graph is left."""
        if self._backend is not None and not self._graphs:
            self._backend.close()
            self._backend, self.bytes = None, 0

    # --- what people read ----------------------------------------------------------------

    def lines(self):
        """The lines for the report and `tigon.env`."""
        lengths = ", ".join("x".join(map(str, _ids(graph))) for graph in self._graphs.values()) or "none yet"
        yield (
            f"{self.name}: {len(self._graphs)} captured ({lengths}), {self.bytes / MIB:.0f} MiB, "
            f"{self.seconds:.1f} s, {self.replays} replays"
        )
        for reason, count in self.changes.items():
            yield f"{self.name}: dropped {count} times: {reason}"
        for reason, count in self.said.counts.items():
            yield f"{self.name}: {count} calls eager: {reason}"
        for held in live:
            if getattr(held, "outer", None) is self and (held.captures or held.said.counts):
                yield from held.lines()


def _ids(graph: _Graph) -> tuple:
    return tuple(graph.inputs["input_ids" if "input_ids" in graph.inputs else next(iter(graph.inputs))].shape)


def _watch(module: nn.Module) -> Watch:
    registries = {
        "an attention function": getattr(ALL_ATTENTION_FUNCTIONS, "_global_mapping", None),
        "an attention function of the process": getattr(ALL_ATTENTION_FUNCTIONS, "_local_mapping", None),
        "a mask function": getattr(ALL_MASK_ATTENTION_FUNCTIONS, "_global_mapping", None),
        "a mask function of the process": getattr(ALL_MASK_ATTENTION_FUNCTIONS, "_local_mapping", None),
    }
    return Watch(module, _AROUND, {name: held for name, held in registries.items() if held is not None})


@contextlib.contextmanager
def _uncounted(calls):
    """Restore a head's counts: they count calls, however often the Python of the head runs."""
    names = () if calls is None else ("lazy", "fused", "materialised", "computed", "reason")
    kept = {name: getattr(calls, name) for name in names}
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(calls, name, value)


# --- what is captured ------------------------------------------------------------------------


def _here(original, answer):
    """A function that returns this answer in this thread, and calls the former function in others."""
    thread = threading.get_ident()

    @functools.wraps(original)
    def call(*args, **kwargs):
        return answer if threading.get_ident() == thread else original(*args, **kwargs)

    return call


@contextlib.contextmanager
def _as_captured(module, sort: Given, device: torch.device):
    """Decisions that transformers and PyTorch take otherwise, or cannot take, while a stream is captured."""
    with contextlib.ExitStack() as stack:
        # Attention does without a plain causal mask. While capturing, older transformers build it, and all
        # build one for rows that might be packed. If there is another mask, the warm-up builds it as the
        # capture does, without a look at its values, for which the host would wait.
        masked = bool({"position_ids", "attention_mask"} & {*sort.tensors})
        answers = {"is_tracing": masked} | ({} if masked else {"find_packed_sequence_indices": None})
        for name, answer in answers.items():
            original = getattr(masking_utils, name, None)
            if original is not None:
                setattr(masking_utils, name, _here(original, answer))
                stack.callback(setattr, masking_utils, name, original)
        for part in module.modules():
            checkpoint = vars(part).get("_gradient_checkpointing_func")
            if checkpoint is not None and getattr(part, "gradient_checkpointing", False):
                vars(part)["_gradient_checkpointing_func"] = functools.partial(_repeated, device, checkpoint)
                stack.callback(vars(part).__setitem__, "_gradient_checkpointing_func", checkpoint)
        yield


def _repeated(device: torch.device, checkpoint: Callable, function: Callable, *args, **kwargs):
    """A checkpoint that keeps the seeds of adapters, and no state of generators: a capture cannot read it."""
    draws = Draws()

    def run(*args, **kwargs):
        with draws:
            before = _drawn(device) if draws.calls > 1 else None
            try:
                return function(*args, **kwargs)
            finally:
                if before is not None and before != _drawn(device):
                    raise Unfit("checkpoints repeat dropout that is not of adapters")

    return checkpoint(run, *args, preserve_rng_state=False, **kwargs)


def _drawn(device: torch.device) -> bytes | int | None:
    """The position of the generator; None in a capture, before which a warm-up ran."""
    if device.type != "cuda":
        return torch.get_rng_state().numpy().tobytes()
    capturing = torch.cuda.is_current_stream_capturing()
    return None if capturing else torch.cuda.default_generators[device.index].get_offset()


def _unfit(module) -> str | None:
    """The reason why a model of transformers cannot be captured, or None."""
    parts = list(module.modules())
    checkpointed = [part for part in parts if getattr(part, "gradient_checkpointing", False)]
    functions = [getattr(part, "_gradient_checkpointing_func", None) for part in checkpointed]
    for function in filter(None, functions):
        if not isinstance(function, functools.partial) or function.keywords.get("use_reentrant", True):
            return "checkpoints are reentrant (gradient_checkpointing_kwargs={'use_reentrant': False})"
    if any(getattr(part, "layerdrop", 0) for part in parts):
        return "layers are left out at random (layerdrop)"
    return None


def _drops(part) -> bool:
    if isinstance(part, nn.modules.dropout._DropoutNd):
        return part.p > 0 and part.training
    return bool(getattr(part, "attention_dropout", 0) or 0)


def _check_leaves(loss: torch.Tensor, trained: list) -> None:
    """Refuse parameters that are not the model's: their gradients would be lost."""
    known, seen, stack = set(map(id, trained)), set(), [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, nn.Parameter) and id(leaf) not in known:
            raise Unfit("a parameter outside of the model takes part")
        stack += (following for following, _ in node.next_functions)
