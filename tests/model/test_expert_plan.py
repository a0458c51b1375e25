"""Predicted hits and speeds of pools: the replay counts what a pool counts, two timed sizes give the rest."""

from __future__ import annotations

import json
from contextlib import closing
from itertools import islice

import numpy as np
import pytest
from click.testing import CliRunner
from draftwood import Llama
from draftwood.bench.expert_plan import Prediction, Run, fit
from draftwood.bench.expert_replay import misses
from draftwood.cli import cli
from draftwood.engine.engine import probe_model
from draftwood.engine.routing import RoutingRecorder
from draftwood.load import experts

E, K, LAYERS = 16, 3, 4
SHAPE = {"experts": E, "top_k": K, "planted": 0.5}
SMALL = {"n_ctx": 512, "n_threads": 1, "verbose": False, "speculation": "off"}


@pytest.fixture
def model(gguf):
    return gguf("moe-mtp", **SHAPE)


@pytest.mark.parametrize("slots", [K, E // 4, E // 2, E - 1])
def test_the_replay_counts_what_a_pool_counts(model, slots):
    """But for near ties of a router: the recording runs stock kernels. test_expert_pool.py is exact."""
    info = probe_model(model)
    n_bytes = -(-slots * info.expert_bytes // E)
    with closing(Llama(model, expert_vram=n_bytes, **SMALL)) as llm:
        tokens = [7, *islice(llm.generate([7], temp=0.0), 140)]  # two epochs
        llm.reset()
        found = llm.expert_stats
        recorder = RoutingRecorder(llm.model, n_experts=E, n_experts_used=K, n_threads=1)
        choices = recorder.choices(tokens[:-1])
    assert choices.shape == (LAYERS, 140, K)
    assert (found.slots, found.steps) == (slots * LAYERS, 140)
    assert misses(choices, E, slots) == pytest.approx(found.misses, rel=0.01)
    assert found.hits + found.misses == choices.size
    assert misses(choices, E, E) == 0
    assert misses(choices, E, slots, warm=100) < misses(choices, E, slots)


def made(choices, *runs):
    return fit(probe_model_of(), choices, 8, [Run(slots, ms, []) for slots, ms in runs])


def probe_model_of():
    class Info:
        n_experts, n_expert_layers, expert_bytes = E, LAYERS, E * LAYERS * 1000

    return Info()


@pytest.fixture
def choices():
    draw = np.random.default_rng(3)
    return np.stack([[draw.permutation(E)[:K] for _ in range(200)] for _ in range(LAYERS)])


def test_two_sizes_give_a_step_and_a_miss(choices):
    missing = {slots: Prediction(probe_model_of(), choices, 8, 0, 0).missing(slots) for slots in (4, 8, 12)}
    assert missing[4] > missing[8] > missing[12] > 0
    times = {slots: 2.0 + 0.25 * n for slots, n in missing.items()}
    for runs in ([(4, times[4]), (12, times[12])], [(12, times[12]), (4, times[4])]):
        found = made(choices, *runs)
        assert (found.step_ms, found.miss_ms) == (pytest.approx(2.0), pytest.approx(0.25))
        assert found.row(8)["token_ms"] == pytest.approx(times[8])
    row = found.row(8)
    assert row["bytes_missed"] == round(1000 * missing[8])
    assert row["hit_rate"] == pytest.approx(1 - missing[8] / (LAYERS * K))
    assert row["tokens_per_second"] == pytest.approx(1000 / times[8])
    whole = {"hit_rate": 1.0, "bytes_missed": 0, "token_ms": pytest.approx(2.0)}
    assert found.row(E) | whole == found.row(E)


@pytest.mark.parametrize("slow", [1.0, 0.9])
def test_misses_that_cost_nothing(choices, slow):
    """A faster run with more misses was another program's doing."""
    found = made(choices, (4, slow), (12, 1.0))
    assert found.miss_ms == 0.0
    assert found.row(4)["token_ms"] == found.row(12)["token_ms"] == pytest.approx(1.0)


def test_one_size_alone(choices):
    assert made(choices, (8, 3.0), (8, 3.0)).row(12)["token_ms"] == pytest.approx(3.0)


def sizes(model, *slots):
    """Return cards' sizes that leave room for so many slots."""
    info = probe_model(model)
    rest = experts.beside(info, {"n_ctx": 512})
    return [f"--vram={rest - (-n * info.expert_bytes // E)}" for n in slots]


def test_the_command(model):
    given = ["experts", "plan", model, "--n-ctx", "512", *sizes(model, 4, 8, 12, 16), "--vram=1MiB"]
    result = CliRunner().invoke(cli, [*given, "--measure", "--tokens", "32", "--json"])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["plan"]
    assert [row["slots"] for row in rows] == [4, 8, 12, 16, 0]
    rates = [row["hit_rate"] for row in rows[:4]]
    assert 0 < rates[0] < rates[1] < rates[2] < rates[3] == 1.0
    speeds = [row["tokens_per_second"] for row in rows[:4]]
    assert 0 < speeds[0] <= speeds[1] <= speeds[2] <= speeds[3]
    assert "hit_rate" not in rows[4]
    shown = CliRunner().invoke(cli, [*given, "--measure", "--tokens", "16"]).stdout
    assert shown.count(" MB a token, about ") == 4
    assert "tok/s" not in CliRunner().invoke(cli, given).stdout


def test_one_size_is_measured_beside_half_of_it(model):
    given = ["experts", "plan", model, "--n-ctx", "512", *sizes(model, 8), "--measure", "--json"]
    result = CliRunner().invoke(cli, [*given, "--tokens", "16"])
    assert result.exit_code == 0, result.output
    assert 0 < json.loads(result.stdout)["plan"][0]["hit_rate"] < 1


@pytest.mark.parametrize("slots", [[16], []])
def test_nothing_to_measure(model, slots):
    given = ["experts", "plan", model, "--n-ctx", "512", *(sizes(model, *slots) or ["--vram=1MiB"])]
    result = CliRunner().invoke(cli, [*given, "--measure"])
    assert result.exit_code == 1
    assert "found no size at which a part of the experts fits on this card" in result.stderr
