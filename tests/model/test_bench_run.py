"""bench/run.py on the real library and the bundled llama-server, with the trained tiny model on the CPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from draftwood import Llama

from bench.gpu import cases, files, measure, rows, stock
from bench.gpu.cases import Case
from bench.gpu.ours import Ours, shared_weights
from bench.gpu.schedule import accepted
from bench.gpu.side import Apart, Side, given_tree, is_chain
from bench.gpu.stock import Server
from bench.gpu.work import BenchError, Clock, Work
from bench.gpu.worker import Worker

ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    "n_gpu_layers=0",
    "threads=1",
    "prompt=24",
    "rounds=6",
    "part_rounds=3",
    "warm=2",
    "repeats=2",
    "restarts=1",
)
MODEL, DRAFTER = str(files.TINY / "tiny-moe-f16.gguf"), str(files.TINY / "dflash-f16.gguf")


@pytest.fixture(scope="module")
def known() -> dict[str, Case]:
    return cases.read(settings=SMALL, model="tiny-moe")


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "bench" / "run.py"), "run", *arguments, "--work", str(folder)]
    settings = [option for setting in SMALL for option in ("--set", setting)]
    return subprocess.run(
        [*command, "--model", "tiny-moe", *settings],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        # as tools/gpu.sh runs it
        env={**os.environ, "PYTHONSAFEPATH": "1"},
    )


def test_cases_are_measured_beside_llama_server_and_not_twice(tmp_path):
    wanted = ["--case", "plain", "--case", "length4", "--case", "given16"]
    done = run(tmp_path / "work", "cases", *wanted, "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert [line.split(",")[0] for line in done.stdout.splitlines()] == [
        "given16",
        "length4",
        "plain",
        "nothing left to do",
    ]
    text = (tmp_path / "out" / "bench.json").read_text()
    state = json.loads(text)
    found = {name: restarts["0"] for name, restarts in state["cases"].items()}
    sides = {"plain", "stock_plain"}
    assert {name: set(each) - {"asked", "facts", "origin"} for name, each in found.items()} == {
        "plain": sides | {"waiting"},
        "given16": sides | {"candidate", "parts"},
        "length4": sides | {"candidate", "parts", "stock"},
    }
    for each in found.values():
        assert all(len(each[side]) == 2 for side in set(each) - {"asked", "facts", "origin"})
        assert re.fullmatch("[0-9a-f]{40}", each["origin"]["commit"])
    check_length4(rows.of_case(state, "length4", [found["length4"]]))
    assert found["given16"]["facts"]["mean_nodes"] == 16
    again = run(tmp_path / "work", "cases", *wanted, "--out", str(tmp_path / "out"))
    assert (again.returncode, again.stdout) == (0, "nothing left to do\n"), again.stderr
    assert json.loads((tmp_path / "out" / "bench.json").read_text())["cases"] == state["cases"]
    other = run(tmp_path / "work", "cases", *wanted, "--set", "seed=9")
    assert other.returncode == 1
    assert re.search("found cases .* measured in .* with seed 1, not 9; expected the same", other.stderr)


def test_servers_of_ours_are_measured_beside_stocks(tmp_path):
    wanted = ["--case", "served1", "--case", "served4", "--set", "rounds=48"]
    done = run(tmp_path, "cases", *wanted)
    assert done.returncode == 0, done.stderr
    state = json.loads((tmp_path / "bench.json").read_text())
    for name, n_clients in (("served1", 1), ("served4", 4)):
        row = rows.of_case(state, name, [state["cases"][name]["0"]])
        assert (row["case"], row["clients"]) == (name, n_clients)
        assert row["served_length"] == pytest.approx(4.0, rel=0.25)
        assert min(row[name] for name in ("served", "served_plain", "served_of_stock")) > 0
        assert (row["served_of_library"] is None) == (n_clients > 1)


def check_length4(row: dict) -> None:
    case = cases.read(settings=SMALL)["length4"]
    length = 1 + sum(accepted(case.schedule, 6, 1)) / 6
    assert row["length"] == pytest.approx(length, rel=1e-4)  # each draft that the schedule keeps is kept
    counters = row["counters"]
    assert (counters["rounds"], counters["drafted"], counters["emitted"]) == (12, 60, round(12 * length))
    assert row["facts"]["chains"] == 1
    assert row["facts"]["mean_nodes"] == 6
    for name in ("t1_ms", "tn_ms", "draft_ms", "round_ms", "ours", "stock", "stock_plain", "stock_stream"):
        assert row[name] > 0
    assert row["draft_ms"] + row["tn_ms"] < 100 * row["round_ms"]  # one unit: others differ by 1,000
    assert 1 <= row["stock_length"] <= 6


def test_time_is_up_before_anything_is_begun(tmp_path):
    done = run(tmp_path, "cases", "--minutes", "0.1")
    assert (done.returncode, done.stdout) == (3, "cases: time is up; call it again with the same folder\n")
    assert json.loads((tmp_path / "bench.json").read_text())["cases"] == {}


def test_models_are_counted_and_their_routing_measured(tmp_path):
    done = run(tmp_path, "models")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "bench.json").read_text())["models"]["tiny-moe"]
    assert found["bytes"] == Path(MODEL).stat().st_size
    assert found["drafter_bytes"] == Path(DRAFTER).stat().st_size
    assert files.Reads(**found["reads"]) == files.reads(Path(MODEL))
    used = found["reads"]["n_used"]
    assert used < rows.union_of(found, 4) < rows.union_of(found, 6) < rows.union_of(found, 16) <= 16


def test_memory_of_trees_and_snapshots(tmp_path):
    done = run(tmp_path, "memory", "--case", "length4")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "bench.json").read_text())["memory"]["tiny-moe"]["trees"]
    state = files.reads(Path(MODEL)).state
    assert {n: each["snapshot_bytes"] for n, each in found.items()} == {"16": 15 * state, "24": 23 * state}
    assert 0 < found["16"]["tree_bytes"] < found["24"]["tree_bytes"] < found["24"]["snapshot_bytes"]


@pytest.mark.slow
def test_real_acceptance_is_draftwood_bench(tmp_path):
    quick = "--per-category 1 --repeats 1 --tokens 16 --prompt-tokens 32 --threads 1 --temp 0"
    done = run(tmp_path, "real", "--real", quick)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "bench.json").read_text())["real"]["document"]
    assert {figure["mode"] for figure in found["figures"]} >= {"off", "mtp", "dflash", "tree", "auto"}


# ---- our sides ----


@pytest.fixture
def our(known):
    with shared_weights():
        made = Ours(MODEL, DRAFTER)
        yield made
        made.close()


def opened(our: Ours, case: Case) -> dict:
    return our.open(asdict(case))


@pytest.mark.parametrize(
    "name", ["length2", "length4-default", "length4-dflash", "tree16", "tree24", "given16"]
)
def test_rounds_keep_what_the_schedule_says(our, known, name):
    case = known[name]
    facts = opened(our, case)
    found = our.candidate(5)
    wanted = accepted(case.schedule, case.rounds, 5)
    emitted = sum(n + 1 for n in wanted)
    assert found["stats"]["rounds"] == case.rounds
    # a drafter's tree may be shallower than the schedule goes
    assert (
        found["tokens"] == emitted
        if case.shape == "chain" or name == "given16"
        else found["tokens"] <= emitted
    )
    assert found["stats"]["emitted"] == found["tokens"]
    assert facts["mean_nodes"] == case.nodes
    assert facts["chains"] == (case.shape == "chain")
    assert sum(found["phases"].values()) < found["seconds"]
    parts = our.parts(0)
    assert [len(parts[part]) for part in ("draft", "forward")] == [case.part_rounds] * 2
    assert min(parts["draft"]) >= 0 < min(parts["forward"])


def test_auto_may_pause(our, known):
    case = known["length4-auto"]
    facts = opened(our, case)
    assert facts["speculation"] == "mtp"
    found = our.candidate(5)
    assert found["stats"]["rounds"] == case.rounds
    assert 1 <= found["tokens"] / case.rounds <= case.nodes


@pytest.mark.parametrize("name", ["expert0", "expert25", "expert50"])
def test_a_pool_writes_what_the_model_on_the_card_writes(our, known, name):
    case = known[name]
    opened(our, case)
    pooled, resident = our.plain(5), our.resident(5)
    assert our._plain.text == our._resident.text
    assert pooled["tokens"] == resident["tokens"] == case.rounds
    assert pooled["experts"]["steps"] == case.rounds
    assert 0 < pooled["experts"]["misses"] < pooled["experts"]["hits"] + pooled["experts"]["misses"]
    before = our._plain.text
    our.plain(6)
    assert our._plain.text != before, "another turn has another text"


def test_drafts_over_a_pool(our, known):
    case = known["expert50-length4"]
    opened(our, case)
    found = our.candidate(5)
    assert found["stats"]["rounds"] == case.rounds
    assert found["experts"]["misses"] > 0


def test_a_case_after_one_with_a_pool_has_its_own_weights(our, known):
    opened(our, known["expert50"])
    opened(our, known["plain"])
    assert "experts" not in our.plain(5)


def test_plain_decode_is_that_of_users(our, known):
    """The watched engine changes no text: a plain side generates what Llama(speculation="off") does."""
    case = known["plain"]
    opened(our, case)
    side = our._plain
    side.start(1)
    side.rounds([0] * 5)
    ids = side.llm.input_ids[case.prompt : side.llm.n_tokens].tolist()
    llm = Llama(
        MODEL, n_ctx=256, flash_attn=True, speculation="off", verbose=False, n_threads=1, n_threads_batch=1
    )
    stream = llm.generate(case.prompt_of(llm.n_vocab(), 1), temp=0.0)
    assert [next(stream) for _ in range(5)] == ids
    llm.close()


def test_parts_are_of_the_rounds_that_are_timed(our, known):
    """Waiting between the parts of a round changes neither drafts nor text."""
    case = known["length4"]
    opened(our, case)
    side, accepts = our._candidate, [3, 0, 5, 2]
    texts = []
    for apart in (None, Apart()):
        side.start(1)
        side.rounds(accepts, apart)
        texts.append(side.llm.input_ids[: side.llm.n_tokens].tolist())
    assert texts[0] == texts[1]
    assert [len(tree) for tree in apart.trees] == [6] * 4
    drafts = [list(tree.tokens[1 : 1 + n]) for tree, n in zip(apart.trees, accepts, strict=True)]
    assert all("".join(map(chr, draft)) in "".join(map(chr, texts[0])) for draft in drafts)


def test_weights_are_loaded_once_and_freed(known):
    with shared_weights():
        our = Ours(MODEL, DRAFTER)
        opened(our, known["length2"])
        assert our._plain.llm.model == our._candidate.llm.model
        first = our._plain.llm.model
        opened(our, known["length4-dflash"])
        assert our._plain.llm.model == first
        our.close()
    llm = Llama(MODEL, n_ctx=64, speculation="off", verbose=False)
    other = Llama(MODEL, n_ctx=64, speculation="off", verbose=False)
    assert llm.model != other.model
    llm.close()
    other.close()


@pytest.mark.parametrize(("nodes", "depth"), [(2, 1), (5, 4), (6, 2), (16, 8), (24, 3)])
def test_given_trees_have_their_nodes_and_depth(nodes, depth):
    tree = given_tree(Case(nodes=nodes, shape="tree", depth=depth, drafter="given"), 7, range(99))
    assert (len(tree), max(tree.depths), tree.tokens[0]) == (nodes, depth, 7)
    assert list(tree.depths) == sorted(tree.depths)
    assert is_chain(tree) == (nodes == depth + 1)
    likeliest = 0
    for _ in range(depth):  # the likeliest child is on the way to the deepest node
        likeliest = max(tree.children(likeliest), key=lambda node: tree.log_probs[node])
    assert tree.depths[likeliest] == depth


def test_a_profile_covers_the_rounds_asked_for(our, known):
    opened(our, known["length4"])
    for phase in ("plain", "round"):
        side: Side = our._plain if phase == "plain" else our._candidate
        seen: list[int] = []

        def look(side: Side = side, seen: list[int] = seen) -> None:
            seen.append(side.engine.stats().rounds)

        our.profiled(phase, 2, look, look)
        assert seen[1] - seen[0] == 2


def test_a_drafter_that_is_not_there_is_named(known):
    with shared_weights(), pytest.raises(BenchError, match="no DFlash drafter"):
        Ours(MODEL, None).open(asdict(known["tree16"]))


# ---- processes ----


def test_a_worker_that_fails_dies_or_hangs_is_an_error(tmp_path, known):
    worker = Worker(Path(MODEL), None, tmp_path / "log")
    with pytest.raises(BenchError, match=r"'open' failed in our process[^$]*no DFlash drafter"):
        worker.call(240, "open", asdict(known["tree16"]))
    assert worker.call(240, "close") is None
    with pytest.raises(BenchError, match="did not finish 'open'"):
        worker.call(0.0, "open", asdict(known["length4"]))
    with pytest.raises(BenchError, match="ended with status -9"):
        worker.call(240, "close")
    worker.close()


def test_a_server_that_cannot_load_or_answer_is_an_error(tmp_path, known):
    case = known["length4"]
    server = Server(stock.common_flags(case, tmp_path / "none.gguf", 256), tmp_path / "log")
    with pytest.raises(BenchError, match="llama-server ended with status"):
        server.ready(180)
    server.close()
    server = Server(stock.common_flags(case, Path(MODEL), 256), tmp_path / "log")
    server.ready(180)
    with pytest.raises(BenchError, match="failed in a request"):
        server.complete(case, [10**9], 4, 1, 120)
    found = server.complete(case, case.prompt_of(4096, 1), 8, 1, 120)
    assert found["predicted_n"] == 8
    assert "draft_n" not in found
    server.close()


def test_all_processes_end_with_a_failure(tmp_path, known, monkeypatch):
    monkeypatch.setattr(measure, "TURN", 0.0)
    servers = []
    monkeypatch.setattr(measure, "Server", lambda *given: servers.append(Server(*given)) or servers[-1])
    work = Work(tmp_path)
    with pytest.raises(BenchError, match=r"did not finish '(plain|candidate)' in 0 s"):
        measure.run(work, Clock(2), [known["length4"]], files.of("tiny-moe", work), print)
    assert len(servers) == 2
    assert all(server._process.poll() is not None for server in servers)
    assert work.state["cases"] == {}
