"""Quantised products compiled for one CPU after another, Arm's in QEMU: all give the same bits.

Integer sums are exact and the chain of floats is fixed, so AVX2, AVX-512 and NEON must agree to the last bit.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import source

from tests.ops import cpus
from tests.ops import ggml_graph as ggml
from tests.ops.test_quant_rows import KINDS, assert_close, extremes, quantised, random_weights

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [
    *(ROOT / "src" / "ops" / "mul-mat-rows").glob("quant-*.cpp"),
    ROOT / "tests" / "ops" / "quant_rows_main.cpp",
]
AVX512 = ["-march=skylake-avx512"]

# name: flags, and what the CPU must have to run it, as /proc/cpuinfo calls it
HERE = {
    "avx2": (["-march=haswell"], ["avx2", "fma", "f16c"]),
    "avx-vnni": (["-march=haswell", "-mavxvnni"], ["avx2", "fma", "f16c", "avx_vnni"]),
    "avx512": (AVX512, ["avx512bw", "avx512vl"]),
    "avx512-vnni": ([*AVX512, "-mavx512vnni"], ["avx512bw", "avx512vl", "avx512_vnni"]),
}
SHAPES = [
    (256, 1, 1),
    (768, 37, 1),
    (768, 37, 2),
    (2560, 37, 2),
    (2560, 16, 5),
    (512, 50, 19),
]  # n, rows, cols

Run = Callable[..., np.ndarray]


def compiled(compiler: str, flags: list[str], target: Path) -> None:
    llama = source.ensure_source(ROOT).llama_cpp
    folders = [ROOT / "src", llama / "ggml" / "include", llama / "ggml" / "src"]
    command = [compiler, "-std=c++17", "-O3", "-w", "-ffp-contract=off", *flags, "-o", target]
    subprocess.run([*command, *(f"-I{folder}" for folder in folders), *SOURCES], check=True)


@pytest.fixture(scope="module", params=[*HERE, "neon-dotprod"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Products on a CPU: run(kind, weights u8 [rows, bytes], x f32 [cols, n]) -> f32 [cols, rows]."""
    emulator = []
    if request.param == "neon-dotprod":
        compiler, qemu = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
        if not (compiler and qemu):
            pytest.skip("not installed: g++-aarch64-linux-gnu, qemu-user")
        emulator, flags = [qemu], ["-march=armv8.2-a+dotprod+fp16", "-static"]
    else:
        flags, needed = HERE[request.param]
        compiler = cpus.compiler_for(needed)
    program = tmp_path_factory.mktemp("quant") / "quant_rows"
    compiled(compiler, flags, program)

    def products(kind: str, weights: np.ndarray, x: np.ndarray) -> np.ndarray:
        rows, stride = weights.shape
        cols, n = x.shape
        sizes = [str(each) for each in (ggml.TYPES[kind], n, rows, cols, stride)]
        done = subprocess.run(
            [*emulator, program, *sizes],
            input=weights.tobytes() + x.tobytes(),
            capture_output=True,
            check=True,
            timeout=280,
        )
        return np.frombuffer(done.stdout, np.float32).reshape(cols, rows)

    return products


@pytest.fixture(scope="module")
def known() -> dict[tuple[str, int], bytes]:
    """Return what the first CPU found, by type and shape."""
    return {}


@pytest.mark.parametrize("kind", KINDS)
def test_every_cpu_gives_the_same_bits(run: Run, kind: str, known: dict[tuple[str, int], bytes]) -> None:
    for i, (n, rows, cols) in enumerate(SHAPES):
        rng = np.random.default_rng([17, i])
        weights = random_weights(rng, (rows, n), kind)
        x = rng.standard_normal((cols, n)).astype(np.float32)
        found = run(kind, weights, x)
        assert_close(found, weights, kind, quantised(x, kind))
        assert known.setdefault((kind, i), found.tobytes()) == found.tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_no_sum_overflows(run: Run, kind: str) -> None:
    """Sums of 16 bits, which some CPUs have, are as large as they get."""
    for weights, x in extremes(kind):
        for cols in (1, 2, 5):
            assert_close(run(kind, weights, x[:cols]), weights, kind, quantised(x[:cols], kind))
