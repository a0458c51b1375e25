"""llama-server as a process on loopback, and requests to it. Must not know: any test."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import Any

import requests
from draftwood.cli.serve import program

from tests.ports import free_port

MODELS = Path(__file__).resolve().parents[2] / "models" / "tiny-moe"
MODEL = str(MODELS / "tiny-moe-f16.gguf")
DRAFTER = str(MODELS / "dflash-f16.gguf")


class Server:
    """One llama-server; `flags` follow the model, `prefix` starts it."""

    def __init__(self, log: Path, *flags: str, model: str = MODEL, prefix: tuple[str, ...] = ()) -> None:
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        self.log = log
        self.spec_type = flags[flags.index("--spec-type") + 1] if "--spec-type" in flags else "none"
        command = [str(program("llama-server")), "-m", model, "--port", str(port), "-t", "1", "--no-warmup"]
        environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [*prefix, *command, *flags], stdout=out, stderr=subprocess.STDOUT, env=environment
            )

    def words(self) -> str:
        return self.log.read_text("utf-8", "replace")

    def wait(self, seconds: float = 180) -> Server:
        """Return when it is ready. Errors: RuntimeError with its log if it ends or takes longer."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.process.poll() is None:
            try:
                if requests.get(f"{self.url}/health", timeout=30).ok:
                    return self
            except (requests.ConnectionError, requests.Timeout):
                pass
            time.sleep(0.05)
        raise RuntimeError(self.words())

    def get(self, path: str) -> Any:
        reply = requests.get(self.url + path, timeout=180)
        reply.raise_for_status()
        return reply.json() if "json" in reply.headers["content-type"] else reply.text

    def post(self, path: str, body: dict[str, Any]) -> Any:
        reply = requests.post(self.url + path, json=body, timeout=240)
        assert reply.ok, reply.text
        return reply.json()

    def complete(self, prompt: Any, **body: Any) -> Any:
        """Return what /completion gives; greedy unless told otherwise."""
        return self.post("/completion", {"prompt": prompt, "n_predict": 32, "temperature": 0, **body})

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
