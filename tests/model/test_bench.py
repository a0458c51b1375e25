"""`draftwood bench` on the real library and random models: measures, writes, leaves out, refuses."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from draftwood import Llama
from draftwood.bench.claims import Claim
from draftwood.bench.run import Request, prepare
from draftwood.cli import cli
from draftwood.engine.engine import probe_model
from draftwood.errors import OptionError
from draftwood.load.experts import IN_PLAIN_MEMORY

from tests.unit.test_bench_results import check_row

DRAFTER = Path(__file__).resolve().parents[2] / "models" / "tiny-moe" / "dflash-f16.gguf"
# llama-cpp-python keeps two files on /dev/null open to the end
IGNORED = ("-W", "ignore::ResourceWarning", "-W", f"ignore:{IN_PLAIN_MEMORY}")
COMMAND = [sys.executable, "-W", "error", *IGNORED, "-m", "draftwood", "bench"]
SMALL = ["--threads", "1", "--tokens", "24", "--prompt-tokens", "24", "--per-category", "2"]


@pytest.fixture
def prompts(tmp_path) -> Path:
    folder = tmp_path / "prompts"
    folder.mkdir()
    for category, text in (
        ("code", "def main(n):\n    return n\n"),
        ("prose", "A sea is wide, a lake is not. "),
    ):
        lines = [json.dumps({"text": f"{i} {text * 3}"}) for i in range(3)]
        (folder / f"{category}.jsonl").write_text("\n".join(lines))
    return folder


@pytest.fixture
def bench(tmp_path, prompts):
    """bench(model, ...) -> finished process, started in an empty folder."""

    def run(model: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [*COMMAND, model, "--prompts", str(prompts), *SMALL, *arguments]
        environment = {**os.environ, "DRAFTWOOD_CURVES": str(tmp_path / "curves")}
        return subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False, env=environment
        )

    return run


def test_all_modes_side_by_side(bench, gguf, tmp_path):
    model = gguf("planted-moe")  # its MTP block is often right
    files = ["--json", "out.json", "--results", "rows.json"]
    done = bench(model, *files, "--tree-budget", "7", "--floor", "mtp:0.01", "--best", "mtp:99")
    assert done.returncode == 3, done.stderr  # nothing is 99 times as fast
    assert done.stderr == "left out dflash: no --drafter was given\n"
    assert "holds: mtp: the interval reaches 0.01x in every category: " in done.stdout
    assert "FAILED: mtp: the median of one category is at least 99.00x: " in done.stdout
    found = json.loads((tmp_path / "out.json").read_text())
    check_row(found)
    check_figures(found)
    assert [claim["holds"] for claim in found["claims"]] == [True, False]
    assert (found["ok"], found["faults"]) == (False, [])
    assert found["left_out"] == {"dflash": "no --drafter was given"}
    assert found["model"] == {"file": Path(model).name, "bytes": Path(model).stat().st_size}
    assert json.loads((tmp_path / "rows.json").read_text()) == [found]


def check_figures(found: dict[str, Any]) -> None:
    figures = {(f["category"], f["temp"], f["mode"]): f for f in found["figures"]}
    modes = ("off", "mtp", "ngram", "tree", "auto")
    assert set(figures) == {(c, t, m) for c in ("code", "prose") for t in (0.0, 0.8) for m in modes}
    for (_, _, mode), figure in figures.items():
        assert figure["differing"] == 0
        assert len(figure["ratios"]) == 9
        assert figure["low"] <= figure["ratio"] <= figure["high"]
        assert figure["tokens_per_second"] > 0
        assert figure["accepted"] <= figure["drafted"]
        if mode == "off":
            assert (figure["ratio"], figure["drafted"]) == (1.0, 0)
            assert figure["tokens_per_round"] in (1.0, None)  # None: in a repetition from the start
            assert figure["rounds"] == 9 * 2 * 23  # a step each token
        if mode == "mtp":
            assert figure["accepted"] > 0
            assert figure["rounds"] < 9 * 2 * 23
            assert (figure["tree_rounds"], figure["padding"]) == (0, 0)
            assert figure["draft_length"] == figure["draft_nodes"] <= 4
        if mode == "tree":
            assert figure["tree_rounds"] > 0
            assert figure["draft_length"] < figure["draft_nodes"] <= 6
    assert found["draft_tokens"] == {"mtp": 2, "ngram": 4, "tree": 8, "auto": 8}
    assert found["tree_budget"] == {"mtp": 0, "ngram": 0, "tree": 7, "auto": 7}


def test_stock_kernels_and_loop_beside_ours(bench, gguf, tmp_path):
    done = bench(
        gguf("planted-moe"), "--modes", "stock", "--temp", "0", "--json", "out.json", "--plot", "out.png"
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    stock = [figure for figure in found["figures"] if figure["mode"] == "stock"]
    assert [figure["category"] for figure in stock] == ["code", "prose"]
    for figure in stock:
        assert (figure["rounds"], figure["drafted"], figure["tokens_per_round"]) == (0, 0, None)
        assert figure["tokens_per_second"] > 0
        assert figure["prompt_low"] <= figure["prompt_ratio"] <= figure["prompt_high"]


def test_an_attention_only_model_measures_ngrams(bench, llama_arch, tmp_path):
    done = bench(llama_arch, "--repeats", "1", "--temp", "0", "--json", "out.json")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    assert set(found["left_out"]) == {"mtp", "dflash", "tree", "auto"}
    assert {figure["mode"] for figure in found["figures"]} == {"off", "ngram"}
    assert {figure["low"] for figure in found["figures"]} == {None}
    assert "left out mtp: found architecture 'llama'" in done.stderr


def refused(*arguments: str) -> str:
    result = CliRunner().invoke(cli, ["bench", *arguments])
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    return result.stderr


def test_over_a_pool_of_experts(bench, gguf, tmp_path):
    """Each mode has a pool of its own; the text is the same, or the exit status would say so."""
    model = gguf("planted-moe")
    info = probe_model(model)
    size = f"{info.expert_bytes // 2}B"
    done = bench(model, "--expert-vram", size, "--modes", "mtp,ngram", "--repeats", "1", "--json", "out.json")
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "out.json").read_text())
    pools = document["expert_pools"]
    assert pools.pop("expert_vram") == size
    assert set(pools) == {"off", "mtp", "ngram"}
    assert re.search(r"^hits of the experts' pools: off \d+%, mtp \d+%, ngram \d+%$", done.stdout, re.M)
    assert "95 %: an interval needs 6 repeats" in done.stdout
    assert re.search(
        r"^ratio: over plain decode, the median of pairs that took turns; CPU threads: \d+$",
        done.stdout,
        re.M,
    )
    for stats in pools.values():
        assert 0 < stats["slots"] <= stats["experts"] // 2
        assert stats["misses"] > 0
    done = bench(model, "--expert-vram", "1GiB", "--modes", "ngram", "--repeats", "6")
    assert "no pool: all experts fit in 1GiB" in done.stdout
    assert "an interval needs" not in done.stdout
    stock = refused(model, "--expert-vram", size, "--modes", "stock")
    assert "beside the mode stock, which has no pool" in stock
    assert "--expert-vram is '6 apples'" in refused(model, "--expert-vram", "6 apples", "--modes", "mtp")


def test_refusals(gguf, llama_arch, tmp_path, prompts):
    assert "Model path does not exist: no-such.gguf\n\nhint: check the path" in refused("no-such.gguf")
    assert f"{tmp_path} is a directory; expected a GGUF file" in refused(str(tmp_path))
    assert "hint: draftwood bench MODEL --drafter FILE" in refused(str(DRAFTER))
    assert "is not a GGUF file" in refused(__file__)
    model = gguf("planted-moe")
    assert "found no mode to hold against plain decode" in refused(llama_arch, "--modes", "mtp")
    drafter = ["--drafter", str(tmp_path / "no-such-drafter.gguf"), "--modes", "dflash", *SMALL]
    assert "Drafter path does not exist: " in refused(model, "--prompts", str(prompts), *drafter)
    message = refused(model, "--modes", "mtp,auto", "--floor", "ngram:1")
    assert "--floor is about ngram, which is not measured against off: it is not among --modes" in message


def test_a_prompt_longer_than_the_context_is_refused(gguf, tmp_path):
    file = tmp_path / "long.jsonl"
    file.write_text(json.dumps({"text": "a b c d " * 40000}))
    request = Request(
        model=gguf("planted-moe"), drafter=None, modes=["mtp"], prompts=[file], per_category=1, tokens=16,
        prompt_tokens=10**6, repeats=9, threads=1, n_gpu_layers=0, expert_vram=None, draft_tokens=None,
        tree_budget=None, temps=[0.0], claims=[Claim("floor", "mtp", 0.9)],
    )  # fmt: skip
    with pytest.raises(
        OptionError, match=r"found a prompt of \d+ tokens and 16 to generate; .* into the \d+"
    ):
        prepare(request)


class Wrong(Llama):
    """Writes another fifth token than the model."""

    def generate(self, tokens: Any, *args: Any, **kwargs: Any) -> Iterator[int]:  # type: ignore[override]
        for i, token in enumerate(super().generate(tokens, *args, **kwargs)):
            yield token + (i == 4)


def test_another_text_is_an_error(gguf, prompts, tmp_path, monkeypatch):
    def load(mode: str, model: str, drafter: None, tree_budget: None, **settings: Any) -> Llama:
        return (Wrong if mode == "ngram" else Llama)(model, speculation=mode, verbose=False, **settings)

    monkeypatch.setattr("draftwood.bench.run.load", load)
    path = tmp_path / "out.json"
    given = [
        "--prompts",
        str(prompts / "code.jsonl"),
        "--repeats",
        "1",
        "--temp",
        "0",
        "--json",
        str(path),
        *SMALL,
    ]
    result = CliRunner().invoke(cli, ["bench", gguf("planted-moe"), "--modes", "ngram,mtp", *given])
    assert result.exit_code == 1
    assert "wrong: ngram, code at temperature 0: 4 texts differ from plain decode's" in result.stderr
    assert "wrong: mtp" not in result.stderr
    assert "temperature 0" in result.stdout  # what was measured is shown all the same
    found = json.loads(path.read_text())
    assert (found["ok"], len(found["faults"])) == (False, 1)
