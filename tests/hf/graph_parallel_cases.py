"""Cases of two processes: graphs under what reduces, shards and moves. On the CPU by the recorder."""

import contextlib
import logging

import torch
from graph_cases import held
from graph_recorder import recording
from tiny import close, make
from torch.nn.parallel import DistributedDataParallel
from two_processes import case, check_gradients, data, device_type, rank, shard, two_steps, with_tigon

import tigon

OPTIONS = {
    "plain": ({},),
    "find_unused": ({"find_unused_parameters": True},),
    "bucket_view": ({"gradient_as_bucket_view": True},),
    "static": ({"static_graph": True},),
}


def graphs():
    return recording() if device_type() == "cpu" else contextlib.nullcontext()


@case(**OPTIONS)
def ddp_graphs(options):
    """Gradients are reduced behind the replayed backward."""
    model = make(device=device_type(), attn_implementation="sdpa", use_cache=False)
    _, losses, want = with_tigon(model, graphs=True)
    wrapped = DistributedDataParallel(model, **options)
    with graphs():
        for _ in range(3):
            two_steps(wrapped, losses, want)
        assert held(model).replays >= 4, [*held(model).lines()]


@case
def ddp_graphs_accumulate():
    """no_sync adds up; the last backward reduces the sum."""
    model = make(device=device_type(), attn_implementation="sdpa", use_cache=False)
    _, losses, want = with_tigon(model, times=3, graphs=True)
    wrapped = DistributedDataParallel(model)
    with graphs():
        for _ in range(3):
            model.zero_grad(set_to_none=True)
            for last in (False, False, True):
                with contextlib.nullcontext() if last else wrapped.no_sync():
                    loss = wrapped(**data()).loss
                    loss.backward()
                close(loss.detach(), losses[rank()])
            check_gradients(wrapped, want, ulps=512)
        assert held(model).replays >= 6, [*held(model).lines()]


@case
def ddp_graph_step():
    """A function of the program: the all-reduce is captured with it, or it says why not."""
    model = make(device=device_type(), attn_implementation="sdpa", use_cache=False)
    _, losses, want = with_tigon(model)
    wrapped = DistributedDataParallel(model)

    def train(input_ids, labels):
        loss = wrapped(input_ids=input_ids, labels=labels).loss
        loss.backward()
        return loss

    with graphs():
        call = tigon.graph_step(train, data())
        for _ in range(6):
            model.zero_grad(set_to_none=True)
            close(call(**data()), losses[rank()])
            check_gradients(wrapped, want, ulps=512)
        assert call.replays == 4 or call.said.counts, [*call.lines()]
        print(*call.lines(), sep="\n")


@case
def fsdp2_graphs():
    """Sharded parameters: eager, and it says so."""
    model = make(device=device_type(), attn_implementation="sdpa", use_cache=False)
    _, losses, want = with_tigon(model, graphs=True)
    shard(model, "root")
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("tigon").addHandler(handler)
    try:
        with graphs():
            for _ in range(3):
                two_steps(model, losses, want)
    finally:
        logging.getLogger("tigon").removeHandler(handler)
    assert held(model).replays == 0
    assert any("hooks on" in text or "sharded" in text for text in said), said
    assert torch.distributed.is_initialized()
