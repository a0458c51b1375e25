"""bench/demo.py without a model: its ratio while other programs slow the machine, and its exit status."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROMPT = [1, 2, 3]


@pytest.fixture
def demo(monkeypatch) -> ModuleType:
    """The script, which finds its neighbours as `python bench/demo.py` does, on a clock that models move."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import demo as module

    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: clock.now, clock=clock))
    return module


class Machine:
    """Gives one text at `speed` tokens a second, where `wrong` is not another token.

    Each third quarter of a second a token takes `slower` times as long.
    """

    def __init__(self, clock: Any, speed: float, slower: float = 1.0, wrong: int = -1) -> None:
        self.clock, self.speed, self.slower, self.wrong = clock, speed, slower, wrong
        self.speculation_stats = SimpleNamespace(rounds=0, tokens_per_round=2.5)

    def reset(self) -> None:
        """Forget the prompt."""

    def reset_speculation_stats(self) -> None:
        self.speculation_stats.rounds = 0

    def generate(self, prompt: list[int], temp: float) -> Iterator[int]:
        assert (prompt, temp) == (PROMPT, 0.0)
        for token in range(1000):
            busy = int(self.clock.now * 4) % 3 == 0
            self.clock.now += (self.slower if busy else 1.0) / self.speed
            self.speculation_stats.rounds += token % 2
            yield -token if token == self.wrong else token


def both(demo: ModuleType, *, gain: float, slower: float = 1.0) -> dict[str, Any]:
    """What the demo says of six prompts."""
    clock = demo.time.clock
    plain, spec = (Machine(clock, speed, slower) for speed in (1000.0, 1000.0 * gain))
    rows = [{"category": "prose", **demo.compare(plain, spec, PROMPT)} for _ in range(6)]
    return {**demo.summary(rows), "rows": rows}


def test_on_an_idle_machine_all_figures_agree(demo):
    found = both(demo, gain=1.5)
    assert found["same_text"]
    assert (found["plain_tps"], found["spec_tps"]) == (pytest.approx(1000), pytest.approx(1500))
    assert found["ratio"] == pytest.approx(1.5)
    assert found["ratio_interval"] == pytest.approx((1.5, 1.5))


def test_what_slows_the_machine_for_a_while_hardly_moves_the_ratio(demo):
    found = both(demo, gain=1.5, slower=10.0)
    assert found["ratio"] == pytest.approx(1.5, rel=0.02)
    low, high = found["ratio_interval"]
    assert low <= 1.5 <= high


def test_all_tokens_are_compared(demo):
    found = both(demo, gain=1.5)
    turns = found["rows"][0]["turns"]
    assert len(turns) == demo.REPEATS * -(-(demo.N_TOKENS - 1) // demo.TURN)
    assert sum(count for count, _, _ in turns) == demo.REPEATS * (demo.N_TOKENS - 1)
    for wrong in (1, demo.TURN, demo.N_TOKENS - 1):
        plain, spec = (Machine(demo.time.clock, 1000.0, wrong=each) for each in (-1, wrong))
        assert not demo.compare(plain, spec, PROMPT)["same_text"]


@pytest.mark.parametrize(("same", "status"), [(True, 0), (False, 1)])
def test_only_another_text_is_a_failure(demo, monkeypatch, tmp_path, capsys, same, status):
    report = {**both(demo, gain=0.4), "model": "tiny", "threads": 2, "sample": "", "same_text": same}
    monkeypatch.setattr(demo, "measure", lambda kind, draft_tokens: report)
    monkeypatch.setattr(demo, "build_info", dict)
    path = tmp_path / "demo.json"
    monkeypatch.setattr(sys, "argv", ["demo.py", "--report", str(path)])
    assert demo.main() == status
    assert json.loads(path.read_text("utf-8"))["ratio"] == pytest.approx(0.4)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("same text, with MTP 0.40x as fast" if same else "TEXT DIFFERS")
