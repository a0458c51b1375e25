"""`draftwood experts`: plans from a header, heat files as tables and pictures."""

from __future__ import annotations

import json
import re

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

    assert "guesses" not in done.output
    guessed = run(
        "show", model, "abc", "--expert-vram", "1MiB", "-n", "4", "--n-ctx", "256", "--expert-guess"
    )
    assert "guesses were right" in guessed.output


@pytest.mark.parametrize(
    ("size", "said"),
    [
        ((), "found neither --vram nor --expert-vram; expected one of them"),
        (("--n-gpu-layers", "-1"), "found neither --vram nor --expert-vram; expected one of them"),
        (
            ("--expert-vram", "1GiB"),
            r"all experts fit: they take \d+ bytes \(\d+ MiB\); expected less memory",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:found n_gpu_layers=-1")
def test_a_text_without_a_pool(model, size, said):
    done = run("show", model, "abc", "--n-ctx", "256", *size)
    assert done.exit_code == 1
    assert re.search(said, done.output)
    hint = re.search(r"hint: (--expert-vram \d+(?:MiB)?), about half", done.output)[1]
    done = run("show", model, "abc", "--n-ctx", "256", "-n", "2", "--json", *hint.split())
    assert json.loads(done.stdout)["slots"] == LAYERS * E // 2


def test_a_text_of_a_dense_model(gguf):
    done = run("show", gguf("dense-mtp"))
    assert done.exit_code == 1
    assert "has no experts" in done.output


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


def test_a_plan_reads_a_heat_file_of_this_model_alone(model, heat_file, tmp_path):
    done = run("plan", model, "--expert-heat", str(tmp_path / "none.json"))
    assert (done.exit_code, done.stdout) == (1, "")
    assert "none.json; expected a heat file" in done.output
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"schema": 1, "n_experts": 4, "heat": {"0": [1] * 4}}))
    done = run("plan", model, "--expert-heat", str(other))
    assert (done.exit_code, done.stdout) == (1, "")
    assert f"is no heat file of a model with {LAYERS} layers of {E} experts" in done.output


def test_an_empty_prompt_is_refused_before_the_model_is_read():
    done = run("show", "nothing.gguf", "", "--expert-vram", "8MiB")
    assert done.exit_code == 2
    assert "found an empty prompt; expected text" in done.output
    assert re.search(r'hint: draftwood .*show MODEL "', done.output)


def test_errors_and_help_are_in_the_words_of_the_command(model):
    done = run("show", model, "--vram", "1GiB", "--expert-vram", "1MiB")
    assert (
        "found --vram and --expert-vram; expected one of them\n\nhint: leave --expert-vram out" in done.output
    )
    done = run("show", model, "--vram", "7")
    assert re.search(r"--vram is '7'; expected \d+ bytes or more", done.output)
    assert re.search(r"hint: --vram \d+MiB; a smaller --n-ctx needs less\n", done.output)
    assert "..." not in run("--help").output.partition("Commands:")[2]


def test_a_plan_in_words(model, heat_file):
    done = run("plan", model, "--vram", "1MiB", "--vram", "100GiB", "--expert-heat", heat_file)
    assert "4 layers of 16 experts" in done.output
    assert "\n      1MiB  " in done.output
    assert "slots are counted for a card" in done.output
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


def test_a_picture_that_cannot_be_written_is_refused_at_once(heat_file, tmp_path):
    done = run("heat", heat_file, "--plot", str(tmp_path / "none" / "heat.png"))
    assert (done.exit_code, done.stdout) == (1, "")
    assert "heat.png cannot be written: No such file or directory; expected a file that can" in done.output
    assert "hint: name a file" in done.output


@pytest.mark.parametrize("text", ["", "[]", '{"heat": 7}', '{"heat": {"a": [1]}}'])
def test_what_is_no_heat_file(tmp_path, text):
    path = tmp_path / "heat.json"
    path.write_text(text)
    done = run("heat", str(path))
    assert done.exit_code == 1
    assert "is no heat file" in done.output
    assert "hint: " in done.output
