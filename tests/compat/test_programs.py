"""Programs written for llama-cpp-python run unchanged: its own server, LangChain."""

import contextlib
import json
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from synth_gguf import PRESETS, write

pytestmark = [pytest.mark.compat, pytest.mark.slow, pytest.mark.timeout(1800)]

LANGCHAIN = "langchain-community==0.4.2"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model") / "moe.gguf"
    write(PRESETS["moe-mtp"], path)
    return path


def test_the_server_module_serves_completions_with_our_class(environment, real_wheels, model):
    environment.pip("install", "--quiet", f"draftwood[server] @ {real_wheels.draftwood.as_uri()}")
    environment.pip("check")
    assert environment.run("""
        import warnings
        warnings.simplefilter("default")  # of the server's packages
        import draftwood
        from llama_cpp.server import model
        report(model.llama_cpp.Llama is draftwood.Llama)
    """)
    with _serving(environment, model) as (address, process):
        assert "/libdraftwood-ggml.so" in Path(f"/proc/{process}/maps").read_text()
        answer = _ask(f"{address}/v1/completions", {"prompt": "a b c", "max_tokens": 8, "temperature": 0})
        assert answer["usage"]["completion_tokens"] > 0


@pytest.mark.parametrize("stock", [False, True])
def test_langchain_gets_our_class(environment, real_wheels, model, stock):
    environment.install(real_wheels.draftwood)
    environment.pip("install", "--quiet", LANGCHAIN)
    if stock:
        environment.install(real_wheels.stock)
    install = "draftwood.install()" if stock else ""
    text, ours, speculation = environment.run(f"""
        import warnings
        warnings.simplefilter("ignore")  # LangChain's own
        import draftwood
        {install}
        from langchain_community.llms import LlamaCpp
        llm = LlamaCpp(model_path={str(model)!r}, max_tokens=8, temperature=0.0, n_ctx=256, verbose=False,
                       model_kwargs={{"speculation": "mtp", "draft_tokens": 3}})
        report(llm.invoke("a b c"), type(llm.client) is draftwood.Llama, llm.client.speculation)
    """)
    assert text
    assert ours
    assert speculation == "mtp"


@contextlib.contextmanager
def _serving(environment, model: Path) -> Iterator[tuple[str, int]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ["--model", model, "--n_ctx", "256", "--port", str(port)]
    command = [environment.python, "-m", "llama_cpp.server", *options]
    log = environment.root / "server.log"
    with log.open("w") as output, subprocess.Popen(command, stdout=output, stderr=output) as server:
        try:
            address = f"http://127.0.0.1:{port}"
            while True:  # the test's time limit ends it
                assert server.poll() is None, log.read_text()
                with contextlib.suppress(OSError):
                    _ask(f"{address}/v1/models")
                    break
                time.sleep(0.25)
            yield address, server.pid
        finally:
            server.terminate()


def _ask(address: str, body: dict | None = None) -> dict:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=240) as answer:
        return json.load(answer)
