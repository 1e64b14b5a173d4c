"""The runs of native.py are under the instruction sets and thread counts they name, and see a difference."""

import pytest
from native import bits_under

import tigon
from conftest import TESTS

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


SCRIPT = """
torch.manual_seed(0)
import tigon

def check(fn, *tensors):
    tensors = [t.requires_grad_() for t in tensors]
    y = fn(*tensors)
    emit(y, *torch.autograd.grad(y, tensors, torch.randn_like(y)))

for dtype in (torch.float32, torch.bfloat16, torch.float16):
    for rows, cols in ((70, 333), (3, 4099), (300, 1)):
        x, z, w, b = (torch.randn(shape).to(dtype) for shape in ((rows, cols), (rows, cols), cols, cols))
        check(tigon.layer_norm, x, w, b)
        check(tigon.swiglu, x, z)
        check(lambda w: tigon.embedding(torch.randint(0, rows, (300,)), w, scale=3.0), x)
        check(lambda x: tigon.cross_entropy(x, torch.randint(0, cols, (rows,)), softcap=5.0), x)
    q, cos, sin = torch.randn(2, 5, 70, 64).to(dtype), *torch.randn(2, 1, 70, 64).to(dtype)
    check(lambda q: tigon.rope(q, None, cos, sin)[0], q)
"""


# Their matmuls are PyTorch's, and may have other bits: the pieces around them.
EXPERTS = """
import itertools, tigon
torch.manual_seed(0)
pieces = torch.ops.tigon
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    x, g = torch.randn(2, 110, 190).to(dtype)
    order, place, offsets = pieces.experts_route(torch.randint(0, 7, (110, 3)), 5)
    rows, g = pieces.experts_gather(x, place), pieces.experts_gather(g, place)
    gate_up, weights = torch.randn(330, 84).to(dtype), torch.randn(330)
    bias, down_bias = torch.randn(5, 84).to(dtype), torch.randn(5, 190).to(dtype)
    emit(order, place, offsets, pieces.experts_combine(rows, place, offsets, weights, down_bias, 110))
    emit(pieces.experts_sum(rows, weights, order, offsets))
    here = int(offsets[-1])
    for kind, columns in itertools.product(range(7), range(3)):
        if columns == 2 and kind in (4, 6):
            continue  # a clamped unit has a gate and an input
        gate = kind, columns, 1.2, 1.5
        act = pieces.experts_gate(gate_up, bias, offsets, *gate)
        saved = gate_up, bias, weights, order, offsets, g, down_bias
        dgate_up, weighted, dweights = pieces.experts_gate_bwd(act, *saved, *gate, True, True, True)
        emit(act[:here], dgate_up[:here], weighted[:here], dweights)
"""


EVERY_OP = f"""
import random, sys
sys.path[:0] = {[str(TESTS), str(TESTS / "ops")]}
from cases import modules
from cases.case import Case
from checks import run
from test_random_cases import DRAWERS, _one_tensor

for op, module in modules().items():
    for seed, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16) * 3):
        case = Case(f"random {{seed}}", DRAWERS.get(op, _one_tensor)(random.Random(f"{{op}} {{seed}}")))
        results = run(module.tigon_fn, module.make(case, "cpu", dtype, 0)).tensors
        emit(*(t for t in results.values() if t is not None))
"""
LISTS = f"""
import itertools, sys
sys.path[:0] = {[str(TESTS), str(TESTS / "ops")]}
import test_adamw, test_muon

for dtype in test_adamw.HALF[:1] + (torch.float32,):
    for rounding, moments in itertools.product(test_adamw.ROUNDINGS, test_adamw.ROUNDINGS[:2]):
        for parameters in test_adamw.LISTS:
            made = test_adamw.make_list(parameters.make(dtype), rounding, amsgrad=True)
            emit(*test_adamw.step(made, rounding=rounding, moment_rounding=moments, seed=5))
    emit(torch.ops.tigon.grad_norm(made.grads, 1.0, None)[0])
    torch.ops.tigon.scale_(made.grads, torch.tensor(0.37))
    emit(*made.grads)
for case in test_muon.LISTS:
    for dtype in test_muon.FLOATS:
        for started in (True, False):
            m, updates, p, _ = test_muon.passes(case, dtype, torch.float32, True, started=started)
            emit(*m, *updates, *p)
"""


@pytest.mark.slow
@pytest.mark.parametrize("script", [SCRIPT, LISTS, EXPERTS], ids=["rows", "lists", "experts"])
def test_same_bits_on_every_instruction_set_and_thread_count(script):
    assert len(bits_under(script)) == 1


def test_same_bits_of_every_op_on_every_instruction_set():
    assert len(bits_under(EVERY_OP, threads=(1,))) == 1
