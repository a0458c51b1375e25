"""The CUDA kernels of src/ops on a CPU (cuda_on_cpu.py): the same tests that run on a card."""

from __future__ import annotations

import os
import shutil

import numpy as np
import pytest

from tests.ops import ggml_graph as ggml
from tests.ops.layer_kernels import *  # noqa: F403

pytestmark = pytest.mark.skipif(not shutil.which(os.environ.get("CXX", "c++")), reason="no C++ compiler")


@pytest.fixture
def backend() -> str:
    return ggml.CUDA_ON_CPU


@pytest.fixture
def rng() -> np.random.Generator:
    """Random numbers from a new seed, which pytest prints when a test fails."""
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print(f"seed {seed}")
    return np.random.default_rng(seed)
