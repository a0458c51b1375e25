"""Which ggml backends a build holds: configures CMake, compiles nothing, needs no GPU."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import source
from draftwood.load.cpu import NEEDS

pytestmark = [pytest.mark.compat, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
Configure = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def configure(tmp_path: Path) -> Configure:
    """configure("GGML_BLAS=ON") -> finished `cmake -B tmp_path`."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    if shutil.which("cmake", path=path) is None:
        pytest.skip("no cmake beside this Python or on the PATH: pip install '.[dev]'")
    tree = source.ensure_source(ROOT)

    def run(*settings: str) -> subprocess.CompletedProcess[str]:
        given = [f"-D{each}" for each in ("CMAKE_BUILD_TYPE=Release", *settings)]
        command = ["cmake", "-S", ROOT, "-B", tmp_path, f"-DDRAFTWOOD_SDIST_DIR={tree.path}", *given]
        environ = {**os.environ, "PATH": path}
        return subprocess.run(command, env=environ, capture_output=True, text=True, check=False)

    return run


def installed(folder: Path) -> set[str]:
    """The libraries that the install script puts into the wheel, by file name."""
    script = (folder / "cmake_install.cmake").read_text()
    return set(
        re.findall(r'draftwood/_llama_cpp/lib" TYPE (?:SHARED_LIBRARY|MODULE) FILES "[^"]*/([^"/]+)"', script)
    )


def test_the_wheel_holds_every_backend_that_is_on(configure, tmp_path):
    library = tmp_path / "libsome-blas.so"  # never linked: configuring only wants a path
    library.touch()
    blas = (
        "GGML_BLAS=ON",
        "GGML_BLAS_VENDOR=Generic",
        f"BLAS_LIBRARIES={library}",
        f"BLAS_INCLUDE_DIRS={ROOT}",
    )
    done = configure(*blas)
    assert done.returncode == 0, done.stderr
    with_blas = installed(tmp_path)
    done = configure("GGML_BLAS=OFF")
    assert done.returncode == 0, done.stderr
    assert with_blas - installed(tmp_path) == {"libdraftwood-ggml-blas.so"}
    backends = {"libdraftwood-ggml-cpu.so", "libdraftwood-ggml-rpc.so"}
    assert backends | {"libdraftwood-ggml.so", "libdraftwood-ggml-base.so"} <= installed(tmp_path)
    assert "ggml commit:  unknown" in done.stdout  # not this repository's


def test_the_cpu_backend_comes_once_or_once_for_each_instruction_set(configure, tmp_path):
    done = configure("DRAFTWOOD_PORTABLE=ON")
    assert done.returncode == 0, done.stderr
    names = {name for name in installed(tmp_path) if "ggml-cpu" in name}
    assert names == {f"libdraftwood-ggml-cpu-{name}.so" for name in NEEDS}
    done = configure("DRAFTWOOD_PORTABLE=OFF")
    assert done.returncode == 0, done.stderr
    assert {name for name in installed(tmp_path) if "ggml-cpu" in name} == {"libdraftwood-ggml-cpu.so"}


def test_linked_backends_are_refused_in_words(configure):
    done = configure("GGML_BACKEND_DL=OFF")
    assert done.returncode != 0
    assert "GGML_BACKEND_DL is off; expected on" in done.stderr
    assert "hint: leave it out" in done.stderr
