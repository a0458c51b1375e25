"""The command line on the real library and a synthetic model: processes, pipes, signals, the server."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import source
from click.testing import CliRunner
from draftwood import Llama, __version__
from draftwood.cli import cli
from draftwood.cli.progress import Interrupt
from draftwood.cli.session import Session
from draftwood.engine import _capi
from draftwood.errors import ContextFullError, OptionError, UnsupportedError

from tests.model.processes import COMMAND, ENVIRONMENT, ask, ready, serving

ROOT = Path(__file__).resolve().parents[2]
PROMPT = "def main"
N = 60


def draftwood(*arguments: str, **settings: Any) -> subprocess.CompletedProcess[Any]:
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, timeout=240, check=False, env=ENVIRONMENT, **settings
    )


def run(*arguments: str, **settings: Any) -> subprocess.CompletedProcess[Any]:
    return draftwood("run", *arguments, "--threads", "1", **settings)


def run_json(*arguments: str, **settings: Any) -> dict[str, Any]:
    done = run(*arguments, "--json", **settings)
    assert (done.returncode, done.stderr) == (0, b""), done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def planted(gguf) -> str:
    """A model whose MTP block is often right."""
    return gguf("planted-moe")


@pytest.fixture
def session(gguf) -> Iterator[Callable[..., Session]]:
    """session() -> Session on the planted model, closed after the test."""
    made = []

    def make(interrupt: Interrupt | None = None, **settings: Any) -> Session:
        common = {"n_ctx": 512, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
        settings = {"speculation": "mtp", **common, **settings}  # "auto" may find that drafts do not pay
        made.append(Session(gguf("planted-moe"), interrupt or Interrupt(), **settings))
        return made[-1]

    yield make
    for each in made:
        each.close()


# ---- run: text ----


@pytest.mark.parametrize("speculation", ["auto", "off", "mtp"])
@pytest.mark.parametrize("temp", ["0", "0.8"])
def test_piped_text_is_that_of_generate(planted, llama, temp, speculation):
    done = run(
        planted, PROMPT, "--raw", "-n", str(N), "--temp", temp, "--seed", "7", "--speculation", speculation
    )
    assert done.returncode == 0, done.stderr
    llm = llama(speculation="off", n_ctx=4096)
    prompt = llm.tokenize(PROMPT.encode())
    tokens = [token for token, _ in zip(llm.generate(prompt, temp=float(temp)), range(N), strict=False)]
    assert done.stdout == llm.detokenize(tokens).decode(errors="ignore").encode()
    assert len(done.stdout) > N


def test_text_is_that_of_a_completion(planted, llama):
    text = llama(n_ctx=4096)(PROMPT, max_tokens=N, temperature=0)["choices"][0]["text"]
    assert run_json(planted, PROMPT, "--raw", "-n", str(N), "--temp", "0")["text"] == text


def test_a_prompt_goes_through_the_models_template_unless_raw(planted, llama):
    message = {"role": "user", "content": PROMPT}
    reply = llama(n_ctx=4096).create_chat_completion([message], max_tokens=N, temperature=0, min_p=0)
    for flags in ([], ["--chat"]):
        found = run_json(planted, PROMPT, "-n", str(N), "--temp", "0", *flags)
        assert found["chat"] is True
        assert found["text"] == reply["choices"][0]["message"]["content"]
        assert found["prompt_tokens"] == reply["usage"]["prompt_tokens"]
    raw = run_json(planted, PROMPT, "-n", "1", "--raw")
    assert (raw["chat"], raw["prompt_tokens"]) == (False, len(llama().tokenize(PROMPT.encode())))


def test_chat_asked_of_a_model_without_a_template(session):
    llm = session()
    tokens, templated = llm.encode_prompt(PROMPT, None)
    assert templated
    del llm.metadata["tokenizer.chat_template"]
    raw, templated = llm.encode_prompt(PROMPT, None)
    assert not templated
    assert len(raw) < len(tokens)
    with pytest.raises(UnsupportedError, match="found no chat template"):
        llm.encode_prompt(PROMPT, True)


def test_prompt_by_argument_stdin_or_file_is_the_same(planted, tmp_path):
    path = tmp_path / "prompt"
    path.write_text(PROMPT + "\n")
    options = [planted, "-n", "20", "--temp", "0"]
    texts = {
        run(*options, PROMPT).stdout,
        run(*options, input=PROMPT.encode() + b"\n").stdout,
        run(*options, "--file", str(path)).stdout,
    }
    assert len(texts) == 1
    assert texts != {b""}


def test_every_seed_can_be_repeated(planted):
    options = [planted, PROMPT, "-n", "40", "--temp", "2"]
    assert len({run(*options, "--seed", "0").stdout for _ in range(2)}) == 1  # 0 is a seed like any other
    first = run_json(*options)
    assert run_json(*options, "--seed", str(first["seed"]))["text"] == first["text"]
    assert run_json(*options)["seed"] != first["seed"]


def test_default_sampling_is_that_of_generate():
    import inspect

    from draftwood.cli.run import SAMPLING, command

    defaults = {option.name: option.default for option in command.params}
    for name in SAMPLING:
        assert defaults[name] == inspect.signature(Llama.generate).parameters[name].default


# ---- run: figures ----


def test_summary_is_the_last_and_only_line_on_stderr(planted):
    done = run(planted, PROMPT, "-n", str(N), "--temp", "0", text=True)
    assert re.fullmatch(
        rf"{N} tokens, [\d.]+ tok/s \| [\d.]+ tokens a round \| \d+% of \d+ mtp drafts accepted \| "
        r"(\d+ of \d+ rounds in trees, [\d.]+ rows a round \| )?"
        r"chat prompt \d+ tokens in \d+\.\d\d s\n",
        done.stderr,
    ), done.stderr
    done = run(planted, PROMPT, "-n", "5", "--raw", "--speculation", "off", "--no-exact", text=True)
    assert re.fullmatch(
        r'5 tokens, [\d.]+ tok/s \| no drafts: speculation="off" \| raw prompt \d+ tokens in \d+\.\d\d s\n',
        done.stderr,
    ), done.stderr


def test_the_summary_is_a_line_of_its_own_where_text_and_figures_meet():
    trained = str(ROOT / "models" / "tiny-moe" / "tiny-moe-f16.gguf")
    for n, added in (("2", b""), ("5", b"\n")):  # the second token ends a line
        options = ["run", trained, "def f(", "--raw", "--temp", "0", "--threads", "1", "-n", n]
        text = draftwood(*options).stdout
        assert text.endswith(b"\n") == (not added)
        seen = subprocess.run(
            [*COMMAND, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=240, check=True,
            env=ENVIRONMENT,
        ).stdout  # fmt: skip
        assert seen.startswith(text + added + f"{n} tokens, ".encode()), seen


def test_json_holds_text_figures_and_counters(planted):
    began = time.monotonic()
    found = run_json(planted, PROMPT, "-n", str(N), "--temp", "0", "--speculation", "mtp")
    took = time.monotonic() - began
    assert found.keys() == {
        "text", "tokens", "seconds", "tokens_per_second", "prompt_tokens", "prompt_seconds", "finish", "chat",
        "seed", "speculation", "speculation_reason", "chains_because", "stats", "experts",
    }  # fmt: skip
    assert (found["tokens"], found["finish"], found["speculation"]) == (N, "length", "mtp")
    assert 0 < found["seconds"] + found["prompt_seconds"] < took
    assert found["tokens_per_second"] == pytest.approx(N / found["seconds"])
    stats = found["stats"]
    assert stats["prompt_tokens"] == found["prompt_tokens"]
    assert stats["accepted"] > 0
    assert stats["rounds"] + stats["accepted"] >= N - 1  # the first token comes from the prompt
    assert (stats["tree_rounds"], found["chains_because"]) == (0, "")
    plain = run_json(planted, PROMPT, "-n", "5", "--speculation", "off")
    assert (plain["speculation"], plain["speculation_reason"]) == ("off", 'speculation="off"')


def test_drafts_in_trees(planted):
    options = [planted, PROMPT, "-n", str(N), "--temp", "0.8", "--seed", "7"]
    trees = [*options, "--speculation", "tree", "--tree-budget", "6", "--draft-tokens", "3"]
    found, plain = run_json(*trees), run_json(*options, "--speculation", "off")
    assert found["text"] == plain["text"]
    stats = found["stats"]
    assert stats["tree_rounds"] > 0
    assert stats["drafted"] <= 5 * stats["rounds"]
    assert len(stats["drafted_by_depth"]) == 3
    assert found["chains_because"] == ""
    line = run(*trees, text=True).stderr
    expected = rf" \| {stats['tree_rounds']} of {stats['rounds']} rounds in trees, \d\.\d rows a round \| "
    assert re.search(expected, line), line


def test_marked_tokens_are_the_accepted_ones(session):
    llm = session()
    plain = session(speculation="off")
    prompt, _ = llm.encode_prompt(PROMPT, None)
    marks: list[bool] = []
    report = llm.run(prompt, N, lambda _, marked: marks.append(marked), temp=0)
    assert sum(marks) == report.stats.accepted > N // 4
    assert not marks[0]
    plain.run(prompt, N, lambda _, marked: marks.append(marked), temp=0)
    assert not any(marks[N:])


def test_on_a_terminal_the_same_text_is_marked(planted):
    options = [
        planted,
        PROMPT,
        "--raw",
        "-n",
        str(N),
        "--temp",
        "0",
        "--threads",
        "1",
        "--speculation",
        "mtp",
    ]
    plain = run(*options).stdout.decode()
    shown = on_terminal("run", *options)
    text, _, rest = shown.partition(f"{N} tokens")
    assert "(marked)" in rest
    assert text.count("\x1b[32m") > 5
    bare = re.sub(r"\x1b\[\d*m", "", text).replace("\r\n", "\n")
    assert bare == re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "", plain) + "\n"
    assert "\x1b" not in on_terminal("run", *options, "--no-mark").partition(f"{N} tokens")[0].rstrip(
        "\x1b[2m"
    )


def on_terminal(*arguments: str) -> str:
    child, master = pty.fork()
    if child == 0:
        os.execve(
            COMMAND[0], [*COMMAND, *arguments], {**ENVIRONMENT, "TERM": "xterm-256color", "NO_COLOR": ""}
        )
    shown = b""
    try:
        while block := os.read(master, 1 << 16):
            shown += block
    except OSError:  # what Linux gives at the end of a terminal
        pass
    os.close(master)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, shown
    return shown.decode()


# ---- run: ends and errors ----


def test_the_end_of_the_context_ends_the_text(planted):
    found = run_json(planted, PROMPT, "--raw", "--n-ctx", "256", "--temp", "0")
    assert found["finish"] == "context"
    assert found["prompt_tokens"] + found["tokens"] == 256
    done = run(planted, "a " * 400, "--raw", "--n-ctx", "256", text=True)
    assert (done.returncode, done.stdout) == (1, "")
    size = int(re.search(r"hint: --n-ctx (\d+)", done.stderr)[1])
    assert run(planted, "a " * 400, "--raw", "--n-ctx", str(size), "-n", "2").returncode == 0


def test_a_long_prompt_is_cut_where_llama_cuts_it(session, llama):
    prompt = [3 + i % 200 for i in range(301)]
    llm, plain = session(n_batch=128, n_ubatch=64), llama(n_batch=128, n_ubatch=64, n_ctx=512)
    tokens: list[bytes] = []
    llm.run(prompt, 20, lambda piece, _: tokens.append(piece), temp=0)
    expected = [
        plain.detokenize([t]) for t, _ in zip(plain.generate(prompt, temp=0), range(20), strict=False)
    ]
    assert tokens == expected
    with pytest.raises(ContextFullError, match="room for another"):
        llm.run([3] * 600, 1, lambda *_: None)


@pytest.mark.parametrize(
    ("flags", "threads"),
    [
        ([], (None, None)),
        (["--threads", "3"], (3, 3)),
        (["--threads-batch", "2"], (None, 2)),
        (["--threads", "3", "--threads-batch", "1"], (3, 1)),
    ],
)
def test_threads_of_tokens_and_of_batches(planted, monkeypatch, flags, threads):
    made = []

    def session(path: str, interrupt: Interrupt, **settings: Any) -> None:
        made.append(settings)
        raise OptionError("enough")

    monkeypatch.setattr("draftwood.cli.session.Session", session)
    CliRunner().invoke(cli, ["run", planted, "hi", *flags])
    assert [(each["n_threads"], each["n_threads_batch"]) for each in made] == [threads]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["/no/such/file.gguf", "hi"], "does not exist"),
        ([__file__, "hi"], "not a GGUF file"),
        (["PLAIN", "hi", "--speculation", "mtp"], "found no MTP block"),
        (["PLANTED", "hi", "--n-ctx", "999999999"], "--n-ctx is 999999999, for which llama.cpp sets aside"),
        (
            ["PLANTED", "hi", "--speculation", "off", "--tree-budget", "4"],
            "found --tree-budget 4 beside --speculation off",
        ),
        (["PLANTED", "hi", "--drafter", "nope"], "Drafter path does not exist: nope"),
        (["PLANTED", "hi", "--drafter", ""], "drafter is ''; expected the path"),
        (["PLANTED", "hi", "--temp", "nan"], "--temp is nan; expected a finite number\n\nhint: --temp 0.8"),
        (
            ["PLANTED", "hi", "--rpc", "localhost:1", "--n-gpu-layers", "0"],
            "found --rpc beside --n-gpu-layers 0, which",
        ),
    ],
)
def test_errors_are_one_message_with_a_hint(gguf, planted, arguments, words):
    names = {"PLAIN": gguf("moe-plain"), "PLANTED": planted}
    done = run(*(names.get(a, a) for a in arguments), text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("Error: ")
    assert words in done.stderr
    assert re.search(r"\n\nhint: .+\n$", done.stderr)
    assert not re.search(r"hint: .*\w=", done.stderr)  # Python's arguments
    assert "Traceback" not in done.stderr


def test_a_warning_is_one_line_in_the_words_of_the_command(planted):
    code = """
import sys, warnings
import draftwood.cli.run as run
real = run.load_session
def load(*arguments, **settings):
    warnings.warn("found n_ctx=5\\nand more; n_gpu_layers=-1 for all")
    return real(*arguments, **settings)
run.load_session = load
from draftwood.cli import main
main()
"""
    command = [sys.executable, "-c", code, "run", planted, PROMPT, "--raw", "-n", "2", "--threads", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=ENVIRONMENT)
    first, *others = done.stderr.splitlines()
    assert first == "Warning: found --n-ctx 5 and more; --n-gpu-layers -1 for all"
    assert len([line for line in others if line]) == 1  # the figures


def test_verbose_shows_llama_cpps_log(planted):
    assert "llama_model_loader" in run(planted, PROMPT, "-n", "1", "--verbose", text=True).stderr


# ---- run: Ctrl-C and pipes ----


def start(*arguments: str) -> subprocess.Popen[bytes]:
    command = [*COMMAND, "run", *arguments, "--threads", "1", "--temp", "0"]
    pipes = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "bufsize": 0,
    }  # nothing kept from communicate()
    return subprocess.Popen(command, env=ENVIRONMENT, **pipes)


def test_ctrl_c_ends_the_text_and_prints_the_summary(planted):
    # without an end: a context that takes minutes to fill
    with start(planted, PROMPT, "--raw", "--n-ctx", "100000") as process:
        began = b""
        while len(began) < 20:
            began += process.stdout.read(20)
        process.send_signal(signal.SIGINT)
        text, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    *noise, last = errors.decode().splitlines()
    assert re.match(r"\d+ tokens \(interrupted\), .*drafts accepted", last)
    assert all(line.startswith("llama_context: n_ctx_seq") for line in noise), noise
    whole = run(planted, PROMPT, "--raw", "--temp", "0", "-n", last.split()[0]).stdout
    assert began + text == whole


def test_ctrl_c_with_json_gives_what_there_is(planted, monkeypatch):
    pieces: list[bytes] = []

    def detokenize(self: Session, tokens: list[int], **settings: Any) -> bytes:
        pieces.append(Llama.detokenize(self, tokens, **settings))
        if len(pieces) == 5:
            signal.raise_signal(signal.SIGINT)
        return pieces[-1]

    monkeypatch.setattr(Session, "detokenize", detokenize)
    result = CliRunner().invoke(cli, ["run", planted, PROMPT, "--raw", "--json", "--threads", "1"])
    assert result.exit_code == 130
    found = json.loads(result.stdout)
    assert (found["finish"], found["tokens"]) == ("interrupt", 5)
    assert found["text"] == b"".join(pieces).decode(errors="ignore")


def test_ctrl_c_while_loading_frees_everything_and_the_next_load_works(session):
    interrupt = Interrupt()
    interrupt.raised = True
    with pytest.raises(KeyboardInterrupt):
        session(interrupt)
    interrupt.raised = False
    assert session(interrupt).run([3, 4, 5], 5, lambda *_: None).tokens == 5


def test_ctrl_c_in_a_prompt_or_a_text_leaves_the_session_usable(session):
    interrupt = Interrupt()
    llm = session(interrupt, n_batch=64)
    pieces: list[bytes] = []

    def stop_at_five(piece: bytes, _: bool) -> None:
        pieces.append(piece)
        interrupt.raised = len(pieces) == 5

    prompt = [3 + i for i in range(200)]
    report = llm.run(prompt, 20, stop_at_five, temp=0)
    assert (report.finish, report.tokens) == ("interrupt", 5)
    interrupt.raised = True
    report = llm.run(prompt[::-1], 20, stop_at_five, temp=0)
    assert (report.finish, report.tokens, llm.n_tokens) == ("interrupt", 0, 0)
    interrupt.raised = False
    again: list[bytes] = []
    llm.run(prompt, 20, lambda piece, _: again.append(piece), temp=0)
    assert again[:5] == pieces


def test_a_reader_that_leaves_ends_the_run_quietly(planted):
    # as long: a text that ends first would fit into the pipe
    with start(planted, PROMPT, "--raw", "--n-ctx", "100000") as process:
        process.stdout.read(5)
        process.stdout.close()
        errors = process.stderr.read()
        assert process.wait(timeout=120) == 1
    noise = errors.decode().splitlines()
    assert all(line.startswith("llama_context: n_ctx_seq") for line in noise), noise


# ---- doctor ----


def test_doctor_tells_the_pin_and_the_patches_of_this_checkout(planted):
    done = draftwood("doctor", planted, "--json", text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    lock = source.load_lock(ROOT)
    build = found["library"]["build"]
    assert found["draftwood"] == __version__
    assert (build["pin_version"], build["pin_commit"]) == (lock.version, lock.commit)
    assert build["series_hash"] == source.series_hash(ROOT, lock), "`make dev` builds what is checked out"
    assert found["problems"] == []
    assert found["rpc_server"].endswith("/ggml-rpc-server")
    assert lock.commit in found["server"]["said"]
    assert any(device["type"] == "CPU" for device in found["library"]["devices"])
    assert found["library"]["features"]["CPU"]
    folder = os.path.dirname(found["library"]["library"])
    assert len(found["library"]["loaded"]) >= 4
    assert {os.path.realpath(os.path.dirname(path)) for path in found["library"]["loaded"]} == {
        os.path.realpath(folder)
    }
    in_force = {path["name"]: path["on"] for path in found["paths"]}
    expected = {"row-exact kernels", "MTP drafting", "draft trees", "RPC"}
    assert in_force == {**dict.fromkeys(expected, True), "flash attention": False, "CUDA": build["cuda"]}
    model = found["library"]["model"]
    assert (model["architecture"], model["n_layer_nextn"], model["drafter"]) == ("qwen35moe", 1, "mtp")
    assert model["file_bytes"] == os.path.getsize(planted)


def test_doctor_says_why_a_model_does_not_draft_and_what_is_wrong_with_a_file(gguf):
    done = draftwood("doctor", gguf("moe-plain"), text=True)
    assert done.returncode == 0
    assert re.search(r"no +MTP drafting: found no MTP block", done.stdout)
    done = draftwood("doctor", __file__, text=True)
    assert done.returncode == 1
    assert re.search(r"broken: .* is not a GGUF file.*\nfix: ", done.stdout)


def test_doctor_says_which_layers_are_fused(gguf):
    done = draftwood("doctor", str(ROOT / "models" / "tiny-moe" / "tiny-moe-f16.gguf"), text=True)
    assert "\nfused layers all 12 (on a CUDA card)\n" in done.stdout
    done = draftwood("doctor", gguf("moe-mtp", types="blk.1.ffn_down_exps*=Q5_0,F16"), text=True)
    assert done.returncode == 0
    assert "\nfused layers 3 of 4 (on a CUDA card); llama.cpp computes these parts:\n" in done.stdout
    assert re.search(
        r"\n +experts of layer 1: ffn_down_exps is Q5_0; .*\n +hint: .*=TYPE' on the F16 file; .*\n",
        done.stdout,
    )


def test_doctor_knows_a_drafter_file_and_one_that_is_none(gguf, tmp_path):
    trained = ROOT / "models" / "tiny-moe"
    model, drafter = str(trained / "tiny-moe-f16.gguf"), str(trained / "dflash-f16.gguf")
    done = draftwood("doctor", model, "--drafter", drafter, text=True)
    assert done.returncode == 0
    assert re.search(r"yes +DFlash drafting\n", done.stdout)
    assert re.search(rf"drafter +dflash, {drafter}\n", done.stdout)
    for other, words in (
        (model, "architecture 'qwen35moe'; expected 'dflash'"),
        (__file__, "no.* GGUF"),
        (str(tmp_path / "none.gguf"), "Drafter path does not exist: .*none.gguf"),
    ):
        done = draftwood("doctor", model, "--drafter", other, text=True)
        assert done.returncode == 1
        assert re.search(f"no +DFlash drafting: .*{words}", done.stdout)
        assert re.search(f"broken: .*{words}.*\nfix: ", done.stdout)
    done = draftwood("doctor", drafter, text=True)
    assert done.returncode == 1
    assert re.search(
        r"broken: .* is a DFlash drafter .*\nfix: draftwood doctor MODEL --drafter FILE", done.stdout
    )


def test_a_library_that_cannot_be_used_is_a_finding(planted, tmp_path, monkeypatch):
    monkeypatch.setitem(ENVIRONMENT, "DRAFTWOOD_LIB_PATH", str(tmp_path))
    done = draftwood("doctor", text=True)
    assert done.returncode == 1
    assert re.search(r"broken: the library cannot be used: .*\nfix: unset DRAFTWOOD_LIB_PATH\n", done.stdout)
    for command in (["run", planted, "hi"], ["serve", planted]):
        done = draftwood(*command, text=True)
        assert (done.returncode, done.stdout) == (1, "")
        assert re.fullmatch(r"Error: .* cannot be used: .*\n\nhint: `draftwood doctor` .*\n", done.stderr)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("int dw_api_version(void) { return 99; }", "API version 99, this package expects"),
        ("#include <signal.h>\nint dw_api_version(void) { raise(SIGILL); return 1; }", "SIGILL"),
    ],
)
def test_another_api_version_and_another_cpu_are_findings(tmp_path, monkeypatch, body, words):
    # in front of the real library, one that differs in this function
    real, code = Path(_capi.lib._name), tmp_path / "front.c"
    code.write_text(body)
    link = ["-Wl,--no-as-needed", real, f"-Wl,-rpath,{real.parent}"]
    compiler = os.environ.get("CC", "cc")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", tmp_path / real.name, code, *link], check=True)
    monkeypatch.setitem(ENVIRONMENT, "DRAFTWOOD_LIB_PATH", str(tmp_path))
    done = draftwood("doctor", "--json", text=True)
    assert done.returncode == 1
    (problem,) = json.loads(done.stdout)["problems"]
    assert words in problem["found"]
    assert problem["fix"]


# ---- serve ----


@pytest.mark.parametrize(("flags", "kind"), [([], "auto"), (["--speculation", "mtp"], "mtp")])
def test_serve_drafts_with_our_engine_and_says_so(planted, flags, kind):
    with serving(planted, *flags) as (address, process):
        ready(address, process)
        reply = ask(f"{address}/completion", {"prompt": PROMPT, "n_predict": N, "temperature": 0})
        process.terminate()
        errors = process.stderr.read()
        assert process.wait(timeout=120) == 0
    assert reply["tokens_predicted"] == N
    assert kind == "auto" or reply["timings"]["draft_n_accepted"] > 0  # "auto" need not draft in a short text
    assert f"slots draft as --spec-type {kind}" in errors


def test_serve_without_speculation_drafts_nothing(planted):
    with serving("--speculation", "off", "-m", planted) as (address, process):
        ready(address, process)
        reply = ask(f"{address}/completion", {"prompt": PROMPT, "n_predict": 5, "temperature": 0})
        process.terminate()
        errors = process.stderr.read()
    assert reply["tokens_predicted"] == 5
    assert "draft_n" not in reply["timings"]
    assert "slots, no drafts (--spec-type plain)" in errors


def test_serve_hands_help_and_errors_of_the_server_through():
    done = draftwood("serve", "-h", text=True)
    assert done.returncode == 0
    assert "--spec-type" in done.stdout
    done = draftwood("serve", "--no-such-flag", text=True)
    assert done.returncode != 0
    assert "no-such-flag" in done.stderr


def test_serve_refuses_a_bad_file_in_our_words():
    done = draftwood("serve", __file__, text=True)
    assert done.returncode == 1
    assert "is not a GGUF file" in done.stderr
