"""Labels in advance: shift=k in every function of the loss head, sequences packed into one row."""

import re

import pytest
import torch
from checks import same_bits
from heads import head_inputs, run
from test_head_functions import FORMS

import tigon

T = 12
PACKED = (5, 1, 6)  # lengths of the sequences of a row
UNPACKED = [name for name in FORMS if re.match("linear_(preference|kto|policy)|sequences|simpo", name)]
# The labels of a row move with it, and heads of several tokens have shifts of their own.
FUNCTIONS = [
    name for name in FORMS if name not in ("several", "multi_token", "drafter", "contrastive", *UNPACKED)
]
SHIFTS = (0, False, True, 1, 2, 3, 5, 11, 12, 40)


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
        fn = FORMS[name]
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
