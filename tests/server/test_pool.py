"""A pool of experts behind llama-server: the same text at every size, counters, heat files, refusals."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from draftwood.engine.engine import probe_model
from draftwood.load import experts, heat

from tests.model.rig import write_llama
from tests.ports import free_port
from tests.server.conftest import GetServer
from tests.server.process import MODEL, Server
from tests.server.test_arguments import ended
from tests.server.test_one_slot import PROMPTS, SAMPLED, seen
from tests.server.test_slots import BODIES, SLOTS

INFO = probe_model(MODEL)
ONE_SLOT = ("-np", "1", "-c", "512")
THIRD, HALF = INFO.expert_bytes // 3, INFO.expert_bytes // 2

Start = Callable[..., Server]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """start("--spec-type", "mtp", size=THIRD) -> a server with a pool, or without for None."""
    running: list[Server] = []

    def make(*flags: str, size: int | None = HALF, slots: tuple[str, ...] = ONE_SLOT, **how: Any) -> Server:
        pool = () if size is None else ("--expert-vram", str(size))
        log = tmp_path / f"{len(running)}.log"
        running.append(Server(log, "--metrics", *slots, *pool, *flags, **how))
        return running[-1].wait()

    yield make
    for each in running:
        each.close()


def counted(server: Server) -> dict[str, int]:
    found = re.findall(r"^llamacpp:expert_(\w+)_total (\d+)$", server.get("/metrics"), re.M)
    return {name: int(value) for name, value in found}


# ---- text ----


@pytest.mark.parametrize("size", [THIRD, HALF], ids=["third", "half"])
@pytest.mark.parametrize("kind", ["plain", "auto", "mtp", "tree"])
def test_the_text_is_that_without_a_pool(start: Start, server: GetServer, kind: str, size: int) -> None:
    alone, pooled = server(*ONE_SLOT, "--spec-type", "plain"), start("--spec-type", kind, size=size)
    accepted = 0
    for how in ({}, SAMPLED):
        for prompt in PROMPTS:
            body = {"n_predict": 40, "n_probs": 3, "cache_prompt": False, **how}
            reply = pooled.complete(prompt, **body)
            assert seen(reply) == seen(alone.complete(prompt, **body))
            accepted += reply["timings"].get("draft_n_accepted", 0)
    assert accepted > 0 or kind in ("plain", "auto")  # "auto" need not draft on a loaded machine
    found = counted(pooled)
    assert found["hits"] > found["misses"] > 0
    assert found["copied_bytes"] >= (found["misses"] + found["in_place"]) * one_expert()


def one_expert() -> int:
    return INFO.expert_bytes // (INFO.n_experts * INFO.n_expert_layers)


@pytest.mark.parametrize("size", [THIRD, HALF], ids=["third", "half"])
@pytest.mark.parametrize("kind", ["plain", "auto", "mtp", "tree"])
def test_several_slots_share_it(start: Start, server: GetServer, kind: str, size: int) -> None:
    alone = server(*ONE_SLOT, "--spec-type", "plain")
    pooled = start("--spec-type", kind, size=size, slots=SLOTS)
    with ThreadPoolExecutor(4) as clients:
        replies = list(clients.map(lambda each: pooled.post("/completion", each), BODIES))
    for each, reply in zip(BODIES, replies, strict=True):
        assert seen(reply) == seen(alone.post("/completion", {**each, "cache_prompt": False}))
    assert {reply["id_slot"] for reply in replies} == {0, 1, 2, 3}
    assert counted(pooled)["misses"] > 0


@pytest.mark.parametrize("flags", [("--spec-type", "none"), ("--spec-type", "draft-mtp")], ids=str)
def test_llama_cpps_own_decoding_has_it_too(start: Start, flags: tuple[str, ...]) -> None:
    bodies = [{"prompt": each, "n_predict": 24, "temperature": 0, "cache_prompt": False} for each in PROMPTS]
    texts = []
    for size in (None, HALF):
        each = start("--no-repack", *flags, size=size)
        texts.append([each.post("/completion", body)["content"] for body in bodies])
        assert bool(counted(each)) == (size is not None)
    assert texts[0] == texts[1]


@pytest.mark.parametrize("flags", [("--warmup",), ("--expert-guess",), ("--fit", "on")], ids=str)
def test_other_ways_to_load_it(start: Start, server: GetServer, flags: tuple[str, ...]) -> None:
    alone, pooled = server(*ONE_SLOT, "--spec-type", "plain"), start("--spec-type", "mtp", *flags)
    assert seen(pooled.complete(PROMPTS[0])) == seen(alone.complete(PROMPTS[0]))
    assert counted(pooled)["misses"] > 0


def test_embeddings_come_from_it(start: Start) -> None:
    flags = ("--embedding", "--pooling", "mean", "--no-repack", "--spec-type", "auto")
    vectors = []
    for size in (None, HALF):
        each = start(*flags, size=size)
        vectors.append(each.post("/v1/embeddings", {"input": "The quick brown fox"})["data"][0]["embedding"])
    assert vectors[0] == vectors[1]


# ---- sizes ----


@pytest.mark.parametrize("size", [0, 1, THIRD, HALF, INFO.expert_bytes - 1, INFO.expert_bytes])
def test_slots_are_those_of_llama(start: Start, size: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        part = experts.share(INFO, size, {})
    words = start(size=size).words()
    if part is None:
        assert "all experts fit into --expert-vram: there is no pool" in words
    else:
        assert f"draftwood: {part.slots} of 16 experts of each layer in slots on CPU" in words
    assert ("has slots for a token's 4 experts at least" in words) == (size < 4 * INFO.expert_bytes // 16)


@pytest.mark.parametrize("text", ["4.5 MB", "4500KB", "4500000"])
def test_a_size_may_have_a_unit(tmp_path: Path, text: str) -> None:
    server = Server(tmp_path / "log", *ONE_SLOT, "--expert-vram", text)
    try:
        assert "draftwood: 7 of 16 experts" in server.wait().words()
    finally:
        server.close()


# ---- heat ----


def test_heat_goes_from_one_server_to_the_next(start: Start, tmp_path: Path) -> None:
    flags = ("--spec-type", "plain", "--expert-heat", str(tmp_path / "heat.json"))
    misses = []
    for _ in range(2):
        each = start(*flags, size=THIRD)
        each.complete(PROMPTS[1], n_predict=4)
        misses.append(counted(each)["misses"])
        each.close()
        assert each.process.returncode == 0
        learnt = heat.parse(tmp_path / "heat.json")
        assert learnt is not None
        assert heat.require(str(tmp_path / "heat.json"), INFO) == learnt
        assert len(learnt) == INFO.n_expert_layers
        assert all(map(any, learnt.values()))
    assert 0 < misses[1] < misses[0]


def test_a_heat_file_of_python_is_read(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "heat.json"
    wanted = {layer: [1 << 11 | ((7 * e + layer) % 16) << 12 for e in range(16)] for layer in range(12)}
    path.write_text(json.dumps({"schema": 1, "n_experts": 16, "heat": wanted}))
    each = start("--spec-type", "plain", "--expert-heat", str(path))
    path.unlink()
    each.close()  # what it writes is what it read, and the few tokens that llama-server tries a context with
    found = heat.parse(path)
    assert found is not None
    assert {layer: [value >> 12 for value in values] for layer, values in found.items()} == {
        layer: [value >> 12 for value in values] for layer, values in wanted.items()
    }


def test_another_file_in_its_place_stays(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "heat.json"
    each = start("--spec-type", "plain", "--expert-heat", str(path))
    each.complete(PROMPTS[0])
    path.write_text("mine")
    each.close()
    assert path.read_text() == "mine"
    assert "it stays as it is" in each.words()


def sleeping(server: Server, path: Path) -> None:
    """Wait until it sleeps, and has written its heat behind its last request. Asking does not wake it."""
    end = time.monotonic() + 60
    while not (server.get("/props")["is_sleeping"] and path.exists()):
        assert time.monotonic() < end, "the server does not sleep"
        time.sleep(0.1)


def test_a_server_that_sleeps_keeps_heat_and_makes_the_pool_anew(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "heat.json"
    each = start("--spec-type", "mtp", "--expert-heat", str(path), "--sleep-idle-seconds", "1")
    first = each.complete(PROMPTS[0])
    sleeping(each, path)
    assert heat.parse(path)
    assert seen(each.complete(PROMPTS[0])) == seen(first)
    # a busy client may come so late that it sleeps more often
    n_wakes = each.words().count("server is exiting sleeping state")
    assert each.words().count("experts of each layer in slots on CPU") == 1 + n_wakes > 1
    for _ in range(10):  # one that sleeps again by now counts nothing
        if found := counted(each).get("hits"):
            break
        each.complete(PROMPTS[0])
    assert found


def test_a_server_wakes_up_beside_another_file_of_heat(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "heat.json"
    each = start("--spec-type", "plain", "--expert-heat", str(path), "--sleep-idle-seconds", "1")
    first = each.complete(PROMPTS[0])
    sleeping(each, path)
    path.write_text("mine")
    assert seen(each.complete(PROMPTS[0])) == seen(first)
    assert "is no heat file of a model with 12 layers of 16 experts" in each.words()
    each.close()
    assert path.read_text() == "mine"


# ---- refusals ----


BESIDE = "beside --expert-vram; expected one way to place experts"
ALONE = "without --expert-vram; expected a size"
NO_SIZE = "expected a number of bytes, or text such as '6GiB'"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--expert-vram", "6 apples"), f"found '6 apples', {NO_SIZE}"),
        (("--expert-vram", "-5"), f"found '-5', {NO_SIZE}"),
        (("--expert-heat", "heat.json"), ALONE),
        (("--no-expert-guess",), ALONE),
        (("--expert-vram", "3MB", "-ncmoe", "2"), BESIDE),
        (("--expert-vram", "3MB", "-cmoe"), BESIDE),
        (("--expert-vram", "3MB", "-ot", "exps=CPU"), BESIDE),
        (("--expert-vram", "3MB", "--expert-heat", "/none/heat.json"), "is in /none, which is no folder"),
        (("--expert-vram", "3MB", "--expert-heat", "/"), "--expert-heat / is a folder"),
        (("--expert-vram", "3MB", "--expert-heat", __file__), "is no heat file of a model with 12 layers"),
    ],
    ids=lambda each: each[-1] if isinstance(each, tuple) else "",
)
def test_what_cannot_be_is_refused(tmp_path: Path, flags: tuple[str, ...], words: str) -> None:
    said = ended(tmp_path, *flags)
    assert words in said
    assert "model loaded" not in said
    assert "init: llama threadpool" not in said  # nothing was loaded


@pytest.mark.parametrize(
    "changes",
    [
        {"schema": 2}, {"heat": {"12": [5] * 16}}, {"heat": {"-1": [5] * 16}}, {"heat": {"3": [5] * 15}},
        {"heat": {"3": [-1] * 16}}, {"heat": {"3": [1 << 32] * 16}}, {"heat": {"x": [5] * 16}},
        {"heat": {"3x": [5] * 16}}, {"heat": 7}, {"heat": {"3": 7}}, {"heat": {"3": ["a"] * 16}},
    ],
    ids=str,
)  # fmt: skip
def test_heat_of_another_model_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = tmp_path / "heat.json"
    path.write_text(json.dumps({"schema": 1, "n_experts": 16, "heat": {"3": [5] * 16}} | changes))
    assert "is no heat file of a model with 12 layers of 16 experts" in ended(
        tmp_path, "--expert-vram", "3MB", "--expert-heat", str(path)
    )


def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "llama.gguf"
    write_llama(path, like=MODEL)
    assert "this model has no experts; expected a mixture of experts" in ended(
        tmp_path, "--expert-vram", "3MB", model=str(path)
    )


def test_memory_that_is_refused_is_said_in_words(tmp_path: Path, large: str) -> None:
    """As where memory is limited: there is some for the program, the mapped file and half of the experts."""
    info = probe_model(large)
    n_bytes = (200 << 20) + info.file_bytes + info.expert_bytes // 2
    said = ended(tmp_path, "--expert-vram", "64MiB", model=large, prefix=("prlimit", f"--as={n_bytes}"))
    assert "bytes of pinned host memory for experts, which take 0.4 GiB in all" in said
    assert "--n-cpu-moe N in place of --expert-vram" in said


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with 400 MB of experts."""
    path = tmp_path_factory.mktemp("large") / "large.gguf"
    spec = ("moe-plain", "--set", "types=F16", "--set", "experts=64", "--set", "expert_ff=1024")
    tool = Path(__file__).resolve().parents[2] / "tools" / "synth_gguf.py"
    subprocess.run([sys.executable, tool, spec[0], path, *spec[1:]], check=True, capture_output=True)
    return str(path)


# ---- draftwood serve ----


def test_draftwood_serve_starts_it_and_its_end_writes_heat(tmp_path: Path, server: GetServer) -> None:
    port, path = free_port(), tmp_path / "heat.json"
    pool = ("--expert-vram", "4.5MB", "--expert-heat", str(path), "--no-expert-guess")
    command = (sys.executable, "-m", "draftwood", "serve", MODEL, *pool, *ONE_SLOT, "--metrics", "-t", "1")
    each = Server.__new__(Server)
    each.url, each.log, each.spec_type = f"http://127.0.0.1:{port}", tmp_path / "log", "auto"
    with each.log.open("wb") as out:
        each.process = subprocess.Popen([*command, "--port", str(port)], stdout=out, stderr=out)
    try:
        each.wait()
        assert seen(each.complete(PROMPTS[0])) == seen(
            server(*ONE_SLOT, "--spec-type", "plain").complete(PROMPTS[0])
        )
        assert "draftwood: 7 of 16 experts" in each.words()
        assert "1 slots draft as --spec-type auto" in each.words()
        each.process.send_signal(signal.SIGINT)
        assert each.process.wait(60) == 0
        assert heat.require(str(path), INFO)
    finally:
        each.close()
