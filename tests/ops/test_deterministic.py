"""The switch of tigon.deterministic: calls, blocks, decorators, threads. Its promises: test_same_bits.py."""

import itertools
import threading
import time

import pytest
import torch

import tigon


def test_the_switch():
    """Contexts nest, PyTorch's switch counts unless something was said, and bad modes are refused."""
    is_on = tigon._deterministic.is_deterministic
    assert not is_on()
    with tigon.deterministic():
        assert is_on() and tigon.env().deterministic == "on"
        with tigon.deterministic(False):
            assert not is_on()
        assert is_on()
    try:
        for warn_only in (False, True):
            torch.use_deterministic_algorithms(True, warn_only=warn_only)
            assert is_on()
        with tigon.deterministic(False):
            assert not is_on()
    finally:
        torch.use_deterministic_algorithms(False)
    assert not is_on()
    with pytest.raises(tigon.Error, match=r"\[deterministic\] mode must be True, False or None, got 'yes'"):
        tigon.deterministic("yes")


def test_blocks_of_the_switch():
    """One object for many blocks, also inside itself; blocks that end in any order; a switch that was said
    after a block's object was made stays."""
    is_on = tigon._deterministic.is_deterministic
    mode = tigon.deterministic()
    assert is_on()
    for _ in range(2):
        with mode:
            assert is_on()
            with mode:
                assert is_on()
            assert is_on()
        assert not is_on()
    with mode, tigon.deterministic(False):
        tigon.deterministic()  # until the block ends
        assert is_on()
        with mode:
            pass
        assert is_on()
    assert not is_on()
    for order in itertools.permutations(range(3)):
        blocks = [tigon.deterministic(on) for on in (True, False, True)]
        modes = dict(enumerate((True, False, True)))
        for block in reversed(blocks):
            with block:  # undoes the switch of its construction
                pass
        assert not is_on()
        for block in blocks:
            block.__enter__()
        for i in order:
            blocks[i].__exit__(None, None, None)
            del modes[i]
            assert is_on() == (modes[max(modes)] if modes else False)
    tigon.deterministic(False)
    late = tigon.deterministic()
    tigon.deterministic(None)
    with late:
        assert is_on()
    assert not is_on()


def test_the_switch_as_a_decorator():
    """On in each call alone, also where it raises or calls itself; refused for what runs later."""
    is_on = tigon._deterministic.is_deterministic

    @tigon.deterministic()
    def depth(n):
        """Itself."""
        assert is_on()
        if n < 0:
            raise ValueError
        return n and 1 + depth(n - 1)

    assert not is_on() and depth.__doc__ == "Itself."
    assert depth(3) == 3 and depth(0) == 0 and not is_on()
    with pytest.raises(ValueError):
        depth(-1)
    assert not is_on()

    def generator():
        yield

    async def coroutine():
        pass

    for late in (generator, coroutine, type("Later", (), {}), 3):
        with pytest.raises(tigon.Error, match=r"\[deterministic\] only functions that have run"):
            tigon.deterministic()(late)
        assert not is_on()


def test_calls_that_become_blocks_in_any_order():
    """Two calls, then their blocks in either order: nothing is left, and a call that nobody holds stays."""
    for first in (0, 1):
        calls = [tigon.deterministic(True), tigon.deterministic(False)]
        with calls[first]:
            assert tigon._deterministic.is_deterministic() is (first == 0)
        with calls[1 - first]:
            assert tigon._deterministic.is_deterministic() is (first == 1)
        assert not tigon._deterministic.is_deterministic()
    tigon.deterministic(True)
    mode = tigon.deterministic(False)
    with mode:
        pass
    assert tigon._deterministic.is_deterministic()
    tigon.deterministic(None)
    assert not tigon._deterministic.is_deterministic()
    for _ in range(100):
        tigon.deterministic(None)
    assert len(tigon._deterministic._levels[0]._calls) <= 2


def test_the_switch_in_threads():
    """Blocks of threads that overlap leave nothing behind."""
    gate = threading.Barrier(4)

    def work(i):
        for _ in range(50):
            gate.wait()
            with tigon.deterministic(bool(i % 2)):
                time.sleep(1e-4 * (i + 1))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not tigon._deterministic.is_deterministic()
    assert len(tigon._deterministic._levels) == 1
