"""Replies of llama-server in two runs of one suite, compared but for times and names.

Must not know: what the suite asks. Test: tests/unit/test_server_suite.py.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Collection
from itertools import zip_longest
from typing import Any, NamedTuple

# what no two runs have in common: times, drawn names, which slot was free and what it held, what drafts
VOLATILE = re.compile(
    r"id|.*_id|id_.*|created|.*_at|t_.*|.*_ms|.*_per_second|draft_n|draft_n_accepted|speculative.*|media_marker|"
    r"cache_n|prompt_n|cached_tokens"
)
DRAWN = [
    (re.compile(r"127\.0\.0\.1:\d+"), "127.0.0.1:PORT"),
    (re.compile(r'"--port", *"\d+"'), '"--port", "PORT"'),
    # counted at decodes, which drafts make fewer
    (re.compile(r".*llamacpp:(\w+_seconds|n_decode|n_busy_slots|n_tokens_max|spec_decode_).*"), ""),
]


class Record(NamedTuple):
    test: str
    request: str  # method, path and body
    status: int
    body: str
    whole: bool  # read to its end


class Comparison(NamedTuple):
    differences: list[str]
    n_bodies: int
    n_drafted: int
    n_accepted: int


def without_volatile(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_volatile(each) for key, each in value.items() if not VOLATILE.fullmatch(key)}
    return [without_volatile(each) for each in value] if isinstance(value, list) else value


def undrawn(text: str) -> str:
    for pattern, word in DRAWN:
        text = pattern.sub(word, text)
    return text


def events(record: Record) -> list[str]:
    """Return status and events of a stream, or status and body. An event that was cut off is left out."""
    found = []
    for line in [record.body] if record.body.startswith("{") else record.body.split("\n"):
        try:
            found.append(json.dumps(without_volatile(json.loads(line.removeprefix("data: ")))))
        except ValueError:
            found += [line] if record.whole else []
    return [str(record.status), *filter(None, map(undrawn, found))]


def first_difference(one: Record, other: Record) -> tuple[str, str] | None:
    """Compare two replies event by event; of a stream that a test left, what both runs have read."""
    cut = not (one.whole and other.whole)
    for left, right in zip_longest(events(one), events(other), fillvalue=""):
        if cut and not (left and right):
            return None
        if left != right:
            return left, right
    return None


def grouped(records: list[Record]) -> dict[tuple[str, str], list[Record]]:
    """Replies by test and request. Of a GET the last one: tests ask until something has happened."""
    groups: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for each in records:
        key = each.test, undrawn(each.request)
        if each.request.startswith("GET /health"):
            continue  # tests start with it
        groups[key] = [each] if each.request.startswith("GET") else [*groups[key], each]
    for each in groups.values():
        each.sort(key=events)  # those of parallel requests come in any order
    return groups


def compare(off: list[Record], on: list[Record], not_compared: Collection[str]) -> Comparison:
    """Compare two runs, tests of some functions left out."""
    differences, n_bodies = [], 0
    groups, others = grouped(off), grouped(on)
    for test, request in sorted(groups.keys() | others.keys()):
        if test.partition("[")[0] in not_compared:
            continue
        left, right = groups[test, request], others[test, request]
        n_bodies += len(left)
        if len(left) != len(right):
            differences.append(f"replies: {len(left)} and {len(right)}: {test}: {request[:200]}")
        for one, other in zip(left, right, strict=False):
            if pair := first_difference(one, other):
                differences.append("\n  ".join([f"differs: {test}: {request[:200]}", *pair]))
    drafted, accepted = (
        sum(int(n) for each in on for n in re.findall(rf'"{name}": ?(\d+)', each.body))
        for name in ("draft_n", "draft_n_accepted")
    )
    return Comparison(differences, n_bodies, drafted, accepted)
