"""CUDA kernels of draft trees and top rows on a CPU (cuda_on_cpu.py): the same tests that run on a card."""

from __future__ import annotations

from tests.ops.tree_kernels import *  # noqa: F403
