"""Where the kernels run that layer_kernels.py and others test: on a CPU. tests/gpu has its own."""

from __future__ import annotations

import os
import zlib

import numpy as np
import pytest

from tests.ops import cuda_on_cpu
from tests.ops import ggml_graph as ggml

ORDER = "CUDA_ON_CPU_ORDER"  # tests/cuda_on_cpu/fibers.h
ORDERS = [os.environ[ORDER]] if ORDER in os.environ else ["forward", "reverse"]


def pytest_collection_modifyitems(items):
    """Let each case of a test run in one order of warps; in the other one it is slow.

    The orders take turns over the cases, which their names put into an order of chance.
    """
    tests = {}  # each: its cases, in both orders
    for item in items:
        callspec = getattr(item, "callspec", None)
        if callspec and "backend" in callspec.params:
            cases = tests.setdefault((item.path, item.originalname), {})
            cases.setdefault(callspec.id.partition("-")[2], []).append(item)
    for cases in tests.values():
        named = sorted(filter(None, cases), key=lambda case: zlib.crc32(case.encode()))
        for turn, case in enumerate(named):
            for item in cases[case]:
                if item.callspec.params["backend"] != ORDERS[turn % len(ORDERS)]:
                    item.add_marker(pytest.mark.slow)


@pytest.fixture(params=ORDERS)
def backend(request, monkeypatch) -> str:
    """Our CUDA kernels on a CPU, warps in one order and in the other, or as the environment says."""
    if not cuda_on_cpu.compiler():
        pytest.skip("no C++ compiler with _Float16")
    monkeypatch.setenv(ORDER, request.param)
    return ggml.CUDA_ON_CPU


@pytest.fixture
def rng() -> np.random.Generator:
    """Random numbers from a new seed, which pytest prints when a test fails."""
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print(f"seed {seed}")
    return np.random.default_rng(seed)
