"""`draftwood tree` on the trained tiny model: the paths that it draws are the text of plain decoding."""

from __future__ import annotations

import json
import re
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
from click.testing import CliRunner
from draftwood import Llama
from draftwood.cli import cli

TRAINED = Path(__file__).resolve().parents[2] / "models" / "tiny-moe"
MODEL, DRAFTER = str(TRAINED / "tiny-moe-f16.gguf"), str(TRAINED / "dflash-f16.gguf")
PROMPT = "def fibonacci(n):\n"
ROUNDS = 4


def tree(*arguments: str, prompt: str = PROMPT) -> Any:
    return CliRunner().invoke(cli, ["tree", MODEL, prompt, "--raw", "--threads", "1", *arguments])


def plain(n: int, temp: float) -> tuple[list[int], str]:
    """Return n tokens of plain decoding and their text."""
    llm = Llama(MODEL, speculation="off", n_ctx=4096, n_threads=1, n_threads_batch=1, verbose=False)
    llm.set_seed(7)
    ids = list(islice(llm.generate(llm.tokenize(PROMPT.encode(), special=True), temp=temp), n))
    text = llm.detokenize(ids).decode("utf-8", "ignore")
    llm.close()
    return ids, text


def emitted(found: dict[str, Any]) -> list[int]:
    """Return what the drawn paths spell, and check that each starts where the one before it ended."""
    ids = [found["rounds"][0]["nodes"][0]["token"]]
    for each in found["rounds"]:
        assert each["nodes"][0]["token"] == ids[-1]
        node = 0
        for i, child in enumerate(each["nodes"]):
            if child["accepted"]:
                assert child["parent"] == node
                ids.append(child["token"])
                node = i
        ids.append(each["bonus"]["token"])
    return ids


@pytest.mark.parametrize("temp", [0.0, 0.8])
@pytest.mark.parametrize(
    "drafting",
    [
        ["--tree-budget", "12"],
        ["--drafter", DRAFTER],
        ["--speculation", "mtp"],
        ["--speculation", "ngram"],
    ],
    ids=["mtp trees", "dflash trees", "mtp chains", "ngram"],
)
def test_accepted_paths_are_the_text_of_plain_decoding(drafting, temp):
    result = tree(*drafting, "--rounds", str(ROUNDS), "--temp", str(temp), "--seed", "7", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert len(found["rounds"]) == ROUNDS
    ids = emitted(found)
    assert (ids, found["text"]) == plain(len(ids), temp)
    for each in found["rounds"]:
        assert each["rows"] >= len(each["nodes"]) == each["drafted"] + 1
        assert each["accepted"] == sum(node["accepted"] for node in each["nodes"])
        assert each["emitted"][-1] == each["bonus"]["token"]
    if {"--tree-budget", "--drafter"} & set(drafting):
        parents = [[node["parent"] for node in each["nodes"]] for each in found["rounds"]]
        assert any(len(set(some)) < len(some) for some in parents), "no draft branched"
        assert all(len(each["nodes"]) <= 16 for each in found["rounds"])


def test_what_is_drawn_says_what_json_does():
    settings = ["--rounds", "2", "--tree-budget", "8"]
    found = json.loads(tree(*settings, "--json").stdout)
    result = tree(*settings)
    assert (result.exit_code, result.stderr) == (0, "")
    blocks = result.stdout.strip().split("\n\n")
    assert len(blocks) == 2
    for block, each in zip(blocks, found["rounds"], strict=True):
        *drawn, line = block.splitlines()
        assert len(drawn) == len(each["nodes"]) + 1  # and the bonus token
        assert sum(shown.endswith("  accepted") for shown in drawn) == each["accepted"]
        assert sum(shown.endswith("  bonus") for shown in drawn) == 1
        assert f"{each['drafted']} drafted, {each['accepted']} accepted: " in line
        assert line.endswith(f"plain decoding needs {len(each['emitted'])}")


def test_a_prompt_is_continued_as_it_stands_unless_asked():
    def prompt(*arguments: str) -> dict[str, Any]:
        return json.loads(CliRunner().invoke(cli, ["tree", MODEL, PROMPT, "--json", *arguments]).stdout)

    assert prompt() == {**prompt("--raw"), "seed": ANY}
    assert (prompt()["chat"], prompt("--chat")["chat"]) == (False, True)


def test_the_context_ends_the_rounds():
    longer = PROMPT + "    n = n + 1\n" * 24
    settings = ["--rounds", "100", "--n-ctx", "256"]
    found = json.loads(tree(*settings, "--json", prompt=longer).stdout)
    assert found["prompt_tokens"] < 256
    assert found["prompt_tokens"] + len(emitted(found)) == 256 + 1  # the newest is not evaluated
    result = tree(*settings, prompt=longer)
    assert result.exit_code == 0
    assert result.stderr.endswith(f"the text ends after {len(found['rounds'])} of 100 rounds\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--n-ctx", "999999999"], "--n-ctx is 999999999, for which llama.cpp sets aside"),
        (["--rpc", "here"], "--rpc is 'here'; expected host:port"),
        (["--drafter", "no-such-file.gguf"], "no-such-file.gguf"),
        (["--drafter", DRAFTER, "--speculation", "mtp"], "found a --drafter beside --speculation mtp"),
        (["--speculation", "dflash"], "found --speculation dflash without a drafter"),
    ],
)
def test_errors_are_one_message_with_a_hint(arguments, words):
    result = tree(*arguments)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("Error: ")
    assert words in result.stderr
    assert "\n\nhint: " in result.stderr
    assert not re.search(r"hint: .*\w=", result.stderr)


def test_hints_name_what_tree_can_do(gguf):
    for preset, words in (("moe-plain", "--drafter FILE, if there is"), ("dense-plain", "--drafter FILE")):
        result = CliRunner().invoke(cli, ["tree", gguf(preset), "a", "--raw"])
        assert result.exit_code == 1
        hint = result.stderr.partition("hint: ")[2]
        assert hint.startswith(words)
        assert hint.endswith("; --speculation ngram drafts with any model\n")


def test_drafts_end_where_they_get_improbable():
    def drafted(*arguments: str) -> list[float]:
        found = json.loads(tree("--rounds", str(ROUNDS), "--json", *arguments).stdout)
        return [node["probability"] for each in found["rounds"] for node in each["nodes"][1:]]

    assert min(drafted()) < 0.5
    assert min(drafted("--draft-p-min", "0.5")) >= 0.5
