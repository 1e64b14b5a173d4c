"""The runs of native.py are under the instruction sets and thread counts they name, and see a difference."""

from __future__ import annotations

import pytest
from native import bits_under

import tigon

ISA = "import tigon; emit(torch.tensor(list(tigon.env().cpu.split()[0].encode())))"


def test_every_instruction_set_is_run():
    best = tigon.env().cpu.split()[0]
    sets = ("scalar", "avx2", "avx512")
    assert len(bits_under(ISA, threads=(1,))) == (sets.index(best) + 1 if best in sets else 1)


def test_every_thread_count_is_run():
    assert len(bits_under("emit(torch.tensor(torch.get_num_threads()))")) == 3


@pytest.mark.parametrize(
    "script, told", [("1 / 0", "ZeroDivisionError"), ("import os; os.abort()", "status")]
)
def test_a_failing_script_is_told(script, told):
    with pytest.raises(AssertionError, match=told):
        bits_under(script)


ROWS = """
import torch, tigon
torch.manual_seed(0)

def check(fn, *tensors):
    tensors = [t.requires_grad_() for t in tensors]
    y = fn(*tensors)
    results = [y] if torch.is_tensor(y) else [t for t in y if t.requires_grad]
    emit(*results, *torch.autograd.grad(results, tensors, [torch.randn_like(t) for t in results]))

for dtype in DTYPES:
    def draw(*shape):
        return torch.randn(shape).to(dtype)

    for rows, cols in ((70, 333), (3, 4099), (6, 16), (1, 7)):
        both, x, z, w, b = draw(rows, 2 * cols), draw(rows, cols), draw(rows, cols), draw(cols), draw(cols)
        check(tigon.rms_norm, x, w)
        check(tigon.layer_norm, x, w, b)
        check(tigon.add_rms_norm, x, z, w)
        check(tigon.gated_rms_norm, x, z, w)
        check(lambda *t: tigon.gated_rms_norm(*t, norm_before_gate=False), x, z, w)
        check(lambda x, w, b: tigon.group_norm(x[..., None], 1, w, b), x, w, b)
        check(tigon.poly_norm, x, draw(3), draw(1))
        check(tigon.dyt, x, draw(1), w, b)
        check(tigon.attention_residual, draw(3, rows, cols), w, b)
        for groups in {1, rows // 2, rows} - {0}:
            check(tigon.modulated_rms_norm, x, w, draw(groups, cols), draw(groups, cols))
        for fn in (tigon.softmax, tigon.sparsemax):
            check(fn, x)
        for fn in (tigon.swiglu, tigon.geglu, tigon.reglu):
            check(fn, x, z), check(lambda both: fn(*both.chunk(2, -1)), both)
        for fn in (lambda both: tigon.geglu(both, approximate="none"), tigon.swiglu_oai):
            check(fn, both)
        check(lambda w: tigon.embedding(torch.randint(0, rows, (300,)), w, scale=3.0), x)
    x = draw(37, 4, 45)
    check(lambda x: tigon.hyper_connection_post(x, x[:, 0] * 0.5, x[..., 0].float(), x[..., :4].float()), x)
"""
LOSSES = """
import torch, tigon
torch.manual_seed(0)
for dtype in DTYPES:
    for rows, cols in ((70, 333), (5, 4097), (2, 70001), (300, 1)):
        x, y = (3 * torch.randn(rows, cols)).to(dtype).requires_grad_(), torch.randint(0, cols, (rows,))
        y[0] = -100
        for options in ({}, dict(label_smoothing=0.1, z_loss=0.01, softcap=5.0, weight=torch.rand(cols))):
            loss = tigon.cross_entropy(x, y, **options)
            emit(loss, torch.autograd.grad(0.3 * loss, x)[0])
            loss = tigon.cross_entropy(x, y, reduction="none", **options)
            emit(loss, torch.autograd.grad(loss, x, torch.randn_like(loss))[0])
        teacher = (4 * torch.randn(rows, cols)).to(dtype)
        for fn in (tigon.kl_div, lambda s, t: tigon.kl_div(s, t, reverse=True), tigon.jsd, tigon.tvd):
            loss = fn(x, teacher)
            emit(loss, *torch.autograd.grad(loss, x))
"""
ROTATIONS = """
import torch, tigon
torch.manual_seed(0)
forms = [{}, {"interleaved": True}, {"interleaved": True, "deinterleave": True}, {"tail": True}]
for dtype, table in [(t, t) for t in DTYPES] + [(torch.bfloat16, torch.float32)]:
    for B, T, H, D, R in ((2, 70, 5, 64, 64), (1, 300, 3, 40, 22), (3, 2, 1, 2, 2), (1, 33, 2, 128, 32)):
        cos, sin = (torch.randn(1, T, R).to(table) for _ in range(2))
        q, k = (torch.randn(B, T, n, D).to(dtype).transpose(1, 2).requires_grad_() for n in (H, 2))
        u, v = (torch.randn(D).to(dtype).requires_grad_() for _ in range(2))
        for form in forms:
            y = tigon.rope(q, k, cos, sin, **form)
            emit(*y, *torch.autograd.grad(y, (q, k), [torch.randn_like(x) for x in y]))
        y = tigon.qk_norm_rope(q, k, u, v, cos, sin)
        emit(*y, *torch.autograd.grad(y, (q, k, u, v), [torch.randn_like(x) for x in y]))
"""


@pytest.mark.parametrize("script", [ROWS, LOSSES, ROTATIONS], ids=["rows", "losses", "rotations"])
def test_same_bits_on_every_instruction_set_and_thread_count(script):
    dtypes = "(torch.float32, torch.bfloat16, torch.float16)"
    assert len(bits_under(script.replace("DTYPES", dtypes))) == 1
