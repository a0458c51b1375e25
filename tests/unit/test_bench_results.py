"""draftwood bench's document and results files: the row's schema, rows only added, the commit it names."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from draftwood.bench import facts, results
from draftwood.bench.claims import Claim, judge
from draftwood.bench.report import SCHEMA, Figure, document
from draftwood.errors import OptionError

ROOT = Path(__file__).resolve().parents[2]
FIGURE = Figure(
    "prose", 0.0, "auto", 50.0, 1.2, 1.1, 1.3, [1.2] * 9, 2.5, 0.1, 10, 20, 10, 0, 1, 0, 6, 2, 3.5, 4.0, 0,
    900.0, 1.01, 0.99, 1.02,
)  # fmt: skip
# name -> type of each key; a change of these is a new schema
ROW = {
    "schema": int, "date": str, "draftwood": str, "commit": (str, type(None)), "modified": (bool, type(None)),
    "build": dict, "cards": list, "driver": (str, type(None)), "cpu": str, "cores": int,
    "load_average": float, "model": dict,
    "drafter": (str, type(None)), "threads": int, "n_gpu_layers": int, "draft_tokens": dict,
    "tree_budget": dict, "tokens": int, "prompt_tokens": int,
    "repeats": int, "sampling": dict, "prompts": dict, "left_out": dict, "figures": list, "claims": list,
    "faults": list, "ok": bool,
}  # fmt: skip
NUMBER = (int, float)
FIGURE_ROW = {
    "category": str, "temp": NUMBER, "mode": str, "tokens_per_second": NUMBER, "ratio": NUMBER,
    "low": (*NUMBER, type(None)), "high": (*NUMBER, type(None)), "ratios": list,
    "tokens_per_round": (*NUMBER, type(None)), "repeated": NUMBER, "rounds": int, "drafted": int,
    "accepted": int, "cold_rounds": int, "paused_rounds": int, "ngram_rounds": int, "differing": int,
    "tree_rounds": int, "padding": int, "draft_length": (*NUMBER, type(None)),
    "draft_nodes": (*NUMBER, type(None)), "prompt_tokens_per_second": NUMBER, "prompt_ratio": NUMBER,
    "prompt_low": (*NUMBER, type(None)), "prompt_high": (*NUMBER, type(None)),
}  # fmt: skip
ADDED = {2: {"cards", "driver", "ngram_rounds"},
         3: {"tree_budget", "tree_rounds", "padding", "draft_length", "draft_nodes"},
         4: {"prompt_tokens_per_second", "prompt_ratio", "prompt_low", "prompt_high"}}  # fmt: skip


def check_row(row: dict) -> None:
    """Hold a row against its schema.

    1 had no cards and no n-grams in "auto"; 2 one draft_tokens for all modes; 3 no prompts.
    """
    assert row["schema"] in (1, 2, 3, SCHEMA) == (1, 2, 3, 4)
    later = set().union(*(names for schema, names in ADDED.items() if schema > row["schema"]))
    one_length = {"draft_tokens": int} if row["schema"] < 3 else {}
    for keys, found in [({**ROW, **one_length}, row), *((FIGURE_ROW, each) for each in row["figures"])]:
        assert set(found) == set(keys) - later
        for name, kind in found.items():
            assert isinstance(kind, keys[name]), (name, kind)
    assert {"pin_version", "pin_commit", "series_hash"} <= set(row["build"])
    assert set(row["model"]) == {"file", "bytes"}
    assert all(set(claim) == {"text", "holds"} for claim in row["claims"])


def row(claims=(), faults=()) -> dict:
    build = {"pin_version": "1", "pin_commit": "c", "series_hash": "h"}
    settings = {
        "model": {"file": "m.gguf", "bytes": 5}, "drafter": None, "threads": 2, "n_gpu_layers": 0,
        "draft_tokens": {"auto": 4}, "tree_budget": {"auto": 16}, "tokens": 128,
        "prompt_tokens": 128, "repeats": 9, "sampling": {"seed": 1},
        "prompts": {"prose": 1},
    }  # fmt: skip
    known = {**facts.machine(build), **settings}
    verdicts = [judge(claim, [FIGURE]) for claim in claims]
    return json.loads(json.dumps(document(known, {"mtp": "why"}, [FIGURE], verdicts, faults)))


def test_the_rows_schema():
    found = row([Claim("floor", "auto", 0.97)])
    check_row(found)
    assert found["ok"] is True
    assert found["left_out"] == {"mtp": "why"}
    assert found["figures"][0]["ratios"] == [1.2] * 9


@pytest.mark.parametrize("file", sorted((ROOT / "bench" / "results").glob("*.json")), ids=lambda p: p.name)
def test_committed_rows_keep_to_it(file):
    rows = results.read(file)
    assert rows
    for each in rows:
        assert "/" not in json.dumps(each.get("model", {}))
        if "claims" in each:  # of `draftwood bench`
            check_row(each)
        else:  # of a script under bench/: when, on what, of which commit
            assert {"schema", "date", "build", "cpu", "cores"} <= set(each)
            assert re.fullmatch("[0-9a-f]{40}", each["commit"])
            assert isinstance(each["modified"], bool)


def test_not_ok_with_a_missed_floor_or_a_fault():
    assert row([Claim("floor", "auto", 1.31)])["ok"] is False
    assert row([Claim("best", "auto", 1.2)])["ok"] is True
    assert row(faults=["auto: texts differ"])["ok"] is False


# ---- results files ----


def test_rows_are_only_added(tmp_path):
    path = tmp_path / "r.json"
    assert results.read(path) == []
    before = ""
    for i in range(3):
        results.append(path, {"schema": 1, "n": i, "x": 0.1 + i})
        text = path.read_text()
        assert text.startswith(before)
        assert len(text.splitlines()) == i + 3  # a row is a line
        before = text.removesuffix("\n]\n")
    assert [each["n"] for each in results.read(path)] == [0, 1, 2]


def test_rows_may_be_formatted_otherwise(tmp_path):
    path = tmp_path / "r.json"
    path.write_text(json.dumps([{"schema": 1}], indent=2))
    results.append(path, {"schema": 1, "n": 2})
    assert results.read(path) == [{"schema": 1}, {"schema": 1, "n": 2}]
    path.write_text("[]")
    results.append(path, {"schema": 1})
    assert results.read(path) == [{"schema": 1}]


@pytest.mark.parametrize("content", ["", "{}", "[1]", '[{"a": 1}]', '{"schema": 1}\n{"schema": 1}\n'])
def test_other_files_are_refused_and_left_alone(tmp_path, content):
    path = tmp_path / "r.json"
    path.write_text(content)
    with pytest.raises(OptionError, match="is no results file"):
        results.append(path, {"schema": 1})
    assert path.read_text() == content


def test_no_number_that_json_lacks(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        results.append(tmp_path / "r.json", {"schema": 1, "x": float("nan")})
    assert list(tmp_path.iterdir()) == []


# ---- where it was measured ----


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.com"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_the_commit_is_that_of_the_packages_own_repository(tmp_path):
    package = tmp_path / "python" / "draftwood"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    assert facts.commit(package) == {"commit": None, "modified": None}
    git(tmp_path, "init", "-q")
    assert facts.commit(package) == {"commit": None, "modified": None}  # an environment inside a repository
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "one")
    head = git(tmp_path, "rev-parse", "HEAD")
    assert facts.commit(package) == {"commit": head, "modified": False}
    for source in facts.SOURCES:
        changed = tmp_path / source / "x" if "." not in source else tmp_path / source
        changed.parent.mkdir(exist_ok=True)
        changed.write_text("x = 1\n")
        assert facts.commit(package) == {"commit": head, "modified": True}
        changed.unlink()
    (tmp_path / "README.md").write_text("x")
    assert facts.commit(package) == {"commit": head, "modified": False}


def test_every_source_of_the_build_is_there():
    assert [source for source in facts.SOURCES if not (ROOT / source).exists()] == []


def test_no_git_is_no_error(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert facts.commit(ROOT / "python" / "draftwood") == {"commit": None, "modified": None}


def test_the_processor_has_a_name():
    assert facts.cpu_name()
