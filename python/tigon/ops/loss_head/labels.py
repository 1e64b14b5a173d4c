"""How many labels count: the count starts before the layers, so that the host knows it before the loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.utils.weak import WeakIdKeyDictionary, WeakIdRef

from tigon.error import check, refuse
from tigon.ops.arguments import called, check_booleans, check_indices, check_integers, kind_of, readable

# target -> {(ignore_index, shift[, position_ids, their version]): (version of target, event, pinned count)}
_counts: WeakIdKeyDictionary = WeakIdKeyDictionary()
_streams: dict[int, torch.cuda.Stream] = {}


_NARROW = {torch.uint8, torch.int8, torch.int16, torch.uint16, torch.uint32, torch.uint64}


def labels_of(target: object, ignore_index: object) -> object:
    """Labels in an integer dtype that holds `ignore_index`; other objects are returned unchanged."""
    if not isinstance(target, torch.Tensor) or target.dtype == torch.int64:
        return target
    small = not isinstance(ignore_index, int) or -(2**31) <= ignore_index < 2**31
    narrow = target.dtype in _NARROW or (target.dtype == torch.int32 and not small)
    return target.long() if narrow else target


def check_shift(op, shift, position_ids, target) -> None:
    """Check how far labels are shifted, and the positions of the sequences in packed rows."""
    if not isinstance(shift, bool):
        check_integers(op, least=0, shift=shift)
    if shift and target.dim() < 1:
        refuse(op, "target must have a sequence dimension with shift=True, got none")
    if position_ids is None:
        return
    check_indices(op, "position_ids", position_ids)
    words = "position_ids must be None without a sequence dimension, got {}"
    check(op, target.dim() >= 1, words, position_ids.shape)
    given, length = tuple(position_ids.shape), target.shape[-1]
    fits = given in (tuple(target.shape), (length,), (1, length))
    check(op, fits, "position_ids must be {} or [{}], got {}", target.shape, length, position_ids.shape)
    same = position_ids.device == target.device
    check(op, same, "position_ids must be on {}, got {}", target.device, position_ids.device)


def shifted(target, ignore_index, shift=True, position_ids=None):
    """Replace the label of position t by that of t + shift, or by none if the sequence has ended."""
    k = min(int(shift), target.shape[-1]) if shift else 0
    if k == 0:
        return torch.full_like(target, ignore_index) if shift else target
    moved = F.pad(target[..., k:], (0, k), value=ignore_index)
    if position_ids is None:
        return moved
    same = F.pad(position_ids[..., k:], (0, k)) == position_ids + k  # positions restart between sequences
    return torch.where(same, moved, ignore_index).view_as(moved)


def _count(target, ignore_index, shift, position_ids=None, per_sequence=False):
    if position_ids is not None:
        target = shifted(target, ignore_index, shift, position_ids)
    elif shift:
        target = target[..., int(shift) :]
    counts = target.ne(ignore_index)
    return counts.sum(-1).reshape(-1) if per_sequence else counts.sum()


def _key(ignore_index, shift, position_ids):
    which = () if position_ids is None else (WeakIdRef(position_ids), position_ids._version)
    return ignore_index, int(shift), *which


@called()
def count_labels(
    target: torch.Tensor,
    ignore_index: int = -100,
    *,
    shift: int | bool = False,
    position_ids: torch.Tensor | None = None,
    per_sequence: bool = False,
) -> None:
    """Start counting the labels of a CUDA tensor, so that a later loss leaves ignored rows out.

    Call it when the labels are on the device, before the model's forward pass. A side stream counts them and
    copies the number into pinned memory. :func:`tigon.linear_cross_entropy`, :func:`tigon.linear_log_prob`
    and :func:`tigon.linear_loss` use the number if `target` is the same tensor, or a view with all of its
    elements, and was not modified. If the number is not ready, the host waits for it, so that the same calls
    always compute the same rows. It waits at most until the device starts the work that follows this call.
    The number is kept as long as the tensor exists. CPU labels need no call: the loss counts them.

    Args:
        target: integer labels.
        ignore_index: label that does not count. A loss with another one does not use the number and computes
            all rows.
        shift, position_ids: as in the later loss call: the first `shift` labels of every sequence are not
            counted. If several heads read the same labels, call this once for each shift.
        per_sequence: count each sequence ``target[i, :]``. The sum is used as above, and
            :func:`tigon.linear_loss` with ``group`` leaves out the rows of each sequence that do not count.

    Raises:
        tigon.Error: target is not an integer tensor, or lacks a sequence dimension that is needed;
            ignore_index is not an integer; shift or position_ids do not fit.
    """
    integers = isinstance(target, torch.Tensor) and not target.is_floating_point()
    check("count_labels", integers, "target must be an integer tensor, got {}", kind_of(target))
    check_integers("count_labels", ignore_index=ignore_index)
    check_booleans("count_labels", per_sequence=per_sequence)
    check_shift("count_labels", shift, position_ids, target)
    words = "target must be [..., T] with per_sequence=True, got {}"
    check("count_labels", not per_sequence or target.dim() >= 2, words, target.shape)
    inference = target.is_inference() or (position_ids is not None and position_ids.is_inference())
    if target.device.type != "cuda" or inference or torch.cuda.is_current_stream_capturing():
        return  # an inference tensor does not tell whether it was modified
    current = torch.cuda.current_stream(target.device)
    side = _streams.get(target.device.index)
    if side is None:
        urgent = torch.cuda.Stream(target.device, priority=-1)  # not queued behind the layers' kernels
        side = _streams.setdefault(target.device.index, urgent)
    side.wait_stream(current)
    with torch.cuda.stream(side):
        count = _count(target.detach(), ignore_index, shift, position_ids, per_sequence)
        pinned = torch.empty(count.shape, dtype=torch.int64, device="cpu", pin_memory=True)
        pinned.copy_(count, non_blocking=True)
        event = torch.cuda.Event(blocking=True)  # a waiting host thread yields its core
        event.record(side)
    target.record_stream(side)
    if position_ids is not None:
        position_ids.record_stream(side)
    _counts.setdefault(target, {})[_key(ignore_index, shift, position_ids)] = (target._version, event, pinned)


def _known_counts(target, ignore_index, shift, position_ids):
    """The counts of :func:`count_labels` for this tensor, or None; timing does not change the result."""
    if torch.compiler.is_compiling():  # before the table is read: older compilers cannot trace that
        return None
    if not _counts or torch.cuda.is_current_stream_capturing():
        return None
    known = _counts.get(target)
    base = target._base
    if known is None and base is not None and base.numel() == target.numel() and not shift:
        reshaped = base.is_contiguous() and target.is_contiguous()  # other views have other sequences
        known = _counts.get(base) if reshaped else None
    if known is None or (position_ids is not None and position_ids.is_inference()):
        return None
    version, event, pinned = known.get(_key(ignore_index, shift, position_ids), (None, None, None))
    if event is None or version != target._version:
        return None
    event.synchronize()
    return pinned


def counted(target, ignore_index, shift, position_ids=None):
    """The number that :func:`count_labels` finds for this tensor, or -1."""
    counts = _known_counts(target, ignore_index, shift, position_ids)
    return -1 if counts is None else int(counts.sum())


def sequence_counts(target, ignore_index, shift=False, position_ids=None) -> list[int] | None:
    """How many labels of each sequence [B, T] count, or None if the host does not know."""
    if target.device.type == "cpu":
        return _count(target, ignore_index, shift, position_ids, per_sequence=True).tolist()
    counts = _known_counts(target, ignore_index, shift, position_ids)
    return counts.tolist() if counts is not None and counts.shape == target.shape[:1] else None


def check_count(op, target, ignore_index, valid_rows) -> int:
    """Count the labels on the CPU that count; `valid_rows` must be that number or -1."""
    count = int(_count(target, ignore_index, False))
    told = valid_rows in (-1, count)
    check(op, told, "valid_rows must be the number of labels that count, {}, got {}", count, valid_rows)
    return count


def check_valid_rows(op, target, ignore_index, valid_rows) -> None:
    """Check the caller's number of labels that count, if it is given, as the native calls do."""
    if valid_rows is None:
        return
    known_rows(op, target, ignore_index, False, valid_rows, target.device)
    if readable(target):
        check_count(op, target, ignore_index, valid_rows)


def known_rows(op, target, ignore_index, shift, valid_rows, device, position_ids=None):
    """`valid_rows` for the native call: the caller's, else what :func:`count_labels` finds, else -1."""
    if valid_rows is None:
        if target.device.type != "cpu":
            return counted(target, ignore_index, shift, position_ids)
        here = device.type == "cpu" or torch.compiler.is_compiling()  # on the CPU the native call counts
        return -1 if here else int(_count(target, ignore_index, shift, position_ids))
    check_integers(op, valid_rows=valid_rows)
    fits = 0 <= valid_rows <= target.numel()
    check(op, fits, "valid_rows must be in [0, {}] (or None), got {}", target.numel(), valid_rows)
    return valid_rows
