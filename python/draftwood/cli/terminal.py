"""The line editor of a chat: history across sessions, several lines, Ctrl-C and Ctrl-D.

Test: tests/unit/test_cli_chat.py.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any


def on_terminal() -> bool:
    """Tell whether a person types and reads: stdin and stdout are terminals."""
    return sys.stdin.buffer.isatty() and sys.stdout.isatty()


def history_file() -> Path:
    """Return where lines are kept: `DRAFTWOOD_HISTORY`, or `draftwood/history` in the user's state folder."""
    if named := os.environ.get("DRAFTWOOD_HISTORY"):
        return Path(named)
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "draftwood" / "history"


def _history() -> Any:
    """Return the history in its file, readable by the user alone; in memory if it cannot be written."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    try:
        path = history_file()
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600))
    except (OSError, RuntimeError):  # RuntimeError: no home folder
        return InMemoryHistory()
    return FileHistory(str(path))


def _bindings() -> Any:
    from prompt_toolkit.key_binding import KeyBindings

    bindings = KeyBindings()

    @bindings.add("enter")
    def send(event: Any) -> None:
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def new_line(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    return bindings


def reader(commands: Iterable[str], **settings: Any) -> Callable[[], str | None]:
    """Return a function that reads a line with an editor: None at Ctrl-D, "" at Ctrl-C.

    `settings` go to prompt_toolkit's PromptSession.
    """
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter

    session: Any = PromptSession(
        history=_history(),
        multiline=True,
        prompt_continuation="  ",
        key_bindings=_bindings(),
        completer=WordCompleter([each.split()[0] for each in commands], sentence=True),
        complete_while_typing=False,
        **settings,
    )

    def line() -> str | None:
        try:
            text: str = session.prompt("> ")
        except EOFError:
            return None
        except KeyboardInterrupt:
            return ""
        return text

    return line
