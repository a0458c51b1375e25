"""The examples run as they are with the packages from PyPI, and tell the truth about what they did."""

import ast
import contextlib
import json
import re
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.compat.conftest import Environment

pytestmark = [pytest.mark.compat, pytest.mark.slow, pytest.mark.timeout(1800)]

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
TINY = ROOT / "models" / "tiny-moe" / "tiny-moe-f16.gguf"
QUESTION = "What is a lighthouse?"
HELD = r"Tower\(name='.{0,20}', tall=(True|False)\)"


@pytest.fixture(scope="module")
def clients(our_wheel, tmp_path_factory):
    """An environment with the wheel and the clients; no llama-cpp-python is built for it."""
    environment = Environment(tmp_path_factory.mktemp("clients") / "env")
    wheel = f"draftwood[server] @ {our_wheel.as_uri()}"
    environment.pip("install", "--quiet", wheel, "-r", EXAMPLES / "requirements.txt")
    environment.pip("install", "--quiet", "--no-deps", "-r", EXAMPLES / "requirements-no-deps.txt")
    return environment


@pytest.fixture(scope="module")
def beside(clients, real_wheels, tmp_path_factory):
    """The same packages, with llama-cpp-python installed as pip would: pip finds nothing missing."""
    environment = Environment(tmp_path_factory.mktemp("beside") / "env")
    (environment.site / "zz_clients.pth").write_text(f"{clients.site}\n")
    environment.install(real_wheels.stock)
    assert environment.run("report(who())") == "stock"
    environment.pip("check")
    return environment


def run(environment, name, *arguments, model=TINY):
    done = environment.start("-W", "ignore", EXAMPLES / name, model, *arguments)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def line(out, name):
    """What an example printed behind `name`."""
    found = re.search(rf"^{re.escape(name)}: (.*)$", out, re.MULTILINE)
    assert found, out
    return found[1]


def drafts(out):
    """Whether our `Llama` spoke, with its MTP block. "auto" may have found that drafts do not pay: 1.0."""
    return float(re.fullmatch(r"mtp, (.*) tokens a round", line(out, "drafter"))[1]) >= 1.0


def test_every_example_is_tested():
    tested = Path(__file__).read_text("utf-8")
    for path in EXAMPLES.glob("*.py"):
        assert path.name == "serving.py" or f'"{path.name}"' in tested, path.name


def test_langchain_chat(clients):
    out = run(clients, "langchain_chat.py", QUESTION)
    said = out.partition("invoke: ")[2].partition("\nstream: ")
    assert said[0]
    assert said[2].partition("\ntool: ")[0] == said[0], "streamed and whole are the same"
    assert "('weather', {'place': " in line(out, "tool")
    assert drafts(out)


def test_langchain_completion(clients):
    out = run(clients, "langchain_completion.py", "def fibonacci(n):")
    assert line(out, "stream").endswith("pieces, the same text")
    assert drafts(out)


def test_langchain_embeddings(clients):
    out = run(clients, "langchain_embeddings.py", "a house", "a house", "tax")
    same, other = (float(row.split()[0]) for row in out.splitlines()[:2])
    assert same == pytest.approx(1.0, abs=1e-3)
    assert other < same
    assert "embedding=True contexts generate no text" in out


@pytest.mark.parametrize("name", ["langchain_completion.py", "langchain_server.py"])
def test_langchain_has_no_newer_way_to_say_it(clients, name):
    """No class that the examples use is deprecated, only langchain-community as a whole."""
    whole = "ignore:`langchain-community` is being sunset:DeprecationWarning"
    options = ("-W", "ignore", "-W", "error::DeprecationWarning:__main__", "-W", whole)
    done = clients.start(*options, EXAMPLES / name, TINY, QUESTION)
    assert done.returncode == 0, done.stderr[-3000:]


def test_instructor(clients):
    out = run(clients, "instructor_class.py", QUESTION)
    assert re.fullmatch(HELD, line(out, "JSON_SCHEMA"))
    assert re.fullmatch(HELD, line(out, "TOOLS"))
    assert drafts(out)


def test_outlines(clients):
    out = run(clients, "outlines_class.py", QUESTION)
    assert line(out, "choice") in ("yes", "no")
    assert re.fullmatch(r"[0-9]{3} m", line(out, "pattern"))
    assert re.fullmatch(HELD, line(out, "class"))
    assert drafts(out)


def test_guidance(clients):
    out = run(clients, "guidance_program.py", QUESTION)
    assert line(out, "choice") in ("tall", "small")
    assert json.loads(line(out, "text"))
    assert re.fullmatch("[0-9]{2,3}", line(out, "pattern"))
    assert line(out, "again") == "the same text"
    assert int(re.match("[0-9]+", line(out, "went back"))[0]) > 0


@pytest.mark.parametrize(
    "settings", [{}, {"speculation": "off", "exact": False}], ids=["engine", "upstream's loop"]
)
def test_guidance_programs_one_after_another(clients, settings):
    """A model that has run others gives what a fresh one gives; each program goes back to where it parts."""
    shared, fresh = clients.run(
        f"""
        import draftwood
        draftwood.install()
        from guidance import gen, models, select

        def model():
            return models.LlamaCpp({str(TINY)!r}, echo=False, n_ctx=1024, **{settings!r})

        def replies(model_of):
            for head in ("def fibonacci(n):", "def fibonacci(m):", "import os", "def fibonacci(n):"):
                way = model_of() + head + gen("a", max_tokens=12, temperature=0.0)
                way += select(["yes", "no", "yesterday"], name="b")
                way += gen("c", regex="[a-z]+", max_tokens=9, temperature=0.0)
                yield [way["a"], way["b"], way["c"]]

        one = model()
        report(list(replies(lambda: one)), list(replies(model)))
        """,
        "-W",
        "ignore",
    )
    assert shared == fresh
    assert shared[0] == shared[3] != shared[1]


@pytest.mark.parametrize("installed", ["clients", "beside"])
def test_llama_index(installed, request):
    out = run(request.getfixturevalue(installed), "llamaindex_chat.py", QUESTION)
    assert json.loads(line(out, "complete"))
    assert line(out, "stream") == "the same text"
    assert json.loads(line(out, "chat"))
    assert drafts(out), "llama-cpp-python drafts nothing"


@pytest.mark.parametrize("installed", ["clients", "beside"])
def test_haystack(installed, request):
    out = run(request.getfixturevalue(installed), "haystack_chat.py", QUESTION)
    assert json.loads(line(out, "whole"))
    assert line(out, "stream").endswith("pieces, the same text")
    assert re.fullmatch(r"\[\('weather', \{'place': .*\}\)\]", line(out, "tool"))
    assert drafts(out), "llama-cpp-python drafts nothing"


def test_openai_client_at_llama_server(clients):
    out = run(clients, "openai_client.py", QUESTION)
    _check_openai(out)
    # tiny-moe's chat template knows no tools: tests/server/test_tools.py has calls
    assert line(out, "tool") == "none; does the model's chat template know tools?"
    assert line(out, "responses") == "the same text"


def test_openai_client_at_the_python_server(clients):
    with python_server(clients) as address:
        out = run(clients, "openai_client.py", QUESTION, model=address)
    _check_openai(out)
    assert re.fullmatch(r"\[\('weather', \{'place': .*\}\)\]", line(out, "tool"))
    assert line(out, "responses") == "not served here"


def _check_openai(out):
    assert json.loads(line(out, "whole"))
    assert line(out, "stream") == "the same text, length"
    assert len({text for text in json.loads(line(out, "n=2")) if text}) == 2
    rows = ast.literal_eval(line(out, "logprobs"))
    assert len(rows) == 8
    assert all(0.0 < probability <= 1.0 for _, probability, _ in rows)
    assert [alternatives for _, _, alternatives in rows] == [2] * 8
    schema = ast.literal_eval(line(out, "schema"))
    assert isinstance(schema["name"], str)
    assert isinstance(schema["tall"], bool)


def test_langchain_openai_at_llama_server(clients):
    _check_langchain_openai(run(clients, "langchain_server.py", QUESTION))


def test_langchain_openai_at_the_python_server(clients):
    with python_server(clients) as address:
        _check_langchain_openai(run(clients, "langchain_server.py", QUESTION, model=address))


def _check_langchain_openai(out):
    assert json.loads(line(out, "invoke"))
    assert line(out, "stream") == "the same text"
    assert line(out, "batch") == "3 replies, 2 texts"
    assert re.fullmatch(HELD, line(out, "class"))


def test_an_example_whose_server_does_not_start_says_why(clients, tmp_path):
    missing = tmp_path / "none.gguf"
    done = clients.start("-W", "ignore", EXAMPLES / "openai_client.py", missing, QUESTION)
    assert done.returncode == 1
    assert str(missing) in done.stderr
    assert "Traceback" not in done.stderr


@contextlib.contextmanager
def python_server(environment) -> Iterator[str]:
    """The OpenAI address of `python -m llama_cpp.server`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [environment.python, "-m", "llama_cpp.server", "--model", TINY, "--n_ctx", "2048"]
    log = environment.root / "server.log"
    with (
        log.open("w") as output,
        subprocess.Popen([*command, "--port", str(port)], stdout=output, stderr=output) as server,
    ):
        try:
            address = f"http://127.0.0.1:{port}/v1"
            while True:  # the test's time limit ends it
                assert server.poll() is None, log.read_text()
                with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/models") as answer:
                    assert answer.status == 200
                    break
                time.sleep(0.1)
            yield address
        finally:
            server.terminate()


def test_a_chat_model_with_langchains_own_defaults(clients):
    """rope_freq_base=10000.0 and n_batch=8 are corrected with one warning; tool calls and thoughts arrive."""
    text, plain, warned = clients.run(
        f"""
        import warnings
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            from langchain_community.chat_models import ChatLlamaCpp
            chat = ChatLlamaCpp(model_path={str(TINY)!r}, max_tokens=24, temperature=0.0, verbose=False)
        warned = [str(one.message) for one in seen if "LangChain passes" in str(one.message)]
        right = ChatLlamaCpp(model_path={str(TINY)!r}, max_tokens=24, temperature=0.0, verbose=False,
                             rope_freq_base=0.0, rope_freq_scale=0.0, n_batch=512)
        report(chat.invoke("hello").content, right.invoke("hello").content, warned)
        """,
        "-W",
        "ignore",
    )
    assert text == plain
    assert len(warned) == 1


@pytest.mark.parametrize("streaming", [True, False])
def test_batches_of_a_chat_model(clients, streaming):
    """LangChain runs them in threads, and streams where nobody says otherwise."""
    single, batch, abatch = clients.run(
        f"""
        import asyncio
        from langchain_community.chat_models import ChatLlamaCpp
        chat = ChatLlamaCpp(model_path={str(TINY)!r}, max_tokens=24, temperature=0.0, verbose=False,
                            rope_freq_base=0.0, n_batch=512, streaming={streaming})
        asked = ["hello", "What is a lighthouse?", "def f(", "1 2 3", "import os"]
        report([chat.invoke(each).content for each in asked],
               [each.content for each in chat.batch(asked)],
               [each.content for each in asyncio.run(chat.abatch(asked))])
        """,
        "-W",
        "ignore",
    )
    assert single == batch == abatch
