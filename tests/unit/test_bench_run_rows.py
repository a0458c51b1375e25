"""Rows, profiles and stamps of bench/run.py, from figures made up here: no library, no card."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import asdict, fields

import pytest
from draftwood.stats import SpeculationStats

from bench.gpu import files, floor, profiling, rows, stamp
from bench.gpu.cases import Case
from bench.gpu.work import BenchError

CASE = Case(name="length4", nodes=6, length=4.0, restarts=5)
ORIGIN = {
    "date": "2026-01-01", "draftwood": "1", "build": {"pin_version": "0.3.36"}, "cpu": "c", "cores": 2,
    "cards": ["NVIDIA H100 80GB HBM3"], "driver": "5", "load_average": 0.0, "commit": "a" * 40,
    "modified": False, "card": "NVIDIA H100 80GB HBM3", "pin": "0.3.36",
}  # fmt: skip
READS = files.Reads(dense=1000, experts=2560, n_experts=256, n_used=8, head=200, mtp=50, state=10, cell=1)


def restart(round_s: float = 0.02, stock_ms: float = 1000.0) -> dict:
    """Two repeats: a plain step 10 ms, a round of 4 tokens round_s, of which draft 3 ms and forward 14 ms."""
    stats = {"rounds": 10, "emitted": 40, "draft_seconds": 0.001, "gpu_launches": 100, "gpu_replays": 99,
             "checkpoints": 4, "graph_bytes": 9, "row_limit": 16, "tokens_per_round": 4.0,
             "draft_vocab": 1024, "drafted_by_depth": [10, 5]}  # fmt: skip
    turn = {"seconds": 10 * round_s, "tokens": 40, "rounds": 10, "phases": {"propose": 0.03}, "stats": stats}
    other = {**turn, "stats": {**stats, "drafted_by_depth": [10, 6, 1]}}
    plain = {"seconds": 0.1, "tokens": 10, "rounds": 10, "phases": {}, "stats": {}}
    served = {"predicted_per_second": 40.0, "stream_per_second": 41.0, "predicted_n": 41,
              "draft_n_accepted": 30,
              "predicted_ms": stock_ms}  # fmt: skip
    return {
        "origin": ORIGIN,
        "asked": CASE.asked,
        "facts": {"mean_nodes": 6.0, "n_vocab": 4096, "draft_vocab": 1024},
        "plain": [plain, plain],
        "candidate": [turn, other],
        "parts": [{"draft": [0.003, 0.003], "forward": [0.014, 0.014]}] * 2,
        "stock_plain": [{**served, "predicted_per_second": 50.0}] * 2,
        "stock": [served, served],
    }


def state(*restarts: dict) -> dict:
    return {
        "schema": 2, "run": "r",
        "models": {"35b-a3b": {"reads": asdict(READS), "unions": {"4": 20.0, "8": 40.0}, "routing": {}}},
        "floor": {"bytes_per_second": 1e6},
        "cases": {"length4": {str(i): each for i, each in enumerate(restarts)}},
    }  # fmt: skip


def test_a_row_by_hand():
    row = rows.of_run(state(restart(), restart(round_s=0.025), restart()))[0]
    names = ("case", "card", "driver", "nodes", "drafter", "unit", "pin", "restarts")
    assert row["warm"] == CASE.warm
    assert {name: row[name] for name in names} == {
        "case": "length4", "card": "NVIDIA H100 80GB HBM3", "driver": "5", "nodes": 6, "drafter": "mtp",
        "unit": "tok/s", "pin": "0.3.36", "restarts": 3,
    }  # fmt: skip
    expected = {
        "t1_ms": 10.0, "plain": 100.0, "ours": 200.0, "speedup": 2.0, "length": 4.0, "round_ms": 20.0,
        "tn_ms": 14.0,
        "draft_ms": 3.0, "propose_ms": 3.0, "bound": 4 * 10 / 17, "bound_share": 2.0 / (4 * 10 / 17),
        "overhead": 0.15,
        "stock": 40.0, "stock_plain": 50.0, "stock_speedup": 0.8, "stock_length": 4.0, "ratio": 5.0,
    }  # fmt: skip
    assert {name: row[name] for name in expected} == pytest.approx(expected, rel=1e-4)
    assert row["spread"]["ours"] == [160.0, 200.0]
    assert row["spread"]["speedup"] == [1.6, 2.0]
    assert row["counters"] == {
        "rounds": 60, "emitted": 240, "draft_seconds": 0.006, "gpu_launches": 600, "gpu_replays": 594,
        "drafted_by_depth": [60, 33, 3],
    }  # fmt: skip
    # 6 rows lie between 4 and 8: 30 experts of 10 bytes; 5 drafts of 50 and a quarter of the head; 980 cells
    n_bytes = 1000 + 300 + 20 + (960 + 128 * 4 / 2) + 5 * (50 + 200 / 4)
    assert row["limit_pct"] == pytest.approx(100 * n_bytes / 1e6 / 0.02, abs=0.01)
    assert row["synthetic"] is True
    assert row["text"].startswith("invalid")
    assert row["schedule"]["rates"] == pytest.approx(CASE.schedule, abs=1e-6)


def test_memory_that_is_held_is_no_counter():
    held = {each.name for each in fields(SpeculationStats) if each.name.endswith("_bytes")}
    assert held == {"checkpoint_bytes", "drafter_bytes", "graph_bytes", "tree_bytes"}
    assert held <= set(rows._HELD)


def test_a_row_says_none_where_nothing_was_measured():
    found = restart()
    del found["stock"]
    run = state(found)
    run["floor"] = None
    row = rows.of_run(run)[0]
    assert row["stock"] is row["ratio"] is row["limit_pct"] is row["spread"]["stock"] is None
    assert "stock_length" not in row


def test_a_plain_row_is_plain_decode():
    found = restart()
    found["asked"] = Case(name="plain", drafter="none").asked
    found["facts"]["mean_nodes"] = 1.0
    for name in ("candidate", "parts", "stock"):
        del found[name]
    row = rows.of_run({**state(), "cases": {"plain": {"0": found}}})[0]
    assert (row["ours"], row["stock"], row["ratio"], row["synthetic"]) == (100.0, 50.0, 2.0, False)
    assert row["limit_pct"] == pytest.approx(100 * (1000 + 80 + 20 + 960 + 64) / 1e6 / 0.01, abs=0.01)


def test_queued_steps_stand_beside_steps_that_wait():
    found = restart()
    found["plain"] = [{**turn, "stats": {"queued_steps": 9, "rounds": 10}} for turn in found["plain"]]
    found["waiting"] = [{**turn, "seconds": 2 * turn["seconds"]} for turn in found["plain"]]
    row = rows.of_run(state(found))[0]
    assert (row["waiting_ms"], row["queued_speedup"], row["queued_part"]) == (2 * row["t1_ms"], 2.0, 0.9)


@pytest.mark.parametrize(
    ("n_rows", "union"), [(1, 8.0), (4, 20.0), (6, 30.0), (8, 40.0), (2.5, 14.0), (9, None)]
)
def test_unions_lie_on_a_line_between_those_measured(n_rows, union):
    assert rows.union_of({"reads": {"n_used": 8}, "unions": {"4": 20.0, "8": 40.0}}, n_rows) == union
    assert rows.union_of({}, n_rows) is None


@pytest.mark.parametrize(
    ("card", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GeForce RTX 4090", "geforce-rtx-4090"),
    ],
)
def test_cards_have_short_names(card, name):
    assert rows.slug(card) == name


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"cards": []}, r"without a card(.|\n)*hint: bench/run\.py run cases"),
        ({"commit": None}, "no commit"),
    ],
)
def test_runs_without_card_or_commit_give_no_rows(change, found):
    with pytest.raises(BenchError, match=found):
        rows.of_run(state({**restart(), "origin": {**ORIGIN, **change}}))


def test_a_row_names_the_commit_that_was_measured():
    run = state(restart())
    other = {**restart(), "origin": {**ORIGIN, "commit": "b" * 40}}
    run["cases"]["length2"] = {"0": other}
    run["memory"] = {
        "35b-a3b": {"origin": {**ORIGIN, "commit": "c" * 40}, "trees": {"16": {"tree_bytes": 1}}}
    }
    run["profile"] = {"length4": {"asked": {}, "origin": {**ORIGIN, "commit": "d" * 40}, "phase": "round"}}
    found = [*rows.of_run(run), *rows.kernels(run)]
    assert [(row["case"], row["commit"][0]) for row in found] == [
        ("length4", "a"), ("length2", "b"), ("tree-memory", "c"), ("length4", "d"),
    ]  # fmt: skip
    assert not any({"origin", "asked"} & set(row) for row in found)


# ---- profiles and stamps ----


def test_ncus_lines_are_summed_by_kernel():
    lines = [
        "==PROF== Connected",
        '"ID","Kernel Name","gpu__time_duration.sum"',
        '"","","ns"',
        '"0","void mul<(int)3, a::b<2>>(const float *, int)","1,500"',
        '"1","copy(float *)","700.5"',
        '"2","void mul<(int)3, a::b<2>>(const float *, int)","500"',
    ]
    assert profiling.table(lines) == [
        {"kernel": "mul<(int)3, a::b<2>>", "launches": 2, "us": 2.0},
        {"kernel": "copy", "launches": 1, "us": 0.701},
    ]


@pytest.fixture
def program(tmp_path, monkeypatch):
    """program(name, text): a shell script of that name, first on the path."""

    def write(name: str, text: str) -> None:
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    return write


def test_what_ncu_is_asked_and_what_it_says(program, tmp_path):
    case, found = Case(name="c", nodes=3, length=2.0), files.Files(tmp_path / "m.gguf", tmp_path / "d.gguf")
    program(
        "ncu",
        f"""printf '%s\\n' "$@" > {tmp_path}/asked
printf '"ID","Kernel Name","gpu__time_duration.sum"\\n"0","k(int)","2000"\\n'""",
    )
    table = profiling.run(case, "round", found, tmp_path / "log", 60)
    assert (table["us"], table["launches"], table["rounds"]) == (2.0, 1, profiling.ROUNDS)
    asked = (tmp_path / "asked").read_text().splitlines()
    given = asked[asked.index("profiled") + 1 :]
    assert Case(**{**json.loads(given[0]), "rates": ()}) == case
    assert given[1:] == ["round", "--model", str(found.model), "--drafter", str(found.drafter)]
    program("ncu", "echo no permission; exit 3")
    with pytest.raises(BenchError, match="ncu ended with status 3: no permission"):
        profiling.run(case, "round", found, tmp_path / "log", 60)


def test_the_card_is_the_first_one(program):
    program(
        "nvidia-smi",
        "echo 'NVIDIA H100, 580.1, 80 MiB, 1980 MHz, 2619 MHz, 700 W'; echo 'NVIDIA X, 1, 1, 1, 1, 1'",
    )
    assert floor.card() == {
        "name": "NVIDIA H100", "driver_version": "580.1", "memory.total": "80 MiB",
        "clocks.max.sm": "1980 MHz", "clocks.max.memory": "2619 MHz", "power.limit": "700 W",
    }  # fmt: skip
    program("nvidia-smi", "echo no devices; exit 6")
    with pytest.raises(BenchError, match="no devices"):
        floor.card()


@pytest.fixture
def tree(tmp_path):
    """A small copy of the sources, and the stamp of a commit that had them."""
    for name in ("src", "bench/gpu"):
        shutil.copytree(stamp.ROOT / name, tmp_path / name)
    package = tmp_path / "site" / "draftwood"
    package.mkdir(parents=True)
    text = {"commit": "b" * 40, "modified": False, "digest": stamp.digest(tmp_path)}
    (package.parent / stamp.INSTALLED).write_text(json.dumps(text))
    return tmp_path, package


def test_a_stamp_names_the_commit_of_what_is_installed(tree):
    root, package = tree
    assert stamp.known(package, root) == {"commit": "b" * 40, "modified": False}
    (root / "src" / "__pycache__").mkdir()
    (root / "src" / "__pycache__" / "x.py").write_text("built")
    assert stamp.known(package, root)["modified"] is False
    source = next((root / "src").rglob("*.cpp"))
    source.write_text(source.read_text() + "\n")
    assert stamp.known(package, root)["modified"] is True


@pytest.mark.parametrize("text", ["", "{}", '{"commit": "b"}', "[1]"])
def test_another_file_is_no_stamp(tree, text):
    root, package = tree
    (package.parent / stamp.INSTALLED).write_text(text)
    with pytest.raises(BenchError, match="is no stamp"):
        stamp.known(package, root)


def test_without_stamp_the_repository_answers(tree):
    root, package = tree
    (package.parent / stamp.INSTALLED).unlink()
    with pytest.raises(BenchError, match="no repository"):
        stamp.known(package, root)
    for arguments in (["init", "-q"], ["add", "bench"], ["commit", "-q", "-m", "x", "--no-verify"]):
        who = ["-c", "user.name=n", "-c", "user.email=e"]
        (root / "bench" / "run.py").touch()
        subprocess.run(["git", *who, *arguments], cwd=root, check=True)
    found = stamp.known(package, root)
    assert len(found["commit"]) == 40
    assert found["modified"] is True  # src is not in that commit
