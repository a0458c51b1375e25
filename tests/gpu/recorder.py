"""A row of what a run of these tests showed, for bench/results: outcomes, tokens compared, what was excused.

Tests give it texts and figures as user properties; conftest.py registers it where DRAFTWOOD_GPU_ROWS names a
file. Must not know: any one test. Test: tests/unit/test_gpu_rows.py.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from pathlib import Path

import pytest
from draftwood.bench import results
from draftwood.errors import DraftwoodError

from bench.gpu import suite

TEXT, FIGURES, OP_ERROR = "text", "figures", "op_error"


class Recorder:
    """A pytest plugin; the row is appended when the session ends, however it does.

    With workers (xdist) it sees their reports, and not what they deselected.
    """

    def __init__(self, path: Path, config: pytest.Config) -> None:
        try:
            results.check_writable("DRAFTWOOD_GPU_ROWS", path)
            self._origin = suite.origin()
        except DraftwoodError as error:
            raise pytest.UsageError(str(error)) from error
        self._path, self._begin = path, time.monotonic()
        self._outcomes, self._skips = Counter(), Counter()
        self._failures, self._properties = [], []
        self._config = config
        root = config.rootpath
        tests = [os.path.relpath(root.joinpath(config.invocation_params.dir, a), root) for a in config.args]
        chosen = config.option
        workers = getattr(chosen, "numprocesses", None)
        self._has_workers = bool(workers)
        self._settings = suite.settings(os.environ, tests, chosen.keyword, chosen.markexpr, workers or 1)

    def pytest_deselected(self, items):
        self._outcomes["deselected"] += len(items)

    def pytest_collectreport(self, report):
        if report.nodeid in self._failures:
            return  # each worker collects it
        if report.failed:
            self._count("errors", report.nodeid)
            self._say(f"{report.nodeid} was not collected\n{report.longreprtext}")
        elif report.skipped:
            self._skip(report)

    def pytest_runtest_logreport(self, report):
        if report.failed:
            around = report.when in ("setup", "teardown")  # neither, nor "call", where a worker crashed
            self._count("errors" if around else "failed", report.nodeid)
            said = (report.longreprtext, report.capstdout, report.capstderr)
            self._say("\n".join((f"{report.nodeid} failed{f' in {report.when}' * around}", *said)))
        elif report.skipped:
            self._skip(report)
        elif report.when == "call":
            self._outcomes["passed"] += 1
        if report.when == "teardown":  # fixtures had their say
            self._properties += [(report.nodeid, *each) for each in report.user_properties]

    def _say(self, text):
        """Say it now: pytest prints failures at the end, which a killed run never reaches."""
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        terminal.ensure_newline()
        terminal.write_line(text)

    def _count(self, what, nodeid):
        self._outcomes[what] += 1
        self._failures.append(nodeid)

    def _skip(self, report):
        self._outcomes["skipped"] += 1
        self._skips[report.longrepr[2].removeprefix("Skipped: ")] += 1  # of (path, line, reason)

    @pytest.hookimpl(tryfirst=True)  # xdist waits seconds for its workers in it
    def pytest_sessionfinish(self, exitstatus):
        empty = suite.nothing(self._settings)
        unknown = {"deselected": None} if self._has_workers else {}
        row = {
            **self._origin,
            **empty,
            "outcomes": empty["outcomes"] | self._outcomes | unknown,
            "failures": self._failures,
            "skips": dict(self._skips),
            "seconds": round(time.monotonic() - self._begin, 1),
            "watched": sanitized(),
            **self._compared(),
            "figures": {nodeid: value for nodeid, name, value in self._properties if name == FIGURES},
            "op_error": max((value for _, name, value in self._properties if name == OP_ERROR), default=None),
            "exit": int(exitstatus),
        }
        # a logit may be no number; a row of results must be one that any JSON reader takes
        results.append(self._path, json.loads(json.dumps(row, default=float), parse_constant=str))

    def _compared(self):
        texts = {nodeid: value for nodeid, name, value in self._properties if name == TEXT}
        if not texts:
            return {}
        each = list(texts.values())
        sums = {name: sum(text[name] for text in each) for name in ("tokens", "mismatches", "excused")}
        margins = [text["margin"] for text in each]
        return {
            **sums,
            "largest_excused_share": max(text["share_excused"] for text in each),
            "margins": [min(margins), max(margins)],
            "widest": max(text["widest"] for text in each),
            "texts": texts,
        }


def sanitized() -> bool:
    """Tell whether compute-sanitizer's library is in this process: else it would find nothing, and say so."""
    try:
        return "sanitizer" in Path("/proc/self/maps").read_text(encoding="utf-8")
    except OSError:
        return False
