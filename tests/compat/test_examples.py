"""The examples run as they are with langchain-community from PyPI, and tell the truth about what they did."""

import os
from pathlib import Path

import pytest

from tests.compat.conftest import Environment

pytestmark = [pytest.mark.compat, pytest.mark.slow, pytest.mark.timeout(1800)]

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "models" / "tiny-moe" / "tiny-moe-f16.gguf"
LANGCHAIN = "langchain-community==0.4.2"


@pytest.fixture(scope="module")
def langchain(tmp_path_factory):
    """An environment with the wheel and LangChain; no llama-cpp-python is built for it."""
    named = os.environ.get("DRAFTWOOD_WHEEL")
    found = [Path(named)] if named else sorted((ROOT / "build" / "dist").glob("draftwood-*.whl"))
    assert found, "found no wheel in DRAFTWOOD_WHEEL or build/dist; run `make wheel` first"
    environment = Environment(tmp_path_factory.mktemp("langchain") / "env")
    environment.install(found[-1])
    environment.pip("install", "--quiet", LANGCHAIN)
    return environment


def run(environment, name, *arguments):
    done = environment.start("-W", "ignore", ROOT / "examples" / name, TINY, *arguments)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_every_example_is_tested():
    found = {path.name for path in (ROOT / "examples").glob("*.py")}
    assert found == {"langchain_chat.py", "langchain_completion.py", "langchain_embeddings.py"}


def test_chat(langchain):
    out = run(langchain, "langchain_chat.py", "What is a lighthouse?")
    said = out.partition("invoke: ")[2].partition("\nstream: ")
    assert said[0]
    assert said[2].partition("\ntool: ")[0] == said[0], "streamed and whole are the same"
    assert "('weather', {'place': " in out
    assert "drafter: mtp, " in out


def test_completion(langchain):
    out = run(langchain, "langchain_completion.py", "def fibonacci(n):")
    assert "pieces, the same text" in out
    rate = float(out.partition("drafter: mtp, ")[2].partition(" tokens a round")[0])
    assert rate > 1.0


def test_embeddings(langchain):
    out = run(langchain, "langchain_embeddings.py", "a house", "a house", "tax")
    same, other = (float(line.split()[0]) for line in out.splitlines()[:2])
    assert same == pytest.approx(1.0, abs=1e-3)
    assert other < same
    assert "embedding=True contexts generate no text" in out


def test_a_chat_model_with_langchains_own_defaults(langchain):
    """rope_freq_base=10000.0 and n_batch=8 are corrected with one warning; tool calls and thoughts arrive."""
    text, plain, warned = langchain.run(
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
def test_batches_of_a_chat_model(langchain, streaming):
    """LangChain runs them in threads, and streams where nobody says otherwise."""
    single, batch, abatch = langchain.run(
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
