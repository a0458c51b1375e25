"""Serve 1, 2, 4 and 8 clients with draftwood's llama-server and the stock one: replies, memory, speed.

    python bench/server_load.py [--minutes 10] [--clients 1 --clients 4] [--side SIDE]... [--results FILE]

Four servers have tiny-moe in memory and take turns of --turn seconds: draftwood drafting (`auto`) and not
(`plain`), and the llama-server of the unpatched pin without drafting (`stock`) and with MTP (`stock-mtp`),
built once into build/pristine. Each turn has as many good clients as asked, and four that misbehave: one goes
away in mid-reply, one reads slowly, one sends half a request, one sends nonsense. --minutes is each side's
time with each number of clients.

Each reply is held against the one that a client gets alone; wrong ones are kept in
build/server-load/wrong.jsonl. Memory and open files of each server are read before every turn. Before the
first one each serves the most clients for a turn: what a server keeps for each number of rows is there then.
Flat: the most of the last third of all readings is not over the most of the second third by more than 16 MiB,
with each number of clients and over the whole run, and in the end no more files are open than after the first
turn. Exit status 1 for a wrong or missing reply of ours, or growing memory. A line a side and number of
clients; the last line is JSON, also added to --results. `of_stock` is the median ratio of speeds in the same
turn. On two cores clients take time, too: figures are of the whole machine. Must not know: HTTP.
Test: tests/server/test_load.py.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import clients
import pristine
from draftwood.bench import facts, prompts
from draftwood.bench import results as rows_of_results
from draftwood.cli.serve import program
from draftwood.engine.engine import build_info

from models import HELDOUT, TINY_MOE

ROOT = Path(__file__).resolve().parent.parent
LOGS = ROOT / "build" / "server-load"
SCHEMA = 1
SLOTS = 8
N_CTX = 512  # of a slot
SLACK = 16 << 20  # bytes: the allocator's
LEAVING = 15.0  # seconds until a server has noticed that its clients left; on a busy machine it takes some
SIDES = {"auto": "auto", "plain": "plain", "stock": "none", "stock-mtp": "draft-mtp"}
OURS = ("auto", "plain")
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
)


def requests_of(per_category: int = 8) -> list[dict[str, Any]]:
    """Return bodies of /completion: held-out prompts of several lengths, greedy and seeded."""
    texts = [text for each in prompts.read([HELDOUT]).values() for text in each[:per_category]]
    return [
        {
            "prompt": text[: (120, 300, 700)[i % 3]],
            "n_predict": (16, 48, 96)[i // 3 % 3],
            "seed": i,
            "cache_prompt": False,
            **SAMPLING[i % 2],
        }
        for i, text in enumerate(texts)
    ]


@dataclass(slots=True)
class Server:
    """A llama-server that runs, and what was seen of it."""

    side: str
    url: str
    process: subprocess.Popen[bytes]
    seen: list[clients.Seen] = field(default_factory=list)
    took: list[float] = field(default_factory=list)
    """Seconds of each turn."""
    resident: list[int] = field(default_factory=list)
    files: list[int] = field(default_factory=list)
    readings: list[int] = field(default_factory=list)
    """Memory with all numbers of clients so far."""

    def look(self) -> None:
        """Read its memory and its open files."""
        folder = Path(f"/proc/{self.process.pid}")
        status = (folder / "status").read_text(encoding="utf-8")
        self.resident.append(
            next(int(s.split()[1]) << 10 for s in status.splitlines() if s.startswith("VmRSS"))
        )
        self.readings.append(self.resident[-1])
        self.files.append(self.open_files())

    def speeds(self) -> list[float]:
        """Return the tokens a second of each turn."""
        tokens = (sum(reply.n_tokens for reply in seen.replies) for seen in self.seen)
        return [n / took for n, took in zip(tokens, self.took, strict=True)]

    def open_files(self) -> int:
        """Return how many files are open now."""
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))


@contextmanager
def started(side: str, port: int, n_slots: int) -> Iterator[Server]:
    """Start a side's server and yield it when it is ready. Errors: click.ClickException with its log."""
    binary = program("llama-server") if side in OURS else pristine.server()
    # sequences with a KV cache of their own: in a unified one stock's sums run in another order
    flags = ["-c", str(n_slots * N_CTX), "-np", str(n_slots), "-no-kvu", "-t", "2", "--no-warmup"]
    LOGS.mkdir(parents=True, exist_ok=True)
    log = LOGS / f"{side}.log"
    command = [str(binary), "-m", str(TINY_MOE), "--port", str(port), "--spec-type", SIDES[side], *flags]
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT) as process:
        try:
            server = Server(side, f"http://127.0.0.1:{port}", process)
            _wait(server, log)
            yield server
        finally:
            process.terminate()


def _wait(server: Server, log: Path) -> None:
    end = time.monotonic() + 120
    while time.monotonic() < end and server.process.poll() is None:
        try:
            clients.alone(server.url, [{"prompt": "a", "n_predict": 1}])
            return
        except (OSError, clients.httpx.HTTPError):
            time.sleep(0.1)
    raise click.ClickException(f"{server.side} did not start:\n{log.read_text('utf-8', 'replace')[-2000:]}")


def measure(servers: Sequence[Server], n_clients: int, minutes: float, turn: float, wanted: Any) -> None:
    """Let the servers take turns until each had its minutes."""
    for server in servers:
        server.seen, server.took, server.resident, server.files = [], [], [], []
    number = 0
    while min(sum(servers[-1].took), sum(servers[0].took)) < 60 * minutes:
        for server in servers[:: 1 if number % 2 == 0 else -1]:
            server.look()
            begin = time.perf_counter()
            found = clients.turn(
                server.url, wanted, n_clients=n_clients, seconds=turn, n_bad=4, seed=1000 * n_clients + number
            )
            server.took.append(time.perf_counter() - begin)
            server.seen.append(found)
        number += 1
    for server in servers:
        end = time.monotonic() + LEAVING
        while server.open_files() > server.files[min(1, len(server.files) - 1)] and time.monotonic() < end:
            time.sleep(0.1)
        server.look()


def thirds(readings: Sequence[int]) -> list[int]:
    """Return the most of the second third of some readings, and the most of the last."""
    third = max(1, len(readings) // 3)
    return [max(readings[third : 2 * third] or readings), max(readings[-third:])]


def row_of(server: Server, texts: Sequence[str]) -> dict[str, Any]:
    """Return the figures of a side; times in ms."""
    replies = [reply for seen in server.seen for reply in seen.replies]
    first = sorted(1000 * reply.first for reply in replies)
    return {
        "side": server.side,
        "replies": len(replies),
        "tokens": sum(reply.n_tokens for reply in replies),
        "wrong": sum(reply.text != texts[reply.request] for reply in replies),
        "errors": dict(sum((seen.errors for seen in server.seen), Counter())),
        "bad": dict(sum((seen.bad for seen in server.seen), Counter())),
        "drafted": sum(reply.n_drafted for reply in replies),
        "accepted": sum(reply.n_accepted for reply in replies),
        "tok_s": round(statistics.median(server.speeds()), 1),
        "first_ms": [round(_part(first, part), 1) for part in (0.5, 0.95)],
        "resident": thirds(server.resident),
        "files": [server.files[min(1, len(server.files) - 1)], server.files[-1]],
        "turns": len(server.seen),
        "seconds": round(sum(server.took), 1),
    }


def of_stock(server: Server, stock: Server) -> float:
    """Return the median ratio of a side's speed to that of stock in the same turn: the machine changes."""
    pairs = zip(server.speeds(), stock.speeds(), strict=False)
    return round(statistics.median([own / other for own, other in pairs if other > 0] or [0.0]), 2)


def keep_wrong(server: Server, wanted: Sequence[dict[str, Any]], texts: Sequence[str]) -> None:
    """Add replies unlike those of a client alone to a file, for whoever looks for the cause."""
    with (LOGS / "wrong.jsonl").open("a", encoding="utf-8") as file:
        for seen in server.seen:
            for reply in seen.replies:
                if reply.text != (text := texts[reply.request]):
                    found = {
                        "side": server.side,
                        "body": wanted[reply.request],
                        "alone": text,
                        "text": reply.text,
                    }
                    file.write(json.dumps(found) + "\n")


def _part(values: Sequence[float], part: float) -> float:
    return values[min(len(values) - 1, int(part * len(values)))] if values else 0.0


def failures(row: dict[str, Any]) -> list[str]:
    """Return what a side of ours did wrong."""
    found = [f"{row['wrong']} wrong replies"] if row["wrong"] else []
    found += [f"{n} of {error}" for error, n in row["errors"].items()]
    refused = ("nonsense: 2", "nonsense: 5")  # it is to get a 400
    found += [f"{n} of {what}" for what, n in row["bad"].items() if what.startswith(refused)]
    found += growth(row["resident"])
    if row["files"][1] > row["files"][0]:
        found.append(f"{row['files'][0]} files were open, then {row['files'][1]}")
    return found


def growth(found: Sequence[int]) -> list[str]:
    """Return what is wrong with a side's memory as `thirds` has it."""
    return [f"memory grew from {found[0]} to {found[1]} bytes"] if found[1] > found[0] + SLACK else []


@click.command(help=__doc__.split("\n\n", maxsplit=1)[0])
@click.option("--minutes", type=click.FloatRange(0.01), default=10.0, show_default=True)
@click.option("--turn", type=click.FloatRange(1.0), default=20.0, show_default=True, help="Seconds.")
@click.option("--clients", "counts", multiple=True, type=click.IntRange(1, 64), default=(1, 2, 4, 8))
@click.option("--side", "sides", multiple=True, type=click.Choice(list(SIDES)), default=tuple(SIDES))
@click.option("--port", type=click.IntRange(1024, 65000), default=18080, show_default=True, help="The first.")
@click.option("--results", type=click.Path(dir_okay=False, path_type=Path))
def main(
    minutes: float,
    turn: float,
    counts: tuple[int, ...],
    sides: tuple[str, ...],
    port: int,
    results: Path | None,
) -> None:
    """Run the sides, show a line a row, add the document to the results."""
    if results:
        rows_of_results.check_writable("--results", results)
    origin = facts.machine(build_info())  # before another build takes its place
    wanted, table, wrong = requests_of(), [], []
    with ExitStack() as stack:
        servers = [stack.enter_context(started(side, port + i, SLOTS)) for i, side in enumerate(sides)]
        texts = {
            server.side: [reply.text for reply in clients.alone(server.url, wanted)] for server in servers
        }
        ours = [texts[side] for side in sides if side in OURS]
        if ours and any(each != ours[0] for each in ours):
            wrong.append("drafting changes the text of a client alone")
        for server in servers:
            clients.turn(server.url, wanted, n_clients=max(counts), seconds=turn, n_bad=4)
        for n_clients in counts:
            measure(servers, n_clients, minutes, turn, wanted)
            for server in servers:
                row = {"clients": n_clients, **row_of(server, texts[server.side])}
                if stock := next((each for each in servers if each.side == "stock"), None):
                    row["of_stock"] = of_stock(server, stock)
                keep_wrong(server, wanted, texts[server.side])
                table.append(row)
                click.echo(_line(row))
                if server.side in OURS:
                    wrong += [f"{server.side}, {n_clients} clients: {each}" for each in failures(row)]
        memory = {server.side: thirds(server.readings) for server in servers}
        wrong += [f"{side}: {each}" for side in sides if side in OURS for each in growth(memory[side])]
    document = {
        "schema": SCHEMA,
        **origin,
        "model": "tiny-moe F16",
        "slots": SLOTS,
        "turn": turn,
        "minutes": minutes,
        "rows": table,
        "memory": memory,
        "wrong": wrong,
    }
    print(json.dumps(document))
    if results:
        rows_of_results.append(results, document)
    sys.exit(1 if wrong else 0)


def _line(row: dict[str, Any]) -> str:
    first, last = row["first_ms"]
    speed = f"{row['tok_s']:7.1f} tok/s" + (f", {row['of_stock']:.2f} of stock" if "of_stock" in row else "")
    return (
        f"{row['clients']} clients, {row['side']:9s} {speed}, first token {first:.0f} ms, "
        f"p95 {last:.0f} ms; {row['replies']} replies, {row['wrong']} unlike alone, "
        f"{sum(row['errors'].values())} errors, {row['resident'][1] >> 20} MiB, {row['files'][1]} files"
    )


if __name__ == "__main__":
    main()
