"""bench/clients.py and bench/server_load.py: what they count, and that they see a wrong reply."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))

import clients
import server_load

from tests.server.conftest import GetServer

SLOTS = ("-np", "4", "-no-kvu", "-c", "2048", "--spec-type", "mtp")
REQUESTS = server_load.requests_of(2)


def test_replies_beside_clients_that_misbehave_are_those_of_a_client_alone(server: GetServer) -> None:
    url = server(*SLOTS).url
    alone = clients.alone(url, REQUESTS)
    seen = clients.turn(url, REQUESTS, n_clients=2, seconds=3, n_bad=4)
    assert not seen.errors
    assert seen.replies
    assert all(reply.text == alone[reply.request].text for reply in seen.replies)
    assert sum(reply.n_accepted for reply in seen.replies) > 0
    assert {name.partition(":")[0] for name in seen.bad} == {
        "leaves",
        "reads slowly",
        "sends half",
        "nonsense",
    }
    assert not any(name.startswith(("nonsense: 2", "nonsense: 5")) for name in seen.bad)


def reply(number: int, text: str, n_tokens: int = 10) -> clients.Reply:
    return clients.Reply(number, text, n_tokens, first=0.1, seconds=1.0, n_drafted=4, n_accepted=2)


def served(seen: clients.Seen, resident: list[int], files: list[int]) -> server_load.Server:
    found = server_load.Server("auto", "", subprocess.Popen([sys.executable, "-c", ""]))
    found.process.wait()
    found.seen, found.took, found.resident, found.files = [seen], [2.0], resident, files
    return found


def test_a_row_counts_what_was_seen() -> None:
    seen = clients.Seen([reply(0, "a"), reply(1, "b", 30)], Counter(), Counter(leaves=3))
    row = server_load.row_of(served(seen, [5, 5, 5], [7, 7, 7]), ["a", "b"])
    assert (row["replies"], row["tokens"], row["wrong"], row["tok_s"]) == (2, 40, 0, 20.0)
    assert (row["drafted"], row["accepted"], row["bad"]) == (8, 4, {"leaves": 3})
    assert row["first_ms"] == [100.0, 100.0]
    assert server_load.failures(row) == []


def test_wrong_replies_errors_and_growth_are_failures() -> None:
    seen = clients.Seen(
        [reply(0, "a"), reply(1, "x")],
        Counter({"ReadError: ": 2}),
        Counter({"nonsense: 500": 3, "nonsense: 400": 5}),
    )
    more = 2 * server_load.SLACK
    row = server_load.row_of(served(seen, [5, 5, 5, 5, 5, 5 + more], [7, 7, 7, 9]), ["a", "b"])
    assert server_load.failures(row) == [
        "1 wrong replies",
        "2 of ReadError: ",
        "3 of nonsense: 500",
        f"memory grew from 5 to {5 + more} bytes",
        "7 files were open, then 9",
    ]


def test_speeds_are_compared_turn_by_turn() -> None:
    def with_turns(*tokens: int) -> server_load.Server:
        found = served(clients.Seen([], Counter(), Counter()), [], [])
        found.seen = [clients.Seen([reply(0, "a", n)], Counter(), Counter()) for n in tokens]
        found.took = [2.0 for _ in tokens]
        return found

    assert server_load.of_stock(with_turns(20, 300, 60), with_turns(10, 100, 30)) == 2.0


def test_memory_is_judged_by_its_later_thirds() -> None:
    assert server_load.thirds([1, 5, 3, 2, 4, 4]) == [3, 4]
    assert server_load.thirds([7]) == [7, 7]
    assert server_load.growth([5, 5 + server_load.SLACK]) == []
    assert server_load.growth([5, 6 + server_load.SLACK]) != []


def test_wrong_replies_are_kept(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(server_load, "LOGS", tmp_path)
    server_load.keep_wrong(served(clients.Seen([reply(0, "x")]), [], []), [{"prompt": "p"}], ["a"])
    assert '"alone": "a", "text": "x"' in (tmp_path / "wrong.jsonl").read_text("utf-8")
