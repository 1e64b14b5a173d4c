"""The fused loss head beyond the cases: chunks, combinations, refusals, memory, determinism."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from checks import same_bits
from heads import head_inputs, run
from native import bits_under

import tigon
from conftest import poisoned
from tigon.ops.loss_head import operands
from tigon.ops.loss_head.linear_cross_entropy import reference
from tigon.ops.loss_head.plan import Sizes, plan, with_head


def test_float16_gradients_survive_a_large_count(device):
    # 1/count in fp16 logit gradients would underflow: scale is folded in after the matmuls.
    hidden, weight, target = head_inputs(64, 16, 40, dtype=torch.float16, device=device, masked=0.0)
    got = run(tigon.linear_cross_entropy, (hidden, weight, target), {"denominator": 2.0**14})
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    exact = run(reference, (*wide, target), {"denominator": 2.0**14})
    error = (got[2].double() - exact[2]).abs().max() / exact[2].abs().max()
    assert error < 2e-3


@pytest.mark.gpu
@pytest.mark.parametrize("label", [40, -1, 2**40])
def test_label_out_of_range_cuda_is_a_nan_row(label):
    hidden, weight, target = head_inputs(device="cuda")
    target[5] = label
    loss = tigon.linear_cross_entropy(hidden, weight, target, reduction="none")
    nan = torch.isnan(loss)
    assert nan[5] and nan.sum() == 1


@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled_with_a_cap(dynamic, device):
    """The second cap makes a symbol of the number, `dynamic` all numbers and sizes."""
    torch._dynamo.reset()
    compiled = torch.compile(tigon.linear_cross_entropy, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    least = 0.0 if device == "cpu" else 32.0  # cuBLAS' workspace
    for rows, cap in ((7, least + 1.0), (7, least + 2.0), (9, least + 2.0)):
        hidden, weight, target = head_inputs(rows, device=device)
        wanted = tigon.linear_cross_entropy(hidden, weight, target, max_workspace_mb=cap)
        assert same_bits(compiled(hidden, weight, target, max_workspace_mb=cap), wanted)


def test_same_bits_for_any_thread_count_of_the_row_pass():
    # One row per matmul: aten's matmul of a single row does not depend on the thread count.
    script = """
import tigon
torch.manual_seed(0)
h, w = torch.randn(3, 8).requires_grad_(), torch.randn(2051, 8).requires_grad_()
loss = tigon.linear_cross_entropy(h, w, torch.tensor([5, -100, 2050]), label_smoothing=0.1, chunk_rows=3)
emit(loss)
"""
    assert len(bits_under(script, threads=(1, 2))) == 1


@pytest.mark.gpu
def test_logits_past_two_to_the_31_elements_cost_no_memory():
    rows, h, v = 20480, 64, 128256
    hidden, weight, target = head_inputs(rows, h, v, dtype=torch.bfloat16, device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss = tigon.linear_cross_entropy(hidden, weight, target)
    loss.backward()
    assert torch.cuda.max_memory_allocated() - before < rows * v * 2 / 2
    part = slice(-7, None)
    losses = tigon.linear_cross_entropy(hidden.detach(), weight.detach(), target, reduction="none")
    want = reference(hidden.detach()[part], weight.detach(), target[part], reduction="none")
    torch.testing.assert_close(losses[part], want, atol=2e-2, rtol=1e-2)


@pytest.mark.gpu
def test_one_chunk_past_two_to_the_31_elements():
    rows, h, v = 17000, 32, 128256
    args = head_inputs(rows, h, v, dtype=torch.bfloat16, device="cuda")
    whole, parts = (
        run(tigon.linear_cross_entropy, args, {"reduction": "none", "chunk_rows": n}) for n in (rows, 4096)
    )
    # Matmuls of another size may sum in another order, so that a logit is now and then rounded otherwise.
    torch.testing.assert_close(whole[0], parts[0], rtol=4 * torch.finfo(torch.float32).eps, atol=0)
    torch.testing.assert_close(whole[1], parts[1], rtol=2**-6, atol=2**-8 * parts[1].abs().max().item())
    assert torch.isfinite(whole[2]).all()


@pytest.mark.gpu
def test_gradient_of_a_wider_weight_is_rounded_to_its_own_dtype():
    hidden, weight, target = head_inputs(dtype=torch.bfloat16, device="cuda")
    wide = weight.detach().float().requires_grad_()
    _, _, dwide = run(tigon.linear_cross_entropy, (hidden, wide, target), {})
    _, _, dweight = run(tigon.linear_cross_entropy, (hidden, weight, target), {})
    assert dwide.dtype == torch.float32 and not same_bits(dwide, dwide.bfloat16().float())
    torch.testing.assert_close(dwide, dweight.float(), rtol=2**-8, atol=1e-6)


def test_default_chunk():
    def chunk_rows(rows, hidden, vocab, dtype=torch.bfloat16, **sizes):
        states = torch.empty(0, hidden, dtype=dtype)
        return plan(with_head(Sizes(), states, vocab, rows)._replace(**sizes)).chunk_rows

    def cuda(*sizes, dweight=True, **more):
        return chunk_rows(*sizes, cuda=True, train_weight=dweight, **more)

    assert cuda(8192, 4096, 128256) == 8192  # one chunk: no f32 sum, no cast
    assert cuda(32768, 4096, 128256) == 4096
    assert cuda(8192, 4096, 128256, main_grad=True) == 4096
    assert cuda(8192, 4096, 128256, dweight=False) == 1024  # 256 MiB of logits
    assert cuda(8192, 4096, 128256, dweight=False, lean=0) == 2048
    assert cuda(16384, 1024, 32000) == 8192
    assert cuda(8192, 4096, 128256, dtype=torch.float32) == 4096
    assert chunk_rows(0, 64, 100, train_weight=True) == 1
    assert chunk_rows(3000, 64, 100, train_weight=True) == 1024


@pytest.mark.parametrize("columns", [1, 7, 8, 13, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_columns_are_appended_and_cut_off(device, dtype, columns):
    """Zeros past the old columns, nothing past the new ones; the gradient the other way round."""
    x = torch.randn(3, 5, 17, device=device).to(dtype)[..., 2:15].requires_grad_()
    with poisoned():
        y = operands._fit_columns(x, columns)
    missing = columns - 13
    expected = F.pad(x, (0, missing))
    torch.testing.assert_close(y, expected, rtol=0, atol=0)
    dy = torch.randn_like(y)
    (dx,) = torch.autograd.grad(y, x, dy)
    torch.testing.assert_close(dx, torch.autograd.grad(expected, x, dy)[0], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("classes", [1, 5, 50, 2051, 20000, 40001, 86016, 128256])
def test_correct_is_the_first_argmax_among_ties(classes, dtype, device):
    """Logits of few values, whose maxima are there many times; labels at the first, at the last, anywhere."""
    if device == "cpu" and classes > 50000:
        pytest.skip("the CPU has one form for all sizes")
    draw = torch.Generator().manual_seed(classes)
    hidden = torch.randint(-1, 2, (60, 8), generator=draw).to(device, dtype)
    weight = torch.randint(-1, 2, (classes, 8), generator=draw).to(device, dtype)
    logits = hidden.double() @ weight.double().T
    first, last = logits.argmax(-1), classes - 1 - logits.flip(-1).argmax(-1)
    target = torch.where(torch.arange(60, device=device) % 3 == 0, first, last)
    target[1::3] = torch.randint(0, classes, (20,), generator=draw).to(device)
    target[7] = -100
    want = (target == first) & (target != -100)
    for (scale, cap), grad in itertools.product(((1.0, None), (0.7, None), (1.0, 30.0)), (False, True)):
        leaf = hidden.clone().requires_grad_(grad)
        options = {"logit_scale": scale, "softcap": cap, "reduction": "none", "outputs": ("loss", "correct")}
        got = tigon.linear_cross_entropy(leaf, weight, target, **options)
        assert torch.equal(got.correct, want)
        if grad:
            got.loss.sum().backward()


@pytest.mark.parametrize("width", [33, 48, 63])
@pytest.mark.parametrize("contiguous", [False, True])
def test_values_beside_a_row_change_nothing(width, contiguous):
    """Matmuls of bf16 on AMX read past the rows of their first operand: into nothing, or the next row."""
    memory = torch.full((64, width if contiguous else width + 40), torch.nan, dtype=torch.bfloat16)
    hidden = memory[:, :width].copy_(torch.randn(64, width))
    if contiguous:
        hidden[40] = torch.nan
    hidden.requires_grad_()
    weight = (torch.randn(101, width) / 8).bfloat16().requires_grad_()
    losses = tigon.linear_cross_entropy(hidden, weight, torch.arange(64), reduction="none")
    (dhidden,) = torch.autograd.grad(losses, hidden, torch.ones(64))
    own = torch.arange(64) == 40 if contiguous else torch.zeros(64, dtype=torch.bool)
    assert torch.equal(losses.isnan(), own)
    assert torch.equal(dhidden.isnan().any(-1), own)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_columns_beside_dlogits_stay(dtype, device):
    """Logits' gradients of a caller are only read, what lies after their rows included."""
    whole = torch.full((48, 128), 5.0, dtype=dtype, device=device)
    dlogits = whole[:, :100].copy_(torch.randn(48, 100))
    hidden, weight = torch.randn(48, 64).to(whole), torch.randn(100, 64).to(whole)
    before, dhidden = whole.clone(), torch.empty_like(hidden)
    rest = (None, None, None, True, False, False, None, None, 1.0, None, None)
    torch.ops.tigon.loss_head_gradients(dlogits, hidden, weight, dhidden, *rest)
    assert torch.equal(whole, before)
    torch.testing.assert_close(dhidden, dlogits @ weight, rtol=2e-2, atol=0.2)
