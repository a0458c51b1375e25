"""Predicted hits and speeds of pools: the replay counts what a pool counts, two timed sizes give the rest."""

from __future__ import annotations

import json
from contextlib import closing
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from draftwood import Llama
from draftwood.bench.expert_plan import Text, fit, row
from draftwood.bench.expert_replay import misses
from draftwood.cli import cli
from draftwood.engine.engine import probe_model
from draftwood.engine.routing import RoutingRecorder
from draftwood.load import experts

E, K, LAYERS = 16, 3, 4
SHAPE = {"experts": E, "top_k": K, "planted": 0.5}
TRAINED = str(Path(__file__).resolve().parents[2] / "models" / "tiny-moe" / "tiny-moe-f16.gguf")
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


@pytest.fixture
def text():
    draw = np.random.default_rng(3)
    choices = np.stack([[draw.permutation(E)[:K] for _ in range(200)] for _ in range(LAYERS)])
    return Text(E, 1000.0, choices, 8)


def test_two_sizes_give_a_step_and_a_miss(text):
    missing = {slots: text.missing(slots) for slots in (4, 8, 12)}
    assert missing[4] > missing[8] > missing[12] > 0
    times = {slots: 2.0 + 0.25 * n for slots, n in missing.items()}
    for timed in ([(4, times[4]), (12, times[12])], [(12, times[12]), (4, times[4])]):
        found = fit(text, timed)
        assert (found.step_ms, found.miss_ms) == (pytest.approx(2.0), pytest.approx(0.25))
        assert row(text, found, 8)["token_ms"] == pytest.approx(times[8])
    each = row(text, found, 8)
    assert each["bytes_missed_a_token"] == round(1000 * missing[8])
    assert each["hit_rate_without_guesses"] == pytest.approx(1 - missing[8] / (LAYERS * K))
    assert each["tokens_per_second"] == pytest.approx(1000 / times[8])
    assert row(text, found, E)["token_ms"] == pytest.approx(2.0)
    assert row(text, found, E)["hit_rate_without_guesses"] == 1.0


@pytest.mark.parametrize(
    "times",
    [
        pytest.param([(4, 0.9), (12, 1.0)], id="the smaller was faster"),
        pytest.param([(4, 1.01), (12, 1.0)], id="as fast"),
        pytest.param([(8, 3.0), (8, 2.0)], id="one size twice"),
        pytest.param([(4, 100.0), (12, 1.0)], id="a step would take less than nothing"),
    ],
)
def test_times_that_do_not_tell(text, times):
    assert fit(text, times) is None
    assert set(row(text, None, 8)) == {"hit_rate_without_guesses", "bytes_missed_a_token"}


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
    rates = [each["hit_rate_without_guesses"] for each in rows[:4]]
    assert 0 < rates[0] < rates[1] < rates[2] < rates[3] == 1.0
    assert "hit_rate_without_guesses" not in rows[4]
    measured = json.loads(result.stdout)["measured"]
    assert (measured["device"], measured["n_gpu_layers"]) == ("CPU", 0)
    assert [each["slots"] for each in measured["timed"]] == [4, E - 1]
    assert all(("token_ms" in each) == (measured["step_ms"] is not None) for each in rows[:4])
    shown = CliRunner().invoke(cli, [*given, "--measure", "--tokens", "16"]).stdout
    assert shown.count(" MB a token") == 4
    assert "timed on CPU, without guesses: " in shown
    assert "hits" not in CliRunner().invoke(cli, given).stdout


def test_speeds_are_said_to_two_digits_where_times_tell(model, monkeypatch):
    def measured(*_arguments, **_settings):
        choices = np.stack([[[(t + 3 * k) % E for k in range(K)] for t in range(60)]] * LAYERS)
        return Text(E, 1e6, choices, 4), [(4, 5.0), (12, 2.5)]

    monkeypatch.setattr("draftwood.bench.expert_plan.measure", measured)
    given = ["experts", "plan", model, "--n-ctx", "512", *sizes(model, 4, 12), "--measure"]
    shown = CliRunner().invoke(cli, given).stdout
    assert " MB a token, about 200 tok/s" in shown
    assert " MB a token, about 400 tok/s" in shown


def test_a_plan_measured_on_a_cpu_counts_as_a_load_there():
    (size,) = sizes(TRAINED, 14)
    given = ["experts", "plan", TRAINED, "--n-ctx", "512", size, "--json"]
    assert plan_of(given) == [11]  # a card keeps room for the experts of two layers of twelve
    assert plan_of([*given, "--measure", "--tokens", "16"]) == [14]
    shown = CliRunner().invoke(cli, [*given[:-1], "--measure", "--tokens", "16"])
    assert "slots are counted for plain memory" in shown.stdout
    assert "Warning" not in shown.stderr


def plan_of(given):
    result = CliRunner().invoke(cli, given)
    assert result.exit_code == 0, result.output
    return [row["slots"] for row in json.loads(result.stdout)["plan"]]


def test_one_size_is_measured_beside_half_of_it(model):
    given = ["experts", "plan", model, "--n-ctx", "512", *sizes(model, 8), "--measure", "--json"]
    result = CliRunner().invoke(cli, [*given, "--tokens", "16"])
    assert result.exit_code == 0, result.output
    assert [each["slots"] for each in json.loads(result.stdout)["measured"]["timed"]] == [4, 8]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--vram=1MiB", "--measure"], "with room for more than a token's experts; expected "),
        (["--vram=9GiB", "--measure", "--tokens=600"], "16 + 600 to write; expected them to fit into 512"),
        (["--vram=9GiB", "--measure", "--prompt="], "--prompt is empty; expected a text"),
    ],
)
def test_refused_before_anything_is_loaded(model, monkeypatch, given, said):
    monkeypatch.setattr("draftwood.bench.expert_plan.measure", None)
    result = CliRunner().invoke(cli, ["experts", "plan", model, "--n-ctx", "512", *given])
    assert result.exit_code == 1
    assert said in result.stderr
    assert "hint: " in result.stderr


@pytest.mark.parametrize("option", ["--prompt=a", "--tokens=20", "--n-gpu-layers=0"])
def test_options_of_measuring_alone(model, option):
    result = CliRunner().invoke(cli, ["experts", "plan", model, option])
    assert result.exit_code == 2
    assert f"found {option.partition('=')[0]} without --measure" in result.stderr
