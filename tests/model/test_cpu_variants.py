"""Which variant of the CPU backend runs, and what is said where none does.

On lesser CPUs: tests/compat/test_lesser_cpu.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from draftwood._llama_cpp import llama_cpp as native
from draftwood.errors import OptionError
from draftwood.load import cpu

LOAD = """
import sys
from draftwood import Llama
Llama(sys.argv[1], n_ctx=64, n_threads=1, verbose=False)
print("loaded")
"""


def load(model: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", LOAD, model]
    return subprocess.run(command, env={**os.environ, **environ}, capture_output=True, text=True, check=False)


def test_the_best_of_those_that_run_here() -> None:
    scores = cpu.variants()
    assert cpu.running() == max(scores, key=scores.__getitem__) or "DRAFTWOOD_CPU" in os.environ
    assert scores[str(cpu.running())] > 0


def test_nothing_is_printed(gguf: Any) -> None:
    done = load(gguf("dense-plain"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "loaded\n", "")


def test_a_variant_that_is_not_there(gguf: Any) -> None:
    done = load(gguf("dense-plain"), DRAFTWOOD_CPU="pentium")
    assert done.returncode == 1
    assert "OptionError: DRAFTWOOD_CPU is `pentium`; expected one of" in done.stderr
    assert str(cpu.running()) in done.stderr
    assert "hint: unset DRAFTWOOD_CPU" in done.stderr


def test_the_variant_that_is_named(gguf: Any) -> None:
    assert load(gguf("dense-plain"), DRAFTWOOD_CPU=str(cpu.running())).returncode == 0


def test_a_wish_that_comes_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variant that is named is the one that is registered, whatever the environment says by now."""
    before = cpu.running()
    monkeypatch.setenv("DRAFTWOOD_CPU", "x64")
    assert cpu.running() == before
    with pytest.raises(OptionError, match="DRAFTWOOD_CPU is `x64`"):
        cpu.check()


def test_what_runs_is_what_is_mapped() -> None:
    assert cpu.running()
    mapped = {line.rpartition("/")[2].strip() for line in Path("/proc/self/maps").read_text().splitlines()}
    suffix = "" if cpu.running() == "native" else f"-{cpu.running()}"
    assert {name for name in mapped if "ggml-cpu" in name} == {f"libdraftwood-ggml-cpu{suffix}.so"}


def test_no_cpu_module_is_there(gguf: Any, tmp_path: Path) -> None:
    """The libraries load without a CPU backend, and a model is refused in words."""
    for path in native._base_path.iterdir():
        if "ggml-cpu" not in path.name:
            (tmp_path / path.name).symlink_to(path)
    done = load(gguf("dense-plain"), DRAFTWOOD_LIB_PATH=str(tmp_path))
    assert done.returncode == 1
    assert "UnsupportedError: found no CPU backend that can be loaded" in done.stderr
    assert "hint: pip install --force-reinstall" in done.stderr


def test_a_module_that_is_none_is_left_out(gguf: Any, tmp_path: Path) -> None:
    """A backend that cannot be loaded, such as CUDA's without a driver, leaves the CPU in force."""
    for path in native._base_path.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "libdraftwood-ggml-cuda.so").write_bytes(b"no library")
    done = load(gguf("dense-plain"), DRAFTWOOD_LIB_PATH=str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "loaded\n"), done.stderr
    assert "libdraftwood-ggml-cuda.so cannot be loaded" in done.stderr


def test_what_a_better_variant_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    has = set(cpu.NEEDS["haswell"].split()) | {"avx512f", "avx512bw"}
    scores = {"haswell": 64, "sse42": 5, "alderlake": 0, "skylakex": 0, "zen4": 0}
    monkeypatch.setattr(cpu, "running", lambda: "haswell")
    monkeypatch.setattr(cpu, "variants", lambda: scores)
    monkeypatch.setattr(cpu, "_features", lambda: has)
    rest = ["avx512cd", "avx512dq", "avx512vl"]
    assert cpu.why_not_better() == {
        "alderlake": ["avx_vnni"],
        "skylakex": rest,
        "zen4": [*rest, "avx512vbmi", "avx512_vnni", "avx512_bf16"],
    }
    monkeypatch.setattr(cpu, "running", lambda: "native")
    assert cpu.why_not_better() == {}
