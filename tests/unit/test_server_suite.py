"""What `make server-suite` makes of two runs: tests that it holds against suite.toml, replies that differ."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

SUITE = Path(__file__).resolve().parents[1] / "server" / "suite"


def loaded(name):
    spec = importlib.util.spec_from_file_location(name, SUITE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


replies = loaded("replies")
pytest.importorskip("draftwood.cli.serve")
run = loaded("run")


def record(body, request="POST /completion {}", status=200, whole=True):
    return replies.Record("test_a.py::test_b", request, status, body, whole)


def n_differences(off, on):
    return len(replies.compare(off, on, ()).differences)


def completion(content, **more):
    timings = {"prompt_ms": id(content) * 0.1, "predicted_n": 3, **more}
    return json.dumps({"id": str(id(timings)), "content": content, "timings": timings})


def test_times_names_and_drafts_may_differ():
    off, on = completion("a"), completion("a", draft_n=7, draft_n_accepted=4)
    compared = replies.compare([record(off)], [record(on)], ())
    assert compared == ([], 1, 7, 4)


@pytest.mark.parametrize("other", [completion("b"), completion("a", predicted_n=4), "a"])
def test_text_and_counts_may_not(other):
    assert n_differences([record(completion("a"))], [record(other)]) == 1


def test_a_status_may_not():
    assert n_differences([record("{}")], [record("{}", status=500)]) == 1


def test_parallel_replies_come_in_any_order():
    one, two = record(completion("a")), record(completion("b"))
    assert n_differences([one, two], [two, one]) == 0
    assert n_differences([one, two], [one, one]) == 1
    assert n_differences([one, two], [one]) == 1


def stream(*words):
    return "".join(f"data: {json.dumps({'content': word})}\n\n" for word in words) + "data: [DONE]\n\n"


def test_streams_are_compared_by_event():
    assert n_differences([record(stream("a", "b"))], [record(stream("a", "b"))]) == 0
    assert n_differences([record(stream("a", "b"))], [record(stream("a", "c"))]) == 1
    assert n_differences([record(stream("a", "b"))], [record(stream("a"))]) == 1


def test_of_a_stream_that_was_left_only_what_both_have_read():
    cut = record('data: {"content": "a"}\n\ndata: {"cont', whole=False)
    assert n_differences([cut], [record(stream("a", "b"))]) == 0
    assert n_differences([cut], [record(stream("b", "b"))]) == 1


def test_of_a_request_that_is_repeated_until_something_happens_only_the_end():
    asked = "GET /slots "
    assert n_differences([record("[1]", asked), record("[2]", asked)], [record("[2]", asked)]) == 0
    assert n_differences([record("[2]", asked)], [record("[1]", asked)]) == 1


def test_decodes_and_seconds_of_metrics_may_differ():
    text = (
        "llamacpp:n_decode_total {}\nllamacpp:prompt_seconds_total {}\nllamacpp:tokens_predicted_total {}\n"
    )
    assert n_differences([record(text.format(1, 2, 3))], [record(text.format(4, 5, 3))]) == 0
    assert n_differences([record(text.format(1, 2, 3))], [record(text.format(1, 2, 4))]) == 1


CONFIG = {"left_out": {"why": ["test_a.py", "test_b.py::test_c"]}, "may_skip": {"how": ["test_d.py::test_e"]}}
GOOD = {"test_a.py::test_x[1]": "failed", "test_b.py::test_c[2]": "failed", "test_d.py::test_e": "skipped"}


def judged(**results):
    """Judge two runs: GOOD and a passed test, and the same with `results` in the second."""
    names = {**GOOD, "test_d.py::test_f": "passed"}
    first = {name: run.Outcome(how, "") for name, how in names.items()}
    second = {**first, **{name.replace("__", "::"): run.Outcome(how, "") for name, how in results.items()}}
    return run.judge({"off": run.Run(first, []), "on": run.Run(second, [])}, CONFIG, partial=False)


def test_a_good_run():
    assert judged() == ([], 1, 1)


@pytest.mark.parametrize("how", ["failed", "skipped"])
def test_a_test_that_is_not_left_out_must_pass(how):
    wrong, n_passed, n_runnable = judged(**{"test_d.py__test_f": how})
    assert [each.partition(":")[0] for each in wrong] == [f"{how} with --spec-type on"]
    assert (n_passed, n_runnable) == (0, 1)


def test_a_test_that_is_left_out_must_fail():
    assert judged(**{"test_a.py__test_x[1]": "passed"})[0] == ["left out, but passes: test_a.py::test_x[1]"]


def test_an_entry_without_a_test_is_an_error():
    config = {**CONFIG, "left_out": {"why": ["test_z.py"]}}
    assert run.judge({"off": run.Run({}, [])}, config, partial=False)[0][-1] == "no such test: test_z.py"


def test_the_suite_does_not_take_the_callers_pytest_options(monkeypatch, tmp_path):
    """-x would end it at the first test that is left out, and all behind it would be missing."""
    monkeypatch.setenv("PYTEST_ADDOPTS", "-x")
    monkeypatch.setattr(run, "program", lambda name: tmp_path / name)
    (tmp_path / run.TESTS).mkdir(parents=True)
    given = {}
    monkeypatch.setattr(run.subprocess, "Popen", lambda command, env, **more: given.update(env))
    run.start("plain", tmp_path, {"models": {}, "downloads": {}}, [])
    assert not given["PYTEST_ADDOPTS"]


def test_templates_say_one_day(tmp_path):
    """tiny-moe writes another text behind each date, and one may be no tool call and no reply."""
    lines = ['{{- strftime_now("%d %b %Y") + date_string + "" }}', "{%- if strftime_now is defined %}"]
    (tmp_path / "a.jinja").write_text("\n".join([*lines, "{{ strftime_now('%Y-%m-%d') }}"]), "utf-8")
    run.stop_the_clock(tmp_path, tmp_path / "dated")
    assert (tmp_path / "dated" / "a.jinja").read_text("utf-8").splitlines() == [
        "{{- '25 Nov 2026' + '25 Nov 2026' + \"\" }}", lines[1], "{{ '2026-11-25' }}",
    ]  # fmt: skip
