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
    "tests/model/test_engine_capi.py",
    "tests/model/test_generate.py",
    "tests/model/test_graphs.py",
)


def runtime(name: str) -> str:
    """Return the path of a sanitizer runtime of the compiler that built the library."""
    found = subprocess.run(
        ["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not Path(found).is_absolute():
        raise SystemExit(f"gcc has no {name}; expected its sanitizer runtime to be installed with it")
    return found


def main() -> int:
    """Run pytest with the instrumented library in place."""
    folder = (ROOT / sys.argv[1]).resolve()
    if not (folder / "libdraftwood-llama.so").exists():
        raise SystemExit(f"{folder} holds no libdraftwood-llama.so\n\nhint: make asan")
    environment = {
        **os.environ,
        "DRAFTWOOD_LIB_PATH": str(folder),
        "LD_PRELOAD": f"{runtime('libasan.so')} {runtime('libstdc++.so')}",
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1:verify_asan_link_order=0",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
    }
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
