"""What the newest runs of tests/gpu show: green with CUDA graphs and without, text excused, sanitizers clean.

Must not know: how rows came about. Test: tests/unit/test_gpu_rows.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bench.gpu.claims import Verdict
from bench.gpu.suite import PARTS, SMALLEST

EXCUSED = 0.002  # share of a text's tokens, as the tests have it
_GREEN = {
    "on": "tests on the card with CUDA graphs",
    "off": "tests on the card without CUDA graphs",
    "pageable": "tests of text without pinned memory",
}
_TOOLS = ("memcheck", "racecheck")


def judge(rows: list[dict[str, Any]]) -> list[Verdict]:
    """Return a verdict on each claim. Those of tests are about one commit, that of the newest such row."""
    green = [row for row in rows if _part(row) in _GREEN]
    commit = green[-1]["commit"] if green else None
    newest = {_part(row): row for row in green if row["commit"] == commit}
    verdicts = [_green(text, newest.get(part), commit) for part, text in _GREEN.items()]
    return [*verdicts, _excused(newest), *_sanitized(rows, commit)]


def _part(row: dict[str, Any]) -> str | None:
    """Return which of the parts in _GREEN a run was, whoever started it; None for a piece of one."""
    if row.get("sanitizer") or row["watched"]:
        return None
    return next((name for name in _GREEN if PARTS[name].settings == row["settings"]), None)


def _green(text: str, row: dict[str, Any] | None, commit: str | None) -> Verdict:
    if row is None:
        return Verdict(f"{text}: no row{f' of {commit[:12]}' if commit else ''}", None)
    faults = _faults(row)
    skips = "".join(f"; {n} skipped: {reason}" for reason, n in row["skips"].items())
    counts = f"{row['outcomes']['passed']} passed at {row['commit'][:12]} in {row['seconds'] or 0:.0f} s"
    return Verdict(f"{text}: {counts}{skips}{_words(faults)}", not faults)


def _faults(row: dict[str, Any]) -> list[str]:
    """Say why a run does not show that all tests pass."""
    counts = row["outcomes"]
    found = [f"{counts[what]} {what}" for what in ("failed", "errors", "skipped") if counts[what]]
    if row["exit"] != 0:
        found.append(f"ended with status {row['exit']}")
    if not counts["passed"]:
        found.append("nothing passed")
    if row["modified"]:
        found.append("of a modified tree")
    return found


def _words(faults: list[str]) -> str:
    return f"; does not count: {', '.join(faults)}" if faults else ""


def _excused(newest: dict[str | None, dict[str, Any]]) -> Verdict:
    text = f"texts on the card are plain decode's, at most {EXCUSED:.1%} of one excused"
    found = [row for row in newest.values() if row["texts"]]
    if not found:
        return Verdict(f"{text}: no row", None)
    sums = {name: sum(row[name] for row in found) for name in ("tokens", "mismatches", "excused")}
    share = max(row["largest_excused_share"] for row in found)
    missing = [name for name in _GREEN if name not in {_part(row) for row in found}]
    modified = ["of a modified tree"] if any(row["modified"] for row in found) else []
    words = ", ".join(f"{n} {name}" for name, n in sums.items())
    without = f"; without {', '.join(missing)}" if missing else ""
    holds = sums["mismatches"] == 0 and share <= EXCUSED and not modified
    return Verdict(
        f"{text}: {words}, largest share {share:.3%}{without}{_words(modified)}",
        None if missing and holds else holds,
    )


def _sanitized(rows: list[dict[str, Any]], commit: str | None) -> Iterator[Verdict]:
    """Of each tool on the smallest shapes, and of what else ran under one, at the commit of the tests."""
    newest = {
        (row["sanitizer"]["tool"], row["settings"]["only"]): row for row in rows if row.get("sanitizer")
    }
    for tool, only in dict.fromkeys([*((tool, SMALLEST) for tool in _TOOLS), *newest]):
        text = f"ops under compute-sanitizer's {tool}, {f'-k {only}' if only else 'all tests'}"
        row = newest.get((tool, only))
        if row is None or commit not in (None, row["commit"]):
            yield Verdict(f"{text}: no row{f' of {commit[:12]}' if commit else ''}", None)
            continue
        findings = row["sanitizer"]["findings"]
        faults = _faults(row)
        if not row["watched"]:
            faults.append("the sanitizer was not in the process")
        said = "no summary" if findings is None else f"{findings} findings"
        counts = f"{row['outcomes']['passed']} passed at {row['commit'][:12]}"
        yield Verdict(f"{text}: {said}, {counts}{_words(faults)}", findings == 0 and not faults)
