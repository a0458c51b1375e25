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
    """Let each case of a test run in one order of warps, drawn by its name; in the other one it is slow."""
    for item in items:
        order, _, case = item.callspec.id.partition("-") if hasattr(item, "callspec") else ("", "", "")
        if case and order in ORDERS and len(ORDERS) > 1:
            drawn = ORDERS[zlib.crc32(f"{item.originalname} {case}".encode()) % len(ORDERS)]
            if order != drawn:
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
