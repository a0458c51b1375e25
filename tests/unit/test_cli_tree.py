"""`draftwood tree` without a model: usage, what is drawn of a round, its JSON."""

from __future__ import annotations

import io
import math

import pytest
from click.testing import CliRunner
from draftwood.cli import cli
from draftwood.cli.session import Round
from draftwood.cli.tree import as_dict, drawing, escaped, summary
from draftwood.engine.tree import Tree
from rich.console import Console

VOCABULARY = {1: b"def", 2: b" main", 3: b" run", 4: b"\n", 5: b"\xe2\x82", 6: b"()", 7: b"\xc3\xa4"}
# 0 def: 1 ' main' (3 '()'), 2 ' run' (4 '()': 5 '\n')
BRANCHED = Tree((1, 2, 3, 6, 6, 4), (-1, 0, 0, 1, 2, 4), (0.0, *map(math.log, (0.6, 0.25, 0.3, 0.2, 0.012))))


def drawn(round_: Round, **settings: bool) -> str:
    console = Console(width=80, file=io.StringIO(), legacy_windows=False)
    console.print(drawing(round_, VOCABULARY.__getitem__, **settings))
    return console.file.getvalue()


@pytest.mark.parametrize(
    "arguments",
    [
        ["m.gguf", "hi", "--rounds", "0"],
        ["m.gguf", "hi", "--tree-budget", "0"],
        ["m.gguf", "hi", "--tree-budget", "65"],
        ["m.gguf", "hi", "--draft-tokens", "64"],
        ["m.gguf", "hi", "--speculation", "auto"],
        ["m.gguf", "hi", "--speculation", "off"],
        ["m.gguf", "hi", "--temp", "-1"],
        ["m.gguf", "hi", "--file", __file__],
        ["m.gguf"],  # stdin is empty
        [],
    ],
)
def test_wrong_usage_exits_with_2(arguments):
    result = CliRunner().invoke(cli, ["tree", *arguments])
    assert result.exit_code == 2, result.output
    assert "Error: " in result.stderr


@pytest.mark.parametrize(
    ("piece", "shown"),
    [
        (b" a", "' a'"),
        (b"a\n\x1b[31m", "'a\\n\\x1b[31m'"),
        ("ä→".encode(), "'ä→'"),
        ("\u202e".encode(), "'\\u202e'"),  # would turn the line round
        (b"\xe2\x82", "b'\\xe2\\x82'"),
        (b"", "''"),
    ],
)
def test_a_token_is_one_printable_word(piece, shown):
    assert escaped(piece) == shown
    assert escaped(piece, only_ascii=True).isascii()


def test_accepted_nodes_lie_on_the_path_of_the_samples():
    assert drawn(Round(BRANCHED, 8, [3, 6, 4, 2])).splitlines() == [
        "'def'",
        "├── ' main'  0.6",
        "│   └── '()'  0.3",
        "└── ' run'  0.25  accepted",
        "    └── '()'  0.2  accepted",
        "        └── '\\n'  0.012  accepted",
        "            └── ' main'  bonus",
    ]


def test_a_bonus_token_follows_where_no_node_had_it():
    lines = drawn(Round(BRANCHED, 8, [7])).splitlines()
    assert lines[-1] == "└── 'ä'  bonus"
    assert "accepted" not in "".join(lines)
    lines = drawn(Round(BRANCHED, 8, [3, 7]), only_ascii=True).splitlines()
    assert lines[-1] == r"    └── '\xe4'  bonus"


def test_a_text_that_ends_in_a_node_has_no_bonus():
    ended = Round(BRANCHED, 8, [3, 6])
    assert (ended.accepted, ended.bonus) == ([2, 4], None)
    assert "bonus" not in drawn(ended)
    assert summary(ended).startswith("8 rows (2 padding), 5 drafted, 2 accepted: 2 tokens in 1 step")


def test_probabilities_are_left_out_where_the_drafter_gave_none():
    chain = Tree((1, 2, 6), (-1, 0, 1), (0.0, 0.0, 0.0))
    assert drawn(Round(chain, 3, [2, 4])).splitlines() == [
        "'def'",
        "└── ' main'  accepted",
        "    ├── '()'",
        "    └── '\\n'  bonus",
    ]


def test_a_round_without_a_draft_is_a_plain_step():
    plain = Round(Tree((1,), (-1,), (0.0,)), 1, [2])
    assert drawn(plain).splitlines() == ["'def'", "└── ' main'  bonus"]
    assert summary(plain) == (
        "1 row, 0 drafted, 0 accepted: 1 token in 1 step of the model, plain decoding needs 1"
    )


def test_colours_stand_beside_the_words():
    console = Console(width=80, file=io.StringIO(), force_terminal=True, color_system="standard")
    console.print(drawing(Round(BRANCHED, 8, [3, 7]), VOCABULARY.__getitem__))
    text = console.file.getvalue()
    assert "\x1b[32m' run'  0.25  accepted" in text
    assert "\x1b[1;33m'ä'  bonus" in text


def test_json_of_a_round():
    found = as_dict(Round(BRANCHED, 8, [3, 6, 5]), VOCABULARY.__getitem__)
    assert found.keys() == {"rows", "drafted", "accepted", "nodes", "bonus", "emitted"}
    assert (found["rows"], found["drafted"], found["accepted"], found["emitted"]) == (8, 5, 2, [3, 6, 5])
    assert found["bonus"] == {"token": 5, "text": "\\xe2\\x82"}
    assert [node["parent"] for node in found["nodes"]] == list(BRANCHED.parents)
    assert [node["depth"] for node in found["nodes"]] == [0, 1, 1, 2, 2, 3]
    assert [i for i, node in enumerate(found["nodes"]) if node["accepted"]] == [2, 4]
    assert found["nodes"][0]["probability"] is None
    assert found["nodes"][2] == {
        "token": 3, "text": " run", "parent": 0, "depth": 1,
        "probability": pytest.approx(0.25), "accepted": True,
    }  # fmt: skip
