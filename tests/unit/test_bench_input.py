"""draftwood bench's refusals, without a model: prompts, modes, claims, options, files."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest
from click.testing import CliRunner
from draftwood.bench.claims import Claim
from draftwood.bench.modes import MODES, STOCK, choose
from draftwood.bench.prompts import OWN, Prompt, encode, read
from draftwood.bench.run import check_claims
from draftwood.cli import cli
from draftwood.errors import OptionError, UnsupportedError
from draftwood.options import SPECULATIONS

# ---- prompts ----


def test_the_built_in_set():
    texts = read([])
    assert set(texts) == {"prose", "code", "json"}
    for some in texts.values():
        assert len(set(some)) == len(some) >= 4
        assert all(len(text) > 200 for text in some)


def test_files_folders_and_their_order(tmp_path):
    (tmp_path / "b.jsonl").write_text('{"text": "one"}\n\n{"text": "two", "more": 1}\n')
    (tmp_path / "a.jsonl").write_text('{"text": "drei \u2028 ö"}')  # no line break for JSON
    assert read([tmp_path]) == {"a": ["drei \u2028 ö"], "b": ["one", "two"]}
    assert list(read([tmp_path / "b.jsonl", tmp_path / "a.jsonl"])) == ["b", "a"]


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ("", "found no prompts in .*p.jsonl; expected at least one line"),
        ("\n \n", "found no prompts"),
        ('{"text": "a"}\nnot json\n', "p.jsonl, line 2 is no JSON"),
        ('{"prompt": "a"}', 'line 1 has no "text"; expected an object'),
        ('{"text": ""}', 'line 1 has no "text"'),
        ('{"text": 3}', 'line 1 has no "text"'),
        ('["text"]', 'line 1 has no "text"'),
        (b"\xff\xfe", "p.jsonl cannot be read: "),
    ],
)
def test_prompt_files_that_are_none(tmp_path, content, found):
    path = tmp_path / "p.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(OptionError, match=found) as raised:
        read([path])
    assert 'a line is {"text": "..."}' in raised.value.hint


def test_prompt_paths_that_are_none(tmp_path):
    with pytest.raises(OptionError, match=r"found no .*nowhere; expected a file of prompts"):
        read([tmp_path / "nowhere"])
    with pytest.raises(OptionError, match=r"found no \*.jsonl in "):
        read([tmp_path])
    with pytest.raises(OptionError, match="found two files for the category 'code'"):
        read([OWN, OWN / "code.jsonl"])


def test_prompts_are_cut_and_long_ones_go_first():
    asked: list[bytes] = []

    def tokenize(text: bytes) -> list[int]:
        asked.append(text)
        return list(text)

    texts = {"a": ["xy", "abcd", "z", "efgh", "never"], "b": ["q", "rs"]}
    assert encode(texts, tokenize, 2, 3) == [
        Prompt("a", [97, 98, 99]), Prompt("a", [101, 102, 103]), Prompt("b", [113]), Prompt("b", [114, 115])
    ]  # fmt: skip
    assert b"never" not in asked
    assert encode({"a": ["x", "long", "y"]}, tokenize, 2, 4)[1].ids == [120]  # a short one fills up


# ---- modes ----


@dataclass
class Info:
    architecture: str = "qwen35moe"
    n_layer_nextn: int = 1
    can_draft_mtp: bool = True


def test_modes_are_speculations():
    assert set(MODES) == set(SPECULATIONS)


def test_all_modes_of_a_model_that_runs_them():
    assert choose(MODES, Info(), "drafter.gguf") == (list(MODES), {})
    assert choose(["auto", "ngram"], Info(), None) == (["off", "ngram", "auto"], {})


def test_stock_runs_on_any_model_but_only_where_it_is_wanted():
    assert STOCK not in choose(MODES, Info(), None)[0]
    assert choose(["ngram", STOCK], Info("llama", 0, False), None) == (["off", "ngram", STOCK], {})


def test_modes_that_a_model_cannot_run_are_left_out_with_the_reason():
    runs, left_out = choose(MODES, Info(n_layer_nextn=0), None)
    assert runs == ["off", "ngram"]
    assert left_out["dflash"] == "no --drafter was given"
    assert left_out["mtp"].startswith("found no MTP block in the file")
    assert left_out["auto"].startswith("found no MTP block in the file")
    assert left_out["tree"].startswith("found no MTP block in the file")
    runs, left_out = choose(MODES, Info(n_layer_nextn=0), "drafter.gguf")
    assert (runs, set(left_out)) == (["off", "dflash", "ngram", "tree", "auto"], {"mtp"})
    runs, left_out = choose(MODES, Info("llama", 0, False), "drafter.gguf")
    assert runs == ["off", "ngram"]
    assert left_out["dflash"].startswith("found architecture 'llama'")


def test_trees_are_left_out_where_drafts_are_chains():
    runs, left_out = choose(["mtp", "tree"], Info(), None, -1, without_tree_ops=True)
    assert runs == ["off", "mtp"]
    assert left_out == {"tree": "n_gpu_layers=-1 puts layers where drafts are chains"}
    assert choose(["mtp", "tree"], Info(), None, -1) == (["off", "mtp", "tree"], {})
    assert choose(["mtp", "tree"], Info(), None, without_tree_ops=True) == (["off", "mtp", "tree"], {})


@pytest.mark.parametrize("wanted", [["off"], ["mtp"], ["dflash", "auto"]])
def test_nothing_to_hold_against_plain_decode(wanted):
    with pytest.raises(UnsupportedError, match="found no mode to hold against plain decode"):
        choose(wanted, Info("llama", 0, False), None)


# ---- claims ----


def test_claims_that_a_run_cannot_show():
    floor = Claim("floor", "auto", 0.97)
    check_claims([floor], ["off", "auto"], {}, 9)
    with pytest.raises(OptionError, match=r"--floor is about auto, .* against off: no MTP block"):
        check_claims([floor], ["off", "ngram"], {"auto": "no MTP block"}, 9)
    with pytest.raises(OptionError, match="it is not among --modes") as raised:
        check_claims([Claim("best", "mtp", 1.1)], ["off", "ngram", "auto"], {}, 9)
    assert raised.value.hint == "expected one of ngram, auto"
    with pytest.raises(OptionError, match="--floor is about off"):
        check_claims([Claim("floor", "off", 1.0)], ["off", "auto"], {}, 9)
    with pytest.raises(OptionError, match="found 8 repeats; --floor, --best and --rivals need at least 9"):
        check_claims([floor], ["off", "auto"], {}, 8)
    check_claims([], ["off", "auto"], {}, 1)


# ---- the command ----


def bench(*arguments: str):
    return CliRunner().invoke(cli, ["bench", *arguments])


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["--modes", "off,trees"], "found trees; expected some of off,mtp,dflash,ngram,tree,auto"),
        (["--modes", ","], "found none; expected some of"),
        (["--floor", "auto"], "found 'auto'; expected MODE:RATIO, such as auto:0.97"),
        (["--floor", "foo:1"], "found the mode 'foo'; expected one of off,mtp,dflash,ngram,tree,auto"),
        (["--floor", "auto:fast"], "expected MODE:RATIO"),
        (["--floor", "auto:nan"], "expected MODE:RATIO"),
        (["--best", "trees:1.1"], "found the mode 'trees'"),
        (["--best", "auto:-1"], "expected MODE:RATIO"),
        (["--repeats", "0"], "0 is not in the range"),
        (["--tokens", "2"], "2 is not in the range"),
        (["--temp", "-1"], "-1.0 is not in the range"),
        (["--threads", "0"], "0 is not in the range"),
        (["--threads", "100000"], "100000 is not in the range"),
        (["--draft-tokens", "64"], "64 is not in the range"),
        (["--tree-budget", "2"], "2 is not in the range 3<=x<=64"),
        (["--tree-budget", "65"], "65 is not in the range"),
        (["--plot", "/"], "is a directory"),
    ],
)
def test_wrong_usage_exits_with_2(arguments, found):
    result = bench("m.gguf", *arguments)
    assert result.exit_code == 2, result.output
    assert found in " ".join(result.stderr.split())


@pytest.mark.parametrize("option", ["--json", "--plot", "--results"])
def test_a_file_that_cannot_be_written_is_refused_before_measuring(option, tmp_path):
    path = tmp_path / "no-folder" / "out"
    result = bench("no-such-model.gguf", option, str(path))
    assert result.exit_code == 1
    assert result.stderr == (
        f"Error: {option} {path} cannot be written: No such file or directory; expected a file that can\n\n"
        "hint: name a file in a folder that exists and may be written\n"
    )


def test_results_of_another_kind_are_refused_before_measuring(tmp_path):
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"a": 1}))
    result = bench("no-such-model.gguf", "--results", str(path))
    assert result.exit_code == 1
    assert "is no results file; expected a JSON array" in result.stderr
    assert path.read_text() == '{"a": 1}'


def test_outputs_are_not_created_by_a_refused_run(tmp_path):
    bench("no-such-model.gguf", "--json", str(tmp_path / "a.json"), "--results", str(tmp_path / "b.json"))
    assert list(tmp_path.iterdir()) == []
