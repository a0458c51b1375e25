"""The chat of `draftwood run` on a terminal, with the trained tiny model: turns, Ctrl-C, what is kept."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import struct
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from draftwood.cli.progress import Interrupt
from draftwood.cli.session import Report, Session

ROOT = Path(__file__).resolve().parents[2]
MODEL = str(ROOT / "models" / "tiny-moe" / "tiny-moe-f16.gguf")
COMMAND = [sys.executable, "-W", "error", "-W", "ignore::ResourceWarning", "-m", "draftwood", "run", MODEL]
PROMPT = r"\n>[ \x08]"
COMMAND += ["--threads", "1", "--temp", "0"]


class Screen:
    """A terminal with the chat on it."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self._child, self._master = pty.fork()
        if self._child == 0:
            ours = {"TERM": "xterm-256color", "NO_COLOR": "", "PROMPT_TOOLKIT_NO_CPR": "1",
                    "DRAFTWOOD_HISTORY": str(folder / "history")}  # fmt: skip
            fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("4H", 24, 160, 0, 0))
            os.execve(COMMAND[0], [*COMMAND, *arguments], {**os.environ, **ours})
        self.shown = self._left = ""

    def read(self, until: str, seconds: float = 120) -> str:
        """Return what was shown up to `until`, a pattern, colours left out."""
        deadline = time.monotonic() + seconds
        while not (found := re.search(until, self._left)):
            left = deadline - time.monotonic()
            assert left > 0, f"{until!r} was not shown: {self._left[-2000:]!r}"
            if select.select([self._master], [], [], left)[0]:
                block = os.read(self._master, 1 << 16).decode("utf-8", "replace")
                self.shown += block
                self._left += re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", block)
        read, self._left = self._left[: found.end()], self._left[found.end() :]
        return read

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def end(self) -> int:
        """Return the exit code once the program has left."""
        try:
            while select.select([self._master], [], [], 120)[0] and os.read(self._master, 1 << 16):
                pass
        except OSError:  # what Linux gives at the end of a terminal
            pass
        os.close(self._master)
        return os.waitstatus_to_exitcode(os.waitpid(self._child, 0)[1])


def test_two_turns_a_command_and_the_end(tmp_path):
    screen = Screen(tmp_path, "-n", "24", "--speculation", "mtp")
    screen.read(PROMPT)
    screen.type("def main():\r")
    screen.read(r"\d+ tokens, .*drafts accepted \(marked\).*chat prompt")
    screen.read(PROMPT)
    assert "\x1b[32m" in screen.shown  # what was accepted is green
    screen.type("and then?\r")
    screen.read(r"\d+ tokens, .*chat prompt")
    screen.read(PROMPT)
    screen.type("/sta\t")  # completed
    screen.read("/stats|ts")
    screen.type("\r")
    kept = re.search(r"of which (\d+) were kept", screen.read("drafts: .*tokens a round"))
    assert int(kept[1]) > 10
    screen.type(f"/save {tmp_path}/chat.json\r")
    screen.read("4 messages written")
    screen.read(PROMPT)
    screen.type("\x04")
    assert screen.end() == 0
    messages = json.loads((tmp_path / "chat.json").read_text("utf-8"))
    assert [each["role"] for each in messages] == ["user", "assistant"] * 2
    assert "+and then?" in (tmp_path / "history").read_text("utf-8")


def test_ctrl_c_ends_the_reply_and_not_the_program(tmp_path):
    # a context that takes minutes to fill: the reply is under way when Ctrl-C comes, however late
    screen = Screen(tmp_path, "--speculation", "mtp", "--n-ctx", "100000")
    screen.read(PROMPT)
    for line in ("for i in range(", "import os"):
        screen.type(f"{line}\r")
        screen.read(r"\n(.|\n){40}")
        screen.type("\x03")
        screen.read(r"\d+ tokens \(interrupted\), .*tok/s")
        screen.read(PROMPT)
    screen.type("\x03")  # at the prompt: drops the line
    screen.type("/exit\r")
    assert screen.end() == 0


def test_wrong_usage_of_a_chat_says_so(tmp_path):
    screen = Screen(tmp_path, "--json")
    screen.read("found --json in a chat")
    assert screen.end() == 2
    screen = Screen(tmp_path, "--raw")
    screen.read("found no prompt")
    assert screen.end() == 2


@pytest.fixture(params=["mtp", "off"])
def session(request) -> Iterator[Session]:
    made = Session(MODEL, Interrupt(), speculation=request.param, n_ctx=1024, n_threads=1, n_threads_batch=1,
                   verbose=False)  # fmt: skip
    yield made
    made.close()


def test_a_second_turn_keeps_the_first(session):
    def run(messages: list[dict[str, str]]) -> tuple[str, Report]:
        pieces: list[bytes] = []
        report = session.run(session.encode_chat(messages), 16, lambda piece, _: pieces.append(piece), temp=0)
        return b"".join(pieces).decode(), report

    messages = [{"role": "user", "content": "def main(argv):\n    return 1\n" * 4}]
    first, report = run(messages)
    assert report.prompt_evaluated == report.prompt_tokens
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "go on"}]
    second, again = run(messages)
    assert again.prompt_tokens > report.prompt_tokens
    assert 0 < again.prompt_evaluated < again.prompt_tokens - report.prompt_tokens // 2
    assert again.prompt_seconds > 0
    session.reset()
    assert run(messages)[0] == second
