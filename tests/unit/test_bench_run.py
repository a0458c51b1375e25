"""bench/run.py without the library: cases, schedules, states, processes, bytes, and the command line."""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import replace

import pytest
from click.testing import CliRunner
from draftwood.bench import results
from draftwood.engine import _capi
from draftwood.engine.cuda_libraries import Outcome
from draftwood.errors import OptionError
from synth_gguf import PRESETS, measure, write

from bench import run as command
from bench.gpu import cases, child, files, floor, stages, stamp, stock
from bench.gpu.cases import Case
from bench.gpu.schedule import accepted, geometric, mean_length
from bench.gpu.work import BenchError, Clock, Work, read
from tests.unit.test_bench_run_rows import ORIGIN, restart, state

# ---- schedules ----


@pytest.mark.parametrize(("length", "n_drafts"), [(2.0, 2), (4.0, 5), (6.0, 15), (1.0, 3), (4.0, 3)])
def test_a_geometric_schedule_has_its_length_and_one_chance(length, n_drafts):
    rates = geometric(length, n_drafts)
    assert mean_length(rates) == pytest.approx(length)
    assert [rate ** (1 / j) for j, rate in enumerate(rates, 1)] == pytest.approx([rates[0]] * n_drafts)


@pytest.mark.parametrize(("length", "n_drafts"), [(0.9, 3), (4.1, 3), (2.0, 0)])
def test_a_length_out_of_reach_is_refused(length, n_drafts):
    with pytest.raises(OptionError, match="mean length"):
        geometric(length, n_drafts)


def test_accepted_drafts_follow_the_rates():
    rates, n = geometric(4.0, 5), 128
    found = accepted(rates, n, seed=3)
    for depth, rate in enumerate(rates, 1):
        assert abs(sum(a >= depth for a in found) / n - rate) <= 1 / n
    assert sum(found) / n + 1 == pytest.approx(4.0, abs=0.03)
    other = accepted(rates, n, seed=4)
    assert other != found
    assert sorted(other) == sorted(found)


# ---- cases ----


def test_committed_cases_can_be_measured():
    known = cases.read()
    headline = {name: known[name] for name in ("length2", "length4", "length6")}
    assert [(case.nodes, case.length) for case in headline.values()] == [(3, 2.0), (6, 4.0), (16, 6.0)]
    assert {case.restarts for case in headline.values()} == {5}
    assert {"plain", "tree16", "tree24"} <= set(known)
    for case in known.values():
        assert len(case.schedule) == case.drafts
        assert len(case.stock_schedule) == case.nodes - 1
        assert len(case.prompt_of(50, case.seed)) == case.prompt
        assert case.n_ctx > case.prompt + sum(n + 1 for n in accepted(case.schedule, case.rounds, case.seed))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('nodes = "3"', "nodes"), ("node = 3", "node"), ('name = "x"', "name"), ("auto = 1", "auto"),
        ('drafter = "ngram"', "drafter is 'ngram'"), ("nodes = 65", "65 nodes"), ("nodes = 1", "1 nodes"),
        ("nodes = 3\nlength = 3.5", "mean length"), ("nodes = 3\nrates = [0.2, 0.5]", "rates are"),
        ("nodes = 3\nrates = [0.5]", "rates are"),
        ("nodes = 2\nrates = [0.5]\nlength = 2.0", "length beside rates"),
        ('nodes = 4\nshape = "tree"\ndepth = 4', "depth is 4"), ("nodes = 3\nrounds = 0", "rounds is 0"),
        ("nodes = 3\npart_rounds = 0", "part_rounds is 0"), ("nodes = ", "no TOML"),
        ('nodes = 3\ndrafter = "given"\nauto = true', "auto with drafter"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_case_is_said(tmp_path, text, found):
    (tmp_path / "bad.toml").write_text(text)
    with pytest.raises(OptionError, match=found) as caught:
        cases.read(tmp_path)
    assert "bench/cases" in str(caught.value.hint)


def test_settings_change_every_case():
    known = cases.read(settings=["rounds=7", "part_rounds=7", "auto=false"], model="tiny-moe")
    assert {(case.rounds, case.auto, case.model) for case in known.values()} == {(7, False, "tiny-moe")}


def test_few_rounds_are_a_setting_by_themselves():
    assert {case.rounds for case in cases.read(settings=["rounds=8"], model="tiny-moe").values()} == {8}


@pytest.mark.parametrize("setting", ["rounds", "rounds=x", "name=x", "rates=1", "nothing=1"])
def test_other_settings_are_refused(setting):
    with pytest.raises(OptionError, match=f"--set {setting}"):
        cases.read(settings=[setting])


def test_llama_server_gets_the_same_schedule(tmp_path):
    case = Case(name="c", nodes=6, length=4.0, threads=2, n_gpu_layers=0)
    flags = stock.drafting_flags(case, None)
    rates = flags[flags.index("--spec-synth-rates") + 1].split(",")
    assert [float(rate) for rate in rates] == pytest.approx(case.schedule)
    assert flags[flags.index("--spec-draft-n-max") + 1] == "5"
    tree = replace(case, shape="tree", depth=3, rates=(0.9, 0.6, 0.3), length=1.0)
    assert tree.stock_schedule == (0.9, 0.6, 0.3, 0.3, 0.3)
    dflash = stock.drafting_flags(replace(case, drafter="dflash"), tmp_path / "d.gguf")
    assert dflash[dflash.index("--spec-type") + 1] == "draft-dflash"
    assert str(tmp_path / "d.gguf") in dflash
    plain = stock.common_flags(case, tmp_path / "m.gguf", 99)
    assert plain[plain.index("--gpu-layers") + 1] == "0"
    assert plain[plain.index("--ctx-size") + 1] == "99"
    assert plain[plain.index("--cache-type-k") + 1] == "f16"
    quantised = stock.common_flags(replace(case, cache="Q8_0"), tmp_path / "m.gguf", 99)
    assert [quantised[quantised.index(f"--cache-type-{side}") + 1] for side in "kv"] == ["q8_0", "q8_0"]


# ---- states and clocks ----


def test_a_state_is_kept_copied_and_read_again(tmp_path):
    work = Work(tmp_path / "work", tmp_path / "out")
    work.state["floor"] = {"a": 1}
    work.save()
    again = Work(tmp_path / "work")
    assert again.kept({}, "cases", "length4", "0") is again.kept({}, "memory") is None
    assert again.state == work.state == read(tmp_path / "out" / "bench.json")
    assert Work(tmp_path / "other").state["run"] != work.state["run"]


def test_what_was_measured_otherwise_or_elsewhere_is_refused(tmp_path):
    work, path, asked = Work(tmp_path), ("cases", "length4", "0"), {"seed": 1}
    work.origin = {"commit": "a", "build": {"cuda": True}, "date": "1", "load_average": 0.5}
    work.keep(asked, {"x": 1}, *path)
    again = Work(tmp_path)
    again.origin = {**work.origin, "date": "2", "load_average": 0.1}  # a resumed run
    found = again.kept(asked, *path)
    assert (found["x"], found["origin"]["date"]) == (1, "1")
    with pytest.raises(BenchError, match=r"found cases length4 0 measured .* with seed 1, not 2; expected"):
        again.kept({"seed": 2}, *path)
    for change in ({"commit": "b"}, {"build": {"cuda": False}}, {"cards": ["NVIDIA H100"]}):
        again.origin = {**work.origin, **change}
        with pytest.raises(BenchError, match=rf"measured .* with {next(iter(change))} .*, not") as caught:
            again.kept(asked, *path)
        assert "--work of another folder" in str(caught.value.hint)
        assert again.kept(asked, "cases", "length4", "1") is None


CASE = Case(name="c", model="tiny-moe", nodes=3, length=2.0)


@pytest.mark.parametrize(
    ("path", "asked", "other", "told"),
    [
        (["models", "tiny-moe"], {"on_card": True}, {"n_gpu_layers": 0}, "on_card True, not False"),
        (["memory", "tiny-moe"], {"n_gpu_layers": -1, "threads": 0}, {"threads": 2}, "threads 0, not 2"),
        (["real"], {"n_gpu_layers": -1, "real": ["--temp", "0"]}, {}, r"real \['--temp', '0'\], not \[\]"),
        (["profile", "c"], CASE.asked, {"rounds": 7}, "rounds 128, not 7"),
    ],
)
def test_a_stage_that_is_done_refuses_other_options(tmp_path, path, asked, other, told):
    work = Work(tmp_path)
    work.origin = ORIGIN
    work.keep(asked, {"bytes": 1}, *path)
    assert stages.run(path[0], work, Clock(0), stages.Plan([CASE], "--temp 0", lambda _: None))
    with pytest.raises(BenchError, match=told):
        stages.run(path[0], work, Clock(0), stages.Plan([replace(CASE, **other)], "", lambda _: None))


@pytest.mark.parametrize("text", ["", "[]", '{"schema": 1}', "{}"])
def test_another_file_is_no_state(tmp_path, text):
    (tmp_path / "bench.json").write_text(text)
    with pytest.raises(BenchError, match=r"no state of bench/run\.py"):
        Work(tmp_path)


def test_a_clock_limits_steps_and_ends():
    clock = Clock(1)
    assert clock.limit(5.0) == 5.0
    assert 50.0 < clock.limit(600.0) <= 60.0
    with pytest.raises(BenchError, match="no time left"):
        Clock(0).limit(1.0)


# ---- processes ----


def test_a_child_prints_logs_and_may_fail(tmp_path):
    log = tmp_path / "log"
    text = "import sys; print('printed'); print('said', file=sys.stderr); sys.exit(int(sys.argv[1]))"
    assert child.run("it", ["-c", text, "0"], log, 60) == "printed\n"
    assert log.read_text() == "said\n"
    with pytest.raises(BenchError, match=r"it ended with status 3\nprinted\nsaid\n\nhint: .*log"):
        child.run("it", ["-c", text, "3"], log, 60)
    text = "import sys; print('x' * 9999, file=sys.stderr); sys.exit(1)"
    with pytest.raises(BenchError, match=rf"status 1\nx{{{child.LAST - 1}}}\n\nhint"):
        child.run("it", ["-c", text], log, 60)
    assert log.read_text() == "x" * 9999 + "\n"


def test_a_child_that_takes_too_long_is_ended(tmp_path):
    text = "import os, time; os.write(2, b'%d' % os.getpid()); time.sleep(600)"
    with pytest.raises(BenchError, match="it took longer than 5 s") as caught:
        child.run("it", ["-S", "-c", text], tmp_path / "log", 5)
    pid = re.search(r"\n(\d+)\n", str(caught.value))
    assert pid is not None, "what it said is shown"
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid[1]), 0)


def test_only_a_script_with_neighbours_may_import_them(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONSAFEPATH", "1")  # as tools/gpu.sh sets it; before Python 3.11 it does nothing
    look = ["-c", "import os; print('PYTHONSAFEPATH' in os.environ)"]
    assert child.run("it", look, tmp_path / "log", 60) == "True\n"
    assert child.run("it", look, tmp_path / "log", 60, neighbours=True) == "False\n"


def test_an_answer_is_the_object_on_the_last_line():
    assert child.answer("it", 'loading\n{"a": 1}\n') == {"a": 1}
    for printed in ("", "\n", "loading\n", '{"a": 1}\ndone', "[1]\n"):
        with pytest.raises(BenchError, match=r"it printed .* last; expected a JSON object"):
            child.answer("it", printed)


# ---- bytes ----


@pytest.mark.parametrize("preset", ["moe-mtp", "dense-plain", "tied-mtp"])
def test_the_bytes_of_a_pass_are_those_of_the_tensors(tmp_path, preset):
    from gguf import GGUFReader

    spec = PRESETS[preset]
    write(spec, tmp_path / "m.gguf")
    found = files.reads(tmp_path / "m.gguf")
    sizes = {t.name: int(t.n_bytes) for t in GGUFReader(tmp_path / "m.gguf").tensors}
    assert found.head == sizes["token_embd.weight" if spec.tied else "output.weight"]
    block = f"blk.{spec.layers}."
    mtp = {name: size for name, size in sizes.items() if name.startswith(block)}
    chosen = sum(size for name, size in mtp.items() if "_exps." in name) * spec.top_k // spec.experts
    assert found.mtp == sum(size for name, size in mtp.items() if "_exps." not in name) + chosen
    embedding = 0 if spec.tied else sizes["token_embd.weight"]
    assert found.dense + found.experts == sum(sizes.values()) - sum(mtp.values()) - embedding
    assert (found.n_experts, found.n_used) == ((spec.experts, spec.top_k) if spec.is_moe else (0, 0))
    recurrent = spec.layers - spec.layers // spec.attention_interval
    channels = (2 * spec.key_heads + spec.value_heads) * spec.state_size
    state = spec.value_heads * spec.state_size**2 + (spec.conv - 1) * channels
    assert found.state == 4 * recurrent * state
    assert found.cell == 2 * (spec.layers - recurrent) * spec.kv_heads * 2 * spec.head_size
    everything = found.forward(spec.experts, 10)
    assert everything == found.dense + found.experts + 2 * found.state + 10 * found.cell
    if spec.is_moe:
        assert found.forward(spec.top_k, 10) == everything - found.experts * (1 - spec.top_k / spec.experts)


def test_models_are_named_written_or_refused(tmp_path):
    work = Work(tmp_path)
    tiny = files.of("tiny-moe", work)
    assert tiny.model.name == "tiny-moe-f16.gguf"
    assert tiny.drafter is not None
    with pytest.raises(BenchError, match=r"no moe-plain\.gguf"):
        files.of("moe-plain", work)
    files.write("moe-plain", False, work, Clock(1))
    assert files.of("moe-plain", work).model.stat().st_size == measure(PRESETS["moe-plain"]).bytes
    assert files.of("moe-plain", work).drafter is None
    files.write("moe-plain", True, work, Clock(1))
    assert files.of("moe-plain", work).drafter is not None
    files.write("moe-plain", True, work, Clock(0))  # nothing is left to write: no time is needed
    path = files.of("moe-plain", work).model
    assert files.of(str(path), work) == files.Files(path, None)
    with pytest.raises(OptionError, match="no file"):
        files.of(str(tmp_path / "x.gguf"), work)
    with pytest.raises(BenchError, match="ended with status 2"):
        files.write("no-such-preset", False, work, Clock(1))


# ---- the command line ----


def test_collect_adds_rows_once(tmp_path):
    folder, target = tmp_path / "out", tmp_path / "results"
    folder.mkdir()
    target.mkdir()
    found = state(restart())
    trees = {"16": {"tree_bytes": 1, "snapshot_bytes": 2}, "24": {"refused": "why"}}
    found["memory"] = {"35b-a3b": {"origin": ORIGIN, "trees": trees}}
    table = {"rounds": 3, "us": 9.0, "launches": 1, "kernels": []}
    found["profile"] = {"length4": {"origin": ORIGIN, "phase": "round", **table}}
    document = {"schema": 3, "date": "2026-01-02", "commit": None, "modified": None, "figures": []}
    document["cards"] = ORIGIN["cards"]
    found["real"] = {"origin": ORIGIN, "document": document}
    other = {**ORIGIN, "date": "2026-01-05"}  # a run that was resumed between two collects
    for added, found["memory"]["35b-a3b"]["origin"] in ((5, ORIGIN), (0, ORIGIN), (0, other)):
        (folder / "bench.json").write_text(json.dumps(found))
        done = CliRunner().invoke(command.main, ["collect", str(folder), "--results", str(target)])
        assert (done.exit_code, done.output) == (0, f"{folder}: {added} rows added\n")
    assert [row["case"] for row in results.read(target / "gpu-h100.json")] == [
        "length4",
        "tree-memory",
        "tree-memory",
    ]
    assert results.read(target / "gpu-h100-kernels.json")[0]["phase"] == "round"
    assert results.read(target / "tiny-moe-f16-h100.json")[0]["commit"] == "a" * 40
    alone = {"schema": 2, "run": "b", "cases": {}}  # stage real and nothing else
    alone["real"] = {"origin": ORIGIN, "document": {**document, "date": "2026-01-03"}}
    (folder / "bench.json").write_text(json.dumps(alone))
    done = CliRunner().invoke(command.main, ["collect", str(folder), "--results", str(target)])
    assert done.output == f"{folder}: 1 rows added\n"


def test_errors_are_a_line(tmp_path):
    def invoke(*arguments: str) -> str:
        done = CliRunner().invoke(command.main, [*arguments])
        assert done.exit_code != 0
        return done.output

    work = ["--work", str(tmp_path)]
    assert "is not one of" in invoke("run", "everything", *work)
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "bench.json").write_text("[]")
    for arguments, words in (
        (["run", "cases", "--case", "x", *work], r"found --case x; expected one of"),
        (["run", "cases", "--set", "y=1", *work], r"found --set y=1"),
        (["run", "models", "--model", "x", *work], r"found the model 'x'; .* or one of .*35b-a3b"),
        (["collect", str(tmp_path)], r"found no bench\.json in .*\n\nhint: name the folder"),
        (["collect", str(tmp_path / "bad")], r"no state of bench/run\.py"),
    ):
        found = invoke(*arguments)
        assert re.search(words, found), found
        assert "\n\nhint: " in found


def test_a_python_without_gguf_is_an_error_in_words(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    for call in (files.presets, lambda: files.reads(tmp_path / "m.gguf")):
        with pytest.raises(BenchError, match="found no module gguf") as caught:
            call()
        assert "pip install gguf" in str(caught.value.hint)


def test_a_machine_without_a_card_is_an_error_in_words(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BenchError, match="nvidia-smi cannot be run") as caught:
        floor.card()
    assert "leave stage floor out" in str(caught.value.hint)


def test_clients_together_have_the_speed_of_their_common_time():
    slow = {"predicted_n": 11, "seen": [(0.0, 1), (10.0, 11)]}
    late = {"predicted_n": 21, "seen": [(5.0, 1), (6.0, 6), (9.0, 21)], "draft_n_accepted": 4}
    found = stock.together([slow, late])
    # from 5.0 to 9.0 the second wrote 20 tokens; the first's event behind it is not in that time
    assert found["predicted_per_second"] == 5.0
    assert (found["predicted_n"], found["predicted_ms"]) == (31, 6000.0)
    assert (found["draft_n_accepted"], found["clients"]) == (4, 2)
    assert stock.together([slow]) == {"predicted_n": 11}
    with pytest.raises(BenchError, match="one after the other"):
        stock.together([slow, {"predicted_n": 2, "seen": [(10.5, 1), (11.0, 2)]}])


@pytest.mark.parametrize(
    "settings", [("clients=-1",), ("clients=2", "drafter=none", "nodes=1"), ("clients=2", "experts=0.5")]
)
def test_clients_of_cases_that_have_none(settings):
    with pytest.raises(OptionError, match="clients"):
        cases.read(settings=settings)


def test_a_backend_that_does_not_load_is_not_timed_on_a_cpu(monkeypatch):
    monkeypatch.setattr(_capi, "cuda", Outcome("undefined symbol: cuMemCreate"))
    with pytest.raises(BenchError, match="does not load: undefined symbol: cuMemCreate"):
        stamp.origin()
