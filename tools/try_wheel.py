"""Try an installed draftwood: doctor, text with drafting and without, one answer of `draftwood serve`.

    python tools/try_wheel.py MODEL [--backend CUDA [--own-runtime]]

Runs in the environment to be tried and needs nothing but draftwood there. --backend: doctor must find a
device of this backend, and all layers go there. --own-runtime: CUDA's libraries must be those of this
environment, and no toolkit's. The last line is JSON: text, times, and the files of CUDA and
OpenMP that the process has mapped. tests/compat/test_wheel.py, cibuildwheel (pyproject.toml) and tools/gpu.sh
run it.
"""

from __future__ import annotations

import argparse
import json
import re
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.request
from pathlib import Path
from typing import Any

PROMPT, TOKENS = "The quick brown fox", 24
OF_TOOLKIT = re.compile(r"/lib(?:cudart|cublas|cublasLt)\.so")
RUNTIMES = re.compile(r"/\S*/lib(?:cuda|cudart|cublas|cublasLt|gomp)\b[^/\s]*$")


def command(*arguments: str) -> list[str]:
    script = Path(sysconfig.get_path("scripts"), "draftwood")
    return [str(script.with_suffix(".exe") if sys.platform == "win32" else script), *arguments]


def doctor(backend: str | None) -> list[str]:
    done = subprocess.run(command("doctor", "--json"), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"draftwood doctor: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    devices = json.loads(done.stdout)["library"]["devices"]
    if backend and not any(device["backend"] == backend for device in devices):
        raise SystemExit(f"doctor found no device of {backend}; expected one\n{done.stdout}")
    return [device["name"] for device in devices]


def generated(model: str, layers: int, speculation: str) -> tuple[str, float]:
    from draftwood import Llama

    llama = Llama(model, n_gpu_layers=layers, n_ctx=512, speculation=speculation, verbose=False)
    llama.create_completion(PROMPT, max_tokens=2, temperature=0)  # kernels are loaded at their first use
    start = time.perf_counter()
    answer: Any = llama.create_completion(PROMPT, max_tokens=TOKENS, temperature=0)
    seconds = time.perf_counter() - start
    llama.close()
    return answer["choices"][0]["text"], seconds


def served(model: str, layers: int) -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    flags = ("-ngl", str(layers), "-c", "512", "--port", str(port))
    with subprocess.Popen(command("serve", model, *flags)) as server:
        try:
            wait_for(server, f"http://127.0.0.1:{port}/health")
            body = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
            url = f"http://127.0.0.1:{port}/v1/completions"
            return json.loads(fetch(url, json.dumps(body).encode()))["choices"][0]["text"]
        finally:
            server.terminate()


def wait_for(server: subprocess.Popen[bytes], url: str, seconds: int = 120) -> None:
    end = time.monotonic() + seconds
    while True:
        try:
            fetch(url)
            return
        except OSError as error:  # it does not listen yet, or it loads
            if server.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"draftwood serve does not answer: {error}") from error
            time.sleep(0.2)


def fetch(url: str, body: bytes | None = None) -> bytes:
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return bytes(answer.read())


def mapped() -> list[str]:
    try:
        lines = Path("/proc/self/maps").read_text("utf-8").splitlines()
    except OSError:
        return []  # not Linux
    return sorted({found[0] for found in map(RUNTIMES.search, lines) if found})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--backend")
    parser.add_argument("--own-runtime", action="store_true")
    wishes = parser.parse_args()
    layers = -1 if wishes.backend else 0
    devices = doctor(wishes.backend)
    plain, plain_s = generated(wishes.model, layers, "off")
    drafted, drafted_s = generated(wishes.model, layers, "mtp")
    answer = served(wishes.model, layers)
    same = plain == drafted == answer
    report = {"devices": devices, "text": plain, "same": same, "plain_s": round(plain_s, 3),
              "drafted_s": round(drafted_s, 3), "mapped": mapped()}  # fmt: skip
    print(json.dumps(report))
    strange = [path for path in mapped() if OF_TOOLKIT.search(path) and not path.startswith(sys.prefix)]
    if wishes.own_runtime and strange:
        raise SystemExit(f"found {strange}; expected CUDA's libraries in {sys.prefix}")
    if not plain or not (same or wishes.backend):  # rows of a card's kernels are not exact
        raise SystemExit(f"found {[plain, drafted, answer]}; expected the same text three times")


if __name__ == "__main__":
    main()
