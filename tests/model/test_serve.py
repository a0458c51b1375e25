"""`draftwood serve`: the same replies with drafting on and off, and what is at `/`."""

from __future__ import annotations

import math
import subprocess
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.model.processes import ask, ready, serving

ROOT = Path(__file__).resolve().parents[2]
MODEL = str(ROOT / "models" / "tiny-moe" / "tiny-moe-f16.gguf")
BODY = {"messages": [{"role": "user", "content": "def main"}], "max_tokens": 24, "temperature": 0}
ROWS = {"logprobs": True, "top_logprobs": 3}


def reply(*arguments: str) -> dict[str, Any]:
    with serving(*arguments, stderr=subprocess.DEVNULL) as (address, process):
        ready(address, process)
        return ask(f"{address}/v1/chat/completions", {**BODY, **ROWS})


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    return reply(MODEL, "--speculation", "off")


def rows_of(found: dict[str, Any]) -> list[tuple[str, float, list[tuple[str, float]]]]:
    content = found["choices"][0]["logprobs"]["content"]
    tops = [[(top["token"], top["logprob"]) for top in row["top_logprobs"]] for row in content]
    return [(row["token"], row["logprob"], top) for row, top in zip(content, tops, strict=True)]


def test_logprobs_without_drafting(plain):
    rows = rows_of(plain)
    assert len(rows) == BODY["max_tokens"]
    for token, logprob, top in rows:
        assert -20 < logprob < 0
        assert top[0] == (token, logprob)
        assert len(top) == 3
        assert sum(math.exp(each) for _, each in top) <= 1 + 1e-6


def test_logprobs_with_drafting_are_those_without(plain):
    found = reply(MODEL, "--speculation", "mtp")
    assert found["timings"]["draft_n_accepted"] > 0
    rows = rows_of(found)
    assert [token for token, _, _ in rows] == [token for token, _, _ in rows_of(plain)]
    for (_, logprob, top), (_, expected, expected_top) in zip(rows, rows_of(plain), strict=True):
        assert logprob == pytest.approx(expected, abs=1e-3)
        assert [token for token, _ in top] == [token for token, _ in expected_top]
        assert [each for _, each in top] == pytest.approx([each for _, each in expected_top], abs=1e-3)


def status(url: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(url, timeout=120) as found:
            return found.status, found.read()
    except urllib.error.HTTPError as error:
        return error.code, b""


@pytest.mark.parametrize(
    ("flags", "page", "other"),
    [
        ([], 200, 404),
        (["--api-key", "k"], 200, 401),
        (["--no-ui"], 404, 404),
        (["--no_webui"], 404, 404),
        (["--path", str(ROOT / "docs")], 404, 200),
    ],
)
def test_the_page_is_there_unless_another_or_none_is_chosen(flags, page, other):
    with serving(MODEL, *flags, stderr=subprocess.DEVNULL) as (address, process):
        ready(address, process)
        found, text = status(f"{address}/")
        assert (found, status(f"{address}/cli.md")[0]) == (page, other)
    assert (text == (ROOT / "python" / "draftwood" / "web" / "index.html").read_bytes()) == (page == 200)
