"""llama-server's own tests on tiny-moe, offline, drafting off and on; replies compared: `make server-suite`.

    python tests/server/suite/run.py [--off plain] [--on auto] [PYTEST ARGUMENTS]

The suite comes from the pinned archive. suite.toml says what is changed in it and what cannot pass here. Exit
status 1: a test failed that is not left out, one passed that is, replies differ, or nothing was drafted.
Logs and replies stay in build/server-suite.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from draftwood.cli.serve import program

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path[:0] = [str(ROOT / "_build"), str(HERE), str(ROOT)]

from pin import load_lock, tomllib  # noqa: E402
from replies import Record, compare  # noqa: E402
from source import find_sdist  # noqa: E402

from tests.ports import free_port  # noqa: E402

MODEL = ROOT / "models" / "tiny-moe" / "tiny-moe-f16.gguf"
TESTS = "tools/server/tests"
# the suite asks for templates by a path from its folder
PARTS = (TESTS, "models/templates")
# keys of the header; their values are the tokens 0 to 3, which no text has
FIM = ("fim_pre", "fim_suf", "fim_mid", "fim_pad")
KEPT = ROOT / "build" / "server-suite"
# llama-server tells templates the day (date_string, strftime_now)
TODAY = datetime.date(2026, 11, 25)
DATED = "models/dated"  # suite.toml sends some tests there
CLOCK = re.compile(r"""strftime_now\((["'])(.*?)\1\)""")
CLOSED = "http://127.0.0.1:9/"


class Outcome(NamedTuple):
    result: str  # pytest's word
    words: str


class Run(NamedTuple):
    outcomes: dict[str, Outcome]  # by test
    records: list[Record]


# ---- laying out ----


def extract(folder: Path) -> None:
    """Unpack the suite and its templates from the pinned archive."""
    lock = load_lock(ROOT)
    top = f"{lock.top}/{lock.inner}/"
    with tarfile.open(find_sdist(ROOT, lock)) as archive:
        for member in archive:
            name = member.name.removeprefix(top)
            content = archive.extractfile(member) if name.startswith(PARTS) else None
            if content is not None:
                path = folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content.read())


def stop_the_clock(templates: Path, dated: Path) -> None:
    """Write templates that say TODAY: what tiny-moe writes behind a date is another text each day."""
    dated.mkdir()
    day = repr(f"{TODAY:%d %b %Y}")
    for path in templates.glob("*.jinja"):
        text = path.read_text("utf-8")
        text = CLOCK.sub(lambda found: repr(TODAY.strftime(found[2])), text)
        text = text.replace("+ date_string +", f"+ {day} +")
        (dated / path.name).write_text(text, "utf-8")


def edit(unit: Path, edits: dict[str, list[list[str]]]) -> None:
    for name, pairs in edits.items():
        text = (unit / name).read_text("utf-8")
        for found, put in pairs:
            if found not in text:
                hint = "hint: correct suite.toml by the test at the pin"
                raise SystemExit(f"{name} has no {found!r}; expected it, to be edited\n\n{hint}")
            text = text.replace(found, put)
        (unit / name).write_text(text, "utf-8")


def start(kind: str, folder: Path, config: dict[str, Any], arguments: list[str]) -> subprocess.Popen[bytes]:
    """Start the suite in a folder of its own with --spec-type `kind`."""
    server = str(program("llama-server"))
    infill = folder / "infill-server"
    flags = ",".join(f"tokenizer.ggml.{name}_token_id=int:{i}" for i, name in enumerate(FIM))
    infill.write_text(f'#!/bin/sh\nexec "{server}" "$@" --override-kv {flags}\n')
    infill.chmod(0o755)
    tests = folder / TESTS
    (tests / "tmp").mkdir()
    settings = {
        **{"model": str(MODEL), "models": config["models"], "downloads": config["downloads"]},
        **{"cache": str(folder / "cache"), "records": str(folder / "records"), "infill_server": str(infill)},
    }
    (tests / "settings.json").write_text(json.dumps(settings), "utf-8")
    environment = {
        **os.environ,
        **{"LLAMA_ARG_SPEC_TYPE": kind, "LLAMA_ARG_THREADS": "1", "OMP_WAIT_POLICY": "passive"},
        **{"LLAMA_SERVER_BIN_PATH": server, "PORT": str(free_port())},
        **{"LLAMA_CACHE": settings["cache"], "MODEL_ENDPOINT": CLOSED, "SLOW_TESTS": "1"},
        "LLAMA_ARG_STATIC_PATH": str(resources.files("draftwood") / "web"),
        "PYTEST_ADDOPTS": "",  # -x would end the suite at the first test that is left out
        "PYTHONPATH": os.pathsep.join([str(tests), str(HERE)]),
    }
    options = ["-p", "plugin", "-p", "no:cacheprovider", "--timeout", "120", "-q", "--tb", "short"]
    command = [sys.executable, "-m", "pytest", *options, f"--basetemp={folder / 'tmp'}", *arguments]
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(command, cwd=tests, env=environment, stdout=log, stderr=subprocess.STDOUT)


def collect(folder: Path) -> Run:
    """Read what a run left."""
    outcomes: dict[str, Outcome] = {}
    records = []
    for line in (folder / "records").read_text("utf-8").splitlines():
        each = json.loads(line.replace(str(folder), "FOLDER"))
        each["test"] = each["test"].removeprefix("unit/")
        if "outcome" not in each:
            records.append(Record(**each))
        elif each["test"] not in outcomes or each["outcome"] != "passed":  # a teardown may fail, too
            outcomes[each["test"]] = Outcome(each["outcome"], each["words"])
    return Run(outcomes, records)


# ---- judging ----


def named(config: dict[str, Any], table: str) -> set[str]:
    return {test for tests in config[table].values() for test in tests}


def entry(test: str, names: Iterable[str]) -> str | None:
    """Return the entry that a test falls under: its own, its function's or its file's."""
    return next(
        (each for each in (test, test.partition("[")[0], test.partition("::")[0]) if each in names), None
    )


def judge(runs: dict[str, Run], config: dict[str, Any], partial: bool) -> tuple[list[str], int, int]:
    """Return what is wrong, how many tests passed in all runs, and how many should."""
    left_out, may_skip = named(config, "left_out"), named(config, "may_skip")
    tests = sorted({test for run in runs.values() for test in run.outcomes})
    wrong, n_passed, n_runnable = [], 0, 0
    for test in tests:
        results = {kind: run.outcomes.get(test, Outcome("missing", "")) for kind, run in runs.items()}
        passed = [each.result == "passed" for each in results.values()]
        if entry(test, left_out):
            wrong += [f"left out, but passes: {test}"] if any(passed) else []
        elif all(each.result == "skipped" for each in results.values()) and entry(test, may_skip):
            print(f"skipped itself: {test}")
        else:
            n_runnable += 1
            n_passed += all(passed)
            for kind, each in results.items():
                if each.result != "passed":
                    words = (each.words.strip().splitlines() or [""])[-1][:200]
                    wrong.append(f"{each.result} with --spec-type {kind}: {test}: {words}")
    used = {entry(test, names) for test in tests for names in (left_out, may_skip)}
    wrong += [f"no such test: {name}" for name in sorted((left_out | may_skip) - used) if not partial]
    return wrong, n_passed, n_runnable


def run_all(kinds: list[str], config: dict[str, Any], arguments: list[str]) -> dict[str, Run]:
    """Run the suite once with each kind of drafting, side by side."""
    shutil.rmtree(KEPT, ignore_errors=True)
    KEPT.mkdir(parents=True)
    # outside the repository, whose .gitignore the server's own tools heed
    with tempfile.TemporaryDirectory(prefix="server-suite-") as made:
        folders = {kind: Path(made) / kind for kind in kinds}
        started = []
        for kind, folder in folders.items():
            extract(folder)
            stop_the_clock(folder / PARTS[1], folder / DATED)
            edit(folder / TESTS / "unit", config["edits"])
            started.append(start(kind, folder, config, arguments))
        for process in started:
            process.wait()
        for kind, folder in folders.items():
            for name in ("log", "records"):
                shutil.copy(folder / name, KEPT / f"{kind}.{name}")
        return {kind: collect(folder) for kind, folder in folders.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--off", default="plain")
    parser.add_argument("--on", default="auto")
    given, arguments = parser.parse_known_args()
    config = tomllib.loads((HERE / "suite.toml").read_text("utf-8"))
    runs = run_all([given.off, given.on], config, arguments)
    wrong, n_passed, n_runnable = judge(runs, config, partial=bool(arguments))
    compared = compare(runs[given.off].records, runs[given.on].records, named(config, "not_compared"))
    wrong += compared.differences
    if not compared.n_drafted and not arguments:
        wrong.append(f"nothing was drafted with --spec-type {given.on}")
    for line in wrong:
        print(line)
    print(
        f"{n_passed} passed of {n_runnable} runnable, off and on ({given.off} and {given.on}), "
        f"{compared.n_bodies} bodies compared, {len(compared.differences)} differ, "
        f"{compared.n_accepted} of {compared.n_drafted} drafted tokens accepted"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
