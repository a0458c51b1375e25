"""Rows of bench/results out of what runs found: a case's restarts become one row.

The candidate is held against our plain decode of the same process and repeat; `ratio` is our tokens a second
over those of llama-server with as many drafts accepted alike. Must not know: how it was measured.
Test: tests/unit/test_bench_run_rows.py.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from typing import Any

from bench.gpu.cases import Case
from bench.gpu.files import Reads
from bench.gpu.work import BenchError

SCHEMA = 1
CELLS = {"F16": 1.0, "Q8_0": 17 / 32}
"""Bytes of a position's keys and values in a cache, in parts of those of F16."""
_HELD = (  # no counters: what is held now, a limit, a mean
    *("checkpoints", "checkpoint_bytes", "drafter_bytes", "graph_bytes", "tree_bytes"),
    *("row_limit", "tokens_per_round", "draft_vocab"),
)
_SPREAD = (
    "ours",
    "plain",
    "speedup",
    "stock",
    "stock_plain",
    "stock_speedup",
    "ratio",
    "overhead",
    "bound_share",
    "queued_speedup",
    "of_resident",
    "hit_rate",
    "served",
    "served_plain",
    "served_of_library",
    "served_of_stock",
)


def slug(card: str) -> str:
    """Return a card's name for files: "NVIDIA H100 80GB HBM3" -> "h100"."""
    words = [w for w in card.split() if w != "NVIDIA" and not re.search(r"\d+GB|HBM", w)]
    return re.sub(r"[^a-z0-9]+", "-", " ".join(words).lower()).strip("-")


def of_run(state: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each case that a run measured, and for the memory of its trees.

    Errors: BenchError for what was measured without a card or a commit.
    """
    rows = []
    for name, found in state["cases"].items():
        restarts = list(found.values())
        rows.append({**_common(state, restarts[-1]), **of_case(state, name, restarts)})
    for model, found in state.get("memory", {}).items():
        common = {**_common(state, found), "case": "tree-memory", "model": model, "unit": "bytes"}
        rows += [{**common, "nodes": int(nodes), **sizes} for nodes, sizes in found["trees"].items()]
    return rows


def require_origin(origin: dict[str, Any]) -> None:
    """Make sure that a run says which card and commit it is of. Errors: BenchError."""
    if not origin.get("cards"):
        raise BenchError(
            "found a run without a card; expected one of a GPU", hint="bench/run.py run cases, there"
        )
    if not origin.get("commit"):
        raise BenchError("found a run that names no commit; expected one", hint="tools/gpu.sh pack")


def _common(state: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    require_origin(found["origin"])
    return {"schema": SCHEMA, "run": state["run"], **found["origin"]}


def of_case(state: dict[str, Any], name: str, restarts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a case's row: medians over restarts of what each found, and the smallest and largest of them."""
    case = Case(**restarts[0]["asked"])
    each = [figures(found) for found in restarts]
    figure = {key: _median([one.get(key) for one in each]) for key in each[0]}
    facts = restarts[0]["facts"]
    return {
        "case": name,
        "synthetic": case.drafter != "none",
        "text": "invalid: drafts were accepted by the schedule" if case.drafter != "none" else "the model's",
        **{
            field: getattr(case, field)
            for field in (
                "model",
                "nodes",
                "drafter",
                "shape",
                "auto",
                "sampler",
                "prompt",
                "warm",
                "cache",
                "experts",
                "guess",
                "clients",
            )
        },
        "schedule": {"length": case.length, "rates": [round(rate, 6) for rate in case.schedule]},
        "routing": state.get("models", {}).get(case.model, {}).get("routing"),
        "unit": "tok/s",
        **{key: _rounded(value) for key, value in figure.items()},
        "spread": {key: _spread([one.get(key) for one in each]) for key in _SPREAD},
        "restarts": len(restarts),
        "repeats": case.repeats,
        "rounds": case.rounds,
        "limit_pct": _limit(state, case, facts, figure),
        "counters": _counters(
            [turn["stats"] for found in restarts for turn in found.get("candidate", found["plain"])]
        ),
        "facts": facts,
    }


def figures(found: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of one restart; times in ms, speeds in tokens a second.

    t1_ms a plain step as users have it, sampling included. draft_ms a draft, begun and waited for by itself.
    tn_ms the forward pass of its rows: on a card the verify's graph run again and again by itself
    (side.REPLAYS), so that nothing of the host counts as forward; on a CPU the verify. bound_share: speed-up
    over L t1 / (tn + draft). overhead: the part of a round that is neither.
    """
    t1 = [turn["seconds"] / turn["tokens"] for turn in found["plain"]]
    got: dict[str, Any] = {
        "t1_ms": 1000 * _middle(t1),
        "plain": 1 / _middle(t1),
        "ours": 1 / _middle(t1),
    }
    got["stock_plain"] = _middle([turn["predicted_per_second"] for turn in found["stock_plain"]])
    got["stock"] = got["stock_plain"]
    if "resident" in found:
        got |= _pooled(found, t1)
    if "waiting" in found:
        got |= _queued(found, t1)
    if "candidate" in found:
        got |= _drafting(found, t1)
    if "stock" in found:
        # llama-server draws what it accepts: all repeats together come nearer to the schedule. Its clock
        # starts behind the first token, which the prompt gave.
        tokens = sum(turn["predicted_n"] - 1 for turn in found["stock"])
        accepted = sum(turn.get("draft_n_accepted", 0) for turn in found["stock"])
        got["stock"] = 1000 * tokens / sum(turn["predicted_ms"] for turn in found["stock"])
        got["stock_stream"] = _middle([turn["stream_per_second"] for turn in found["stock"]])
        got["stock_length"] = tokens / (tokens - accepted)
        got["stock_speedup"] = got["stock"] / got["stock_plain"]
        if "served" in found:
            got |= _served(found, got)
    elif "candidate" in found:
        got["stock"] = None
    got["ratio"] = got["ours"] / got["stock"] if got["stock"] else None
    return got


def _queued(found: dict[str, Any], t1: Sequence[float]) -> dict[str, Any]:
    """Return what queued steps gain: ms of one that waits, speed beside these, part of the steps."""
    waiting = [turn["seconds"] / turn["tokens"] for turn in found["waiting"]]
    stats = [turn["stats"] for turn in found["plain"]]
    return {
        "waiting_ms": 1000 * _middle(waiting),
        "queued_speedup": _middle([each / own for each, own in zip(waiting, t1, strict=True)]),
        "queued_part": sum(one["queued_steps"] for one in stats) / sum(one["rounds"] for one in stats),
    }


def _served(found: dict[str, Any], got: dict[str, Any]) -> dict[str, Any]:
    """Return what our llama-server does with the case's clients, beside the library and stock's.

    served_of_library: with one client, as its stream comes, of what the library gives. served_of_stock: of
    stock's faster way, plain or drafting.
    """
    plain, drafts = (
        _middle([turn["stream_per_second"] for turn in found[name]]) for name in ("served_plain", "served")
    )
    tokens = sum(turn["predicted_n"] - 1 for turn in found["served"])
    accepted = sum(turn.get("draft_n_accepted", 0) for turn in found["served"])
    best = max(got["stock_stream"], _middle([turn["stream_per_second"] for turn in found["stock_plain"]]))
    alone = not any(turn.get("clients") for turn in found["served"])
    return {
        "served_plain": plain,
        "served": drafts,
        "served_length": tokens / (tokens - accepted),
        "served_speedup": drafts / plain,
        "served_of_library": drafts / got["ours"] if alone else None,
        "served_of_stock": drafts / best,
    }


def _pooled(found: dict[str, Any], t1: Sequence[float]) -> dict[str, Any]:
    """Return what experts beyond the card cost plain decode: beside a model on the card, in the same process.

    bytes_missed: copied to the card a token. hit_rate: of experts that a layer asked for. guessed: experts a
    token that were fetched before their router had chosen. guess_rate: of these, those that it then chose.
    """
    resident = [turn["seconds"] / turn["tokens"] for turn in found["resident"]]
    counted = [turn["experts"] for turn in found["plain"]]
    asked = sum(one["hits"] + one["misses"] + one["in_place"] for one in counted)
    return {
        "resident_ms": 1000 * _middle(resident),
        "of_resident": _middle([r / own for r, own in zip(resident, t1, strict=True)]),
        "bytes_missed": sum(one["bytes_missed"] for one in counted)
        / sum(turn["tokens"] for turn in found["plain"]),
        "hit_rate": sum(one["hits"] for one in counted) / asked if asked else 0.0,
        "in_place": sum(one["in_place"] for one in counted) / asked if asked else 0.0,
        "guess_rate": sum(one["right"] for one in counted) / max(1, sum(one["guessed"] for one in counted)),
        "guessed": sum(one["guessed"] for one in counted) / sum(turn["tokens"] for turn in found["plain"]),
        "expert_bytes": counted[-1]["device_bytes"],
    }


def _drafting(found: dict[str, Any], t1: Sequence[float]) -> dict[str, Any]:
    turns = found["candidate"]
    step = _middle(t1)
    round_s = _middle([turn["seconds"] / turn["rounds"] for turn in turns])
    draft, forward = (
        _middle([t for turn in found["parts"] for t in turn[part]]) for part in ("draft", "forward")
    )
    length = sum(turn["tokens"] for turn in turns) / sum(turn["rounds"] for turn in turns)
    speedup = _middle([own / (turn["seconds"] / turn["tokens"]) for own, turn in zip(t1, turns, strict=True)])
    bound = length * step / (forward + draft)
    phases = {
        f"{name}_ms": 1000 * _middle([turn["phases"][name] / turn["rounds"] for turn in turns])
        for name in turns[0]["phases"]
    }
    return {
        "ours": _middle([turn["tokens"] / turn["seconds"] for turn in turns]),
        "speedup": speedup,
        "length": length,
        "round_ms": 1000 * round_s,
        "tn_ms": 1000 * forward,
        "draft_ms": 1000 * draft,
        **phases,
        "bound": bound,
        "bound_share": speedup / bound,
        "overhead": (round_s - draft - forward) / round_s,
    }


def _limit(state: dict[str, Any], case: Case, facts: dict[str, Any], figure: dict[str, Any]) -> float | None:
    """Return what the bytes of a round take at the card's copy bandwidth, in percent of what it took.

    None where bandwidth, bytes or the union of experts for so many rows were not measured.
    """
    model, floor = state.get("models", {}).get(case.model, {}), state.get("floor")
    union = union_of(model, facts["mean_nodes"])
    if floor is None or union is None:
        return None
    counted = Reads(**model["reads"])
    n_past = case.prompt + case.rounds * (figure.get("length") or 1.0) / 2
    n_bytes = counted.forward(union, n_past * CELLS[case.cache])
    head = counted.head * (facts["draft_vocab"] or facts["n_vocab"]) / facts["n_vocab"]
    if case.drafter == "mtp":
        n_bytes += case.drafts * (counted.mtp + head)
    if case.drafter == "dflash":
        n_bytes += model["drafter_bytes"] + head
    took = (figure.get("round_ms") or figure["t1_ms"]) / 1000
    return round(100 * n_bytes / floor["bytes_per_second"] / took, 2)


def union_of(model: dict[str, Any], n_rows: float) -> float | None:
    """Return how many experts n_rows rows choose in a layer, on a line between measured numbers of rows."""
    if "reads" not in model:
        return None
    known = {1: float(model["reads"]["n_used"])} | {
        int(n): union for n, union in model.get("unions", {}).items()
    }
    under, over = (
        max(n for n in known if n <= n_rows),
        min((n for n in known if n >= n_rows), default=None),
    )
    if over is None:
        return None
    return known[under] + (known[over] - known[under]) * (n_rows - under) / max(over - under, 1)


def _counters(stats: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Add the engine's counters of all timed segments up."""
    total: dict[str, Any] = {}
    for one in stats:
        for name, value in one.items():
            if name in _HELD or isinstance(value, (str, bool)):
                continue
            if isinstance(value, list):
                before = total.get(name, [])
                n = max(len(before), len(value))
                pairs = zip(*([*each, *[0] * (n - len(each))] for each in (before, value)), strict=True)
                total[name] = [a + b for a, b in pairs]
            else:
                total[name] = round(total.get(name, 0) + value, 6)
    return total


def _middle(values: Sequence[float]) -> float:
    return statistics.median(values)


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _spread(values: Sequence[float | None]) -> list[float] | None:
    known = [value for value in values if value is not None]
    return [_rounded(min(known)), _rounded(max(known))] if known else None


def _rounded(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def kernels(state: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each profiled case."""
    return [
        {**_common(state, found), "case": case, "unit": "us", **_without(found, "origin", "asked")}
        for case, found in state.get("profile", {}).items()
    ]


def of_real(state: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the row of `draftwood bench` if it ran; an installed draftwood knows no commit itself."""
    if "real" not in state:
        return []
    origin = state["real"]["origin"]
    require_origin(origin)
    return [{**state["real"]["document"], **{name: origin[name] for name in ("commit", "modified")}}]


def _without(found: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in found.items() if name not in names}
