"""The build backend before CMake runs: a missing compiler is refused in words; CMake gets two paths."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("scikit_build_core", reason="scikit-build-core is not installed: pip install '.[dev]'")

import backend

ROOT = Path(__file__).resolve().parents[2]
VARIABLES = ("CC", "CXX", "CMAKE_ARGS", "CMAKE_TOOLCHAIN_FILE")


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The one folder on the PATH, empty; no variable names a compiler."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / "bin").mkdir()
    return tmp_path / "bin"


def add(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o755)


def refused() -> str:
    with pytest.raises(SystemExit) as caught:
        backend.require_compiler()
    return str(caught.value)


def test_no_compiler(programs: Path) -> None:
    assert "found none of cc, gcc, clang on the PATH; expected a C compiler" in refused()
    add(programs, "gcc")
    text = refused()
    assert "found none of c++, g++, clang++ on the PATH; expected a C++ compiler" in text
    assert "\n\nhint: apt-get install g++" in text
    add(programs, "clang++")
    backend.require_compiler()


@pytest.mark.parametrize("variable", ["CC", "CXX"])
def test_a_variable_that_names_none(programs: Path, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    add(programs, "cc", "c++")
    monkeypatch.setenv(variable, "nowhere-g++ -pipe")
    text = refused()
    assert f"{variable} is `nowhere-g++`, which is not there; expected a C" in text
    assert f"\n\nhint: correct {variable}, or unset it" in text
    add(programs, "nowhere-g++")
    backend.require_compiler()


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("CMAKE_ARGS", "-DCMAKE_C_COMPILER=/opt/x/cc -DCMAKE_CXX_COMPILER=/opt/x/c++"),
        ("CMAKE_ARGS", "-DCMAKE_TOOLCHAIN_FILE=x.cmake"),
        ("CMAKE_TOOLCHAIN_FILE", "x.cmake"),
    ],
)
def test_compilers_named_to_cmake_are_left_to_it(
    programs: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    refused()
    monkeypatch.setenv(variable, value)
    backend.require_compiler()


def test_a_compiler_named_in_the_settings_is_left_to_cmake(programs: Path) -> None:
    backend.require_compiler({"cmake.define.CMAKE_CXX_COMPILER": "/opt/x/c++"})


@pytest.mark.parametrize("hook", [backend.build_wheel, backend.build_editable])
def test_no_hook_builds_without_a_compiler(programs: Path, tmp_path: Path, hook) -> None:
    with pytest.raises(SystemExit, match="expected a C compiler"):
        hook(str(tmp_path))
    assert list(tmp_path.glob("*.whl")) == []


def test_pip_says_it_without_a_traceback(programs: Path, tmp_path: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index"]
    done = subprocess.run(
        [*command, "--wheel-dir", tmp_path, ROOT], env=environ, capture_output=True, text=True, check=False
    )
    text = done.stdout + done.stderr
    assert done.returncode != 0
    assert "error: found none of cc, gcc, clang on the PATH" in text
    assert "hint: apt-get install g++" in text
    assert "Traceback" not in text


def test_cmake_gets_two_paths_and_reads_the_rest_from_the_tree() -> None:
    settings = backend.with_source({"cmake.define.X": "1"})
    assert set(settings) == {
        "cmake.define.X",
        "cmake.define.DRAFTWOOD_SDIST_DIR",
        "cmake.define.DRAFTWOOD_STAGED_PYTHON",
        "cmake.define.DRAFTWOOD_PORTABLE",
        "cmake.define.GGML_CUDA",
    }
    assert settings["cmake.define.GGML_CUDA"] == "OFF"  # CMAKE_ARGS comes later
    assert settings["cmake.define.DRAFTWOOD_PORTABLE"] == "OFF"
    portable = backend.with_source({"cmake.define.DRAFTWOOD_PORTABLE": "ON"})
    assert portable["cmake.define.DRAFTWOOD_PORTABLE"] == "ON"
    tree = Path(settings["cmake.define.DRAFTWOOD_SDIST_DIR"])
    assert (tree / "vendor" / "llama.cpp" / "CMakeLists.txt").is_file()
    assert (Path(settings["cmake.define.DRAFTWOOD_STAGED_PYTHON"]) / "llama.py").is_file()


def test_no_module_hides_a_package():
    """pip puts _build in front of sys.path: a ninja.py there hid the package from scikit-build-core."""
    required = re.findall(r'^ *"([\w.-]+)', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    packages = {name.replace("-", "_").lower() for name in required} | sys.stdlib_module_names
    assert {"ninja", "cmake", "scikit_build_core"} <= packages
    assert not packages & {path.stem for path in (ROOT / "_build").glob("*.py")}
