"""Models and `Llama` objects for the tests that run the built library.

Models are random or planted ones of tools/synth_gguf.py, written once per session. Everything runs on one
thread, so that these tests can share a machine with a build. Must not know: what any test expects.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from draftwood import Llama
from synth_gguf import PRESETS, write

from bench.queued import queued_steps
from tests.model.rig import Rig, Run, write_llama

ROOT = Path(__file__).resolve().parents[2]

MakeModel = Callable[..., str]
MakeLlama = Callable[..., Llama]
MakeRig = Callable[..., Rig]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.model)


@pytest.fixture(scope="session")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """gguf("moe-mtp", types="Q8_0") -> path of that preset with these fields changed."""
    folder = tmp_path_factory.mktemp("models")
    written: dict[Any, str] = {}

    def make(preset: str, **changes: Any) -> str:
        spec = replace(PRESETS[preset], **changes)
        if spec not in written:
            path = folder / f"{preset}-{len(written)}.gguf"
            write(spec, path)
            written[spec] = str(path)
        return written[spec]

    return make


@pytest.fixture(scope="session")
def llama_arch(gguf: MakeModel, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random model of architecture "llama": attention only, with the tokenizer of the presets."""
    path = tmp_path_factory.mktemp("llama") / "llama.gguf"
    write_llama(path, like=gguf("dense-plain"))
    return str(path)


@pytest.fixture(scope="session")
def run_of(gguf: MakeModel) -> Callable[..., Run]:
    """run_of("moe-mtp") -> 200 plain tokens of it and their rows, from a context without snapshots."""
    known: dict[Any, Run] = {}

    def make(preset: str, n: int = 200, **changes: Any) -> Run:
        key = (preset, n, tuple(changes.items()))
        if key not in known:
            rig = Rig(gguf(preset, **changes), n_rs_seq=0, n_ctx=n + 56)
            known[key] = rig.reference(n)
            rig.close()
        return known[key]

    return make


@pytest.fixture
def rig(gguf: MakeModel) -> Iterator[MakeRig]:
    """rig("moe-mtp", drafter=...) -> Rig on a preset or a path, closed after the test."""
    made: list[Rig] = []

    def make(preset: str = "moe-mtp", **settings: Any) -> Rig:
        made.append(Rig(preset if preset.endswith(".gguf") else gguf(preset), **settings))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def llama_of(gguf: MakeModel) -> Iterator[MakeLlama]:
    """llama_of("moe-mtp", {"types": "Q8_0"}, n_ctx=64) -> Llama on one thread, closed after the test."""
    made: list[Llama] = []

    def make(preset: str, changes: dict[str, Any], **settings: Any) -> Llama:
        defaults = {"n_ctx": 256, "n_threads": 1, "n_threads_batch": 1, "seed": 7, "verbose": False}
        made.append(Llama(gguf(preset, **changes), **{**defaults, **settings}))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def llama(llama_of: MakeLlama) -> MakeLlama:
    """llama("moe-mtp", speculation="off"): llama_of with a preset as it is."""

    def make(preset: str = "planted-moe", **settings: Any) -> Llama:
        return llama_of(preset, {}, **settings)

    return make


@pytest.fixture
def on(llama: MakeLlama) -> Llama:
    """The planted model with drafts: about two of three are accepted, so rounds of every length occur."""
    return llama(speculation="mtp", draft_tokens=5)


@pytest.fixture
def off(llama: MakeLlama) -> Llama:
    """The same model on the same engine, without a drafter."""
    return llama(speculation="off")


@pytest.fixture
def queueing(llama: MakeLlama) -> Iterator[MakeLlama]:
    """`llama`, where greedy steps of plain decoding are queued before their token is known, as on a card."""
    with queued_steps():
        yield llama


@pytest.fixture
def queues(queueing: MakeLlama) -> Llama:
    """The same model, without a drafter, its steps queued."""
    return queueing(speculation="off")


@pytest.fixture(params=["on", "off", "queues"])
def either(request: pytest.FixtureRequest) -> Llama:
    """`on`, then `off`, then `queues`."""
    return request.getfixturevalue(request.param)


@pytest.fixture(params=["mtp", "off"])
def llm(request: pytest.FixtureRequest, llama: MakeLlama) -> Llama:
    """The planted model with drafts of the default length, then without."""
    return llama(speculation=request.param)


@pytest.fixture
def python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """python(code, *args, **settings) -> finished process: for what would end pytest if it went wrong.

    `settings` are environment variables.
    """

    def run(code: str, *args: str, timeout: float = 240, **settings: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-W", "error", "-c", textwrap.dedent(code), *args]
        environment = {**os.environ, **settings}
        return subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout, check=False
        )

    return run
