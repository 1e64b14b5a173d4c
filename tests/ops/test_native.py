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
