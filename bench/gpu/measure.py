"""The stage `cases`: each case, restart by restart, all four sides in turn.

A restart is a fresh process of ours and a fresh llama-server; the cases follow each other in it. In a repeat
plain decode, the candidate, and llama-server without and with drafting take turns, each idle while another
runs, in an order that alternates; and the candidate's drafts and forward passes are timed one by one.
Must not know: what figures are for. Test: tests/model/test_bench_run.py.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from bench.gpu import stock
from bench.gpu.cases import Case
from bench.gpu.files import Files
from bench.gpu.schedule import mean_length
from bench.gpu.stock import Server
from bench.gpu.work import BenchError, Clock, Work
from bench.gpu.worker import Worker

# seconds that a step may take: a load reads 20 GiB from the disk cache
LOAD, CLOSE, TURN = 240.0, 60.0, 120.0
_FIRST_CASE = 60.0  # what a case is expected to take before one was timed


def run(work: Work, clock: Clock, cases: Sequence[Case], files: Files, say: Callable[[str], None]) -> bool:
    """Measure what is missing of every case and restart. Return whether nothing is left to do.

    Errors: BenchError at the first step that fails.
    """
    took: list[float] = []
    for restart in range(max(case.restarts for case in cases)):
        wanted = [case for case in cases if restart < case.restarts]
        missing = [case for case in wanted if not work.kept(case.asked, *_path(case, restart))]
        if missing and not _restart(work, clock, missing, restart, files, say, took):
            return False
    return True


def _restart(
    work: Work,
    clock: Clock,
    cases: Sequence[Case],
    restart: int,
    files: Files,
    say: Callable[[str], None],
    took: list[float],
) -> bool:
    """Measure cases one after the other; False where the time left is too short for what one took so far."""
    if clock.left < max(took, default=_FIRST_CASE):
        return False
    with _sides(work, cases, files) as (ours, server):
        # first those that wait for this server: it is not to load beside others
        for case in sorted(cases, key=lambda each: not stock.serves(server.flags, each, files.model)):
            if clock.left < 1.2 * max(took, default=_FIRST_CASE):
                return False
            begin = time.monotonic()
            found = _case(work, clock, case, files, ours, server, 1000 * restart + case.seed)
            took.append(time.monotonic() - begin)
            work.keep(case.asked, found, *_path(case, restart))
            say(f"{case.name}, restart {restart}: {took[-1]:.1f} s")
    return True


def _path(case: Case, restart: int) -> tuple[str, str, str]:
    return "cases", case.name, str(restart)


@contextmanager
def _sides(work: Work, cases: Sequence[Case], files: Files) -> Iterator[tuple[Worker, Server]]:
    """Start a process of ours, and the server that most cases take for plain decode; both load at once."""
    with ExitStack() as stack:
        flags = _flags_of_most(cases, files)
        server = Server(flags, work.logs / "stock-plain.log")
        stack.callback(server.close)
        ours = Worker(files.model, files.drafter, work.logs / "ours.log")
        stack.callback(ours.close)
        yield ours, server


def _flags_of_most(cases: Sequence[Case], files: Files) -> list[str]:
    """Return the flags of plain decode that most cases want, with the longest context among these."""
    wanted: dict[tuple[str, ...], list[Case]] = defaultdict(list)
    for case in cases:
        wanted[tuple(stock.common_flags(case, files.model, 0))].append(case)
    sharing = max(wanted.values(), key=len)
    return stock.common_flags(sharing[0], files.model, max(case.n_ctx for case in sharing))


def _case(
    work: Work, clock: Clock, case: Case, files: Files, ours: Worker, server: Server, seed: int
) -> dict[str, Any]:
    with ExitStack() as stack:

        def started(name: str, n_ctx: int, *more: str) -> Server:
            made = Server([*stock.common_flags(case, files.model, n_ctx), *more], work.logs / f"{name}.log")
            stack.callback(made.close)
            return made

        if not stock.serves(server.flags, case, files.model):
            server = started("stock-own", case.n_ctx)
        servers = {"stock_plain": server}
        server.ready(clock.limit(LOAD))
        facts = ours.call(clock.limit(LOAD), "open", case.asked)  # alone: "auto" measures the machine there
        stack.callback(_close, ours)
        if case.stock and case.drafter in ("mtp", "dflash"):
            n_ctx = case.n_ctx + case.rounds * case.nodes
            servers["stock"] = started("stock-drafts", n_ctx, *stock.drafting_flags(case, files.drafter))
            if case.clients:
                drafts = stock.drafting_flags(case, files.drafter, ours=True)
                servers["served_plain"] = started("served-plain", n_ctx, "--spec-type", "plain")
                servers["served"] = started("served-drafts", n_ctx, *drafts)
        for each in servers.values():
            each.ready(clock.limit(LOAD))
        turns = _turns(case, clock, ours, servers, facts["n_vocab"])
        found: dict[str, list[Any]] = {name: [] for name in turns}
        for repeat in range(case.repeats):
            for name in list(turns)[:: 1 if repeat % 2 == 0 else -1]:
                found[name].append(turns[name](seed + repeat))
        return {"facts": facts, **found}


def _turns(
    case: Case, clock: Clock, ours: Worker, servers: dict[str, Server], n_vocab: int
) -> dict[str, Callable[[int], Any]]:
    """Return what is done in a repeat, by name; each takes a seed."""

    def own(method: str) -> Callable[[int], Any]:
        return lambda seed: ours.call(clock.limit(TURN), method, seed)

    def served(name: str) -> Callable[[int], Any]:
        length = mean_length(case.stock_schedule) if name in ("stock", "served") else 1.0

        def complete(seed: int) -> Any:
            for rounds in (case.warm, case.rounds):  # the first captures graphs, as ours does
                prompts = [case.prompt_of(n_vocab, seed, i) for i in range(max(1, case.clients))]
                n_tokens = round(rounds * length)
                replies = servers[name].serve(case, prompts, n_tokens, seed, clock.limit(TURN))
            return stock.together(replies)

        return complete

    mine = ["plain"] if case.drafter == "none" else ["plain", "candidate", "parts"]
    mine += ["waiting"] if case.waiting else []
    mine += ["resident"] if case.experts < 1.0 else []
    return {**{name: own(name) for name in mine}, **{name: served(name) for name in servers}}


def _close(ours: Worker) -> None:
    with suppress(BenchError):  # what went wrong before has been said
        ours.call(CLOSE, "close")
