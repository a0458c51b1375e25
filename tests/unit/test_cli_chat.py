"""The chat of `draftwood run` without a model: commands, the conversation, the line editor."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from typing import Any

import pytest
from draftwood.cli.chat import COMMANDS, Chat, Totals
from draftwood.cli.progress import Interrupt
from draftwood.cli.session import Report
from draftwood.cli.terminal import history_file, reader
from draftwood.errors import ContextFullError
from draftwood.stats import SpeculationStats
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput


def stats(rounds: int, drafted: int, accepted: int) -> SpeculationStats:
    values: dict[str, Any] = dict.fromkeys(SpeculationStats.__dataclass_fields__, 0)
    return SpeculationStats(**{**values, "rounds": rounds, "drafted": drafted, "accepted": accepted})


class Model:
    """Answers in capitals and keeps what it was asked."""

    def __init__(self, tokens: int = 4) -> None:
        self.asked: list[list[dict[str, str]]] = []
        self.tokens = tokens

    def __call__(self, messages: list[dict[str, str]]) -> tuple[str, Report]:
        self.asked.append(messages)
        if messages[-1]["content"] == "too long":
            raise ContextFullError("the prompt has 900 tokens", hint="--n-ctx 1200")
        report = Report(self.tokens, 2.0, prompt_tokens=10, prompt_evaluated=3, stats=stats(4, 8, 2))
        return messages[-1]["content"].upper(), report


def chat(*lines: str, model: Model | None = None) -> tuple[Chat, Model]:
    model, typed = model or Model(), iter([*lines, None])
    made = Chat(lambda: next(typed), model)
    made.run()
    return made, model


def test_each_turn_is_asked_behind_the_ones_before():
    made, model = chat("one", "", "  \n", "two\nlines")
    assert model.asked[1] == [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "ONE"},
        {"role": "user", "content": "two\nlines"},
    ]
    assert made.messages[-1] == {"role": "assistant", "content": "TWO\nLINES"}


def test_reset_forgets_and_exit_leaves(capsys):
    made, model = chat("one", "/reset", "two", "/exit", "three")
    assert [len(each) for each in model.asked] == [1, 1]
    assert made.totals.replies == 2
    assert "the conversation is forgotten" in capsys.readouterr().err


def test_a_turn_that_failed_or_gave_nothing_did_not_take_place(capsys):
    made, _ = chat("one", "too long")
    assert [each["content"] for each in made.messages] == ["one", "ONE"]
    assert "Error: the prompt has 900 tokens\nhint: /reset forgets" in capsys.readouterr().err
    assert chat("one", model=Model(tokens=0))[0].messages == []


def test_two_slashes_send_one():
    assert chat("//help me")[1].asked[0][-1]["content"] == "/help me"


def test_help_and_unknown_commands_name_all(capsys):
    chat("/help", "/what now", "/save")
    shown = capsys.readouterr().err
    for name in COMMANDS:
        assert name in shown
    assert "found /what; expected one of /help, /reset, /stats, /save, /exit" in shown
    assert "expected /save FILE" in shown


def test_stats_are_sums_over_the_session(capsys):
    chat("/stats", "one", "two", "/reset", "/stats")
    before, _, after = capsys.readouterr().err.partition("the conversation is forgotten\n")
    assert before == "no replies yet\n"
    assert after.splitlines() == [
        "2 replies, 8 tokens, 2.0 tok/s",
        "prompts: 20 tokens, of which 14 were kept from earlier turns",
        "drafts: 16 tokens, 25% accepted, 1.50 tokens a round",
    ]
    assert Totals().lines() == ["no replies yet"]


def test_save_writes_text_or_messages(tmp_path, capsys):
    text, messages = tmp_path / "chat.md", tmp_path / "chat.json"
    chat("ä", f"/save {text}", f"/save {messages}", f"/save {tmp_path}")
    assert text.read_text("utf-8") == "## user\n\nä\n\n## assistant\n\nÄ\n"
    assert json.loads(messages.read_text("utf-8"))[1] == {"role": "assistant", "content": "Ä"}
    shown = capsys.readouterr().err
    assert f"2 messages written to {messages}" in shown
    assert (
        f"{tmp_path} cannot be written: Is a directory; expected a file that can\nhint: /save FILE" in shown
    )
    assert "Errno" not in shown


# ---- the line editor ----


@pytest.fixture
def typed(tmp_path, monkeypatch) -> Iterator[Any]:
    """typed(keys) -> what each read of the editor gives, up to its end."""
    monkeypatch.setenv("DRAFTWOOD_HISTORY", str(tmp_path / "deep" / "history"))

    def read(keys: str) -> list[str]:
        with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
            pipe.send_text(keys + "\x04")
            return list(iter(reader(COMMANDS), None))

    return read


def test_enter_sends_and_ctrl_d_ends(typed):
    assert typed("one\rtwo\r") == ["one", "two"]


@pytest.mark.parametrize("keys", ["one\x1b\rtwo\r", "one\\\rtwo\r", "\x1b[200~one\ntwo\x1b[201~\r"])
def test_a_message_of_two_lines(typed, keys):
    assert typed(keys) == ["one\ntwo"]


def test_ctrl_c_drops_a_line_and_goes_on(typed):
    assert typed("one\x03two\r") == ["", "two"]


def test_history_lasts_longer_than_a_session(typed):
    typed("one\rtwo\r")
    assert typed("\x1b[A\x1b[A\r") == ["one"]
    assert stat.S_IMODE(history_file().stat().st_mode) == 0o600


def test_history_lies_in_the_state_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("DRAFTWOOD_HISTORY", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert history_file() == tmp_path / "draftwood" / "history"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert history_file() == tmp_path / ".local" / "state" / "draftwood" / "history"


def test_a_folder_that_cannot_be_written_costs_the_history_only(typed, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DRAFTWOOD_HISTORY", str(tmp_path / "file" / "history"))
    assert typed("one\r") == ["one"]


def test_a_patient_interrupt_never_raises_by_itself():
    interrupt = Interrupt()
    interrupt.patient = True
    for _ in range(3):
        interrupt._on_signal(2, None)
    assert interrupt.raised
    interrupt.patient = False
    with pytest.raises(KeyboardInterrupt):
        interrupt._on_signal(2, None)
