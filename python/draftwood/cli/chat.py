"""The chat of `draftwood run` on a terminal: turns, commands, and what a session came to.

Knows nothing of terminals: lines come from a callable (terminal.py), text goes to a `Writer`.
Tests: tests/unit/test_cli_chat.py, tests/model/test_cli_chat.py.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from draftwood.errors import DraftwoodError

if TYPE_CHECKING:
    from draftwood.cli.session import Report, Session

COMMANDS = {
    "/help": "show the commands",
    "/reset": "forget the conversation",
    "/stats": "show the figures of this session",
    "/save FILE": "write the conversation; as JSON messages if FILE ends in .json",
    "/exit": "leave; Ctrl-D does too",
}
_KEYS = (
    "Enter sends. Alt-Enter, or a backslash at the end of a line, starts a new line.",
    "Ctrl-C ends a reply. A line that begins with // is sent with one slash.",
)
Line = Callable[[], str | None]
"""Gives what the user typed; None at the end, "" for a line that was dropped."""
Answer = Callable[[list[dict[str, str]]], "tuple[str, Report]"]
"""Generates and shows the reply to a conversation; gives its text and what it came to."""


@dataclass(slots=True)
class Totals:
    """Sums over the replies of a session."""

    replies: int = 0
    tokens: int = 0
    seconds: float = 0.0
    prompt_tokens: int = 0
    evaluated: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0

    def add(self, report: Report) -> None:
        """Count a reply."""
        self.replies += 1
        self.tokens += report.tokens
        self.seconds += report.seconds
        self.prompt_tokens += report.prompt_tokens
        self.evaluated += report.prompt_evaluated
        if report.stats is not None:
            self.rounds += report.stats.rounds
            self.drafted += report.stats.drafted
            self.accepted += report.stats.accepted

    def lines(self) -> list[str]:
        """Return the sums as text."""
        if not self.replies:
            return ["no replies yet"]
        speed = self.tokens / self.seconds if self.seconds > 0 else 0.0
        replies = "1 reply" if self.replies == 1 else f"{self.replies} replies"
        kept = self.prompt_tokens - self.evaluated
        found = [
            f"{replies}, {self.tokens} tokens, {speed:.1f} tok/s",
            f"prompts: {self.prompt_tokens} tokens, of which {kept} were kept from earlier turns",
        ]
        if self.drafted:
            mean = (self.accepted + self.rounds) / self.rounds
            found.append(
                f"drafts: {self.drafted} tokens, {self.accepted / self.drafted:.0%} accepted, "
                f"{mean:.2f} tokens a round"
            )
        return found


@dataclass(slots=True)
class Chat:
    """A conversation: reads lines, answers them, obeys commands."""

    line: Line
    answer: Answer
    messages: list[dict[str, str]] = field(default_factory=list)
    totals: Totals = field(default_factory=Totals)

    def run(self) -> None:
        """Go on until /exit or the end of the input."""
        while (line := self.line()) is not None:
            text = line.strip("\n")
            if not text.strip():
                continue
            if text.startswith("/") and not text.startswith("//"):
                if not self._obey(text.strip()):
                    return
            else:
                self._turn(text[1:] if text.startswith("//") else text)

    def _turn(self, text: str) -> None:
        asked = [*self.messages, {"role": "user", "content": text}]
        try:
            reply, report = self.answer(asked)
        except DraftwoodError as error:  # such as a full context: the turn did not take place
            hint = "/reset forgets the conversation"
            _say(f"{click.style('Error: ', fg='red')}{error.message}\nhint: {hint}")
            return
        self.totals.add(report)
        if report.tokens:  # Ctrl-C before the first token leaves nothing to go on from
            self.messages = [*asked, {"role": "assistant", "content": reply}]

    def _obey(self, line: str) -> bool:
        """Carry out a command; return whether to go on."""
        name, _, rest = line.partition(" ")
        if name == "/exit":
            return False
        if name == "/reset":
            self.messages = []
            _say("the conversation is forgotten")
        elif name == "/stats":
            _say("\n".join(self.totals.lines()))
        elif name == "/save":
            self._save(rest.strip())
        elif name == "/help":
            width = max(map(len, COMMANDS)) + 2
            _say("\n".join([*(f"{each:<{width}}{does}" for each, does in COMMANDS.items()), *_KEYS]))
        else:
            _say(f"found {name}; expected one of {', '.join(each.split()[0] for each in COMMANDS)}")
        return True

    def _save(self, name: str) -> None:
        if not name:
            _say("found no file name; expected /save FILE")
            return
        path = Path(name).expanduser()
        try:
            path.write_text(written(self.messages, as_json=path.suffix == ".json"), encoding="utf-8")
        except OSError as error:
            found = f"{path} cannot be written: {error.strerror or error}; expected a file that can"
            _say(f"{click.style('Error: ', fg='red')}{found}\nhint: /save FILE, in a folder that exists")
        else:
            _say(f"{len(self.messages)} messages written to {path}")


def written(messages: list[dict[str, str]], *, as_json: bool) -> str:
    """Return a conversation as JSON messages, or as text with a heading for each message."""
    if as_json:
        return json.dumps(messages, indent=1, ensure_ascii=False) + "\n"
    return "\n".join(f"## {each['role']}\n\n{each['content']}\n" for each in messages)


def _say(text: str) -> None:
    click.echo(text, err=True)


def converse(session: Session, options: dict[str, Any], line: Line, show: Callable[..., None]) -> None:
    """Chat with a loaded model until the user leaves.

    `show(report)` prints the figures of a reply. Errors: UnsupportedError if there is no chat template.
    """
    from draftwood.cli.run import SAMPLING, Writer

    sampling = {name: options[name] for name in SAMPLING}
    session.encode_chat([{"role": "user", "content": "?"}])  # an error now, not after the first line
    interrupt = session.interrupt

    def answer(messages: list[dict[str, str]]) -> tuple[str, Report]:
        pieces: list[bytes] = []
        session.reset_speculation_stats()
        interrupt.raised = False
        try:
            with Writer(marks=not options["no_mark"]) as writer:

                def emit(piece: bytes, from_draft: bool) -> None:
                    pieces.append(piece)
                    writer.write(piece, from_draft)

                tokens = session.encode_chat(messages)
                report = session.run(tokens, options["max_tokens"], emit, **sampling)
            show(report, marked=writer.marking)
        finally:
            interrupt.raised = False
        return b"".join(pieces).decode("utf-8", "ignore"), report

    interrupt.patient = True
    with contextlib.suppress(KeyboardInterrupt):  # between two lines
        Chat(line, answer).run()
