"""`draftwood experts`: plans from a header, heat files as tables and pictures."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from draftwood.cli import cli

E, LAYERS = 16, 4


@pytest.fixture
def model(gguf):
    return gguf("moe-mtp", experts=E, top_k=3)


@pytest.fixture
def heat_file(tmp_path):
    path = tmp_path / "heat.json"
    heat = {str(layer): [256] * (E // 4) + [0] * (E - E // 4) for layer in range(LAYERS)}
    path.write_text(json.dumps({"schema": 1, "n_experts": E, "heat": heat}))
    return str(path)


def run(*arguments):
    return CliRunner().invoke(cli, ["experts", *arguments], catch_exceptions=False)


def test_a_run_says_what_the_pool_did(model):
    done = CliRunner().invoke(
        cli, ["run", model, "abc", "--raw", "-n", "16", "--json", "--expert-vram", "1MiB", "--threads", "1"]
    )
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)["experts"]
    assert found["layers"] == LAYERS
    assert found["misses"] > 0


def test_a_text_and_what_its_experts_cost(model):
    done = run("show", model, "abc", "--expert-vram", "1MiB", "-n", "16", "--n-ctx", "256", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    layers = found["by_layer"].values()
    assert len(layers) == LAYERS
    for name in ("hits", "misses", "in_place"):
        assert sum(each[name] for each in layers) == found[name]
    assert 0 < found["bytes_missed_a_token"] < found["bytes_missed"]
    done = run("show", model, "abc", "--expert-vram", "1MiB", "-n", "4", "--n-ctx", "256")
    assert len(done.output.splitlines()) == LAYERS + 2
    assert "hit rate" in done.output


def test_a_text_without_a_pool(model):
    done = CliRunner().invoke(cli, ["experts", "show", model, "abc", "--n-ctx", "256"])
    assert done.exit_code == 1
    assert "fit; expected less memory" in done.output


def plan(model, *arguments):
    done = run("plan", model, "--json", *arguments)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_a_plan_is_what_a_llama_would_do(model):
    whole = plan(model, "--vram", "100GiB")
    rest, experts = whole["beside"], whole["expert_bytes"]
    sizes = [rest - 1, rest, rest + experts // 2, rest + experts]
    found = plan(model, *(word for size in sizes for word in ("--vram", str(size))))["plan"]
    assert [(row["fits"], row["slots"]) for row in found] == [
        (False, 0),
        (True, 3),
        (True, E // 2),
        (True, E),
    ]


def test_a_plan_with_heat(model, heat_file):
    whole = plan(model)
    sizes = ("--vram", str(whole["beside"] + whole["expert_bytes"] // 4))
    assert plan(model, *sizes, "--expert-heat", heat_file)["plan"][0]["uses"] == 1.0
    assert plan(model, *sizes)["plan"][0]["uses"] is None


def test_a_plan_in_words(model, heat_file):
    done = run("plan", model, "--vram", "1MiB", "--vram", "100GiB", "--expert-heat", heat_file)
    assert "4 layers of 16 experts" in done.output
    assert "too small for the rest" in done.output
    assert "16 of 16, 100% of the uses counted" in done.output


def test_a_longer_context_leaves_less(model):
    assert plan(model, "--n-ctx", "65536")["beside"] > plan(model)["beside"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("plan", "nothing.gguf"), "nothing.gguf"),
        (("heat", "nothing.json"), "nothing.json"),
    ],
)
def test_files_that_are_not_there(arguments, text):
    done = CliRunner().invoke(cli, ["experts", *arguments])
    assert done.exit_code in (1, 2)
    assert text in done.output
    assert "Traceback" not in done.output


def test_sizes_that_are_none(model):
    done = run("plan", model, "--vram", "6 apples")
    assert done.exit_code == 1
    assert "vram is '6 apples'" in done.output


def test_a_dense_model(gguf):
    done = run("plan", gguf("dense-mtp"))
    assert done.exit_code == 1
    assert "has no experts" in done.output


def test_heat_as_a_table_and_a_picture(heat_file, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "heat.png"
    done = run("heat", heat_file, "--plot", str(picture))
    assert done.exit_code == 0, done.output
    assert done.output.count("4 of 16") == LAYERS
    assert done.output.count("100%") == LAYERS
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("text", ["", "[]", '{"heat": 7}', '{"heat": {"a": [1]}}'])
def test_what_is_no_heat_file(tmp_path, text):
    path = tmp_path / "heat.json"
    path.write_text(text)
    done = run("heat", str(path))
    assert done.exit_code == 1
    assert "is no heat file" in done.output
    assert "hint: " in done.output
