"""The wheel on CPUs that lack what this machine has, as QEMU emulates them: the best variant runs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ops.cpus import features

pytestmark = [pytest.mark.compat, pytest.mark.slow, pytest.mark.timeout(600)]

QEMU = shutil.which("qemu-x86_64")
TINY = Path(__file__).resolve().parents[2] / "models" / "tiny-moe" / "tiny-moe-f16.gguf"
SAY = """
import ctypes, json, sys  # without the package: numpy's wheels need SSE4.2
library = ctypes.CDLL(sys.argv[1])
out = []
for name in ("dw_cpu_variant", "dw_cpu_variants"):
    function = getattr(library, name)
    function.restype = ctypes.c_char_p
    out.append(function().decode())
print(json.dumps(out))
"""
WRITE = """
import sys
from draftwood import Llama
llm = Llama(sys.argv[1], n_ctx=128, n_threads=1, n_threads_batch=1, speculation=sys.argv[2], verbose=False)
print(llm.create_completion("Once upon a time", max_tokens=8, temperature=0)["choices"][0]["text"].encode())
"""


@pytest.fixture(scope="module")
def on(fresh_real) -> Callable[..., subprocess.CompletedProcess[str]]:
    """on("Haswell", code, *args) -> finished process of the installed wheel on such a CPU."""
    if QEMU is None:
        pytest.skip("no qemu-x86_64: apt-get install qemu-user")

    def run(cpu: str, code: str, *args: str) -> subprocess.CompletedProcess[str]:
        python = fresh_real.python.resolve()
        site = [fresh_real.site, fresh_real.dependencies]
        # numpy's OpenBLAS takes instructions that these lack, unless it is told the CPU
        environ = {**os.environ, "PYTHONPATH": ":".join(map(str, site)), "OPENBLAS_CORETYPE": "Nehalem"}
        command = [QEMU, "-cpu", cpu, python, "-c", code, *args]
        return subprocess.run(command, env=environ, capture_output=True, text=True, check=False)

    return run


@pytest.mark.parametrize(
    ("cpu", "variant"), [("qemu64", "x64"), ("Nehalem", "sse42"), ("Haswell", "haswell")]
)
def test_the_best_variant_runs(on, fresh_real, cpu, variant):
    library = fresh_real.site / "draftwood" / "_llama_cpp" / "lib" / "libdraftwood-ggml.so"
    done = on(cpu, SAY, str(library))
    assert done.returncode == 0, done.stderr
    running, scores = json.loads(done.stdout)
    assert running == variant
    assert ":0" in scores, "some variant is too much for such a CPU"


@pytest.mark.parametrize("cpu", ["Nehalem", "Haswell"])
def test_text_is_the_same_with_drafts(on, cpu):
    texts = set()
    for speculation in ("off", "mtp"):
        done = on(cpu, WRITE, str(TINY), speculation)
        assert done.returncode == 0, done.stderr
        texts.add(done.stdout)
    assert len(texts) == 1
    assert len(texts.pop()) > 8


def test_a_source_install_says_what_it_needs(on, tmp_path):
    """Its one variant is for the CPU that built it: elsewhere a model is refused in words."""
    import draftwood._llama_cpp as ours
    from draftwood.load import cpu

    if "avx2" not in features():
        pytest.skip("this CPU has nothing that the emulated one lacks")
    assert list(cpu.variants()) == ["native"]
    folder = Path(ours.__path__[0]) / "lib"
    code = f"import os; os.environ['DRAFTWOOD_LIB_PATH'] = {str(folder)!r}\n{WRITE}"
    done = on("Nehalem", code, str(TINY), "off")
    assert done.returncode == 1, done.stderr
    assert "UnsupportedError: draftwood was compiled for a CPU with" in done.stderr
    assert "AVX2" in done.stderr
    assert "hint: install it from source on this machine" in done.stderr
