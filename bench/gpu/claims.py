"""What issue 5 wants shown on a card, held against the newest rows. Must not know: how rows came about.

Test: tests/unit/test_bench_run_rows.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from bench.gpu.cases import Case

HEADLINE_RESTARTS = 5
BOUND_SHARE = 0.90
OVERHEAD = 0.08
REPLAYED = 0.98
ROUNDS = 512
N_KV = 1024  # a graph reads the cache in whole pieces of so many cells: one more piece is another graph
LENGTH_OFF = 0.02  # by how much the mean length may miss the schedule's
TREE_NODES = (16, 24)
REAL_MODES = ("off", "mtp", "tree", "auto")


@dataclass(frozen=True, slots=True)
class Verdict:
    """One line of issue 5; `holds` None: not measured."""

    text: str
    holds: bool | None


def judge(cases: Mapping[str, Case], rows: list[dict[str, Any]], real: list[dict[str, Any]]) -> list[Verdict]:
    """Return a verdict on each claim; the newest row of a case counts."""
    newest = {(row["case"], row.get("nodes")): row for row in rows}
    by_case = {name: row for (name, _), row in newest.items()}
    verdicts: list[Verdict] = []
    for name, case in cases.items():
        if case.floor:
            verdicts += _speed(name, case, by_case.get(name))
    verdicts += _overhead(cases, by_case)
    verdicts += _replays(cases, by_case)
    verdicts += [_memory(nodes, newest.get(("tree-memory", nodes))) for nodes in TREE_NODES]
    return [*verdicts, _real(real)]


def _speed(name: str, case: Case, row: dict[str, Any] | None) -> Iterator[Verdict]:
    floor = f"{name}: {case.floor}x of own plain decode"
    share = f"{name}: {BOUND_SHARE} of L t1 / (t_n + t_draft)"
    if row is None:
        yield from (Verdict(f"{text}: no row", None) for text in (floor, share))
        return
    faults = _faults(case, row)
    low, high = row["spread"]["speedup"]
    stock = f"stock {row['stock_speedup']:.2f}x" if row.get("stock_speedup") else "stock not measured"
    found = f"{row['speedup']:.2f}x [{low:.2f}, {high:.2f}], {stock}, {row['ratio'] or 0:.2f} of its tok/s"
    yield Verdict(f"{floor}: {found}{faults}", row["speedup"] >= case.floor and not faults)
    times = {"t1": "t1_ms", "t_n": "tn_ms", "t_draft": "draft_ms", "round": "round_ms"}
    parts = ", ".join(f"{name} {row[key]:.2f}" for name, key in times.items()) + " ms"
    yield Verdict(
        f"{share}: {row['bound_share']:.3f} ({parts}){faults}",
        row["bound_share"] >= BOUND_SHARE and not faults,
    )


def _faults(case: Case, row: dict[str, Any]) -> str:
    """Say why a headline row does not count; "" where it does."""
    found = []
    if row["restarts"] < HEADLINE_RESTARTS:
        found.append(f"{row['restarts']} restarts instead of {HEADLINE_RESTARTS}")
    if abs(row["length"] / case.length - 1) > LENGTH_OFF:
        found.append(f"length {row['length']:.2f} instead of {case.length}")
    if row["nodes"] != case.nodes:
        found.append(f"{row['nodes']} nodes instead of {case.nodes}")
    if row["modified"]:
        found.append("of a modified tree")
    return _not_counting(found)


def _not_counting(faults: list[str]) -> str:
    return f"; does not count: {', '.join(faults)}" if faults else ""


def _overhead(cases: Mapping[str, Case], rows: Mapping[str, dict[str, Any]]) -> Iterator[Verdict]:
    for sampler in ("greedy", "default"):
        text = f"overhead of a round at most {OVERHEAD:.0%}, {sampler} sampler, {ROUNDS} rounds in all"
        wanted = [name for name, case in cases.items() if _counts(case) and case.sampler == sampler]
        found, missing = _of(rows, wanted)
        figures = ", ".join(
            f"{name} {row['overhead']:.1%} ({_runs(row)} x {row['rounds']})" for name, row in found.items()
        )
        few = [name for name, row in found.items() if row["rounds"] * _runs(row) < ROUNDS]
        notes = missing + "".join(f"; {name}: fewer rounds" for name in few)
        holds = not few and all(row["overhead"] <= OVERHEAD for row in found.values())
        yield Verdict(f"{text}: {figures or 'no row'}{notes}", None if missing else holds)


def _counts(case: Case) -> bool:
    """Tell whether claims about rounds rest on a case: the headline ones, and other samplers than theirs."""
    return not case.auto and (case.floor > 0 or (case.drafter == "mtp" and case.sampler != "greedy"))


def _of(rows: Mapping[str, dict[str, Any]], wanted: list[str]) -> tuple[dict[str, dict[str, Any]], str]:
    """Return the rows that count of the cases wanted, and what is missing of them in words."""
    found = {name: rows[name] for name in wanted if name in rows and not rows[name]["modified"]}
    missing = "".join(f"; {name}: no row of a clean tree" for name in wanted if name not in found)
    return found, missing or ("" if wanted else "; no case")


def _replays(cases: Mapping[str, Case], rows: Mapping[str, dict[str, Any]]) -> Iterator[Verdict]:
    for auto in (False, True):
        text = f"CUDA graphs replayed in {REPLAYED:.0%} of launches, auto {'on' if auto else 'off'}"
        text += f", {ROUNDS} rounds of one run across an n_kv of {N_KV:,}"
        wanted = [name for name, case in cases.items() if (case.auto if auto else _counts(case))]
        found, missing = _of(rows, wanted)
        shares = {name: replayed(row["counters"]) for name, row in found.items()}
        notes = missing + "".join(
            f"; {name}: none counted" for name, share in shares.items() if share is None
        )
        known = {name: share for name, share in shares.items() if share is not None}
        short = {name: fault for name in known if (fault := _too_short(found[name]))}
        figures = ", ".join(f"{name} {share:.2%}" for name, share in known.items() if name not in short)
        beside = ", ".join(f"{name} {known[name]:.2%} ({fault})" for name, fault in short.items())
        beside = f"; beside, for themselves not enough: {beside}" if beside else ""
        # those count against it all the same: the shorter a run, the more of it are captures
        holds = all(share >= REPLAYED for share in known.values())
        yield Verdict(
            f"{text}: {figures or 'no row'}{beside}{notes}",
            None if notes or len(short) == len(known) else holds,
        )


def _runs(row: dict[str, Any]) -> int:
    """Return how many texts a row's rounds are of; each begins at the prompt."""
    return int(row["restarts"] * row["repeats"])


def _too_short(row: dict[str, Any]) -> str:
    """Say why a run of a row has fewer rounds, or less of a text, than its launches should be of; "" if not.

    Rows before "warm" do not say how far behind its prompt a run's clock starts: then wherever that is.
    """
    rounds, emitted = (row["counters"][name] // _runs(row) for name in ("rounds", "emitted"))
    if rounds < ROUNDS:
        return f"{rounds} rounds a run"
    warm = row["warm"] * row["nodes"] + 1 if "warm" in row else N_KV
    starts = range(row["prompt"], row["prompt"] + warm + 1)
    if all((first + row["nodes"]) // N_KV < (first + emitted - 1) // N_KV for first in starts):
        return ""
    return f"{emitted} tokens behind a prompt of {row['prompt']}: not told whether across an n_kv"


def replayed(counters: Mapping[str, Any]) -> float | None:
    """Return which part of a row's graph launches were replays; None where they are not counted."""
    launches = counters.get("gpu_launches")
    return counters["gpu_replays"] / launches if launches else None


def _memory(nodes: int, row: dict[str, Any] | None) -> Verdict:
    text = f"state of a tree of {nodes} nodes beside as many snapshots"
    if row is None or "tree_bytes" not in row:
        return Verdict(f"{text}: {row['refused'] if row else 'no row'}", None)
    ours, theirs = row["tree_bytes"], row["snapshot_bytes"]
    faults = _not_counting(["of a modified tree"] if row["modified"] else [])
    found = f"{ours / 1e6:.1f} MB, snapshots {theirs / 1e6:.1f} MB"
    return Verdict(f"{text}: {found}{faults}", ours < theirs and not faults)


def _real(rows: list[dict[str, Any]]) -> Verdict:
    text = "tiny-moe on the card with real acceptance"
    newest = next((row for row in reversed(rows) if row.get("n_gpu_layers")), None)
    if newest is None:
        return Verdict(f"{text}: no row", None)
    ratios: dict[str, list[float]] = {}
    for figure in newest["figures"]:
        ratios.setdefault(figure["mode"], []).append(figure["ratio"])
    figures = ", ".join(f"{mode} {min(found):.2f} to {max(found):.2f}x" for mode, found in ratios.items())
    missing = [mode for mode in REAL_MODES if mode not in ratios]
    faults = _not_counting(["of a modified tree"] if newest["modified"] else [])
    without = f"; without {', '.join(missing)}" if missing else ""
    return Verdict(f"{text}: {figures}{without}{faults}", not (missing or faults))
