"""The stage `cases`: each case, restart by restart, all four sides in turn.

A restart is a fresh process of ours and a fresh llama-server; the cases follow each other in it. In a repeat
plain decode, the candidate, and llama-server without and with drafting take turns, each idle while another
runs, in an order that alternates; and the candidate's drafts and forward passes are timed one by one.
Must not know: what figures are for. Test: tests/model/test_bench_run.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from typing import Any

from bench.gpu import stock
from bench.gpu.cases import Case
from bench.gpu.files import Files
from bench.gpu.schedule import mean_length
from bench.gpu.stock import Server
from bench.gpu.work import BenchError, Clock, Work
from bench.gpu.worker import Worker, serve

# seconds that a step may take: a load reads 20 GiB from the disk cache
LOAD, OPEN, TURN = 240.0, 180.0, 120.0
_FIRST_CASE = 60.0  # what a case is expected to take before one was timed


def run(
    work: Work,
    clock: Clock,
    cases: Sequence[Case],
    files: Files,
    say: Callable[[str], None],
    target: Callable[..., None] = serve,
) -> bool:
    """Measure what is missing of every case and restart. Return whether nothing is left to do.

    Errors: BenchError at the first step that fails.
    """
    slowest = _FIRST_CASE
    for restart in range(max(case.restarts for case in cases)):
        missing = [case for case in cases if restart < case.restarts and not _has(work, case, restart)]
        if not missing:
            continue
        if clock.left < 1.5 * slowest:
            return False
        with _sides(work, clock, missing[0], max(case.n_ctx for case in missing), files, target) as (
            ours,
            server,
        ):
            work.state["machine"] = ours.call(clock.limit(TURN), "machine")
            for case in missing:
                if clock.left < 1.2 * slowest:
                    return False
                begin = time.monotonic()
                found = _case(work, clock, case, files, ours, server, 1000 * restart + case.seed)
                slowest = max(time.monotonic() - begin, slowest if slowest != _FIRST_CASE else 0.0)
                work.state["cases"].setdefault(case.name, {})[str(restart)] = found
                work.save()
                say(f"{case.name}, restart {restart}: {time.monotonic() - begin:.1f} s")
    return True


def _has(work: Work, case: Case, restart: int) -> bool:
    found = work.state["cases"].get(case.name, {}).get(str(restart))
    if found is not None and found["case"] != _fields(case):
        raise BenchError(
            f"found {case.name} measured with other fields in {work.folder}; expected one setting a folder",
            hint="--work of another folder, or remove this one",
        )
    return found is not None


def _fields(case: Case) -> dict[str, Any]:
    return {**asdict(case), "rates": list(case.rates)}  # as JSON gives them back


@contextmanager
def _sides(
    work: Work, clock: Clock, case: Case, n_ctx: int, files: Files, target: Callable[..., None]
) -> Iterator[tuple[Worker, Server]]:
    """Start a process of ours and a server for plain decode side by side."""
    with ExitStack() as stack:
        server = Server(stock.common_flags(case, files.model, n_ctx), work.logs / "stock-plain.log")
        stack.callback(server.close)
        ours = Worker(files.model, files.drafter, work.logs / "ours.log", target)
        stack.callback(ours.close)
        server.ready(clock.limit(LOAD))
        yield ours, server


def _case(
    work: Work, clock: Clock, case: Case, files: Files, ours: Worker, server: Server, seed: int
) -> dict[str, Any]:
    with ExitStack() as stack:
        drafting = None
        if case.stock and case.drafter in ("mtp", "dflash"):
            flags = stock.common_flags(case, files.model, case.n_ctx + case.rounds * case.nodes)
            drafting = Server(
                [*flags, *stock.drafting_flags(case, files.drafter)], work.logs / "stock-drafts.log"
            )
            stack.callback(drafting.close)
        facts = ours.call(clock.limit(OPEN), "open", _fields(case))
        stack.callback(_close, ours)
        if drafting is not None:
            drafting.ready(clock.limit(LOAD))
        turns = _turns(case, clock, ours, server, drafting, facts["n_vocab"])
        found: dict[str, list[Any]] = {name: [] for name in turns}
        for name in ("stock_plain", "stock"):  # their first request captures graphs
            if name in turns:
                turns[name](seed)
        for repeat in range(case.repeats):
            for name in list(turns)[:: 1 if repeat % 2 == 0 else -1]:
                found[name].append(turns[name](seed + repeat))
        return {"case": _fields(case), "facts": facts, **found}


def _turns(
    case: Case, clock: Clock, ours: Worker, server: Server, drafting: Server | None, n_vocab: int
) -> dict[str, Callable[[int], Any]]:
    """Return what is done in a repeat, by name; each takes a seed."""
    prompt = case.prompt_of(n_vocab)
    turns: dict[str, Callable[[int], Any]] = {
        "plain": lambda seed: ours.call(clock.limit(TURN), "plain", seed),
        "stock_plain": lambda seed: server.complete(case, prompt, case.rounds, seed, clock.limit(TURN)),
    }
    if case.drafter != "none":
        turns["candidate"] = lambda seed: ours.call(clock.limit(TURN), "candidate", seed)
        turns["parts"] = lambda seed: ours.call(clock.limit(TURN), "parts", seed)
    if drafting is not None:
        n_tokens = round(case.rounds * mean_length(case.stock_schedule))
        turns["stock"] = lambda seed: drafting.complete(case, prompt, n_tokens, seed, clock.limit(TURN))
    return turns


def _close(ours: Worker) -> None:
    with suppress(BenchError):  # what went wrong before has been said
        ours.call(OPEN, "close")
