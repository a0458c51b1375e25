"""Rows of tests on a card: what a run of pytest leaves, parts that run it, and what their rows show."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from draftwood.bench import results

from bench import run as command
from bench.gpu import stamp, suite
from bench.gpu.work import BenchError, Clock

ROOT = Path(__file__).resolve().parents[2]

# ---- what a run of pytest leaves ----

TESTS = """
import os, signal
import numpy as np
import pytest
from tests.gpu.recorder import OP_ERROR
from tests.gpu.teacher import Verdict

@pytest.fixture
def late(record_property):
    yield
    record_property(OP_ERROR, 2e-6)

@pytest.mark.parametrize("excused", [1, 3])
def test_text(keep_text, late, excused):
    keep_text("mtp", Verdict(0.5, 1000, excused, 0, 0.25 * excused), tokens_a_round=2.5)

def test_figures(keep_figures):
    keep_figures(a=np.float32(1), b=float("nan"))

@pytest.mark.skip(reason="no card")
def test_skipped():
    pass

BAD = False
STOP = False

def test_fails():
    assert not BAD

@pytest.fixture
def broken():
    yield
    assert not BAD

def test_breaks(broken):
    pass

def test_stops():
    if STOP:
        os.kill(os.getpid(), signal.SIGINT)
"""


@pytest.fixture
def fake(tmp_path):
    """A tree with a few tests beside the real conftest.py of tests/gpu."""
    folder = tmp_path / "tree" / "tests" / "gpu"
    folder.mkdir(parents=True)
    for name in ("conftest.py", "recorder.py", "teacher.py"):
        shutil.copy(ROOT / "tests" / "gpu" / name, folder)
    (folder / "test_it.py").write_text(TESTS)
    (tmp_path / "tree" / "pytest.ini").write_text(
        f"[pytest]\npythonpath = {ROOT}\naddopts = --import-mode=importlib\nmarkers = gpu\n alone\n"
    )
    return tmp_path / "tree"


def pytest_of(tree: Path, rows: Path | None, *arguments: str, **more: str) -> subprocess.CompletedProcess:
    surroundings = {key: text for key, text in os.environ.items() if not key.startswith(("GGML_", "PYTEST"))}
    surroundings |= more | ({"DRAFTWOOD_GPU_ROWS": str(rows)} if rows else {})
    words = ["-s", "-p", "no:cacheprovider", "tests/gpu", *arguments]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        cwd=tree, env=surroundings, capture_output=True, text=True, check=False, timeout=280,
    )  # fmt: skip


def test_a_run_appends_a_row(fake, tmp_path):
    rows = tmp_path / "rows.json"
    done = pytest_of(fake, rows)
    assert done.returncode == 0, done.stdout + done.stderr
    line = "mtp: 1000 tokens, 0 mismatches, 3 excused (0.300 %), margin 0.5, widest 0.75; tokens_a_round 2.50"
    assert line in done.stdout
    (row,) = results.read(rows)
    assert row["outcomes"] == {"passed": 6, "failed": 0, "errors": 0, "skipped": 1, "deselected": 0}
    assert row["skips"] == {"no card": 1}
    assert (row["failures"], row["exit"], row["watched"]) == ([], 0, False)
    assert row["settings"] == {
        "graphs": True, "pinned": True, "tests": ["tests/gpu"], "only": "", "marks": "", "workers": 1,
    }  # fmt: skip
    assert (row["tokens"], row["excused"], row["mismatches"]) == (2000, 4, 0)
    assert (row["largest_excused_share"], row["margins"], row["widest"]) == (0.003, [0.5, 0.5], 0.75)
    assert row["op_error"] == 2e-6
    name = "tests/gpu/test_it.py::test_"
    assert row["texts"][f"{name}text[3]"]["tokens_a_round"] == 2.5
    assert row["figures"] == {f"{name}figures": {"a": 1.0, "b": "NaN"}}
    assert (row["schema"], row["unit"], row["card"]) == (1, "tests", next(iter(row["cards"]), None))
    assert re.fullmatch("[0-9a-f]{40}", row["commit"])
    assert row["pin"] == row["build"]["pin_version"]
    assert {"date", "driver", "modified", "seconds"} <= set(row)
    assert str(tmp_path) not in json.dumps(row)

    off = pytest_of(
        fake, rows, "-k", "text", "-m", "not slow", GGML_CUDA_DISABLE_GRAPHS="", GGML_CUDA_NO_PINNED="1"
    )
    assert off.returncode == 0, off.stdout
    added = results.read(rows)[1]
    assert added["settings"] == {
        "graphs": False, "pinned": False, "tests": ["tests/gpu"], "only": "text", "marks": "not slow",
        "workers": 1,
    }  # fmt: skip
    assert (added["outcomes"]["passed"], added["outcomes"]["deselected"]) == (2, 5)


def test_workers_leave_one_row(fake, tmp_path):
    rows = tmp_path / "rows.json"
    pytest_of(fake, rows)
    assert pytest_of(fake, rows, "-n", "2").returncode == 0
    alone, shared = results.read(rows)
    assert shared["settings"].pop("workers") == 2
    assert alone["settings"].pop("workers") == 1
    assert shared["outcomes"].pop("deselected") is None
    assert alone["outcomes"].pop("deselected") == 0
    sums = ("tokens", "excused", "margins", "op_error")
    for name in ("settings", "outcomes", "skips", "texts", "figures", *sums):
        assert shared[name] == alone[name], name


def test_what_needs_the_card_alone_is_skipped_beside_workers(fake, tmp_path):
    rows, marked = tmp_path / "rows.json", "import pytest\n@pytest.mark.alone\ndef test_a(): pass\n"
    (fake / "tests" / "gpu" / "test_it.py").write_text(marked)
    for workers in ("1", "2"):
        assert pytest_of(fake, rows, "-n", workers).returncode == 0
    assert [row["outcomes"]["passed"] for row in results.read(rows)] == [1, 0]
    assert list(results.read(rows)[1]["skips"]) == [
        "measures times or fills the card: not beside other workers"
    ]


def test_failures_and_ends_are_in_the_row(fake, tmp_path):
    rows, folder = tmp_path / "rows.json", fake / "tests" / "gpu"
    (folder / "test_none.py").write_text("import no_such_module")
    assert pytest_of(fake, rows, "--continue-on-collection-errors").returncode == 1
    assert pytest_of(fake, tmp_path / "shared.json", "-n", "2").returncode == 1
    (shared,) = results.read(tmp_path / "shared.json")
    assert (shared["outcomes"]["errors"], shared["failures"]) == (1, ["tests/gpu/test_none.py"])
    (folder / "test_none.py").unlink()
    for switch in ("BAD", "STOP"):
        (folder / "test_it.py").write_text(TESTS.replace(f"{switch} = False", f"{switch} = True"))
        pytest_of(fake, rows)
    broken, bad, stopped = results.read(rows)
    assert (broken["outcomes"]["errors"], broken["failures"]) == (1, ["tests/gpu/test_none.py"])
    assert (bad["outcomes"]["failed"], bad["outcomes"]["errors"], bad["exit"]) == (1, 1, 1)
    assert bad["failures"] == [f"tests/gpu/test_it.py::test_{name}" for name in ("fails", "breaks")]
    assert stopped["exit"] == 2
    assert stopped["outcomes"]["passed"] >= 5


def test_without_the_variable_there_is_no_row(fake, tmp_path):
    assert pytest_of(fake, None).returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["tree"]


def test_a_row_that_cannot_be_written_is_known_before_the_tests(fake, tmp_path):
    done = pytest_of(fake, tmp_path / "no" / "rows.json")
    assert done.returncode == 4
    assert "DRAFTWOOD_GPU_ROWS" in done.stderr
    assert "passed" not in done.stdout


# ---- parts ----

SANITIZER = """#!/bin/sh
while [ "$1" != --error-exitcode ]; do shift; done
shift 2
"$@" || exit $?
"""


@pytest.fixture
def parts(fake, monkeypatch):
    """parts(text, **part): run one part over a file of tests; return its row, or its error and its row."""
    monkeypatch.setattr(stamp, "ROOT", fake)
    monkeypatch.setattr(suite, "_GRACE", 5)
    for name in [name for name in os.environ if name.startswith("PYTEST_XDIST")]:
        monkeypatch.delenv(name)  # of the run that this test is in
    out = fake.parent / "out"

    def run(text: str, minutes: float = 1.0, **part: object) -> tuple[dict, BenchError | None]:
        (fake / "tests" / "gpu" / "test_it.py").write_text(text)
        monkeypatch.setattr(suite, "PARTS", {"it": suite.Part(0, **part)})
        error = None
        try:
            assert suite.run(["it"], out, Clock(minutes), print) == []
        except BenchError as caught:
            error = caught
        return results.read(out / suite.ROWS)[-1], error

    return run


MARKED = "import pytest\npytestmark = pytest.mark.gpu\n"


def test_a_part_keeps_its_row_and_its_log(parts, fake, monkeypatch, capfd):
    monkeypatch.setenv("GGML_CUDA_DISABLE_GRAPHS", "1")
    monkeypatch.setenv("GGML_CUDA_NO_PINNED", "1")
    text = f"{MARKED}def test_a(): print('said')\n"
    row, error = parts(text)
    assert error is None
    assert (row["part"], row["exit"], row["sanitizer"], row["outcomes"]["passed"]) == ("it", 0, None, 1)
    assert row["settings"] == suite.Part(0).settings  # whatever the variables were
    row, error = parts(text, environment={"GGML_CUDA_DISABLE_GRAPHS": "1"}, only="b or a")
    assert row["settings"] == {**suite.Part(0).settings, "graphs": False, "only": "b or a"}
    log = (fake.parent / "out" / suite.LOG).read_text()
    assert log.count("said") == 2
    assert "-m pytest -s -p no:cacheprovider" in log
    assert "-m gpu tests/gpu -k b or a" in log
    assert "1 passed" in capfd.readouterr().out


def test_a_part_that_fails_ends_them(parts):
    row, error = parts(f"{MARKED}def test_a(): assert False\n")
    assert (row["exit"], row["outcomes"]["failed"]) == (1, 1)
    assert "it ended with status 1; expected 0" in str(error)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_failure_is_said_before_the_end(parts, fake, workers):
    """Which a killed run never reaches."""
    dies = "os.kill(os.getppid(), 9) if os.environ.get('PYTEST_XDIST_WORKER') else os._exit(9)"
    bad = "def test_a():\n    print('a seed')\n    assert 1 == 2, 'said'\n"
    wait = f"def test_b():\n    time.sleep({4 * (workers - 1)})\n    {dies}\n"
    row, _ = parts(f"{MARKED}import os, time\n{bad}{wait}", workers=workers)
    assert row["exit"] == (-9 if workers == 2 else 9)
    log = (fake.parent / "out" / suite.LOG).read_text()
    assert "test_it.py::test_a failed" in log
    assert "assert 1 == 2" in log
    assert "a seed" in log


def test_a_call_that_hangs_is_named(parts, fake):
    """No signal reaches Python there."""
    hangs = "def call_that_hangs():\n    while True: ctypes.CDLL(None).pause()\n"
    wait = "def test_a(): pass\ndef test_b(): call_that_hangs()\n"
    row, error = parts(f"{MARKED}import ctypes\n{hangs}{wait}", workers=2, most=5)
    log = (fake.parent / "out" / suite.LOG).read_text()
    assert row["exit"] == 1
    assert error is not None
    assert "in call_that_hangs" in log
    # another worker goes on in its place
    assert (row["outcomes"]["passed"], row["failures"]) == (1, ["tests/gpu/test_it.py::test_b"])


# says itself when time is up, however long pytest took to come there
HANGS = f"""{MARKED}import os, signal, time

def once(*given):
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # `timeout` sends it to the process and to its group
    signal.default_int_handler(*given)

def test_a():
    pass

def test_b():
    signal.signal(signal.SIGINT, once)
    os.kill(os.getppid(), signal.SIGALRM)
    time.sleep(900)
"""


def test_a_process_that_dies_or_hangs_leaves_a_row(parts, monkeypatch):
    row, error = parts(f"{MARKED}import os\ndef test_a(): os._exit(7)\n")
    assert (row["exit"], row["outcomes"]["passed"], row["seconds"]) == (7, 0, None)
    assert row["settings"] == suite.Part(0).settings
    assert row["pin"]
    assert "status 7" in str(error)
    limits, command_of = [], suite.Part.command
    monkeypatch.setattr(suite, "_GRACE", 120)
    monkeypatch.setattr(
        suite.Part, "command", lambda part, limit: limits.append(limit) or command_of(part, limit)
    )
    row, error = parts(HANGS, minutes=6.0)
    assert 200 < limits[0] <= 240
    assert row["exit"] == 124
    assert row["outcomes"]["passed"] == 1
    assert "status 124" in str(error)


@pytest.mark.parametrize(
    ("tool", "said", "findings"),
    [
        ("memcheck", "echo ========= ERROR SUMMARY: 0 errors", 0),
        ("memcheck", "echo ========= ERROR SUMMARY: 1 error; exit 1", 1),
        ("memcheck", "", None),
        ("racecheck", "echo '========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)'", 0),
        ("racecheck", "echo '========= RACECHECK SUMMARY: 2 hazards displayed (0 errors, 2 warnings)'", 2),
    ],
)
def test_what_a_sanitizer_counts_is_in_the_row(parts, tmp_path, monkeypatch, tool, said, findings):
    program = tmp_path / suite.SANITIZER
    program.write_text(f"{SANITIZER}{said}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    row, error = parts(f"{MARKED}def test_a(): pass\n", tool=tool)
    assert row["sanitizer"] == {"tool": tool, "findings": findings}
    assert row["outcomes"]["passed"] == 1
    assert (error is None) == (findings == 0)


def test_parts_wait_for_the_next_command(tmp_path):
    assert suite.run(["off", "on"], tmp_path, Clock(0.1), print) == ["off", "on"]
    done = CliRunner().invoke(command.main, ["test", str(tmp_path), "--minutes", "0.1"])
    assert (done.exit_code, done.output) == (
        3,
        "time is up; call it again with on alone off alone-off exact pageable\n",
    )
    assert not (tmp_path / suite.ROWS).exists()


def test_a_missing_sanitizer_is_an_error_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    done = CliRunner().invoke(command.main, ["test", str(tmp_path), "on", "racecheck"])
    assert done.exit_code == 1
    assert "found no compute-sanitizer on PATH" in done.output
    assert "-- on" not in done.output


def test_commands_of_the_parts():
    words = {name: part.command(99.6) for name, part in suite.PARTS.items()}
    ends = ["-o", "faulthandler_timeout=120"]
    without = ["-p", "no:cacheprovider", "-p", "no:benchmark"]
    of_workers = [*ends, "--timeout", "125", "--timeout-method", "thread"]
    pytest_words = ["-m", "pytest", "-s", *without, *ends, "-m", "gpu"]
    for command_words in words.values():
        assert command_words[:4] == ["timeout", "--signal=INT", "--kill-after=20", "100"]
    without_exact = ["tests/gpu", "-k", "not test_exact_cuda"]
    shown = ["-n", "4", "--capture=sys", *without]
    together = ["-m", "pytest", *shown, *of_workers, "-m", "gpu and not alone"]
    assert words["on"][4:] == words["off"][4:] == [sys.executable, *together, *without_exact]
    assert words["alone"][4:] == [sys.executable, *pytest_words[:-1], "gpu and alone", "tests/gpu"]
    assert words["exact"][-1] == "tests/gpu/test_exact_cuda.py"
    assert words["pageable"][-3:] == ["tests/gpu/test_same_text.py", "-k", "mtp or dflash"]
    assert words["racecheck"][4:] == [
        "compute-sanitizer", "--tool", "racecheck", "--error-exitcode", "1", sys.executable,
        *pytest_words[:-2], "--timeout", "100", *pytest_words[-2:],
        "tests/gpu/test_tree_ops_cuda.py", "tests/gpu/test_layer_parts_cuda.py",
        "tests/gpu/test_expert_pool_cuda.py", "-k", "smallest",
    ]  # fmt: skip
    assert "smallest" in words["memcheck"]
    assert "-k" not in words["memcheck-trees"]
    of_a_command = [suite.PARTS[name].needs for name in ("on", "alone", "off")]
    assert sum(of_a_command) < 540  # ten minutes
    for part in suite.PARTS.values():
        assert all((ROOT / each).exists() for each in part.tests)


# ---- rows are collected ----


def row_of(part: str, **changes: object) -> dict:
    """Return a row of a part that is all green."""
    known = suite.PARTS[part]
    row = {
        "schema": 1, "run": part, "date": "2026-01-02", "commit": "a" * 40, "modified": False,
        "cards": ["NVIDIA H100"], "card": "NVIDIA H100", **suite.nothing(known.settings), "seconds": 200.0,
        "exit": 0, "part": part, "sanitizer": None,
    }  # fmt: skip
    row["outcomes"] = {**row["outcomes"], "passed": 9}
    if known.tool:
        row |= {"watched": True, "sanitizer": {"tool": known.tool, "findings": 0}}
    else:
        row |= {"tokens": 1000, "excused": 1, "largest_excused_share": 0.001, "texts": {"t": {}}}
    return {**row, **changes}


ALL = ("on", "off", "pageable", "memcheck", "racecheck")


def test_rows_are_collected_once(tmp_path):
    folder, target = tmp_path / "out", tmp_path / "results"
    folder.mkdir()
    target.mkdir()
    for part in ALL:
        results.append(folder / suite.ROWS, row_of(part))
    for added in (5, 0):
        done = CliRunner().invoke(command.main, ["collect", str(folder), "--results", str(target)])
        assert (done.exit_code, done.output) == (0, f"{folder}: {added} rows added\n")
    assert [row["part"] for row in results.read(target / "tests-h100.json")] == list(ALL)


def test_rows_without_a_card_are_refused(tmp_path):
    results.append(tmp_path / suite.ROWS, row_of("on", cards=[], card=None))
    done = CliRunner().invoke(command.main, ["collect", str(tmp_path), "--results", str(tmp_path)])
    assert done.exit_code == 1
    assert "without a card" in done.output
