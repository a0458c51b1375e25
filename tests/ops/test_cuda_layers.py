"""CUDA kernels of layers on a CPU (cuda_on_cpu.py): the same tests that run on a card."""

from __future__ import annotations

from tests.ops.attention_kernels import *  # noqa: F403
from tests.ops.layer_kernels import *  # noqa: F403
