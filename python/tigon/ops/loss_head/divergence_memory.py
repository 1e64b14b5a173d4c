"""Memory of the divergences of two heads."""

from __future__ import annotations

import ctypes

import torch

from tigon._load import library
from tigon.error import check
from tigon.ops.arguments import check_choice, check_integers
from tigon.ops.loss_head.memory import HeadMemory, device_type, linear_cross_entropy_memory, padded

_OP = "linear_divergence_memory"
_logit_rows = library.tigon_linear_divergence_logit_rows
_logit_rows.restype = ctypes.c_int64
_logit_rows.argtypes = [ctypes.c_int64, ctypes.c_int]


def linear_divergence_memory(
    rows: int,
    hidden_size: int,
    vocab: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    teacher_hidden_size: int | None = None,
    device: str | torch.device = "cuda",
    weight_dtype: torch.dtype | None = None,
    train_hidden: bool = True,
    train_weight: bool = True,
    train_bias: bool = False,
    lora_rank: int = 0,
    valid_rows: int | None = None,
    reduction: str = "batchmean",
    chunk_rows: int | None = None,
) -> HeadMemory:
    """Bytes that :func:`tigon.linear_kl_div` and its like, with their backward, take besides their inputs.

    What :func:`tigon.linear_cross_entropy_memory` says for the student's head, whose chunk holds the logits'
    gradient here, and the float32 logits of both sides for some rows: as many as take 1 GiB, at least 512.

    Args:
        teacher_hidden_size: of the teacher's head; ``None``: its logits are given.
        Others: as :func:`tigon.linear_cross_entropy_memory`.

    Raises:
        tigon.Error: a size or an option that the functions would not take.
    """
    known = {"none": "none", "sum": "sum", "batchmean": "mean", "mean": "mean"}
    check_choice(_OP, "reduction", reduction, known)
    if teacher_hidden_size is not None:
        check_integers(_OP, teacher_hidden_size=teacher_hidden_size)
        check(_OP, teacher_hidden_size >= 1, "teacher_hidden_size must be >= 1, got {}", teacher_hidden_size)
    student = linear_cross_entropy_memory(
        rows, hidden_size, vocab, dtype, device=device, weight_dtype=weight_dtype, train_hidden=train_hidden,
        train_weight=train_weight, train_bias=train_bias, lora_rank=lora_rank, valid_rows=valid_rows,
        reduction=known[reduction], chunk_rows=chunk_rows,
    )  # fmt: skip
    if dtype == torch.float64:
        return student
    worked = rows if valid_rows is None else valid_rows
    sides = 1 if teacher_hidden_size is None else 2
    few = min(_logit_rows(vocab, sides), student.chunk_rows)
    logits = 4 * few * padded(vocab) * sides
    gathered = few * (padded(vocab) if sides == 1 else teacher_hidden_size) * dtype.itemsize
    more = logits + (gathered if worked < rows else 0)
    if device_type(device) == "cpu":  # pieces of the operands in float32, for products that are not rounded
        more += 4 * (few + 8192) * max(hidden_size, teacher_hidden_size or 0) + 4 * few * min(vocab, 8192)
    if not (train_hidden or train_weight or train_bias or lora_rank):  # no gradient of the logits
        more -= student.chunk_rows * padded(vocab) * dtype.itemsize
    return student._replace(workspace=student.workspace + more, peak=student.peak + more)
