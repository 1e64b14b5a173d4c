"""Labels in advance: shift=k in every function of the loss head, sequences packed into one row."""

from __future__ import annotations

import pytest
import torch
from checks import same_bits
from heads import head_inputs, run

import tigon

T = 12
PACKED = (5, 1, 6)  # lengths of the sequences of a row
SHIFTS = (0, False, True, 1, 2, 3, 5, 11, 12, 40)


def _weighted(log_prob, weight):
    return -log_prob * weight


def _per_token(target):
    return torch.linspace(0, 2, target.numel()).view(target.shape).to(target.device)


def _teacher(device):
    generator = torch.Generator().manual_seed(3)
    draw = [torch.randn(*shape, generator=generator).to(device) for shape in ((2, T, 10), (40, 10))]
    return tuple(draw)


FUNCTIONS = {
    "linear_cross_entropy": lambda h, w, t, **o: tigon.linear_cross_entropy(
        h, w, t, outputs=("loss", "log_prob", "correct"), **o
    ),
    "losses of rows": lambda h, w, t, **o: tigon.linear_cross_entropy(
        h, w, t, reduction="none", token_weight=_per_token(t), **o
    ),
    "linear_log_prob": lambda h, w, t, **o: tigon.linear_log_prob(h, w, t, entropy=True, **o),
    "linear_loss": lambda h, w, t, **o: tigon.linear_loss(h, w, t, _weighted, _per_token(t), **o),
    "linear_kl_div": lambda h, w, t, **o: tigon.linear_kl_div(h, w, _teacher(h.device), t, hard=0.5, **o),
    "linear_jsd": lambda h, w, t, **o: tigon.linear_jsd(h, w, _teacher(h.device), t, hard=0.5, **o),
    "linear_tvd": lambda h, w, t, **o: tigon.linear_tvd(h, w, _teacher(h.device), t, reduction="none", **o),
    "LinearCrossEntropyLoss": lambda h, w, t, shift=0, position_ids=None: tigon.nn.LinearCrossEntropyLoss(
        shift=shift, z_loss=0.1
    )(h, w, t, position_ids=position_ids),
    "LinearJSDLoss": lambda h, w, t, shift=0, position_ids=None: tigon.nn.LinearJSDLoss(shift=shift)(
        h, w, _teacher(h.device), t, position_ids=position_ids
    ),
}
UNPACKED = {
    "linear_preference": lambda h, w, t, **o: (
        tigon.linear_preference(h, w, t, ref=torch.zeros(2).to(h), **o).loss
    ),
    "linear_kto": lambda h, w, t, **o: (
        tigon.linear_kto(
            h, w, t, torch.tensor([True, False], device=h.device), ref=torch.zeros(2).to(h), **o
        ).loss
    ),
    "linear_policy": lambda h, w, t, **o: tigon.linear_policy(h, w, t, torch.ones(2).to(h), **o).loss,
}


def positions(device="cpu"):
    return torch.cat([torch.arange(n) for n in PACKED]).to(device)


def by_hand(target, shift, packed):
    """The label of every position, one by one."""
    labels = torch.full_like(target, -100)
    for row in range(target.shape[0]):
        begin = 0
        for n in PACKED if packed else (target.shape[1],):
            for t in range(begin, begin + n - int(shift)):
                labels[row, t] = target[row, t + int(shift)]
            begin += n
    return labels


def _inputs(dtype, device, masked=0.25):
    torch.manual_seed(1)
    return head_inputs((2, T), 16, 40, dtype=dtype, device=device, masked=masked)


@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize(
    ("name", "packed"),
    [
        *((name, packed) for name in FUNCTIONS for packed in (False, True)),
        *((name, False) for name in UNPACKED),
    ],
)
def test_shift_is_the_label_so_far_ahead(name, packed, shift, device):
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        hidden, weight, target = _inputs(dtype, device)
        options = {"position_ids": positions(device)} if packed else {}
        fn = (FUNCTIONS | UNPACKED)[name]
        got = run(fn, (hidden, weight, target), {"shift": shift, **options})
        want = run(fn, (hidden, weight, by_hand(target, shift, packed)), {})
        assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("shape", [(T,), (1, T), (2, T)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_position_ids_in_every_form(shape, dtype, device):
    hidden, weight, target = _inputs(torch.float32, device)
    ids = positions(device).to(dtype).expand(shape)
    got = tigon.linear_cross_entropy(hidden, weight, target, shift=2, position_ids=ids)
    assert same_bits(got, tigon.linear_cross_entropy(hidden, weight, by_hand(target, 2, True)))


def test_position_ids_of_boundaries():
    bounds = torch.tensor([0, 5, 6, 12])
    starts = torch.repeat_interleave(bounds[:-1], bounds.diff(), output_size=T)
    assert torch.equal(torch.arange(T) - starts, positions())


def test_count_of_packed_labels(device):
    hidden, weight, target = _inputs(torch.float32, device)
    known = int((by_hand(target, 2, True) != -100).sum())
    options = {"shift": 2, "position_ids": positions(device)}
    want = tigon.linear_cross_entropy(hidden, weight, target, **options)
    got = tigon.linear_cross_entropy(hidden, weight, target, valid_rows=known, **options)
    assert same_bits(got, want)
    if device == "cpu":
        with pytest.raises(tigon.Error, match=f"valid_rows must be the number of labels .*{known}, got"):
            tigon.linear_cross_entropy(hidden, weight, target, valid_rows=known + 1, **options)


@pytest.mark.gpu
def test_count_labels_knows_shifts_and_positions():
    from tigon.ops.loss_head.labels import counted

    _, _, target = _inputs(torch.float32, "cuda")
    ids = positions("cuda")
    for shift in (1, 2, 30):
        tigon.count_labels(target, shift=shift)
        tigon.count_labels(target, shift=shift, position_ids=ids)
    torch.cuda.synchronize()
    for shift in (1, 2, 30):
        assert counted(target, -100, shift) == int((by_hand(target, shift, False) != -100).sum())
        assert counted(target, -100, shift, ids) == int((by_hand(target, shift, True) != -100).sum())
    assert counted(target, -100, 3) == counted(target, -100, 1, ids.clone()) == -1
    ids[0] = 0  # another version
    assert counted(target, -100, 1, ids) == -1


def test_shift_under_compile(device):
    hidden, weight, target = _inputs(torch.float32, device)
    ids = positions(device)

    def loss(hidden, weight, target, ids):
        return tigon.linear_cross_entropy(hidden, weight, target, shift=2, position_ids=ids)

    got = torch.compile(loss, fullgraph=True, backend="aot_eager")(hidden, weight, target, ids)
    assert same_bits(got, loss(hidden, weight, target, ids))


BAD = {
    "negative": ({"shift": -1}, "shift must be >= 0, got -1"),
    "no integer": ({"shift": 1.5}, "shift must be an int, got float"),
    "None": ({"shift": None}, "shift must be an int, got NoneType"),
    "a tensor": ({"shift": torch.tensor(1)}, "shift must be an int, got torch.int64"),
    "too wide": ({"shift": 2**63}, "shift must have at most 64 bits"),
    "float positions": (
        {"shift": 1, "position_ids": torch.zeros(T)},
        "position_ids must be an int64 or int32 tensor",
    ),
    "positions of another length": (
        {"shift": 1, "position_ids": torch.zeros(T + 1, dtype=torch.int64)},
        r"position_ids must be \[2, 12\] or \[12\], got \[13\]",
    ),
    "positions of three axes": (
        {"shift": 1, "position_ids": torch.zeros(3, 2, T, dtype=torch.int64)},
        r"position_ids must be \[2, 12\] or \[12\], got \[3, 2, 12\]",
    ),
    "positions elsewhere": (
        {"shift": 1, "position_ids": torch.zeros(T, dtype=torch.int64, device="meta")},
        "position_ids must be on cpu, got meta",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_shifts_are_refused(name):
    options, message = BAD[name]
    hidden, weight, target = _inputs(torch.float32, "cpu")
    for fn in (FUNCTIONS if "position_ids" in options else FUNCTIONS | UNPACKED).values():
        with pytest.raises(tigon.Error, match=message):
            fn(hidden, weight, target, **options)
    with pytest.raises(tigon.Error, match=message):
        tigon.count_labels(target, **options)
