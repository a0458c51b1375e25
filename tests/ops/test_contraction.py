"""Products and their sums round alike wherever a kernel is inlined: no choice is left to the compiler.

The kernels are compiled here for several CPUs with the compiler's own default: it may
fuse a product with a sum. Where chains of fused operations are slow (Zen), GCC fuses in some
instantiations of a template only.
"""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import numpy as np
import pytest
import source

from tests.ops import cpus
from tests.ops import ggml_graph as ggml

ROOT = Path(__file__).resolve().parents[2]
SIZES = range(1, 131)

# name: flags, and what the CPU must have to run it, as /proc/cpuinfo calls it
CPUS = {
    "sse2": (["-march=x86-64"], ["sse2"]),
    "sse4.2": (["-march=nehalem"], ["sse4_2"]),
    "avx": (["-march=sandybridge"], ["avx"]),
    "avx2": (["-march=haswell"], ["avx2", "fma", "f16c"]),
    "zen, avx2": (["-march=haswell", "-mtune=znver3"], ["avx2", "fma", "f16c"]),
    "avx512": (["-march=skylake-avx512"], ["avx512bw", "avx512vl"]),
    "zen, avx512": (["-march=skylake-avx512", "-mtune=znver3"], ["avx512bw", "avx512vl"]),
    "neon": (["-march=armv8-a"], ["asimd"]),
    "neon, dotprod": (["-march=armv8.2-a+dotprod+fp16"], ["asimddp"]),
}


@pytest.fixture(scope="module", params=CPUS)
def every_tile(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    flags, needed = CPUS[request.param]
    compiler = cpus.compiler_for(needed)
    llama = source.ensure_source(ROOT).llama_cpp
    folders = [ROOT / "src", llama / "ggml" / "include", llama / "ggml" / "src"]
    library = tmp_path_factory.mktemp("tiles") / "tiles.so"
    command = [compiler, "-std=c++17", "-O3", "-fPIC", "-shared", "-w", *flags, "-o", library]
    command += [f"-I{folder}" for folder in [*folders, llama / "ggml" / "src" / "ggml-cpu"]]
    base = ggml.folder / "libdraftwood-ggml-base.so"
    subprocess.run([*command, ROOT / "tests" / "ops" / "every_tile.cpp", base], check=True)
    return ctypes.CDLL(str(library))


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_all_tiles_agree_whatever_the_compiler_prefers(every_tile: ctypes.CDLL, kind: str) -> None:
    rng = np.random.default_rng()
    pointer = ctypes.c_void_p
    for n in SIZES:
        weights = ggml.encode(rng.standard_normal((8 + 8, n)), kind)  # the kernel prefetches behind its rows
        x = rng.standard_normal((3, n)).astype(np.float32)
        out = np.full((5, 24), np.nan, np.float32)
        size = every_tile.every_tile(
            kind == "BF16", ctypes.c_int64(n), *(pointer(each.ctypes.data) for each in (weights, x, out))
        )
        found = out.reshape(-1)[: 5 * size].reshape(5, size)
        assert not np.isnan(found).any()
        for other in found[1:]:
            assert np.array_equal(other, found[0]), n


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_all_tiles_of_the_build_agree(kind: str) -> None:
    """The same of the library that is installed, on the instruction set that it chose."""
    rng = np.random.default_rng()
    for n in SIZES:
        weights = ggml.encode(rng.standard_normal((1, 1, 19, n)), kind)
        x = rng.standard_normal((1, 1, 7, n)).astype(np.float32)

        def product(x: np.ndarray, weights: np.ndarray = weights) -> np.ndarray:
            shape = (*x.shape[:-1], weights.shape[-2])
            return ggml.run(ggml.base.ggml_mul_mat, [(weights, kind), (x, "F32")], shape, use_ref=True)

        whole = product(x)
        for col in range(7):
            assert np.array_equal(product(x[:, :, [col]])[0, 0, 0], whole[0, 0, col]), (n, col)
        for cols in range(2, 7):
            assert np.array_equal(product(x[:, :, :cols])[0, 0], whole[0, 0, :cols]), (n, cols)
        for row in range(19):
            assert np.array_equal(product(x, weights[:, :, [row]])[0, 0, :, 0], whole[0, 0, :, row]), (n, row)


def test_ggml_cpu_is_compiled_without_contraction() -> None:
    """Of what is installed. ggml's own loops are in the same module: norms, softmax, tails of rows."""
    module = ctypes.CDLL(str(ggml.cpu_module()))
    module.dw_product_and_sum.restype = ctypes.c_float
    module.dw_product_and_sum.argtypes = [ctypes.c_float] * 3
    a = np.float32(1 + 2**-12)
    apart = np.float32(a * a) - np.float32(1)
    fused = np.float32(np.float64(a) * np.float64(a) - 1.0)
    assert apart != fused
    assert np.float32(module.dw_product_and_sum(a, a, -1.0)) == apart
