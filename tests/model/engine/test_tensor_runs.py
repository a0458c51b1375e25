"""src/verify/tensor_runs.h: equal tensors at equal distances are one run, and others are not."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from _build import source
from tests.ops import ggml_graph as ggml

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def find(tmp_path_factory):
    """find(widths, places, types, owners) -> the runs: (first, number, stride, bytes of all as one)."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("no C++ compiler")
    folder = source.ensure_source(ROOT).llama_cpp / "ggml" / "include"
    library = tmp_path_factory.mktemp("runs") / "runs.so"
    files = [Path(__file__).with_name("tensor_runs.cpp"), ROOT / "src" / "verify" / "tensor_runs.cpp"]
    flags = ["-std=c++17", "-fPIC", "-shared", f"-I{ROOT / 'src'}", f"-I{folder}", "-o", library]
    subprocess.run([compiler, *flags, *files, ggml.folder / "libdraftwood-ggml-base.so"], check=True)
    call = ctypes.CDLL(str(library)).find_runs

    def run(widths, places, types=None, owners=None):
        n = len(widths)
        given = [np.array(x, np.int64) for x in (widths, places)]
        given += [np.zeros(n, np.int32) if x is None else np.array(x, np.int32) for x in (types, owners)]
        runs = np.zeros((len(widths), 4), np.int64)
        n = call(
            *(ctypes.c_void_p(x.ctypes.data) for x in given), len(widths), ctypes.c_void_p(runs.ctypes.data)
        )
        return [tuple(run) for run in runs[:n].tolist()]

    return run


def test_equal_distances_are_one_run(find):
    assert find([4, 4, 4], [0, 128, 256]) == [(0, 3, 128, 256 + 32)]
    assert find([4, 4], [64, 96]) == [(0, 2, 32, 64)]


def test_what_breaks_a_run(find):
    assert find([], []) == []
    assert find([4], [640]) == [(0, 1, 32, 32)]
    assert find([4, 4, 4, 4], [0, 128, 640, 1152]) == [(0, 2, 128, 160), (2, 2, 512, 544)]
    assert find([4, 8, 8], [0, 128, 256]) == [(0, 1, 32, 32), (1, 2, 128, 192)]
    assert find([4, 4], [128, 0]) == [(0, 1, 32, 32), (1, 1, 32, 32)]
    assert find([4, 4], [128, 128]) == [(0, 1, 32, 32), (1, 1, 32, 32)]
    assert find([4, 4, 4], [0, 128, 256], owners=[0, 1, 1]) == [(0, 1, 32, 32), (1, 2, 128, 160)]
    f16 = ggml.TYPES["F16"]
    assert find([4, 4, 4], [0, 128, 256], types=[f16, f16, 0]) == [(0, 2, 128, 144), (2, 1, 32, 32)]


def test_any_list_is_covered_once_in_order(find):
    rng = np.random.default_rng()
    for _ in range(50):
        n = int(rng.integers(1, 12))
        widths = rng.choice([4, 8], n, p=[0.8, 0.2])
        places = rng.choice([64, 64, 64, 192], n).cumsum()
        runs = find(widths, places)
        covered = [
            (first + i, int(places[first]) + i * stride) for first, k, stride, _ in runs for i in range(k)
        ]
        assert covered == list(enumerate(places.tolist()))
        assert all(len(set(widths[first : first + k])) == 1 for first, k, _, _ in runs)
