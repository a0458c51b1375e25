"""tests/cuda_on_cpu itself: a missing barrier or wait shows in one order; shared memory is poisoned."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from tests.ops import cuda_on_cpu
from tests.ops.conftest import ORDER

N, POISON = 128, -1
NONE, WARP, BLOCK = range(3)


def pointer(array):
    return ctypes.c_void_p(array.ctypes.data)


@pytest.fixture
def library():
    if not cuda_on_cpu.compiler():
        pytest.skip("no C++ compiler")
    return cuda_on_cpu.library()


@pytest.fixture
def shifted(library, monkeypatch):
    """shifted(by, barrier, order) -> what lies `by` further on, as threads exchange it; and what should."""

    def run(by, barrier, order):
        monkeypatch.setenv(ORDER, order)
        values, found = np.arange(1, N + 1, dtype=np.int32), np.zeros(N, np.int32)
        library.cuda_on_cpu_shift(pointer(values), pointer(found), by, barrier)
        wanted = np.zeros(N, np.int32)
        wanted[max(0, -by) : N - max(0, by)] = values[max(0, by) : N + min(0, by)]
        return found, wanted

    return run


@pytest.mark.parametrize("order", ["forward", "reverse", "5"])
@pytest.mark.parametrize("by", [1, -1, 32, -32, 100])
def test_a_barrier_is_enough_in_any_order(shifted, by, order):
    for _ in range(20):
        found, wanted = shifted(by, BLOCK, order)
        assert np.array_equal(found, wanted)


@pytest.mark.parametrize("barrier", [NONE, WARP])
@pytest.mark.parametrize("by", [32, 100])
def test_without_one_of_the_block_one_order_reads_poison(shifted, by, barrier):
    for ahead, behind in (("forward", "reverse"), ("reverse", "forward")):
        found, wanted = shifted(by, barrier, ahead)
        assert np.array_equal(found, np.where(wanted > 0, POISON, 0))
        found, wanted = shifted(by, barrier, behind)
        assert np.array_equal(found, wanted)
        by = -by


@pytest.mark.parametrize("order", ["forward", "reverse"])
def test_without_one_of_the_warp_one_order_reads_poison(shifted, order):
    by = 1 if order == "forward" else -1
    found, wanted = shifted(by, NONE, order)
    assert np.array_equal(found, np.where(wanted > 0, POISON, 0))
    found, wanted = shifted(-by, NONE, order)
    assert np.array_equal(found, wanted)


def test_a_seed_takes_both_orders(shifted):
    rights = []
    for _ in range(50):
        found, wanted = shifted(32, NONE, "3")
        rights.append(np.array_equal(found, wanted))
    assert 5 < sum(rights) < 45


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("order", ["forward", "reverse"])
def test_an_asynchronous_copy_has_to_be_waited_for(library, monkeypatch, order, waits):
    monkeypatch.setenv(ORDER, order)
    values, found = np.arange(4 * N, dtype=np.int32), np.zeros(4 * N, np.int32)
    library.cuda_on_cpu_fetch(pointer(values), pointer(found), ctypes.c_bool(waits))
    assert np.array_equal(found, values if waits or order == "forward" else np.full(4 * N, POISON))
