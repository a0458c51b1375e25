"""The command line without a model: parsing, words, exit codes, what reaches stdout and a terminal."""

from __future__ import annotations

import ast
import io
import itertools
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import draftwood.cli.doctor as doctor_module
import draftwood.cli.serve as serve_module
import pytest
from click.shell_completion import BashComplete
from click.testing import CliRunner
from draftwood.cli import Commands, cli
from draftwood.cli.doctor import paths, problems
from draftwood.cli.doctor_words import describe
from draftwood.cli.failure import in_options
from draftwood.cli.inputs import prompt_text
from draftwood.cli.progress import Bar, Interrupt
from draftwood.cli.run import Writer, outputs_meet, summary
from draftwood.cli.serve import command_line, need_drafter
from draftwood.errors import OptionError, UnsupportedError

ROOT = Path(__file__).resolve().parents[2]


def invoke(*arguments: str, **settings: Any) -> Any:
    return CliRunner().invoke(cli, list(arguments), **settings)


# ---- the group ----


def test_version_by_both_names():
    for command in ([sys.executable, "-m", "draftwood"], [str(Path(sys.executable).with_name("draftwood"))]):
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
        assert re.fullmatch(r"draftwood \d+\.\d+\.\d+\n", done.stdout)


@pytest.mark.parametrize("argument", ["--version", "--help"])
def test_neither_library_nor_numpy_is_loaded_for(argument):
    code = f"""
        import sys
        from draftwood.cli import main
        sys.argv[1:] = [{argument!r}]
        try:
            main()
        except SystemExit:
            heavy = ("numpy", "rich", "draftwood.llama", "draftwood._llama_cpp")
            print([name for name in heavy if name in sys.modules])
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.endswith("[]\n")


def test_types_of_click_take_no_parameter_when_they_run():
    code = "import click; click.Choice.__class_getitem__ = None; import draftwood.cli"  # as click 8.1 is
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("command", [[], ["run"], ["tree"], ["serve"], ["doctor"]])
def test_help(command):
    result = invoke(*command, "--help")
    assert result.exit_code == 0
    assert "Usage: " in result.output


def group_that(raises: BaseException) -> click.Group:
    group = Commands()

    @group.command()
    def fail() -> None:
        raise raises

    return group


def test_our_errors_are_message_and_hint_without_traceback():
    result = CliRunner().invoke(group_that(OptionError("found 3; expected 2", hint="try 2")), ["fail"])
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr == "Error: found 3; expected 2\n\nhint: try 2\n"


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["--speculation", "dflash"], "--drafter FILE"),
        (["--speculation", "off", "--tree-budget", "8"], "leave one of them out"),
        (
            ["--speculation", "mtp", "--drafter", "d.gguf"],
            "leave one of them out, or --speculation off for none",
        ),
    ],
)
def test_hints_name_options(arguments, hint):
    result = invoke("run", "no-such-file.gguf", "hi", *arguments)
    assert result.exit_code == 1
    assert result.stderr.endswith(f"\n\nhint: {hint}\n")


@pytest.mark.parametrize(
    ("command", "hint", "words"),
    [
        ("run", "n_gpu_layers=-1 for all layers", "--n-gpu-layers -1 for all layers"),
        ("run", "raise n_ctx, or lower draft_tokens", "raise --n-ctx, or lower --draft-tokens"),
        ("run", "pass a larger n_ctx to Llama(), or stop", "pass a larger --n-ctx, or stop"),
        ("run", "leave speculation= and drafter= out", "leave --speculation and --drafter out"),
        ("run", "exact=False, verbose=True", "--no-exact, --verbose"),
        ("run", 'rpc_servers="127.0.0.1:50052"', "--rpc 127.0.0.1:50052"),
        ("serve", 'speculation="auto" drafts', "--speculation auto drafts"),
        ("serve", "n_gpu_layers=-1", "n_gpu_layers=-1"),  # it has no such option
        ("serve", "Llama(model, drafter=path)", "draftwood run MODEL --drafter FILE"),
        ("bench", "Llama(model, drafter=path)", "draftwood bench MODEL --drafter FILE"),
        ("run", "my_n_ctx=3 and a drafter", "my_n_ctx=3 and a drafter"),
        ("run", "found vram and expert_vram; expected", "found --vram and --expert-vram; expected"),
        ("serve", "with n_ctx=32768", "with -c 32768"),
        ("run", "temperature=0.8, or leave it out", "--temp 0.8, or leave it out"),
        ("run", "/tmp/n_ctx/vram.gguf is cut off", "/tmp/n_ctx/vram.gguf is cut off"),
        ("run", "/tmp/seed=3.gguf is cut off", "/tmp/seed=3.gguf is cut off"),
    ],
)
def test_a_hint_in_the_words_of_a_command(command, hint, words):
    assert in_options(hint, cli.commands[command]) == words


def test_no_hint_of_the_api_is_left_in_python():
    hints = []
    for path in (ROOT / "python" / "draftwood").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.keyword) and node.arg == "hint":
                hints += [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
    hints = [hint for hint in hints if isinstance(hint, str)]
    assert "drafter=path" in hints
    for name in ("run", "tree"):
        command = cli.commands[name]
        options = "|".join(option.name for option in command.params if option.name)
        left = [hint for hint in hints if re.search(rf"\b({options})=", in_options(hint, command))]
        assert left == []


def test_interrupts_end_with_130_and_file_errors_with_one_line():
    assert CliRunner().invoke(group_that(KeyboardInterrupt()), ["fail"]).exit_code == 130
    result = CliRunner().invoke(group_that(OSError(28, "No space left on device")), ["fail"])
    assert (result.exit_code, result.stderr) == (1, "Error: [Errno 28] No space left on device\n")
    assert CliRunner().invoke(group_that(BrokenPipeError(32, "Broken pipe")), ["fail"]).stderr == ""


# ---- run: parsing ----


@pytest.mark.parametrize(
    "arguments",
    [
        ["m.gguf", "hi", "--draft-tokens", "64"],
        ["m.gguf", "hi", "--draft-tokens", "0"],
        ["m.gguf", "hi", "--draft-p-min", "1.5"],
        ["m.gguf", "hi", "--draft-vocab", "63"],
        ["m.gguf", "hi", "--speculation", "trees"],
        ["m.gguf", "hi", "--tree-budget", "0"],
        ["m.gguf", "hi", "--tree-budget", "65"],
        ["m.gguf", "hi", "--temp", "-1"],
        ["m.gguf", "hi", "--threads", "100000"],  # would crash
        ["m.gguf", "hi", "--seed", "4294967295"],  # means "random" to llama.cpp
        ["m.gguf", "hi", "--file", "no-such-file"],
        ["m.gguf", "hi", "--file", __file__],
        ["m.gguf", "hi", "more"],
        ["m.gguf"],  # stdin is empty
        [],
    ],
)
def test_wrong_usage_exits_with_2(arguments):
    result = invoke("run", *arguments)
    assert result.exit_code == 2, result.output
    assert "Error: " in result.stderr


@pytest.mark.parametrize("command", ["run", "tree"])
@pytest.mark.parametrize(
    ("words", "found"),
    [
        (
            ["Once", "upon", "a", "time"],
            "found 4 prompts; expected one\n\nhint: put the prompt in quotes: 'Once upon a",
        ),
        ([""], "found an empty prompt; expected text\n\nhint: draftwood COMMAND MODEL "),
        (["--raw", ""], "found an empty prompt; expected text\n\nhint: "),
        ([], "found an empty prompt; expected text\n\nhint: "),  # stdin is empty
    ],
)
def test_prompts_that_are_none_say_how_to_give_one(command, words, found):
    result = invoke(command, "m.gguf", *words)
    assert result.exit_code == 2
    assert f"Error: {found}".replace("COMMAND", command) in result.stderr


def test_help_names_all_ways_of_drafting():
    text = " ".join(invoke("--help").output.split())
    for word in ("MTP", "DFlash", "n-grams", "trees"):
        assert word in text


def test_help_says_that_no_number_of_tokens_is_no_limit():
    assert "Default, and for 0 or less: no limit." in " ".join(invoke("run", "--help").output.split())


def test_a_prompt_must_be_text(tmp_path):
    path = tmp_path / "prompt"
    path.write_bytes(b"\xff\xfe")
    result = invoke("run", "m.gguf", "--file", str(path))
    assert result.exit_code == 2
    assert "no UTF-8" in result.stderr


@pytest.mark.parametrize("command", ["run", "tree"])
def test_a_prompt_among_the_arguments_must_be_text(command):
    """Python has bytes that are no UTF-8 as halves of surrogate pairs."""
    result = invoke(command, "m.gguf", "a\udcff")
    assert result.exit_code == 2
    assert "found a prompt that is no UTF-8 text: b'a\\xff'" in result.stderr
    assert "hint: " in result.stderr


def test_no_prompt_on_a_terminal(monkeypatch):
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=SimpleNamespace(isatty=lambda: True)))
    with pytest.raises(click.UsageError, match="found no prompt"):
        cli.main(["run", "m.gguf"], standalone_mode=False)


@pytest.mark.parametrize(
    ("given", "expected"), [("a\n", "a"), ("a\r\n", "a"), ("a\n\n", "a\n"), ("ä b", "ä b"), ("\n a", "\n a")]
)
def test_a_prompt_from_stdin_or_a_file_loses_one_newline(monkeypatch, given, expected):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(given.encode())))
    assert prompt_text("-", None) == expected
    assert prompt_text(None, io.BytesIO(given.encode())) == expected
    assert prompt_text(given, None) == given


# ---- run: what is written ----


def test_a_writer_knows_whether_its_last_line_ended(monkeypatch):
    for pieces in ([b"ab\n"], [b"ab", b"\n"], [b"ab\n", b"\xe2"], []):
        output(monkeypatch)
        with Writer(marks=True) as writer:
            for piece in pieces:
                writer.write(piece, False)
        assert writer.at_line_start
    output(monkeypatch)
    with Writer(marks=True) as writer:
        writer.write(b"\nab", False)
    assert not writer.at_line_start


def test_outputs_meet_in_one_file_and_on_a_terminal_behind_a_pipe(monkeypatch, tmp_path):
    read, write = os.pipe()
    master, slave = pty.openpty()
    with (
        (tmp_path / "a").open("w") as a,
        (tmp_path / "b").open("w") as b,
        os.fdopen(read, "rb"),
        os.fdopen(write, "w") as pipe,
        os.fdopen(master, "rb"),
        os.fdopen(slave, "w") as screen,
    ):
        pairs = [(a, a), (pipe, pipe), (pipe, screen), (a, b), (a, screen), (pipe, a), (io.StringIO(), a)]
        met = []
        for stdout, stderr in pairs:
            with monkeypatch.context() as patch:
                patch.setattr("sys.stdout", stdout)
                patch.setattr("sys.stderr", stderr)
                met.append(outputs_meet())
    assert met == [True, True, True, False, False, False, False]


def output(monkeypatch, *, terminal: bool = False) -> io.BytesIO:
    buffer = io.BytesIO()
    stdout = SimpleNamespace(isatty=lambda: terminal, buffer=buffer, write=None, flush=None, encoding="utf-8")
    monkeypatch.setattr("sys.stdout", stdout)
    if terminal:
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.delenv("NO_COLOR", raising=False)
    return buffer


def test_piped_text_is_exact(monkeypatch):
    buffer = output(monkeypatch)
    text = "a\r\n\x1b[31m\täö€🌲\x00 \n\n"
    with Writer(marks=True) as writer:
        for byte in text.encode():  # every character in as many tokens as it has bytes
            writer.write(bytes([byte]), True)
    assert buffer.getvalue() == text.encode()


def test_bytes_that_are_no_text_are_left_out_as_in_completions(monkeypatch):
    buffer = output(monkeypatch)
    pieces = [b"a\xff", b"\xe2\x82", b"b", b"\xf0\x9f"]
    with Writer(marks=True) as writer:
        for piece in pieces:
            writer.write(piece, False)
    assert buffer.getvalue() == b"".join(pieces).decode(errors="ignore").encode() == b"ab"


def test_characters_leave_as_soon_as_they_are_whole(monkeypatch):
    buffer = output(monkeypatch)
    with Writer(marks=True) as writer:
        writer.write(b"x\xe2\x82", False)
        assert buffer.getvalue() == b"x"
        writer.write(b"\xac", False)
        assert buffer.getvalue() == "x€".encode()


def test_a_terminal_gets_marks_no_controls_and_an_ended_line(monkeypatch):
    buffer = output(monkeypatch, terminal=True)
    with Writer(marks=True) as writer:
        assert writer.marking
        writer.write(b"plain\x1b]0;title\x07 ", False)
        writer.write(b"dra\tft", True)
    assert buffer.getvalue() == b"plain]0;title \x1b[32mdra\tft\x1b[0m\n"


def test_no_color_underlines_and_no_mark_leaves_text_alone(monkeypatch):
    buffer = output(monkeypatch, terminal=True)
    monkeypatch.setenv("NO_COLOR", "1")
    with Writer(marks=True) as writer:
        writer.write(b"a\n", True)
    with Writer(marks=False) as writer:
        writer.write(b"b\n", True)
    assert buffer.getvalue() == b"\x1b[4ma\n\x1b[0mb\n"


def test_a_terminal_without_styles_gets_plain_text(monkeypatch):
    buffer = output(monkeypatch, terminal=True)
    monkeypatch.setenv("TERM", "dumb")
    with Writer(marks=True) as writer:
        assert not writer.marking
        writer.write(b"a\n", True)
    assert buffer.getvalue() == b"a\n"


def report(**changes: Any) -> Any:
    stats = SimpleNamespace(
        rounds=10, drafted=50, accepted=20, tree_rounds=0, padding=0, tokens_per_round=3.0
    )
    values = {
        "tokens": 31, "tokens_per_second": 12.34, "finish": "length", "speculation": "mtp",
        "speculation_reason": "", "chains_because": "", "stats": stats, "experts": None,
        "prompt_tokens": 7, "prompt_seconds": 0.5,
    }  # fmt: skip
    return SimpleNamespace(**{**values, **changes})


def test_summary_says_what_the_card_holds_of_the_experts():
    experts = SimpleNamespace(slots=512, experts=1024, hit_rate=0.912)
    assert "50% of the experts in slots, 91% hits" in summary(
        report(experts=experts), templated=False, marked=False
    )


def test_summary_is_one_line_with_all_figures():
    assert summary(report(), templated=True, marked=False) == (
        "31 tokens, 12.3 tok/s | 3.00 tokens a round | 40% of 50 mtp drafts accepted | "
        "chat prompt 7 tokens in 0.50 s"
    )
    assert "accepted (marked) |" in summary(report(), templated=True, marked=True)
    assert summary(report(finish="interrupt"), templated=False, marked=False).startswith(
        "31 tokens (interrupted), "
    )
    plain = report(speculation="off", speculation_reason="found no MTP block", finish="context")
    assert summary(plain, templated=False, marked=False) == (
        "31 tokens (context full), 12.3 tok/s | no drafts: found no MTP block | raw prompt 7 tokens in 0.50 s"
    )


def test_summary_tells_of_trees_or_why_there_are_none():
    trees = report()
    trees.stats.tree_rounds, trees.stats.padding = 8, 5
    assert "drafts accepted | 8 of 10 rounds in trees, 6.5 rows a round | raw" in summary(
        trees, templated=False, marked=False
    )
    chains = report(chains_because="layers on a card")
    assert "| chains only: layers on a card |" in summary(chains, templated=False, marked=False)


# ---- progress and Ctrl-C ----


@contextmanager
def terminal(monkeypatch) -> Iterator[Callable[[str], str]]:
    """stderr as a terminal; gives read(until) -> what was drawn on it up to there."""
    master, slave = pty.openpty()

    def read(until: str) -> str:
        drawn = ""
        while until not in drawn and select.select([master], [], [], 60)[0]:
            drawn += os.read(master, 1 << 16).decode()
        assert until in drawn
        return drawn

    # not a fixture: pytest puts its own stderr in place between setup and test
    with os.fdopen(slave, "w") as stderr, monkeypatch.context() as patch:
        patch.setattr("sys.stderr", stderr)
        patch.setenv("TERM", "xterm")
        yield read
    os.close(master)


def test_a_bar_appears_after_its_delay_and_goes_away(monkeypatch):
    with terminal(monkeypatch) as read:
        with Bar("loading", delay=0.01) as bar:
            assert "loading" in read(" 0%")
            bar.update(0.25)
            read("25%")
        print("end", file=sys.stderr, flush=True)
        assert re.search(r"\x1b\[2K(\x1b\[\?25h)?end", read("end"))  # its line is erased again


def test_a_short_step_draws_nothing(monkeypatch):
    with terminal(monkeypatch) as read:
        with Bar("loading", delay=60) as bar:
            bar.update(1.0)
        print("end", file=sys.stderr, flush=True)
        assert read("end").startswith("end")


def test_no_bar_without_a_terminal(capfd):
    with Bar("loading", delay=0) as bar:
        time.sleep(0.05)
        bar.update(0.5)
    assert capfd.readouterr() == ("", "")


def test_first_ctrl_c_is_a_flag_and_the_second_an_exception():
    before = signal.getsignal(signal.SIGINT)
    with Interrupt() as interrupt:
        interrupt.check()
        signal.raise_signal(signal.SIGINT)
        assert interrupt.raised
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_an_ignored_ctrl_c_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interrupt() as interrupt:
            signal.raise_signal(signal.SIGINT)
            assert not interrupt.raised
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


# ---- serve ----

AUTO = ["--spec-type", "auto"]


def header(**changes: Any) -> SimpleNamespace:
    of_dense = {"expert_bytes": 0, "n_ctx_train": 0}  # it has no pool
    found = {"architecture": "qwen35moe", "n_layer_nextn": 1, "can_draft_mtp": True, **of_dense, **changes}
    return SimpleNamespace(**found)


@pytest.fixture
def model(tmp_path, monkeypatch):
    """An existing file whose header has an MTP block, as far as `serve` can see."""
    variables = (*serve_module._DRAFT_VARIABLES, *serve_module.SOURCE_VARIABLES)
    for name in ("LLAMA_ARG_MODEL", *variables):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(serve_module, "_header", lambda path: header())
    path = tmp_path / "model.gguf"
    path.touch()
    return str(path)


def test_serve_puts_m_before_a_model_and_a_type_behind(model):
    assert command_line([model, "--port", "8080"], "auto") == ["-m", model, "--port", "8080", *AUTO]
    for flag in ("-m", "--model"):
        assert command_line(["--port", "1", flag, model], "auto") == ["--port", "1", flag, model, *AUTO]


def test_serve_finds_the_model_behind_flags(model, monkeypatch):
    port = ["--port", "8081"]
    for before, after in ((port, []), (["--no-warmup"], port), ([*port, "-md", "draft.gguf"], ["-c", "64"])):
        assert command_line([*before, model, *after], "off")[:-2] == [*before, "-m", model, *after]
    for flags in (
        [*port, "-md", model],
        ["--lora", model],
        ["--log-file", model, "--chat-template-file", model],
    ):
        assert "-m" not in command_line(flags, "off")
    monkeypatch.setenv("LLAMA_ARG_MODEL", "other.gguf")
    assert command_line([*port, model], "off")[:-2] == [*port, "-m", model]


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (
            ("run", "m.gguf", "x", "-ngl", "99"),
            "found -ngl, llama.cpp's name; draftwood calls it --n-gpu-layers N",
        ),
        (("run", "m.gguf", "-p", "x"), "found -p, llama.cpp's name; give PROMPT after MODEL, in quotes"),
        (("tree", "-m", "m.gguf", "x"), "found -m, llama.cpp's name; give MODEL right after the command"),
        (
            ("tree", "m.gguf", "x", "--ctx-size=100"),
            "found --ctx-size, llama.cpp's name; draftwood calls it --n-ctx N",
        ),
        (("bench", "m.gguf", "-md", "d.gguf"), "draftwood calls it --drafter FILE"),
        (("experts", "show", "m.gguf", "-ngl", "99"), "draftwood calls it --n-gpu-layers N"),
        (("bench", "m.gguf", "-c", "100"), "No such option '-c'"),  # it has none
        (("bench", "m.gguf", "-p", "x"), "No such option '-p'"),
    ],
)
def test_flags_of_llama_cpp_are_answered_with_ours(arguments, hint):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert hint in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("run", "m.gguf", "-f", "-p"), "found -p after -f; expected its value\n\nhint: --file=-p"),
        (("run", "m.gguf", "x", "--drafter", "--json"), "found --json after --drafter; expected its value"),
        (("run", "m.gguf", "-n", "--temp=0", "x"), "found --temp=0 after -n; expected its value"),
        (("run", "m.gguf", "-f", "--help"), "found --help after -f"),
        (("bench", "m.gguf", "--drafter", "--modes", "off"), "found --modes after --drafter"),
        (("experts", "show", "m.gguf", "--expert-heat", "-ngl"), "found -ngl after --expert-heat"),
    ],
)
def test_an_option_is_no_value_of_the_one_before(arguments, words):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert words in result.stderr


@pytest.mark.parametrize("value", ["-1", "-0.5", "--nowhere.gguf", "-"])
def test_what_begins_with_a_dash_may_be_a_value(value):
    assert "after --drafter" not in invoke("run", "/nowhere.gguf", "x", "--drafter", value).stderr
    assert "found --json after" not in invoke("run", "/nowhere.gguf", "x", "--drafter=--json").stderr


def test_a_line_that_a_shell_completes_may_have_them():
    line = BashComplete(cli, {}, "draftwood", "_DRAFTWOOD_COMPLETE")
    found = line.get_completions(["run", "m.gguf", "-c", "100"], "--n-")
    assert "--n-ctx" in [each.value for each in found]


def test_what_stands_behind_two_dashes_is_no_flag():
    assert "path does not exist" in invoke("run", "--n-ctx", "64", "--", "/nowhere.gguf", "-ngl").stderr


def test_serve_refuses_two_models(model):
    behind_flags = (["--no-warmup", model, "b.gguf"], ["--jinja", model, "--port", "1", "b.gguf"])
    behind_model = ([model, "b.gguf"], [model, "--jinja", "b.gguf"], ["-m", model, "--port", "1", "b.gguf"])
    for arguments in (*behind_flags, *behind_model):
        result = invoke("serve", *arguments)
        assert result.exit_code == 2
        assert f"found {model} and b.gguf; expected one model\n\nhint: draftwood serve" in result.stderr


def test_serve_refuses_a_drafter_that_is_no_file(model, monkeypatch, tmp_path):
    words = {"nowhere.gguf": "Drafter path does not exist: nowhere.gguf", str(tmp_path): "is a directory"}
    for path, said in words.items():
        result = invoke("serve", model, "-md", path, "--port", "1")
        assert result.exit_code == 1
        assert said in result.stderr
    monkeypatch.setenv("LLAMA_ARG_SPEC_DRAFT_MODEL", "nowhere.gguf")
    assert words["nowhere.gguf"] in invoke("serve", model).stderr
    need_drafter([model, "-hfd", "user/repo"])  # the file is one of the repository
    monkeypatch.setenv("LLAMA_ARG_SPEC_DRAFT_HF_REPO", "user/repo")
    need_drafter([model])


def test_serve_refuses_a_port_that_is_none(model, monkeypatch):
    for port in ("99999", "65536", "-1"):
        result = invoke("serve", model, "--port", port)
        assert result.exit_code == 2
        assert f"found port {port}; expected 1 to 65535, or 0 for any\n\nhint: --port" in result.stderr
    monkeypatch.setenv("LLAMA_ARG_PORT", "70000")
    assert "found port 70000" in invoke("serve", model).stderr


def test_serve_names_the_way_of_drafting(model):
    for speculation, kind in {"off": "plain", "mtp": "mtp", "ngram": "ngram", "tree": "tree"}.items():
        assert command_line([model], speculation) == ["-m", model, "--spec-type", kind]
    drafter = [model, "-md", "draft.gguf"]
    for speculation in ("auto", "dflash", "tree"):
        assert command_line(drafter, speculation) == ["-m", *drafter, "--spec-type", speculation]


def test_serve_passes_everything_else_unchanged(model):
    for flags in (["--spec-type", "none"], ["--spec_type", "none"], ["--spec-default"]):
        assert command_line([model, *flags], "auto") == ["-m", model, *flags]
    for flags in (["-h"], ["--version"], []):
        assert command_line(flags, "auto") == flags


@pytest.mark.parametrize("speculation", ["auto", "off", "mtp", "ngram", "tree"])
def test_serve_refuses_what_is_no_model_before_the_server_starts(monkeypatch, tmp_path, speculation):
    for name in ("LLAMA_ARG_MODEL", *serve_module._DRAFT_VARIABLES, *serve_module.SOURCE_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "execv", lambda path, command: pytest.fail(f"started {command}"))
    path = tmp_path / "nope.gguf"
    for arguments in ([str(path)], ["-m", str(path)], ["--port", "1", str(path), "--spec-type", "none"]):
        result = invoke("serve", *arguments, "--speculation", speculation)
        hint = f"hint: check the path; it was looked for in {tmp_path}"
        expected = f"Error: Model path does not exist: {path}\n\n{hint}\n"
        assert (result.exit_code, result.stderr) == (1, expected)
    path.write_bytes(b"GGUF damaged")
    result = invoke("serve", str(path), "--speculation", speculation)
    assert result.exit_code == 1
    assert "damaged or cut-off header" in result.stderr


def test_serve_says_that_a_port_is_taken_before_the_server_starts(model, monkeypatch):
    monkeypatch.setattr(os, "execv", lambda path, command: None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for where in ([model, "--port", port], [model, "--port", port, "--host", "localhost"]):
            result = invoke("serve", *where)
            assert result.exit_code == 1
            assert f"port {port} of " in result.stderr
            assert "in use; expected a free one\n\nhint: --port N" in result.stderr
        monkeypatch.setenv("LLAMA_ARG_PORT", port)
        assert invoke("serve", model).exit_code == 1
        assert invoke("serve", "-h").exit_code == 0
    assert invoke("serve", model).exit_code == 0


def test_a_missing_model_names_those_beside_it(tmp_path):
    for name in ("tiny-moe-f16.gguf", "tiny-moe-q8_0.gguf", "other.txt"):
        (tmp_path / name).write_bytes(b"")
    result = invoke("run", str(tmp_path / "tiny-moe.gguf"), "x")
    assert f"hint: in {tmp_path}: tiny-moe-f16.gguf, tiny-moe-q8_0.gguf" in result.stderr


def test_serve_leaves_a_file_that_is_still_to_be_downloaded_to_the_server(model, monkeypatch):
    for source in (["-mu", "http://x/y.gguf"], ["--hf_repo", "a/b"], ["-dr", "a"]):
        flags = ["-m", "/nowhere.gguf", *source]
        assert command_line(flags, "auto") == [*flags, *AUTO]
        assert command_line(["-m", model, *source], "auto") == ["-m", model, *source, *AUTO]
    monkeypatch.setenv("LLAMA_ARG_HF_REPO", "a/b")
    assert command_line(["-m", "/nowhere.gguf"], "auto") == ["-m", "/nowhere.gguf", *AUTO]


def test_serve_names_llama_servers_own_options(model, monkeypatch):
    known = server_options()
    for flag, hint in serve_module._OTHERWISE.items():
        assert flag not in known
        for arguments in ([flag, "1"], [f"{flag}=1"], [flag.replace("-", "_").replace("__", "--")]):
            result = invoke("serve", model, *arguments)
            assert result.exit_code == 2
            assert "which llama-server does not know" in result.stderr
            assert f"\n\nhint: {hint}\n" in result.stderr
    named = [word for hint in serve_module._OTHERWISE.values() for word in hint.split() if word[0] == "-"]
    assert named
    assert set(named) <= known


def server_options() -> set[str]:
    """What the bundled llama-server's help lists."""
    program = serve_module.program("llama-server")
    done = subprocess.run([program, "--help"], capture_output=True, text=True, check=True)
    return set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", done.stdout))


def test_serve_refuses_dflash_without_a_drafter(model, monkeypatch):
    flags = ["--spec-type", "draft-dflash"]
    for kind in ("dflash", "draft-dflash"):
        with pytest.raises(click.UsageError, match=rf" {kind} without a drafter.*\n\nhint: -md"):
            command_line([model, "--spec-type", kind], "auto")
    with pytest.raises(click.UsageError, match=r"--speculation dflash without a drafter\n\nhint: -md"):
        command_line([model], "dflash")
    for given in (["-md", "d.gguf"], ["-hfd", "a/b"], ["-hf", "a/b"]):
        assert command_line([model, *flags, *given], "auto") == ["-m", model, *flags, *given]
    monkeypatch.setenv("LLAMA_ARG_SPEC_DRAFT_MODEL", "d.gguf")
    assert command_line([model, *flags], "auto") == ["-m", model, *flags]
    monkeypatch.delenv("LLAMA_ARG_SPEC_DRAFT_MODEL")
    monkeypatch.setenv("LLAMA_ARG_SPEC_TYPE", "draft-dflash")
    with pytest.raises(click.UsageError):
        command_line([model], "auto")


def test_serve_heeds_llama_servers_variables(model, monkeypatch):
    monkeypatch.setenv("LLAMA_ARG_MODEL", model)
    assert command_line(["--port", "1"], "auto") == ["--port", "1", *AUTO]
    monkeypatch.setenv("LLAMA_ARG_SPEC_TYPE", "none")
    assert command_line(["--port", "1"], "auto") == ["--port", "1"]


def test_serve_without_mtp_in_the_model(model, monkeypatch, capsys):
    monkeypatch.setattr(serve_module, "_header", lambda path: header(n_layer_nextn=0))
    assert command_line([model], "auto") == ["-m", model, *AUTO]
    assert capsys.readouterr().err.startswith("draftwood: nothing is drafted: found no MTP block in the file")
    assert command_line([model, "-md", "d.gguf"], "auto") == ["-m", model, "-md", "d.gguf", *AUTO]
    assert capsys.readouterr().err == ""
    for speculation in ("mtp", "tree"):
        with pytest.raises(UnsupportedError, match="found no MTP block"):
            command_line([model], speculation)


def test_files_of_one_model_are_given_by_the_first(tmp_path):
    """As a shell writes NAME*.gguf."""
    parts = [str(tmp_path / f"m-0000{i}-of-00002.gguf") for i in (1, 2)]
    for path in parts:
        Path(path).touch()
    for command, found in (
        ("run", f"found the file {parts[1]} as a prompt"),
        ("serve", "expected one model"),
    ):
        result = invoke(command, *parts)
        assert result.exit_code == 2
        assert found in result.stderr
        assert (
            "hint: give the first of the model's files alone: the others are found beside it" in result.stderr
        )


def test_serve_leaves_other_architectures_to_llama_cpp(model, monkeypatch, capsys):
    monkeypatch.setattr(serve_module, "_header", lambda path: header(architecture="llama", n_layer_nextn=0))
    assert command_line([model], "auto") == ["-m", model]
    assert "draftwood: nothing is drafted: found architecture 'llama'" in capsys.readouterr().err


def test_serve_becomes_the_server_with_our_options_taken_out(model, monkeypatch):
    started = []
    monkeypatch.setattr(os, "execv", lambda path, command: started.append((path, command)))
    result = invoke("serve", model, "-ngl", "3", "--speculation", "off", "--alias", "x", "-fa", "on")
    assert result.exit_code == 0, result.output
    path = str(serve_module.program("llama-server"))
    page = ["--path", str(ROOT / "python" / "draftwood" / "web")]
    flags = ["-ngl", "3", "--alias", "x", "-fa", "on", "--spec-type", "plain"]
    assert started == [(path, [path, "-m", model, *flags, *page])]


def test_serve_leaves_the_page_to_the_user(monkeypatch):
    for flags in (["--path", "x"], ["--no-ui"], ["--no_webui"]):
        assert serve_module.with_page(flags) == flags
    monkeypatch.setenv("LLAMA_ARG_STATIC_PATH", "x")
    assert serve_module.with_page(["-c", "1"]) == ["-c", "1"]


def test_serve_without_a_server_says_how_to_get_one(model, monkeypatch, tmp_path):
    monkeypatch.setattr(serve_module, "program", lambda name: tmp_path / name)
    result = invoke("serve", model)
    assert result.exit_code == 1
    assert "found no llama-server" in result.stderr
    assert "hint: install draftwood again" in result.stderr


# ---- doctor ----


CPU = {"runs": "native", "variants": {"native": 2048}, "features": "AVX2 FMA", "named": False, "lacking": {}}


def facts(**changes: Any) -> dict[str, Any]:
    build = {"pin_version": "1.2.3", "pin_commit": "abc", "series_hash": "def", "build_type": "Release",
             "cuda": False, "rpc": True, "compiler": "gcc 12"}  # fmt: skip
    device = {"name": "CPU", "description": "a CPU", "type": "CPU", "backend": "CPU",
              "memory_free": 8 << 30, "memory_total": 16 << 30}  # fmt: skip
    library = {"build": {**build, **changes.pop("build", {})}, "api_version": 1,
               "library": "/lib/libllama.so", "python_files_version": "1.2.3", "loaded": [],
               "devices": [device], "features": {"CPU": ["AVX2"]},
               "cpu": CPU, "cuda": {"error": "", "fix": ""},
               "rpc": True, "refused": [], "without_tree_ops": [], "model": None,
               **changes.pop("library", {})}  # fmt: skip
    return {"draftwood": "9.9.9", "python": "3", "platform": "here", "library_override": None,
            "n_gpu_layers": 0, "library": library, "llama_cpp": {"kind": "absent"},
            "server": {"path": "/bin/llama-server", "runs": True, "said": "version"},
            "rpc_server": "/bin/ggml-rpc-server", **changes}  # fmt: skip


def judged(given: dict[str, Any]) -> tuple[list[dict[str, str]], str]:
    given = {**given, "paths": paths(given), "problems": problems(given)}
    return given["problems"], describe(given)


def test_doctor_finds_nothing_wrong_and_names_what_is_in_force():
    found, words = judged(facts())
    assert found == []
    for part in ("9.9.9", "1.2.3", "abc", "def", "Release, gcc 12", "a CPU", "AVX2", "row-exact kernels"):
        assert part in words


def test_doctor_says_which_cpu_code_runs_and_why_not_better():
    assert "cpu code     native: compiled by a source install with AVX2 FMA" in judged(facts())[1]
    cpu = {**CPU, "runs": "haswell", "variants": {"haswell": 64, "zen4": 0}, "lacking": {"zen4": ["avx512f"]}}
    words = judged(facts(library={"cpu": cpu}))[1]
    assert (
        "haswell, of haswell, zen4; zen4 needs avx512f; a source install compiles for this CPU alone" in words
    )
    named = judged(facts(library={"cpu": {**cpu, "named": True}}))[1]
    assert "haswell, of haswell, zen4 (named by DRAFTWOOD_CPU)" in named
    cpu = {**CPU, "runs": None, "variants": {"native": 0}}
    assert "cpu code     none that runs here" in judged(facts(library={"cpu": cpu}))[1]


def test_doctor_names_a_wrong_pin():
    found, words = judged(facts(build={"pin_version": "1.2.4"}))
    assert "1.2.4, expected 1.2.3" in found[0]["found"]
    assert "reinstall" in found[0]["fix"]
    assert click.unstyle(words).startswith("broken: ")  # before what is in order
    found, _ = judged(facts(build={"pin_version": "1.2.4"}, library_override="/elsewhere"))
    assert found[0]["fix"] == "unset DRAFTWOOD_LIB_PATH"


def test_doctor_names_a_library_that_cannot_be_used():
    (found,), words = judged({**facts(), "library": {"error": "loading it ended the process with SIGILL"}})
    assert "SIGILL" in found["found"]
    assert "built for another CPU" in found["fix"]
    assert "SIGILL" in words


def test_doctor_names_a_missing_or_broken_server_and_rpc_backend():
    (found,), _ = judged(facts(server={"path": None, "runs": False}))
    assert "found no llama-server" in found["found"]
    (found,), _ = judged(facts(server={"path": "/bin/llama-server", "runs": False, "said": "no libllama"}))
    assert "/bin/llama-server does not run: no libllama" in found["found"]
    (found,), _ = judged(facts(rpc_server=None))
    assert "no ggml-rpc-server" in found["found"]
    (found,), _ = judged(facts(library={"rpc": False}))
    assert "does not load" in found["found"]
    assert judged(facts(library={"rpc": False}, build={"rpc": False}, rpc_server=None))[0] == []


def test_doctor_says_where_trees_are_without_a_model():
    assert reasons(facts())["draft trees"] == (True, "for qwen35 and qwen35moe files")
    other = reasons(facts(library={"without_tree_ops": ["Vulkan0"]}))["draft trees"]
    assert other == (True, "for qwen35 and qwen35moe files without layers on Vulkan0")


def reasons(given: dict[str, Any]) -> dict[str, tuple[bool, str]]:
    return {path["name"]: (path["on"], path["reason"]) for path in paths(given)}


def test_doctor_says_why_cuda_is_not_in_force():
    assert "not built in" in reasons(facts())["CUDA"][1]
    assert "no device answers" in reasons(facts(build={"cuda": True}))["CUDA"][1]
    gpu = {"name": "CUDA0", "type": "GPU", "backend": "CUDA"}
    with_gpu = reasons(
        facts(build={"cuda": True}, library={"devices": [{"type": "CPU", "name": "CPU"}, gpu]})
    )
    assert with_gpu["CUDA"] == (True, "CUDA0")
    assert "CUDA0" in with_gpu["row-exact kernels"][1]
    assert not reasons(facts(library={"devices": [gpu]}))["row-exact kernels"][0]
    for backend in ("RPC", "Vulkan"):
        other = {"name": f"{backend}0", "type": "GPU", "backend": backend}
        on, reason = reasons(facts(build={"cuda": True}, library={"devices": [other]}))["CUDA"]
        assert (on, "no device answers" in reason) == (False, True)


def test_doctor_says_why_the_cuda_library_does_not_load():
    missing = {"error": "libcudart.so.13: cannot open", "fix": "pip install it"}
    given = facts(build={"cuda": True}, library={"cuda": missing})
    assert problems(given) == [
        {"found": "the CUDA backend does not load: libcudart.so.13: cannot open", "fix": "pip install it"}
    ]
    assert "does not load: libcudart.so.13: cannot open (pip install it)" in reasons(given)["CUDA"][1]
    # a wheel with CUDA on a machine without a card is whole
    given = facts(
        build={"cuda": True}, library={"cuda": {"error": "libcuda.so.1: cannot open", "fix": "driver"}}
    )
    assert problems(given) == []
    assert "libcuda.so.1: cannot open (driver)" in reasons(given)["CUDA"][1]


def test_doctor_says_that_layers_stay_on_the_cpu_and_what_to_do():
    assert "layers on a GPU" not in reasons(facts())
    on, reason = reasons(facts(n_gpu_layers=-1))["layers on a GPU"]
    assert not on
    assert reason == 'all stay on the CPU: CUDA is not built in: CMAKE_ARGS="-DGGML_CUDA=on" when installing'
    reason = reasons(facts(n_gpu_layers=3, build={"cuda": True}))["layers on a GPU"][1]
    assert reason.startswith("all stay on the CPU: CUDA is built in, but no device answers: see nvidia-smi")
    for name, backend in (("CUDA0", "CUDA"), ("RPC0", "RPC")):
        device = {"name": name, "type": "GPU", "backend": backend}
        given = facts(n_gpu_layers=-1, library={"devices": [device]})
        assert reasons(given)["layers on a GPU"] == (True, name)
    given = facts(library={"no_layers_because": "this model takes 9 GiB"})  # where nobody said how many
    assert reasons(given)["layers on a GPU"] == (False, "this model takes 9 GiB")


MODEL_FACTS = {"path": "m.gguf", "architecture": "qwen35moe", "n_layer_nextn": 1, "n_tensors": 5,
               "file_bytes": 9 << 30, "n_files": 1,
               "drafter": "mtp", "drafter_path": None, "reason": "", "draft_tokens": 5,
               "smallest_n_batch": 7, "recurrent_snapshots": 0, "tree_refusal": "",
               "fused": {"layers": 40, "declined": [], "reason": ""}}  # fmt: skip


def test_doctor_says_what_drafts_for_a_model():
    model = MODEL_FACTS
    given = facts(library={"model": model})
    assert reasons(given)["MTP drafting"] == (True, "")
    assert "do not fit" in judged(given)[1]
    assert "5 tensors, 9.0 GiB\n" in judged(given)[1]
    given = facts(library={"model": {**model, "n_files": 3}})
    assert "5 tensors, 9.0 GiB in 3 files\n" in judged(given)[1]
    given = facts(library={"model": {**model, "drafter": "none", "reason": "found no MTP block"}})
    assert reasons(given)["MTP drafting"] == (False, "found no MTP block")
    assert "none: found no MTP block" in judged(given)[1]
    given = facts(library={"model": {**model, "drafter": "dflash", "drafter_path": "d.gguf"}})
    assert reasons(given)["DFlash drafting"] == (True, "")
    assert re.search(r"drafter +dflash, d\.gguf", judged(given)[1])


def test_doctor_says_which_layers_are_fused():
    assert "fused layers all 40 (on a CUDA card)\n" in judged(facts(library={"model": MODEL_FACTS}))[1]
    declined = [{"part": "experts", "layers": [3, 7], "reason": "X is Q3_K", "mend": "X"}]
    model = {**MODEL_FACTS, "fused": {"layers": 40, "declined": declined, "reason": ""}}
    words = judged(facts(library={"model": model}))[1]
    assert "fused layers 38 of 40 (on a CUDA card); llama.cpp computes these parts:\n" in words
    assert "\n             experts of layers 3, 7: X is Q3_K\n             hint: " in words


def test_doctor_says_how_a_round_is_verified():
    assert reasons(facts())["draft trees"][0]
    on, reason = reasons(facts(library={"model": MODEL_FACTS}))["draft trees"]
    assert on
    assert "only reads the recurrent state" in reason
    chain = {**MODEL_FACTS, "recurrent_snapshots": 5, "tree_refusal": "layers on CUDA0"}
    on, reason = reasons(facts(library={"model": chain}))["draft trees"]
    assert not on
    assert reason.endswith("chains, with 5 snapshots of the recurrent state: layers on CUDA0")
    for nothing in ({**MODEL_FACTS, "drafter": "none"}, {"error": "no GGUF", "hint": None}):
        assert not reasons(facts(library={"model": nothing}))["draft trees"][0]


def test_doctor_says_whether_a_load_has_flash_attention():
    cuda = {"name": "CUDA0", "description": "", "type": "GPU", "backend": "CUDA"}
    remote = {"name": "RPC0", "description": "", "type": "GPU", "backend": "RPC"}

    def flash(n_gpu_layers, *devices, model=MODEL_FACTS):
        given = facts(n_gpu_layers=n_gpu_layers, library={"devices": list(devices), "model": model})
        return reasons(given).get("flash attention")

    assert flash(-1, cuda, model=None) is flash(-1, cuda, model={"error": "x", "hint": None}) is None
    off = (False, "every layer is on the CPU; flash_attn=True turns it on")
    assert flash(0) == flash(0, cuda) == flash(-1) == off
    on, reason = flash(-1, cuda)
    assert on
    assert "llama.cpp's auto" in reason
    assert "CUDA0 has no kernel" in reason
    assert flash(-1, {**cuda, "name": "Vulkan0", "backend": "Vulkan"})[0]
    assert flash(-1, cuda, remote)[0] is flash(-1, remote)[0] is False
    assert "RPC servers are not asked" in flash(-1, remote)[1]


def test_doctor_counts_what_was_asked_for_and_refused_as_broken():
    refused = {"found": "no RPC server answers at a:1", "fix": "start one"}
    found, words = judged(facts(library={"refused": [refused]}))
    assert found == [refused]
    assert "no RPC server answers at a:1\nfix: start one" in words


def test_doctor_counts_a_drafter_that_does_not_fit_as_broken():
    refused = {"found": "the drafter reads layer 9", "fix": "another"}
    model = {**MODEL_FACTS, "drafter": "none", "drafter_path": "d.gguf", "reason": refused["found"]}
    given = facts(library={"model": {**model, "refused": [refused]}})
    assert judged(given)[0] == [refused]
    assert reasons(given)["DFlash drafting"] == (False, refused["found"])


def test_doctor_takes_a_drafter_for_a_model_only():
    result = invoke("doctor", "--drafter", "d.gguf")
    assert result.exit_code == 2
    assert "found --drafter without MODEL" in result.stderr


@pytest.mark.parametrize(
    ("kind", "words"), [("absent", "fails here"), ("ours", "draftwood (/x)"), ("stock", "0.3 (/x)")]
)
def test_doctor_says_whose_llama_cpp_it_is(kind, words):
    assert words in judged(facts(llama_cpp={"kind": kind, "path": "/x", "version": "0.3"}))[1]


def test_doctor_exits_with_1_only_if_something_is_broken(monkeypatch):
    monkeypatch.setattr(doctor_module, "examine", lambda wishes: facts())
    assert invoke("doctor").exit_code == 0
    monkeypatch.setattr(doctor_module, "examine", lambda wishes: facts(library={"rpc": False}))
    assert invoke("doctor").exit_code == 1


# ---- docs ----


def test_every_variable_that_the_code_reads_is_documented():
    reads = re.compile(r"""(?:environ(?:\.get)?|getenv)[\[(]\s*["'](\w+)["'](?!\] = )""")
    served = (serve_module._DRAFT_VARIABLES, serve_module.SOURCE_VARIABLES, serve_module._PAGE_VARIABLES)
    names = {*itertools.chain(*served), doctor_module._OVERRIDE}
    for folder, pattern in (("python", "*.py"), ("_build", "*.py"), ("tools", "*.py"), ("tests", "*.py"),
                            ("bench", "*.py"), ("src", "*.cpp")):  # fmt: skip
        for path in (ROOT / folder).rglob(pattern):
            names |= set(reads.findall(path.read_text("utf-8")))
    assert {"DRAFTWOOD_SDIST", "DRAFTWOOD_CACHE", "DRAFTWOOD_LIB_PATH", "LLAMA_ARG_MODEL"} <= names
    text = (ROOT / "docs" / "env.md").read_text("utf-8")
    assert {name for name in names if f"`{name}`" not in text} == set()
