"""Run the engine's tests on a library built with sanitizers: python tests/run_asan.py build/cpu-asan/bin

The interpreter is not instrumented, so the runtime is preloaded; leaks are not reported, since CPython's own
would drown ours (leaks of ours are counted in tests/model/test_bad_input.py). A report ends the run.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = (
    "tests/ops",
    "tests/model/test_build_info.py",
    "tests/model/engine",
    "tests/model/generate",
    "tests/model/test_graphs.py",
)


# What must hold before a green run means anything: ours are the libraries of that folder, linked with the
# sanitizers (only they bring libubsan into the process), and a report ends the process.
LOADED = """
import sys
from draftwood._llama_cpp import llama_cpp
files = {line.split()[-1] for line in open("/proc/self/maps")}
ours = {file for file in files if "/libdraftwood-" in file}
assert ours and {file.rpartition("/")[0] for file in ours} == {sys.argv[1]}, ours
assert any("/libubsan" in file for file in files), "the libraries are not instrumented"
"""
OVERFLOW = """
import ctypes
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
ctypes.memset(libc.malloc(ctypes.c_size_t(8)), 0, 9)
"""


def runtime(name: str) -> str:
    """Return the path of a sanitizer runtime of the compiler that built the library."""
    found = subprocess.run(
        ["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not Path(found).is_absolute():
        raise SystemExit(f"gcc has no {name}; expected its sanitizer runtime to be installed with it")
    return found


def check(folder: Path, environment: dict[str, str]) -> None:
    """Stop if the sanitizers would not see our libraries, or not say so, or if our asserts are left out."""
    if b"state_ == round_state::proposed" not in (folder / "libdraftwood-llama.so").read_bytes():
        raise SystemExit("the library is built without its asserts; expected -UNDEBUG for src/")
    for code, expected in ((LOADED, ""), (OVERFLOW, "heap-buffer-overflow")):
        command = [sys.executable, "-c", code, str(folder)]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        if (done.returncode != 0) != bool(expected) or expected not in done.stderr:
            raise SystemExit(f"the sanitizers are not in force: exit {done.returncode}\n{done.stderr}")


def main() -> int:
    """Run pytest with the instrumented library in place."""
    folder = (ROOT / sys.argv[1]).resolve()
    if not (folder / "libdraftwood-llama.so").exists():
        raise SystemExit(f"{folder} holds no libdraftwood-llama.so\n\nhint: make asan")
    environment = {
        **os.environ,
        "DRAFTWOOD_LIB_PATH": str(folder),
        "LD_PRELOAD": f"{runtime('libasan.so')} {runtime('libstdc++.so')}",
        # what malloc returns is filled: a flag or a pointer that nobody set is wrong each time
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1:verify_asan_link_order=0"
        ":max_malloc_fill_size=65536:malloc_fill_byte=2",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
    }
    check(folder, environment)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "not slow and not gpu",
        "--timeout",
        "1200",
        *TESTS,
    ]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
